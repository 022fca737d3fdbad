"""The formulas on Python floats against those on arrays, over many decades."""

import math

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from proxsps.core import caps, distance, dual, estimate, plain, plain_step, rules, step

EPS = np.finfo(float).eps


def decades(low, high):
    """Positive numbers, evenly over their exponents."""
    return st.floats(low, high).map(lambda e: 10.0**e)


def signed(low, high):
    return st.tuples(decades(low, high), st.sampled_from([-1.0, 1.0])).map(math.prod)


def or_zero(numbers):
    return st.one_of(st.just(0.0), numbers)


@st.composite
def blocks(draw, least=1, most=4):
    """gap, and d_sq, d_dot_x, alpha or share, lam of a few blocks; some of them alike."""
    n = draw(st.integers(least, most))
    rows = [[draw(part) for _ in range(n)] for part in (or_zero(decades(-12, 12)), signed(-12, 12))]
    rows.append([draw(or_zero(decades(-6, 6))) for _ in range(n)])
    rows.append(draw(st.sampled_from([[0.0] * n, [0.1] * n, [draw(or_zero(decades(-6, 6))) for _ in range(n)]])))
    return draw(signed(-12, 12)), *rows


def arrays(*parts):
    return [np.asarray(part, np.float64) for part in parts]


def close(got, want, size=0.0, rtol=1e-13):
    """Whether two numbers agree up to rounding of terms of the given size."""
    return got == want or math.isclose(got, want, rel_tol=rtol, abs_tol=rtol * size)


@given(k=st.integers(0, 10**9), beta=or_zero(st.floats(1e-30, 1 - 1e-12)))
def test_weights_of_averages(k, beta):
    assert close(plain.corrected_weight(float(k), beta), float(estimate.corrected_weight(np.float64(k), beta)))


@given(blocks())
def test_the_line_of_the_squared_l2_norm_and_its_root(case):
    gap, _, d_dot_x, _, _ = case
    start, fall = plain.l2_line(*case)
    want = step.l2_line(*arrays(*case))
    assert close(start, want.start, abs(gap) + sum(map(abs, d_dot_x)))
    assert close(fall, want.fall)
    found = step.line_dual(step.Line(*arrays(start, fall)))
    assert plain.line_root(start, fall) == found.root
    assert plain.clipped(plain.line_root(start, fall)) == found.u


@given(move_sq=or_zero(decades(-300, 300)), max_move=decades(-200, 200))
def test_relaxation(move_sq, max_move):
    with np.errstate(over="ignore", under="ignore"):
        assert close(plain.relaxation(move_sq, max_move), float(step.relaxation(np.float64(move_sq), max_move)))
    assert plain.relaxation(math.nan, max_move) == plain.relaxation(1e300, math.inf) == 1


@st.composite
def travelled(draw):
    """Blocks of one or two sets, and what these have travelled."""
    n, sets = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    of = [min(j, sets - 1) for j in range(n)]
    sets = max(of) + 1
    share = [draw(or_zero(st.floats(0.01, 1))) for _ in range(n)]
    squares = [draw(decades(-12, 12)) for _ in range(n)]
    before = [[draw(decades(-6, 6)), draw(decades(-12, 12)), draw(decades(-6, 0)), draw(decades(0, 4))] for _ in of]
    return of, share, squares, [draw(or_zero(decades(-12, 12))) for _ in range(sets)], before[:sets]


@given(travelled(), st.integers(1, 10**6), decades(-3, 3), st.booleans())
def test_distance_caps_of_sets(case, k, factor, is_factor):
    of, share, squares, moved_sq, before = case
    after = [[0.0] * 5 for _ in before]
    nothing = [0.0] * len(before)
    plain.distances(of, share, squares, moved_sq, nothing, float(k), factor, is_factor, 0.85, before, after)
    for i, (reach, g_sq, first, weight) in enumerate(before):
        own = np.array([w for w, j in zip(share, of, strict=True) if j == i])
        sums = np.array([e for e, j in zip(squares, of, strict=True) if j == i])
        largest = own.max()
        parts = own / largest if largest > 0 else own
        moving = float((distance.moving_weights(parts) * sums).sum())
        moving *= 1.0 if is_factor or not any(share) else largest**2
        travel = distance.Travel(*arrays(reach, g_sq, k, first, weight))
        own_factor = np.float64(factor * largest if is_factor else factor)
        want = distance.update_travel(travel, np.float64(moved_sq[i]), np.float64(moving), own_factor)
        assert close(after[i][0], want.reach)
        assert close(after[i][1], want.g_sq)
        assert after[i][2] == first
        assert close(after[i][3], want.weight)
        assert close(after[i][4], distance.distance_cap(want, 0.85))
    longest = plain.share_out(of, after, math.inf, shared := list(share))
    assert longest == max(own[4] for own in after)
    for j, i in enumerate(of):
        assert close(longest * shared[j], after[i][4] * share[j]) or longest == 0


@given(blocks(), decades(-3, 3))
def test_sps_max(case, c):
    gap, d_sq, _, alpha, _ = case
    root, u, height = plain.sps_max(gap, d_sq, alpha, c)
    line = step.Line(np.float64(gap), np.sum(np.multiply(alpha, d_sq)))
    want = rules.sps_max(rules.Model(np.float64(gap), *arrays(d_sq, alpha), line), c)
    assert close(root, float(want.root))
    assert close(u, float(want.u))
    assert close(height, float(want.height), abs(gap))


@given(blocks(), decades(-3, 3), st.integers(0, 10**6), st.data())
def test_dec_sps_and_its_memory(case, c0, k, data):
    gap, d_sq, _, alpha, _ = case
    memory = [data.draw(st.one_of(st.just(math.inf), decades(-6, 6))) for _ in alpha]
    after = [0.0] * len(alpha)
    root, u, height = plain.dec_sps(gap, d_sq, alpha, c0 * math.sqrt(k + 1), memory, after)
    line = step.Line(np.float64(gap), np.sum(np.multiply(alpha, d_sq)))
    model = rules.Model(np.float64(gap), *arrays(d_sq, alpha), line)
    want, kept = rules.dec_sps(model, rules.StepMemory(*arrays(k, memory)), np.bool_(True), c0)
    assert close(root, float(want.root))
    assert close(u, float(want.u))
    assert close(height, float(want.height), abs(gap))
    assert all(map(close, after, kept.previous.tolist()))


@given(blocks(), decades(-6, 6))
def test_the_report_of_a_matched_step(case, longest):
    gap, d_sq, d_dot_x, share, lam = case
    of, nothing = [0] * len(share), [0.0] * len(share)
    one = plain_step.Blocks(share, lam, d_sq, d_dot_x, nothing, of, [0.0], [0.0], [[0.0] * 4])
    with np.errstate(all="ignore"):
        root, part, height, _, u, reach = plain_step.closed_form(True, True, gap, longest, 1.0, one, share)
        found = caps.Matched(np.float64(reach), np.float64(height))
        steep = np.sum(np.multiply(share, d_sq))
        want = caps.matched_decision(np.float64(gap), steep, found, np.float64(longest))
    assert u == 1
    assert height == plain.l2_matched_height(gap, d_sq, d_dot_x, share, lam, reach)
    assert part == want.u
    assert close(root, float(want.root))


# -- the matched cap --------------------------------------------------------------------------------------------------


@given(blocks(), decades(-6, 6))
def test_heights_of_the_matched_cap(case, s):
    gap, d_sq, d_dot_x, share, lam = case
    terms = [abs(gap), *(w * s * (a + b * abs(c)) for a, c, w, b in zip(d_sq, d_dot_x, share, lam, strict=True))]
    want = caps.l2_matched_height(*arrays(*case, s))
    assert close(plain.l2_matched_height(*case, s), float(want), sum(terms))


@given(
    seed=st.integers(0, 2**32 - 1),
    spread=st.floats(0, 3),
    l1=decades(-6, 6),
    s=decades(-6, 6),
    lam=or_zero(decades(-6, 6)),
)
def test_the_lower_bound_of_heights_with_an_l1_norm(seed, spread, l1, s, lam):
    """Against the heights themselves; it is reached where all entries stay on one side, and move away from 0."""
    draw = np.random.default_rng(seed)
    x, d, r = (draw.standard_normal((2, 50)) * 10 ** (spread * draw.standard_normal((2, 50))) for _ in range(3))
    share, r = [1.0, 0.3], np.abs(r)
    for apart in (False, True):
        if apart:
            x[0] = np.abs(x[0]) + s * r[0] * (np.abs(d[0]) + l1)
            d[0] = np.abs(d[0])
        sums = [[float(a @ b) for a, b in zip(one, other, strict=True)] for one, other in ((d, r * d), (d, x))]
        p_abs = [float(np.abs(r[0] * d[0]).sum()), math.nan]
        z = x[0] - s * r[0] * d[0]
        soft = np.sign(z) * np.maximum(np.abs(z) - s * l1 * r[0], 0)
        line = (x[1] - s * 0.3 * r[1] * d[1]) / (1 + s * 0.3 * lam)
        height = d[0] @ (soft - x[0]) + d[1] @ (line - x[1])
        least = plain.least_height(0.0, *sums, [p_abs[0], 0.0], share, [0.0, lam], [l1, 0.0], s)
        size = s * (sums[0][0] + sums[0][1] + l1 * p_abs[0]) + lam * s * np.abs(d[1] * x[1]).sum() + np.abs(d * x).sum()
        assert least <= height + 1e-12 * size
        assert not apart or abs(height - least) <= 1e-12 * size


@given(blocks(most=1), decades(-9, 9))
def test_the_matched_step_of_one_block(case, longest):
    assert close(
        plain.l2_matched(*case, longest), float(caps.l2_matched_step(*arrays(*case, longest), dual.eager_loop))
    )


@given(blocks(2, 5), decades(-9, 9))
def test_the_matched_step_of_several_blocks_is_the_first_zero(case, longest):
    gap, d_sq, d_dot_x, share, lam = case
    with np.errstate(over="ignore", invalid="ignore"):
        s, other = (
            plain.l2_matched(*case, longest),
            float(caps.l2_matched_step(*arrays(*case, longest), dual.eager_loop)),
        )
    if gap <= 0:
        assert s == other == 0
        return
    assert 0 < s <= longest

    def height(s):
        return plain.l2_matched_height(*case, s)

    def size(s):
        terms = zip(d_sq, d_dot_x, share, lam, strict=True)
        return gap + sum(s * w * (a + b * abs(c)) / (1 + s * w * b) for a, c, w, b in terms)

    # A valid step, and the model is positive all the way to it.
    assert height(s) >= -1e-13 * size(s)
    for part in np.geomspace(1e-9, 1, 60, endpoint=False):
        assert height(s * part) >= -1e-13 * size(s * part)
    # It goes as far as the other bracket, or ends at a zero: where H touches 0, rounding decides which one that is.
    assert s >= other * (1 - 1e-9) or abs(height(s)) <= 1e-9 * size(s)
    assert other >= s * (1 - 1e-9) or abs(height(other)) <= 1e-9 * size(other)


@given(gap=decades(-12, 12), d_sq=or_zero(decades(-12, 12)), longest=decades(-9, 9), v=st.floats(0, 1))
def test_the_ray(gap, d_sq, longest, v):
    ray = caps.polyak_ray(*arrays(gap, d_sq, longest))
    ratio = plain.ray_ratio(gap, d_sq, longest)
    assert close(ratio, float(ray.ratio))
    assert close(plain.ray_step(v, longest, ratio), float(ray.s(np.float64(v))))
    assert plain.ray_step(1.0, longest, ratio) == longest


# -- the search -------------------------------------------------------------------------------------------------------


@given(
    u=st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1)), h=or_zero(signed(-12, 12)), slope=or_zero(signed(-9, 9))
)
def test_certificates_and_roots_beyond_the_ends(u, h, slope):
    for one, other in ((plain_step.dual_off, dual.dual_off), (plain_step.height_off, dual.height_off)):
        assert one(u, h) == other(np.float64(u), np.float64(h))
        np.testing.assert_equal(one(u, math.nan), float(other(np.float64(u), np.float64(math.nan))))
    found = plain_step.Found(u, h, slope, u, 1, True)
    arrays_found = dual.Found(*map(np.float64, found[:5]), np.bool_(True), np.float64(0.0), np.float64(1.0))
    with np.errstate(over="ignore"):
        assert found.unclipped_root() == dual.unclipped_root(arrays_found)


@st.composite
def falling(draw):
    """A falling function with kinks and a smooth part, and its slope; h(0) and h(1) of any sign and size."""
    scale, level = draw(decades(-9, 9)), draw(st.floats(-0.5, 1.5))
    knots = sorted(draw(st.lists(st.floats(0.001, 0.999), min_size=1, max_size=6)))
    falls = [draw(or_zero(decades(-6, 0))) for _ in knots]
    bend, steep = draw(st.floats(0, 1)), draw(decades(-2, 3))
    total = sum(falls) + bend

    def h(u):
        kinks = sum(f * np.minimum(u / k, 1.0) for f, k in zip(falls, knots, strict=True))
        return scale * (level * total - kinks - bend * (1 - np.exp(-steep * u)))

    def slope(u):
        kinks = sum(f / k * (u < k) for f, k in zip(falls, knots, strict=True))
        return -scale * (kinks + bend * steep * np.exp(-steep * u))

    return h, slope, scale * max(total, 1e-30)


def both(h, slope, tolerance, resolution=0.0, noise=0.0, limit=64, start=(1.0,), points=1, at_zero=None):
    """The two searches, and the points that each evaluated."""
    seen = [], []

    def on_arrays(u):
        seen[1].extend(u.tolist())
        return h(u), (u * math.nan if slope is None else slope(u))

    def on_floats(u):
        seen[0].extend(u)
        return h(np.array(u)).tolist(), ([math.nan] * len(u) if slope is None else slope(np.array(u)).tolist())

    one = plain_step.search(on_floats, tolerance, resolution, limit, noise, list(start), points, at_zero)
    certificate = dual.dual_off if at_zero is None else dual.height_off
    zero = None if at_zero is None else np.float64(at_zero)
    with np.errstate(all="ignore"):
        other = dual.search_dual(
            on_arrays, np.float64(1.0), tolerance, resolution, limit, dual.eager_loop, noise, start, points,
            at_zero is None, certificate, zero,
        )  # fmt: skip
    return one, other, seen


@given(falling(), st.sampled_from([1, 3]), st.booleans(), decades(-14, -3), decades(-16, -3))
def test_the_search_is_that_on_arrays(case, points, sloped, tolerance, resolution):
    h, slope, size = case
    start = dual.geometric(points)
    one, other, seen = both(
        h, slope if sloped else None, tolerance * size, resolution, 1e-16 * size, start=start, points=points
    )
    np.testing.assert_allclose(*seen, rtol=1e-9, atol=1e-300)
    assert one.evaluations == other.evaluations == len(seen[0])
    assert one.done == other.done
    for name in ("u", "h", "slope", "estimate"):
        np.testing.assert_allclose(getattr(one, name), getattr(other, name), rtol=1e-9, atol=1e-9 * size)


@given(falling(), decades(-14, -3), st.floats(0, 3), st.floats(1, 20))
def test_the_search_of_a_function_that_is_not_monotone_is_that_on_arrays(case, tolerance, height, waves):
    h, _, size = case
    h0 = float(h(np.float64(0.0)))
    assume(h0 > 1e-6 * size)

    def wavy(u):
        return h(u) + height * h0 * np.sin(waves * u) * u

    one, other, seen = both(wavy, None, tolerance * h0, EPS, start=(1.0,), at_zero=h0)
    assert one.done
    assert other.done
    assert plain_step.height_off(one.u, one.h) <= max(tolerance * h0, 1e-9 * (1 + height) * max(h0, size))
    if seen[0] != seen[1]:  # Lagrange's sums differ by rounding, which may choose another zero
        return
    assert (one.u, one.h, one.evaluations) == (other.u, other.h, other.evaluations)


def test_heights_that_are_not_known_count_the_same():
    for edge in (0.0, 0.2, 0.9):  # beyond which h is NaN
        one, other, seen = both(lambda u, e=edge: np.where(u > e, math.nan, 0.3 - u), None, 1e-9, start=(1.0, 0.5, 0.1))
        assert seen[0] == seen[1]
        np.testing.assert_equal((one.u, one.h, one.done), (float(other.u), float(other.h), bool(other.done)))
