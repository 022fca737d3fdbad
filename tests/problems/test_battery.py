"""What every problem promises, whoever wrote it."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch
from torch import nn
from torch.func import grad, vmap

from proxsps.problems import (
    LogisticRegression,
    MatrixCompletion,
    PlanarSquares,
    Problem,
    RidgeRegression,
    ScalarLogistic,
    from_module,
    matrix_fac1,
    matrix_fac2,
)


def small_net() -> Problem:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(30, 3, generator=generator)
    targets = (inputs.sum(1) > 0).long()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Sequential(nn.Linear(5, 2)))
    data = (inputs, targets)
    return from_module("small-net", model, nn.functional.cross_entropy, data, data, batch_size=8, drop_last=False)


MAKERS = {
    "matrix-fac1": matrix_fac1,
    "matrix-fac2": matrix_fac2,
    "matrix-fac-text": lambda: matrix_fac1(convention="text"),
    "sensors": lambda: MatrixCompletion(data="synthetic"),
    "ridge": lambda: RidgeRegression(batch_size=4),
    "logistic": LogisticRegression,
    "planar": PlanarSquares,
    "scalar": ScalarLogistic,
    "module": small_net,
}


@pytest.fixture(params=MAKERS)
def problem(request: pytest.FixtureRequest) -> Problem:
    return MAKERS[request.param]()


def batches(problem: Problem, count: int) -> tuple[torch.Tensor, ...]:
    """`count` random batches of the training data, on a new first axis."""
    data = problem.train_data()
    choice = torch.randint(len(data[0]), (count, problem.batch_size), generator=torch.Generator().manual_seed(2))
    return tuple(array[choice] for array in data)


def test_start_is_fresh_and_leaves_the_global_generator_alone(problem):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second = problem.start(), problem.start()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], second[name]) for name in first)
    for value in first.values():
        value.add_(1)
        assert not value.requires_grad
    assert not any(torch.equal(first[name], problem.start()[name]) for name in first)


def test_data_has_samples_first_and_floats_are_single_precision(problem):
    for data in (problem.train_data(), problem.validation_data(0), problem.validation_data(1)):
        assert len({len(array) for array in data}) == 1
        assert all(array.dtype in (torch.float32, torch.int64) for array in data)
    assert all(value.dtype == torch.float32 for value in problem.start().values())


def test_batched_gradients_are_those_of_the_module(problem):
    runs = 3
    generator = torch.Generator().manual_seed(4)
    points = [
        {name: value + 0.1 * torch.randn(value.shape, generator=generator) for name, value in problem.start().items()}
        for _ in range(runs)
    ]
    params = {name: torch.stack([point[name] for point in points]) for name in points[0]}
    data = batches(problem, runs)
    together = vmap(grad(problem.loss))(params, *data)
    for run, point in enumerate(points):
        module = problem.module()
        assert dict(module.named_parameters()).keys() == point.keys()
        module.load_state_dict(point)
        loss = module(*(array[run] for array in data))
        loss.backward()
        assert loss.shape == ()
        assert loss >= problem.lower_bound
        for name, param in module.named_parameters():
            torch.testing.assert_close(together[name][run], param.grad, rtol=1e-4, atol=1e-5)


def test_module_starts_at_start_and_trains(problem):
    module = problem.module()
    for name, param in module.named_parameters():
        assert torch.equal(param, problem.start()[name])
    data = problem.train_data()
    before = module(*data).item()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    for _ in range(15):
        optimizer.zero_grad()
        module(*data).backward()
        optimizer.step()
    assert module(*data).item() < before


def test_validation_error_is_a_number_for_one_run_and_for_many(problem):
    data = problem.validation_data(3)
    start = problem.start()
    alone = problem.validation_error(start, *data)
    params = {name: torch.stack([value, value]) for name, value in start.items()}
    together = vmap(lambda p: problem.validation_error(p, *data))(params)
    assert alone.shape == ()
    torch.testing.assert_close(together, alone.expand(2), rtol=1e-4, atol=1e-6)


def test_steps_per_epoch_counts_batches(problem):
    samples = len(problem.train_data()[0])
    complete, rest = divmod(samples, problem.batch_size)
    assert problem.steps_per_epoch == complete + (rest > 0 and not problem.drop_last)


def test_equal_options_are_one_problem(problem):
    again = pickle.loads(pickle.dumps(problem))
    assert all(torch.equal(a, b) for a, b in zip(again.train_data(), problem.train_data(), strict=True))
    if dataclasses.is_dataclass(problem):
        assert again == problem
        assert hash(again) == hash(problem)
        assert all(isinstance(value, (int, float, str)) for value in dataclasses.asdict(problem).values())
        assert all(a is b for a, b in zip(again.train_data(), problem.train_data(), strict=True))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: matrix_fac1(batch_size=0), "batch_size must be at least 1 and at most .* 1000, got 0"),
        (lambda: matrix_fac1(batch_size=1001), "batch_size must be at least 1 and at most .* 1000, got 1001"),
        (lambda: matrix_fac1(convention="paper"), "convention must be one of 'published', 'text', got 'paper'"),
        (lambda: matrix_fac1(dtype="float16"), "dtype must be one of 'float32', 'float64', got 'float16'"),
        (lambda: matrix_fac1(r=0), "r must be at least 1, got 0"),
        (lambda: matrix_fac1(upsilon=0.0), "upsilon must be in"),
        (lambda: MatrixCompletion(data="fake"), "'real', 'synthetic' or the name of a .csv file, got 'fake'"),
        (lambda: MatrixCompletion(data="synthetic", batch_size=50_000).steps_per_epoch, "larger than the 44926"),
        (lambda: LogisticRegression(flip=0.7), "flip must be in"),
        (lambda: PlanarSquares(batch_size=2), "has one sample"),
        (lambda: ScalarLogistic().minimiser(0.0), "lam must be positive, got 0.0"),
        (lambda: RidgeRegression().interpolation_constant([1.0, 0.0]), "lam must be positive"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_modules_that_are_not_pure_or_not_named_are_refused():
    data = (torch.zeros(4, 2), torch.zeros(4, 2))
    mse = nn.functional.mse_loss
    with pytest.raises(ValueError, match=r"'1' of the model of 'norm' \(BatchNorm1d\)"):
        from_module("norm", nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), mse, data, data, 2)
    with pytest.raises(ValueError, match="needs a name, under which"):
        from_module("", nn.Linear(2, 2), mse, data, data, 2)
    with pytest.raises(ValueError, match=r"The train arrays of 'ragged' .* got shapes \[\(4, 2\), \(3, 2\)\]"):
        from_module("ragged", nn.Linear(2, 2), mse, (data[0], data[1][:3]), data, 2)
    with pytest.raises(ValueError, match=r"batch_size must be at least 1 and at most .* 4, got 5"):
        from_module("large", nn.Linear(2, 2), mse, data, data, 5)


def test_a_module_of_ones_own_is_copied_and_keeps_its_options():
    data = (torch.ones(5, 2), torch.zeros(5, 1))
    model = nn.Linear(2, 1)
    problem = from_module(
        "own", model, nn.functional.mse_loss, data, data, 2, error=nn.functional.l1_loss, lower_bound=-1.0
    )
    outputs = model(data[0]).detach()
    with torch.no_grad():
        model.weight.zero_()
    assert problem.lower_bound == -1.0
    assert problem.steps_per_epoch == 2
    torch.testing.assert_close(problem.loss(problem.start(), *data), outputs.square().mean())
    torch.testing.assert_close(problem.validation_error(problem.start(), *data), outputs.abs().mean())
    assert "own" in repr(problem)
