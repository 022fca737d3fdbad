"""Many runs as one tensor program: parameters carry a leading axis of runs, and one step moves all of them.

The losses of all runs are one `vmap`, their gradients one backward pass, and the step is that of `proxsps.runs`,
written in place. Runs share nothing: a run that diverges does not change the others.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap
from torch.linalg import vecdot

import proxsps
from proxsps import _sealed, runs
from proxsps.core.estimate import coupled_value
from proxsps.core.rules import Decision, Model, dec_sps, linear, start_memory
from proxsps.core.step import prox_coefficients
from proxsps.methods import Method, load
from proxsps.regularizers import Regularizer
from proxsps.sweep.files import MAKE_ROOM, StoreError
from proxsps.sweep.spec import METRICS, RunResult, RunSpec, alpha_of_epoch, batches, digest, median_zeta, method_digest

SAMPLES = 32_768  # samples of all runs that are evaluated at a time: intermediate arrays stay in the cache
LARGE = 200_000  # entries of all runs together from which several threads share the work of an operation
BETAS, EPS = (0.9, 0.999), 1e-8  # AdamW, torch's defaults
FORMAT = 4  # of saved states
EVERY = 30.0  # seconds between two saves

State = dict[str, Any]  # of tensors and numbers


class SavedBatch:
    """The state of a running batch on disk, so that a kill costs half a minute, not the whole batch.

    One file for one batch of specs, run by this version of the package and of torch. A file that is damaged or holds
    other objects is ignored: the batch is then run from its start, to the same result.
    """

    def __init__(self, folder: Path, specs: Sequence[RunSpec], every: float = EVERY) -> None:
        facts = (FORMAT, proxsps.__version__, str(torch.__version__), *(spec.id for spec in specs))
        self.file, self.every, self.last = folder / f"{digest(facts)}.pt", every, time.monotonic()

    def is_due(self) -> bool:
        """Whether the last save was long enough ago."""
        return time.monotonic() - self.last >= self.every

    def save(self, state: State) -> None:
        """Replace the file."""
        try:
            _sealed.write(self.file, state)
        except OSError as error:
            raise StoreError(f"Cannot write {self.file}: {error.strerror or error}. {MAKE_ROOM}") from None
        self.last = time.monotonic()  # so that slow disks do not spend all their time on saves

    def load(self) -> State | None:
        """What was saved, or None."""
        with suppress(OSError, _sealed.SealError):
            return dict(_sealed.read(self.file))
        return None

    def remove(self) -> None:
        """Delete the batch; its results are in the store."""
        with suppress(OSError):  # the folder has other batches, or does not exist
            self.file.unlink(missing_ok=True)
            self.file.parent.rmdir()


def run_batched(
    specs: Sequence[RunSpec], advance: Callable[[int], None] = lambda epochs: None, saved: SavedBatch | None = None
) -> list[RunResult]:
    """Run all specs, which share problem and epochs, together.

    `advance` is called with the number of runs after every epoch. With `saved`, the state is saved from time to time,
    and the run continues from a saved state.
    """
    if len({(spec.problem, spec.epochs) for spec in specs}) != 1:
        raise ValueError("Runs of one batch must share their problem and number of epochs.")
    if free := sorted({spec.method for spec in specs if spec.definition.rateless}):
        raise ValueError(f"Runs of {' and '.join(free)} cannot be batched: use the engine single or processes.")
    _check_names(specs)
    program = _Program(specs)
    first, step = program.restore(saved.load() if saved else None)
    if first:
        advance(first * len(specs))
    threads = torch.get_num_threads()
    # Small arrays gain nothing from several threads, so one thread trains while another evaluates.
    share = threads if is_large(specs) else 1
    torch.set_num_threads(share)
    try:
        with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(share,)) as evaluator:
            records: list[Future[None]] = []

            def save(epoch: int, step: int) -> None:
                if saved is not None and saved.is_due():
                    for record in records:
                        record.result()
                    saved.save({"epoch": epoch, "step": step, **program.state()})

            for epoch in range(first, specs[0].epochs):
                program.run_epoch(epoch, step if epoch == first else 0, save)
                records.append(evaluator.submit(program.record, epoch, program.x.clone()))
                for record in records[:-1] if program.problem.reentrant and len(records) > 1 else records:
                    record.result()  # an error is raised here
                del records[:-1]
                advance(len(specs))
            records[-1].result()
    finally:
        torch.set_num_threads(threads)
    return program.results()


def is_large(specs: Sequence[RunSpec]) -> bool:
    """Whether all runs together have so many parameters that several threads share an operation."""
    return len(specs) * sum(x.numel() for x in specs[0].problem.start().values()) >= LARGE


class _Program:
    """The state of all runs: parameters, the memories of DecSPS and AdamW, and what was recorded."""

    def __init__(self, specs: Sequence[RunSpec]) -> None:
        self.specs, self.problem = specs, specs[0].problem
        count, epochs, steps = len(specs), specs[0].epochs, self.problem.steps_per_epoch
        start = self.problem.start()
        self.shapes = {name: x.shape for name, x in start.items()}
        self.x = torch.cat([x.flatten() for x in start.values()]).repeat(count, 1)  # (runs, parameters)
        self.grad = torch.empty_like(self.x)
        # Strengths of the squared l2 norm; other regularisers are those of `penalties`.
        self.lam = self._column([spec.weight_decay if spec.regularizer is None else 0.0 for spec in specs])
        self.penalties = _grouped_penalties(specs)
        methods = [spec.method for spec in specs]
        self.is_method = {name: torch.tensor([name == own for own in methods]) for name in dict.fromkeys(methods)}
        self.rules: dict[str, runs.Rule] = {
            spec.method: load(rule) if isinstance(rule := spec.definition.rule, str) else rule
            for spec in specs
            if spec.method not in ("adamw", "dec-sps")
        }
        self.coupled, self.bounded, self.guarded = (
            torch.tensor([getattr(spec.definition, fact) for spec in specs])
            for fact in ("coupled", "bounded", "guarded")
        )
        self.is_adam = torch.tensor([method == "adamw" for method in methods])
        self.adam = self.is_adam.nonzero().squeeze(1)
        self.moments = {name: torch.zeros_like(self.x[self.adam]) for name in ("first", "second")}
        # AdamW's decay is not multiplied by its learning rate.
        self.adam_decay = self.lam[self.adam] / self._column([spec.lr for spec in specs])[self.adam]
        self.coupled_lam, self.any_coupled = torch.where(self.coupled, self.lam, 0.0), bool(self.coupled.any())
        self.seeds = sorted({spec.seed for spec in specs})
        self.seed_of = torch.tensor([self.seeds.index(spec.seed) for spec in specs])
        validation = zip(*(self.problem.validation_data(seed) for seed in self.seeds), strict=True)
        self.validation = [torch.stack(arrays)[self.seed_of] for arrays in validation]
        self.memory = start_memory(self.lam[:, None])  # of DecSPS
        self.metrics = np.full((epochs, count, len(METRICS) + 1), np.nan)  # and the share of entries that are not 0
        self.zetas = np.full((epochs, steps, count), np.nan, dtype=np.float32)

    def _column(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=self.x.dtype)

    def state(self) -> State:
        """Everything that later steps and results depend on, except the numbers of epochs and steps."""
        recorded = {"metrics": torch.from_numpy(self.metrics), "zetas": torch.from_numpy(self.zetas)}
        return {"x": self.x, **self.memory._asdict(), **self.moments, **recorded}

    def restore(self, saved: State | None) -> tuple[int, int]:
        """Load a state, if there is one; returns its number of epochs, and of steps of the next epoch."""
        if saved is None:
            return 0, 0
        for name, tensor in self.state().items():
            tensor.copy_(saved[name])
        return saved["epoch"], saved["step"]

    def run_epoch(self, epoch: int, first: int, save: Callable[[int, int], None]) -> None:
        """The steps of an epoch from `first` on; `save` is called after each."""
        alpha = self._column([alpha_of_epoch(spec, epoch, self.zetas[:, :, i]) for i, spec in enumerate(self.specs)])
        orders = [batches(self.problem, seed, epoch) for seed in self.seeds]
        data, before = self.problem.train_data(), epoch * self.problem.steps_per_epoch
        for step, indices in itertools.islice(enumerate(zip(*orders, strict=True)), first, None):
            by_seed = torch.from_numpy(np.stack(indices))  # (seeds, batch size)
            batch = [array[by_seed][self.seed_of] for array in data]
            self.zetas[epoch, step] = self._step(batch, alpha, before + step).numpy()
            save(epoch, step + 1)

    def _step(self, batch: Sequence[Tensor], alpha: Tensor, k: int) -> Tensor:
        """Step k, counted from 0, of every run; the adaptive steps zeta, NaN for methods without."""
        x = self.x
        values, d = self._value_and_grad(batch)
        if len(self.adam):
            self._step_adam(d[self.adam], alpha[self.adam], k + 1)
        lam = self.coupled_lam
        d.addcmul_(lam[:, None], x)
        gap = values - self.problem.lower_bound
        for phi, _, coupled, rows in self.penalties:
            if coupled:
                d[rows] += phi.subgradient(x[rows])
                gap = gap.index_add(0, rows, _values(phi, x[rows]))
        d_sq, d_dot_x = vecdot(d, d), vecdot(d, x)
        if self.any_coupled:
            gap = coupled_value(gap, vecdot(x, x)[:, None], lam[:, None])
        bad = self.guarded & ~torch.isfinite(gap + d_sq) | self.bounded & (gap < 0)
        ok = ~(bad | self.is_adam)
        root, u, _, _ = self._decide(runs.line_model(gap, d_sq, d_dot_x, alpha, self.lam - lam), ok)
        keep, move, _ = prox_coefficients(u, alpha, self.lam - lam)
        keep, move = torch.where(ok, keep, 1.0), torch.where(ok, move, 0.0)
        if bad.any():
            d.masked_fill_(bad[:, None], 0.0)  # 0 * NaN would be NaN
        gap = gap.masked_fill(bad, 0.0)
        moves = [
            (rows, *runs.step(x[rows], gap[rows], d[rows], alpha[rows], phi, self.rules[method]))
            for phi, method, coupled, rows in self.penalties
            if not coupled
        ]
        x.mul_(keep[:, None]).addcmul_(move[:, None], d)
        for rows, points, decision in moves:
            fine = ok[rows]
            x[rows] = torch.where(fine[:, None], points, x[rows])
            root[rows] = torch.where(fine, decision.root, root[rows])
        return torch.where(ok & self.bounded, alpha * root.clamp_min(0.0), torch.nan)

    def _step_adam(self, g: Tensor, lr: Tensor, k: int) -> None:
        """Step k, counted from 1, of the runs of AdamW."""
        first, second = self.moments.values()
        first.lerp_(g, 1 - BETAS[0])
        second.mul_(BETAS[1]).addcmul_(g, g, value=1 - BETAS[1])
        scale = (second / (1 - BETAS[1] ** k)).sqrt_().add_(EPS)
        move = lr[:, None] / (1 - BETAS[0] ** k) * first / scale
        self.x[self.adam] = self.x[self.adam] * (1 - lr[:, None] * self.adam_decay[:, None]) - move

    def _value_and_grad(self, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Loss and gradient of every run on its batch: losses by vmap, gradients by one backward pass of their sum."""
        leaves = {name: part.detach().requires_grad_() for name, part in self._named(self.x).items()}
        values = vmap(self.problem.loss)(leaves, *batch)
        grads = torch.autograd.grad(values.sum(), list(leaves.values()))
        return values.detach(), torch.cat([grad.flatten(1) for grad in grads], dim=1, out=self.grad)

    def _named(self, x: Tensor) -> dict[str, Tensor]:
        """Views of the rows as named parameters with a leading axis of runs."""
        parts = torch.split(x, [shape.numel() for shape in self.shapes.values()], dim=1)
        return {
            name: part.reshape(len(part), *shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }

    def _decide(self, model: Model, ok: Tensor) -> Decision:
        """The decision of every run by the rule of its method: runs without a lower bound step by their cap."""
        decisions = {method: rule(model) for method, rule in self.rules.items() if rule is not linear}
        if "dec-sps" in self.is_method:
            decisions["dec-sps"], self.memory = dec_sps(model, self.memory, ok)
        return runs.select([self.is_method[method] for method in decisions], list(decisions.values()), linear(model))

    def record(self, epoch: int, x: Tensor) -> None:
        """The metrics of every run after an epoch that ended at x."""
        data, params = self.problem.train_data(), self._named(x)
        chunk = max(1, SAMPLES // len(data[0]))
        train = vmap(self.problem.loss, in_dims=(0, *[None] * len(data)), chunk_size=chunk)(params, *data)
        error = vmap(self.problem.validation_error, chunk_size=chunk)(params, *self.validation)
        square = vecdot(x, x)
        objective = coupled_value(train, square[:, None], self.lam[:, None])
        for phi, _, _, rows in self.penalties:
            objective = objective.index_add(0, rows, _values(phi, x[rows]))
        found = [t.double().numpy() for t in (objective, train, error, square.sqrt())]
        nonzeros = torch.count_nonzero(x, dim=1).numpy() / x.shape[1]
        metrics = np.stack([*found, median_zeta(self.zetas[epoch]), nonzeros], axis=1)
        gone = ~np.isfinite(metrics[:, 0])
        if epoch:
            gone |= ~np.isfinite(self.metrics[epoch - 1, :, 0])
        metrics[gone] = np.nan
        self.metrics[epoch] = metrics

    def results(self) -> list[RunResult]:
        """One result for each run, in order; the share of nonzeros is kept for regularisers that make zeros."""
        found = []
        for i, spec in enumerate(self.specs):
            extra = {} if spec.regularizer is None else {"nonzeros": self.metrics[:, i, -1]}
            found.append(RunResult(spec, self.metrics[:, i, :-1], self.zetas[:, :, i], extra))
        return found


def _check_names(specs: Sequence[RunSpec]) -> None:
    """Raise an error if a name stands for two methods: in a batch, as in tables, methods are told apart by names."""
    known: dict[str, Method] = {}
    for spec in specs:
        first = known.setdefault(spec.method, spec.definition)
        if first is not spec.definition and method_digest(first) != method_digest(spec.definition):
            raise ValueError(f"Different methods have the name {spec.method!r}: give each a name of its own.")


def _grouped_penalties(specs: Sequence[RunSpec]) -> list[tuple[Regularizer, str, bool, Tensor]]:
    """Regularisers other than the squared l2 norm, with a method, whether it is coupled, and the rows of its runs."""
    rows: defaultdict[tuple[Regularizer, str, bool], list[int]] = defaultdict(list)
    for i, spec in enumerate(specs):
        if spec.regularizer is not None:
            rows[spec.phi, spec.method, spec.definition.coupled].append(i)
    return [(*key, torch.tensor(found)) for key, found in rows.items()]


def _values(phi: Regularizer, x: Tensor) -> Tensor:
    """One value for each row."""
    values: Tensor = vmap(phi.value)(x) if phi.traceable else torch.stack([phi.value(row) for row in x])
    return values
