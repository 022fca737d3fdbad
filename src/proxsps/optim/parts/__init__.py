"""The four kinds of blocks in a step: lines, rows, entries, and blocks with only a prox."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from proxsps.optim.blocks import ENTRIES, PROXES, UNITS, Block, plain
from proxsps.optim.numbers import Device, Host, Numbers
from proxsps.optim.parts.averaged import AveragedLines
from proxsps.optim.parts.averaged_entries import AveragedEntriesOfTensors
from proxsps.optim.parts.base import Curve, Part, Sums
from proxsps.optim.parts.compiled import (
    CompiledAveragedEntries,
    CompiledAverages,
    CompiledEntries,
    CompiledLines,
    averages_of,
    load_kernels,
    memory_of,
)
from proxsps.optim.parts.compiled_rows import compiled_metric_rows, compiled_rows, compiled_units
from proxsps.optim.parts.device import DeviceEntries
from proxsps.optim.parts.device_rows import DeviceRows
from proxsps.optim.parts.entries import EntriesOfTensors
from proxsps.optim.parts.lines import Lines
from proxsps.optim.parts.proxes import Proxes
from proxsps.optim.parts.rows import RowsOfTensors
from proxsps.optim.parts.vacant import Vacant
from proxsps.regularizers.structure import Scalar


def make_lines(
    numbers: Numbers, blocks: Sequence[Block], places: Sequence[int], fused: bool | None, coupled: bool
) -> Lines:
    """The part of the blocks whose prox is affine.

    Blocks with averages have a record of them (`proxsps.optim.moments`). For a part that does not update averages by
    itself, they are computed first.
    """
    averaging = _make_averaging(numbers, blocks, places, fused)
    if averaging is not None:
        return averaging
    make_moments(numbers, blocks)
    memory = None
    plain_steps = not any(block.centered or block.directions is not None for block in blocks)
    if isinstance(numbers, Host) and fused is not False and plain_steps:
        memory = memory_of(blocks)
    _check_fused(fused, memory, blocks)
    part = Lines(numbers, blocks, places) if memory is None else CompiledLines(numbers, blocks, places, memory)
    part.coupled = coupled
    return part


def _make_averaging(
    numbers: Numbers, blocks: Sequence[Block], places: Sequence[int], fused: bool | None
) -> AveragedLines | None:
    """A part that updates averages while it sums and writes, or None if there is none for these blocks."""
    if not isinstance(numbers, Host) or any(block.moments is None for block in blocks):
        return None
    memory = averages_of(blocks) if fused is not False else None
    if memory is not None:
        return CompiledAverages(numbers, blocks, places, memory)
    return AveragedLines(numbers, blocks, places) if not fused and AveragedLines.takes(blocks) else None


def make_moments(numbers: Numbers, blocks: Sequence[Block]) -> None:
    """Compute the averages of blocks, and set them as slopes."""
    for block in blocks:
        if block.moments is not None:
            block.moments.make(block, numbers)


def make_curve(
    kind: str, numbers: Numbers, blocks: Sequence[Block], places: Sequence[int], fused: bool | None, exact: bool = False
) -> Curve:
    """The part of blocks of another kind; `exact` computes in doubles."""
    if all(block.empty for block in blocks):
        make_moments(numbers, blocks)
        return Vacant(numbers, blocks, places)
    averaging = None if exact else _make_averaging_curve(kind, numbers, blocks, places, fused)
    if averaging is not None:
        averaging.kind = kind
        return averaging
    make_moments(numbers, blocks)
    if kind == UNITS:
        (block,) = blocks
        compiles = isinstance(numbers, Host) and fused is not False and not exact
        units = compiled_units(numbers, block, places) if compiles else None
        _check_fused(None if exact else fused, units, blocks)
        if units is not None:
            return units
        kind = PROXES
    tensors = [t for block in blocks for t in (*block.params, *block.slopes)]
    if isinstance(numbers, Host) and (not plain(tensors) or any(map(torch._is_functional_tensor, tensors))):
        kind = PROXES  # other parts write to memory, which may not hold their entries
    if isinstance(numbers, Host) and any(block.in_metric for block in blocks):
        kind = PROXES  # parts for entries in a metric on the host update averages themselves
    curve = _curve(kind, numbers, blocks, places, fused, exact)
    curve.kind = kind
    return curve


def _make_averaging_curve(
    kind: str, numbers: Numbers, blocks: Sequence[Block], places: Sequence[int], fused: bool | None
) -> Curve | None:
    """A part that updates averages in its passes, or None if there is none for these blocks."""
    if not isinstance(numbers, Host) or any(block.moments is None for block in blocks):
        return None
    if kind == PROXES and not all(block.in_metric for block in blocks):
        return None
    memory = averages_of(blocks) if fused is not False else None
    if kind == PROXES:
        return None if memory is None else compiled_metric_rows(numbers, blocks, places, memory)
    if kind == ENTRIES:
        own = [block.entries for block in blocks]
        if memory is not None and all(isinstance(s.psi, Scalar) for s in own):
            return CompiledAveragedEntries(numbers, blocks, places, own, memory)
        alone = not fused and AveragedLines.takes(blocks)
        return AveragedEntriesOfTensors(numbers, blocks, places, own) if alone else None
    if memory is None:
        return None
    if kind == UNITS:
        return compiled_units(numbers, blocks[0], places, memory)
    return compiled_rows(numbers, blocks, places, [block.rows for block in blocks], memory)


def _curve(
    kind: str, numbers: Numbers, blocks: Sequence[Block], places: Sequence[int], fused: bool | None, exact: bool
) -> Curve:
    if kind == PROXES:
        return Proxes(numbers, blocks, places, exact)
    compiles = isinstance(numbers, Host) and fused is not False and not exact and load_kernels() is not None
    if kind == ENTRIES:
        own = [block.entries for block in blocks]
        memory = memory_of(blocks) if compiles and all(isinstance(s.psi, Scalar) for s in own) else None
        _check_fused(None if exact else fused, memory, blocks)
        if memory is not None:
            return CompiledEntries(numbers, blocks, places, own, memory)
        if isinstance(numbers, Device):
            return DeviceEntries(numbers, blocks, places, own)
        return EntriesOfTensors(numbers, blocks, places, own, exact)
    structures = [block.rows for block in blocks]
    rows = compiled_rows(numbers, blocks, places, structures) if compiles else None
    _check_fused(None if exact else fused, rows, blocks)
    if rows is not None:
        return rows
    if isinstance(numbers, Device):
        return DeviceRows(numbers, blocks, places, structures)
    return RowsOfTensors(numbers, blocks, places, structures, exact)


def _check_fused(fused: bool | None, memory: object, blocks: Sequence[Block]) -> None:
    if fused and memory is None and any(block.params for block in blocks):
        raise RuntimeError(
            "fused=True needs numba (the extra 'fast') and dense f32 or f64 CPU tensors of one dtype, contiguous or "
            "channels-last, without centres. fused=None falls back to torch otherwise."
        )


__all__ = ["Curve", "Lines", "Part", "Sums", "load_kernels", "make_curve", "make_lines"]
