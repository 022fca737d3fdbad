"""The example under torchrun prints what it prints alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "examples" / "data_parallel.py"


def output(*command: str) -> str:
    result = subprocess.run([sys.executable, *command, str(EXAMPLE)], capture_output=True, text=True, timeout=180)
    assert result.returncode == 0, result.stderr
    assert command or result.stderr == ""
    return result.stdout


def test_two_processes_reach_the_loss_of_one():
    alone = output()
    assert alone.startswith("loss of the last joint batch: 0.00")
    assert output("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2") == alone
