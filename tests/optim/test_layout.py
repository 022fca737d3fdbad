"""Which memory the compiled kernels take, and the chunks, threads and processes that they run in."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

pytest.importorskip("numba")

import proxsps
from proxsps.optim import ProxSPS
from proxsps.optim.kernels import caching, layout
from proxsps.optim.kernels.parts import Memory, Part
from proxsps.optim.kernels.sampling import start_of
from proxsps.regularizers import L2

LARGE = 300_001  # several threads take part


def taken(*lists):
    return layout.addresses(*lists) is not None


# -- memory -----------------------------------------------------------------------------------------------------------


class Wrapper(torch.Tensor):
    """A tensor that holds another one and has no entries itself."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


class Named(torch.nn.Parameter):
    """A parameter with its own type and its own entries."""


def freed():
    x = torch.ones(6)
    x.untyped_storage().resize_(0)
    return x


ODD = {
    "bf16": lambda: torch.ones(6, dtype=torch.bfloat16),
    "f16": lambda: torch.ones(6, dtype=torch.float16),
    "another dtype": lambda: torch.ones(6, dtype=torch.float64),
    "strided": lambda: torch.ones(12)[::2],
    "expanded": lambda: torch.ones(1).expand(6),
    "wrapper": lambda: Wrapper(torch.ones(6)),
    "two tensors": lambda: TwoTensor(torch.ones(6), torch.ones(6)),
    "zeros that are not stored": lambda: torch._efficientzerotensor(6),
    "negative bit": lambda: torch._neg_view(torch.ones(6)),
    "imaginary part of a conjugate": lambda: torch.ones(6, dtype=torch.complex64).conj().imag,
    "freed storage": freed,
    "meta": lambda: torch.ones(6, device="meta"),
}


@pytest.mark.parametrize("name", ODD)
def test_tensors_whose_memory_is_not_what_they_stand_for_are_not_taken(name):
    odd, plain = ODD[name](), torch.ones(6)
    assert taken([plain], [plain])
    assert not taken([odd], [plain])
    assert not taken([plain], [odd])
    assert not taken([plain, plain.clone()], [plain, odd])
    assert not taken([plain], [plain], [odd])  # an average


def test_tensors_inside_transforms_are_not_taken():
    assert not torch.func.vmap(lambda x: x + float(taken([x], [x])))(torch.zeros(4, 3)).any()
    assert not torch.func.functionalize(lambda x: torch.tensor(taken([x], [x])))(torch.ones(67))


def test_orders_of_memory():
    plain = torch.randn(3, 5, 4, 2)
    last = plain.to(memory_format=torch.channels_last)
    assert taken([plain], [plain])
    assert taken([last], [last.clone()])
    assert not taken([last], [plain])
    assert not taken([plain], [last])


def test_addresses_have_one_row_per_list():
    xs, gs = [torch.ones(3), Named(torch.ones(0)), Named(torch.ones(2))], [torch.ones(n) for n in (3, 0, 2)]
    like, at = layout.addresses(xs, gs)
    assert like.dtype == np.float32
    assert at.tolist() == [[t.data_ptr() for t in tensors] for tensors in (xs, gs)]
    assert layout.addresses([], [])[1].shape == (2, 0)


def test_a_start_needs_contiguous_parameters_and_the_sizes_of_samples():
    like, x = layout.LIKE[torch.float32], torch.randn(3, 5, 40, 20)
    start = torch.randn(12_000)
    assert start_of([x], [start], like) is None  # one in 16 entries of more than 4,096
    found = start_of([x, x[0]], [start[:750], start[:4_000]], like)
    assert found.at[1:].tolist() == [[4, 0], [750, 4_000]]
    assert found.scale.tolist() == [16.0, 1.0]
    assert start_of([x], [start[:750].double()], like) is None
    assert start_of([x], [start[:1_500:2]], like) is None
    assert start_of([x.to(memory_format=torch.channels_last)], [start[:750]], like) is None


# -- chunks and threads -----------------------------------------------------------------------------------------------


def test_chunks_have_every_entry_once():
    sizes = ((5, 7 * layout.CHUNK, 0, 3), (), (2 * layout.CHUNK + 1,))
    found = layout.layout(sizes, 1)
    block, tensor, first, length = found.columns
    assert found.total == sum(map(sum, sizes))
    for j, (b, size) in enumerate((b, size) for b, own in enumerate(sizes) for size in own):
        own = tensor == j
        assert (block[own] == b).all()
        edges = [0, *np.cumsum(length[own])]
        assert first[own].tolist() == edges[:-1]
        assert edges[-1] == size


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_shares_have_every_chunk_once(count, backwards):
    chunks = layout.layout(((5, 7 * layout.CHUNK, 0, 3), (100 * layout.CHUNK + 1,)), 3)
    shares = layout.shares(chunks, count, backwards)
    assert [i for share in sorted(shares) for i in range(*share)] == list(range(len(chunks.sizes)))
    assert shares == sorted(shares, reverse=backwards)


def test_every_second_pass_begins_where_the_one_before_ended():
    chunks, part, seen = layout.layout(((3 * layout.STRETCH,),), 1), Part(Memory(*[None] * 13)), []
    for _ in range(3):
        part._run(lambda at, columns, *share: seen.append(share), chunks, 1.0)
    assert seen == [(0, 48), (32, 48), (16, 32), (0, 16), (0, 48)]


def test_a_sample_reads_its_part_of_every_tensor():
    whole = layout.layout(((16,), (5_000,), (1_000_000,)), 1)
    found, scale = layout.sampled(whole, 16)
    block, _, start, length = found.columns
    whole_block, _, whole_start, whole_length = whole.columns
    assert np.array_equal(block, whole_block)
    assert (start >= whole_start).all()
    assert (start + length <= whole_start + whole_length).all()
    np.testing.assert_allclose(length * scale, whole_length)
    assert length.sum() < 1_005_016 / 15
    assert len(set(start - whole_start)) > 0.9 * len(start) - 2  # not the same columns of a matrix in every chunk


@pytest.fixture
def two_threads(monkeypatch):
    """Two threads from the first chunks on: the tensors of these tests are smaller than those worth a second thread."""
    monkeypatch.setattr(layout, "ALONE", 4 * layout.CHUNK)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def sums_of(kit, *shapes, seed=0):
    """A function that computes the sums of a plan."""
    opt = ProxSPS(kit.drawn(*shapes, seed=seed), fused=True)
    opt.step(loss=0.5)
    return lambda: opt._plan.sums([1.0], ())[0]


def test_several_python_threads_at_once_get_right_results(kit, two_threads):
    work = [sums_of(kit, (LARGE + i,), (5,), seed=i) for i in range(6)]
    want = [sums() for sums in work]
    assert any(thread.name.startswith("proxsps") for thread in threading.enumerate())
    gate = threading.Barrier(3)

    def run(part):
        gate.wait(20)
        return [[sums() for sums in part] for _ in range(10)]

    with ThreadPoolExecutor(3) as pool:
        got = list(pool.map(run, [work[0:2], work[2:4], work[4:6]]))
    assert got == [[want[2 * i : 2 * i + 2]] * 10 for i in range(3)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_kernels_work_in_a_forked_child(kit, two_threads):
    sums = sums_of(kit, (LARGE,))
    want = sums()  # the parent's threads exist now
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12+ warns of forks in threaded programs
        warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)  # as JAX does where another test has loaded it
        child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if sums() == want else 2
        finally:
            os._exit(code)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.02)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the child hung")
    assert os.waitstatus_to_exitcode(status) == 0
    assert sums() == want  # the parent goes on


# -- processes --------------------------------------------------------------------------------------------------------


def python(code, *paths):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, paths), *sys.path])}
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=env, capture_output=True, text=True, timeout=240
    )
    assert out.returncode == 0, out.stderr
    return out.stdout.splitlines()[-1]


def test_the_kernels_load_where_processes_cannot_fork():
    # Libraries of others, such as random, ask for it too, so these are loaded first.
    code = "import random, torch, numba, logging, concurrent.futures.thread; import os; del os.register_at_fork; "
    assert python(code + "from proxsps.optim.kernels import make; print(make.__name__)").endswith("kernels.make")


SCRIPT = """
import json, torch, common
from proxsps.optim.kernels import entrywise, layout, metric_rows, parts, rows
common.compile_kernels([torch.float32])
stats = [
    [kernel.__name__, sum(kernel.stats.cache_hits.values()), sum(kernel.stats.cache_misses.values())]
    for module in (entrywise, layout, metric_rows, parts, rows)
    for kernel in vars(module).values()
    if getattr(kernel, "targetoptions", {}).get("nogil")  # those that Python calls
]
print(json.dumps(stats))
"""


def test_a_second_process_does_not_compile_again(tmp_path):
    """A copy of the package with the caches that it has: what is missing there, the first process compiles."""

    def copy(source, target):
        with contextlib.suppress(FileNotFoundError):  # a temporary file of a process that is compiling
            shutil.copy2(source, target)

    shutil.copytree(Path(proxsps.__file__).parent, tmp_path / "proxsps", copy_function=copy)
    first, second = (json.loads(python(SCRIPT, tmp_path, Path(__file__).parent / "distributed")) for _ in range(2))
    # The steps of all methods share what is compiled. Passes over entries have a signature for each of the four kinds
    # of slopes, those over rows one for gradients and one for averages.
    kinds = {"reduce": 4, "write": 4, "sum_rows": 2, "write_rows": 2}
    assert all(hits + misses == kinds.pop(name, 1) for name, hits, misses in first), first
    assert not kinds
    assert [(name, hits + misses, 0) for name, hits, misses in first] == list(map(tuple, second))
    assert sum(hits for _, hits, _ in second) > 15


EDITED = """
import sys
import numpy as np
sys.path.insert(0, sys.argv[1])
from proxsps.optim.kernels import rows
print(*rows._factors(np.ones(1), np.ones(1), np.array([[0.25], [1.0], [-np.inf], [np.inf]])))
"""


def test_kernels_are_compiled_again_after_an_edit_of_what_they_inline(tmp_path, forked, monkeypatch):
    """Of a function in another file, in a copy of the package."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)

    def result():
        words = [sys.executable, "-c", EDITED, str(tmp_path)]
        with forked(words, stdout=subprocess.PIPE, text=True) as process:
            return process.communicate()[0].strip(), sorted(folder.glob("__pycache__/*.nb?"))

    ignored, folder = shutil.ignore_patterns("__pycache__"), tmp_path / "proxsps" / "optim" / "kernels"
    shutil.copytree(Path(proxsps.__file__).parent, tmp_path / "proxsps", ignore=ignored)
    before, stored = result()
    source = folder / "heights.py"
    source.write_text(source.read_text().replace("* shrink, lower", "* shrink + 1, lower"))
    after, files = result()
    assert (before, after) == ("0.375", "1.375")
    assert len(stored) == 2
    assert files == stored  # nothing piles up


def test_a_process_killed_while_it_stores_a_kernel_leaves_no_old_code(tmp_path, monkeypatch):
    """The index is written first, and would refer to the code of other sources."""
    old, new = (caching.KernelFile(str(tmp_path), "kernel", stamp) for stamp in ("old", "new"))
    old.save("float32", "old code")
    assert old.load("float32") == "old code"
    assert new.load("float32") is None
    with monkeypatch.context() as patch:
        patch.setattr(new, "_save_data", lambda *given: exec("raise KeyboardInterrupt"))
        with pytest.raises(KeyboardInterrupt):
            new.save("float32", "new code")
    assert new.load("float32") is None
    new.save("float32", "new code")
    assert new.load("float32") == "new code"


def compiled_from(tree):
    """The modules of this package whose names stand in functions that numba compiles, in a module's syntax tree."""
    origin = {
        alias.asname or alias.name: f"{node.module}.{alias.name}" if node.module == "proxsps.core" else node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("proxsps")
        for alias in node.names
    }

    def compiles(node):
        return isinstance(node, ast.Call) and getattr(node.func, "id", None) in ("compiled", "inlined")

    found = [
        node
        for node in ast.walk(tree)
        if (isinstance(node, ast.FunctionDef) and any(map(compiles, node.decorator_list)))
        or (isinstance(node, ast.Call) and compiles(node.func))  # inlined()(function)
    ]
    names = {inner.id for node in found for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    return {origin[name] for name in names & origin.keys() if not origin[name].startswith("proxsps.optim.kernels")}


def test_the_digest_of_kernels_covers_all_files_that_they_are_made_of():
    sources = [file.read_text() for file in Path(layout.__file__).parent.glob("*.py")]
    imported = {name for text in sources for name in compiled_from(ast.parse(text))}
    assert imported == {f"{package}.{file.removesuffix('.py')}" for package, file in caching.FURTHER}
    outside = "from proxsps.optim.lists import join\n@inlined()\ndef f(x):\n    return join(x)\n"
    assert compiled_from(ast.parse(outside)) == {"proxsps.optim.lists"}


# -- which path a step takes ------------------------------------------------------------------------------------------


def parameter(x):
    x = torch.nn.Parameter(x)
    x.grad = torch.ones_like(x)
    return x


@pytest.mark.parametrize("fused", [None, True, False])
def test_dense_tensors_take_the_kernels(fused):
    opt = ProxSPS([parameter(torch.ones(4, 3))], fused=fused)
    opt.step(loss=0.5)
    assert [member.compiled for member in opt._plan.parts] == [fused is not False]


OUTSIDE = {
    "bf16": lambda: [parameter(torch.ones(67, dtype=torch.bfloat16))],
    "strided": lambda: [parameter(torch.ones(4, 3)[:, 1])],
    "two dtypes": lambda: [parameter(torch.ones(4)), parameter(torch.ones(4).double())],
    "center": lambda: [{"params": [parameter(torch.ones(4))], "regularizer": L2(0.1, torch.zeros(4))}],
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_other_tensors_fall_back_to_torch(name):
    opt = ProxSPS(OUTSIDE[name]())
    opt.step(loss=0.5)
    assert not any(member.compiled for member in opt._plan.parts)
    assert opt.last_step.branch_name == "inside"
    assert (opt.param_groups[0]["params"][0] != 1).all()
    with pytest.raises(RuntimeError, match=r"fused=True needs numba.*one dtype.*fused=None falls back to torch"):
        ProxSPS(OUTSIDE[name](), fused=True).step(loss=0.5)
