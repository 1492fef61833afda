"""One compiled graph at run time: check its units before it runs, prepare its backward after."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fxshard import torch_private
from fxshard.errors import ConfigError, InvariantError, UnsupportedGraph
from fxshard.hardware import BUILTIN, HardwareSpec
from fxshard.ir.collectives import SlotIndex
from fxshard.ir.history import PassHistory
from fxshard.ir.plan import FramePlan, ParameterKey, qualified, subgroup_key
from fxshard.ir.variant import PLAIN, Variant
from fxshard.runtime import eager
from fxshard.runtime.accumulation import Units
from fxshard.runtime.flat_shard import home_of
from fxshard.runtime.unit import Unit


@dataclass(eq=False)
class Frame:
    """A captured graph and what its passes learned, shared by all calls; each finds its units by its flats."""

    plan: FramePlan  # the units, by the key of their markers
    # index of a result -> the parameter that it is; see `eager.note_returned`
    returned: dict[int, ParameterKey] = field(default_factory=dict)
    # unit key -> the parameters that the graph's backward gives a gradient; filled on the joint graph
    trained: dict[str, list[SlotIndex]] = field(default_factory=dict)
    # unit key -> those of which what earlier microbatches left is reduced by itself: see `compile/fsdp2_order.py`
    reduced_separately: Mapping[str, frozenset[SlotIndex]] = field(default_factory=dict)
    history: PassHistory = field(default_factory=PassHistory)  # a backward may be compiled as late as its first run
    hardware: HardwareSpec = BUILTIN["h100"]  # what the cost model counts on
    unsharded_budget_bytes: int | None = None  # what unsharded parameters may take, `None` for no limit
    resident_budget_bytes: int = 0  # what parameters may take that stay gathered while gradients accumulate
    max_late: int = 1  # how many units may have reductions in flight when a backward graph begins
    replays: bool = False  # whether its graphs are CUDA graphs, which run no Python
    compiled: Callable[..., Any] | None = None  # the lowered forward (or inference) graph
    begin: Callable[[Units], None] = lambda units: None  # tells it of the units of a call that is about to run
    ran: Variant = PLAIN  # the variant of it that ran last
    running: _BeforeBackward | None = None  # the call whose backward is about to run
    calls: dict[tuple[str, ...], None] = field(default_factory=dict)  # FQNs of the units of each call so far

    def __call__(self, *args: Any) -> Any:
        """Run the graph on the inputs that Dynamo hands over."""
        if self.compiled is None:
            raise InvariantError("a captured graph was called before it was lowered.")
        units = self._units(args)
        self.calls[tuple(unit.fqn for unit in units.values())] = None
        if not eager.inside_call():  # a call checks its units itself, before Dynamo looks at them
            for unit in units.values():
                unit.check()
            self._require_current(args, units)
        for unit in units.values():
            unit.require_same_trainable()
        records = torch.is_grad_enabled()  # a graph in which nothing trains may have an input that needs a gradient
        nodes = [arg.grad_fn if isinstance(arg, Tensor) else None for arg in args] if records else []
        self.begin(units)
        results = self.compiled(*args)
        if records:
            mutated = [a for a, node in zip(args, nodes, strict=True) if _has_graph(a) and a.grad_fn is not node]
            given = results if isinstance(results, list | tuple) else [results]
            self._prepare_backward([r for r in (*given, *mutated) if _has_graph(r)], units)
        for i, (key, shard, slot) in self.returned.items():
            eager.note_returned(results[i], units[key].plan.shards[shard].slots[slot].fqn)
        if not eager.inside_call():
            eager.forward_ended(units.values())
        for unit in units.values():
            if unit.model.after_first_call is not None:
                unit.model.after_first_call()
        return results

    def _units(self, args: Sequence[Any]) -> Units:
        units: dict[str, Unit] = {}
        for position, (key, _) in self.plan.shard_inputs.items():
            if key not in units:
                home = home_of(args[position])
                if home is None:
                    raise InvariantError(f"input {position} of a captured graph is not a flat of unit {key!r}.")
                units[key] = home.unit
        return units

    def names_of(self, units: Units) -> dict[str, str]:
        """What launches call the units of a call that are not those which the graph was captured with, by its names."""
        names = {key or "root": qualified(key, unit.fqn) or "root" for key, unit in units.items()}
        shared = {name: (units[key], self.plan.units[name]) for name, key in self.plan.in_subgroups.items()}
        names |= {
            name: subgroup_key(qualified(name, unit.fqn), plan.world_size) for name, (unit, plan) in shared.items()
        }
        return {key: name for key, name in names.items() if name != key}

    def _require_current(self, args: Sequence[Any], units: Units) -> None:
        for position, (key, shard) in self.plan.shard_inputs.items():
            if units[key].shards[shard].flat is not args[position]:
                raise ConfigError(
                    f"the layout of unit {units[key].label!r} changed (dtype, device or requires_grad of a "
                    "parameter) while a compiled function that contains the module's call was running. Call the "
                    "function again, or call the module once after such a change."
                )

    def _prepare_backward(self, results: list[Tensor], units: Units) -> None:
        """Hook the outputs that have a graph: before the backward runs, check it may, and announce its gradients."""
        if not results:
            return
        hook = _BeforeBackward(self, units)
        for result in results:
            result.register_hook(hook.run)
        for node in {node for result in results for node in torch_private.compiled_nodes(result)}:
            # A view of an input leads to an earlier call's node, which that call has taken already.
            if node.metadata.setdefault("fxshard", hook) is hook:
                node.register_prehook(hook.begin)


class _BeforeBackward:
    """One call of a frame, seen from its backward."""

    def __init__(self, frame: Frame, units: Units) -> None:
        self.frame, self.trained, self.units, self.forward = frame, frame.trained, units, frame.ran
        # What backward reads from the flats again: kept copies are of the time of the forward by themselves, unless
        # checkpointing drops them and calls the graph again.
        again, plans = torch_private.is_computed_again(), frame.plan.units
        self.versions = {key: unit.version() for key, unit in units.items() if again or plans[key].regathers}
        self.ran: int | None = None

    def run(self, _: Tensor) -> None:
        _announce_eagerly(self)

    def begin(self, _: Any) -> None:
        """Right before the graph's backward; blocks of equal shape share a frame, but run one after the other."""
        _begin_eagerly(self)

    def make_current(self) -> None:
        """Let the frame's backward find this call."""
        self.frame.running = self

    def announce(self) -> None:
        if self.ran == torch_private.backward_id():
            return
        self.ran = torch_private.backward_id()
        _refuse_repeated_backward()
        for key, version in self.versions.items():
            self.units[key].require_version(version)
        # In the order of the plan, which is the same on all ranks: what these hooks queue may launch reductions.
        for model in dict.fromkeys(self.units[key].model for key in self.trained):
            model.backward_runs()
        for key, slots in self.trained.items():
            if not self.units[key].settings.sync:
                continue
            for i, shard in enumerate(self.units[key].shards):
                if trained := [slot for j, slot in slots if j == i]:
                    shard.sink.expect(trained)


# A whole train step may be compiled: then Dynamo is on during backward, and must leave our hooks alone.
_announce_eagerly = torch.compiler.disable(_BeforeBackward.announce)
_begin_eagerly = torch.compiler.disable(_BeforeBackward.make_current)


def _has_graph(value: Any) -> bool:
    return isinstance(value, Tensor) and value.grad_fn is not None


def _refuse_repeated_backward() -> None:
    if torch.is_grad_enabled():
        raise UnsupportedGraph(
            "backward(create_graph=True) (double backward) through a graph compiled by fxshard is not supported. "
            "Compute the outer gradient in a function of its own, or leave this model uncompiled."
        )
    if torch_private.backward_keeps_graph():
        raise UnsupportedGraph(
            "backward(retain_graph=True) through a graph compiled by fxshard is not supported: its backward frees what "
            "forward saved. Add the losses and call backward once, or run forward again."
        )
