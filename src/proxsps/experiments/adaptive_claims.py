"""The paper's suggestion of a cap that follows the adaptive step, checked by numbers."""

from __future__ import annotations

from proxsps.experiments.base import Claim, Frames
from proxsps.experiments.deep_claims import APART, CHANCE, Checked, accuracies, by_seed, final
from proxsps.experiments.sentences import SURE, lower_bound, require_finite, require_methods, states

FOLLOWED = "prox-sps-adaptive"


def relabelled(frames: Frames) -> Frames:
    """Runs with the adaptive cap under their own name, so that a figure distinguishes them."""
    return {
        name: frame.assign(method=frame["method"].where(frame["schedule"] != "adaptive", FOLLOWED))
        for name, frame in frames.items()
    }


def published_caps(frames: Frames) -> Frames:
    """The results without the runs of the adaptive cap."""
    return {name: frame[frame["schedule"] != "adaptive"] for name, frame in frames.items()}


def on_published_caps(claim: Checked) -> Checked:
    """A claim on methods as the paper ran them, if the results also have runs with the adaptive cap."""

    def check(frames: Frames) -> Claim:
        return claim(published_caps(frames))

    return check


@states(
    "final validation accuracy of ProxSPS, adaptive cap minus sqrt cap, mean over runs",
    f"at least one point, {SURE}; both above {CHANCE:.0%}",
    needs=("prox-sps",),
)
def adaptive_helps(frames: Frames) -> tuple[str, bool]:
    """We should choose alpha_k roughly of the order of zeta_k, for example by its values from the previous epoch."""
    runs, both = relabelled(frames)["runs"], ["prox-sps", FOLLOWED]
    require_methods(runs, both)
    require_finite(runs, "val_error", both)
    table, norms = accuracies(runs)[both].iloc[0], final(runs, "model_norm").iloc[0]
    errors = by_seed(runs, "val_error")
    gain = lower_bound(errors["prox-sps"] - errors[FOLLOWED])
    return (
        f"{100 * (table[FOLLOWED] - table['prox-sps']):+.1f} points, 95 % lower bound {100 * gain:+.1f} "
        f"({table[FOLLOWED]:.1%} against {table['prox-sps']:.1%}; norm {norms[FOLLOWED]:.3g} against "
        f"{norms['prox-sps']:.3g})",
        gain >= APART - 1e-12 and table.min() > CHANCE,
    )
