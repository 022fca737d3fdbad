"""How many prox evaluations a ProxSPS step takes when it has to search for the dual variable.

    python benchmarks/prox_evaluations.py [--problems 400] [--device cpu]

Random single steps in f32 (relative tolerance 1e-7): sizes from 10 to 100,000, caps and strengths over four decades;
gradients independent of the parameters, along them or against them; sparse parameters, heavy tails, entries of all
scales. The gap is drawn so that the root lies inside; steps that end at u = 0 or u = 1 need no search and are left out.
Every evaluation counts, those at u = 1 and u = 0 included. The last column is bisection to the same tolerance. On a
device other than the CPU the search makes a fixed number of evaluations.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from proxsps import (
    L1,
    Box,
    ElasticNet,
    GroupLasso,
    L1Ball,
    L2Ball,
    NonNegative,
    NuclearNorm,
    ProxSPS,
    Regularizer,
    Simplex,
    SparseGroupLasso,
    TotalVariation1D,
)
from proxsps.core.dual import SINGLE

COLUMNS = 5  # entries of a group
KINDS = ("independent", "along", "against", "sparse", "heavy", "scales")


def draw(kind: str, rows: int) -> tuple[Tensor, Tensor]:
    """Parameters and a gradient of shape (rows, COLUMNS)."""
    shape = (rows, COLUMNS)
    x, d = torch.randn(shape), torch.randn(shape)
    if kind == "along":
        d = x + 0.3 * d
    elif kind == "against":
        d = -x + 0.3 * d
    elif kind == "sparse":
        x = x * (torch.rand(shape) < 0.1)
    elif kind == "heavy":
        x, d = (torch.distributions.Cauchy(0.0, 1.0).sample(shape) for _ in range(2))
    elif kind == "scales":
        x, d = x * 10 ** (4 * torch.rand(shape) - 3), d * 10 ** (4 * torch.rand(shape) - 3)
    return x, d


def height(phi: Regularizer, x: Tensor, d: Tensor, alpha: float, u: float) -> float:
    """<d, y(u) - x> in f64."""
    x, d = x.double(), d.double()
    return float(torch.sum(d * (phi.prox(x - u * alpha * d, alpha) - x)))


def bisections(phi: Regularizer, x: Tensor, d: Tensor, alpha: float, gap: float) -> int:
    """Evaluations of bisection, the two ends included."""
    low, high, count = 0.0, 1.0, 2
    while count < 60:
        u = (low + high) / 2
        h, count = gap + height(phi, x, d, alpha, u), count + 1
        if max((1 - u) * h, -u * h) <= SINGLE * gap:
            break
        low, high = (u, high) if h > 0 else (low, u)
    return count


def problem(phi_of: Callable[[float], Regularizer], index: int, device: str) -> tuple[int, int] | None:
    """Evaluations of one random step and of bisection; None where the step needs no search."""
    torch.manual_seed(index)
    rows = (2, 20, 200, 20_000)[index % 4]
    x, d = (t.to(device) for t in draw(KINDS[index // 4 % len(KINDS)], rows))
    alpha, strength = (10 ** (4 * torch.rand(2) - 2)).tolist()
    phi = phi_of(strength)
    ends = [height(phi, x, d, alpha, u) for u in (0.0, 1.0)]
    gap = -(ends[0] + float(torch.rand(())) * (ends[1] - ends[0]))
    if not gap > 0:
        return None
    x.requires_grad_()
    x.grad = d
    opt = ProxSPS([x], lr=alpha, regularizer=phi)
    before = x.detach().clone()
    opt.step(loss=gap)
    if opt.last_step.branch_name != "inside":
        return None
    return int(opt.last_step.evaluations), bisections(phi, before, d, alpha, gap)


REGULARIZERS = {
    "L1": lambda s: L1(s),
    "ElasticNet": lambda s: ElasticNet(s, s),
    "GroupLasso": lambda s: GroupLasso.rows(s),
    "SparseGroupLasso": lambda s: SparseGroupLasso(s / 2, s, dims=(1,)),
    "NonNegative": lambda s: NonNegative(),
    "Box": lambda s: Box(-s, s),
    "L1Ball": lambda s: L1Ball(s),
    "L2Ball": lambda s: L2Ball(s),
    "Simplex": lambda s: Simplex(s),
    "TotalVariation1D": lambda s: TotalVariation1D(s),
    "NuclearNorm": lambda s: NuclearNorm(s),
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=400, help="random steps per regulariser (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="where the parameters live (default: %(default)s)")
    options = parser.parse_args()
    count, device = options.problems, options.device
    print("| regulariser | searches | median | 95 % | worst | bisection, median |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, phi_of in REGULARIZERS.items():
        pairs = [pair for i in range(count) if (pair := problem(phi_of, i, device)) is not None]
        ours = sorted(pair[0] for pair in pairs)
        plain = statistics.median(pair[1] for pair in pairs)
        tail = ours[int(0.95 * (len(ours) - 1))]
        print(f"| {name} | {len(ours)} | {statistics.median(ours):g} | {tail} | {ours[-1]} | {plain:g} |", flush=True)


if __name__ == "__main__":
    main()
