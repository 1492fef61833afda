"""Which gradients of earlier microbatches FSDP2 reduces by themselves, and in which order sums are therefore taken.

[Note: the order of FSDP2]
FSDP2 hooks the inputs of a unit's calls: once backward has passed a call, it reduces whatever gradients the unit has.
If a unit is called several times, autograd may not have added up the gradients of all calls by then, and only what
earlier microbatches left is there. It is reduced *separately*, before the last microbatch's gradient:

    one call         mean over ranks of (earlier + last)
    several calls    mean over ranks of earlier  +  mean over ranks of last

The two differ in the last bits. So where the interpreter is to equal FSDP2, we reduce in two parts as well; compiled
code is spared the second reduction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor, fx, nn

from fxshard.ir.collectives import SlotIndex
from fxshard.ir.plan import FramePlan, ParameterKey
from fxshard.runtime.flat_shard import Home


def reduced_separately(
    gm: fx.GraphModule, reads: Mapping[fx.Node, ParameterKey], flats: Mapping[int, Home], plan: FramePlan
) -> dict[str, frozenset[SlotIndex]]:
    """Find the parameters of which FSDP2 reduces separately what earlier microbatches left; see the note above.

    Backward runs through forward's nodes from last to first. It reaches the inputs of a call before a parameter's
    gradient is whole if that parameter was read before the call began. `reads` maps markers to parameters, `flats`
    input indices to units. Returns unit key -> parameters, for units that have any.
    """
    calls = _Calls({key: flats[position].unit.modules for position, (key, _) in plan.shard_inputs.items()})
    first: dict[ParameterKey, int] = {}
    for position, node in enumerate(_nodes(gm)):
        calls.see(position, node)
        if node in reads and _has_gradient(node):
            first.setdefault(reads[node], position)
    hooked = {call.unit: call.begun for call in calls.hooked()}  # the last one of each unit
    found: dict[str, set[SlotIndex]] = {}
    for (unit, shard, slot), read in first.items():
        if read < hooked.get(unit, -1):
            found.setdefault(unit, set()).add((shard, slot))
    return {unit: frozenset(slots) for unit, slots in found.items()}


@dataclass
class _Call:
    """One call of one of a unit's modules."""

    unit: str  # key
    begun: int  # position of its first node
    begins: bool  # FSDP2 hooks its inputs: of a unit's modules the first one of each round
    has_gradient: bool = False  # one of its inputs gets a gradient
    made: set[int] = field(default_factory=set)  # ids of the fake tensors that its nodes made

    def see(self, node: fx.Node) -> None:
        given = (value for value in node.all_input_nodes if id(_value(value)) not in self.made)
        self.has_gradient |= any(map(_has_gradient, given))
        self.made.add(id(_value(node)))


class _Calls:
    """The calls of units' modules in a graph, by the keys under which Dynamo notes them at each node."""

    def __init__(self, modules: Mapping[str, tuple[nn.Module, ...]]) -> None:
        self._units = {str(id(module)): key for key, found in modules.items() for module in found}
        self._modules = {key: frozenset(str(id(module)) for module in found) for key, found in modules.items()}
        self._missing: dict[str, frozenset[str]] = {}
        self._calls: dict[str, _Call] = {}

    def see(self, position: int, node: fx.Node) -> None:
        if node.op == "placeholder":  # noted where it was first read, but made outside
            return
        for key in node.meta.get("nn_module_stack") or {}:
            module = key.partition("@")[0]
            if module in self._units:
                if key not in self._calls:
                    self._calls[key] = self._begin(position, module)
                self._calls[key].see(node)

    def _begin(self, position: int, module: str) -> _Call:
        unit = self._units[module]
        missing = self._missing.get(unit, frozenset())
        self._missing[unit] = (missing or self._modules[unit]) - {module}
        return _Call(unit, position, begins=not missing)

    def hooked(self) -> list[_Call]:
        """Return those after which FSDP2 reduces as soon as backward has passed them, in the order of forward."""
        return [call for call in self._calls.values() if call.begins and call.has_gradient]


def _nodes(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """Yield the nodes of a graph in program order, those of its subgraphs where they are run."""
    for node in gm.graph.nodes:
        for argument in node.all_input_nodes:
            body = getattr(gm, str(argument.target), None) if argument.op == "get_attr" else None
            if isinstance(body, fx.GraphModule):
                yield from _nodes(body)
        yield node


def _value(node: fx.Node) -> object:
    """Return what Dynamo computed at a node; a subgraph's input is the same object as what is passed in."""
    return node.meta.get("example_value")


def _has_gradient(node: fx.Node) -> bool:
    """Return whether a node's value is part of the autograd graph, and no parameter: those are no inputs of a call."""
    value = _value(node)
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and value.requires_grad
