"""Rates against their own recursions, summed exactly; what they refuse; and the condition that the paper lacks."""

import math

import numpy as np
import pytest
import reference
import torch

from proxsps import theory
from proxsps.theory import AssumptionError

K = np.arange(1, 400)
ENVELOPE = {"L": 1.0, "rho": 0.5, "lam": 0.1, "eta": 1.0, "beta": 0.7, "Delta": 2.0}


def test_corollary_is_its_general_form_at_its_own_step():
    constants = {"rho": 0.7, "G": 1.9, "Delta": 0.4}
    for steps in (1, 10, 1000):
        alpha = theory.bounded_weakly_convex_alpha(K=steps, **constants)
        published = theory.bounded_weakly_convex(steps, **constants)
        general = theory.bounded_weakly_convex(steps, alpha=alpha, **constants)
        assert general == pytest.approx(published, rel=1e-12)
        for factor in (0.5, 0.9, 1.1):  # the published step is the best one
            assert theory.bounded_weakly_convex(steps, alpha=factor * alpha, **constants) > published


def test_corollary_for_weakly_convex_losses_sums_up_its_recursion():
    """Worst case of the recursion: every step takes equality, and the envelope ends at inf psi."""
    rho, G, Delta, steps = 0.7, 1.9, 0.4, 50
    alpha = theory.bounded_weakly_convex_alpha(K=steps, rho=rho, G=G, Delta=Delta)
    eta = 1 / (2 * rho)
    contraction, noise = 1 - alpha * (1 / eta - rho), 4 * alpha**2 * G**2 / (1 - alpha / eta)
    # env(x+) <= env(x) - (1 - contraction) eta/2 ||grad||^2 + noise / (2 eta), summed up and divided
    mean_square = (Delta + steps * noise / (2 * eta)) / (steps * (1 - contraction) * eta / 2)
    assert mean_square == pytest.approx(theory.bounded_weakly_convex(steps, rho=rho, G=G, Delta=Delta), rel=1e-12)


def test_strongly_convex_corollary_against_its_recursion():
    """The published second term is up to a tenth below what the recursion gives, and the same in the limit."""
    lam, G = 0.3, 1.4
    start = theory.bounded_strongly_convex(K, lam=lam, G=G, D_sq=1.0) - theory.bounded_strongly_convex(
        K, lam=lam, G=G, D_sq=0.0
    )
    np.testing.assert_allclose(start, lam / (K + 1) ** 2, rtol=1e-9)
    assert (start >= lam / (K * (K + 3)) * (1 - 1e-9)).all()
    noise = theory.bounded_strongly_convex(K, lam=lam, G=G, D_sq=0.0)
    derived = np.cumsum(4 * G**2 / lam * (K + 1) / K) / (K * (K + 3) / 2)
    np.testing.assert_allclose(derived, 8 * G**2 * (K + np.cumsum(1 / K)) / (lam * K * (K + 3)), rtol=1e-12)
    assert (derived / noise).max() == pytest.approx(1.096, abs=1e-3)
    assert derived[-1] / noise[-1] == pytest.approx(1, abs=0.02)


def test_part_a_sums_up_the_recursion():
    lam, k_0, L, beta, D_sq, theta = 0.3, 8.0, 1.0, 0.7, 2.0, 2.0
    bound = theory.smooth_strongly_convex(K, lam=lam, k_0=k_0, L=L, beta=beta, D_sq=D_sq, theta=theta)
    alphas = 1 / (lam * (K - 1 + k_0))
    exact = (D_sq / (2 * alphas[0]) + np.cumsum(theta * beta * alphas / 2)) / K
    assert (bound >= exact).all()
    assert bound[0] == pytest.approx(lam * k_0 / 2 * D_sq + theta * beta / (2 * lam))
    only_start = theory.smooth_strongly_convex(K, lam=lam, k_0=k_0, L=L, beta=0.0, D_sq=D_sq, theta=theta)
    np.testing.assert_allclose(only_start, lam * k_0 * D_sq / (2 * K))


def test_part_b_sums_up_the_recursion():
    alpha, L, beta, D_sq, theta = 0.4, 1.0, 0.7, 2.0, 2.0
    bound = theory.smooth_convex(K, alpha=alpha, L=L, beta=beta, D_sq=D_sq, theta=theta)
    alphas = alpha / np.sqrt(K)
    exact = (D_sq / 2 + theta * beta * np.cumsum(alphas**2) / 2) / np.cumsum(alphas)
    assert (bound >= exact).all()
    assert bound[-1] == pytest.approx(exact[-1], rel=0.1)  # the estimates of both series are close for large K


def test_part_c_is_the_fixed_point_of_its_recursion():
    alpha, L, mu, lam, beta, theta = 0.3, 1.0, 0.2, 0.1, 0.7, 2.0
    distance, found = 5.0, []
    for _ in K:
        distance = (distance + theta * beta * alpha**2) / (1 + alpha * (mu + 2 * lam))
        found.append(distance)
    bound = theory.smooth_constant_step(K, alpha=alpha, L=L, mu=mu, lam=lam, beta=beta, D_sq=5.0, theta=theta)
    assert (bound >= np.array(found) * (1 - 1e-12)).all()
    assert bound[-1] == pytest.approx(found[-1], rel=1e-9)


def test_three_forms_of_the_weakly_convex_theorem_are_one():
    alpha, theta = 0.2, 2.0
    root = theory.envelope_sum(alpha / np.sqrt(K), theta=theta, **ENVELOPE) / np.cumsum(alpha / np.sqrt(K))
    best = theory.envelope_sqrt(K, alpha=alpha, theta=theta, **ENVELOPE)
    assert (best >= root).all()
    assert best[-1] == pytest.approx(root[-1], rel=0.1)
    for steps in (1, 7, 100):
        drawn = theory.envelope_horizon(steps, alpha=alpha, theta=theta, **ENVELOPE)
        constant = np.full(steps, alpha / math.sqrt(steps))
        assert drawn == pytest.approx(theory.envelope_sum(constant, theta=theta, **ENVELOPE)[-1] / constant.sum())


def test_series_of_the_auxiliary_lemma():
    assert (np.cumsum(1 / K) <= 1 + np.log(K)).all()
    assert (np.cumsum(1 / np.sqrt(K)) >= 2 * np.sqrt(K + 1) - 2).all()
    assert not (np.cumsum(1 / K) <= (1 + np.log(K)) / 2).all()
    assert not (np.cumsum(1 / np.sqrt(K)) >= 2 * (2 * np.sqrt(K + 1) - 2)).all()


def test_sps_max_and_dec_sps_sum_up_their_recursions():
    L_max, gamma_b, sigma_sq, D_sq = 2.0, 0.6, 0.3, 1.5
    alpha = theory.sps_max_rate(L_max=L_max, gamma_b=gamma_b)
    assert alpha == 1 / (2 * L_max)
    # alpha E [f - f*] <= D - D+ + 2 gamma_b sigma^2, summed over K steps
    bound = theory.sps_max_neighbourhood(K, L_max=L_max, gamma_b=gamma_b, sigma_sq=sigma_sq, D_sq=D_sq)
    np.testing.assert_allclose(bound, (D_sq + K * 2 * gamma_b * sigma_sq) / (alpha * K))
    floor = theory.sps_max_floor(L_max=L_max, gamma_b=gamma_b, sigma_sq=sigma_sq)
    assert bound[-1] - floor == pytest.approx(D_sq / (alpha * K[-1]))
    assert theory.sps_max_rate(L_max=0.1, gamma_b=gamma_b) == gamma_b
    # sum_k E [f - f*] <= D^2 / gamma_{K-1} + sum_k sigma^2 / c_k, with the shortest step there can be
    for c_0, bounded in ((1.0, gamma_b), (2.0, 0.01)):
        rate = theory.dec_sps_rate(K, c_0=c_0, L_max=L_max, gamma_b=bounded, sigma_sq=sigma_sq, radius_sq=D_sq)
        c = c_0 * np.sqrt(K)
        exact = (D_sq / np.minimum(1 / (2 * c * L_max), c_0 * bounded / c) + np.cumsum(sigma_sq / c)) / K
        assert (rate >= exact * (1 - 1e-12)).all()
        assert rate[-1] == pytest.approx(exact[-1], rel=0.05)


def test_matched_cap_sums_up_its_recursion():
    L_max, sigma_sq, penalty, D_sq = 2.0, 0.3, 0.1, 1.5
    for cap in (0.05, 0.25, 10.0):
        # What the proof minimises over q in [0, 1]: gain of a capped step for f(x) - C = 1; a step inside gains 1/(2L).
        q = np.linspace(0, 1, 100_001)
        theta = min(((1 - q) ** 2 / (2 * L_max) + 2 * cap * q).min(), 1 / (2 * L_max))
        assert theory.matched_progress(cap=cap, L=L_max) == pytest.approx(theta, rel=1e-8)
        bound = theory.matched_neighbourhood(K, cap=cap, L_max=L_max, sigma_sq=sigma_sq, penalty=penalty, D_sq=D_sq)
        np.testing.assert_allclose(bound, (D_sq + K * 2 * cap * (sigma_sq + penalty)) / (theta * K), rtol=1e-8)


def test_a_raised_bound_never_lies_below_the_other():
    assert theory.raised_bound(value=2.0, C=0.5, slope=3.0, radius=0.1) == pytest.approx(1.7)
    assert theory.raised_bound(value=2.0, C=0.5, slope=3.0, radius=1.0) == 0.5


def test_dec_sps_never_leaves_its_radius():
    """One step multiplies by 1 - gamma mu and adds 2 gamma worst_gap, whatever gamma in [0, gamma_b] it takes."""
    rng = np.random.default_rng(0)
    for mu, gamma_b in ((0.5, 1.0), (3.0, 1.0)):
        radius = theory.dec_sps_radius(mu=mu, gamma_b=gamma_b, worst_gap=0.8, D_sq=0.1)
        distance, largest = 0.1, 0.0
        for gamma in rng.uniform(0, gamma_b, 300):
            distance = max((1 - gamma * mu) * distance, 0) + 2 * gamma * 0.8
            largest = max(largest, distance)
        assert radius / 2 < largest <= radius * (1 + 1e-12)


def test_interpolation_constant():
    assert theory.interpolation_constant([0.5, 1.5]) == 1.0
    assert theory.interpolation_constant([0.5, 1.5], [0.5, 0.5]) == 0.5
    with pytest.raises(AssumptionError, match=r"C\(s\) <= inf f.*0\.1 below"):
        theory.interpolation_constant([0.5, 1.5], 0.6)


def test_theta_is_the_smallest_that_the_steps_allow():
    constants = {"alpha": 0.4, "L": 1.5, "beta": 0.7, "D_sq": 2.0}
    theta = theory.smallest_theta(0.4, 1.5)
    assert theory.smooth_alpha(L=1.5, theta=theta) == pytest.approx(0.4)
    assert theory.smooth_convex(10, **constants) == theory.smooth_convex(10, theta=theta, **constants)
    assert theory.smooth_convex(10, theta=2 * theta, **constants) > theory.smooth_convex(10, **constants)
    assert theory.smooth_alpha(L=0.0, theta=2.0) == math.inf
    limit = theory.envelope_alpha(L=1.0, theta=2.0, eta=1.0, lam=0.1, rho=0.5)
    assert limit == 0.25


REFUSALS = {
    "alpha above (1 - 1/theta)/L": (
        lambda: theory.smooth_convex(10, alpha=0.6, L=1.0, beta=1.0, D_sq=1.0, theta=2.0),
        r"alpha_k <= \(1 - 1/theta\)/L: alpha = 0\.6 is too large; the largest allowed value is 0\.5",
    ),
    "alpha above 1/L": (
        lambda: theory.smooth_convex(10, alpha=2.0, L=0.5, beta=1.0, D_sq=1.0),
        r"for some theta: alpha = 2 is too large; the largest allowed value is below 2\.",
    ),
    "k_0 too small": (
        lambda: theory.smooth_strongly_convex(10, lam=0.1, k_0=1.0, L=1.0, beta=1.0, D_sq=1.0, theta=2.0),
        r"alpha = 10 is too large; the largest allowed value is 0\.5",
    ),
    "k_0 below 1": (
        lambda: theory.smooth_strongly_convex(10, lam=9.0, k_0=0.5, L=0.1, beta=1.0, D_sq=1.0),
        "needs k_0 >= 1, got k_0 = 0.5",
    ),
    "no strong convexity in (a)": (
        lambda: theory.smooth_strongly_convex(10, lam=0.0, k_0=1.0, L=1.0, beta=1.0, D_sq=1.0),
        "Strong convexity of phi: needs 0 < lam",
    ),
    "no strong convexity in (c)": (
        lambda: theory.smooth_constant_step(10, alpha=0.1, L=1.0, mu=0.0, lam=0.0, beta=1.0, D_sq=1.0),
        r"Strong convexity of f or phi: needs 0 < mu \+ 2 lam",
    ),
    "no strong convexity in the corollary": (
        lambda: theory.bounded_strongly_convex(10, lam=0.0, G=1.0, D_sq=1.0),
        "Strong convexity of phi: needs 0 < lam",
    ),
    "unbounded noise": (
        lambda: theory.smooth_convex(10, alpha=0.1, L=1.0, beta=math.inf, D_sq=1.0),
        "Bounded gradient noise: needs a finite beta",
    ),
    "unbounded subgradients": (
        lambda: theory.bounded_strongly_convex(10, lam=1.0, G=math.inf, D_sq=1.0),
        "Bounded subgradients: needs 0 < G < inf",
    ),
    "not smooth": (
        lambda: theory.smooth_convex(10, alpha=0.1, L=math.inf, beta=1.0, D_sq=1.0),
        "Smoothness of f: needs a finite L",
    ),
    "rho too large for eta": (
        lambda: theory.envelope_sqrt(10, alpha=0.1, **ENVELOPE | {"rho": 1.2}),
        r"rho < 1/eta \+ lam: rho = 1\.2, but 1/eta \+ lam = 1\.1; eta must be below 1/\(rho - lam\) = 0\.909091",
    ),
    "alpha above the envelope's limit": (
        lambda: theory.envelope_sqrt(10, alpha=0.3, theta=2.0, **ENVELOPE),
        r"\(1 - 1/theta\)/\(L \+ 1/eta\): alpha = 0\.3 is too large; the largest allowed value is 0\.25",
    ),
    "alpha/sqrt(K) above the envelope's limit": (
        lambda: theory.envelope_horizon(4, alpha=0.6, theta=2.0, **ENVELOPE),
        r"alpha = 0\.3 is too large; the largest allowed value is 0\.25",
    ),
    "one step above the envelope's limit": (
        lambda: theory.envelope_sum([0.1, 0.3], theta=2.0, **ENVELOPE),
        r"alpha = 0\.3 is too large; the largest allowed value is 0\.25",
    ),
    "alpha above the repaired limit": (
        lambda: theory.envelope_sqrt(10, alpha=0.4, **ENVELOPE | {"L": 0.0, "lam": 1.5, "rho": 0.0}),
        r"1/\(1/eta \+ 2 lam - rho\): alpha = 0\.4 is too large; the largest allowed value is 0\.25",
    ),
    "alpha above 1/(2 rho)": (
        lambda: theory.bounded_weakly_convex(10, rho=2.0, G=1.0, Delta=1.0, alpha=0.25),
        r"alpha < 1/\(2 rho\): alpha = 0\.25 is too large; the largest allowed value is below 0\.25",
    ),
    "convex where weakly convex is asked for": (
        lambda: theory.bounded_weakly_convex_alpha(K=10, rho=0.0, G=1.0, Delta=1.0),
        "Weak convexity of f: needs 0 < rho",
    ),
    "c below 1": (
        lambda: theory.sps_max_neighbourhood(10, L_max=1.0, gamma_b=1.0, sigma_sq=1.0, D_sq=1.0, c=0.5),
        "needs c >= 1, got c = 0.5",
    ),
    "c_0 below 1": (
        lambda: theory.dec_sps_rate(10, c_0=0.5, L_max=1.0, gamma_b=1.0, sigma_sq=1.0, radius_sq=1.0),
        "needs c_0 >= 1, got c_0 = 0.5",
    ),
    "no strong convexity in DecSPS": (
        lambda: theory.dec_sps_radius(mu=0.0, gamma_b=1.0, worst_gap=1.0, D_sq=1.0),
        "Strong convexity of every f_i: needs 0 < mu",
    ),
    "a matched cap of zero": (
        lambda: theory.matched_neighbourhood(10, cap=0.0, L_max=1.0, sigma_sq=1.0, penalty=0.0, D_sq=1.0),
        "Cap on the step: needs 0 < cap",
    ),
    "no smoothness with a matched cap": (
        lambda: theory.matched_neighbourhood(10, cap=1.0, L_max=math.inf, sigma_sq=1.0, penalty=0.0, D_sq=1.0),
        "Smoothness of every f_i: needs 0 < L_max < inf",
    ),
    "theta not above 1": (lambda: theory.smooth_alpha(L=1.0, theta=1.0), "needs theta > 1, got theta = 1"),
    "no steps": (lambda: theory.smooth_convex(0, alpha=0.1, L=1.0, beta=1.0, D_sq=1.0), "needs K >= 1, got K = 0"),
    "a negative step among others": (
        lambda: theory.envelope_sum([0.1, -0.1], **ENVELOPE),
        "Smallest step: needs 0 < alpha < inf, got alpha = -0.1",
    ),
    "negative step": (
        lambda: theory.smooth_convex(1, alpha=-0.1, L=1.0, beta=1.0, D_sq=1.0),
        "Step size: needs 0 < alpha",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSALS.values(), ids=REFUSALS)
def test_wrong_assumptions_are_named(call, message):
    with pytest.raises(AssumptionError, match=message):
        call()


# f(x) = c/2 x^2, phi(x) = lam/2 x^2, one sample and no noise: everything in closed form


def shrinkage(c, lam, eta, alpha, steps):
    """Both sides of the published sum, for ProxSPS from x = 1 with a lower bound that is never reached."""
    total = c + lam
    points = ((1 - alpha * c) / (1 + alpha * lam)) ** np.arange(steps)
    left = alpha * ((total / (1 + eta * total)) ** 2 * points**2).sum()
    Delta, rho = total / (2 * (1 + eta * total)), max(-c, 0.0)
    return left, 2 * Delta / (1 - eta * (rho - lam)), Delta


def test_published_weakly_convex_theorem_fails_without_the_further_condition():
    eta, theta = 1.0, 10.0
    lam, alpha = 10.0, 0.9  # satisfies the published condition alpha <= (1 - 1/theta) / (L + 1/eta) with L = 0
    left, right, _ = shrinkage(0.0, lam, eta, alpha, steps=1)
    assert left == pytest.approx(9 * right)
    assert alpha <= (1 - 1 / theta) / (0 + 1 / eta)
    constants = {"L": 0.0, "rho": 0.0, "lam": lam, "eta": eta, "beta": 0.0, "Delta": 1.0}
    with pytest.raises(AssumptionError, match=r"1/\(1/eta \+ 2 lam - rho\)"):
        theory.envelope_sum([alpha], theta=theta, **constants)


GOLDEN = (math.sqrt(5) - 1) / 2


@pytest.mark.parametrize(("t", "fails_from"), [(0.5, None), (0.617, None), (0.62, 7), (0.7, 3), (0.9, 2), (1.01, 1)])
@pytest.mark.parametrize("eta", [1.0, 30.0])
def test_published_weakly_convex_theorem_fails_for_alpha_lam_above_the_golden_section(t, fails_from, eta):
    """f = 0: the quotient of both sides is t after one step, and grows to (1 + t)^2 / (2 + t)."""
    alpha = 0.9 * eta  # allowed as published, with L = 0 and theta = 10
    lam = t / alpha
    left, right, _ = np.transpose([shrinkage(0.0, lam, eta, alpha, steps) for steps in range(1, 200)])
    ratio = left / right
    assert ratio[0] == pytest.approx(t)
    assert ratio[-1] == pytest.approx((1 + t) ** 2 / (2 + t))
    failing = np.flatnonzero(ratio > 1)
    assert (failing[0] + 1 if len(failing) else None) == fails_from
    assert (fails_from is not None) == (t > GOLDEN)
    assert theory.repair_alpha(eta=eta, lam=lam, rho=0.0) * lam < 0.5
    one, flat = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    x = reference.prox_sps_l2(one, flat, 0.0, alpha, lam)
    assert float(x) == pytest.approx(1 / (1 + t))  # what is summed up are steps of ProxSPS


@pytest.mark.parametrize("seed", range(5))
def test_repaired_weakly_convex_theorem_holds_on_quadratics(seed):
    """All curvatures of f, of either sign, and all strengths: at the largest allowed step, for 1 and many steps."""
    rng = np.random.default_rng(seed)
    tightest = 0.0
    for _ in range(400):
        c, lam, eta = rng.uniform(-1, 1), 10 ** rng.uniform(-2, 2), 10 ** rng.uniform(-2, 2)
        if max(-c, 0) >= 1 / eta + lam or c + lam <= 0:
            continue
        limit = theory.envelope_alpha(L=abs(c), theta=1e9, eta=eta, lam=lam, rho=max(-c, 0.0))
        for steps in (1, 200):
            left, right, Delta = shrinkage(c, lam, eta, limit, steps)
            constants = {"L": abs(c), "rho": max(-c, 0.0), "lam": lam, "eta": eta, "beta": 0.0, "Delta": Delta}
            bound = theory.envelope_sum(np.full(steps, limit), theta=1e9, **constants)
            assert bound[-1] == pytest.approx(right)
            assert left <= bound[-1] * (1 + 1e-12)
            tightest = max(tightest, left / right)
    assert tightest > 0.8


# Advice


def test_advice_is_what_the_bounds_say_at_the_largest_step():
    known = theory.Known(K=50, L=4.0, lam=0.1, mu=0.2, beta=1.0, G=3.0, D_sq=2.0, Delta=1.5)
    found = theory.advise(known)
    assert [advice.theorem for advice in found] == [
        "smooth, convex (a)",
        "smooth, convex (b)",
        "smooth, convex (c)",
        "bounded, strongly convex",
        "smooth, weakly convex",
        "smooth, weakly convex",
    ]
    smooth = {"L": 4.0, "beta": 1.0, "D_sq": 2.0, "theta": 2.0}
    envelope = {"L": 4.0, "beta": 1.0, "Delta": 1.5, "theta": 2.0, "rho": 0.0, "lam": 0.1, "eta": 0.25}
    alpha = theory.envelope_alpha(L=4.0, theta=2.0, eta=0.25, lam=0.1)
    assert [advice.bound for advice in found] == [
        theory.smooth_strongly_convex(50, lam=0.1, k_0=80.0, **smooth),
        theory.smooth_convex(50, alpha=0.125, **smooth),
        theory.smooth_constant_step(50, alpha=0.125, mu=0.2, lam=0.1, **smooth),
        theory.bounded_strongly_convex(50, lam=0.1, G=3.0, D_sq=2.0),
        theory.envelope_sqrt(50, alpha=alpha, **envelope),
        pytest.approx(theory.envelope_horizon(50, alpha=alpha * math.sqrt(50), **envelope)),
    ]
    assert found[0].steps == "1/(lam (k + k_0)), k_0 >= 80"


def test_advice_names_what_is_missing():
    assert [advice.missing for advice in theory.advise(theory.Known(L=4.0))] == [
        "Strong convexity of phi: needs 0 < lam < inf, got lam = 0.",
        "needs beta and D_sq",
        "Strong convexity of f or phi: needs 0 < mu + lam < inf, got mu + lam = 0.",
        "needs beta and Delta",
        "needs beta and Delta",
    ]
    weakly = theory.advise(theory.Known(G=2.0, rho=1.0))
    assert [(advice.theorem, advice.missing) for advice in weakly] == [("bounded, weakly convex", "needs Delta")]
    assert "below 0.5" in weakly[0].steps
    assert theory.advise(theory.Known(L=0.0))[1].steps == "alpha/sqrt(k + 1), alpha <= inf"
    with pytest.raises(AssumptionError, match="Pass L"):
        theory.advise(theory.Known())
