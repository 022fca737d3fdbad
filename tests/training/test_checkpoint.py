"""Runs that are cut off and go on; checkpoints of other runs."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from faults import Harm, file_limit

import proxsps
from proxsps import _sealed
from proxsps.sweep.spec import METHODS
from proxsps.training import CheckpointError, Watch, checkpoint, train


class Stop(Watch):
    """Breaks a run off in the middle of an epoch."""

    def __init__(self, epoch: int, step: int) -> None:
        self.left = epoch * 5 + step

    def step(self, epoch, loss, optimizer):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def weights(file: Path) -> dict[str, torch.Tensor]:
    return torch.load(file, weights_only=True)["model"]


def assert_same(one: Path, other: Path) -> None:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("method", [*METHODS, "adaptive"])
def test_a_resumed_run_is_bitwise_the_undisturbed_one(kit, tmp_path, method, norm):
    options = {"method": "prox-sps", "schedule": "adaptive"} if method == "adaptive" else {"method": method}
    spec = kit.spec(kit.tiny(batch_norm=norm), **options)
    whole = train(spec, tmp_path / "whole.pt")
    with pytest.raises(KeyboardInterrupt):
        train(spec, tmp_path / "parts.pt", watch=Stop(1, 3))
    assert len(torch.load(tmp_path / "parts.pt", weights_only=True)["history"]["metrics"]) == 1
    resumed = train(spec, tmp_path / "parts.pt")
    assert_same(tmp_path / "whole.pt", tmp_path / "parts.pt")
    np.testing.assert_array_equal(resumed.metrics, whole.metrics)
    np.testing.assert_array_equal(resumed.zetas, whole.zetas)
    for name, values in whole.extra.items():
        np.testing.assert_array_equal(resumed.extra[name], values)


SCRIPT = """
import sys, time
from pathlib import Path
import torch
from proxsps.problems.vision import ImageClassification
from proxsps.sweep.spec import RunSpec
from proxsps.training import Watch, train

class Hang(Watch):
    def step(self, epoch, loss, optimizer):
        if epoch == 1:
            print("in epoch 2", flush=True)
            time.sleep(60)

torch.set_num_threads(1)
problem = ImageClassification(
    data="synthetic", depth=8, width=2, size=8, images=80, validation_images=30, batch_size=16
)
train(RunSpec(problem, "prox-sps", "sqrt", 1.0, 5e-4, 0, 3), Path(sys.argv[1]), watch=Hang())
"""


def test_killed_in_epoch_two(kit, forked, tmp_path):
    """kill -9 in a process of its own; then the same parameters, bitwise, as without."""
    file = tmp_path / "killed.pt"
    environment = {**os.environ, "PYTHONPATH": str(Path(proxsps.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, str(file)]
    with forked(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout.readline() == "in epoch 2\n"
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    spec = kit.spec()
    train(spec, file)
    train(spec, tmp_path / "whole.pt")
    assert_same(file, tmp_path / "whole.pt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed.pt", "whole.pt"]


def test_a_kill_while_writing_leaves_the_last_checkpoint(kit, tmp_path):
    file = tmp_path / "run.pt"
    train(kit.spec(epochs=1), file)
    before = file.read_bytes()
    file.with_name(".run.pt.123.part").write_bytes(before[:100])  # what a killed process leaves
    train(kit.spec(epochs=2), file)
    assert len(torch.load(file, weights_only=True)["history"]["metrics"]) == 2


def test_a_finished_run_can_be_made_longer(kit, tmp_path):
    train(kit.spec(epochs=2), tmp_path / "run.pt")
    longer = train(kit.spec(epochs=3), tmp_path / "run.pt")
    whole = train(kit.spec(epochs=3), tmp_path / "whole.pt")
    assert_same(tmp_path / "run.pt", tmp_path / "whole.pt")
    np.testing.assert_array_equal(longer.metrics, whole.metrics)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"method": "sps"}, "method 'prox-sps' instead of 'sps'"),
        ({"weight_decay": 1e-3}, "weight_decay 0.0005 instead of 0.001"),
        ({"seed": 1}, "seed 0 instead of 1"),
        ({"epochs": 1}, "has 2 epochs already, more than 1"),
        ({"depth": 14}, "problem depth 8 instead of 14"),
        ({"width": 3, "batch_norm": True}, "problem width 2 instead of 3, problem batch_norm False instead of True"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_and_kept(kit, tmp_path, change, reason):
    file = tmp_path / "run.pt"
    spec = kit.spec(epochs=2)
    train(spec, file)
    before = file.read_bytes()
    own = {key: change[key] for key in change if hasattr(spec, key)}
    problem = dataclasses.replace(spec.problem, **{key: change[key] for key in change if key not in own})
    with pytest.raises(CheckpointError) as caught:
        train(dataclasses.replace(spec, problem=problem, **own), file)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert file.read_bytes() == before


def test_every_flipped_bit_is_found(kit, tmp_path):
    """Torch's reader does not look at the checksums in its files: half of such flips gave other numbers before."""
    file = tmp_path / "run.pt"
    spec = train(kit.spec(epochs=1), file).spec
    good = file.read_bytes()
    assert checkpoint.load(file, spec, torch.device("cpu"))["format"] == checkpoint.FORMAT
    rng = np.random.default_rng(0)
    for place in [*rng.integers(0, len(good), 120), *range(len(good) - 100, len(good))]:
        content = bytearray(good)
        content[place] ^= 1 << int(rng.integers(8))
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"is damaged.* Delete it to start the run again") as caught:
            checkpoint.load(file, spec, torch.device("cpu"))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content.pop("run"),
        lambda content: content.pop("model"),
        lambda content: content.pop("optimizer"),
        lambda content: content.pop("history"),
        lambda content: content["history"].pop("metrics"),
        lambda content: content["history"].pop("extra"),
        lambda content: content["history"].update(zetas=torch.zeros(3, 3)),
        lambda content: content["history"].update(zetas=[1, 2]),
        lambda content: content["model"].popitem(),
        lambda content: content["model"].update(dict.fromkeys(content["model"], torch.zeros(1))),
        lambda content: content["optimizer"].pop("param_groups"),
        lambda content: content["optimizer"].update(param_groups=[]),
    ],
)
def test_a_checkpoint_with_missing_parts_is_refused(kit, tmp_path, damage):
    file = tmp_path / "run.pt"
    train(kit.spec(epochs=1), file)
    content = torch.load(file, weights_only=True)
    damage(content)
    _sealed.write(file, content)
    with pytest.raises(CheckpointError, match=r"lacks parts of a run\. Delete it to start the run again") as caught:
        train(kit.spec(), file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["text", "empty", "cut", "unsealed", "other", "version", "harm", "folder"])
def test_other_files_are_refused_and_kept(kit, tmp_path, content):
    file, trace = tmp_path / "run.pt", tmp_path / "trace"
    train(kit.spec(epochs=1), file)
    match content:
        case "text":
            file.write_text("weights")
        case "empty":
            file.write_bytes(b"")
        case "cut":
            file.write_bytes(file.read_bytes()[:-200])
        case "unsealed":
            torch.save(torch.load(file, weights_only=True), file)
        case "other":
            _sealed.write(file, {"model": {}})
        case "version":
            _sealed.write(file, {**torch.load(file, weights_only=True), "format": 0})
        case "harm":
            _sealed.write(file, {"format": checkpoint.FORMAT, "run": Harm(trace)})
        case "folder":
            file.unlink()
            file.mkdir()
    before = None if file.is_dir() else file.read_bytes()
    with pytest.raises(CheckpointError, match=r"is not a checkpoint|another version|lacks parts|plain data") as caught:
        train(kit.spec(), file)
    assert "\n" not in str(caught.value)
    assert "weights_only" not in str(caught.value)
    assert not trace.exists()
    assert before is None or file.read_bytes() == before


def test_a_place_that_cannot_be_written_to(kit, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        train(kit.spec(epochs=1), tmp_path / "file" / "run.pt")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match="File name too long"):  # of the file beside, before the first epoch
        train(kit.spec(epochs=1), tmp_path / "folder" / ("x" * 250), watch=Stop(0, 1))

    class Late(Watch):
        def epoch(self, row):
            (tmp_path / "folder" / "late.pt").mkdir()

    with pytest.raises(CheckpointError, match="cannot be written"):
        train(kit.spec(epochs=1), tmp_path / "folder" / "late.pt", watch=Late())
    assert sorted(path.name for path in (tmp_path / "folder").iterdir()) == ["late.pt"]


def test_a_disk_that_becomes_full_keeps_the_last_checkpoint(kit, tmp_path):
    file, whole = tmp_path / "run.pt", tmp_path / "whole.pt"
    train(kit.spec(epochs=1), file)
    before = file.read_bytes()
    with file_limit(len(before) // 2), pytest.raises(CheckpointError) as caught:
        train(kit.spec(epochs=2), file)
    assert str(caught.value) == (
        f"The checkpoint {file} cannot be written ({os.strerror(errno.EFBIG)}). Make room, or choose another place; "
        "the same run continues from the last checkpoint that was written."
    )
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]
    train(kit.spec(epochs=2), file)
    train(kit.spec(epochs=2), whole)
    assert_same(file, whole)
