"""The compiled CPU kernels: right sums and updates, for any layout, thread, process and number of threads."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
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
from proxsps.optim import ProxSPS, kernels
from proxsps.optim.kernels import Psi, caching, entries, layout, moments, rows
from proxsps.regularizers import L2

LARGE = 300_001  # several threads take part
SIZES = {
    "odd": [(1,), (3,), (17,), (2047,), (2049,), (16_383,), (16_385,)],
    "many": [(7, 3)] * 400,
    "empty": [(0,), (5,), (3, 0, 2), (4,)],
    "large": [(LARGE,), (11,), (2 * LARGE,)],
    "matrix": [(129, 257), (1, 1, 1)],
    "nothing": [(0,), (2, 0)],
}


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def pairs(shapes, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes * 2]
    return draw[: len(shapes)], draw[len(shapes) :]


def memory(xs, gs):
    """The memory of tensors that are a block each."""
    return kernels.memory([[x] for x in xs], [[g] for g in gs])


def expected_sums(xs, gs, lam):
    rows, sizes = [], []
    for x, g, weight in zip(xs, gs, lam, strict=True):
        x, d = x.double(), g.double() + weight * x.double()
        rows.append([(d * d).sum().item(), (d * x).sum().item(), (x * x).sum().item()])
        sizes.append([(d * d).sum().item(), (d * x).abs().sum().item(), (x * x).sum().item()])
    return np.array(rows).T, np.array(sizes).T


@pytest.mark.parametrize("points", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SIZES)
def test_sums_agree_with_double_precision(name, dtype, points):
    xs, gs = pairs(SIZES[name], dtype)
    lam = np.linspace(0, 0.7, len(xs)) if points else np.zeros(len(xs))
    got = kernels.sums(memory(xs, gs), lam, points)
    want, sizes = expected_sums(xs, gs, lam)
    want[2] *= points  # which are left out if nobody asks for them
    # A run of RUN entries is summed in the dtype (each partial sum rounded once), everything else in double.
    bound = (layout.RUN + 4) * torch.finfo(dtype).eps / 2
    assert got.shape == (3, len(xs))
    assert (np.abs(got - want) <= bound * sizes + 1e-300).all()


@pytest.mark.parametrize("points", [True, False])
def test_a_block_has_the_sums_and_the_coefficients_of_all_its_tensors(points):
    xs, gs = pairs(SIZES["large"], torch.float64)
    blocks = [xs[:2], [], xs[2:]], [gs[:2], [], gs[2:]]
    lam = np.array([0.3, 0.5, 0.1]) * points
    apart = kernels.sums(memory(xs, gs), lam[[0, 0, 2]], points)
    together = kernels.sums(kernels.memory(*blocks), lam, points)
    np.testing.assert_allclose(together[:, 0], apart[:, 0] + apart[:, 1], rtol=1e-14)
    assert (together[:, 1] == 0).all()
    assert np.array_equal(together[:, 2], apart[:, 2])
    copies = [x.clone() for x in xs]
    kernels.write(kernels.memory(*blocks), np.array([0.9, 5.0, 0.7]), np.array([-0.1, 5.0, -0.2]))
    kernels.write(memory(copies, gs), np.array([0.9, 0.9, 0.7]), np.array([-0.1, -0.1, -0.2]))
    assert all(map(torch.equal, xs, copies))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SIZES)
def test_writes_agree_with_double_precision(name, dtype):
    xs, gs = pairs(SIZES[name], dtype)
    before = [x.clone().double() for x in xs]
    kept = [g.clone() for g in gs]
    keep, move = np.linspace(0.5, 1, len(xs)), np.linspace(-0.3, -0.1, len(xs))
    kernels.write(memory(xs, gs), keep, move)
    eps = torch.finfo(dtype).eps
    for x, b, g, k, a, m in zip(xs, before, gs, kept, keep, move, strict=True):
        want = a * b + m * g.double()
        # Two coefficients, two products and a sum, each rounded once.
        assert ((x.double() - want).abs() <= 2 * eps * (b.abs() + g.double().abs())).all()
        assert torch.equal(g, k)


def test_channels_last_tensors_are_walked_in_their_own_order():
    xs, gs = (
        [t.to(memory_format=torch.channels_last) for t in ts]
        for ts in pairs([(3, 5, 4, 2), (2, 3, 3, 3)], torch.float64)
    )
    plain = [x.contiguous().clone() for x in xs], [g.contiguous().clone() for g in gs]
    assert not xs[0].is_contiguous()
    at = memory(xs, gs)
    # Sums in another order.
    np.testing.assert_allclose(
        kernels.sums(at, np.zeros(2), True), kernels.sums(memory(*plain), np.zeros(2), True), rtol=1e-13
    )
    kernels.write(at, np.full(2, 0.9), np.full(2, -0.2))
    kernels.write(memory(*plain), np.full(2, 0.9), np.full(2, -0.2))
    assert all(map(torch.equal, xs, plain[0]))
    assert all(x.is_contiguous(memory_format=torch.channels_last) for x in xs)


@pytest.mark.parametrize("other", ["gradient", "parameter"])
def test_tensors_in_different_orders_are_not_taken(other):
    (x,), (g,) = pairs([(3, 5, 4, 2)], torch.float64)
    if other == "gradient":
        g = g.to(memory_format=torch.channels_last)
    else:
        x = x.to(memory_format=torch.channels_last)
    assert memory([x], [g]) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_not_taken(dtype):
    assert memory([torch.ones(3, dtype=dtype)], [torch.ones(3, dtype=dtype)]) is None


def test_two_dtypes_are_not_taken():
    assert memory([torch.ones(3), torch.ones(3).double()], [torch.ones(3), torch.ones(3).double()]) is None


def test_strided_tensors_are_not_taken():
    assert memory([torch.ones(6)[::2]], [torch.ones(3)]) is None
    assert memory([torch.ones(3)], [torch.ones(6)[::2]]) is None
    assert memory([torch.ones(3)], [torch.ones(1).expand(3)]) is None


class Wrapper(torch.Tensor):
    """A tensor that holds another one and has no entries itself."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


class Named(torch.nn.Parameter):
    """A parameter with a type of its own, and entries of its own."""


def freed():
    x = torch.ones(3)
    x.untyped_storage().resize_(0)
    return x


WITHOUT_MEMORY = {
    "wrapper": lambda: Wrapper(torch.ones(3)),
    "negative bit": lambda: torch._neg_view(torch.ones(3)),
    "imaginary part of a conjugate": lambda: torch.ones(1, dtype=torch.complex64).conj().imag,
    "freed storage": freed,
    "meta": lambda: torch.ones(3, device="meta"),
}


@pytest.mark.parametrize("place", ["parameter", "slope"])
@pytest.mark.parametrize("name", WITHOUT_MEMORY)
def test_tensors_whose_memory_is_not_what_they_stand_for_are_not_taken(name, place):
    other = WITHOUT_MEMORY[name]()
    pair = [other], [torch.ones(other.shape)]
    assert memory(*(pair if place == "parameter" else pair[::-1])) is None
    assert memory([torch.ones(3), *pair[0]], [torch.ones(3), *pair[1]]) is None


def test_tensors_inside_a_transform_are_not_taken():
    def inside(x):
        assert memory([x], [x]) is None
        return x

    torch.func.vmap(inside)(torch.ones(4, 3))


def test_a_subclass_with_entries_of_its_own_is_taken():
    x, g = Named(torch.ones(3)), torch.full((3,), 2.0)
    assert kernels.sums(memory([x], [g]), np.zeros(1), True)[:, 0].tolist() == [12.0, 6.0, 3.0]


def test_no_tensors_at_all():
    at = kernels.memory([[], []], [[], []])
    assert (kernels.sums(at, np.zeros(2), True) == 0).all()
    kernels.write(at, np.ones(2), np.ones(2))


def test_the_kernels_load_where_processes_cannot_fork():
    code = "import os; del os.register_at_fork; from proxsps.optim import kernels; print(kernels.memory([[]], [[]]))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    # Libraries of others, such as random, ask for it too, so these are loaded first.
    out = subprocess.run(
        [sys.executable, "-c", "import random, torch, numba, logging, concurrent.futures.thread; " + code],
        env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert out.returncode == 0, out.stderr
    assert out.stdout.startswith("Memory(")


UNSTORED = {
    "wrapper": lambda: TwoTensor(torch.ones(67), torch.ones(67)),
    "zeros that are not stored": lambda: torch._efficientzerotensor(67),
}


@pytest.mark.parametrize("name", UNSTORED)
def test_tensors_without_memory_are_not_taken(name):
    odd, plain = UNSTORED[name](), torch.ones(67)
    assert odd.data_ptr() == 0
    assert memory([odd], [plain]) is None
    assert memory([plain, plain.clone()], [plain, odd]) is None
    assert torch.func.functionalize(lambda x: torch.tensor(memory([x], [x]) is None))(plain)


@pytest.fixture
def eager_threads(monkeypatch):
    """Threads from the first chunks on: the tensors of these tests are smaller than those worth a second thread."""
    monkeypatch.setattr(layout, "ALONE", 4 * layout.CHUNK)
    layout.layout.cache_clear()
    yield
    layout.layout.cache_clear()


def helpers(at):
    kernels.sums(at, np.zeros(len(at.x_at)), True)
    return threading.enumerate()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_number_of_threads_does_not_change_a_bit(threads, eager_threads, dtype):
    results = []
    for count in (1, 2, 3):
        threads(count)
        xs, gs = pairs(SIZES["large"], dtype)
        at = memory(xs, gs)
        assert count == 1 or any(thread.name.startswith("proxsps") for thread in helpers(at))
        sums = kernels.sums(at, np.full(3, 0.1), True)
        kernels.write(at, np.full(3, 0.9), np.full(3, -0.2))
        results.append((sums, xs))
    for sums, xs in results[1:]:
        assert np.array_equal(sums, results[0][0])
        assert all(map(torch.equal, xs, results[0][1]))


def test_steps_do_not_depend_on_the_number_of_threads(threads, eager_threads):
    points = []
    for count in (1, 2):
        threads(count)
        (x,), (g,) = pairs([(LARGE,)], torch.float32)
        x = torch.nn.Parameter(x)
        x.grad = g
        ProxSPS([x], weight_decay=0.1, fused=True).step(loss=0.5)
        points.append(x.detach())
    assert torch.equal(*points)


def passes_of(backwards, dtype):
    """The numbers and the tensors that all passes make, each of which walks this way."""
    shapes, alpha = [(300, 101), (2, 50_001)], np.array([0.4, 0.9])
    xs, ds = pairs(shapes, dtype)
    way = {"turns": itertools.repeat(backwards)}
    at, by_rows = memory(xs, ds)._replace(**way), rows.memory([xs], [ds], [(1,)])._replace(**way)
    psi, groups = Psi.of(2, l1=0.3), Psi.of(by_rows.groups, l1=9.0)
    firsts, seconds = pairs(shapes, dtype, seed=1)
    averages = moments.averages([xs], [ds], [firsts], [[v.square_() for v in seconds]], np.full((4, 2), 0.5))
    averages = averages._replace(**way)
    numbers = [
        kernels.sums(at, alpha, True),
        entries.reduce(at, psi, alpha, alpha),
        entries.move_sq(at, psi, alpha, 0.5),
    ]
    numbers += [rows.sums(by_rows), rows.norm_sq(by_rows, np.ones(by_rows.groups)), np.array(moments.sums(averages))]
    kernels.write(at, np.full(2, 0.9), np.full(2, -0.2))
    entries.write(at, psi, alpha, 0.5)
    rows.write(by_rows, groups, np.full(by_rows.groups, 0.7), 0.5)
    moments.write(averages, np.full(1, 0.9), np.full(1, -0.2))
    return [*numbers, *[t.numpy() for t in (*xs, *firsts, *seconds)]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_way_a_pass_walks_does_not_change_a_bit(threads, eager_threads, dtype):
    forwards = passes_of(False, dtype)
    assert all(map(np.array_equal, forwards, passes_of(True, dtype)))
    threads(2)
    assert all(map(np.array_equal, forwards, passes_of(True, dtype)))


def test_every_second_pass_begins_where_the_one_before_ended(threads):
    threads(1)
    at, seen = memory(*pairs([(3 * layout.STRETCH,)], torch.float32)), []
    for _ in range(3):
        layout.run(lambda *share: seen.append(share), at.layout.chunks, backwards=next(at.turns))
    assert seen == [(0, 48), (32, 48), (16, 32), (0, 16), (0, 48)]


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_shares_have_every_chunk_once(count, backwards):
    chunks = layout.layout(((5, 7 * layout.CHUNK, 0, 3), (100 * layout.CHUNK + 1,)), 3).chunks
    shares = chunks.shares(count, backwards)
    assert [i for share in sorted(shares) for i in range(*share)] == list(range(len(chunks.sizes)))
    assert shares == sorted(shares, reverse=backwards)


def test_several_python_threads_at_once_get_right_results(threads, eager_threads):
    threads(2)
    work = [pairs([(LARGE + i,), (5,)], torch.float64, seed=i) for i in range(6)]
    want = [kernels.sums(memory(*w), np.zeros(2), True) for w in work]
    gate = threading.Barrier(3)

    def run(part):
        gate.wait(20)
        return [[kernels.sums(memory(*w), np.zeros(2), True) for w in part] for _ in range(10)]

    with ThreadPoolExecutor(3) as pool:
        got = list(pool.map(run, [work[0:2], work[2:4], work[4:6]]))
    for i, rounds in enumerate(got):
        for sums in rounds:
            assert all(map(np.array_equal, sums, want[2 * i : 2 * i + 2]))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_kernels_work_in_a_forked_child(threads, eager_threads):
    threads(2)
    xs, gs = pairs([(LARGE,)], torch.float64)
    at = memory(xs, gs)
    want = kernels.sums(at, np.zeros(1), True)  # the parent's threads exist now
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12+ warns of forks in threaded programs
        warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)  # as JAX does where another test has loaded it
        child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if np.array_equal(kernels.sums(at, np.zeros(1), True), want) else 2
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
    assert np.array_equal(kernels.sums(at, np.zeros(1), True), want)  # the parent goes on


SCRIPT = """
import json, numpy as np, torch
from proxsps.optim import SPS, ProxSPS, kernels
from proxsps.optim.kernels import Psi, entries, lines, moments, rows
x = torch.nn.Parameter(torch.ones(5)); x.grad = torch.ones(5)
for method in (ProxSPS, SPS):
    method([x], fused=True).step(loss=0.5)
x, d, psi, one = torch.ones(4, 3), torch.ones(4, 3), Psi.of(1, l1=0.1), np.ones(1)
at = rows.memory([[x]], [[d]], [None], np.zeros(1, np.int64))
rows.sums(at), rows.write(at, psi, one, 0.5)
first, second = torch.ones(4, 3), torch.ones(4, 3)
for squares in (None, [[second]]):
    at = moments.averages([[x]], [[d]], [[first]], squares, np.full((4, 1), 0.5))
    moments.sums(at), moments.write(at, one, one)
    entries.reduce(at, psi, one, one), entries.move_sq(at, psi, one, 0.5), entries.write(at, psi, one, 0.5)
stats = {}
for module in (lines, entries, rows, moments):
    for name, kernel in vars(module).items():
        if getattr(kernel, "targetoptions", {}).get("nogil"):  # those that Python calls
            hits, misses = kernel.stats.cache_hits, kernel.stats.cache_misses
            stats[f"{module.__name__}.{name}"] = [sum(hits.values()), sum(misses.values())]
print(json.dumps(stats))
"""


def test_a_second_process_does_not_compile_again(tmp_path):
    """A copy of the package with the caches that it has: what is missing there, the first process compiles."""

    def copy(source, target):
        with contextlib.suppress(FileNotFoundError):  # a temporary file of a process that is compiling
            shutil.copy2(source, target)

    shutil.copytree(Path(proxsps.__file__).parent, tmp_path / "proxsps", copy_function=copy)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    runs = []
    for _ in range(2):
        out = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=240, check=True
        )
        runs.append(json.loads(out.stdout.splitlines()[-1]))
    assert all(hits + misses > 0 for hits, misses in runs[0].values())
    assert all(hits > 0 and misses == 0 for hits, misses in runs[1].values())
    assert len(runs[0]) == len(runs[1]) == 3 + 6 + 4 + 4


EDITED = """
import sys
import numpy as np
sys.path.insert(0, sys.argv[1])
from proxsps.optim.kernels import rows
one, out = np.ones(1), np.empty(1)
rows._factors(one, one, 0.25 * one, one, -np.inf * one, np.inf * one, out)
print(*out)
"""


def test_kernels_are_compiled_again_after_an_edit_of_what_they_inline(tmp_path, forked):
    """Of a function in another file, in a copy of the package."""

    def result():
        words = [sys.executable, "-c", EDITED, str(tmp_path)]
        with forked(words, stdout=subprocess.PIPE, text=True) as process:
            return process.communicate()[0].strip(), sorted(folder.glob("__pycache__/*.nb?"))

    ignored, folder = shutil.ignore_patterns("__pycache__"), tmp_path / "proxsps" / "optim" / "kernels"
    shutil.copytree(Path(proxsps.__file__).parent, tmp_path / "proxsps", ignore=ignored)
    before, stored = result()
    source = folder / "scalar.py"
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


def test_the_digest_of_kernels_covers_all_files_that_they_are_made_of():
    """Of `blocks`, nothing is compiled."""
    sources = [file.read_text() for file in Path(kernels.__file__).parent.glob("*.py")]
    imported = {name for text in sources for name in re.findall(r"^from (proxsps\S+) import", text, re.MULTILINE)}
    covered = {f"{package}.{file.removesuffix('.py')}" for package, file in caching.FURTHER} | {"proxsps.optim.blocks"}
    assert {name for name in imported if not name.startswith("proxsps.optim.kernels")} == covered


# -- which path a step takes ------------------------------------------------------------------------------------------


@pytest.fixture
def written(monkeypatch):
    """Names of the kernels that ran."""
    seen = []
    for name in ("sums", "write"):
        original = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *args, n=name, f=original: seen.append(n) or f(*args))
    return seen


def parameter(x):
    x = torch.nn.Parameter(x)
    x.grad = torch.ones_like(x)
    return x


@pytest.mark.parametrize("fused", [None, True])
def test_dense_tensors_take_the_kernels(written, fused):
    ProxSPS([parameter(torch.ones(4, 3))], fused=fused).step(loss=0.5)
    assert written == ["sums", "write"]


OUTSIDE = {
    "bf16": lambda: [parameter(torch.ones(67, dtype=torch.bfloat16))],
    "strided": lambda: [parameter(torch.ones(4, 3)[:, 1])],
    "two dtypes": lambda: [parameter(torch.ones(4)), parameter(torch.ones(4).double())],
    "center": lambda: [{"params": [parameter(torch.ones(4))], "regularizer": L2(0.1, torch.zeros(4))}],
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_other_tensors_fall_back_to_torch(written, name):
    opt = ProxSPS(OUTSIDE[name]())
    opt.step(loss=0.5)
    assert written == []
    assert opt.last_step.branch_name == "inside"
    assert (opt.param_groups[0]["params"][0] != 1).all()


@pytest.mark.parametrize("name", OUTSIDE)
def test_fused_says_why_it_does_not_apply(name):
    with pytest.raises(RuntimeError, match=r"fused=True needs numba.*one dtype.*fused=None falls back to torch"):
        ProxSPS(OUTSIDE[name](), fused=True).step(loss=0.5)


def test_fused_off_does_not_take_the_kernels(written):
    ProxSPS([parameter(torch.ones(4, 3))], fused=False).step(loss=0.5)
    assert written == []
