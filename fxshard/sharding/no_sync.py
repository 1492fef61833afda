"""No gradient is reduced for as long as a block runs: the engine under `no_sync`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from fxshard.sharding.sharded_module import units_under

NO_SYNC = "_fxshard_no_sync"
"""Key in the `__dict__` of a module inside `no_sync`: whether units that are made now begin without gradient sync."""


@contextlib.contextmanager
def without_sync(module: nn.Module) -> Iterator[None]:
    """Let no backward that runs inside reduce a unit of `module`, also of units that are made inside."""
    before = {id(unit): unit.settings.sync for unit in units_under(module)}
    marked = [each for each in module.modules() if not each.__dict__.get(NO_SYNC)]
    for each in marked:
        each.__dict__[NO_SYNC] = True
    for unit in units_under(module):
        unit.set_sync(False)
    try:
        yield
    finally:
        for each in marked:
            del each.__dict__[NO_SYNC]
        marks = {id(each) for each in marked}
        for unit in units_under(module):
            is_over = any(id(each) in marks for each in unit.modules)
            unit.set_sync(before.get(id(unit), is_over))
