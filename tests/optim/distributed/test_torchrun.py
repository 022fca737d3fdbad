"""The example under torchrun prints what it prints alone."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import torch

EXAMPLE = Path(__file__).parents[3] / "examples" / "data_parallel.py"


def test_two_processes_reach_the_loss_of_one(capsys):
    with torch.random.fork_rng(devices=[]):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    alone = capsys.readouterr()
    assert alone.err == ""
    assert alone.out.startswith("loss of the last joint batch: 0.00")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert result.returncode == 0, result.stderr
    assert result.stdout == alone.out
