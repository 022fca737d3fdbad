"""The path over the strength: warm starts, early stops, resuming, and what happens when everything dies."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from proxsps import ProxSPS, ProxSPSAdam
from proxsps.sparsity import PathError, StrengthPath, TraceError, shrink, sparsity_report, strength_path, unit_groups
from proxsps.sparsity.path import DEFAULT_STEPS
from proxsps.sparsity.tables import Table

X = torch.randn(200, 8, generator=torch.Generator().manual_seed(0))
LABELS = (X[:, 0] * X[:, 1] > 0).long()


STRENGTHS = [1e-3, 5e-3, 2e-2, 8e-2]


class Job:
    """A small classification problem whose training depends on nothing but the model and the groups."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 2))
        self.trained: list[float] = []
        self.starts: list[torch.Tensor] = []
        self.ends: list[torch.Tensor] = []
        self.fail_at = -1

    def train(self, model, groups):
        self.steps(model, ProxSPS(groups, lr=1.0))

    def steps(self, model, opt):
        phi = opt.param_groups[0]["regularizer"]
        if len(self.trained) == self.fail_at:
            raise KeyboardInterrupt
        self.trained.append(0.0 if phi is None else phi.lam)
        self.starts.append(model[0].weight.detach().clone())
        for epoch in range(12):
            for group in opt.param_groups:
                group["lr"] = 1 - epoch / 12
            for batch in torch.arange(200).split(50):
                opt.zero_grad()
                loss = nn.functional.cross_entropy(model(X[batch]), LABELS[batch])
                loss.backward()
                opt.step(loss=loss)
        self.ends.append(model[0].weight.detach().clone())

    @torch.no_grad()
    def evaluate(self, model):
        return float((model(X).argmax(1) == LABELS).float().mean())

    def run(self, **options):
        return strength_path(self.model, self.train, self.evaluate, X[:4], **options)


def test_from_dense_to_sparse_with_the_default_path():
    job = Job()
    path = job.run(max_drop=0.05)
    assert path.points[0].strength == 0
    assert path.points[0].size == 1
    strengths = [point.strength for point in path.points[1:]]
    assert strengths[1] == pytest.approx(2**0.5 * strengths[0])
    assert len(strengths) <= len(DEFAULT_STEPS) + 2
    # Two strengths were too much; two more lie between the last good one and the first of these.
    growing, refined = strengths[:-2], strengths[-2:]
    assert growing == sorted(growing)
    assert all(growing[-3] < strength < growing[-2] for strength in refined)
    # Each point starts where the last one ended, the refined ones where the last good one did.
    count = len(growing)
    assert all(torch.equal(job.starts[i + 1], job.ends[i]) for i in range(count))
    assert torch.equal(job.starts[count + 1], job.ends[count - 2])
    best = path.best
    assert best.accuracy >= max(point.accuracy for point in path.points[: path.chosen]) - 0.05
    assert best.size < 0.6
    assert best.dead_units >= 8
    # The model is the chosen one, not the last one.
    assert job.evaluate(job.model) == best.accuracy
    small = shrink(job.model, X[:4], timing_seconds=0).report
    assert small.after.parameters == best.parameters
    frame = path.frame
    assert frame["chosen"].tolist().index(True) == path.chosen
    assert "<- chosen" in str(path)


def test_stops_at_the_wanted_size():
    job = Job()
    path = job.run(max_drop=1.0, keep=0.7)
    assert path.chosen == len(path.points) - 1
    assert path.best.size <= 0.7 < path.points[-2].size
    assert path.reason.startswith("Size")


def scripted(accuracies):
    """A job whose accuracies are given, at strengths of 1, 2, 3, ..."""
    job = Job()
    job.train = lambda model, groups: None
    given = iter(accuracies)
    job.evaluate = lambda model: next(given)
    return job


GROWING = [float(strength) for strength in range(1, 6)]


def test_one_bad_accuracy_does_not_end_the_path():
    path = scripted([0.9, 0.9, 0.7, 0.9, 0.7, 0.7]).run(strengths=GROWING, refine=0)
    assert [point.strength for point in path.points] == [0, *GROWING]
    assert path.best.strength == 3
    assert path.reason.startswith("Accuracy fell to 70.00% at strength 4,")
    path = scripted([0.9, 0.9, 0.7]).run(strengths=GROWING, refine=0, patience=1)
    assert len(path.points) == 3
    path = scripted([0.9, 0.9, 0.7, 0.7, 0.7, 0.9]).run(strengths=GROWING, refine=2)
    assert [point.strength for point in path.points] == pytest.approx([0, 1, 2, 3, 2**0.5, 2**0.25])
    assert path.best.strength == pytest.approx(2**0.25)


def test_a_path_that_ends_on_a_bad_accuracy_is_refined():
    path = scripted([0.9, 0.9, 0.7, 0.9]).run(strengths=GROWING[:2], refine=1)
    assert [point.strength for point in path.points] == pytest.approx([0, 1, 2, 2**0.5])
    assert path.chosen == 3


def test_everything_dead_after_a_bad_accuracy_is_refined_below_the_first():
    job = Job()

    def train(model, groups):
        phi = groups[0]["regularizer"]
        job.trained.append(0.0 if phi is None else phi.lam)
        if job.trained[-1] == 3:
            for param in model.parameters():
                param.data.zero_()

    path = strength_path(
        job.model, train, lambda _: 0.7 if job.trained[-1] >= 2 else 0.9, X[:4], strengths=GROWING, refine=1
    )
    assert job.trained == pytest.approx([0, 1, 2, 3, 2**0.5])
    assert path.best.strength == pytest.approx(2**0.5)
    assert "Accuracy fell to 70.00% at strength 2," in path.reason
    assert any((param != 0).any() for param in job.model.parameters())


def test_weights_and_rows():
    for kind in ("weights", "rows"):
        path = Job().run(kind=kind, max_drop=0.3, keep=0.5)
        assert path.best.size == pytest.approx(1 - path.best.zeros)
        assert path.best.zeros >= 0.5


def test_everything_dead_keeps_the_last_good_point(tmp_path):
    job = Job()
    path = job.run(strengths=[1e-3, 50.0, 100.0], max_drop=1.0, folder=tmp_path)
    assert path.chosen == 1
    assert len(path.points) == 3  # the next strength is not tried
    assert "Everything is dead at strength 50" in path.reason
    assert "Try strengths up to 0.224" in path.reason
    assert job.evaluate(job.model) == path.best.accuracy > 0.8
    assert (job.model[0].weight != 0).any()
    saved = torch.load(tmp_path / "point-001.pt", weights_only=True)
    assert all(torch.equal(saved["model"][name], tensor) for name, tensor in job.model.state_dict().items())


def test_an_interrupted_path_goes_on_and_ends_the_same(tmp_path):
    whole = Job()
    expected = whole.run(max_drop=0.05, strengths=STRENGTHS)
    job = Job()
    job.fail_at = 3
    with pytest.raises(KeyboardInterrupt):
        job.run(max_drop=0.05, strengths=STRENGTHS, folder=tmp_path, settings={"epochs": 12})
    assert sorted(file.name for file in tmp_path.iterdir()) == [f"point-{i:03d}.pt" for i in range(3)]
    again = Job()
    found = again.run(max_drop=0.05, strengths=STRENGTHS, folder=tmp_path, settings={"epochs": 12})
    assert found == expected
    assert len(again.trained) == len(expected.points) - 3
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], tensor)
    third = Job()
    assert third.run(max_drop=0.05, strengths=STRENGTHS, folder=tmp_path, settings={"epochs": 12}) == expected
    assert not third.trained


class OneOptimizer(Job):
    """The same with one optimizer for the whole path, and what it remembers before and after each strength."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[ProxSPSAdam] = []
        self.before: list[dict] = []
        self.after: list[dict] = []

    def make(self, groups):
        self.made.append(ProxSPSAdam(groups))
        return self.made[-1]

    def train(self, model, optimizer):
        assert [optimizer] == self.made
        self.before.append(optimizer.state_dict()["state"])
        self.steps(model, optimizer)
        self.after.append(optimizer.state_dict()["state"])

    def run(self, **options):
        return super().run(optimizer=self.make, **options)


def test_one_optimizer_goes_along_the_path():
    job = OneOptimizer()
    accuracies = iter([0.9, 0.9, 0.9, 0.5, 0.5, 0.5, 0.5])
    job.evaluate = lambda model: next(accuracies)
    path = job.run(strengths=[1e-3, 2e-3, 3e-3, 4e-3, 5e-3])
    assert job.trained == pytest.approx([point.strength for point in path.points])
    assert path.chosen == 2
    assert not job.before[0]
    # The last two strengths are between the last good one and the next, and start from the last good state.
    for one, source in zip(job.before[1:], [0, 1, 2, 3, 2, 2], strict=True):
        for key, state in job.after[source].items():
            assert all(torch.equal(torch.as_tensor(one[key][name]), torch.as_tensor(state[name])) for name in state)


def test_an_interrupted_path_with_one_optimizer_goes_on_and_ends_the_same(tmp_path):
    options = {"max_drop": 0.05, "strengths": STRENGTHS}
    whole, job, again = OneOptimizer(), OneOptimizer(), OneOptimizer()
    expected = whole.run(**options)
    job.fail_at = 3
    with pytest.raises(KeyboardInterrupt):
        job.run(**options, folder=tmp_path)
    assert again.run(**options, folder=tmp_path) == expected
    assert len(again.trained) == len(expected.points) - 3
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], tensor)
    with pytest.raises(PathError, match="it has one optimizer True instead of False"):
        Job().run(**options, folder=tmp_path)


def test_one_optimizer_needs_the_same_groups_at_all_strengths():
    def kind(model, strength):
        groups = unit_groups(model, X[:4], strength)
        return groups if strength == 1 else groups[:1]

    with pytest.raises(ValueError, match="groups of the same parameters for all strengths"):
        OneOptimizer().run(kind=kind, strengths=[0.5])


def halved(factor):
    return lambda model, strength: unit_groups(model, X[:4], factor * strength)


def test_a_function_as_kind_counts_by_its_content(tmp_path):
    """Lambdas share a name."""
    first, same, other = Job(), Job(), Job()
    options = {"strengths": [1e-3], "max_drop": 1.0, "folder": tmp_path}
    first.run(kind=halved(0.5), **options)
    same.run(kind=halved(0.5), **options)
    assert len(first.trained) == 2
    assert not same.trained
    with pytest.raises(PathError, match="it has content of kind"):
        other.run(kind=halved(0.25), **options)


def test_folders_of_others_are_refused(tmp_path):
    Job().run(strengths=[1e-3], max_drop=1.0, folder=tmp_path, settings={"epochs": 12})
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(PathError, match="belongs to another path: it has epochs 12 instead of 20"):
        Job().run(strengths=[1e-3], folder=tmp_path, settings={"epochs": 20})
    with pytest.raises(PathError, match=r"it has strength 0\.001 instead of 0\.002"):
        Job().run(strengths=[2e-3], max_drop=1.0, folder=tmp_path, settings={"epochs": 12})
    with pytest.raises(PathError, match="kind 'units' instead of 'weights'"):
        Job().run(kind="weights", folder=tmp_path, settings={"epochs": 12})
    other = Job()
    other.model[0].bias.data[0] += 1e-3
    with pytest.raises(PathError, match=r"it has starting weights '[0-9a-f]{16}' instead of "):
        other.run(strengths=[1e-3], max_drop=1.0, folder=tmp_path, settings={"epochs": 12})
    assert not other.trained
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    (tmp_path / "point-000.pt").write_bytes(b"damaged")
    with pytest.raises(PathError, match="is another kind of file, is damaged"):
        Job().run(folder=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(PathError, match="cannot be made"):
        Job().run(folder=tmp_path / "file")


@pytest.mark.parametrize("strengths", [[], [0.0], [1e-3, float("inf")], [2e-3, 1e-3], [-1.0]])
def test_strengths_must_be_positive_finite_and_growing(strengths):
    with pytest.raises(ValueError, match="strengths must be positive, finite and growing"):
        Job().run(strengths=strengths)


@pytest.mark.parametrize(
    ("option", "value"), [("keep", 0.0), ("keep", 1.5), ("max_drop", -0.1), ("max_drop", float("nan")), ("patience", 0)]
)
def test_other_options(option, value):
    with pytest.raises(ValueError, match=f"{option} must be"):
        Job().run(**{option: value})


def test_an_accuracy_that_is_not_finite(tmp_path):
    with pytest.raises(ValueError, match="evaluate returned nan for the dense network"):
        scripted([float("nan")]).run(strengths=GROWING, folder=tmp_path)
    assert not any(tmp_path.iterdir())  # so that the next call trains it again
    path = scripted([0.9, 0.9, float("nan"), float("nan")]).run(strengths=GROWING, refine=0)
    assert path.best.strength == 1


def test_a_model_that_cannot_be_traced_is_not_trained(tmp_path):
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 2)

        def forward(self, x):
            return self.layer(x).detach()

    job = Job()
    with pytest.raises(TraceError, match="No gradient flows"):
        strength_path(Cut(), job.train, job.evaluate, X[:4], folder=tmp_path / "path")
    assert not job.trained
    assert not (tmp_path / "path").exists()


def test_a_model_without_units_says_so():
    with pytest.raises(ValueError, match="has no units that could be removed"):
        strength_path(nn.Linear(8, 2), lambda *_: None, lambda _: 1.0, X[:4])


@pytest.mark.parametrize(
    "frame",
    [lambda: StrengthPath().frame, lambda: Table(["a"], [[1]]).frame(), lambda: sparsity_report(nn.Linear(2, 2)).frame],
    ids=["path", "table", "report"],
)
def test_a_frame_without_pandas_names_the_extra(frame, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs the package pandas, which is not installed: .*\[sparsity\]"):
        frame()
