"""Files that are missing, damaged or something else: one line that says what to do."""

from __future__ import annotations

import gc
import hashlib
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from proxsps._install import extra
from proxsps.problems import DataError, LogisticRegression, MatrixCompletion, datasets
from proxsps.problems.datasets import load_libsvm, load_sensors, synthetic_sensors


def refusal(call, *arguments) -> str:
    with pytest.raises(DataError) as caught:
        call(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return message


def test_wrong_checksum(sensor_file):
    file = sensor_file()
    message = refusal(load_sensors, file)
    assert f"{file} is not the published sensor file" in message
    assert hashlib.sha256(file.read_bytes()).hexdigest() in message
    assert datasets.SENSOR_SHA256 in message


def one_more(table: np.ndarray) -> np.ndarray:
    return np.where(np.arange(table.size).reshape(table.shape) == np.flatnonzero(table == 0)[0], 1.0, table)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda table: table[:99], "holds a table of shape 99 x 720"),
        (lambda table: table[:0], "holds a table of shape 0 x 0"),
        (lambda table: table.T, "line 1: got 131 columns instead of 721"),
        (one_more, "holds 56159 nonzero measurements"),
        (lambda table: np.where(table == table.max(), np.nan, table), "expected a finite number as a measurement"),
    ],
    ids=["rows", "empty", "transposed", "count", "nan"],
)
def test_wrong_tables(sensor_file, change, expected):
    message = refusal(load_sensors, sensor_file(change(synthetic_sensors(3))))
    assert expected in message


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda lines: [*lines[:5], lines[5][:40]], "line 6: got"),
        (lambda lines: [lines[0], lines[1].replace(b",", b",x", 1), *lines[2:]], "line 2: expected a finite number"),
        (lambda lines: [b"<!DOCTYPE html>"], "line 1: got 1 columns instead of 721"),
        (lambda lines: [b"\xff\xfe\x00", *lines], "is not a CSV file"),
    ],
    ids=["truncated", "word", "page", "binary"],
)
def test_damaged_files(sensor_file, edit, expected):
    file = sensor_file()
    file.write_bytes(b"\n".join(edit(file.read_bytes().splitlines())))
    assert expected in refusal(load_sensors, file)


def test_missing_files_and_folders(tmp_path, monkeypatch):
    assert "nowhere.csv cannot be read (No such file or directory)" in refusal(load_sensors, tmp_path / "nowhere.csv")
    monkeypatch.setenv("PROXSPS_DATA", str(tmp_path / "nowhere"))
    assert "nowhere, which is not a folder" in refusal(load_sensors)


@pytest.fixture
def server(tmp_path, monkeypatch) -> Iterator[ThreadingHTTPServer]:
    """A folder served on this machine instead of the published address, an empty cache, and no folder of data."""
    (tmp_path / "served").mkdir()

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "served")))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    monkeypatch.delenv("PROXSPS_DATA", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets, "SENSOR_URL", f"http://127.0.0.1:{server.server_port}/{datasets.SENSOR_FILE}")
    yield server
    server.shutdown()
    thread.join(timeout=5)
    server.server_close()


needs_xdg = pytest.mark.skipif(sys.platform != "linux", reason="moves the cache folder through XDG_CACHE_HOME")


@needs_xdg
def test_download_once(server, sensor_file, tmp_path, monkeypatch):
    pytest.importorskip("pooch")
    file = sensor_file()
    monkeypatch.setattr(datasets, "SENSOR_SHA256", hashlib.sha256(file.read_bytes()).hexdigest())
    served = file.rename(tmp_path / "served" / datasets.SENSOR_FILE)
    np.testing.assert_array_equal(load_sensors(), synthetic_sensors(3))
    served.unlink()
    np.testing.assert_array_equal(load_sensors(), synthetic_sensors(3))


@needs_xdg
def test_download_of_another_file(server, tmp_path):
    pytest.importorskip("pooch")
    (tmp_path / "served" / datasets.SENSOR_FILE).write_text("something else")
    message = refusal(load_sensors)
    assert "does not match the known hash" in message
    assert "set PROXSPS_DATA to that folder" in message
    assert not list((tmp_path / "cache").rglob("*.csv"))


@needs_xdg
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # pooch leaves the socket of a refused request to the collector
def test_offline(server, monkeypatch, no_cache):
    pytest.importorskip("pooch")
    message = refusal(load_sensors)
    gc.collect()
    assert "404" in message
    with ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as closed:
        port = closed.server_port
    monkeypatch.setattr(datasets, "SENSOR_URL", f"http://127.0.0.1:{port}/sensors.csv")
    message = refusal(MatrixCompletion().train_data)
    assert "could not be downloaded" in message
    assert f"Save http://127.0.0.1:{port}/sensors.csv as sensor/{datasets.SENSOR_FILE} in a folder" in message


def test_without_pooch(monkeypatch):
    monkeypatch.delenv("PROXSPS_DATA", raising=False)
    monkeypatch.setitem(sys.modules, "pooch", None)
    assert extra("experiments") in refusal(load_sensors)


LIBSVM = """\
+1 1:0.5 3:-2e-1 # a comment

-1 2:1 4:3
# nothing
+1 1:1
-1
-1 4:0.25
+1 3:7
"""


def test_libsvm(tmp_path, monkeypatch):
    (tmp_path / "data.txt").write_text(LIBSVM)
    features, labels = load_libsvm(tmp_path / "data.txt")
    expected = [[0.5, 0, -0.2, 0], [0, 1, 0, 3], [1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0.25], [0, 0, 7, 0]]
    np.testing.assert_array_equal(features, expected)
    np.testing.assert_array_equal(labels, [1, -1, 1, -1, -1, 1])
    monkeypatch.setenv("PROXSPS_DATA", str(tmp_path))
    assert load_libsvm("data.txt", features=6)[0].shape == (6, 6)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("yes 1:1", "line 2: expected a finite number as a label, got 'yes'"),
        ("1 1:inf", "line 2: expected a finite number as a value, got 'inf'"),
        ("1 1:", "line 2: expected a finite number as a value, got ''"),
        ("1 0:1", "line 2: indices start at 1 and increase, got '0:1' after index 0"),
        ("1 3:1 3:2", "line 2: indices start at 1 and increase, got '3:2' after index 3"),
        ("1 -2:1", "line 2: expected index:value, got '-2:1'"),
        ("1,2,3", "line 2: expected a finite number as a label, got '1,2,3'"),
        ("1 2", "line 2: expected index:value, got '2'"),
        ("1 999999999:1", "x 999999999 entries"),
    ],
)
def test_libsvm_errors(tmp_path, line, expected):
    file = tmp_path / "data.txt"
    file.write_text(f"1 1:1\n{line}\n")
    assert expected in refusal(load_libsvm, file)


def test_libsvm_files_that_are_none(tmp_path):
    file = tmp_path / "data.txt"
    assert "cannot be read" in refusal(load_libsvm, file)
    file.write_text("# nothing\n")
    assert "holds no samples" in refusal(load_libsvm, file)
    file.write_bytes(b"BZh9\xff\xfe")
    assert "is not text" in refusal(load_libsvm, file)
    file.write_text("1 5:1\n")
    assert "index 5, but the limit is 4 features" in refusal(load_libsvm, file, 4)


def test_logistic_regression_on_a_file(tmp_path, no_cache):
    file = tmp_path / "data.txt"
    file.write_text(LIBSVM.replace("+1", "4").replace("-1", "2"))
    problem = LogisticRegression(file=str(file), batch_size=2)
    (features, labels), held_out = problem.train_data(), problem.validation_data(0)
    assert features.shape == (5, 4)
    assert problem.start()["x"].shape == (4,)
    assert len(held_out[1]) == 1
    assert sorted([*labels.tolist(), *held_out[1].tolist()]) == [-1, -1, -1, 1, 1, 1]
    assert problem.steps_per_epoch == 2

    file.write_text("1 1:1\n" * 6)
    datasets_with_one_label = LogisticRegression(file=str(file), batch_size=3)
    assert "has 1 different labels in 6 samples" in refusal(datasets_with_one_label.train_data)
