"""The checks by name: what each bound says, where it stands, and the verdict on its rows."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pandas as pd

from proxsps.experiments.base import Claim
from proxsps.experiments.theory import caps, rates, schedule_free, steps

SEEDS = 400
ROUNDING, SMALL = 1e-9, 1e-12  # relative and absolute: some one-step inequalities are equations


GAP = r"$\mathbb{E}\,\psi(\bar x^K) - \psi^*$"
ENVELOPE = r"$\mathbb{E}\,\|\nabla \mathrm{env}(x_\sim^K)\|^2$"


@dataclass(frozen=True)
class Check:
    """An inequality: `measure(seeds)` gives its rows."""

    name: str
    place: str  # in the paper, or in the docs for those of the steps without a learning rate
    says: str  # quantity <= bound
    needs: str  # of the problem and of alpha_k
    measure: Callable[[int], pd.DataFrame]
    symbol: str = ""  # of the measured quantity, for an axis
    exact: bool = False  # by enumeration of all samples; the number of seeds does not matter


CHECKS: dict[str, Check] = {
    check.name: check
    for check in (
        Check(
            "model",
            "Lemma on the truncated model",
            "f_x(y; s) <= f(y; s) + rho_s/2 ||y - x||^2",
            "f(.; s) rho_s-weakly convex, C(s) <= inf f(.; s)",
            steps.model_inequality,
            exact=True,
        ),
        Check(
            "model-slope",
            "Proposition on bounded subgradients, (B4)",
            "f_x(x; s) - f_x(y; s) <= G_s ||x - y||",
            "subgradients of f(.; s) bounded by G_s",
            steps.model_slope,
            exact=True,
        ),
        Check(
            "basic-inequality",
            "Lemma, basic inequality",
            "(1 + alpha lam) ||x+ - x||^2 <= ||x^k - x||^2 - ||x+ - x^k||^2 + 2 alpha (psi_k(x) - psi_k(x+))",
            "phi lam-strongly convex; any alpha",
            steps.basic_inequality,
            exact=True,
        ),
        Check(
            "convex-recursion",
            "Smooth convex theorem, recursion",
            "(1 + alpha lam) E ||x+ - x*||^2 + 2 alpha E (psi(x+) - psi*) <= ||x - x*||^2 + theta beta alpha^2",
            "f(.; s) convex, f L-smooth; alpha <= (1 - 1/theta)/L",
            steps.convex_recursion,
            exact=True,
        ),
        Check(
            "bounded-recursion",
            "Strongly convex corollary, its recursion",
            "(1 + alpha lam) E ||x+ - x*||^2 + 2 alpha E (psi(x+) - psi*) <= ||x - x*||^2 + 4 alpha^2 G^2",
            "f(.; s) convex with subgradients bounded by G_s; any alpha",
            steps.bounded_recursion,
            exact=True,
        ),
        Check(
            "bounded-envelope-recursion",
            "Weakly convex corollary, its recursion",
            "E ||x+ - p||^2 <= (1 - alpha (1/eta - rho)) ||x - p||^2 + 4 alpha^2 G^2 / (1 - alpha/eta)",
            "subgradients bounded by G_s; alpha < eta < 1/rho",
            steps.bounded_envelope_recursion,
            exact=True,
        ),
        Check(
            "envelope-recursion",
            "Smooth weakly convex theorem, recursion",
            "E env(x+) + alpha/2 (1 - eta (rho - lam)) ||grad env(x)||^2 <= env(x) + alpha^2 theta beta / (2 eta)",
            "f L-smooth; rho < 1/eta + lam; alpha <= (1 - 1/theta)/(L + 1/eta) and <= 1/(1/eta + 2 lam - rho)",
            steps.envelope_recursion,
            exact=True,
        ),
        Check(
            "mapping-lower",
            "Lemma on the gradient mapping, left",
            "1/4 ||grad env^{1/(2L)}|| <= ||gradient mapping||",
            "f L-smooth, phi convex",
            steps.gradient_mapping_lower,
            exact=True,
        ),
        Check(
            "mapping-upper",
            "Lemma on the gradient mapping, right",
            "||gradient mapping|| <= 3/2 (1 + 1/sqrt(2)) ||grad env^{1/(2L)}||",
            "f L-smooth, phi convex",
            steps.gradient_mapping_upper,
            exact=True,
        ),
        Check(
            "norm-identity",
            "Identity of the envelope's gradient",
            "||grad psi(p)||, ||x - p||/eta and ||grad env(x)|| differ by less than 1e-8 of themselves",
            "psi differentiable, p = prox_{eta psi}(x)",
            steps.norm_identity,
            exact=True,
        ),
        Check(
            "bounded-weakly-convex",
            "Corollary, weakly convex case",
            "E ||grad env(drawn x)||^2 <= 8 rho Delta/K + 16 G sqrt(rho Delta/K)",
            "subgradients bounded; alpha = 1/(2 rho + sqrt(4 rho G^2 K/Delta))",
            rates.bounded_weakly_convex,
            ENVELOPE,
        ),
        Check(
            "bounded-strongly-convex",
            "Corollary, (strongly) convex case",
            "E psi((k+1)-weighted mean) - psi* <= lam/(K+1)^2 ||x^0 - x*||^2 + 8 G^2/(lam (K+1))",
            "subgradients bounded, lam > 0; alpha_k = 2/(lam (k+1))",
            rates.bounded_strongly_convex,
            GAP,
        ),
        Check(
            "smooth-a",
            "Smooth convex theorem (a)",
            "E psi(mean) - psi* <= lam k_0/(2K) ||x^0 - x*||^2 + theta beta (1 + ln K)/(2 lam K)",
            "f L-smooth, noise beta, lam > 0; alpha_k = 1/(lam (k + k_0)) <= (1 - 1/theta)/L",
            rates.smooth_strongly_convex,
            GAP,
        ),
        Check(
            "smooth-b",
            "Smooth convex theorem (b)",
            "E psi(alpha-weighted mean) - psi* <= (||x^0 - x*||^2/alpha + theta beta alpha (1 + ln K))"
            "/(4 sqrt(K+1) - 4)",
            "f L-smooth, noise beta; alpha_k = alpha/sqrt(k+1), alpha <= (1 - 1/theta)/L",
            rates.smooth_convex,
            GAP,
        ),
        Check(
            "smooth-c",
            "Smooth convex theorem (c)",
            "E ||x^K - x*||^2 <= (1 + alpha (mu + 2 lam))^{-K} ||x^0 - x*||^2 + theta beta alpha/(mu + 2 lam)",
            "f L-smooth, noise beta, mu + lam > 0; alpha <= (1 - 1/theta)/L",
            rates.smooth_constant_step,
            r"$\mathbb{E}\,\|x^K - x^*\|^2$",
        ),
        Check(
            "envelope-sum",
            "Smooth weakly convex theorem, sum",
            "sum_k alpha_k E ||grad env(x^k)||^2 <= (2 Delta + theta beta/eta sum_k alpha_k^2)/(1 - eta (rho - lam))",
            "as envelope-recursion, at all steps",
            rates.envelope_sum,
            r"$\sum_k \alpha_k\, \mathbb{E}\,\|\nabla \mathrm{env}(x^k)\|^2$",
        ),
        Check(
            "envelope-sqrt",
            "Smooth weakly convex theorem, alpha/sqrt(k+1)",
            "min_k E ||grad env(x^k)||^2 <= (Delta/alpha + theta beta alpha (1 + ln K)/(2 eta))/((1 - eta (rho - lam)) "
            "(sqrt(K+1) - 1))",
            "as envelope-recursion, at alpha",
            rates.envelope_sqrt,
            r"$\min_k\, \mathbb{E}\,\|\nabla \mathrm{env}(x^k)\|^2$",
        ),
        Check(
            "envelope-horizon",
            "Smooth weakly convex theorem, alpha/sqrt(K)",
            "E ||grad env(drawn x)||^2 <= (2 Delta/alpha + theta beta alpha/eta)/((1 - eta (rho - lam)) sqrt(K))",
            "as envelope-recursion, at alpha/sqrt(K)",
            rates.envelope_horizon,
            ENVELOPE,
        ),
        Check(
            "sps-max",
            "SPS_max, published neighbourhood",
            "E f(mean) - f* <= ||x^0 - x*||^2/(alpha K) + 2 gamma_b sigma^2/alpha, alpha = min{1/(2 c L_max), gamma_b}",
            "f_i convex and L_i-smooth; c >= 1, any gamma_b",
            rates.sps_max_neighbourhood,
            GAP,
        ),
        Check(
            "dec-sps",
            "DecSPS, published rate",
            "E f(mean) - f* <= (2 c_0 max{L_max, 1/(2 c_0 gamma_b)} D^2 + 2 sigma^2/c_0)/sqrt(K)",
            "f_i strongly convex and L_i-smooth; c_k = c_0 sqrt(k+1), c_0 >= 1",
            rates.dec_sps_rate,
            GAP,
        ),
        Check(
            "matched-inequality",
            "Matched cap, basic inequality",
            "(1 + tau lam) ||x+ - z||^2 <= ||x - z||^2 - ||x+ - x||^2 + 2 tau (psi_x(z) - psi_x(x+))",
            "phi lam-strongly convex; any cap",
            caps.matched_inequality,
            exact=True,
        ),
        Check(
            "matched-recursion",
            "Matched cap, its recursion",
            "(1 + tau lam) ||x+ - z||^2 + theta (f(x) - C) + 2 tau phi(x+) <= ||x - z||^2 + 2 tau (f(z) - C + phi(z))",
            "f(.; s) convex and L_s-smooth; theta = 2A(1 - L_s A) for caps A <= 1/(2 L_s), else 1/(2 L_s)",
            caps.matched_recursion,
            exact=True,
        ),
        Check(
            "matched-neighbourhood",
            "Matched cap, its neighbourhood",
            "E f(mean) - C <= ||x^0 - z||^2/(theta K) + 2 A/theta (E f(z) - C + phi(z))",
            "f_i convex and L_i-smooth, phi >= 0; any cap A",
            caps.matched_neighbourhood,
            r"$\mathbb{E}\,f(\bar x^K) - C$",
        ),
        Check(
            "distance-bound",
            "A distance is a lower bound",
            "the step with the bound max{C, m - r ||d||} is the best one within r, and that bound is below f(x*; s)",
            "phi = 0; for the last part f(.; s) convex and r = ||x - x*||",
            caps.distance_bound,
            exact=True,
        ),
        Check(
            "free-inequality",
            "Schedule-free form, basic inequality",
            "(1 + tau lam) ||z+ - u||^2 <= ||z - u||^2 - ||z+ - z||^2 + 2 tau (psi_y(u) - psi_y(z+))",
            "phi lam-strongly convex; any cap; gradients at y",
            schedule_free.step_inequality,
            exact=True,
        ),
        Check(
            "free-average",
            "Schedule-free form, the average",
            "W (f(x; s) - C) <= (W - w) (f(x'; s) - C) + w (m - C), m the model at z",
            "f(.; s) convex; any steps and weights",
            schedule_free.average_inequality,
            exact=True,
        ),
        Check(
            "free-neighbourhood",
            "Schedule-free form, its neighbourhood",
            "E f(x^K) - C <= (G sqrt(S sum w^2) + max w S/(2A))/sum w, "
            "S = ||x^0 - u||^2 + 2A(K+1)(E f(u) - C + phi(u))",
            "f_i convex, subgradients bounded by G, phi >= 0; weights k + 1, any cap A",
            schedule_free.neighbourhood,
            r"$\mathbb{E}\,f(x^K) - C$",
        ),
        Check(
            "free-noise",
            "Schedule-free form, growth in noise",
            "||x - x_0||^2 over the sum of squared steps differs from V(r) by at most (1 + r)/K",
            "orthogonal steps of one length",
            schedule_free.noise,
            exact=True,
        ),
    )
}


def find_check(name: str, others: Iterable[str] = ()) -> Check:
    """The check of this name, or an error with the name that was probably meant."""
    if name in CHECKS:
        return CHECKS[name]
    known = [*CHECKS, *others]
    near = difflib.get_close_matches(name, known, 1)
    hint = f"Did you mean {near[0]!r}?" if near else f"Known names: {', '.join(known)}."
    raise ValueError(f"Unknown check {name!r}. {hint}")


def evaluate(check: Check, seeds: int = SEEDS) -> pd.DataFrame:
    """The rows of a check with quotient and verdict.

    A bound is about an expectation: it fails if the lower end of the 99 % confidence interval is above it.
    """
    rows = (
        check.measure(seeds)
        .assign(check=check.name, place=check.place, symbol=check.symbol, exact=check.exact)
        .reset_index(drop=True)
    )
    rows["ratio"] = rows["measured"] / rows["bound"]
    rows["holds"] = rows["measured"] - rows["half"].fillna(0.0) <= rows["bound"] * (1 + ROUNDING) + SMALL
    return rows


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """One row for each check and problem: where the measured value comes closest to its bound."""
    groups = rows.groupby(["check", "problem"], sort=False)
    closest = rows.loc[groups["ratio"].idxmax()].set_index(["check", "problem"])
    return closest.assign(holds=groups["holds"].all()).reset_index()


def claim(check: Check, rows: pd.DataFrame) -> Claim:
    """The verdict on a check, from the rows of all."""
    own = rows[rows["check"] == check.name]
    closest = own.loc[own["ratio"].idxmax()]
    way = "every sample enumerated" if check.exact else "mean over runs, 99 % confidence"
    return Claim(
        check.name,
        f"{check.place}: {check.says}",
        f"left side over right side, at its largest; {way}",
        "at most 1" if check.exact else "lower confidence limit at most 1, for every K",
        f"{closest['ratio']:.3g} ({closest['problem']})",
        bool(own["holds"].all()),
    )
