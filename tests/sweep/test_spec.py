"""A run's name stands for all of its constants and for nothing else."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from proxsps.problems import MatrixCompletion, MatrixFactorization
from proxsps.sweep.spec import METHODS, SCHEDULES, RunSpec, grid

OTHER = {"method": "sps", "schedule": "constant", "lr": 2.5, "weight_decay": 0.0, "seed": 1, "epochs": 3}
OTHER_OPTIONS = {
    "p": 7,
    "q": 11,
    "r": 5,
    "N": 80,
    "upsilon": 1e-4,
    "noise": 0.01,
    "batch_size": 10,
    "convention": "text",
    "data_seed": 1,
    "dtype": "float32",
}


def test_an_id_is_sixteen_hexadecimal_digits(kit: Any) -> None:
    assert re.fullmatch("[0-9a-f]{16}", kit.spec().id)


def test_equal_specs_have_equal_ids(kit: Any) -> None:
    assert kit.spec() == kit.spec()
    assert kit.spec().id == kit.spec().id
    assert kit.spec(lr=2, weight_decay=0).id == kit.spec(lr=2.0, weight_decay=0.0).id


def test_the_tables_above_name_every_field() -> None:
    assert {"problem", "own", "regularizer", *OTHER} == {field.name for field in dataclasses.fields(RunSpec)}
    assert set(OTHER_OPTIONS) == {field.name for field in dataclasses.fields(MatrixFactorization)}


@pytest.mark.parametrize("field", OTHER)
def test_every_field_changes_the_id(kit: Any, field: str) -> None:
    base = kit.spec()
    assert dataclasses.replace(base, **{field: OTHER[field]}).id != base.id


@pytest.mark.parametrize("option", OTHER_OPTIONS)
def test_every_option_of_the_problem_changes_the_id(kit: Any, option: str) -> None:
    base = kit.spec()
    problem = dataclasses.replace(base.problem, **{option: OTHER_OPTIONS[option]})
    assert dataclasses.replace(base, problem=problem).id != base.id


def test_problems_of_other_kinds_have_other_ids(kit: Any) -> None:
    problems = [kit.tiny(), MatrixCompletion(data="synthetic"), kit.network("one"), kit.network("two")]
    problems.append(kit.network("one", batch_size=4))
    assert len({kit.spec(problem).id for problem in problems}) == len(problems)


def test_equal_problems_give_equal_ids(kit: Any) -> None:
    whole, real = kit.tiny(upsilon=1), kit.tiny(upsilon=1.0)
    assert whole == real
    assert kit.spec(whole).id == kit.spec(real).id


def test_columns_are_those_of_the_run(kit: Any) -> None:
    columns = kit.spec(lr=2).columns()
    assert columns == {"method": "prox-sps", "schedule": "sqrt", "lr": 2.0, "weight_decay": 1e-3, "seed": 0}
    assert isinstance(columns["lr"], float)


def test_a_spec_cannot_be_changed(kit: Any) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        kit.spec().lr = 1.0


# Grids


def test_a_grid_has_every_combination_once_in_order(kit: Any) -> None:
    lrs = {"prox-sps": [10, 5], "sgd": [0.5]}
    specs = grid(kit.tiny(), lrs, [1e-3, 1e-2], ["constant", "sqrt"], seeds=3, epochs=4)
    assert len(specs) == 2 * 2 * (2 + 1) * 3
    assert len({spec.id for spec in specs}) == len(specs)
    assert {spec.epochs for spec in specs} == {4}
    # schedule, strength, method, step size, seed: the seed runs fastest
    keys = [(spec.schedule, spec.weight_decay, spec.method, spec.lr, spec.seed) for spec in specs]
    assert keys[:4] == [
        *(("constant", 1e-3, "prox-sps", 10, seed) for seed in range(3)),
        ("constant", 1e-3, "prox-sps", 5, 0),
    ]
    assert keys[6][2:] == ("sgd", 0.5, 0)
    assert keys[9][:3] == ("constant", 1e-2, "prox-sps")
    assert keys[18][:3] == ("sqrt", 1e-3, "prox-sps")


def test_a_grid_takes_iterators(kit: Any) -> None:
    specs = grid(kit.tiny(), {"sps": iter([1.0])}, iter([0.0]), iter(["sqrt"]), 2, 1)
    assert [spec.seed for spec in specs] == [0, 1]


@pytest.mark.parametrize(
    ("lrs", "decays", "schedules", "seeds"),
    [
        ({}, [0.0], ["sqrt"], 1),
        ({"sps": []}, [0.0], ["sqrt"], 1),
        ({"sps": [1.0]}, [], ["sqrt"], 1),
        ({"sps": [1.0]}, [0.0], [], 1),
        ({"sps": [1.0]}, [0.0], ["sqrt"], 0),
    ],
)
def test_an_empty_grid_is_refused(kit: Any, lrs: Any, decays: Any, schedules: Any, seeds: int) -> None:
    with pytest.raises(ValueError, match="grid is empty") as caught:
        grid(kit.tiny(), lrs, decays, schedules, seeds, 1)
    assert "\n" not in str(caught.value)


def test_the_adaptive_schedule_needs_an_adaptive_step(kit: Any) -> None:
    assert kit.spec(method="sps", schedule="adaptive").schedule == "adaptive"
    for method in ("sgd", "prox-sgd", "dec-sps", "adamw"):
        with pytest.raises(ValueError, match=f"which '{method}' does not have"):
            kit.spec(method=method, schedule="adaptive")


@pytest.mark.parametrize(
    ("field", "value", "known"), [("method", "sgdm", METHODS), ("schedule", "cosine", SCHEDULES), ("epochs", 0, ["0"])]
)
def test_unknown_values_are_refused_by_name(kit: Any, field: str, value: Any, known: Any) -> None:
    with pytest.raises(ValueError, match=str(value)) as caught:
        dataclasses.replace(kit.spec(), **{field: value})
    assert all(word in str(caught.value) for word in known)
    assert "\n" not in str(caught.value)
