"""Whether a smaller model has the output of a large one: for the example inputs, and for variations of them.

One example is not enough: a model whose code branches on data takes one path for it, and perhaps another path for
other inputs, where the removed units were not zero.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn

from proxsps.sparsity.inputs import TraceError, all_tensors, difference, first_line, mapped, outputs

# Outputs are compared in double precision; a wrong removal changes them in the first digits.
EQUAL = {torch.float64: 1e-9, torch.float32: 1e-4}
GIVEN = "the example inputs"


class Expected(NamedTuple):
    """The output of the large model for some inputs, and how far another output may be from it."""

    name: str
    inputs: Any
    output: list[Tensor]
    limit: float


class Difference(NamedTuple):
    """Inputs for which the outputs differ, and how."""

    name: str
    text: str

    @property
    def elsewhere(self) -> bool:
        """Whether the outputs agree for the example inputs."""
        return self.name != GIVEN


def expected_outputs(model: nn.Module, inputs: Any) -> list[Expected]:
    """The output for the example inputs, and for all variations for which the model runs and its output is finite."""
    output = outputs(model, inputs)
    if not _is_finite(output):
        raise TraceError(
            "The model's output is not finite for the example inputs, so that a smaller model cannot be compared with "
            "it. Check its weights, or pass other inputs."
        )
    found = [Expected(GIVEN, inputs, output, _limit(output))]
    generator = torch.Generator().manual_seed(0)
    kinds = {_is_real(tensor) for tensor in all_tensors(inputs)}
    for name, real, change in VARIATIONS:
        if real in kinds:
            try:
                other = _changed(inputs, real, change, generator)
                output = outputs(model, other)
                if _is_finite(output):
                    found.append(Expected(name, other, output, _limit(output) + _noise(model, other, output)))
            except Exception:  # of many kinds: an input that the large model does not take is not a test
                continue
    return found


def first_difference(model: nn.Module, expected: list[Expected]) -> Difference | None:
    """The first inputs for which the output of this model differs; None if there are none."""
    for name, inputs, output, limit in expected:
        try:
            apart = difference(output, outputs(model, inputs))
        except TraceError as error:
            if name == GIVEN:
                raise
            return Difference(name, f"cannot be computed ({first_line(error.__cause__ or error)})")
        if not apart <= limit:
            return Difference(name, f"differs by {apart:.1g} of the largest")
    return None


def _limit(output: list[Tensor]) -> float:
    return EQUAL.get(output[0].dtype, 1e-2)


def _noise(model: nn.Module, inputs: Any, output: list[Tensor]) -> float:
    """How far rounding may move the output for unusual inputs; 0 in double precision, whose limit has room for it."""
    if output[0].dtype == torch.float64:
        return 0.0
    moved = _changed(inputs, True, lambda tensor, _: tensor * (1 + 16 * torch.finfo(tensor.dtype).eps))
    return difference(output, outputs(model, moved))


def _changed(inputs: Any, real: bool, change: Any, generator: Generator | None = None) -> Any:
    return mapped(inputs, lambda tensor: change(tensor, generator) if _is_real(tensor) == real else tensor)


def _is_finite(output: list[Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in output)


# Variations of real numbers, and of words, positions, lengths and masks: of these only the values passed are valid


def _is_real(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and bool(tensor.isfinite().all())


def _random(tensor: Tensor, generator: Generator) -> Tensor:
    size = tensor.abs().square().mean().sqrt()
    noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype).to(tensor.device)
    return noise * torch.where(size > 0, size, 1)


def _shuffled(tensor: Tensor, generator: Generator) -> Tensor:
    return tensor.flatten()[torch.randperm(tensor.numel(), generator=generator)].reshape(tensor.shape)


def _drawn(tensor: Tensor, generator: Generator) -> Tensor:
    return tensor.flatten()[torch.randint(tensor.numel(), tensor.shape, generator=generator)]


# Name, whether real numbers are changed or the others, and how. Factors are powers of two, which do not round.
VARIATIONS = (
    ("random inputs", True, _random),
    ("the negated example inputs", True, lambda tensor, _: -tensor),
    ("16 times the example inputs", True, lambda tensor, _: 16 * tensor),
    ("1/16 of the example inputs", True, lambda tensor, _: tensor / 16),
    ("the shuffled example inputs", False, _shuffled),
    ("values drawn from the example inputs", False, _drawn),
)

__all__ = ["Difference", "Expected", "expected_outputs", "first_difference"]
