"""Which steps the theory allows for a problem with these constants, and which bounds follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from proxsps.theory import bounds
from proxsps.theory.assumptions import AssumptionError, check_positive, envelope_alpha, smooth_alpha


@dataclass(frozen=True)
class Known:
    """The known constants of a problem; None if one is not known.

    Args:
        K: number of steps.
        L: smoothness of f.
        lam: strong convexity of phi.
        mu: strong convexity of f.
        rho: weak convexity of f, 0 for convex losses.
        beta: bound on the gradient noise.
        G: bound on the subgradients, root mean square over samples.
        D_sq: ||x^0 - x*||^2.
        Delta: env(x^0) - inf psi.
        theta: constant of the proofs, above 1.
        eta: parameter of the envelope; by default 1/(2 rho), or 1/L for convex losses.
    """

    K: int = 1000
    L: float | None = None
    lam: float = 0.0
    mu: float = 0.0
    rho: float = 0.0
    beta: float | None = None
    G: float | None = None
    D_sq: float | None = None
    Delta: float | None = None
    theta: float = 2.0
    eta: float | None = None

    @property
    def envelope(self) -> float:
        """The parameter of the envelope."""
        return self.eta or (1 / (2 * self.rho) if self.rho else 1 / self.L if self.L else 1.0)

    @property
    def _smoothness(self) -> float:
        if self.L is None:
            raise ValueError("The theorems on smooth losses need L, the Lipschitz constant of their gradients.")
        return self.L

    @property
    def alpha(self) -> float:
        """Largest step of the smooth convex theorem."""
        return smooth_alpha(L=self._smoothness, theta=self.theta)

    @property
    def envelope_alpha(self) -> float:
        """Largest step of the smooth weakly convex theorem."""
        return envelope_alpha(L=self._smoothness, theta=self.theta, eta=self.envelope, lam=self.lam, rho=self.rho)

    @property
    def k_0(self) -> float:
        """The smallest shift with 1/(lam k_0) <= alpha."""
        check_positive("Strong convexity of phi", lam=self.lam)
        return max(1.0, 1 / (self.lam * self.alpha))

    def pick(self, names: str) -> dict[str, float]:
        """Some of the constants by name."""
        return {name: getattr(self, name) for name in names.split()}


class Advice(NamedTuple):
    """A theorem, the steps it allows, and its bound after K steps; or else what is missing."""

    theorem: str
    steps: str
    bound: float | None
    missing: str


class _Rule(NamedTuple):
    theorem: str
    convex: bool | None  # the losses it is for; None for both
    basis: str  # the constant that it needs
    needs: str  # further constants, for the bound
    steps: Callable[[Known], str]
    bound: Callable[[Known], float]


def _strong(known: Known) -> float:
    check_positive("Strong convexity of f or phi", **{"mu + lam": known.mu + known.lam})
    return known.alpha


def _bounded_alpha(known: Known) -> str:
    if known.Delta is None or known.G is None:
        return f"1/(2 rho + sqrt(4 rho G^2 K/Delta)), below {1 / (2 * known.rho):.4g}"
    return f"{bounds.bounded_weakly_convex_alpha(K=known.K, rho=known.rho, G=known.G, Delta=known.Delta):.4g}"


def _decay(known: Known) -> float:
    check_positive("Strong convexity of phi", lam=known.lam)
    return 2 / known.lam


_ENVELOPE = "L rho lam beta Delta theta"
_RULES = (
    _Rule(
        "smooth, convex (a)",
        True,
        "L",
        "beta D_sq",
        lambda known: f"1/(lam (k + k_0)), k_0 >= {known.k_0:.4g}",
        lambda known: bounds.smooth_strongly_convex(**known.pick("K lam k_0 L beta D_sq theta")),
    ),
    _Rule(
        "smooth, convex (b)",
        True,
        "L",
        "beta D_sq",
        lambda known: f"alpha/sqrt(k + 1), alpha <= {known.alpha:.4g}",
        lambda known: bounds.smooth_convex(**known.pick("K alpha L beta D_sq theta")),
    ),
    _Rule(
        "smooth, convex (c)",
        True,
        "L",
        "beta D_sq",
        lambda known: f"alpha <= {_strong(known):.4g}",
        lambda known: bounds.smooth_constant_step(**known.pick("K alpha L mu lam beta D_sq theta")),
    ),
    _Rule(
        "bounded, strongly convex",
        True,
        "G",
        "D_sq",
        lambda known: f"2/(lam (k + 1)) = {_decay(known):.4g}/(k + 1)",
        lambda known: bounds.bounded_strongly_convex(**known.pick("K lam G D_sq")),
    ),
    _Rule(
        "bounded, weakly convex",
        False,
        "G",
        "Delta",
        _bounded_alpha,
        lambda known: bounds.bounded_weakly_convex(**known.pick("K rho G Delta")),
    ),
    _Rule(
        "smooth, weakly convex",
        None,
        "L",
        "beta Delta",
        lambda known: f"alpha/sqrt(k + 1), alpha <= {known.envelope_alpha:.4g} (eta = {known.envelope:.3g})",
        lambda known: bounds.envelope_sqrt(
            known.K, alpha=known.envelope_alpha, eta=known.envelope, **known.pick(_ENVELOPE)
        ),
    ),
    _Rule(
        "smooth, weakly convex",
        None,
        "L",
        "beta Delta",
        lambda known: f"alpha/sqrt(K) <= {known.envelope_alpha:.4g} (eta = {known.envelope:.3g})",
        lambda known: bounds.envelope_horizon(
            known.K, alpha=known.envelope_alpha * known.K**0.5, eta=known.envelope, **known.pick(_ENVELOPE)
        ),
    ),
)


def advise(known: Known) -> list[Advice]:
    """The result of each theorem that applies; the bound is that of the largest step it allows."""
    if known.L is None and known.G is None:
        raise AssumptionError("Pass L (a smooth loss) or G (bounded subgradients), or both.")
    rules = [
        rule for rule in _RULES if rule.convex in (None, known.rho == 0) and getattr(known, rule.basis) is not None
    ]
    return [_apply(rule, known) for rule in rules]


def _apply(rule: _Rule, known: Known) -> Advice:
    try:
        steps = rule.steps(known)
        missing = [name for name in rule.needs.split() if getattr(known, name) is None]
        if missing:
            return Advice(rule.theorem, steps, None, f"needs {' and '.join(missing)}")
        return Advice(rule.theorem, steps, float(rule.bound(known)), "")
    except AssumptionError as error:
        return Advice(rule.theorem, "", None, str(error))
