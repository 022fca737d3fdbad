"""Passes over the tensors of a block with torch alone: inner products, and updates in one sweep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from proxsps.optim.blocks import Block

DOT = 1 << 20  # entries of one dot product; longer ones lose digits of f32 on the CPU
BUCKET = 1 << 24  # entries that tensors are joined up to on an accelerator, where each call is dear
SMALL = 1 << 12  # entries up to which tensors are joined on the CPU, where copies are dear


def widened(x: Tensor) -> Tensor:
    """Half precision as f32; other tensors as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def flat(x: Tensor) -> Tensor:
    """The entries as one vector, in f32 at least."""
    x = widened(x)
    return x if x.dim() == 1 else x.reshape(-1)


def dots(a: Tensor, b: Tensor) -> list[Tensor]:
    """<a, b> of two vectors as a list of 0-d tensors to be added up."""
    if a.numel() <= DOT or not a.is_cpu:
        return [torch.dot(a, b)]
    return [torch.dot(p, q) for p, q in zip(a.split(DOT), b.split(DOT), strict=True)]


def displaced(block: Block, coupled: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs (x - center, d) of a block, as vectors."""
    for x, g, c in zip(block.params, block.grads, block.centers, strict=True):
        x, d = flat(x) if c is None else flat(x) - flat(c), flat(g)
        yield x, torch.add(d, x, alpha=block.lam) if coupled and block.lam else d


def squares(d: Tensor) -> list[Tensor]:
    """||d||^2 as a list of 0-d tensors to be added up."""
    return dots(d, d)


def pair_sums(
    pairs: Iterable[tuple[Tensor, Tensor]], points: bool, squares: Callable[[Tensor], list[Tensor]] = squares
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """||d||^2, <d, x> and, for `points`, ||x||^2 over pairs (x, d), each as a list of 0-d tensors to be added up."""
    d_sq, d_dot_x, x_sq = [], [], []
    for x, d in pairs:  # one tensor at a time, so that d is still in the cache for its second product
        d_sq += squares(d)
        d_dot_x += dots(d, x)
        if points:
            x_sq += squares(x)
    return d_sq, d_dot_x, x_sq


def bucketed(pairs: Iterable[tuple[Tensor, Tensor]], small: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The same pairs with those of at most `small` entries joined: one product beats hundreds of tiny ones."""
    xs: list[Tensor] = []
    ds: list[Tensor] = []
    size = 0
    for x, d in pairs:
        if x.numel() > small:
            yield x, d
            continue
        if xs and (size + x.numel() > BUCKET or x.dtype is not xs[0].dtype):
            yield torch.cat(xs), torch.cat(ds)
            xs, ds, size = [], [], 0
        xs.append(x)
        ds.append(d)
        size += x.numel()
    if xs:
        yield torch.cat(xs), torch.cat(ds)


def combined(block: Block, keep: Tensor | float, move: Tensor | float, pull: Tensor | float) -> Iterator[Tensor]:
    """keep x + move g + pull center, tensor by tensor, in any memory layout."""
    for x, g, c in zip(block.params, block.grads, block.centers, strict=True):
        y = keep * widened(x) + move * widened(g)
        yield y if c is None else y + pull * c


def fused_sgd(block: Block, lr: Tensor | float, weight_decay: float, found_inf: Tensor | None) -> None:
    """x <- x - lr (g + weight_decay x) in one pass over memory; not at all where found_inf is 1."""
    if torch.compiler.is_compiling():  # the compiler does not know the fused kernel, and fuses these lines itself
        for x, g in zip(block.params, block.grads, strict=True):
            y = x - lr * (g + weight_decay * x)
            x.copy_(y if found_inf is None else torch.where(found_inf > 0, x, y))
    else:
        torch._fused_sgd_(
            block.params,
            block.grads,
            [],
            weight_decay=weight_decay,
            momentum=0.0,
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=True,
            grad_scale=None,
            found_inf=found_inf,
        )
