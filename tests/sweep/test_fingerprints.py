"""Runs of other models, data, starting weights or losses have other ids; the same ones have the same, anywhere."""

from __future__ import annotations

import functools
import importlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from proxsps.methods import LOOKS, Method
from proxsps.problems import LogisticRegression, MatrixCompletion, from_module, matrix_fac1, matrix_fac2
from proxsps.problems.base import Problem
from proxsps.problems.fingerprint import fingerprint
from proxsps.sweep.engines import Batched
from proxsps.sweep.spec import RunSpec
from proxsps.sweep.store import Store

SCALE = 1.0
X = torch.linspace(-1, 1, 8).reshape(-1, 1)


def model(activation: Callable[[], nn.Module] = nn.Tanh, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(1, 3), activation(), nn.Linear(3, 1))


def problem(**other: Any) -> Any:
    options = {"model": model(), "loss": mse_loss, "train": (X, X), "validation": (X, X), "batch_size": 4, **other}
    return from_module("mine", **options)


def run(of: Problem, **fields: Any) -> RunSpec:
    constants = {"method": "prox-sps", "schedule": "sqrt", "lr": 1.0, "weight_decay": 0.0, "seed": 0, "epochs": 1}
    return RunSpec(of, **{**constants, **fields})


def scaled(scale: float) -> Callable[..., Tensor]:
    return lambda outputs, targets: scale * mse_loss(outputs, targets)


def with_global(outputs: Tensor, targets: Tensor) -> Tensor:
    return SCALE * mse_loss(outputs, targets)


@torch.enable_grad()
def decorated(outputs: Tensor, targets: Tensor) -> Tensor:
    return mse_loss(outputs, targets)


@torch.enable_grad()
def decorated_other(outputs: Tensor, targets: Tensor) -> Tensor:
    return 2 * mse_loss(outputs, targets)


class Squares:
    def __init__(self, weight: float) -> None:
        self.weight = weight

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.weight * mse_loss(outputs, targets)

    def absolute(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.weight * (outputs - targets).abs().mean()


class Shifted(nn.Module):
    def __init__(self, shift: float) -> None:
        super().__init__()
        self.inner, self.shift = model(), shift

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.shift


class Scaled(Shifted):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.shift


def changed(index: int = 7) -> Tensor:
    other = X.clone()
    other[index] += 1e-6
    return other


DIFFERENT: dict[str, Callable[[], Any]] = {
    "as it is": problem,
    "activation": lambda: problem(model=model(nn.ReLU)),
    "option of a layer": lambda: problem(model=model(lambda: nn.LeakyReLU(0.1))),
    "another option": lambda: problem(model=model(lambda: nn.LeakyReLU(0.2))),
    "starting weights": lambda: problem(model=model(seed=1)),
    "precision": lambda: problem(model=model().double(), train=(X.double(),) * 2, validation=(X.double(),) * 2),
    "attribute of a module": lambda: problem(model=Shifted(1.0)),
    "another attribute": lambda: problem(model=Shifted(2.0)),
    "code of a module": lambda: problem(model=Scaled(1.0)),
    "training inputs": lambda: problem(train=(changed(), X)),
    "training targets": lambda: problem(train=(X, changed())),
    "order of data": lambda: problem(train=(X.flip(0), X)),
    "validation": lambda: problem(validation=(X, changed())),
    "loss of torch": lambda: problem(loss=nn.functional.l1_loss, error=mse_loss),
    "error": lambda: problem(error=nn.functional.l1_loss),
    "loss as a module": lambda: problem(loss=nn.HuberLoss(), error=mse_loss),
    "its option": lambda: problem(loss=nn.HuberLoss(delta=2.0), error=mse_loss),
    "closure": lambda: problem(loss=scaled(2.0), error=mse_loss),
    "another closure": lambda: problem(loss=scaled(3.0), error=mse_loss),
    "closure over data": lambda: problem(loss=scaled(torch.tensor(2.0)), error=mse_loss),
    "partial": lambda: problem(loss=functools.partial(nn.functional.huber_loss, delta=3.0), error=mse_loss),
    "another partial": lambda: problem(loss=functools.partial(nn.functional.huber_loss, delta=4.0), error=mse_loss),
    "callable object": lambda: problem(loss=Squares(1.0), error=mse_loss),
    "its state": lambda: problem(loss=Squares(2.0), error=mse_loss),
    "its method": lambda: problem(loss=Squares(1.0).absolute, error=mse_loss),
    "decorated": lambda: problem(loss=decorated, error=mse_loss),
    "another decorated": lambda: problem(loss=decorated_other, error=mse_loss),
    "lambda": lambda: problem(loss=lambda o, t: (o - t).square().mean(), error=mse_loss),
    "another lambda": lambda: problem(loss=lambda o, t: (o - t).square().sum(), error=mse_loss),
    "its default": lambda: problem(loss=lambda o, t, k=2: (o - t).square().mean() * k, error=mse_loss),
    "another default": lambda: problem(loss=lambda o, t, k=3: (o - t).square().mean() * k, error=mse_loss),
    "function of a function": lambda: problem(loss=lambda o, t: with_global(o, t), error=mse_loss),
    "lower bound": lambda: problem(lower_bound=-1.0),
}


def test_whatever_changes_the_result_changes_the_id() -> None:
    ids = {case: run(make()).id for case, make in DIFFERENT.items()}
    shared = {case: [other for other in ids if other != case and ids[other] == ids[case]] for case in ids}
    assert not any(shared.values()), {case: others for case, others in shared.items() if others}


@pytest.mark.parametrize("case", DIFFERENT)
def test_the_same_made_twice_has_one_id(case: str) -> None:
    assert run(DIFFERENT[case]()).id == run(DIFFERENT[case]()).id


def test_a_global_that_a_loss_uses_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = run(problem(loss=with_global)).id
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    assert run(problem(loss=with_global)).id != before


def test_where_a_function_is_written_does_not_count() -> None:
    one, other = (
        lambda o, t: (o - t).square().mean(),
        lambda o, t: (o - t).square().mean(),
    )
    assert run(problem(loss=one)).id == run(problem(loss=other)).id


HELPER = (
    "import torch\nfrom torch import nn\ndef build(params):\n    return torch.optim.SGD(params, 0.1, momentum={})\n"
)
RECIPES = {
    "at the top": "import own_pack.own_helper\ndef make(params, run):\n    return own_pack.own_helper.build(params)\n",
    "renamed": "import own_pack.own_helper as own\ndef make(params, run):\n    return own.build(params)\n",
    "in the function": "def make(params, run):\n    from own_pack.own_helper import build\n    return build(params)\n",
    "in a closure": """
def outer():
    from own_pack import own_helper
    return lambda params, run: own_helper.build(params)
make = outer()
""",
    "as an object": """
import functools
from own_pack import own_helper
def call(module, params, run):
    return getattr(module, "build")(params)
make = functools.partial(call, own_helper)
""",
}


@pytest.fixture
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Any]:
    """A function that writes a helper and a recipe, as own modules, and returns the recipe as imported afresh."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "own_pack").mkdir()
    names = ("own_pack", "own_pack.own_helper", "own_recipe")

    def written(helper: str, recipe: str) -> Any:
        for name, text in zip(names, ("", helper, recipe), strict=True):
            file = tmp_path / name.replace(".", "/")
            (file / "__init__.py" if file.is_dir() else file.with_suffix(".py")).write_text(text)
        for name in names:
            monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()
        return importlib.import_module("own_recipe")

    return written


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_helper_in_an_own_module_counts(recipe: str, own_modules: Callable[[str, str], Any]) -> None:
    ids = []
    for value in (0.9, 0.1, 0.9):
        make = own_modules(HELPER.format(value), RECIPES[recipe]).make
        ids.append(run(matrix_fac1(), method=Method("mine", make)).id)
    assert ids[0] == ids[2] != ids[1]


def test_a_helper_that_is_not_used_does_not_count(own_modules: Callable[[str, str], Any]) -> None:
    other = "\n\ndef other():\n    return {}\n"
    ids = []
    for value in (1, 2):
        make = own_modules(HELPER.format(0.9) + other.format(value), RECIPES["renamed"]).make
        ids.append(run(matrix_fac1(), method=Method("mine", make)).id)
    assert ids[0] == ids[1]


def test_modules_that_hold_each_other_have_a_digest(own_modules: Callable[[str, str], Any]) -> None:
    recipe = "from own_pack import own_helper\ndef make(params, run):\n    return own_helper.own_recipe.own_helper\n"
    ids = [run(matrix_fac1(), method=Method("mine", own_modules("import own_recipe\n", recipe).make)).id for _ in "ab"]
    assert ids[0] == ids[1]


def test_a_global_with_the_name_of_a_builtin_counts(own_modules: Callable[[str, str], Any]) -> None:
    recipe = "def sum(x):\n    return {}\ndef make(params, run):\n    return sum(params)\n"
    ids = [run(matrix_fac1(), method=Method("mine", own_modules("", recipe.format(x)).make)).id for x in (1, 2)]
    assert ids[0] != ids[1]


OTHER_FIELDS = {
    "rule": "proxsps.core.rules:linear",
    "coupled": False,
    "bounded": True,
    "guarded": True,
    "followed": True,
    "rateless": True,
    "lr": 2.0,
    "schedule": "constant",
    "optimizer": "proxsps.optim:SPS",
    "options": (("momentum", 0.1),),
    "optax": "proxsps.jax:sps",
    "make": lambda params, run: None,
    "groups": "proxsps.optim:model_groups",
}


def test_all_fields_of_a_method_count_except_its_looks() -> None:
    base = Method("mine", optimizer="proxsps.optim:ProxSPS", options=(("momentum", 0.9),))
    ids = {name: run(matrix_fac1(), method=replace(base, **{name: other})).id for name, other in OTHER_FIELDS.items()}
    plain = run(matrix_fac1(), method=base).id
    assert len({plain, *ids.values()}) == 1 + len(OTHER_FIELDS)
    assert {field.name for field in fields(Method)} == {"name", "swept", *OTHER_FIELDS, *LOOKS}
    painted = replace(base, label="Mine", colour="#123456", marker="x", dashes=(0.0, (1.0, 1.0)))
    assert run(matrix_fac1(), method=painted).id == plain


KIND = "import torch\nclass Mine(torch.optim.SGD):\n    factor = {}\ndef rule(model):\n    return {}\n"


@pytest.mark.parametrize("field", [{"optimizer": "own_recipe:Mine"}, {"make": print, "rule": "own_recipe:rule"}])
def test_an_own_class_or_rule_that_a_method_names_counts(
    field: dict[str, Any], own_modules: Callable[[str, str], Any]
) -> None:
    ids = []
    for value in (1, 2, 1):
        own_modules("", KIND.format(value, value))
        ids.append(run(matrix_fac1(), method=Method("mine", **field)).id)
    assert ids[0] == ids[2] != ids[1]


ELSEWHERE = """
import functools
import torch
from torch import nn
from proxsps.problems import from_module, matrix_fac1, matrix_fac2
from proxsps.sweep.spec import RunSpec

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.names = nn.Linear(1, 1), {"b", "a", "c"}
    def forward(self, x):
        return super().__getattr__("layer")(x)

def loss(outputs, targets, kinds=frozenset({"x", "y", "z"})):
    return nn.functional.mse_loss(outputs, targets) if "x" in {"x", "y"} else None

torch.manual_seed(0)
x = torch.linspace(-1, 1, 8).reshape(-1, 1)
net = Net()
net.register_forward_hook(lambda module, args, out: out * 2)
problem = from_module("mine", net, functools.partial(loss), (x, x), (x, x), 4)
print(RunSpec(problem, "sgd", "sqrt", 0.1, 0.0, 0, 1).id)
for problem in (matrix_fac1(), matrix_fac2(N=100)):
    for method in ("prox-sps", "adamw"):
        print(RunSpec(problem, method, "sqrt", 0.1, 1e-3, 3, 7).id)
"""


def test_an_id_is_the_same_in_every_process(kit: Any, tmp_path: Path) -> None:
    """Whatever the seed of hashes, the file and the line are."""
    texts = {"1": ELSEWHERE, "2": "# a line\n" * 7 + ELSEWHERE}
    started = [kit.cold_script(tmp_path / f"{seed}.py", text, PYTHONHASHSEED=seed) for seed, text in texts.items()]
    (first, errors), (second, _) = (process.communicate(timeout=60) for process in started)
    assert [len(line) for line in first.split()] == [16] * 5, errors
    assert len(set(first.split())) == 5
    assert first == second
    assert first.split()[1] == RunSpec(matrix_fac1(), "prox-sps", "sqrt", 0.1, 1e-3, 3, 7).id


def test_ids_of_the_problems_of_this_package_stay_as_they_were() -> None:
    """Results that users have stored under them are found again."""
    constants = {"schedule": "sqrt", "lr": 0.1, "weight_decay": 1e-3, "seed": 3, "epochs": 7}
    known = [matrix_fac1(), matrix_fac2(N=100), MatrixCompletion(), LogisticRegression()]
    assert [run(of, **constants).id for of in known] == [
        "6f206ab6c605540c",
        "6d4188abc2d850e8",
        "179f004be4e3d389",
        "7bae7464fd07bd2e",
    ]


def test_the_content_of_a_file_counts(tmp_path: Path) -> None:
    ids = []
    for name, flip in (("one", 1), ("two", 1), ("three", -1)):
        (tmp_path / name).mkdir()
        file = tmp_path / name / "samples.svm"
        file.write_text("".join(f"{flip * (-1) ** i} 1:{i / 10}\n" for i in range(10)))
        ids.append(LogisticRegression(file=str(file), batch_size=5).fingerprint(0))
    assert ids[0] == ids[1] != ids[2]


@dataclass(frozen=True)
class Own(Problem):
    """A problem of a user's own, whose data comes from elsewhere."""

    name: ClassVar[str] = "own"
    shift: ClassVar[list[float]] = [0.0, 0.0, 0.0]  # of start, training and validation data
    batch_size: int = 4

    def start(self) -> dict[str, Tensor]:
        return {"x": torch.zeros(1) + self.shift[0]}

    def train_data(self) -> tuple[Tensor, ...]:
        return (X + self.shift[1],)

    def validation_data(self, seed: int) -> tuple[Tensor, ...]:
        return (X + seed + self.shift[2],)

    def loss(self, params: dict[str, Tensor], *batch: Tensor) -> Tensor:
        return (batch[0] - params["x"]).square().mean()

    def validation_error(self, params: dict[str, Tensor], *data: Tensor) -> Tensor:
        return self.loss(params, *data)


class OtherLoss(Own):
    def loss(self, params: dict[str, Tensor], *batch: Tensor) -> Tensor:
        return (batch[0] - params["x"]).abs().mean()


def test_problems_of_other_classes_count_by_code_and_data(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [run(Own()).id, run(OtherLoss()).id]
    for place in range(3):
        monkeypatch.setattr(Own, "shift", [float(i == place) for i in range(3)])
        ids.append(run(Own()).id)
    assert len(set(ids)) == 5
    monkeypatch.undo()
    assert run(Own()).id == ids[0]


def test_another_model_is_not_answered_from_the_store(tmp_path: Path) -> None:
    for activation in (nn.Tanh, nn.ReLU):
        store, specs = Store(tmp_path, "mine"), [run(problem(model=model(activation)))]
        for results in Batched().run(specs, store.done, lambda runs: None):
            store.add(results)
    assert store.runs["objective"].nunique() == 2


def test_a_digest_is_computed_once_for_all_runs() -> None:
    data = torch.zeros(2_000_000)
    large = problem(train=(data, data), validation=(data, data))
    started = time.perf_counter()
    run(large).id  # noqa: B018
    once = time.perf_counter() - started
    started = time.perf_counter()
    for seed in range(200):
        run(large, seed=seed).id  # noqa: B018
    assert time.perf_counter() - started < max(once, 0.05) * 5


def test_things_without_content_count_by_their_kind(tmp_path: Path) -> None:
    with open(tmp_path / "file", "w") as file:
        assert fingerprint(file) == fingerprint(file)
    loop: list[Any] = [1]
    loop.append(loop)
    other: list[Any] = [1]
    other.append(other)
    assert fingerprint(loop) == fingerprint(other)
    assert fingerprint(np.float32(1)) != fingerprint(np.float64(1))
    assert fingerprint(np.array([1, None])) == fingerprint(np.array([1, None]))
    assert fingerprint([1, [2, 3]]) != fingerprint([[1, 2], 3])
