"""A batch that is cut off in the middle goes on from there, bitwise."""

from __future__ import annotations

import errno
import itertools
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faults import Harm, file_limit, flipped
from typer.testing import CliRunner

from proxsps.cli import app
from proxsps.sweep.batched import SavedBatch, State, run_batched
from proxsps.sweep.engines import Batched
from proxsps.sweep.spec import RunResult, RunSpec, grid
from proxsps.sweep.store import StoreError


class Cut(SavedBatch):
    """Saves after every step, and stops the batch after some saves."""

    saves = 0

    def save(self, state: State) -> None:
        super().save(state)
        self.saves -= 1
        if not self.saves:
            raise KeyboardInterrupt


def mixed(problem: Any, epochs: int = 3) -> list[RunSpec]:
    """All methods that are batched, and an adaptive schedule, which looks back at all steps."""
    rates = {"prox-sps": 2.0, "sps": 2.0, "sgd": 0.1, "prox-sgd": 0.1, "dec-sps": 5.0, "adamw": 0.01}
    specs = [RunSpec(problem, m, "sqrt", rates[m], 1e-3, seed, epochs) for m in rates for seed in range(2)]
    return [*specs, RunSpec(problem, "sps", "adaptive", 2.0, 1e-3, 0, epochs)]


def same(one: list[RunResult], other: list[RunResult]) -> bool:
    return len(one) == len(other) and all(
        a.spec == b.spec
        and np.array_equal(a.metrics, b.metrics, equal_nan=True)
        and np.array_equal(a.zetas, b.zetas, equal_nan=True)
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("kind", ["tiny", "network"])
def test_a_batch_goes_on_bitwise_from_any_step(kit: Any, tmp_path: Path, kind: str) -> None:
    """Three or four steps an epoch; one problem is evaluated beside the steps, the other between them."""
    problem = kit.tiny(dtype="float32") if kind == "tiny" else kit.network()
    specs, steps = mixed(problem), problem.steps_per_epoch
    undisturbed = run_batched(specs)
    for count in (1, steps, steps + 1, 3 * steps):
        cut = Cut(tmp_path / str(count), specs, every=0.0)
        cut.saves = count
        with pytest.raises(KeyboardInterrupt):
            run_batched(specs, saved=cut)
        heard: list[int] = []
        again = run_batched(specs, heard.append, SavedBatch(tmp_path / str(count), specs))
        assert same(again, undisturbed)
        epochs = (count - 1) // steps  # that were complete and measured
        assert heard == ([epochs * len(specs)] if epochs else []) + [len(specs)] * (3 - epochs)


KILLED = """
import sys, time
from pathlib import Path
from proxsps.problems import matrix_fac1
from proxsps.sweep.engines import Batched
from proxsps.sweep.spec import grid

specs = grid(matrix_fac1(N=60), {"prox-sps": [5.0, 1.0], "adamw": [0.1]}, [1e-3], ["sqrt"], 3, 30)
list(Batched(folder=Path(sys.argv[1]), every=0.2).run(specs, (), lambda runs: time.sleep(0.1)))
"""


def test_a_kill_in_the_middle_of_a_batch_costs_little(kit: Any, tmp_path: Path) -> None:
    lrs = {"prox-sps": [5.0, 1.0], "adamw": [0.1]}
    specs = grid(kit.tiny(dtype="float32"), lrs, [1e-3], ["sqrt"], 3, 30)
    state = SavedBatch(tmp_path / "state", specs)
    process = kit.script(tmp_path / "killed.py", KILLED, tmp_path / "state")
    end = time.monotonic() + 60
    while (state.load() or {"epoch": 0})["epoch"] < 4:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.02)
    process.kill()
    process.communicate(timeout=10)
    heard: list[int] = []
    (again,) = Batched(folder=tmp_path / "state").run(specs, (), heard.append)
    assert heard[0] >= 4 * len(specs)
    assert sum(heard) == 30 * len(specs)
    assert same(again, run_batched(specs))
    assert not (tmp_path / "state").exists()


def test_a_damaged_state_is_not_used(kit: Any, tmp_path: Path) -> None:
    specs = mixed(kit.tiny())
    kept = SavedBatch(tmp_path, specs)
    kept.save({"epoch": 1, "x": torch.arange(5.0)})
    content = kept.file.read_bytes()
    assert kept.load()["epoch"] == 1
    for bit in np.linspace(0, 8 * len(content) - 1, 200).astype(int):
        kept.file.write_bytes(flipped(content, bit))
        assert kept.load() is None
    for size in (0, 10, 64, len(content) - 1):
        kept.file.write_bytes(content[:size])
        assert kept.load() is None
    kept.save({"epoch": 1, "x": Harm(tmp_path / "trace")})
    assert kept.load() is None
    assert not (tmp_path / "trace").exists()
    assert same(run_batched(specs, saved=kept), run_batched(specs))


def test_a_full_disk_is_said_and_keeps_the_last_state(kit: Any, tmp_path: Path) -> None:
    kept = SavedBatch(tmp_path, mixed(kit.tiny()))
    kept.save({"epoch": 1})
    with file_limit(500), pytest.raises(StoreError) as caught:
        kept.save({"epoch": 2, "x": torch.ones(1000)})
    said = "Make room, or choose another folder with --out; what was stored before is kept."
    assert str(caught.value) == f"Cannot write {kept.file}: {os.strerror(errno.EFBIG)}. {said}"
    assert kept.load() == {"epoch": 1}
    assert list(tmp_path.iterdir()) == [kept.file]


def test_a_state_belongs_to_its_batch(kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = mixed(kit.tiny())
    files = [SavedBatch(tmp_path, part).file for part in (specs, specs[::-1], specs[1:], mixed(kit.tiny(N=80)))]
    monkeypatch.setattr(torch, "__version__", "0.0")
    files.append(SavedBatch(tmp_path, specs).file)
    assert len(set(files)) == 5


def test_states_are_saved_now_and_then_and_removed_with_the_store_filled(kit: Any, tmp_path: Path) -> None:
    specs = mixed(kit.tiny())
    kept = SavedBatch(tmp_path / "state", specs, every=1000.0)
    run_batched(specs, saved=kept)
    assert not kept.file.exists()
    for _ in Batched(folder=tmp_path / "state", every=0.0).run(specs, (), lambda runs: None):
        assert kept.file.exists()
    assert not kept.file.parent.exists()
    # a state that was left behind goes with the next sweep that finds its runs done
    kept.save({})
    assert list(Batched(folder=tmp_path / "state").run(specs, {spec.id for spec in specs}, lambda runs: None)) == []
    assert not kept.file.exists()


def test_a_folder_that_cannot_be_written_ends_in_one_line(kit: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StoreError, match="--out") as caught:
        list(Batched(folder=tmp_path / "file" / "state", every=0.0).run(mixed(kit.tiny()), (), lambda runs: None))
    assert "\n" not in str(caught.value)


def test_the_command_saves_beside_its_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []
    save, times = SavedBatch.save, itertools.count(1)

    def note(self: SavedBatch, state: State) -> None:
        save(self, state)
        seen.append(self.file.parent)
        if next(times) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(SavedBatch, "is_due", lambda self: True)
    monkeypatch.setattr(SavedBatch, "save", note)
    words = ["run", "matrix-fac1", "--seeds", "1", "--epochs", "1", "--out", str(tmp_path)]
    assert CliRunner().invoke(app, words).exit_code == 130
    assert seen == [tmp_path / "matrix-fac1" / "batches"] * 3
    assert len(list(seen[0].iterdir())) == 1
    assert CliRunner().invoke(app, words).exit_code == 0
    assert not seen[0].exists()
