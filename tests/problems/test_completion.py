"""Matrix completion: the published split and model, on generated files of the published layout."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch import nn

from proxsps.problems import MatrixCompletion, completion, datasets
from proxsps.problems.completion import split_measurements
from proxsps.problems.datasets import DataError, find_sensors, parse_sensors, synthetic_sensors
from proxsps.sweep.spec import RunSpec

SEED = 12345678


def test_start_is_drawn_in_the_published_order():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        expected = [nn.Linear(130, 24, bias=False).weight.T, nn.Linear(720, 24, bias=False).weight.T]
        expected += [torch.randn(130), torch.randn(720)]
    start = MatrixCompletion(data="synthetic").start()
    assert list(start) == ["U", "V", "bias_U", "bias_V"]
    assert all(torch.equal(value, other) for value, other in zip(start.values(), expected, strict=True))


def test_split_of_a_file_is_the_published_one(sensor_file):
    file = sensor_file()
    table = parse_sensors(file.read_bytes(), str(file))
    np.testing.assert_array_equal(table, synthetic_sensors(3))

    # Pairs and values permuted by two generators of one seed, as the published procedure has it.
    places = np.argwhere(table)
    values = np.array([table[i, j] for i, j in places])
    places, values = np.random.RandomState(SEED).permutation(places), np.random.RandomState(SEED).permutation(values)
    count = int(0.8 * len(values))
    assert (len(values), count) == (56158, 44926)
    values = (values - values[:count].mean()) / values[:count].std()

    train, held_out = split_measurements(table, SEED)
    for (sensor, hour, value), part in ((train, slice(None, count)), (held_out, slice(count, None))):
        np.testing.assert_array_equal(torch.stack([sensor, hour], 1).numpy(), places[part])
        np.testing.assert_array_equal(value.numpy(), values[part].astype(np.float32))
    assert abs(train[2].double().mean()) < 1e-6
    assert abs(train[2].double().std(correction=0) - 1) < 1e-6


def test_loss_is_that_of_the_model_on_indicator_vectors():
    problem = MatrixCompletion(data="synthetic")
    params = problem.start()
    sensor, hour, value = (array[:128] for array in problem.train_data())
    W = params["U"] @ params["V"].T + params["bias_U"][:, None] + params["bias_V"]
    rows, columns = nn.functional.one_hot(sensor, 130).float(), nn.functional.one_hot(hour, 720).float()
    output = ((rows @ W) * columns).sum(1)
    torch.testing.assert_close(problem.loss(params, sensor, hour, value), nn.MSELoss()(output, value))
    assert problem.steps_per_epoch == 350


def test_validation_error_in_both_conventions():
    published, text = MatrixCompletion(data="synthetic"), MatrixCompletion(data="synthetic", convention="text")
    params, data = published.start(), published.validation_data(0)
    assert len(data[0]) == 56158 - 44926
    whole = published.loss(params, *data).sqrt()
    torch.testing.assert_close(text.validation_error(params, *data), whole)
    batches = list(zip(*(array.split(128) for array in data), strict=True))
    mean = sum(len(batch[0]) * published.loss(params, *batch).sqrt() for batch in batches) / len(data[0])
    torch.testing.assert_close(published.validation_error(params, *data), mean)
    assert 0.98 * whole < mean < whole
    exact = tuple(array[:256] for array in data)
    assert torch.isfinite(published.validation_error(params, *exact))


def test_synthetic_data_resembles_the_real_one():
    table = synthetic_sensors(0)
    measured = table[table != 0]
    assert table.shape == (130, 720)
    assert len(measured) == 56158
    assert 22 < measured.mean() < 26
    assert 9 < measured.std() < 13
    assert not np.array_equal(table, synthetic_sensors(1))


def test_a_folder_of_data_is_used(sensor_file, tmp_path, monkeypatch, no_cache):
    folder = tmp_path / "folder"
    (folder / "sensor").mkdir(parents=True)
    file = sensor_file().rename(folder / "sensor" / datasets.SENSOR_FILE)
    monkeypatch.setenv("PROXSPS_DATA", str(folder))
    monkeypatch.setattr(datasets, "SENSOR_SHA256", datasets.hashlib.sha256(file.read_bytes()).hexdigest())
    train = MatrixCompletion().train_data()
    assert len(train[0]) == 44926
    assert all(torch.equal(a, b) for a, b in zip(train, split_measurements(synthetic_sensors(3), SEED)[0], strict=True))
    file.rename(folder / datasets.SENSOR_FILE)
    assert find_sensors() == folder / datasets.SENSOR_FILE


@pytest.mark.skipif(not os.environ.get("PROXSPS_DATA"), reason="PROXSPS_DATA does not name a folder with the real file")
def test_the_real_file(no_cache):
    if find_sensors() is None:
        pytest.skip("the folder PROXSPS_DATA has no sensor file")
    problem = MatrixCompletion()
    value = problem.train_data()[2]
    assert (len(value), len(problem.validation_data(0)[2])) == (44926, 11232)
    # The first standardised values, which the published code states.
    np.testing.assert_allclose(value[:5], [-0.6056, -0.4624, 0.2748, -0.5206, -0.6135], atol=1e-4)


# A file of another month


def month(path, sensors=12, hours=48, measured=300):
    """A file of the published format, with other numbers of sensors and hours."""
    rng = np.random.RandomState(0)
    table = np.zeros(sensors * hours)
    table[rng.permutation(table.size)[:measured]] = 10 + rng.rand(measured)
    lines = [",".join(["", *map(str, range(hours))])]
    lines += [",".join([str(i), *map(str, row)]) for i, row in enumerate(table.reshape(sensors, hours))]
    path.write_text("\n".join(lines) + "\n")
    return table.reshape(sensors, hours)


def test_a_file_of_another_month(tmp_path, monkeypatch, no_cache):
    table = month(tmp_path / "month2.csv")
    problem = MatrixCompletion(data=str(tmp_path / "month2.csv"), batch_size=32)
    assert {name: tuple(value.shape) for name, value in problem.start().items()} == {
        "U": (12, 24),
        "V": (48, 24),
        "bias_U": (12,),
        "bias_V": (48,),
    }
    both = zip(problem.train_data(), problem.validation_data(0), strict=True)
    sensor, hour, value = (torch.cat(parts) for parts in both)
    assert len(problem.train_data()[0]) == 240
    found = np.corrcoef(table[sensor.numpy(), hour.numpy()], value.numpy())[0, 1]
    assert found == pytest.approx(1.0), "every measurement once, at its place"
    assert len(set(zip(sensor.tolist(), hour.tolist(), strict=True))) == 300
    assert problem.loss(problem.start(), *problem.train_data()).isfinite()
    monkeypatch.setenv("PROXSPS_DATA", str(tmp_path))
    by_name = MatrixCompletion(data="month2.csv", batch_size=32)
    torch.testing.assert_close(by_name.train_data(), problem.train_data())


def test_runs_on_another_month_are_told_apart_by_its_content(tmp_path, no_cache):
    ids = []
    for measured in (300, 310):
        month(tmp_path / "month2.csv", measured=measured)
        completion._month_digest.cache_clear()  # as in another process
        problem = MatrixCompletion(data=str(tmp_path / "month2.csv"), batch_size=32)
        ids.append(RunSpec(problem, "prox-sps", "constant", 1.0, 1e-4, 0, 1).id)
    assert ids[0] != ids[1]
    assert MatrixCompletion().fingerprint(0) is None, "stores of the published file stay valid"


def test_files_that_are_no_month(tmp_path, no_cache):
    month(tmp_path / "short.csv", measured=30)
    with pytest.raises(DataError, match="holds 30 measurements, four fifths of which have to fill a batch of 32"):
        MatrixCompletion(data=str(tmp_path / "short.csv"), batch_size=32).train_data()
    (tmp_path / "torn.csv").write_text(",1,2\n0,1.5\n1,2,3\n")
    with pytest.raises(DataError, match=r"torn.csv, line 2: got 2 columns instead of 3. Expected a header with"):
        MatrixCompletion(data=str(tmp_path / "torn.csv"), batch_size=2).train_data()
    (tmp_path / "one.csv").write_text(",1,2\n0,1,2\n")
    with pytest.raises(DataError, match="shape 1 x 2"):
        MatrixCompletion(data=str(tmp_path / "one.csv"), batch_size=1).train_data()
    with pytest.raises(DataError, match="cannot be read"):
        MatrixCompletion(data=str(tmp_path / "none.csv")).start()
    with pytest.raises(ValueError, match=r"'real', 'synthetic' or the name of a .csv file, got 'reel'"):
        MatrixCompletion(data="reel")
