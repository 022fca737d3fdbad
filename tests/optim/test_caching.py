"""A step does not depend on whether its process compiled the kernels, or loaded them from the cache on disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")

from proxsps.optim.kernels import caching

SCRIPT = """
import hashlib
import torch
from proxsps.optim import ProxSPSAdam, ScheduleFreeSPS
from proxsps.regularizers import Box, L1

torch.set_num_threads(1)
for make, dtype in [
    (lambda params: ScheduleFreeSPS(params), torch.float32),
    (lambda params: ScheduleFreeSPS(params, regularizer=L1(1e-3)), torch.float32),
    (lambda params: ScheduleFreeSPS(params, regularizer=Box(-1, 1)), torch.float64),
    (lambda params: ProxSPSAdam(params), torch.float32),
]:
    torch.manual_seed(0)
    params = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in [(53, 37), (1031,), (7,)]]
    targets = [torch.randn_like(p) for p in params]
    opt = make(params)
    for _ in range(20):
        opt.zero_grad()
        loss = sum(((p - t) ** 2).sum() for p, t in zip(params, targets))
        loss.backward()
        opt.step(loss=loss)
    print(hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in params)).hexdigest())
"""


def test_a_process_that_loads_kernels_takes_the_steps_of_the_one_that_compiled_them(tmp_path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    found, files = [], []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.split())
        files.append({file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.nb?")})
    assert files[0]
    assert files[0] == files[1]  # the second one compiled nothing
    assert len(set(found[0])) == 4
    assert found[0] == found[1]


def test_functions_that_kernels_call_are_inlined():
    # Others have names with a number in the cache, and another kernel may have the same name for other code.
    sources = {file.name: file.read_text() for file in Path(caching.__file__).parent.glob("*.py")}
    assert [name for name, text in sources.items() if "njit" in text] == ["caching.py"]
