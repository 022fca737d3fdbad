"""Lists of tensors as one vector and back, in two operations that a compiler leaves as they are.

For hundreds of tensors copied into one vector, a compiler would make code for each of them, which takes minutes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

PLAIN = (Tensor, torch.nn.Parameter)
LAUNCH = 1 << 24  # entries up to which tensors are joined on an accelerator, where every call is expensive


@torch.library.custom_op("proxsps::join", mutates_args=())
def _join(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in tensors])


@_join.register_fake
def _(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].new_empty(sum(x.numel() for x in tensors))


@torch.library.custom_op("proxsps::spread", mutates_args={"tensors"})
def _spread(vector: Tensor, tensors: Sequence[Tensor]) -> None:
    copies = _copies(vector, tensors)
    torch._foreach_copy_([x for x, _ in copies], [part for _, part in copies])


def is_sharded(x: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is distributed over a mesh of ranks, in shards or in copies; without loading its class."""
    return type(x) not in PLAIN and getattr(x, "device_mesh", None) is not None


def widened(x: Tensor) -> Tensor:
    """Half precision as f32; other tensors as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def join(tensors: Sequence[Tensor]) -> Tensor:
    """The entries of tensors of one dtype as one vector; a view of a single tensor where its memory allows."""
    if len(tensors) == 1:
        return tensors[0].reshape(-1)
    if torch.compiler.is_compiling():
        vector: Tensor = _join(list(tensors))
        return vector
    # Most tensors of a network are short vectors, and a view of each would take longer than a copy.
    return torch.cat([x if x.dim() == 1 else x.reshape(-1) for x in tensors])


def join_all(lists: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
    """Each list of tensors as one vector; all lists of one dtype in one operation."""
    if len({tensors[0].dtype for tensors in lists}) > 1 or len(lists[0]) == 1:
        return [join(tensors) for tensors in lists]
    sizes = [sum(x.numel() for x in tensors) for tensors in lists]
    vectors: Sequence[Tensor] = join([x for tensors in lists for x in tensors]).split(sizes)
    return vectors


def spread(vector: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write the entries of a vector into the tensors, the inverse of `join`."""
    spread_all([vector], [tensors])


def spread_all(vectors: Sequence[Tensor], lists: Sequence[Sequence[Tensor]]) -> None:
    """Write the entries of each vector into the tensors of its list."""
    if torch.compiler.is_compiling():
        for vector, tensors in zip(vectors, lists, strict=True):
            _spread(vector, list(tensors))
        return
    copies = [pair for vector, tensors in zip(vectors, lists, strict=True) for pair in _copies(vector, tensors)]
    torch._foreach_copy_([x for x, _ in copies], [part for _, part in copies])


def _copies(vector: Tensor, tensors: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The tensors, each with its part of the vector.

    Without dims of length 1, which may have any stride: torch does not copy between two views of the same memory whose
    strides differ, and a vector may be a view of its only tensor.
    """
    parts = vector.split([x.numel() for x in tensors])
    targets = [x.squeeze() if 1 in x.shape and type(x) in PLAIN else x for x in tensors]
    return [(x, part.view(x.shape)) for part, x in zip(parts, targets, strict=True)]


def bundles(columns: Sequence[Sequence[Tensor]], size: int) -> Iterator[list[list[Tensor]]]:
    """Lists of tensors, cut in the same way: parts of long tensors, short tensors together, at most `size` entries."""
    found: list[tuple[Tensor, ...]] = []
    room = size
    for tensors in zip(*columns, strict=True):
        length = tensors[0].numel()
        if found and (length > room or any([t.dtype != f.dtype for t, f in zip(tensors, found[0], strict=True)])):
            yield list(map(list, zip(*found, strict=True)))
            found, room = [], size
        if length > size:
            yield from ([[part] for part in parts] for parts in _cut(tensors, size))
        elif length:
            found.append(tensors)
            room -= length
    if found:
        yield list(map(list, zip(*found, strict=True)))


def _cut(tensors: tuple[Tensor, ...], size: int) -> Iterator[tuple[Tensor, ...]]:
    """Views of long tensors, cut in the same way into parts of at most `size` entries."""
    x = tensors[0]
    if all([t.is_contiguous() for t in tensors]):
        yield from zip(*(t.view(-1).split(size) for t in tensors), strict=True)
        return
    # As a vector, this tensor may be a copy, and a write to a copy is lost.
    dim = max(range(x.dim()), key=x.shape.__getitem__)
    length = max(1, size * x.shape[dim] // x.numel())
    for parts in zip(*(t.split(length, dim) for t in tensors), strict=True):
        if parts[0].numel() > size:
            yield from _cut(parts, size)
        else:
            yield parts
