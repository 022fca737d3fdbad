"""One epoch of the real ResNet110 without batch normalisation: where SPS stands still, at full size, on two cores."""

from __future__ import annotations

import numpy as np

from proxsps.experiments.base import Frames
from proxsps.experiments.sentences import POLYAK, require_finite, states

STEPS, STRENGTH = 390, 5e-4  # of the epoch, in which alpha_k = 1
NORMS = {"prox-sps": 74.162, "sps": 90.125}  # after the first epoch, read out of the published figure
GUESSED = np.log(10)  # the loss of a network that knows nothing


@states(
    "norm of ProxSPS's weights over that of SPS's after the epoch, divided by (1 + alpha_k lambda)^-390, minus 1",
    "at most 0.2 %",
    needs=POLYAK,
    finite="model_norm",
    gist="Every iteration of ProxSPS shrinks the weights by 1 / (1 + alpha_k lambda), however short the step along the "
    "gradient is; SPS does not make progress.",
)
def weights_shrink(frames: Frames) -> tuple[str, bool]:
    """What 390 steps of pure shrinkage would give."""
    norms = frames["runs"].groupby("method")["model_norm"].mean()
    ratio = norms["prox-sps"] / norms["sps"]
    apart = abs(ratio * (1 + STRENGTH) ** STEPS - 1)
    return f"{apart:.3%}: ProxSPS {norms['prox-sps']:.2f}, SPS {norms['sps']:.2f}, ratio {ratio:.4f}", apart <= 2e-3


@states(
    "relative difference of the norms from the published ones",
    "at most 0.2 % for both",
    needs=POLYAK,
    finite="model_norm",
)
def norms_as_published(frames: Frames) -> tuple[str, bool]:
    """The published norms after the first epoch are 74.16 (ProxSPS) and 90.12 (SPS)."""
    norms = frames["runs"].groupby("method")["model_norm"].mean()
    apart = {method: abs(norms[method] / NORMS[method] - 1) for method in POLYAK}
    return (
        f"ProxSPS {norms['prox-sps']:.2f} ({apart['prox-sps']:.2%}), SPS {norms['sps']:.2f} ({apart['sps']:.2%})",
        max(apart.values()) <= 2e-3,
    )


@states(
    "median of zeta_k over the epoch, training loss and accuracy after it",
    "zeta_k of SPS below 1e-4; its loss above that of guessing (2.3) by a factor of 100 or more, and that of ProxSPS "
    "by less than a tenth of SPS's",
    needs=POLYAK,
)
def stands_still(frames: Frames) -> tuple[str, bool]:
    """SPS does not make progress for a long time because its adaptive step size is very small."""
    runs = frames["runs"]
    require_finite(runs, "train_loss", POLYAK)
    means = runs.groupby("method")[["zeta_median", "train_loss", "val_accuracy"]].mean()
    ours, sps = means.loc["prox-sps"], means.loc["sps"]
    told = "; ".join(
        f"{name}: zeta_k {row['zeta_median']:.1e}, loss {row['train_loss']:.3g}, accuracy {row['val_accuracy']:.1%}"
        for name, row in (("SPS", sps), ("ProxSPS", ours))
    )
    loss = sps["train_loss"]
    return told, sps["zeta_median"] < 1e-4 and loss >= 100 * GUESSED and ours["train_loss"] < loss / 10


CLAIMS = (weights_shrink, norms_as_published, stands_still)
