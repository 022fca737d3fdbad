"""Points of a path on disk: damage, other content, code, and full disks are noticed, and nothing is believed."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from faults import Harm, file_limit, flipped
from torch import nn

from proxsps import _sealed
from proxsps.sparsity import PathError, strength_path

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
STRENGTHS = [1e-3, 2e-3, 4e-3]


class Job:
    """A path whose training is one known change of the weights, or the change that is given for a strength."""

    def __init__(self, hidden: int = 6) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 2))
        self.trained: list[float] = []
        self.changes: dict[float, float] = {}

    def train(self, model, groups):
        phi = groups[0]["regularizer"]
        self.trained.append(0.0 if phi is None else phi.lam)
        with torch.no_grad():
            model[0].weight.mul_(self.changes.get(self.trained[-1], 0.9))

    def run(self, folder, strengths=STRENGTHS, accuracy=0.9, **options):
        options = {"refine": 0, **options}
        return strength_path(
            self.model, self.train, lambda _: accuracy, X, strengths=strengths, folder=folder, **options
        )

    @property
    def weights(self):
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def saved(tmp_path):
    """A finished path, and the file of its second point."""
    job = Job()
    job.run(tmp_path)
    return job, tmp_path / "point-001.pt"


def refusal(folder: Path) -> str:
    """What is said about a folder that cannot be used. Nothing is trained, and nothing of the point is loaded."""
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    again = Job()
    with pytest.raises(PathError) as caught:
        again.run(folder)
    assert not again.trained
    assert same(again.weights, _sealed.read(folder / "point-000.pt")["model"])
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    text = str(caught.value)
    assert "\n" not in text
    assert "weights_only" not in text
    return text


def test_every_flipped_bit_and_every_cut_is_noticed(saved):
    """Torch's reader does not look at the checksums in its files: 295 of 300 flips were believed before."""
    _, file = saved
    good = file.read_bytes()
    bits = np.random.default_rng(0).integers(0, 8 * len(good), 250)
    damaged = [flipped(good, int(bit)) for bit in (*bits, *range(8 * (len(good) - 80), 8 * len(good), 8))]
    damaged += [good[:size] for size in (0, 1, 100, len(good) // 2, len(good) - 80, len(good) - 1)]
    damaged += [good + b"\0", good[1:]]
    for content in damaged:
        with pytest.raises(_sealed.SealError, match="is damaged"):
            _sealed.unsealed(content)
    for content in damaged[::40]:
        file.write_bytes(content)
        assert "is damaged" in refusal(file.parent)
    file.unlink()  # as the error says
    again = Job()
    again.run(file.parent)
    assert again.trained == STRENGTHS[:1]
    assert file.read_bytes() == good


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda content: content.pop("model"), "does not have the parts of a point"),
        (lambda content: content.update(more=1), "does not have the parts of a point"),
        (lambda content: content.update(model=[1]), "does not have the parts of a point"),
        (lambda content: content["point"].update(more=1), "does not have the numbers of a point"),
        (lambda content: content["point"].pop("size"), "does not have the numbers of a point"),
        (lambda content: content["point"].update(size="small"), "does not have the numbers of a point"),
        (lambda content: content["model"].update(more=torch.ones(2)), "has the tensors of another model"),
        (lambda content: content["model"].popitem(), "has the tensors of another model"),
        (lambda content: content.update(model=Job(7).weights), "has the tensors of another model"),
        (lambda content: content["model"].update({"0.bias": 1.0}), "does not have the tensors of a network"),
        (lambda content: content["model"]["2.weight"].fill_(math.nan), "has weights that are not finite"),
        (lambda content: content["model"]["0.bias"].mul_(math.inf), "has weights that are not finite"),
    ],
)
def test_other_content_is_refused_although_its_digest_fits(saved, damage, said):
    _, file = saved
    content = _sealed.read(file)
    damage(content)
    _sealed.write(file, content)
    assert refusal(file.parent) == (
        f"{file} {said}. Delete it to train this strength again, or restore it from a copy."
    )


@pytest.mark.parametrize("content", ["harm", "list", "unsealed", "unsealed harm"])
def test_code_is_not_run_and_points_without_a_digest_are_not_read(saved, tmp_path, content):
    _, file = saved
    trace = tmp_path / "trace"
    match content:
        case "harm":
            _sealed.write(file, {**_sealed.read(file), "model": Harm(trace)})
        case "list":
            _sealed.write(file, [1])
        case "unsealed":  # as the version before wrote it
            torch.save(_sealed.read(file), file)
        case "unsealed harm":
            torch.save({"model": Harm(trace)}, file)
    text = refusal(file.parent)
    assert not trace.exists()
    reason = {"harm": "holds more than tensors and plain data", "list": "the parts of a point"}
    assert reason.get(content, "was written by another version") in text
    assert "Delete it to train this strength again" in text


def test_torch_reads_a_point(saved):
    """The digest is a comment for other readers."""
    job, file = saved
    last = torch.load(file.with_name("point-003.pt"), weights_only=True)
    assert same(last["model"], job.weights)


def test_a_full_disk_is_said_and_the_path_goes_on_when_there_is_room(tmp_path):
    expected = Job()
    path = expected.run(None)
    Job().run(tmp_path, STRENGTHS[:1])
    file = tmp_path / "point-002.pt"
    with file_limit(1500), pytest.raises(PathError) as caught:
        Job().run(tmp_path)
    assert str(caught.value) == (
        f"{file} cannot be written ({os.strerror(errno.EFBIG)}). Make room, or choose another folder; the same call "
        "continues from the points that were written."
    )
    assert sorted(one.name for one in tmp_path.iterdir()) == ["point-000.pt", "point-001.pt"]
    again = Job()
    assert again.run(tmp_path) == path
    assert again.trained == STRENGTHS[1:]
    assert same(again.weights, expected.weights)


def test_weights_that_are_not_finite_are_not_believed(tmp_path):
    """Whatever `evaluate` returns for them: the largest of scores that are NaN is a class too."""
    job = Job()
    job.changes = {0.0: math.nan}
    with pytest.raises(ValueError, match="The dense network has weights that are not finite: its training diverged"):
        job.run(tmp_path)
    assert not any(tmp_path.iterdir())
    job = Job()
    job.changes = {STRENGTHS[1]: math.inf}
    path = job.run(tmp_path)
    assert math.isnan(path.points[2].accuracy)
    assert path.best.strength == STRENGTHS[2]  # which starts from the last good weights
    assert all(tensor.isfinite().all() for tensor in job.weights.values())
    assert sorted(one.name for one in tmp_path.iterdir()) == [f"point-{i:03d}.pt" for i in (0, 1, 3)]
    job = Job()
    job.changes = dict.fromkeys(STRENGTHS[1:], math.nan)
    path = job.run(None)
    assert path.best.strength == STRENGTHS[0]
    assert path.reason.startswith("The accuracy is not a number at strength 0.002: the training diverged.")


def test_buffers_may_be_infinite(tmp_path):
    for _ in range(2):
        job = Job()
        job.model.register_buffer("mask", torch.full((2,), -math.inf))
        job.run(tmp_path)
    assert not job.trained


def test_settings_that_could_not_be_read_again(tmp_path):
    with pytest.raises(ValueError, match="settings must be plain data"):
        Job().run(tmp_path / "path", settings={"optimizer": Path("adam")})
    assert not (tmp_path / "path").exists()
