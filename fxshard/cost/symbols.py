"""Sizes and times as expressions: numbers where a graph is static, sympy where a shape or the world size is open.

Reading a symbolic shape through its expression adds no guard: nothing here asks a `SymInt` for its value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from fxshard import torch_private
from fxshard.ir.liveness import UNBACKED_HINT

Quantity = Any
"""An int, a float, or a sympy expression."""

WORLD_SIZE = sympy.Symbol("world_size", integer=True, positive=True)


def size_of(size: int | torch.SymInt) -> Quantity:
    """A dimension or number of bytes as an int or an expression in the graph's symbols."""
    if isinstance(size, int):
        return size
    return simplest(size.node.expr)


def simplest(quantity: Quantity) -> Quantity:
    """A plain number where `quantity` has no symbol, else an expanded expression."""
    if isinstance(quantity, int | float):
        return quantity
    if quantity.is_Integer:
        return int(quantity)
    return float(quantity) if quantity.is_number else sympy.expand(quantity)


def product(factors: Iterable[Quantity]) -> Quantity:
    """The product of sizes; an int if all are."""
    result: Quantity = 1
    for factor in factors:
        result = result * factor
    return result


def hints_of(graph: fx.Graph) -> dict[str, int]:
    """Name of a symbol of the graph -> the value that it had when the graph was traced."""
    mode = torch_private.fake_mode_of(graph)
    if mode is None or mode.shape_env is None:
        return {}
    return {symbol.name: int(value) for symbol, value in torch_private.sizes_when_traced(mode.shape_env).items()}


def evaluate(quantity: Quantity, world_size: int, hints: Mapping[str, int]) -> int | float:
    """The value of a quantity; a symbol without a hint (a size that only the data knows) counts as `UNBACKED_HINT`."""
    if isinstance(quantity, int | float):
        return quantity
    values = {**hints, WORLD_SIZE.name: world_size}
    given = {symbol: sympy.Integer(values.get(symbol.name, UNBACKED_HINT)) for symbol in quantity.free_symbols}
    value = quantity.xreplace(given)
    return int(value) if value.is_Integer else float(value)


@dataclass(frozen=True, kw_only=True)
class Point:
    """Where quantities are compared: the world size, and the values of symbols, that a graph was traced with."""

    world_size: int
    hints: Mapping[str, int]
    _known: dict[Quantity, int | float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def value(self, quantity: Quantity) -> int | float:
        """The quantity's value there; each expression is evaluated once."""
        if isinstance(quantity, int | float):
            return quantity
        if quantity not in self._known:
            self._known[quantity] = evaluate(quantity, self.world_size, self.hints)
        return self._known[quantity]


class Sum:
    """Adds many quantities in linear time: equal expressions are counted, numbers added at once."""

    def __init__(self, quantities: Iterable[Quantity] = ()) -> None:
        self._number: int | float = 0
        self._counts: dict[Quantity, int] = {}
        for quantity in quantities:
            self.add(quantity)

    def add(self, quantity: Quantity, count: int = 1) -> None:
        """Add `count` times `quantity`."""
        if isinstance(quantity, int | float):
            self._number += quantity * count
        else:
            self._counts[quantity] = self._counts.get(quantity, 0) + count

    @property
    def total(self) -> Quantity:
        """The sum so far."""
        counts = {quantity: count for quantity, count in self._counts.items() if count}
        if not counts:
            return self._number
        return simplest(sympy.Add(self._number, *(count * quantity for quantity, count in counts.items())))
