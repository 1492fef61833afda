"""Objects that are alive, also those that `gc.freeze()` has hidden.

Training programs freeze what they have set up, so that the garbage collector does not look through it in every step.
`gc.get_objects()` and `gc.get_referrers()` then overlook it: an optimizer that is not found would train nothing.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any, Final, TypeVar

T = TypeVar("T")

_BY_PYTHON: Final = (
    10_000  # it freezes a few hundred itself (375 in 3.12); whoever freezes torch, hundreds of thousands
)


def instances_of(kind: type[T]) -> list[T]:
    """All objects whose class is `kind` or derived from it, whatever their `__class__` pretends."""
    with _nothing_frozen():
        return [found for found in gc.get_objects() if issubclass(type(found), kind)]


def referrers_of(*targets: object) -> list[Any]:
    """All containers that hold one of `targets`."""
    with _nothing_frozen():
        return [found for found in gc.get_referrers(*targets) if found is not targets]


@contextlib.contextmanager
def _nothing_frozen() -> Iterator[None]:
    """Show everything to `gc`, and freeze it again if the program had: whatever is alive by now."""
    if gc.get_freeze_count() <= _BY_PYTHON:
        yield
        return
    gc.collect()  # what is garbage by now would be frozen with the rest
    gc.unfreeze()
    try:
        yield
    finally:
        gc.freeze()
