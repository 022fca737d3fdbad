"""What the training loop costs beside the network: a step against a bare torch loop, and the loader's share.

    python benchmarks/training_loop.py [--steps 30] [--rounds 5] [--threads N] [--device cpu]

A ResNet20 (width 16, 32 x 32 pixels, batches of 128) with ProxSPS, on synthetic images. The bare loop has
its batches ready in memory as normalised floats and does nothing but forward, backward and step. Ours makes each batch
(gather, crop, mirror, normalise), steps, and records zeta. Both take turns, from the same weights; of each round the
median step counts, and of the rounds the median ratio. The loader alone makes the batches of a whole epoch.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable

import torch
from step_time import synchronize
from torch.nn.functional import cross_entropy

from proxsps import ProxSPS
from proxsps.problems.vision import ImageClassification
from proxsps.sweep.spec import RunSpec
from proxsps.training import Watch
from proxsps.training.loop import ImageRun
from proxsps.training.ranks import TrainingRanks, epoch_batches

PROBLEM = ImageClassification(data="synthetic", depth=20)
SPEC = RunSpec(PROBLEM, "prox-sps", "sqrt", 1.0, 5e-4, 0, 1)


class Clock(Watch):
    """Times of single steps, and an end after so many of them."""

    def __init__(self, steps: int) -> None:
        self.steps, self.marks = steps, [time.perf_counter()]

    def step(self, epoch: int, loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Note the time."""
        synchronize()
        self.marks.append(time.perf_counter())
        if len(self.marks) > self.steps:
            raise StopIteration

    def median(self) -> float:
        """The median step."""
        return statistics.median(b - a for a, b in itertools.pairwise(self.marks))


def ours(steps: int, ranks: TrainingRanks) -> float:
    """Median seconds of a step of our loop."""
    run, clock = ImageRun(SPEC, ranks), Clock(steps)
    try:
        while True:
            run.epoch(clock)
            run.done = 0  # the same epoch again
    except StopIteration:
        return clock.median()


def bare(steps: int, ranks: TrainingRanks) -> float:
    """Median seconds of a step of a loop that has its batches ready."""
    batches = list(epoch_batches(PROBLEM, 0, 0, ranks))
    model = PROBLEM.network().to(ranks.device, memory_format=torch.channels_last)
    optimizer = ProxSPS(model.parameters(), 1.0, 5e-4)
    clock = Clock(steps + 1)
    for images, labels in itertools.islice(itertools.cycle(batches), steps):
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step(loss=loss)
        clock.step(0, loss, optimizer)
    return clock.median()


def loader(ranks: TrainingRanks) -> float:
    """Seconds to make a batch, the mean over an epoch."""
    started = time.perf_counter()
    count = sum(1 for _ in epoch_batches(PROBLEM, 0, 0, ranks))
    return (time.perf_counter() - started) / count


def rounds(count: int, *measures: Callable[[], float]) -> list[list[float]]:
    """Each measure in turn, several times; a row a round."""
    return [[measure() for measure in measures] for _ in range(count)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="steps of each loop in a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    options = parser.parse_args()
    ranks = TrainingRanks(torch.device(options.device))
    if min(options.steps, options.rounds, options.threads) < 1:
        parser.error("--steps, --rounds and --threads must be at least 1")
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} threads, {os.cpu_count()} CPUs, {platform.machine()}\n")
    ours(2, ranks)
    measures = lambda: ours(options.steps, ranks), lambda: bare(options.steps, ranks), lambda: loader(ranks)
    rows = rounds(options.rounds, *measures)
    mine, theirs, loading = (statistics.median(column) for column in zip(*rows, strict=True))
    overhead = statistics.median(a / b - 1 for a, b, _ in rows)
    share = statistics.median(c / a for a, _, c in rows)
    print("| ResNet20, width 16, 32 x 32, batch 128, ProxSPS | value | bar |\n| --- | ---: | ---: |")
    print(f"| step of a bare torch loop, batches ready | {1e3 * theirs:.1f} ms | |")
    print(f"| step of our loop | {1e3 * mine:.1f} ms | |")
    print(f"| overhead | {overhead:+.1%} | <= 5 % |")
    print(f"| making a batch | {1e3 * loading:.1f} ms | |")
    print(f"| share of data loading in an epoch | {share:.1%} | <= 5 % |")


if __name__ == "__main__":
    main()
