"""A training step for all ranks in this process: the graphs after all passes, run on real values.

Torch's LocalTensor holds one value per rank and computes its collectives. The same step without sharding is the
reference.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode

from fxshard.hardware import HardwareSpec
from fxshard.ir import collectives, ops, regions
from fxshard.ir.plan import ShardPlan
from fxshard.passes._base import GraphKind, GraphPass
from fxshard.passes.insert_collectives import InsertCollectives
from tests.fake_ranks import fake_ranks
from tests.graphs import SPLIT, Traced, run_pass


@dataclass(frozen=True, kw_only=True)
class Step:
    outputs: list[Tensor]  # of each rank
    # parameter FQN -> its gradient, averaged over the ranks, whole; absent where there is none
    grads: dict[str, Tensor]


def batch_of(traced: Traced, rank: int) -> tuple[Tensor, Tensor]:
    """A rank's input and the gradient of its output."""
    generator = torch.Generator().manual_seed(rank)
    unit = next(iter(traced.plan.units.values()))
    dtype = unit.param_dtype or next(traced.module.parameters()).dtype
    x, dy = (torch.randn(2, traced.width, generator=generator, dtype=dtype) for _ in range(2))
    return x, dy


def step(traced: Traced, *passes: GraphPass, hardware: HardwareSpec | None = None) -> Step:
    """Run the graphs with collectives on all ranks, each with its rows of the parameters and its own batch.

    Args:
        traced: the model.
        *passes: to run on the graphs before.
        hardware: what they count on.
    """
    key = (traced, passes, hardware and hardware.to_json())
    if key not in _STEPS:
        _STEPS[key] = _run(traced, passes, hardware)
    return _STEPS[key]


_STEPS: dict[Hashable, Step] = {}
"""Of what was run already: tests compare many graphs with the same few."""


def _run(traced: Traced, passes: Sequence[GraphPass], hardware: HardwareSpec | None) -> Step:
    forward, backward = (_rewritten(traced, kind, passes, hardware) for kind in SPLIT)
    world_size, num_ranks = traced.world_size, traced.world_size * traced.replicas
    batches = [batch_of(traced, rank) for rank in range(num_ranks)]
    arguments = list(_forward_inputs(traced, forward, [x for x, _ in batches]))
    tangent = _on_all_ranks([dy for _, dy in batches])
    with fake_ranks(world_size, traced.replicas), LocalTensorMode(num_ranks), torch.no_grad():
        results = forward(*arguments)
        saved = dict(zip(_result_names(forward), results, strict=True))
        inputs = [node.name for node in backward.graph.find_nodes(op="placeholder")]
        grads = backward(*(saved.get(name, tangent) for name in inputs))
    return Step(outputs=_per_rank(results[0]), grads=_full_grads(traced, grads))


def _rewritten(
    traced: Traced, kind: GraphKind, passes: Sequence[GraphPass], hardware: HardwareSpec | None
) -> fx.GraphModule:
    gm, ctx = traced.at(kind, after=InsertCollectives)
    ctx = dataclasses.replace(ctx, hardware=hardware or ctx.hardware)
    for step_ in passes:
        run_pass(step_, gm, ctx)
    for node in gm.graph.nodes:
        node.target = _OF_ALL_RANKS.get(node.target, node.target)
        if node.target in collectives.GATHERS and collectives.world_size_of(node) != traced.world_size:
            node.target = _gather_in_subgroup
    gm.recompile()
    return gm


def _copy_out(gathered: Tensor, size: Sequence[int], stride: Sequence[int], start: int, stream: str) -> Tensor:
    return gathered.as_strided(size, stride, start).clone(memory_format=torch.contiguous_format)


def _prefetched(
    flat: Tensor, dtype: torch.dtype, starts: list[int], numels: list[int], size: int, group: str, *_: object
) -> list[Tensor]:
    parts = [flat.to(dtype)[start : start + numel] for start, numel in zip(starts, numels, strict=True)]
    return collectives.launch_gather(parts, size, group)


def _gather(inputs: list[Tensor], dtype: torch.dtype, size: int, group: str, stream: str) -> list[Tensor]:
    return collectives.launch_gather([tensor.to(dtype) for tensor in inputs], size, group)


def _reduce(inputs: list[Tensor], dtype: torch.dtype, op: str, size: int, group: str, stream: str) -> list[Tensor]:
    return collectives.reduce_scatter([tensor.to(dtype) for tensor in inputs], op, size, group)


def _gather_in_subgroup(flat: Any, size: int, group: str) -> Tensor:
    rows = flat._local_tensors
    first = {rank: rank // size * size for rank in rows}
    return LocalTensor({rank: torch.cat([rows[first[rank] + i] for i in range(size)]) for rank in rows})


def _copied(source: Tensor, *_: object) -> Tensor:
    return source.clone()


def _keep_rows(parameters: list[Any], key: str, size: int, group: str) -> Tensor:
    ranks = parameters[0]._local_tensors
    return LocalTensor({r: ops.rows_kept([p._local_tensors[r] for p in parameters], size, r % size) for r in ranks})


_OF_ALL_RANKS = {
    ops.KEEP_ROWS: _keep_rows,
    regions.INVOKE: regions.interpret,
    ops.COPY_OUT: _copy_out,
    ops.PREFETCHED_ALL_GATHER: _prefetched,
    ops.ALL_GATHER_ON_STREAM: _gather,
    ops.REDUCE_SCATTER_ON_STREAM: _reduce,
    ops.COPY_TO_DEVICE: _copied,
    ops.COPY_TO_HOST: _copied,
}
"""What the ops of the codegen stage do, in ops that a LocalTensor knows; it has nothing in flight to wait for."""


def reference_step(traced: Traced) -> Step:
    """The same step without sharding: the original module on every rank's batch, gradients averaged."""
    module = copy.deepcopy(traced.module)
    outputs, num_ranks = [], traced.world_size * traced.replicas
    for rank in range(num_ranks):
        x, dy = batch_of(traced, rank)
        outputs.append(module(x))
        outputs[-1].backward(dy / num_ranks)
    grads = {fqn: p.grad for fqn, p in module.named_parameters() if p.grad is not None}
    return Step(outputs=[y.detach() for y in outputs], grads=grads)


def assert_same_step(actual: Step, expected: Step, *, rtol: float | None = None, atol: float | None = None) -> None:
    """Compare outputs and gradients, absent ones included; without tolerances, torch's for the dtype."""
    assert actual.grads.keys() == expected.grads.keys()
    torch.testing.assert_close(actual.outputs, expected.outputs, rtol=rtol, atol=atol)
    torch.testing.assert_close(actual.grads, expected.grads, rtol=rtol, atol=atol)


def _result_names(gm: fx.GraphModule) -> list[str]:
    (results,) = gm.graph.output_node().args
    assert isinstance(results, Sequence)
    return [result.name for result in results if isinstance(result, fx.Node)]


def _on_all_ranks(values: Sequence[Tensor]) -> Tensor:
    return LocalTensor({rank: value.detach() for rank, value in enumerate(values)})


def _per_rank(value: Any) -> list[Tensor]:
    return [value._local_tensors[rank] for rank in sorted(value._local_tensors)]


def _forward_inputs(traced: Traced, forward: fx.GraphModule, xs: Sequence[Tensor]) -> Iterator[Tensor]:
    parameters = {name: getattr(value, "rows", value.detach()) for name, value in traced.module.named_parameters()}
    for i, _ in enumerate(forward.graph.find_nodes(op="placeholder")):
        if i in traced.plan.shard_inputs:
            unit, shard = traced.plan.shard_inputs[i]
            plan = traced.plan.units[unit].shards[shard]
            if plan.encodes is not None:  # bytes that are numbers in fp8, other ones on each rank
                parts = [torch.arange(plan.numel) * 7 % 101 + rank for rank in range(traced.world_size)]
                yield _on_all_ranks([part.to(torch.uint8) for part in parts] * traced.replicas)
                continue
            shards = [shard_of(plan, parameters, r, traced.world_size) for r in range(traced.world_size)]
            yield _on_all_ranks(shards * traced.replicas)
        elif i in traced.plan.metadata:
            yield _on_all_ranks([torch.tensor(2.0 + i)] * len(xs))
        else:
            yield _on_all_ranks(xs)


def shard_of(plan: ShardPlan, parameters: Mapping[str, Tensor], rank: int, world_size: int) -> Tensor:
    """A rank's flat tensor, written down from the note on layout in `ir/plan.py`."""
    flat = torch.zeros(plan.numel, dtype=plan.dtype)
    for slot in plan.slots:
        whole = parameters[slot.fqn].detach()
        rows = whole if slot.replicated else whole[slice(*slot.rows_of(rank, world_size))]
        flat[slot.offset : slot.offset + rows.numel()] = rows.reshape(-1)
    return flat


def _full_grads(traced: Traced, grads: Sequence[Any]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for i, (unit, shard) in traced.plan.shard_inputs.items():
        if grads[i] is None:
            continue
        ranks, size = _per_rank(grads[i]), traced.world_size
        assert all(torch.equal(grad, ranks[rank % size]) for rank, grad in enumerate(ranks)), "replicas differ"
        ranks = ranks[:size]
        for slot in traced.plan.units[unit].shards[shard].slots:
            pieces = [flat[slot.offset : slot.offset + slot.numel] for flat in ranks]
            whole = pieces[0] if slot.replicated else torch.cat(pieces)[: slot.full_numel]
            found[slot.fqn] = whole.view(slot.shape)
    return found
