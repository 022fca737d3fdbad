"""Passes over the tensors of a block without the kernels: inner products, and updates in one sweep."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from proxsps.core.sampling import WHOLE, block_bits, sample_size, sampled_at, sampled_blocks
from proxsps.optim.blocks import FULL, Block, plain, stored
from proxsps.optim.lists import join

DOT = 1 << 20  # entries of one dot product; longer ones lose digits of f32 on the CPU

# Entries up to which a tensor is joined with others, and limit on the entries of all of these together.
LAUNCHES = (1 << 24, 1 << 24)  # on an accelerator, where each call is expensive
COPIES = (1 << 12, 1 << 15)  # on the CPU, where copies are expensive, long ones also because of threads and new memory
MEDIUM = 1 << 16  # entries up to which tensors are joined before they are sampled


def widened(x: Tensor) -> Tensor:
    """Half precision as f32; other tensors as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def flat(x: Tensor) -> Tensor:
    """The entries as one vector, in at least f32."""
    return widened(_vector(x))


def joined(tensors: Iterable[Tensor]) -> Tensor:
    """The entries of tensors of one dtype as one vector, in at least f32."""
    return widened(join(list(tensors)))


def _vector(x: Tensor) -> Tensor:
    return x if x.dim() == 1 else x.ravel()


def pieces(*parts: Tensor, piece: int = DOT) -> Iterable[tuple[Tensor, ...]]:
    """Vectors, cut in the same way into pieces for one dot product each."""
    if parts[0].numel() <= piece or not parts[0].is_cpu:
        return [parts]
    return zip(*(part.split(piece) for part in parts), strict=True)


def dots(a: Tensor, b: Tensor) -> list[Tensor]:
    """<a, b> of two vectors as a list of 0-d tensors to be added up."""
    return [torch.dot(p, q) for p, q in pieces(a, b)]


def square(d: Tensor) -> Tensor:
    """||d||^2 of a vector."""
    return torch.dot(d, d)


def vectors(block: Block, coupled: bool, small: int, bucket: int) -> Iterator[tuple[Tensor, ...]]:
    """Pairs (x - center, d) of a block as vectors, small tensors joined; d = g + lam (x - center) if `coupled`.

    In a metric, triples (x, d, D^-1 d).
    """
    if block.directions is not None:
        yield from bucketed(zip(block.params, block.slopes, block.directions, strict=True), small, bucket)
        return
    centers = (block.centers,) if block.centered else ()
    for x, d, *center in bucketed(zip(block.params, block.slopes, *centers, strict=True), small, bucket):
        if center:
            x = x - center[0]
        yield x, torch.add(d, x, alpha=block.lam) if coupled and block.lam else d


def pair_sums(pairs: Iterable[tuple[Tensor, ...]], points: bool) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """||d||^2, <d, x> and, for `points`, ||x||^2 of each pair (x, d) of vectors; <d, e> for triples (x, d, e)."""
    d_sq, d_dot_x, x_sq = [], [], []
    for x, d, *e in pairs:  # <d, x> reads both at once, and leaves d in the cache for its square
        d_dot_x.append(torch.dot(d, x))
        d_sq.append(torch.dot(d, e[0] if e else d))
        if points:
            x_sq.append(square(x))
    return d_sq, d_dot_x, x_sq


def wide_sums(
    pairs: Iterable[tuple[Tensor, ...]], points: bool, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The same for f32 beyond the range of its squares, without reading the result, as on an accelerator."""
    d_sq, d_dot_x, x_sq = [], [], []
    for x, d, *e in pairs:
        norm = torch.linalg.vector_norm(d, dtype=dtype)
        scale = scale_of(norm)
        d_sq.append(torch.dot(d / scale, e[0]) * scale if e else norm.square())
        d_dot_x.append(torch.dot(d / scale, x) * scale)
        if points:
            x_sq.append(torch.linalg.vector_norm(x, dtype=dtype).square())
    return d_sq, d_dot_x, x_sq


def scale_of(norm: Tensor) -> Tensor:
    """A norm that f32 can be divided by: if it is tiny or infinite, the nearest number of f32."""
    single = torch.finfo(torch.float32)
    return norm.clamp(single.tiny, single.max)


def bucketed(
    items: Iterable[tuple[Tensor, ...]], small: int, bucket: int, piece: int = DOT
) -> Iterator[tuple[Tensor, ...]]:
    """Tuples of tensors of one shape as vectors, those of at most `small` entries joined, long ones cut into pieces.

    One product of long vectors beats hundreds of tiny ones.
    """
    waiting: list[tuple[Tensor, ...]] = []
    dtypes, size = None, 0
    for item in items:
        entries = item[0].numel()
        if entries > small:
            yield from pieces(*map(flat, item), piece=piece)
            continue
        before, dtypes = dtypes, [x.dtype for x in item]
        if waiting and (size + entries > bucket or dtypes != before):
            yield tuple(map(joined, zip(*waiting, strict=True)))
            waiting, size = [], 0
        waiting.append(item)
        size += entries
    if waiting:
        yield tuple(map(joined, zip(*waiting, strict=True)))


def moved_sq(block: Block) -> float | None:
    """||x - x_0||^2 of a block, estimated from the sample of its start; None if that is not a simple view of x."""
    if not comparable(block):
        return None
    distance, sizes = Distance(block), [x.numel() for x in block.params]
    small = [i for i, size in enumerate(sizes) if 0 < size <= COPIES[0]]
    if small:
        distance.add(small, [sizes[i] for i in small], 0, join([block.params[i] for i in small]))
    for i, x in enumerate(block.params):
        if sizes[i] > COPIES[0]:
            distance.add([i], [sizes[i]], 0, x.view(-1))
    return distance.moved_sq


def comparable(block: Block) -> bool:
    """Whether the starts of a block are sampled entries of its tensors, as vectors; checkpoints may have others."""
    xs, starts = block.params, block.starts
    if starts is None or not plain(xs) or not all([x.is_contiguous() for x in xs]):
        return False
    dtypes = {t.dtype for t in (*xs, *starts)}
    return len(dtypes) <= 1 and dtypes <= FULL and [s.shape for s in starts] == [(sample_size(x.numel()),) for x in xs]


class Places:
    """The indices of sampled entries, as tensors.

    An optimizer keeps them: they take time to compute, tensors of one size share them, and a captured step reads them.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[int, ...], int, int, torch.device], Tensor] = {}

    def _index(self, sizes: tuple[int, ...], low: int, high: int, device: torch.device) -> Tensor:
        if torch.compiler.is_compiling():
            traced: Tensor = sample_index(sizes, low, high, device)
            return traced
        key = sizes, low, high, device
        if key in self._known:
            return self._known[key]
        index: Tensor = sample_index(*key)
        if type(index) is Tensor:  # not a fake one
            self._known[key] = index
        return index

    def sample(self, x: Tensor, n: int, low: int = 0) -> Tensor:
        """The sampled entries of a vector that is a part of a flat tensor of n entries, from entry `low` on."""
        return x.index_select(0, self._index((n,), low, low + len(x), x.device)) if block_bits(n) else x

    def samples(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """The sampled entries of whole flat tensors; many tensors of medium size take three calls."""
        found, together = list(xs), defaultdict(list)
        for i, x in enumerate(xs):
            if type(x) is Tensor and WHOLE < len(x) <= MEDIUM:
                together[x.dtype, x.device].append(i)
            else:
                found[i] = self.sample(x, len(x))
        for (_, device), members in together.items():
            sizes = tuple([len(xs[i]) for i in members])
            vector = join([xs[i] for i in members]).index_select(0, self._index(sizes, 0, sum(sizes), device))
            for i, part in zip(members, vector.split(list(map(sample_size, sizes))), strict=True):
                found[i] = part
        return found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # else every compiled step would contain it
def sample_index(sizes: tuple[int, ...], low: int, high: int, device: torch.device) -> Tensor:
    """Indices of the sampled entries of joined flat tensors, from entry `low` of the first to `high`, from `low` on."""
    parts, first = [], -low
    for n in sizes:
        blocks = sampled_blocks(n, low, high) if len(sizes) == 1 else sampled_blocks(n)
        parts.append(first + sampled_at(torch.arange(blocks.start, blocks.stop, device=device), block_bits(n)))
        first += n
    return torch.cat(parts).to(torch.int32 if high - low < 1 << 31 else torch.int64)


class Distance:
    """||x - x_0||^2, added up over vectors of parameters of a block."""

    def __init__(self, block: Block) -> None:
        self._starts, self._places = block.starts or (), block.places or Places()
        self.moved_sq = 0.0

    def add(self, members: Sequence[int], sizes: Sequence[int], low: int, x: Tensor) -> None:
        """Compare the entries from `low` on of one tensor, or all entries of several joined tensors."""
        if len(members) == 1:
            (n,), start = sizes, self._starts[members[0]]
            blocks = sampled_blocks(n, low, low + len(x))
            moves = self._places.sample(x, n, low) - start[blocks.start : blocks.stop]
            self.moved_sq += torch.linalg.vector_norm(moves).item() ** 2 * n / start.numel()
            return
        starts = [self._starts[i] for i in members]
        if sum(sizes) == sum(map(len, starts)):  # a view of each would take longer than the arithmetic
            self.moved_sq += torch.linalg.vector_norm(x - join(starts)).item() ** 2
            return
        for i, own in zip(members, x.split(list(sizes)), strict=True):
            self.add([i], [own.numel()], 0, own)


def combined(block: Block, keep: Tensor | float, move: Tensor | float, pull: Tensor | float) -> Iterator[Tensor]:
    """keep x + move d + pull center, tensor by tensor, in any memory layout."""
    for x, g, c in zip(block.params, block.along, block.centers, strict=True):
        y = keep * widened(x) + move * widened(g)
        yield y if c is None else y + pull * widened(c)


def update(block: Block, keep: float, move: float) -> None:
    """x <- keep x + move d on the host, in one pass over memory if that is safe."""
    decay = safe_decay(keep, move)
    if decay is not None and stored(block.params) and stored(block.along):
        fused_sgd(block.params, block.along, -move, decay)
        return
    if keep != 1:  # a tensor, because torch takes far longer for hundreds of products with a Python number
        dtype = torch.float64 if block.double else torch.float32
        torch._foreach_mul_(block.params, torch.tensor(keep, dtype=dtype))
    if move != 0:
        torch._foreach_add_(block.params, block.along, alpha=move)


def safe_decay(keep: float, move: float) -> float | None:
    """(keep - 1) / move, a factor on x in one pass with the move; None if this quotient leaves the range of f32.

    It is lam / u, which is too large for huge slopes.
    """
    decay = (keep - 1) / move if move else math.inf
    return decay if abs(decay) < 1e30 else None


def update_masked(block: Block, keep: Tensor, move: Tensor, ok: Tensor) -> None:
    """x <- keep x + move d in two calls for all tensors of an aligned f32 block; as they are where not `ok`."""
    skipped = 1 - ok.float()
    torch._foreach_mul_(block.params, torch.where(ok, keep, skipped))  # which is 1 where not `ok`
    fused_sgd(block.params, block.along, move, 0.0, skipped, uphill=True)


def fused_sgd(
    params: list[Tensor],
    moves: list[Tensor],
    lr: Tensor | float,
    decay: float,
    found_inf: Tensor | None = None,
    uphill: bool = False,
) -> None:
    """Torch's kernel: x <- x - lr (d + decay x), or x + lr (d - decay x) `uphill`; nothing where `found_inf` is 1."""
    torch._fused_sgd_(
        params,
        moves,
        [],
        weight_decay=decay,
        momentum=0.0,
        lr=lr,
        dampening=0.0,
        nesterov=False,
        maximize=uphill,
        is_first_step=True,
        grad_scale=None,
        found_inf=found_inf,
    )
