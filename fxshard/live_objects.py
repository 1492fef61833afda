"""Objects that are alive, also those that `gc.freeze()` has hidden.

Training programs freeze what they have set up, to spare the garbage collector. `gc.get_objects()` and
`gc.get_referrers()` then overlook it, and an optimizer that is not found would train nothing. Frozen objects cannot be
listed, and freezing again would keep for ever whatever is alive by now, so they stay thawed.
"""

from __future__ import annotations

import gc
import logging
from typing import Any, Final, TypeVar, cast

T = TypeVar("T")

_BY_PYTHON: Final = 10_000  # it freezes hundreds itself (375 in 3.12); who freezes torch, hundreds of thousands

_log = logging.getLogger(__name__)


def instances_of(kind: type[T], *, thaw: bool = True) -> list[T]:
    """Return all objects of class `kind` or a subclass, whatever `__class__` pretends; with `thaw` also frozen ones."""
    if thaw:
        _thaw()
    classes = _derived_from(kind)  # to look a class up is faster than `issubclass`
    return [found for found in gc.get_objects() if type(found) in classes]


def referrers_of(*targets: object) -> list[Any]:
    """Return all containers that hold one of `targets`."""
    _thaw()
    return [found for found in gc.get_referrers(*targets) if found is not targets]


def _derived_from(kind: type) -> set[type]:
    found, bases = {kind}, cast("list[type]", type.__subclasses__(kind))
    return found.union(*map(_derived_from, bases))


def _thaw() -> None:
    if gc.get_freeze_count() > _BY_PYTHON:
        _log.warning("fxshard: undoes gc.freeze() to find optimizers and modules: freeze after the first step.")
        gc.unfreeze()
