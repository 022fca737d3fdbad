"""Sentences of the paper on the norm of a network's weights, checked by numbers: at the end, and early in training.

At lambda = 5e-4 the published weights of AdamW are smaller than those of ProxSPS in the epochs 2 to 38 (ResNet56) and 2
to 64 (ResNet110), and larger afterwards. A run of a few epochs can only be compared with these.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from proxsps.experiments.base import Frames
from proxsps.experiments.deep_claims import ALL, WORKS, accuracies, by_seed, final, largest_strength
from proxsps.experiments.sentences import SURE, Found, labelled, lower_bound, lower_bounds, require_finite, states


@states(
    "final norm of ProxSPS's weights over the smaller one of SPS's and AdamW's, {which} lambda",
    f"below 1, {SURE}; of ProxSPS every accuracy above {{floor:.0%}}",
    needs=ALL,
)
def smaller_norm(frames: Frames, floor: float = WORKS, which: str = "every") -> tuple[str, bool]:
    """ProxSPS produces smaller weights in the trained network."""
    runs = largest_strength(frames["runs"]) if which == "largest" else frames["runs"]
    require_finite(runs, "model_norm", ALL)
    require_finite(runs, "val_error", ("prox-sps",))
    norms = np.log(by_seed(runs, "model_norm"))
    bound = lower_bounds(norms[["sps", "adamw"]].min(axis=1) - norms["prox-sps"])
    worst, table = bound.idxmin(), final(runs, "model_norm")
    ratio = table["prox-sps"] / table[["sps", "adamw"]].min(axis=1)
    trained = accuracies(runs)["prox-sps"].min()
    return (
        f"{ratio[worst]:.3f}, 95 % upper bound {np.exp(-bound.min()):.3f}, at lambda = {worst:g}: "
        f"{labelled(table.loc[worst])}; accuracy at least {trained:.1%}",
        bound.min() > 0 and trained > floor,
    )


@states(
    "norms of the weights at the end, largest lambda: SPS over ProxSPS, and ProxSPS over AdamW",
    f"both above 1, {SURE}. In part: the second one, and the first one on average",
    needs=ALL,
    gist="ProxSPS produces smaller weights than SPS. In the published epoch {epoch}, which this twin reaches, "
    "those of AdamW are smaller still; they grow later.",
)
def norms_so_far(frames: Frames, epoch: int) -> Found:
    """Norm of the weights early in training, where AdamW's are smaller in the paper as well."""
    runs = largest_strength(frames["runs"])
    require_finite(runs, "model_norm", ALL)
    norms, table = np.log(by_seed(runs, "model_norm")), final(runs, "model_norm").iloc[0]
    order = ("sps", "prox-sps", "adamw")
    ratios = [table[a] / table[b] for a, b in pairwise(order)]
    bounds = [lower_bound(norms[a] - norms[b]) for a, b in pairwise(order)]
    shown = [f"{ratio:.3f} (95 % lower bound {np.exp(bound):.3f})" for ratio, bound in zip(ratios, bounds, strict=True)]
    return Found(
        f"{' and '.join(shown)}: {labelled(table[list(order)])}",
        min(bounds) > 0,
        "the difference from SPS is within the spread of the runs" if bounds[1] > 0 and ratios[0] > 1 else "",
    )
