"""Several processes: runs side by side, and one run shared by torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import proxsps
from proxsps.training import Training, Watch, train
from proxsps.training.checkpoint import checkpoint_file
from proxsps.training.ranks import TrainingRanks, joined


class Stop(Watch):
    """Breaks a run off after its first epoch."""

    def step(self, epoch, loss, optimizer):
        if epoch == 1:
            raise KeyboardInterrupt


@pytest.mark.usefixtures("quick_pool")
def test_runs_side_by_side_are_those_of_one_process(kit, tmp_path):
    specs = [kit.spec(method=method, seed=seed) for method in ("prox-sps", "adamw") for seed in (0, 1)]
    engine, heard, results = Training(tmp_path, workers=2), [], []
    specs = engine.identified(specs)
    cut, done = specs[1], specs[3]
    with pytest.raises(KeyboardInterrupt):
        train(cut, checkpoint_file(tmp_path, cut), watch=Stop())
    for batch in engine.run(specs, {done.id}, heard.append):
        results += batch
    assert sorted(result.spec.id for result in results) == sorted(spec.id for spec in specs[:3])
    for result in results:
        wanted = train(result.spec)
        np.testing.assert_array_equal(result.metrics, wanted.metrics)
        np.testing.assert_array_equal(result.zetas, wanted.zetas)
    assert sum(heard) == 9
    assert not list((tmp_path / "checkpoints").iterdir()), "checkpoints of finished runs are removed"


def test_nothing_to_run(kit, tmp_path):
    (spec,) = Training(tmp_path).identified([kit.spec()])
    assert list(Training(tmp_path).run([spec], {spec.id}, lambda epochs: None)) == []


TORCHRUN = "from torch.distributed.run import main; main()"
SCRIPT = "from proxsps.cli import app; app()"
OPTIONS = "synthetic-resnet8 --width 2 --size 8 --images 80 --validation-images 30 --batch-size 16 --epochs 2"


def test_two_processes_train_like_one(kit, forked, tmp_path):
    """torchrun with gloo: batches are shared, so that the weights are those of one process up to rounding."""
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(Path(proxsps.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-c", TORCHRUN, "--standalone", "--nproc-per-node", "2"]
    words = ["script.py", "train", *OPTIONS.split(), "--device", "cpu", "--checkpoint", "two.pt"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with forked([*torchrun, *words], cwd=tmp_path, env=environment, text=True, **pipes) as started:
        output, errors = started.communicate(timeout=120)
    assert started.returncode == 0, errors
    assert output.count("After 2 epochs") == 1, "only one process talks"
    train(kit.spec(epochs=2), tmp_path / "one.pt")
    two, one = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("two", "one"))
    for name, weight in one["model"].items():
        torch.testing.assert_close(two["model"][name], weight, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(two["history"]["metrics"], one["history"]["metrics"], rtol=1e-3, atol=1e-3)


def test_one_process_is_alone():
    with joined("cpu") as ranks:
        assert ranks == TrainingRanks(torch.device("cpu"))
        value = torch.ones(())
        assert ranks.sum(value) is value
        assert ranks.first


@pytest.mark.parametrize("device", ["cuda", "nonsense", "meta"])
def test_a_device_that_is_not_there(device):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="cannot be used here") as caught, joined(device):
        pass
    assert "\n" not in str(caught.value)
