"""The four kinds of blocks in a step: lines, rows, entries, and blocks with only a prox."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from proxsps.optim.blocks import ENTRIES, PROXES, UNITS, Block, plain
from proxsps.optim.numbers import Device, Host, Numbers
from proxsps.optim.parts.averaged import AveragedLines
from proxsps.optim.parts.averaged_entries import AveragedEntriesOfTensors
from proxsps.optim.parts.base import Curve, Part, Sums
from proxsps.optim.parts.device import DeviceEntries
from proxsps.optim.parts.device_rows import DeviceRows
from proxsps.optim.parts.entries import EntriesOfTensors
from proxsps.optim.parts.lines import Lines
from proxsps.optim.parts.proxes import Proxes
from proxsps.optim.parts.rows import RowsOfTensors
from proxsps.optim.parts.vacant import Vacant


def make_lines(numbers: Numbers, blocks: Sequence[Block], places: Sequence[int], coupled: bool) -> Lines:
    """The part of the blocks whose prox is affine.

    Blocks with averages have a record of them (`proxsps.optim.moments`). For a part that does not update averages by
    itself, they are computed first.
    """
    if _averages(numbers, blocks):
        return AveragedLines(numbers, blocks, places)
    make_moments(numbers, blocks)
    part = Lines(numbers, blocks, places)
    part.coupled = coupled
    return part


def _averages(numbers: Numbers, blocks: Sequence[Block]) -> bool:
    """Whether a part that updates averages while it sums and writes takes these blocks."""
    host = isinstance(numbers, Host) and not any(block.moments is None for block in blocks)
    return host and AveragedLines.takes(blocks)


def make_moments(numbers: Numbers, blocks: Sequence[Block]) -> None:
    """Compute the averages of blocks, and set them as slopes."""
    for block in blocks:
        if block.moments is not None:
            block.moments.make(block, numbers)


def make_curve(
    kind: str, numbers: Numbers, blocks: Sequence[Block], places: Sequence[int], exact: bool = False
) -> Curve:
    """The part of blocks of another kind; `exact` computes in doubles."""
    if all(block.empty for block in blocks):
        make_moments(numbers, blocks)
        return Vacant(numbers, blocks, places)
    if kind == ENTRIES and not exact and _averages(numbers, blocks):
        curve: Curve = AveragedEntriesOfTensors(numbers, blocks, places, [block.entries for block in blocks])
        curve.kind = kind
        return curve
    make_moments(numbers, blocks)
    tensors = [t for block in blocks for t in (*block.params, *block.slopes)]
    host = isinstance(numbers, Host)
    odd = host and (not plain(tensors) or any(map(torch._is_functional_tensor, tensors)))
    # Other parts write to memory, which may not hold the entries of odd tensors. Parts for entries in a metric on the
    # host update averages themselves.
    if kind == UNITS or odd or (host and any(block.in_metric for block in blocks)):
        kind = PROXES
    curve = _curve(kind, numbers, blocks, places, exact)
    curve.kind = kind
    return curve


def _curve(kind: str, numbers: Numbers, blocks: Sequence[Block], places: Sequence[int], exact: bool) -> Curve:
    if kind == PROXES:
        return Proxes(numbers, blocks, places, exact)
    if kind == ENTRIES:
        own = [block.entries for block in blocks]
        if isinstance(numbers, Device):
            return DeviceEntries(numbers, blocks, places, own)
        return EntriesOfTensors(numbers, blocks, places, own, exact)
    structures = [block.rows for block in blocks]
    if isinstance(numbers, Device):
        return DeviceRows(numbers, blocks, places, structures)
    return RowsOfTensors(numbers, blocks, places, structures, exact)


__all__ = ["Curve", "Lines", "Part", "Sums", "make_curve", "make_lines"]
