"""Values by setting, and claims on them: what the tests of claims share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from proxsps.experiments.base import Claim, Frames
from proxsps.sweep.spec import RunSpec


def only(
    value: Any, elsewhere: Callable[[RunSpec], Any] | float, seed: int | None = None, **where: Any
) -> Callable[[RunSpec], Any]:
    """A value at one setting, and another one elsewhere."""

    def choose(spec: RunSpec) -> Any:
        here = all(getattr(spec, name) == wanted for name, wanted in where.items()) and seed in (None, spec.seed)
        return value if here else elsewhere(spec) if callable(elsewhere) else elsewhere

    return choose


def judged(claim: Callable[[Frames], Claim], frames: Frames, holds: bool, *measured: str) -> Claim:
    decided = claim(frames)
    assert isinstance(decided.holds, bool)
    assert decided.holds is holds, decided.measured
    for text in measured:
        assert text in decided.measured
    return decided
