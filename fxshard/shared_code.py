"""Compiled code in the form in which AOTAutograd caches it; see [Note: caches] in `lower.py`.

Private torch modules used here: `torch._inductor` (config, output_code).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

from torch._inductor import config as inductor_config
from torch._inductor.output_code import CompiledFxGraph

from fxshard.errors import InvariantError
from fxshard.ir import order
from fxshard.ir.collectives import SlotIndex
from fxshard.passes._base import GraphKind
from fxshard.runtime.layouts import Order


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What fxshard must know of a compiled graph to run it; kept with its code.

    Attributes:
        kind: of the graph.
        launches: its collectives, in order.
        trained: as in `Frame`.
        reads: unit key -> the parameters that the graph gathers.
        inputs: of the graph: name and type.
        outputs: of the graph: types.
        orders: how the inputs must lie in memory, of a backward.
    """

    kind: GraphKind
    launches: tuple[order.Launch, ...]
    trained: dict[str, list[SlotIndex]]
    reads: dict[str, list[SlotIndex]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    orders: dict[int, Order]

    @property
    def signature(self) -> list[str]:
        """What the graph takes and gives, without the names of symbolic sizes.

        Tracing again makes new names, and may give two to one size. A size stands in brackets; u8 before them is none.
        """
        return [re.sub(r"\b(?:s|u|zuf|zf)\d+\b(?![\[:])", "n", text) for text in (*self.inputs, "->", *self.outputs)]


class Stages(Protocol):
    """What a cache must be able to tell the compilation that finds something in it."""

    def restore(self, facts: Facts) -> None:
        """Take over what the passes found out when the code was compiled."""

    def prepared(self, code: Callable[..., Any], facts: Facts) -> Callable[..., Any]:
        """What is to run in place of the code."""


class SharedCode(CompiledFxGraph):
    """Inductor's code of one graph in the form in which AOTAutograd caches it; see [Note: caches]."""

    facts: Facts

    @classmethod
    def of(cls, compiled: CompiledFxGraph, facts: Facts, stages: Stages) -> SharedCode:
        """The same object, ready to run."""
        compiled.__class__ = cls  # a copy would not do: the original's `__del__` ends the code that they share
        code = cast(SharedCode, compiled)
        code.facts = facts
        code._prepare(stages)
        return code

    def post_compile(self, *args: Any, **kwargs: Any) -> None:
        """Called when the code was found in the cache, in the process that will run it."""
        super().post_compile(*args, **kwargs)
        stages: Stages | None = getattr(inductor_config.custom_partitioner_fn, "stages", None)  # of who looks for it
        if stages is None:
            raise InvariantError("compiled code of fxshard was found by somebody else.")
        stages.restore(self.facts)
        self._prepare(stages)

    def _prepare(self, stages: Stages) -> None:
        if self.current_callable is None:
            raise InvariantError("Inductor handed over a graph without code.")
        self.current_callable = stages.prepared(self.current_callable, self.facts)
