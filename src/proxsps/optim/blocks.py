"""A parameter group prepared for a step: its tensors with gradients, its cap alpha and its regulariser."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor

from proxsps.optim.lists import PLAIN, bundles, is_sharded, widened
from proxsps.optim.reduce import Ranks
from proxsps.regularizers import L2, Regularizer, Zero
from proxsps.regularizers.base import subgradient_all, value_all
from proxsps.regularizers.structure import Entries, Quadratic, Rows, Scalar, Structure

FULL = {torch.float32, torch.float64}
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}

LINES, ROWS, UNITS, ENTRIES, PROXES = "lines", "rows", "units", "entries", "proxes"
SPECTRAL = "spectral"  # affine blocks whose directions are orthogonalised slopes


@dataclass
class Block:
    """The tensors of one parameter group that take part in a step; complex tensors as real views.

    These are the tensors with a gradient; those without one rest. For sharded parameters these are the shards of this
    rank. Shards and whole tensors are separate blocks.
    """

    group: dict[str, Any]
    alpha: float | Tensor
    phi: Regularizer
    params: list[Tensor]
    slopes: list[Tensor]  # d of the linear model: the gradients, unless an estimate replaces them
    indices: Sequence[int]  # their positions in the group
    resting: Sequence[int] = ()  # positions of the tensors without a gradient
    share: float = 1.0  # one over the number of ranks that hold the same entries
    sharded: bool = False
    gathered: bool = False  # whether some tensors are whole, although ranks hold only shards of them
    afterwards: list[Callable[[], object]] = field(default_factory=list)  # called after params are written
    in_metric: bool = False  # whether distances are measured in Adam's metric
    directions: list[Tensor] | None = None  # D^-1 d in a diagonal metric
    metrics: list[Tensor] = field(default_factory=list)  # D of every entry, if the prox needs it
    ys: list[Tensor] = field(default_factory=list)  # in the schedule-free form the parameters; `params` are z then

    # Plain properties, although used more than once: torch.compile cannot trace cached ones.

    @property
    def owners(self) -> list[Tensor]:
        """The parameters themselves, which key the optimizer's state, in the order of `params`."""
        return [self.group["params"][i] for i in self.indices]

    def owner(self, i: int) -> Tensor:
        """The i-th of them, without a list of hundreds."""
        found: Tensor = self.group["params"][self.indices[i]]
        return found

    @property
    def along(self) -> list[Tensor]:
        """The directions of the move: D^-1 d in a metric, else d."""
        return self.slopes if self.directions is None else self.directions

    @property
    def structures(self) -> list[Structure | None]:
        """The structure of the regulariser, tensor by tensor."""
        if not self.params:
            return []
        first = self._structure(0)
        if self._alike and not isinstance(first, Rows):
            return [first] * len(self.params)
        return [first, *(self._structure(i) for i in range(1, len(self.params)))]

    @property
    def entries(self) -> Entries:
        """The structure of all tensors of a block of this kind."""
        first = self._structure(0)
        if not isinstance(first, Entries):
            raise TypeError("A block whose regulariser does not act on each entry was passed to a part for entries.")
        return first

    @property
    def rows(self) -> list[Rows]:
        """The structures of the tensors of a block of this kind, one by one."""
        return [own for own in self.structures if isinstance(own, Rows)]

    @property
    def _alike(self) -> bool:
        """Whether all tensors have the structure of the first one, up to the lengths of rows."""
        return type(self.phi).at is Regularizer.at and self.phi.one_kind

    @property
    def _common(self) -> Structure | None:
        """The structure of all tensors, for rows up to their lengths; None if they differ, or if it is not known."""
        first = self._structure(0) if self.params else None
        if first is None or self._alike:
            return first
        rows = isinstance(first, Rows)
        try:
            same = all([isinstance(own, Rows) if rows else own == first for own in self.structures])
        except (RuntimeError, ValueError):  # they hold arrays, which are equal only entry by entry
            return None
        return first if same else None

    def _structure(self, i: int) -> Structure | None:
        found = self.phi.at(self.indices[i]).structure(self.params[i].shape)
        if isinstance(found, Entries) and isinstance(found.psi, Scalar) and _is_square(found.psi):
            found = Quadratic(found.psi.l2)  # such as L1(0): a line needs no search
        if self.in_metric and isinstance(found, Quadratic) and found.center is None:
            return Entries(Scalar(l2=found.lam))  # Euclidean, so that its factor differs by entry
        return found

    @property
    def kind(self) -> str:
        """How the block computes h; a block with nothing to do is a line, and so is one whose cap is 0.

        Over shards it is the same on all ranks, which search together, even if this rank has no entries.
        """
        nothing = self.empty and not (self.sharded and self.params)
        if nothing or self.quadratic or (not isinstance(self.alpha, Tensor) and self.alpha == 0):
            return LINES
        own = self._common
        if self.in_metric and not (isinstance(own, Entries) and isinstance(own.psi, Scalar)):
            return PROXES
        if isinstance(own, Entries):
            return ENTRIES
        return UNITS if self.phi.joint else ROWS if isinstance(own, Rows) else PROXES

    @property
    def spectral(self) -> bool:
        """Whether directions are orthogonalised slopes."""
        return self.group.get("metric") == SPECTRAL

    @property
    def empty(self) -> bool:
        """Whether no tensor has entries."""
        return not any(x.numel() for x in self.params)

    @property
    def quadratic(self) -> bool:
        """Whether the regulariser is none or the squared l2 norm, measured like the distance from x.

        In a metric that is `weight_decay`, which is decoupled; `L2` is Euclidean.
        """
        if self.in_metric:
            return isinstance(self.phi, Zero) or self.group["regularizer"] is None
        return is_l2(self.phi) or (isinstance(own := self._common, Quadratic) and own.center is None)

    @property
    def lam(self) -> float:
        """Strength of the squared l2 norm, 0 for any other regulariser."""
        if is_l2(self.phi):
            return self.phi.lam if self.quadratic else 0.0
        own = self._common if self.quadratic else None
        return float(own.lam) if isinstance(own, Quadratic) else 0.0

    @property
    def centered(self) -> bool:
        """Whether the squared l2 norm has a centre."""
        return is_l2(self.phi) and self.phi.center is not None

    @property
    def centers(self) -> list[Tensor] | list[None]:
        """One centre per tensor, None if the squared l2 norm has none."""
        phi = self.phi
        if not is_l2(phi) or phi.center is None:
            return [None] * len(self.params)
        return [
            torch.as_tensor(phi.at(i).center, dtype=x.dtype, device=x.device).expand_as(x)
            for i, x in zip(self.indices, self.params, strict=True)
        ]

    @property
    def aligned(self) -> bool:
        """Whether a flat pass over the memory of parameters and moves is right; not for half precision."""
        dtypes = [x.dtype for x in self.params]
        if dtypes != [g.dtype for g in self.along] or not set(dtypes) <= FULL:
            return False
        return plain(self.params, self.along) and same_order(self.params, self.along)

    @property
    def double(self) -> bool:
        """Whether some parameter has double precision."""
        return any([x.dtype is torch.float64 for x in self.params])


def is_l2(phi: Regularizer) -> TypeGuard[L2]:
    """Whether a regulariser is the squared l2 norm; a subclass of it with another prox is not."""
    return isinstance(phi, L2) and type(phi).prox is L2.prox


def _is_square(psi: Scalar) -> bool:
    """Whether only the square of a function is there, as numbers."""
    constants = isinstance(psi.l1, (int, float)) and isinstance(psi.l2, (int, float))
    return constants and psi.l1 == 0 and not psi.bounded


def plain(*lists: Sequence[Tensor]) -> bool:
    """Whether no tensor has a class with its own operations, whose memory may not hold its entries."""
    kinds = {type(t) for tensors in lists for t in tensors}
    return all([kind in PLAIN or kind.__torch_dispatch__ is Tensor.__torch_dispatch__ for kind in kinds])


def pieces(columns: Sequence[Sequence[Tensor]], size: int) -> Iterator[list[list[Tensor]]]:
    """`bundles`; one by one with a wrapper, where one operation may change the other tensors twice."""
    if plain(*columns):
        return bundles(columns, size)
    return ([[t] for t in tensors] for tensors in zip(*columns, strict=True))


def stored(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors with entries have memory for them; wrappers, and zeros that torch does not store, have none."""
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


def gather(groups: Sequence[dict[str, Any]], ranks: Ranks, in_metric: bool = False) -> list[Block]:
    """The blocks of all groups, in order, at least one per group; blocks without gradients are empty.

    The number of blocks does not depend on which parameters have gradients, so it is the same on all ranks.
    """
    blocks = [block for group in groups for block in _blocks(group, ranks)]
    for block in blocks:
        block.in_metric = in_metric
    return blocks


def _blocks(group: dict[str, Any], ranks: Ranks) -> list[Block]:
    params, phi, lam = group["params"], group["regularizer"], group["weight_decay"]
    if phi is None:
        phi = L2(lam) if lam else Zero()
    resting = [i for i, param in enumerate(params) if param.grad is None]
    if phi.joint and 0 < len(resting) < len(params):
        raise ValueError(
            f"{phi!r} acts on all tensors of its group at once: each must have a gradient, but parameter {resting[0]} "
            "of the group has none. Put tensors without a gradient into another group."
        )
    if any(map(is_sharded, params)):
        from proxsps.optim.shards import sharded_blocks  # slow to load, and rarely needed

        return [_dense(block) for block in sharded_blocks(group, phi, ranks)]
    indices: Sequence[int] = range(len(params))
    if resting:
        indices = [i for i, param in enumerate(params) if param.grad is not None]
        params = [params[i] for i in indices]
    grads = [param.grad for param in params]
    return [_dense(Block(group, group["lr"], phi, params, grads, indices, resting, 1 / ranks.size))]


def _dense(block: Block) -> Block:
    """The block without lazy signs and with complex tensors as real views; sparse gradients raise an error."""
    if {grad.layout for grad in block.slopes} - {torch.strided}:
        raise TypeError(
            "Sparse gradients are not supported: a Polyak step needs <g, x> and ||g||^2 over all entries. "
            "Use dense gradients, for instance nn.Embedding(..., sparse=False)."
        )
    params = block.params
    has_complex = any(dtype.is_complex for dtype in {param.dtype for param in params})
    tensors = () if torch.compiler.is_compiling() else (*params, *block.slopes)
    if any(map(Tensor.is_neg, tensors)) or (has_complex and any([t.is_conj() for t in tensors])):
        # The step is taken on copies, because memory holds the entries without what torch has postponed.
        block.params, block.slopes = ([t.resolve_conj().resolve_neg() for t in ts] for ts in (params, block.slopes))
        pairs = zip(params, block.params, strict=True)
        block.afterwards += [partial(x.copy_, y) for x, y in pairs if x.is_neg() or x.is_conj()]
    if has_complex:
        block.params, block.slopes = _real(block.params), _real([g.resolve_conj() for g in block.slopes])
    return block


def couple(block: Block) -> Tensor | None:
    """Add the subgradient of a regulariser other than the squared l2 norm to the slopes; returns its value, if any."""
    if not block.params or block.quadratic:
        return None
    xs = [widened(x) for x in block.params]
    penalty: Tensor = value_all(block.phi, xs, block.indices)
    slopes = subgradient_all(block.phi, xs, block.indices)
    block.slopes = [widened(g) + s for g, s in zip(block.slopes, slopes, strict=True)]
    block.phi = Zero()
    return penalty


def _real(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Complex tensors as views with real and imaginary part on a last axis."""
    return [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
