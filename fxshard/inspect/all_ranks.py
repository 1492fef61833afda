"""Run a graph on real values for all ranks at once, in one process.

[Note: lockstep]
All ranks run the same graph, so one interpreter can walk it for all of them: at each node it computes the value of
every rank, and a collective is a function of the values that the ranks have there. That takes no process group, so a
live one is left alone. Reductions add in the order of the ranks: the network may add in another one, but to compare two
graphs it needs only be the same.

The ranks are those that share the largest unit. A launch over fewer (experts) is one among ranks next to each other. Of
all other axes (replicas, tensor and expert parallelism) there is one place: what another collective brings are the
values that the rank itself has, repeated or cut to the size that comes.

Torch's `LocalTensorMode` does not serve (2.11, 2.13, 2.15): it looks up the process group of each launch by its name.
Here groups are simulated and have none; beside a live one it takes that one's ranks for all.
"""

from __future__ import annotations

import math
import operator
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves, tree_map_only

from fxshard import torch_private
from fxshard.errors import UnsupportedGraph
from fxshard.inspect.fake_model import FakeModel
from fxshard.ir import collectives, ops, regions, signature
from fxshard.ir.plan import ShardPlan
from fxshard.runtime import mesh_axes
from fxshard.runtime.flat_shard import Home, home_of
from fxshard.runtime.frame import Frame
from fxshard.runtime.unit import Unit
from fxshard.sharding.sharded_module import units_under


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A frame and the inputs that Dynamo captured it with: fake tensors of the fake model."""

    frame: Frame
    inputs: tuple[Any, ...]


def originals_of(model: nn.Module, arguments: Any, fake_model: FakeModel) -> dict[int, Any]:
    """Identity of each module and tensor of the fake model -> what it is a copy of."""
    modules = [*model.modules(), *(m for unit in units_under(model) for m in unit.modules)]
    tensors = [*tree_leaves(arguments), *model.parameters(), *model.buffers()]
    tensors += [leaf for module in modules for leaf in tree_leaves(list(module.__dict__.values()))]
    found: dict[int, Any] = {}
    for original in [*modules, *(leaf for leaf in tensors if isinstance(leaf, Tensor))]:
        try:
            found[id(fake_model.replica.of(original))] = original
        except KeyError:  # a sharded parameter: the fake model has the whole one
            continue
    return found


class InputValues:
    """The inputs of the graphs of one frame, on all ranks."""

    def __init__(self, captured: Captured, originals: dict[int, Any], given: set[int], num_ranks: int) -> None:
        self._captured, self._originals, self._given, self._num_ranks = captured, originals, given, num_ranks
        self._known: dict[int, PerRank] = {}

    def of(self, graph: fx.Graph, saved: Mapping[str, PerRank]) -> dict[str, PerRank]:
        """By name of the placeholder, copies; `saved` is what forward left for backward."""
        placeholders = graph.find_nodes(op="placeholder")
        return {n.name: copied(saved[n.name]) if n.name in saved else self._input(n) for n in placeholders}

    def _input(self, placeholder: fx.Node) -> PerRank:
        index = torch_private.input_index(placeholder)
        if index is None:
            return _synthetic(placeholder, self._num_ranks)
        if index not in self._known:
            self._known[index] = self._captured_input(index, placeholder)
        return tuple(copied(self._known[index]))

    def _captured_input(self, index: int, placeholder: fx.Node) -> PerRank:
        value = self._captured.inputs[index]
        home = home_of(value) if isinstance(value, Tensor) else None
        if home is not None:
            return tuple(self._flat(home, rank) for rank in range(self._num_ranks))
        original = self._originals.get(id(value), value)
        if not isinstance(original, Tensor) or torch_private.is_fake(original):
            return _synthetic(placeholder, self._num_ranks)
        original = original.detach()
        if id(self._originals.get(id(value))) in self._given and original.is_floating_point():
            # Factors below one: what is within bounds stays within them.
            return tuple(original * (1 - rank / (2 * self._num_ranks)) for rank in range(self._num_ranks))
        return (original,) * self._num_ranks

    def _flat(self, home: Home, rank: int) -> Tensor:
        shard = home.unit.shards[home.shard]
        if home.unit.plan.encoded:
            raise UnsupportedGraph(
                f"unit {home.unit.label!r} has tensor subclasses with fsdp_pre_all_gather, whose hooks run for one "
                "rank only. Compare a model with plain parameters."
            )
        parameters = []
        for member in shard.members:
            module, name = member.owners[0]
            parameters.append(self._originals[id(module)]._parameters[name].detach())
        dims = [member.settings.dim for member in shard.members]
        flat = torch.zeros(shard.plan.numel, dtype=shard.plan.dtype, device=parameters[0].device)
        return _fill(flat, shard.plan, list(zip(parameters, dims, strict=True)), rank % home.unit.world_size, home.unit)


def _fill(flat: Tensor, plan: ShardPlan, parameters: Sequence[tuple[Tensor, int]], rank: int, unit: Unit) -> Tensor:
    """Write a rank's rows of each parameter, which comes with the dimension along which it is cut, into its slot."""
    own, num_ranks = mesh_axes.shard_rank(unit.mesh), unit.world_size
    for slot, (parameter, dim) in zip(plan.slots, parameters, strict=True):
        if isinstance(parameter, DTensor):
            local = parameter.to_local()
            rows = (local.movedim(dim, 0) if dim else local).reshape(-1).roll(rank - own)
        else:
            parameter = parameter.movedim(dim, 0) if dim else parameter
            rows = (parameter if slot.replicated else parameter[slice(*slot.rows_of(rank, num_ranks))]).reshape(-1)
        flat[slot.offset : slot.offset + rows.numel()] = rows
    return flat


def _synthetic(placeholder: fx.Node, num_ranks: int) -> PerRank:
    """Values that look like what the graph was traced with: random numbers, zeros for integers."""
    like = placeholder.meta.get("val")
    if isinstance(like, torch.SymInt):
        return (int(like),) * num_ranks
    if not isinstance(like, Tensor):
        return (like,) * num_ranks
    return tuple(_random(like, zlib.crc32(placeholder.name.encode()) + rank) for rank in range(num_ranks))


def _random(like: Tensor, seed: int) -> Tensor:
    shape = tuple(int(size) for size in like.shape)
    if not (like.is_floating_point() or like.is_complex()):
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape, generator=generator, dtype=torch.complex64 if like.is_complex() else torch.float32)
    made = torch.empty_strided(shape, [int(step) for step in like.stride()], dtype=like.dtype, device=like.device)
    return made.copy_(drawn)


def constant(owner: fx.GraphModule, name: str) -> Any:
    """What a `get_attr` node reads from a captured module; a fake tensor may know its value, or gets a random one."""
    value: Any = owner
    for part in name.split("."):
        value = getattr(value, part)
    if isinstance(value, Tensor) and torch_private.is_fake(value):
        known = getattr(value, "constant", None)
        return known if known is not None else _random(value, zlib.crc32(name.encode()))
    return value


PerRank = tuple[Any, ...]
"""A value of each rank, rank 0 first."""


@dataclass(frozen=True, kw_only=True)
class AllRanksRun:
    """What a graph computed: each node's value right after it ran, where the run was to keep them, and the results."""

    values: dict[str, PerRank] = field(repr=False)
    results: list[PerRank] = field(repr=False)


def run(graph: fx.Graph, inputs: Mapping[str, PerRank], attributes: Mapping[str, Any], *, keep: bool) -> AllRanksRun:
    """Run `graph`, which may write into `inputs`, for all ranks; `keep` copies every value ([Note: lockstep])."""
    values: dict[fx.Node, PerRank] = {}
    kept: dict[str, PerRank] = {}
    num_ranks = len(next(iter(inputs.values()), (None,)))
    with torch.no_grad():
        for node in graph.nodes:
            if node.op == "placeholder":
                values[node] = inputs[node.name]
            elif node.op == "get_attr":
                values[node] = (attributes[node.target],) * num_ranks
            elif node.op != "output":
                values[node] = _call(node, values, num_ranks)
                if keep:
                    kept[node.name] = copied(values[node])
    results = [values[r] if isinstance(r, fx.Node) else (r,) * num_ranks for r in signature.results_of(graph)]
    return AllRanksRun(values=kept, results=results)


def copied(value: Any) -> Any:
    """The value with copies of all tensors in it."""
    return tree_map_only(Tensor, Tensor.clone, value)


def _call(node: fx.Node, values: Mapping[fx.Node, PerRank], num_ranks: int) -> PerRank:
    def given(rank: int) -> tuple[Any, Any]:
        return map_arg((node.args, node.kwargs), lambda n: values[n][rank])

    ranks = [given(rank) for rank in range(num_ranks)]
    if (code := regions.code_of(node)) is not None:
        return _call_region(code, [args[2:] for args, _ in ranks])
    if (size := _ranks_together(node, num_ranks)) is not None:
        return _in_subgroups([args for args, _ in ranks], _COLLECTIVES[node.target], size)
    if node.target is ops.KEEP_ROWS:
        return tuple(ops.rows_kept(args[0], args[2], rank % args[2]) for rank, (args, _) in enumerate(ranks))
    if node.target is ops.COPY_OUT:
        return tuple(args[0].as_strided(*args[1:4]).clone(memory_format=torch.contiguous_format) for args, _ in ranks)
    if node.target is ops.COPY_TO_DEVICE:
        return tuple(args[0].to(args[1], copy=True) for args, _ in ranks)
    if node.target is ops.COPY_TO_HOST:
        return tuple(args[0].to("cpu", copy=True) for args, _ in ranks)
    if collectives.is_launch(node):
        return tuple(_from_itself(node, args[0]) for args, _ in ranks)
    if node.target in collectives.WAITS:
        return tuple(args[0] for args, _ in ranks)
    if node.op == "call_method":
        return tuple(operator.methodcaller(str(node.target), *args[1:], **kwargs)(args[0]) for args, kwargs in ranks)
    function: Any = node.target
    return tuple(function(*args, **kwargs) for args, kwargs in ranks)


def _in_subgroups(ranks: Sequence[tuple[Any, ...]], collective: Callable[..., PerRank], size: int) -> PerRank:
    blocks = [collective(ranks[first : first + size]) for first in range(0, len(ranks), size)]
    return tuple(value for block in blocks for value in block)


def _call_region(code: fx.GraphModule, ranks: Sequence[Sequence[Any]]) -> PerRank:
    places = [place.name for place in code.graph.find_nodes(op="placeholder")]
    reads = {node.target for node in code.graph.find_nodes(op="get_attr")}
    given = dict(zip(places, zip(*ranks, strict=True), strict=True))
    results = run(code.graph, given, {name: constant(code, name) for name in reads}, keep=False).results
    return tuple(zip(*results, strict=True))


def _ranks_together(node: fx.Node, num_ranks: int) -> int | None:
    """Return how many of the ranks that run here a launch is over, `None` if it is over others."""
    if node.op != "call_function" or node.target not in _COLLECTIVES:
        return None
    size = collectives.world_size_of(node)
    moves_or_averages = collectives.arguments_of(node).get("reduce_op", "sum") in ("sum", "avg")
    return size if moves_or_averages and size and not num_ranks % size else None


def _from_itself(launch: fx.Node, sent: Any) -> Any:
    """What a rank gets if it alone sends: what it sends, repeated or cut to the size that comes."""
    value = launch.meta.get("val")
    if value is None:
        raise UnsupportedGraph(
            f"%{launch.name} is {launch.target}, of which no size is known: bisect_numerics cannot say what it brings. "
            "Bisect the part of the model that does not launch it."
        )
    if isinstance(value, list | tuple):
        return [_repeated(each, like) for each, like in zip(sent, value, strict=True)]
    return _repeated(sent, value)


def _repeated(sent: Tensor, like: Tensor) -> Tensor:
    shape = [int(size) for size in like.shape]
    if not sent.numel():
        return sent.new_zeros(shape)
    numel = math.prod(shape)
    return sent.flatten().repeat(-(-numel // sent.numel()))[:numel].view(shape)


def _gather_all(ranks: Sequence[tuple[Any, ...]]) -> PerRank:
    shards = list(zip(*(args[0] for args in ranks), strict=True))
    return tuple([torch.cat(shard) for shard in shards] for _ in ranks)


def _reduce(ranks: Sequence[tuple[Any, ...]]) -> PerRank:
    total = ranks[0][0].clone()
    for args in ranks[1:]:
        total += args[0]
    if ranks[0][1] == "avg":
        total /= len(ranks)
    return tuple(part.clone() for part in total.chunk(len(ranks)))


def _reduce_all(ranks: Sequence[tuple[Any, ...]]) -> PerRank:
    tensors = range(len(ranks[0][0]))
    reduced = [_reduce([(args[0][i], *args[1:]) for args in ranks]) for i in tensors]
    return tuple(list(parts) for parts in zip(*reduced, strict=True))


def _gather_parts(ranks: Sequence[tuple[Any, ...]]) -> PerRank:
    def parts(flat: Tensor, dtype: torch.dtype, starts: list[int], numels: list[int]) -> list[Tensor]:
        cast = flat.to(dtype)
        return [cast[start : start + numel] for start, numel in zip(starts, numels, strict=True)]

    return _gather_all([(parts(*args[:4]),) for args in ranks])


_COLLECTIVES: dict[Any, Callable[[Sequence[tuple[Any, ...]]], PerRank]] = {
    collectives.ALL_GATHER: lambda ranks: tuple(torch.cat([args[0] for args in ranks]) for _ in ranks),
    collectives.ALL_GATHER_COALESCED: _gather_all,
    collectives.REDUCE_SCATTER: _reduce,
    collectives.REDUCE_SCATTER_COALESCED: _reduce_all,
    ops.PREFETCHED_ALL_GATHER: _gather_parts,
    ops.ALL_GATHER_ON_STREAM: lambda ranks: _gather_all([([t.to(args[1]) for t in args[0]],) for args in ranks]),
    ops.REDUCE_SCATTER_ON_STREAM: lambda ranks: _reduce_all(
        [([t.to(args[1]) for t in args[0]], args[2]) for args in ranks]
    ),
}
