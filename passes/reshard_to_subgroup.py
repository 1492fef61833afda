"""Let a smaller group of ranks share the parameters between forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy

from fxshard import torch_private
from fxshard.ir import graph_edit, ops, tags
from fxshard.ir.ops import MarkerKey
from fxshard.ir.plan import subgroup_key
from fxshard.ir.tags import ShardKey
from fxshard.passes._base import GraphPass, PassContext, Property


@dataclass(frozen=True, kw_only=True)
class ReshardToSubgroup(GraphPass):
    """Have backward gather from the ranks of a subgroup, each of which keeps more of a unit than its shard.

    Before   %w = unshard(%shard, 'blocks.0', 0)  mm(%x, %w)
    After    %u = unshard(%shard, 'blocks.0', 0)  %kept = keep_rows([%u], 'blocks.0/2', 2)  # MUST_SAVE
             %w = unshard(%kept, 'blocks.0/2', 0)  mm(%x, %w)

    That is the joint graph; in the forward graph `unshard(%kept, 'blocks.0/2', 0)` is read from the shard again.

    [Note: subgroups]
    With `reshard_after_forward=2` ranks 0 and 1 have all parameters between them after forward, and so have 2 and 3,
    and so on: backward's gathers stay within a node. What such a *subgroup* shares of a unit is to the other passes a
    unit of its own, 'blocks.0/2', whose flat is an activation that forward saves (`FramePlan.with_subgroups`). In the
    joint graph everybody reads that unit, so the partitioner can compute no read again in backward but from what was
    kept. In the forward graph, where the parameters are there anyway, the reads become those of the unit itself.

    Numerics: unchanged; the rows are kept in the dtype in which they were gathered.
    Memory: between forward and backward each rank holds 1 / subgroup size of the unsharded unit, beside its shard.
    No-op: a graph without units that have a subgroup; one without backward.
    Limits: a unit that a graph calls several times is kept once, as its first call has gathered it.
    Source: FSDP2 (`_fsdp_init.py`, `_get_post_forward_mesh_info`); ZeRO++ (arXiv:2306.10209), secondary partition.
    """

    requires = frozenset({Property.MARKED})

    def apply(self, gm: GraphModule, ctx: PassContext) -> bool:
        read: dict[ShardKey, list[fx.Node]] = {}
        for marker in filter(ops.is_unshard, gm.graph.nodes):
            key, is_kept = ops.key_of(marker), any(user.target is ops.KEEP_ROWS for user in marker.users)
            if ctx.kind == "forward" and key.unit in ctx.plan.in_subgroups:
                read.setdefault(ShardKey(key.unit, key.shard), []).append(marker)
            elif ctx.kind == "joint" and ctx.plan.units[key.unit].subgroup and not is_kept:
                read.setdefault(ShardKey(key.unit, key.shard), []).append(marker)
        for shard, markers in read.items():
            if ctx.kind == "joint":
                kept = _keep(shard, markers[0], ctx)
                _read(markers, kept, subgroup_key(shard.unit, ctx.plan.units[shard.unit].subgroup_size))
            else:
                (kept,) = markers[0].all_input_nodes
                (flat,) = kept.all_input_nodes[0].all_input_nodes
                _read(markers, flat, ctx.plan.owner_of(shard.unit))
                tags.tag(kept, shard=None)  # it is a flat in backward
                _erase_unread(kept)
        return bool(read)


def _read(markers: Sequence[fx.Node], flat: fx.Node, unit: str) -> None:
    for marker in markers:
        key, graph = ops.key_of(marker), marker.graph
        with graph.inserting_before(marker):
            made = graph.call_function(ops.UNSHARD, (flat, str(MarkerKey(unit, key.shard, key.call)), *marker.args[2:]))
        made.meta = dict(marker.meta)
        marker.replace_all_uses_with(made)
        graph.erase_node(marker)


def _keep(shard: ShardKey, first: fx.Node, ctx: PassContext) -> fx.Node:
    """Unshard all parameters of a shard where the marker `first` stands, and keep rows of them."""
    unit, graph, mode = ctx.plan.units[shard.unit], first.graph, torch_private.fake_mode_of(first.graph)
    flat, plan, name = first.args[0], unit.shards[shard.number], subgroup_key(shard.unit, unit.subgroup_size)
    assert isinstance(flat, fx.Node), "markers are bound"
    assert mode is not None, "a graph with parameters has tensors"
    parameters, dtype = [], unit.unsharded_dtype(plan)
    with graph.inserting_before(first), mode:
        for i, slot in enumerate(plan.slots):
            kind = dtype, *first.args[5:]  # and the device, if the flat is on another one
            made = graph.call_function(ops.UNSHARD, (flat, str(ops.key_of(first)), i, list(slot.shape), *kind))
            made.meta["val"] = first.meta["val"].new_empty(slot.shape, dtype=dtype)
            tags.tag(made, param=ctx.plan.parameter_name(*shard, i))
            parameters.append(made)
        ranks = unit.subgroup_size, unit.subgroup
        kept = graph.call_function(ops.KEEP_ROWS, (parameters, str(ShardKey(name, shard.number)), *ranks))
        kept.meta["val"] = ops.fake_kept_rows([node.meta["val"] for node in parameters], name, *ranks)
    kept.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    tags.tag(kept, shard=ShardKey(name, shard.number))
    graph_edit.rename(kept, f"kept_{unit.node_name}", {node.name for node in graph.nodes})
    return kept


def _erase_unread(kept: fx.Node) -> None:
    """Erase what is kept for a backward that gathers nothing of it, and what was unsharded for that alone."""
    parameters = kept.all_input_nodes
    for node in (kept, *reversed(parameters)):
        if not node.users:
            node.graph.erase_node(node)
