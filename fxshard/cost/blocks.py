"""What the launches of a block take beside its compute, before anything is traced."""

from __future__ import annotations

from collections.abc import Iterable

from fxshard.cost.comm import transfer_seconds
from fxshard.hardware import HardwareSpec
from fxshard.ir.plan import ShardPlan, UnitPlan


def transfers_per_compute(units: Iterable[UnitPlan], tokens: int, hardware: HardwareSpec) -> float:
    """Estimate the time of a block's launches in a training step over that of its compute, for a call of `tokens`.

    A matrix costs 2 FLOPs for each element and token in forward, 4 in backward, 2 if it is frozen; nothing else costs
    anything, so where attention or pointwise ops count the ratio is too high. Where only some tokens reach a matrix, as
    in experts, it is too low.

    Source: Kaplan et al., "Scaling Laws for Neural Language Models" (2020), section 2.1.
    """
    each = list(units)
    compute = sum(_compute(unit, shard, tokens, hardware) for unit in each for _, shard in unit.gathered)
    return sum(_transfers(unit, hardware) for unit in each) / compute if compute else float("inf")


def _compute(unit: UnitPlan, shard: ShardPlan, tokens: int, hardware: HardwareSpec) -> float:
    forward = [2.0 * slot.full_numel * tokens for slot in shard.slots if len(slot.shape) > 1]
    peak = hardware.peak(unit.unsharded_dtype(shard))
    return (3 if shard.trainable else 2) * sum(flops / (peak * hardware.gemm_share(flops)) for flops in forward)


def _transfers(unit: UnitPlan, hardware: HardwareSpec) -> float:
    ranks, replicas, link = unit.world_size, unit.replicas, hardware.link(unit.world_size)
    if unit.num_ranks == 1:
        return 0.0
    reduced = sum(
        shard.numel * (unit.reduce_dtype or unit.unsharded_dtype(shard)).itemsize
        for shard in unit.shards
        if shard.trainable
    )
    gather = transfer_seconds("all_gather", unit.unsharded_bytes, ranks, link)
    launches = [gather] * (1 + unit.regathers) if ranks > 1 else []
    if reduced and ranks > 1:
        launches.append(transfer_seconds("reduce_scatter", reduced * ranks, ranks, link))
    if reduced and replicas > 1:
        launches.append(transfer_seconds("all_reduce", reduced, replicas, hardware.replica_link(replicas, ranks)))
    return float(sum(launches)) + hardware.launch_overhead * len(launches)
