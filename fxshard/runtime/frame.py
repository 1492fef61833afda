"""One compiled graph at run time: check its units before it runs, prepare its backward after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fxshard.errors import ConfigError, InvariantError, UnsupportedGraph
from fxshard.ir import fake
from fxshard.ir.collectives import SlotIndex
from fxshard.ir.plan import FramePlan
from fxshard.runtime import eager
from fxshard.runtime.unit import Unit, home_of


@dataclass(frozen=True, kw_only=True)
class CompiledGraph:
    """One graph after all passes.

    Attributes:
        kind: "forward", "backward" or "inference".
        text: the graph, one node per line (`ir/text.py`).
        collectives: "all_gather" and "reduce_scatter" -> how many the graph launches; absent where none.
    """

    kind: str
    text: str
    collectives: dict[str, int]


@dataclass(eq=False)
class Frame:
    """A captured graph and what its passes learned, shared by all calls of it.

    Attributes:
        plan: the units, by the key of their markers. Blocks of equal shape share a frame, so the units themselves are
            found at each call, from the flats that come in.
        trained: unit key -> the parameters that the graph's backward gives a gradient; filled on the joint graph.
        graphs: what was compiled, in order; a backward may be compiled as late as its first run.
        compiled: the lowered forward (or inference) graph.
    """

    plan: FramePlan
    trained: dict[str, list[SlotIndex]] = field(default_factory=dict)
    graphs: list[CompiledGraph] = field(default_factory=list)
    compiled: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        """Run the graph on the inputs that Dynamo hands over."""
        if self.compiled is None:
            raise InvariantError("a captured graph was called before it was lowered.")
        units = self._units(args)
        if not eager.inside_call():  # a call checks its units itself, before Dynamo looks at them
            for unit in units.values():
                unit.check()
            self._require_current(args, units)
        results = self.compiled(*args)
        if torch.is_grad_enabled() and self.trained:
            self._prepare_backward(results, units)
        for unit in units.values():
            if unit.after_first_call is not None:
                callback, unit.after_first_call = unit.after_first_call, None
                callback()
        return results

    def _units(self, args: Sequence[Any]) -> dict[str, Unit]:
        units: dict[str, Unit] = {}
        for position, (key, _) in self.plan.shard_inputs.items():
            if key not in units:
                home = home_of(args[position])
                if home is None:
                    raise InvariantError(f"input {position} of a captured graph is not a flat of unit {key!r}.")
                units[key] = home.unit
        return units

    def _require_current(self, args: Sequence[Any], units: dict[str, Unit]) -> None:
        for position, (key, shard) in self.plan.shard_inputs.items():
            if units[key].shards[shard].flat is not args[position]:
                raise ConfigError(
                    f"the layout of unit {units[key].fqn or 'root'!r} changed (dtype, device or requires_grad of a "
                    "parameter) while a compiled function that contains the module's call was running. Call the "
                    "function again, or call the module once after such a change."
                )

    def _prepare_backward(self, results: Any, units: dict[str, Unit]) -> None:
        """Hook the outputs: before the graph's backward runs, check it may, and announce its gradients."""
        outputs = [r for r in (results if isinstance(results, list | tuple) else [results]) if _has_graph(r)]
        if not outputs:
            return
        seen = {key: unit.epoch() for key, unit in units.items() if self.plan.units[key].reshard_after_forward}
        trained = self.trained
        ran: list[int | None] = [None]

        def before_backward(_: Tensor) -> None:
            backward = fake.backward_id()
            if ran[0] == backward:
                return
            ran[0] = backward
            _refuse_repeated_backward()
            for key, epoch in seen.items():
                units[key].require_epoch(epoch)
            for key, slots in trained.items():
                for i, j in slots:
                    units[key].shards[i].sink.expect((j,))

        for output in outputs:
            output.register_hook(before_backward)


def _has_graph(value: Any) -> bool:
    return isinstance(value, Tensor) and value.grad_fn is not None


def _refuse_repeated_backward() -> None:
    if torch.is_grad_enabled():
        raise UnsupportedGraph(
            "backward(create_graph=True) (double backward) through a graph compiled by fxshard is not supported. "
            "Compute the outer gradient in a function of its own, or leave this model uncompiled."
        )
    if fake.backward_keeps_graph():
        raise UnsupportedGraph(
            "backward(retain_graph=True) through a graph compiled by fxshard is not supported: its backward frees what "
            "forward saved. Add the losses and call backward once, or run forward again."
        )
