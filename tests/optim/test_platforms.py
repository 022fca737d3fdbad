"""Names that some systems do not have: a step works without them, in a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

STEP = """
import torch
from proxsps.optim import SPS, DecSPS, ProxSGD, ProxSPS
for fused in {fused}:
    for method in (ProxSPS, SPS, DecSPS, ProxSGD):
        x = torch.nn.Parameter(torch.ones(300_001))
        x.grad = torch.ones_like(x)
        method([x], weight_decay=0.1, fused=fused).step(loss=0.5)
        assert (x != 1).all()
print("stepped")
"""

# What Windows lacks of the modules that a step could use.
WINDOWS = """
import os
for name in ("register_at_fork", "fork", "forkpty", "sched_getaffinity", "getuid", "geteuid", "killpg", "getpgid"):
    if hasattr(os, name):
        delattr(os, name)
"""

# Builds of torch without distributed, as some for macOS and Windows are.
ALONE = """
import torch._dynamo  # which has a way of its own there
import torch.distributed
torch.distributed.is_available = lambda: False
for name in ("ProcessGroup", "group", "ReduceOp", "all_reduce", "is_initialized", "get_world_size"):
    delattr(torch.distributed, name)
"""


def run(script: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "error", "-c", script]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr
    return out.stdout


@pytest.mark.parametrize("fused", ["[None, True]", "[False]"], ids=["kernels", "torch"])
def test_a_step_on_windows(fused):
    if "True" in fused:
        pytest.importorskip("numba")
    # Torch and numba have ways of their own on Windows: names go after these are loaded, before ours are.
    load = "import torch, torch.optim\n" + ("import numba, numba.core.types\n" if "True" in fused else "")
    assert "stepped" in run(load + WINDOWS + STEP.format(fused=fused))


def test_a_step_without_torch_distributed():
    assert "stepped" in run(ALONE + STEP.format(fused="[None]"))
