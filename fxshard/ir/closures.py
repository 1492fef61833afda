"""Whether two functions do the same, as far as what they are made of says."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping, Sequence, Set
from typing import Any

Facts = tuple[Any, ...]


def facts_of(value: Any, within: tuple[int, ...] = ()) -> Facts:
    """Return what is equal, in this process, for functions that do the same: their code and the values they read.

    Functions that were made by one `def` or `lambda` are alike if their defaults and what they close over are;
    `functools.partial` and containers if their parts are; methods if they are of one object. Other values count as
    themselves. `within` are the values around this one, by id: one may contain itself.
    """
    if id(value) in within:
        return ("around", len(within) - within.index(id(value)))
    inside = (*within, id(value))
    if isinstance(value, types.FunctionType):
        cells = [_content(cell) for cell in value.__closure__ or ()]
        parts = (value.__defaults__, value.__kwdefaults__, cells, vars(value))
        return ("function", id(value.__code__), id(value.__globals__), facts_of(parts, inside))
    if isinstance(value, functools.partial):
        return ("partial", facts_of((value.func, value.args, value.keywords), inside))
    if isinstance(value, types.MethodType):
        return ("method", id(value.__self__), facts_of(value.__func__, inside))
    if isinstance(value, Mapping):
        return (type(value), *((facts_of(key, inside), facts_of(item, inside)) for key, item in value.items()))
    if isinstance(value, Set):
        return (type(value), frozenset(facts_of(each, inside) for each in value))
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return (type(value), *(facts_of(each, inside) for each in value))
    if isinstance(value, str | bytes | int | float | complex | None):
        return (type(value), value)
    return ("object", id(value))


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was assigned
        return None
