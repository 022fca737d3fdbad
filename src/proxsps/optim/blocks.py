"""A parameter group made ready for a step: its tensors with gradients, its cap alpha and its regulariser."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from proxsps.optim.reduce import Ranks
from proxsps.regularizers import L2, Regularizer, Zero
from proxsps.regularizers.structure import Entries, Quadratic, Rows, Structure

PLAIN = (Tensor, torch.nn.Parameter)
FULL = {torch.float32, torch.float64}
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}

LINES, ROWS, UNITS, ENTRIES, PROXES = "lines", "rows", "units", "entries", "proxes"
# Of the passes: what is known exactly helps the search over entries.
ORDER = {kind: place for place, kind in enumerate((PROXES, UNITS, LINES, ROWS, ENTRIES))}


@dataclass
class Block:
    """The tensors of one parameter group that have a gradient; complex ones as real views.

    Of sharded parameters these are the shards of this rank; shards and whole tensors make two blocks of one group.
    """

    group: dict[str, Any]
    alpha: float | Tensor
    phi: Regularizer
    params: list[Tensor]
    slopes: list[Tensor]  # d of the linear model: the gradients, unless an estimate puts others in their place
    indices: Sequence[int]  # their places in the group
    share: float = 1.0  # one over the number of ranks that hold the same entries
    sharded: bool = False
    afterwards: list[Callable[[], object]] = field(default_factory=list)  # what is left to do when params are written

    # Plain properties, although used more than once: torch.compile cannot trace cached ones.

    @property
    def owners(self) -> list[Tensor]:
        """The parameters themselves, which key the optimizer's state, in the order of `params`."""
        return [self.group["params"][i] for i in self.indices]

    @property
    def structures(self) -> list[Structure | None]:
        """What the regulariser says of itself, tensor by tensor."""
        if not self.params:
            return []
        first = self._structure(0)
        if not isinstance(first, Rows) and self._uniform:  # only rows depend on the shape
            return [first] * len(self.params)
        return [first, *(self._structure(i) for i in range(1, len(self.params)))]

    @property
    def _uniform(self) -> bool:
        """Whether the regulariser is the same for all tensors."""
        return getattr(type(self.phi), "at", None) is Regularizer.at

    def _structure(self, i: int) -> Structure | None:
        return self.phi.at(self.indices[i]).structure(self.params[i].shape)

    @property
    def kind(self) -> str:
        """What the block can answer of h; nothing to do is a line, and so is a block whose cap is known to be 0."""
        if not self.params or self.quadratic or (not isinstance(self.alpha, Tensor) and self.alpha == 0):
            return LINES
        first = self._structure(0)
        if self.phi.joint and not isinstance(first, Entries):
            return UNITS
        if isinstance(first, Entries):
            return ENTRIES if self._uniform or all([other == first for other in self.structures]) else PROXES
        return ROWS if isinstance(first, Rows) else PROXES

    @property
    def quadratic(self) -> bool:
        """Whether the regulariser is none or the squared l2 norm."""
        return isinstance(self.phi, L2) or isinstance(self._structure(0), Quadratic)

    @property
    def lam(self) -> float:
        """Strength of the squared l2 norm, 0 for any other regulariser."""
        return self.phi.lam if isinstance(self.phi, L2) else 0.0

    @property
    def centered(self) -> bool:
        """Whether the squared l2 norm has a centre."""
        return isinstance(self.phi, L2) and self.phi.center is not None

    @property
    def centers(self) -> list[Tensor] | list[None]:
        """A centre a tensor, None where the squared l2 norm has none."""
        if not self.centered:
            return [None] * len(self.params)
        return [
            torch.as_tensor(self.phi.at(i).center, dtype=x.dtype, device=x.device)
            for i, x in zip(self.indices, self.params, strict=True)
        ]

    @property
    def aligned(self) -> bool:
        """Whether a flat pass over the memory of parameters and gradients is right; half precision takes other ways."""
        dtypes = [x.dtype for x in self.params]
        if dtypes != [g.dtype for g in self.slopes] or not set(dtypes) <= FULL:
            return False
        return plain(self.params, self.slopes) and same_order(self.params, self.slopes)

    @property
    def double(self) -> bool:
        """Whether some parameter has double precision."""
        return any([x.dtype is torch.float64 for x in self.params])


def plain(*lists: Sequence[Tensor]) -> bool:
    """Whether no tensor is of a class with operations of its own, whose memory need not hold its entries."""
    kinds = {type(t) for tensors in lists for t in tensors}
    return all([kind in PLAIN or kind.__torch_dispatch__ is Tensor.__torch_dispatch__ for kind in kinds])


def stored(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors with entries have memory for them; zeros that torch does not store, and wrappers, have none."""
    try:
        return all([t.data_ptr() != 0 or t.numel() == 0 for t in tensors])
    except RuntimeError:  # inside torch.func transforms
        return False


def same_order(*lists: Sequence[Tensor]) -> bool:
    """Whether the first tensors of all lists, the second ones and so on, lie in memory in one order without gaps."""
    contiguous = all([all([t.is_contiguous() for t in tensors]) for tensors in lists])
    return contiguous or all(map(_same_format, *lists))


def _same_format(*tensors: Tensor) -> bool:
    formats = [torch.contiguous_format]
    if tensors[0].dim() in CHANNELS_LAST:
        formats.append(CHANNELS_LAST[tensors[0].dim()])
    return any(all(t.is_contiguous(memory_format=f) for t in tensors) for f in formats)


def gather(groups: Sequence[dict[str, Any]], ranks: Ranks) -> list[Block]:
    """The blocks of all groups, in order, at least one a group; those without gradients are empty.

    How many there are does not depend on which parameters have gradients, so that it is the same on all ranks.
    """
    return [block for group in groups for block in _blocks(group, ranks)]


def _blocks(group: dict[str, Any], ranks: Ranks) -> list[Block]:
    params, indices = group["params"], range(len(group["params"]))
    if any([type(param) not in PLAIN for param in params]) and "torch.distributed.tensor" in sys.modules:
        from proxsps.optim.shards import is_sharded, sharded_blocks  # loads much that few need

        if any(map(is_sharded, params)):
            return [_dense(block) for block in sharded_blocks(group, regularizer_of(group), ranks)]
    grads = [param.grad for param in params]
    if any([grad is None for grad in grads]):
        indices = [i for i in indices if grads[i] is not None]
        params, grads = [params[i] for i in indices], [grads[i] for i in indices]
    return [_dense(Block(group, group["lr"], regularizer_of(group), params, grads, indices, 1 / ranks.size))]


def _dense(block: Block) -> Block:
    """The block without lazy signs and with complex tensors as real views; sparse gradients are refused."""
    if {grad.layout for grad in block.slopes} - {torch.strided}:
        raise TypeError(
            "Sparse gradients are not supported: a Polyak step needs <g, x> and ||g||^2 over all entries. "
            "Use dense gradients, for instance nn.Embedding(..., sparse=False)."
        )
    has_complex = any(dtype.is_complex for dtype in {param.dtype for param in block.params})
    if not torch.compiler.is_compiling() and _has_lazy_signs([*block.params, *block.slopes], has_complex):
        _resolve(block)
    if has_complex:
        block.params, block.slopes = _real(block.params), _real([g.resolve_conj() for g in block.slopes])
    return block


def _has_lazy_signs(tensors: Sequence[Tensor], has_complex: bool) -> bool:
    return any([t.is_neg() for t in tensors]) or (has_complex and any([t.is_conj() for t in tensors]))


def _resolve(block: Block) -> None:
    """Write out negations and conjugations that torch has put off: memory holds the entries without them.

    The step is then taken on a copy of such a parameter, and the parameter gets the result afterwards.
    """
    params = block.params
    block.params, block.slopes = ([t.resolve_conj().resolve_neg() for t in ts] for ts in (params, block.slopes))
    for x, y in zip(params, block.params, strict=True):
        if x.is_neg() or x.is_conj():
            block.afterwards.append(lambda x=x, y=y: x.copy_(y))


def regularizer_of(group: dict[str, Any]) -> Regularizer:
    """The regulariser of a group; `weight_decay` is the squared l2 norm by another name."""
    if group["regularizer"] is not None:
        return group["regularizer"]
    return L2(group["weight_decay"]) if group["weight_decay"] else Zero()


def _real(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Complex tensors as views with real and imaginary part on a last axis."""
    return [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
