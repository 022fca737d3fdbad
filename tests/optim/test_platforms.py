"""Names that some systems do not have: a step works without them, in a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

# Torch and numba have ways of their own on every system: names go after these are loaded, and before ours are.
SCRIPT = """
import os
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
def test_a_step_works_without_what_some_systems_lack(missing):
    fused = [None, True, False] if NUMBA else [None, False]
    load = "import numba, numba.core.types" if NUMBA else ""
    script = SCRIPT.format(numba=load, missing=missing, distributed=missing is WINDOWS, fused=fused)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "error", "-c", script]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr
    assert out.stdout.splitlines()[-1] == "stepped"
