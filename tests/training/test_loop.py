"""A run against the sweep's single runs and against its own parts."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pandas as pd
import pytest
import torch

from proxsps.methods import METHODS as TABLE
from proxsps.methods import Method
from proxsps.optim import AdaptiveLR, ProxSPS
from proxsps.problems import matrix_fac1
from proxsps.problems.vision import normalize
from proxsps.regularizers import L1
from proxsps.sweep.loop import run_single
from proxsps.sweep.spec import METHODS, METRICS, RunSpec, alpha_of_epoch
from proxsps.sweep.store import Store
from proxsps.training import Watch, train
from proxsps.training.loop import ImageRun
from proxsps.training.ranks import TrainingRanks, epoch_batches, plain_batches

CPU = TrainingRanks(torch.device("cpu"))


@pytest.mark.parametrize("method", METHODS)
def test_a_run_without_augmentation_is_the_sweeps_single_run(kit, method):
    """Two implementations of the same fifteen steps, in float32 and with another order of sums."""
    spec = kit.spec(kit.tiny(augment=False), method=method)
    mine, theirs = train(spec), run_single(spec)
    # The last metric is the median of the zetas, which amplify rounding.
    np.testing.assert_allclose(mine.metrics[:, :-1], theirs.metrics[:, :-1], rtol=2e-3, atol=1e-6)
    np.testing.assert_allclose(mine.metrics[:, -1], theirs.metrics[:, -1], rtol=2e-2, atol=1e-6)
    np.testing.assert_allclose(mine.zetas, theirs.zetas, rtol=2e-2, atol=1e-6)
    assert np.isfinite(mine.zetas).all() == TABLE[method].bounded


@pytest.mark.parametrize("method", ["prox-sps", "sgd", "own"])
def test_methods_and_regularisers_of_your_own_are_trained_as_the_sweep_runs_them(kit, method, tmp_path):
    own = Method("own", lambda params, run: torch.optim.Adagrad(params, run.lr))
    lr = {"prox-sps": 1.0, "sgd": 0.01, "own": 0.01}[method]
    chosen = own if method == "own" else method
    spec = RunSpec(kit.tiny(augment=False), chosen, "sqrt", lr, 0.02, 0, 2, L1)
    mine, theirs = train(spec, tmp_path / "run.pt"), run_single(spec)
    np.testing.assert_allclose(mine.metrics[:, :-1], theirs.metrics[:, :-1], rtol=5e-3, atol=1e-6)
    np.testing.assert_allclose(mine.extra["nonzeros"], theirs.extra["nonzeros"], atol=0.02)
    assert (mine.extra["nonzeros"][-1] < 0.9) == (method == "prox-sps")
    resumed = train(dataclasses.replace(spec, epochs=3), tmp_path / "run.pt")
    assert np.array_equal(resumed.metrics[:2], mine.metrics, equal_nan=True)
    store = Store(tmp_path / "store", "own")
    store.add([mine])
    assert set(store.runs["regularizer"]) == {"L1"}


def test_a_checkpoint_of_another_method_of_the_same_name_is_not_gone_on_from(kit, tmp_path):
    def method(eps):
        return Method("own", lambda params, run: torch.optim.Adagrad(params, run.lr, eps=eps))

    specs = [RunSpec(kit.tiny(), method(eps), "sqrt", 0.01, 0.0, 0, 1) for eps in (1e-8, 1e-3)]
    train(specs[0], tmp_path / "run.pt")
    with pytest.raises(ValueError, match="belongs to another run: it has own method"):
        train(specs[1], tmp_path / "run.pt")


def test_augmentation_changes_the_run(kit):
    assert (train(kit.spec()).metrics != train(kit.spec(kit.tiny(augment=False))).metrics).any()


@pytest.mark.parametrize("norm", [False, True])
def test_a_run_learns(kit, norm):
    problem = kit.tiny(batch_norm=norm, width=4, images=320)
    result = train(kit.spec(problem, epochs=6))
    accuracy = result.extra["val_accuracy"]
    assert accuracy[-1] > max(0.4, accuracy[0])
    np.testing.assert_allclose(accuracy, 1 - result.metrics[:, METRICS.index("val_error")])


def test_rows_are_what_they_say(kit):
    run = ImageRun(kit.spec(weight_decay=0.1), CPU)
    run.epoch(Watch())
    row = run.row()
    network = run.model.eval()
    images, labels = run.problem.train_data()
    with torch.no_grad():
        scores = network(normalize(images))
        loss = torch.nn.functional.cross_entropy(scores, labels)
        validation, wanted = run.problem.validation_data(0)
        right = (network(normalize(validation)).argmax(1) == wanted).float().mean()
        square = sum(float(p.square().sum()) for p in network.parameters())
    assert row["train_loss"] == pytest.approx(float(loss), rel=1e-5)
    assert row["val_accuracy"] == pytest.approx(float(right))
    assert row["model_norm"] == pytest.approx(math.sqrt(square), rel=1e-5)
    assert row["objective"] == pytest.approx(float(loss) + 0.05 * square, rel=1e-5)
    zetas = np.sort(run.zetas[0])
    assert len(zetas) == 5
    assert [row[name] for name in ("zeta_low", "zeta_median", "zeta_high")] == zetas[1:4].tolist()
    assert row["truncated"] == 0


@pytest.mark.parametrize("method", ["schedule-free-sps", "schedule-free-sps-spectral"])
def test_statistics_of_batch_normalisation_are_those_at_the_average(kit, method):
    """What the first normalised layer sees at the weights that are measured, as plain means over training batches."""
    run = ImageRun(kit.spec(kit.tiny(batch_norm=True), method=method, schedule="constant", lr=1.0), CPU)
    run.epoch(Watch())
    norm = next(part for part in run.model.modules() if isinstance(part, torch.nn.BatchNorm2d))
    seen = []
    norm.register_forward_pre_hook(lambda part, inputs: seen.append(inputs[0].transpose(0, 1).flatten(1)))
    with torch.no_grad():
        for images, _ in epoch_batches(run.problem, 0, 0, CPU):
            run.model(images)
    wanted = {"running_mean": [x.mean(1) for x in seen], "running_var": [x.var(1) for x in seen]}
    for name, parts in wanted.items():
        torch.testing.assert_close(getattr(norm, name), torch.stack(parts).mean(0), rtol=1e-4, atol=1e-5)
    assert norm.momentum is not None  # training goes on as before


def test_spectral_steps_are_those_of_hidden_matrices(kit):
    spec = kit.spec(method="schedule-free-sps-spectral", schedule="constant")
    run = ImageRun(spec, CPU)
    kinds = {group["metric"]: len(group["params"]) for group in run.optimizer.param_groups}
    filters = sum(isinstance(part, torch.nn.Conv2d) for part in run.model.modules())
    assert kinds == {"spectral": filters, "adam": len(run.params) - filters}
    assert train(spec).zetas.tolist() != train(kit.spec(method="schedule-free-sps", schedule="constant")).zetas.tolist()


def test_truncated_steps_are_counted(kit):
    """Depth makes <g, x> many times the loss, so that shrinking alone takes the model below its bound: u = 0."""
    run = ImageRun(kit.spec(kit.tiny(depth=56), weight_decay=0.1), CPU)
    run.epoch(Watch())
    assert run.row()["truncated"] > 0
    assert (run.zetas[0] == 0).mean() == pytest.approx(run.row()["truncated"])


def test_evaluation_in_parts_is_evaluation_at_once(kit):
    run = ImageRun(kit.spec(kit.tiny(validation_images=0)), CPU)
    data = run.problem.validation_data(0)
    with torch.no_grad():
        whole = run.problem.loss(dict(run.model.named_parameters()), *data)
        loss, _ = run.evaluate((data[0][:499], data[1][:499]))
        rest = run.problem.loss(dict(run.model.named_parameters()), data[0][499:], data[1][499:])
    assert len(data[1]) == 500
    assert (499 * loss + float(rest)) / 500 == pytest.approx(float(whole), rel=1e-5)


def test_running_statistics_are_used_to_evaluate(kit):
    run = ImageRun(kit.spec(kit.tiny(batch_norm=True)), CPU)
    data = run.problem.validation_data(0)
    before = run.evaluate(data)
    with torch.no_grad():
        run.model.norm.running_mean.add_(10)
    assert run.evaluate(data) != before
    assert int(run.model.norm.num_batches_tracked) == 0


def test_batches_of_an_epoch(kit):
    problem = kit.tiny()
    whole = list(epoch_batches(problem, 1, 2, CPU))
    assert [(len(x), len(y)) for x, y in whole] == [(16, 16)] * 5
    assert all(x.is_contiguous(memory_format=torch.channels_last) for x, _ in whole)
    again = list(epoch_batches(problem, 1, 2, CPU))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(whole, again, strict=True))
    other = list(epoch_batches(problem, 1, 3, CPU))
    assert not torch.equal(whole[0][1], other[0][1])
    plain = list(epoch_batches(kit.tiny(augment=False), 1, 2, CPU))
    assert torch.equal(plain[0][1], whole[0][1])
    assert not torch.equal(plain[0][0], whole[0][0])


def test_processes_share_every_batch(kit):
    problem = kit.tiny()
    whole = list(epoch_batches(problem, 1, 2, CPU))
    halves = [list(epoch_batches(problem, 1, 2, TrainingRanks(CPU.device, rank, 2))) for rank in (0, 1)]
    for batch, *parts in zip(whole, *halves, strict=True):
        for i in (0, 1):
            assert torch.equal(batch[i], torch.cat([part[i] for part in parts]))
    data = problem.validation_data(0)
    seen = [y for rank in (0, 1, 2) for _, y in plain_batches(data, TrainingRanks(CPU.device, rank, 3), 7)]
    assert sorted(torch.cat(seen).tolist()) == sorted(data[1].tolist())
    with pytest.raises(ValueError, match="16 images cannot be divided equally among 3 processes"):
        next(epoch_batches(problem, 1, 2, TrainingRanks(CPU.device, 0, 3)))


def test_the_adaptive_schedule_is_that_of_the_scheduler(kit):
    """alpha of a run against AdaptiveLR, which watches an optimizer take steps with the same zetas."""
    spec = kit.spec(schedule="adaptive", epochs=4, lr=100.0)
    result = train(spec)
    alphas = [alpha_of_epoch(spec, epoch, result.zetas) for epoch in range(4)]
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = ProxSPS([weight], lr=100.0)
    scheduler = AdaptiveLR(optimizer)
    for epoch in range(4):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(alphas[epoch], rel=1e-6)
        for zeta in result.zetas[epoch]:
            weight.grad = torch.ones(1, dtype=torch.float64)
            optimizer.step(loss=float(zeta))  # zeta = f / ||g||^2
        scheduler.step()
    assert alphas[0] == 100.0
    assert all(0 < alpha < 100 for alpha in alphas[1:])


def test_a_part_of_the_data_moves_the_schedule_on_by_that_part(kit):
    spec = kit.spec(kit.tiny(images=500), epochs=3)
    assert [alpha_of_epoch(spec, epoch) for epoch in range(3)] == [1 / math.sqrt(1 + epoch / 4) for epoch in range(3)]


def test_a_diverging_run_is_a_result(kit, tmp_path):
    file = tmp_path / "run.pt"
    result = train(kit.spec(method="sgd", lr=1e30, epochs=3), file)
    assert result.diverged_at == 1
    assert np.isnan(result.metrics).all()
    assert all(np.isnan(values).all() for values in result.extra.values())
    assert not file.exists()


def test_rows_go_into_the_store_of_sweeps(kit, tmp_path):
    store = Store(tmp_path, "deep")
    store.add([train(kit.spec()), train(kit.spec(method="adamw", schedule="constant"))])
    runs = pd.read_parquet(tmp_path / "runs.parquet")
    assert {*METRICS, *ImageRun.extra, "alpha", "status"} <= set(runs.columns)
    assert runs.groupby("method").size().to_dict() == {"adamw": 3, "prox-sps": 3}
    assert runs.query("method == 'adamw'")["zeta_low"].isna().all()
    assert len(pd.read_parquet(tmp_path / "steps.parquet")) == 2 * 3 * 5


def test_bfloat16_is_close_and_keeps_weights_in_float32(kit):
    spec = kit.spec(epochs=1)
    low, full = (ImageRun(spec, CPU, amp) for amp in (True, False))
    (batch, *_) = epoch_batches(low.problem, 0, 0, CPU)
    losses = [float(next(run.steps([batch]))) for run in (low, full)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    assert {p.dtype for p in low.model.parameters()} == {torch.float32}
    assert math.isfinite(low.evaluate(low.problem.validation_data(0))[0])


def test_other_problems_are_refused():
    with pytest.raises(ValueError, match="Only image classification is trained here, got the problem 'matrix-fac"):
        train(RunSpec(matrix_fac1(), "prox-sps", "sqrt", 1.0, 0.0, 0, 1))


def test_a_watch_hears_everything(kit):
    heard = []

    class Loud(Watch):
        def start(self, epochs, steps):
            heard.append(("start", epochs, steps))

        def step(self, epoch, loss, optimizer):
            heard.append(("step", epoch, float(loss)))

        def epoch(self, row):
            heard.append(("epoch", row["val_accuracy"]))

    result = train(kit.spec(epochs=2), watch=Loud())
    assert heard[0] == ("start", 0, 5)
    assert [kind for kind, *_ in heard[1:]] == [*["step"] * 5, "epoch"] * 2
    assert heard[-1] == ("epoch", result.extra["val_accuracy"][-1])


def schedule_free(params, run):
    return pytest.importorskip("schedulefree").AdamWScheduleFree(params, lr=run.lr)


def test_optimizers_with_two_kinds_of_weights_are_measured_saved_and_continued_with_the_right_ones(kit, tmp_path):
    """Schedule-free: y is trained, x is measured and saved. A run that is resumed is bitwise the one that was not."""
    spec = kit.spec(method="prox-sps", epochs=2)
    spec = dataclasses.replace(spec, method=Method("free", schedule_free), schedule="constant", lr=0.01)
    file, seen = tmp_path / "run.pt", []

    class Modes(Watch):
        def step(self, epoch, loss, optimizer):
            seen.append(optimizer.param_groups[0]["train_mode"])

    train(spec, file, watch=Modes())
    assert seen == [True] * 10
    saved = torch.load(file, weights_only=True)
    assert not saved["optimizer"]["param_groups"][0]["train_mode"]
    run = ImageRun(spec, CPU)
    run.resume(file)
    row, (images, labels) = run.row(), run.problem.train_data()
    assert run.evaluate((images, labels))[0] == row["train_loss"]
    run.optimizer.train()
    assert run.evaluate((images, labels))[0] != row["train_loss"]
    longer = dataclasses.replace(spec, epochs=3)
    resumed, whole = train(longer, file), train(longer)
    assert np.array_equal(resumed.metrics, whole.metrics, equal_nan=True)
    assert run_single(longer).diverged_at is None
