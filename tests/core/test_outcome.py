"""A report in one line, from torch and JAX; where there is no one line, all of it."""

import numpy as np
import pytest
import torch

from proxsps import ProxSPS
from proxsps.core.outcome import Solution, report


@pytest.mark.parametrize(
    ("loss", "line"),
    [
        (1.0, "tau 0.25, cap polyak, gap 1"),  # ||g||^2 = 4
        (1234.5, "tau 0.5, cap lr, gap 1.23e+03"),
        (-1.0, "tau 0, cap skipped, gap -1"),
    ],
)
@pytest.mark.filterwarnings("ignore:ProxSPS. The loss -1 is below")
def test_a_step_is_printed_as_one_line(loss, line):
    x = torch.nn.Parameter(torch.ones(4))
    x.grad = torch.ones(4)
    opt = ProxSPS([x], lr=0.5)
    opt.step(loss=loss)
    assert str(opt.last_step) == f"{opt.last_step}" == line


def test_several_groups_show_the_range_of_their_steps():
    params = [torch.nn.Parameter(torch.ones(1)) for _ in range(3)]
    for x in params:
        x.grad = torch.ones(1)
    opt = ProxSPS([{"params": [x], "lr": lr} for x, lr in zip(params, (0.3, 2.0, 0.1), strict=True)])
    opt.step(loss=100.0)
    assert str(opt.last_step) == "tau 0.1 to 2, cap lr, gap 100"


def test_many_runs_and_traced_numbers_are_printed_whole():
    two = np.ones(2)
    many = report(np.ones((2, 1)), Solution(two > 0, two, two, two, two))
    assert str(many) == repr(many)
    assert str(many._replace(tau=many.tau[0], cap=2, gap=3.0)) == "tau 1, cap distance, gap 3"


def test_jax_prints_the_same_line():
    jax = pytest.importorskip("jax")
    from proxsps.jax import prox_sps

    transformation = prox_sps(0.5)
    x = jax.numpy.ones(4)
    seen = []

    def update(state):
        state = transformation.update(x, state, x, value=1.0)[1]
        seen.append((str(state.last_step), repr(state.last_step)))
        return state

    assert str(update(transformation.init(x)).last_step) == "tau 0.25, cap polyak, gap 1"
    jax.jit(update)(transformation.init(x))
    traced, whole = seen[1]
    assert traced == whole
    assert "Tracer" in traced
