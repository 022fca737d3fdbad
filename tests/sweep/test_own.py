"""Methods, regularisers and problems of your own in a sweep: by every engine, in stores, and told apart by content."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from proxsps import methods
from proxsps.core.rules import sps_max
from proxsps.methods import Method
from proxsps.optim import SPS
from proxsps.regularizers import L1, L2, Box, ElasticNet, GroupLasso, Regularizer
from proxsps.sweep import Batched, Processes, RunSpec, Single, grid, run_sweep
from proxsps.sweep.batched import SavedBatch, run_batched
from proxsps.sweep.engines import EngineError, is_batched
from proxsps.sweep.loop import run_single


class Sign(Optimizer):
    """The sign of the gradient; `step` takes neither a loss nor a closure."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(group["lr"] * param.grad.sign())


class Polyak(Optimizer):
    """SPS by hand, which takes the loss as ours do."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None, loss: Tensor | None = None) -> None:  # type: ignore[override]
        assert closure is None
        params = [param for group in self.param_groups for param in group["params"]]
        square = sum(param.grad.square().sum() for param in params)
        tau = torch.clamp(loss / square, max=self.param_groups[0]["lr"])
        for param in params:
            param.sub_(tau * param.grad)


def make_sign(params: Any, run: RunSpec) -> Sign:
    return Sign(params, run.lr)


def make_polyak(params: Any, run: RunSpec) -> Polyak:
    return Polyak(params, run.lr)


def make_sps(params: Any, run: RunSpec) -> SPS:
    return SPS(params, run.lr, c=2.0, lower_bound=run.problem.lower_bound)


SIGN = Method("sign", make_sign)
POLYAK = Method("polyak", make_polyak)
HALF = Method("half", make_sps, rule=partial(sps_max, c=2.0), bounded=True, guarded=True)


pytestmark = pytest.mark.usefixtures("table")


def only(engine: Any, *specs: RunSpec) -> list[Any]:
    return [result for results in engine.run(list(specs), (), lambda epochs: None) for result in results]


# Methods


def test_an_own_copy_of_sps_gives_what_sps_gives(kit: Any) -> None:
    """The sweep adds the regulariser to the loss and to the gradients, as SPS does inside."""
    options = {"schedule": "sqrt", "lr": 2.0, "weight_decay": 1e-2, "seed": 1, "epochs": 3}
    mine, ours = (run_single(RunSpec(kit.tiny(), method, **options)) for method in (POLYAK, "sps"))
    np.testing.assert_allclose(mine.metrics[:, :4], ours.metrics[:, :4], rtol=1e-12)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.LBFGS, Sign], ids=lambda kind: kind.__name__)
def test_every_kind_of_step_is_called(kit: Any, make: Any) -> None:
    """SGD may have a closure, LBFGS needs one and calls it several times, Sign takes none."""
    method = Method(f"own-{make.__name__}", lambda params, run: make(params, lr=run.lr))
    result = run_single(RunSpec(kit.tiny(), method, "constant", 1e-2, 1e-3, 0, 3))
    assert result.metrics[-1, 0] < result.metrics[0, 0]
    if make is torch.optim.SGD:
        plain = run_single(RunSpec(kit.tiny(), "sgd", "constant", 1e-2, 1e-3, 0, 3))
        np.testing.assert_allclose(result.metrics[:, :4], plain.metrics[:, :4], rtol=1e-12)


class Ignores(Sign):
    """Its `step` takes a closure as torch's do, and does not call it."""

    def step(self, closure: Any = None) -> None:
        super().step()


class Careful(Ignores):
    """The same with a check of the gradients: it would train nothing, without an error."""

    def step(self, closure: Any = None) -> None:
        if all(param.grad is not None for group in self.param_groups for param in group["params"]):
            super().step()


@pytest.mark.parametrize(("make", "end"), [(Ignores, r"\(It raised AttributeError: .*NoneType"), (Careful, "")])
def test_a_step_that_does_not_call_its_closure_is_an_error_that_says_so(kit: Any, make: Any, end: str) -> None:
    method = Method("ignores", lambda params, run: make(params, lr=run.lr))
    with pytest.raises(
        ValueError, match=rf"^{make.__name__}\.step\(closure\) did not call its closure.*define step.*{end}"
    ):
        run_single(RunSpec(kit.tiny(), method, "constant", 1e-2, 1e-3, 0, 1))


def test_an_own_rule_is_batched_and_agrees_with_its_optimizer(kit: Any) -> None:
    specs = [RunSpec(kit.tiny(), HALF, "sqrt", 2.0, lam, seed, 3) for lam in (0.0, 1e-2) for seed in (0, 1)]
    assert all(is_batched(spec) for spec in specs)
    for spec, result in zip(specs, run_batched(specs), strict=True):
        single = run_single(spec)
        np.testing.assert_allclose(result.metrics, single.metrics, rtol=1e-12)
        np.testing.assert_allclose(result.zetas, single.zetas, rtol=3e-7)


def test_a_batch_with_one_name_for_two_methods_is_an_error(kit: Any) -> None:
    """Runs are told apart by the names of their methods: one rule would be taken for both."""
    other = Method("half", make_sps, rule=partial(sps_max, c=4.0), bounded=True, guarded=True)
    same = Method("half", make_sps, rule=partial(sps_max, c=2.0), bounded=True, guarded=True)
    specs = {method: RunSpec(kit.tiny(), method, "sqrt", 2.0, 1e-2, 0, 2) for method in (HALF, same, other)}
    assert len(run_batched([specs[HALF], specs[same]])) == 2
    with pytest.raises(ValueError, match="Different methods have the name 'half': give each a name of its own"):
        run_batched([specs[HALF], specs[other]])


def test_a_batch_leaves_out_what_cannot_share_a_program(kit: Any) -> None:
    specs = grid(kit.tiny(), {SIGN: [0.01], "prox-sps": [2.0], HALF: [2.0]}, [1e-3, 1e-2], ["sqrt"], 2, 2)
    batches = list(Batched().batches(specs))
    assert [len(batch) for batch in batches] == [8, 1, 1, 1, 1]
    found = {result.spec.id: result.metrics for result in only(Batched(), *specs)}
    assert found.keys() == {spec.id for spec in specs}
    for result in only(Single(), *specs):
        np.testing.assert_allclose(found[result.spec.id], result.metrics, rtol=1e-12)


def test_optimizers_that_draw_random_numbers_can_be_repeated(kit: Any) -> None:
    class Noisy(Sign):
        @torch.no_grad()
        def step(self) -> None:
            for param in self.param_groups[0]["params"]:
                param.sub_(self.param_groups[0]["lr"] * torch.rand_like(param) * param.grad)

    noisy = Method("noisy", lambda params, run: Noisy(params, run.lr))
    state = torch.get_rng_state()
    first, second, other = (run_single(RunSpec(kit.tiny(), noisy, "sqrt", 0.01, 0.0, seed, 2)) for seed in (0, 0, 1))
    assert np.array_equal(first.metrics, second.metrics, equal_nan=True)
    assert not np.array_equal(first.metrics, other.metrics, equal_nan=True)
    assert torch.equal(torch.get_rng_state(), state)


# Identity


def method_with(factor: float, name: str = "scaled") -> Method:
    class Scaled(Sign):
        @torch.no_grad()
        def step(self) -> None:
            for param in self.param_groups[0]["params"]:
                param.sub_(factor * self.param_groups[0]["lr"] * param.grad)

    return Method(name, lambda params, run: Scaled(params, run.lr))


def test_an_id_stands_for_the_code_of_a_method(kit: Any) -> None:
    def identity(method: Method) -> str:
        return RunSpec(kit.tiny(), method, "sqrt", 0.1, 0.0, 0, 1).id

    assert identity(method_with(1.0)) == identity(method_with(1.0))
    assert identity(method_with(1.0)) != identity(method_with(2.0))
    assert identity(method_with(1.0)) != identity(method_with(1.0, "other"))
    assert identity(Method("sign", make_sign, label="Sign", colour="#123456")) == identity(SIGN)
    assert identity(Method("sign", make_sign, coupled=False)) != identity(SIGN)


def test_an_id_is_the_same_before_and_after_the_first_optimizer(kit: Any) -> None:
    """torch puts a wrapper around `step` of a class when its first optimizer is made."""
    method = method_with(1.0)
    spec = RunSpec(kit.tiny(), method, "sqrt", 0.01, 0.0, 0, 1)
    before = spec.id
    run_single(spec)
    assert RunSpec(kit.tiny(), method, "sqrt", 0.01, 0.0, 0, 1).id == before


def test_ids_of_the_methods_of_this_package_stay_as_they_were() -> None:
    """Stores of earlier versions are still found."""
    from proxsps.problems import matrix_fac1

    assert RunSpec(matrix_fac1(), "prox-sps", "sqrt", 0.1, 1e-3, 3, 7).id == "6f206ab6c605540c"


def test_names_of_this_package_stay_taken(kit: Any) -> None:
    with pytest.raises(ValueError, match=r"'sps' is a method of this package\. Choose another name"):
        methods.add(Method("sps", make_sign))
    with pytest.raises(ValueError, match="Choose another name"):
        RunSpec(kit.tiny(), Method("sps", make_sign), "sqrt", 0.1, 0.0, 0, 1)
    methods.add(SIGN)
    with pytest.raises(ValueError, match=r"Unknown method 'sing'\. Did you mean 'sign'\?"):
        RunSpec(kit.tiny(), "sing", "sqrt", 0.1, 0.0, 0, 1)
    with pytest.raises(ValueError, match="has no optimizer"):
        RunSpec(kit.tiny(), Method("empty"), "sqrt", 0.1, 0.0, 0, 1)
    with pytest.raises(ValueError, match="letters, digits"):
        Method("my method/1", make_sign)
    with pytest.raises(ValueError, match="must return a torch optimizer"):
        run_single(RunSpec(kit.tiny(), Method("none", lambda params, run: None), "sqrt", 0.1, 0.0, 0, 1))
    with pytest.raises(ValueError, match="'sign' does not have"):
        RunSpec(kit.tiny(), SIGN, "adaptive", 0.1, 0.0, 0, 1)


# Stores


def test_a_sweep_goes_on_where_it_was(kit: Any, tmp_path: Path) -> None:
    ran: list[int] = []
    lrs = {SIGN: [0.01], "prox-sps": [1.0]}
    few = grid(kit.tiny(), lrs, [1e-3], ["sqrt"], 1, 2)
    more = grid(kit.tiny(), lrs, [1e-3], ["sqrt"], 3, 2)
    assert set(run_sweep(few, tmp_path / "mine", advance=ran.append).runs["method"]) == {"sign", "prox-sps"}
    assert sum(ran) == 4
    ran.clear()
    tables = run_sweep(more, tmp_path / "mine", advance=ran.append)
    assert tables.runs["run"].nunique() == 6
    assert set(tables.steps["run"]) == {spec.id for spec in few}
    assert sum(ran) == 2 * 2 + 3 * 2  # a batch is run as a whole, single runs only where they are missing
    ran.clear()
    assert run_sweep(more, tmp_path / "mine", advance=ran.append).runs.equals(tables.runs)
    assert not ran


def test_a_batch_that_was_cut_off_goes_on_bitwise(kit: Any, tmp_path: Path) -> None:
    specs = grid(kit.tiny(), {HALF: [2.0], "prox-sps": [2.0], "sps": [1.0]}, [0.1], ["sqrt"], 2, 4, L1)
    whole, heard = run_batched(specs), []

    def stop(count: int) -> None:
        heard.append(count)
        if len(heard) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_batched(specs, stop, SavedBatch(tmp_path, specs, every=0.0))
    ran: list[int] = []
    for result, expected in zip(run_batched(specs, ran.append, SavedBatch(tmp_path, specs)), whole, strict=True):
        assert np.array_equal(result.metrics, expected.metrics, equal_nan=True)
        assert np.array_equal(result.zetas, expected.zetas, equal_nan=True)
        assert np.array_equal(result.extra["nonzeros"], expected.extra["nonzeros"])
    assert ran[0] >= len(specs)  # epochs that were there


@pytest.mark.usefixtures("quick_pool")
def test_processes_give_what_single_gives_methods_of_your_own_included(kit: Any) -> None:
    first, *missing = [
        *grid(kit.tiny(), {"prox-sps": [5.0, 1.0], "sps": [5.0], "sgd": [0.1]}, [1e-3, 1e-2], ["sqrt"], 1, 2),
        *grid(kit.tiny(), {SIGN: [0.01], HALF: [1.0]}, [1e-3], ["sqrt"], 1, 2, L1),
    ]
    heard: list[int] = []
    results = [r for batch in Processes(workers=2).run([first, *missing], {first.id}, heard.append) for r in batch]
    got = {result.spec.id: result for result in results}
    assert len(results) == len(missing)
    for expected in only(Single(), *missing):
        found = got[expected.spec.id]
        assert expected.spec.own or found.spec == expected.spec  # functions do not compare
        assert np.array_equal(found.metrics, expected.metrics, equal_nan=True)
        assert np.array_equal(found.zetas, expected.zetas, equal_nan=True)
    assert sum(heard) == sum(spec.epochs for spec in missing)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"method": Method("local", lambda params, run: Sign(params, run.lr))}, "method 'local'"),
        ({"regularizer": lambda lam: ElasticNet(lam, 0.1)}, "regularizer of the runs of 'prox-sps'"),
        ({"problem": "locked"}, "problem 'locked'"),
    ],
    ids=["method", "regularizer", "problem"],
)
def test_what_cannot_be_sent_to_a_process_is_named(kit: Any, part: dict[str, Any], said: str) -> None:
    problem = kit.tiny()
    if "problem" in part:
        problem = kit.network("locked")
        problem._model.lock = threading.Lock()
    spec = RunSpec(problem, part.get("method", "prox-sps"), "sqrt", 0.1, 0.1, 0, 1, part.get("regularizer"))
    with pytest.raises(EngineError, match=f"The {said} cannot be sent to a process .*top of a module"):
        only(Processes(1), spec)


# Regularisers


def elastic(lam: float) -> ElasticNet:
    return ElasticNet(lam, 0.01)


@pytest.mark.parametrize("method", ["prox-sps", "sps", "sgd", "prox-sgd", "dec-sps", "half"])
@pytest.mark.parametrize("regularizer", [L1, elastic], ids=["l1", "elastic"])
def test_both_engines_agree_with_other_regularisers(kit: Any, method: str, regularizer: Any) -> None:
    methods.add(HALF)
    lr = kit.rates.get(method, 2.0)
    specs = [
        RunSpec(kit.tiny(), method, schedule, lr, lam, seed, 3, regularizer)
        for lam in (1e-2, 0.1)
        for seed in (0, 1)
        for schedule in ("sqrt", "constant")
    ]
    assert all(is_batched(spec) for spec in specs)
    for spec, result in zip(specs, run_batched(specs), strict=True):
        single = run_single(spec)
        assert np.isfinite(single.metrics[:, :4]).all()
        np.testing.assert_allclose(result.metrics, single.metrics, rtol=1e-7)
        np.testing.assert_allclose(result.extra["nonzeros"], single.extra["nonzeros"], atol=0.02)


def test_the_squared_norm_by_name_is_the_default(kit: Any) -> None:
    options = ("sqrt", 2.0, 1e-2, 0, 3)
    plain, named = RunSpec(kit.tiny(), "prox-sps", *options), RunSpec(kit.tiny(), "prox-sps", *options, L2)
    assert plain.id != named.id
    for run in (run_single, lambda spec: run_batched([spec])[0]):
        np.testing.assert_allclose(run(plain).metrics, run(named).metrics, rtol=1e-12)


def test_an_l1_sweep_makes_zeros(kit: Any, tmp_path: Path) -> None:
    """ProxSPS finds zeros that SPS, which steps along a subgradient, does not."""
    specs = grid(kit.tiny(), {"prox-sps": [2.0], "sps": [2.0]}, [0.01, 0.3], ["sqrt"], 2, 15, L1)
    runs = run_sweep(specs, tmp_path / "l1").runs
    last = runs[runs["epoch"] == 15].groupby(["method", "weight_decay"])["nonzeros"].mean()
    assert last["prox-sps", 0.3] < last["prox-sps", 0.01]
    assert last["prox-sps", 0.3] < 0.8
    assert (last["sps"] == 1.0).all()
    row = runs[runs["run"] == specs[0].id].iloc[-1]
    assert row["regularizer"] == "L1"
    assert row["objective"] > row["train_loss"]


@pytest.mark.parametrize("lr", [0.0, 1.0])
def test_no_strength_and_no_step(kit: Any, lr: float) -> None:
    spec = RunSpec(kit.tiny(), "prox-sps", "sqrt", lr, 0.0, 0, 2, L1)
    (result,) = only(Batched(), spec)
    plain = run_single(RunSpec(kit.tiny(), "prox-sps", "sqrt", lr, 0.0, 0, 2))
    np.testing.assert_allclose(result.metrics[:, :4], plain.metrics[:, :4], rtol=1e-10)


def test_a_run_that_diverges_does_not_touch_its_neighbours(kit: Any) -> None:
    """SGD goes on into infinity; proximal SGD skips the steps that lead there."""
    runs = (("sgd", 1e6), ("prox-sgd", 1e6), ("prox-sgd", 0.1), ("sgd", 0.1))
    specs = [RunSpec(kit.tiny(), method, "constant", lr, 0.1, 0, 20, L1) for method, lr in runs]
    wild, held, *calm = run_batched(specs)
    assert wild.diverged_at is not None
    assert np.isnan(wild.extra["nonzeros"][-1])
    assert held.diverged_at == run_single(specs[1]).diverged_at
    for result in calm:
        np.testing.assert_allclose(result.metrics, run_single(result.spec).metrics, rtol=1e-7)


def test_regularisers_that_need_shapes_are_run_singly(kit: Any) -> None:
    spec = RunSpec(kit.tiny(), "prox-sps", "sqrt", 2.0, 0.1, 0, 2, partial(GroupLasso, dims=(1,)))
    assert not is_batched(spec)
    (result,) = only(Batched(), spec)
    assert np.isfinite(result.metrics[:, :4]).all()


def test_runs_of_two_regularisers_share_a_store(kit: Any, tmp_path: Path) -> None:
    for regularizer in (None, L1):
        run_sweep(grid(kit.tiny(), {"sps": [1.0]}, [0.1], ["sqrt"], 2, 1, regularizer), tmp_path / "both")
    store = run_sweep(
        [
            spec
            for regularizer in (None, L1)
            for spec in grid(kit.tiny(), {"sps": [1.0]}, [0.1], ["sqrt"], 2, 1, regularizer)
        ],
        tmp_path / "both",
    )
    assert store.runs.groupby("regularizer")["run"].nunique().to_dict() == {"L1": 2, "L2": 2}


class Halved(Regularizer):
    """Half of the l1 norm, written by a user."""

    def value(self, x: Any) -> Any:
        return 0.5 * abs(x).sum()

    def prox(self, z: Any, alpha: Any) -> Any:
        return L1(0.5).prox(z, alpha)


def test_an_own_regulariser_is_identified_by_its_code_and_run_singly(kit: Any) -> None:
    spec = RunSpec(kit.tiny(), "prox-sps", "sqrt", 2.0, 0.5, 0, 2, lambda lam: Halved())
    expected = run_single(RunSpec(kit.tiny(), "prox-sps", "sqrt", 2.0, 0.5, 0, 2, L1))
    assert not is_batched(spec)
    np.testing.assert_allclose(run_single(spec).metrics, expected.metrics, rtol=1e-8)
    assert spec.id != expected.spec.id


def test_regularisers_that_do_not_fit_a_method_are_errors(kit: Any) -> None:
    def spec(method: Any, regularizer: Any) -> RunSpec:
        return RunSpec(kit.tiny(), method, "sqrt", 0.1, 1.0, 0, 1, regularizer)

    with pytest.raises(ValueError, match="SPS puts the regulariser into the loss and needs its subgradient"):
        spec("sps", lambda lam: Box(-lam, lam))
    with pytest.raises(ValueError, match="AdamW has weight decay and no other regulariser"):
        spec("adamw", L1)
    with pytest.raises(ValueError, match=r"must return a Regularizer for a strength.*got 3\.0"):
        spec("prox-sps", lambda lam: 3.0)
