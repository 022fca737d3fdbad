"""Names that some systems do not have: a step works without them, in a process that has not loaded the package yet."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

# Torch and numba have ways of their own on every system: names go after these are loaded, and before ours are.
SCRIPT = """
import os
import warnings
warnings.simplefilter("error")
import torch, torch._dynamo, torch.distributed
{numba}
for module, names in {missing}:
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
torch.distributed.is_available = lambda: {distributed}

from proxsps.optim import SPS, DecSPS, ProxSGD, ProxSPS
for fused in {fused}:
    for method in (ProxSPS, SPS, DecSPS, ProxSGD):
        x = torch.nn.Parameter(torch.ones(300_001))
        x.grad = torch.ones_like(x)
        method([x], weight_decay=0.01, fused=fused).step(loss=0.5)
        assert (x != 1).all()
print("stepped")
"""

WINDOWS = '[(os, ["register_at_fork", "fork", "forkpty", "sched_getaffinity", "getuid", "geteuid", "killpg"])]'
ALONE = '[(torch.distributed, ["ProcessGroup", "group", "ReduceOp", "all_reduce", "is_initialized", "get_world_size"])]'
NUMBA = find_spec("numba") is not None


@pytest.mark.parametrize("missing", [WINDOWS, ALONE], ids=["Windows", "torch without distributed"])
def test_a_step_works_without_what_some_systems_lack(missing, forked):
    fused = [None, True, False] if NUMBA else [None, False]
    load = "import numba, numba.core.types" if NUMBA else ""
    script = SCRIPT.format(numba=load, missing=missing, distributed=missing is WINDOWS, fused=fused)
    command = [sys.executable, "-c", script]
    with forked(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert out.splitlines()[-1] == "stepped"
