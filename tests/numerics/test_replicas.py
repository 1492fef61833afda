"""Meshes of two axes: replicas of a sharded model train as FSDP2's do, and are saved, loaded and taken over alike."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard

import fxshard
from fxshard.errors import RankMismatchError, UnsupportedGraph
from tests.numerics import mesh_bodies
from tests.numerics.harness import (
    EAGER,
    FSDP2,
    Prepare,
    Run,
    Scenario,
    Tools,
    blocks_of,
    check,
    check_against_unsharded,
    check_bitwise,
    check_close,
    check_inductor,
    compare,
    compile_module,
    fxshard_system,
    loss_on_ones,
    only_compile,
    only_shard,
    sharded,
    train,
    with_a_break,
)
from tests.numerics.loops import freeze_then_thaw, scaled
from tests.numerics.mesh_bodies import Body
from tests.numerics.microbatches import NUM_MICROBATCHES, in_turn, several
from tests.numerics.models import MLP, TinyUnits, Uneven, mlp_with_a_frozen_block, rows
from tests.numerics.scenarios import REGRESSION
from tests.pairwise import slow
from tests.ranks import two_ranks
from tests.state import processes
from tests.state.states import adamw, assert_same, net, take_steps, trained

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
FP16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float16)
ON_HOST = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}


def mesh_of(replicas: int) -> DeviceMesh:
    """Return the mesh of all ranks in so many replicas."""
    shape = (replicas, dist.get_world_size() // replicas)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def on(mesh: DeviceMesh, **changes: Any) -> Scenario:
    kwargs = {"mesh": mesh, **changes.pop("shard_kwargs", {})}
    return replace(REGRESSION, shard_kwargs=kwargs, **changes)


def one_line(mesh: DeviceMesh) -> None:
    """The ranks start from different parameters, and all take rank 0's."""
    scenario, dtype = on(mesh, prepare=only_compile, model=different_on_each_rank), torch.float64
    ours = train(scenario, fxshard_system(dtype=dtype, mesh=mesh))
    compare(ours, train(replace(scenario, model=MLP), replace(FSDP2, dtype=dtype)), rtol=0.0, atol=0.0)


def different_on_each_rank() -> nn.Module:
    model = MLP()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(dist.get_rank())
    return model


def sharded_on(mesh: DeviceMesh, seed: int = 0) -> Any:
    """Shard a model with uneven rows, a scalar, a frozen and a tied parameter."""
    return sharded(net(seed), mesh=mesh)


def parameters_lie_as_those_of_fsdp2(mesh: DeviceMesh) -> None:
    model: Any = fxshard.fully_shard(nn.Linear(5, 3), mesh=mesh)
    model(torch.ones(2, 5)).sum().backward()
    weight = model.weight
    assert (weight.device_mesh, weight.placements) == (mesh, (Replicate(), Shard(0)))
    assert weight.grad.placements == (Replicate(), Shard(0))


def full_state_travels(mesh: DeviceMesh) -> None:
    """From one rank to all replicas, and back to any rank."""
    plain, reference = trained()
    model = sharded_on(mesh, seed=1)
    optim = adamw(model)
    mine = dist.get_rank() == dist.get_world_size() - 1
    fxshard.load_full_state_dict(model, plain.state_dict() if mine else {})
    fxshard.load_full_optim_state_dict(model, optim, reference.state_dict() if mine else {})
    for recipient in (0, dist.get_world_size() - 1, None):
        wanted = recipient in (None, dist.get_rank())
        weights = fxshard.full_state_dict(model, recipient_rank=recipient)
        state = fxshard.full_optim_state_dict(model, optim, recipient_rank=recipient)
        assert_same(weights, plain.state_dict() if wanted else {})
        assert_same(state, reference.state_dict() if wanted else {})


def parameters_of(model: nn.Module) -> dict[str, Any]:
    """Return whole parameters; buffers are each rank's own."""
    names = dict(model.named_parameters())
    found = fxshard.full_state_dict(model, recipient_rank=None)
    return {name: value for name, value in found.items() if name in names}


def checkpoints_load_on_other_meshes(mesh: DeviceMesh) -> None:
    """Ours and torch's: from replicas to shards of all ranks, and back."""
    model = sharded_on(mesh)
    optim = adamw(model)
    take_steps(model, optim)
    others = [partial(sharded_on, other) for other in (init_device_mesh("cpu", (dist.get_world_size(),)), mesh)]
    mesh_bodies.checkpoints_load(model, optim, others, adamw, weights_of=parameters_of)


def rows_are_written_once(mesh: DeviceMesh) -> None:
    """The files of a checkpoint are as large as one replica, and little more."""
    folder, model = mesh_bodies.shared_folder(), nn.Linear(256, 256)
    fxshard.save_checkpoint(f"{folder}/once", fxshard.fully_shard(model, mesh=mesh))
    dist.barrier()
    sizes = [os.path.getsize(os.path.join(at, name)) for at, _, names in os.walk(f"{folder}/once") for name in names]
    assert 256 * 256 * 4 <= sum(sizes) < 1.5 * 256 * 256 * 4


def adopted_and_released(mesh: DeviceMesh) -> None:
    """An FSDP2 model on two axes trains on under fxshard, and goes back."""
    mesh_bodies.adopted_and_released(on, mesh)
    torch.manual_seed(0)
    weight = torch.nn.Linear(5, 3).weight
    torch.manual_seed(0)
    whole: Any = fxshard.release(fxshard.fully_shard(nn.Linear(5, 3), mesh=mesh), whole=True)
    assert torch.equal(whole.weight, weight)
    given_back: Any = fxshard.release(fxshard.fully_shard(nn.Linear(5, 3), mesh=mesh))
    assert FSDPModule in type(given_back).__mro__
    assert given_back.weight.placements == (Replicate(), Shard(0))


def setting(name: str, value: Any, every: bool = True) -> Prepare:
    """Shard, and set something on each sharded module, or on the root alone."""

    def prepare(model: nn.Module, tools: Tools) -> nn.Module:
        sharded = only_shard(model, tools)
        for module in [*blocks_of(model), model] if every else [model]:
            if hasattr(module, name):
                getattr(module, name)(value)
        return tools.compile(sharded)

    return prepare


def gradients_are_divided_as_said(mesh: DeviceMesh) -> None:
    """In float64 by any factor, in float32 by one for which FSDP2 takes no operator that only NCCL has.

    Where one rank holds all rows FSDP2 divides by a factor twice.
    """
    shards = float(mesh.size(1))
    factors = [("set_gradient_divide_factor", 6.0)] if shards > 1 else []
    for name, value in (*factors, ("set_force_sum_reduction_for_comms", True)):
        ours, theirs = (replace(of, dtype=torch.float64) for of in (fxshard_system(), FSDP2))
        scenario = on(mesh, prepare=setting(name, value))
        compare(train(scenario, ours), train(scenario, theirs), rtol=0.0, atol=0.0)
    check_bitwise(on(mesh, prepare=setting("set_force_sum_reduction_for_comms", True)))
    if shards > 1:
        check_bitwise(on(mesh, prepare=setting("set_gradient_divide_factor", shards, every=False)))


def averaged_once(run: Run, step: int) -> Tensor:
    """Three microbatches, each reduced, of which the last one averages over replicas."""
    return in_turn(run, step, *({"requires_all_reduce": i == NUM_MICROBATCHES - 1} for i in range(NUM_MICROBATCHES)))


def averaged_by_no_last_backward(run: Run, step: int) -> Tensor:
    """The same, and another backward may always follow."""
    if hasattr(run.model, "set_is_last_backward"):
        run.model.set_is_last_backward(False)  # type: ignore[operator]
    return averaged_once(run, step)


def averaged_after_some_were_added_up(run: Run, step: int) -> Tensor:
    """Four microbatches: whole gradients are added up, reduced, reduced again, and then averaged."""
    return toggled(run, step, ((False, False), (True, False), (True, False), (True, True)))


def toggled(run: Run, step: int, order: Sequence[tuple[bool, bool]]) -> Tensor:
    """Run microbatches, and say of each whether gradients are reduced, and then averaged over replicas."""
    return in_turn(
        run, step, *({"requires_gradient_sync": sync, "requires_all_reduce": averages} for sync, averages in order)
    )


def what_no_backward_touched_is_averaged(mesh: DeviceMesh) -> None:
    """Of two units the last backward reads one; steps before that are refused, and what waits can be dropped."""
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in (*model, model):
        fxshard.fully_shard(layer, mesh=mesh)
    x = torch.full((2, 4), 1.0 + dist.get_rank())
    optim = torch.optim.SGD(model.parameters())
    model(x).sum().backward()
    expected = [p.grad.to_local().clone() for p in model.parameters()]
    model.zero_grad()
    model.set_requires_all_reduce(False)
    model(x).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(UnsupportedGraph, match="an optimizer steps while reduced gradients of unit '0' wait"):
        optim.step()
    model.set_requires_all_reduce(True)
    (model[1](x).sum() * 0).backward()
    found = [p.grad.to_local() for p in model.parameters()]
    assert all(map(torch.equal, found, expected))
    optim.step()
    model.set_requires_all_reduce(False)
    model(x).sum().backward()
    model.reset_iter_state()
    optim.step()


def halve(reduced: Tensor) -> None:
    reduced.mul_(0.5)


def hooks_see_what_was_reduced(mesh: DeviceMesh) -> None:
    check_bitwise(on(mesh, prepare=setting("set_all_reduce_hook", halve)))


ODD_ORDER = (
    ((True, False), (False, False), (True, True)),
    ((True, False), (True, True)),
    ((False, False), (True, False), (False, False), (True, True)),
    ((True, True), (True, False), (False, False), (True, True)),
)
"""Of each step its microbatches: whether gradients are reduced, and then averaged over replicas."""


def toggled_in_odd_orders(run: Run, step: int) -> Tensor:
    return toggled(run, step, ODD_ORDER[step])


def a_load_between_microbatches_is_refused(mesh: DeviceMesh) -> None:
    """Sums of gradients of other parameters are never averaged; dropped, they leave a model that trains."""
    model: Any = sharded(MLP(), mesh=mesh)
    run, optim = compile_module(model, options=EAGER), torch.optim.SGD(model.parameters())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for setter in ("set_requires_gradient_sync", "set_requires_all_reduce"):
        getattr(model, setter)(False)
        loss_on_ones(run).backward()
        model.load_state_dict(state)
        getattr(model, setter)(True)
        with pytest.raises(UnsupportedGraph, match=r"were changed while .*gradients of earlier microbatches waited"):
            loss_on_ones(run).backward()
        model.reset_iter_state()
        model.zero_grad()
        loss_on_ones(run).backward()
        optim.step()
        model.zero_grad()


class SkipsOnOneRank(nn.Module):
    """Calls its second layer on all ranks but the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers[0](x)
        return y if self.skips else self.layers[1](y)


def a_unit_that_one_rank_does_not_use_is_an_error(mesh: DeviceMesh) -> None:
    """All ranks get it, also those of the other replica."""
    model = SkipsOnOneRank()
    for module in (*model.layers, model):
        fxshard.fully_shard(module, mesh=mesh)
    model.skips = dist.get_rank() == dist.get_world_size() - 1
    with pytest.raises(RankMismatchError, match="launch different collectives"):
        compile_module(model, options=EAGER)(torch.ones(2, 4)).sum().backward()


EXACT: dict[str, Body] = {
    **mesh_bodies.bodies_of(on, "compiled", "not compiled", "clipped gradients"),
    "accumulation": lambda mesh: check(on(mesh, backward=several)),
    "a graph break": lambda mesh: check(on(mesh, prepare=with_a_break)),
    "bfloat16": lambda mesh: check_bitwise(on(mesh, shard_kwargs={"mp_policy": BF16})),
    "offloaded": lambda mesh: check(on(mesh, shard_kwargs=ON_HOST)),
    "offloaded, averaged once": lambda mesh: check(on(mesh, shard_kwargs=ON_HOST, backward=averaged_once)),
    "offloaded, by no last backward": lambda mesh: check_against_unsharded(
        on(mesh, shard_kwargs=ON_HOST, backward=averaged_by_no_last_backward)
    ),
    "offloaded, toggled": lambda mesh: check_close(on(mesh, shard_kwargs=ON_HOST, backward=toggled_in_odd_orders)),
    "float16 sums": lambda mesh: check_bitwise(on(mesh, shard_kwargs={"mp_policy": FP16})),
    "one line": one_line,
    "placements": parameters_lie_as_those_of_fsdp2,
    "full state": full_state_travels,
    "checkpoints": checkpoints_load_on_other_meshes,
    "rows written once": rows_are_written_once,
    "adopt and release": adopted_and_released,
    "divided otherwise": gradients_are_divided_as_said,
    "averaged once": lambda mesh: check(on(mesh, model=partial(MLP, 1), backward=averaged_once)),
    "averaged once, not compiled": lambda mesh: check(on(mesh, backward=averaged_once, prepare=only_shard)),
    "averaged after sums": lambda mesh: check(on(mesh, backward=averaged_after_some_were_added_up)),
    "averaged without a backward": what_no_backward_touched_is_averaged,
    "a hook": hooks_see_what_was_reduced,
    "uneven": lambda mesh: check(on(mesh, model=Uneven, batch=rows(15, 15))),
    "fewer rows than ranks": lambda mesh: check(on(mesh, model=TinyUnits)),
    "a frozen unit": lambda mesh: check(on(mesh, model=mlp_with_a_frozen_block)),
    "thawed": lambda mesh: check(on(mesh, before_step=freeze_then_thaw)),
    "toggled in odd orders": lambda mesh: check_close(on(mesh, backward=toggled_in_odd_orders)),
    "toggled, not compiled": lambda mesh: check_close(on(mesh, backward=toggled_in_odd_orders, prepare=only_shard)),
    "an overflow on one rank": lambda mesh: check(scaled(on(mesh))),
    "a load between microbatches": a_load_between_microbatches_is_refused,
    "unused on one rank": a_unit_that_one_rank_does_not_use_is_an_error,
}
COMPILED: dict[str, Body] = {
    **mesh_bodies.bodies_of(on, "inductor"),
    "inductor, accumulation": lambda mesh: check_inductor(on(mesh, backward=several)),
    "inductor, averaged once": lambda mesh: check_inductor(on(mesh, backward=averaged_once)),
}


def run(replicas: int, *names: str) -> None:
    """Run some bodies on a mesh of all ranks in so many replicas."""
    mesh_bodies.run(EXACT | COMPILED, names, mesh_of(replicas))


DEFAULT = ("compiled", "placements", "averaged without a backward", "offloaded")
ON_FOUR_RANKS = ("compiled", "averaged once", "full state")


@two_ranks
@pytest.mark.parametrize("name", [name if name in DEFAULT else slow(name) for name in EXACT | COMPILED])
def test_replicas_of_one_rank_each(name: str) -> None:
    run(2, name)


@pytest.mark.multi_rank
def test_two_replicas_of_two_ranks_each() -> None:
    processes.run(4, run, 2, *ON_FOUR_RANKS)


@pytest.mark.multi_rank
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EXACT | COMPILED if name not in ON_FOUR_RANKS])
def test_two_replicas_of_two_ranks_each_also(name: str) -> None:
    processes.run(4, run, 2, name)
