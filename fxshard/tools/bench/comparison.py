"""What both schedules compare systems by: turns that rotate, ratios within a round, losses that must agree."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def rotated(systems: Sequence[T], by: int) -> list[T]:
    """The order of a round, so that nobody is always first."""
    start = by % len(systems) if systems else 0
    return [*systems[start:], *systems[:start]]


def median_ratio(pairs: Iterable[tuple[float, float]]) -> float | None:
    """Median of the ratios of times that were taken in the same round, so that drift cancels; `None` without any."""
    ratios = [mine / theirs for mine, theirs in pairs]
    return statistics.median(ratios) if ratios else None


def loss_difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference; infinite if one is not a number."""
    differences = [abs(a - b) / max(abs(b), 1e-12) for a, b in zip(losses, expected, strict=True)]
    return max((math.inf if math.isnan(difference) else difference for difference in differences), default=0.0)


def options_in_json(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a system as JSON has them; what it has no word for is written as Python does."""
    return {
        name: value if isinstance(value, bool | int | float | str | None) else repr(value)
        for name, value in options.items()
    }
