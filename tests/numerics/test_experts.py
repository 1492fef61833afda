"""Mixtures of experts: units of several meshes in one model train as FSDP2 trains them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import get_total_norm

import fxshard
from fxshard import torch_fsdp2
from fxshard.errors import ConfigError, RankMismatchError
from tests.numerics import mesh_bodies
from tests.numerics.experts import (
    NUM_EXPERTS,
    TOP,
    DenseMoE,
    DroplessMoE,
    Experts,
    Meshes,
    Mixtral,
    MoE,
    adamw,
    experts_of,
    meshes_of,
    on,
    on_their_own_mesh,
    parallelize,
)
from tests.numerics.harness import (
    EAGER,
    FSDP2,
    Run,
    Scenario,
    Tools,
    blocks_of,
    check,
    check_against_unsharded,
    check_inductor,
    check_sums_in_few_bits,
    compare,
    compile_module,
    full,
    fxshard_system,
    shard_blocks,
    shard_root,
    train,
    update,
)
from tests.numerics.mesh_bodies import Body
from tests.numerics.microbatches import several
from tests.numerics.models import VOCAB
from tests.numerics.scenarios import BF16
from tests.state import processes
from tests.state.states import assert_same


def columns(parameter: nn.Parameter) -> Shard | None:
    """Cut what experts have along the second dimension, as torchtitan does where the ranks are more than experts."""
    return Shard(1)


def on_two_axes(meshes: Meshes) -> None:
    """Everything but the experts has a replica on each rank of expert parallelism."""
    dense = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    check(on(replace(meshes, dense=dense)))


def clip_each_mesh(run: Run) -> None:
    """As torchtitan: norms of DTensors on different meshes are added up by hand."""
    by_mesh: dict[Any, list[Tensor]] = {}
    for p in run.model.parameters():
        if p.grad is not None:
            by_mesh.setdefault(getattr(p, "device_mesh", None), []).append(p.grad)
    norm = torch.stack([full(get_total_norm(grads, foreach=False)) for grads in by_mesh.values()]).norm()
    for grads in by_mesh.values():
        torch._foreach_mul_([g.to_local() if isinstance(g, DTensor) else g for g in grads], (0.05 / norm).clamp(max=1))
    run.extra.append(norm)
    update(run)


def parameters_lie_as_those_of_fsdp2(meshes: Meshes) -> None:
    def shard(fully_shard: Any, placement: Any) -> nn.Module:
        return sharded(meshes, fully_shard, placement=placement)[0]

    mesh_bodies.lie_as_those_of_fsdp2(partial(shard, placement=None))
    mesh_bodies.lie_as_those_of_fsdp2(partial(shard, placement=columns))


def sharded(
    meshes: Meshes,
    fully_shard: Any = fxshard.fully_shard,
    *,
    seed: int = 0,
    placement: Any = None,
    kind: type[MoE] = DenseMoE,
) -> tuple[Any, dict[str, Tensor]]:
    """Return a sharded model, and what its whole parameters were."""
    torch.manual_seed(seed)
    model: Any = Mixtral(kind)
    whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    parallelize(model, meshes.ep)
    for experts in experts_of(model):
        fully_shard(experts, mesh=meshes.experts, shard_placement_fn=placement)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=meshes.dense)
    return model, whole


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that has made a step on the model; its state is no zeros."""
    optim = adamw(model.parameters())
    torch.manual_seed(dist.get_rank())
    model(torch.randint(VOCAB, (2, 6))).square().mean().backward()
    optim.step()
    optim.zero_grad()
    return optim


def states_of(model: nn.Module, optim: torch.optim.Optimizer, rank: int | None = None) -> tuple[Any, Any]:
    weights = fxshard.full_state_dict(model, recipient_rank=rank)
    return weights, fxshard.full_optim_state_dict(model, optim, recipient_rank=rank, keys="fqn")


def full_state_travels(meshes: Meshes) -> None:
    """All experts are in it, and the moments of each; it loads into a plain model, and from one rank or all."""
    model, whole = sharded(meshes)
    assert_same(dict(fxshard.full_state_dict(model, recipient_rank=None)), whole)
    optim = stepped(model)
    weights, state = states_of(model, optim)
    for name, p in model.named_parameters():
        moments = state["state"][name]
        assert moments["exp_avg"].shape == weights[name].shape == p.shape
        assert torch.equal(moments["exp_avg_sq"], optim.state[p]["exp_avg_sq"].full_tensor())
    plain = Mixtral(DenseMoE)
    plain.load_state_dict(weights)
    for recipient in (0, dist.get_world_size() - 1):
        expected = (weights, state) if dist.get_rank() == recipient else ({}, {})
        for found, wanted in zip(states_of(model, optim, recipient), expected, strict=True):
            assert_same(found, wanted)
    for source in (0, dist.get_world_size() - 1, None):
        mine = source in (None, dist.get_rank())
        other, _ = sharded(meshes, seed=1)
        other_optim = adamw(other.parameters())
        fxshard.load_full_state_dict(other, weights if mine else {})
        fxshard.load_full_optim_state_dict(other, other_optim, state if mine else {})
        for found, wanted in zip(states_of(other, other_optim), (weights, state), strict=True):
            assert_same(found, wanted)


def checkpoints_load_into_other_layouts(meshes: Meshes) -> None:
    """Ours and torch's: into the same meshes, into ones of another shape or order, and into a plain model."""
    model, _ = sharded(meshes)
    layouts = (((2, 2), None), ((4, 1), None), ((1, 4), None), ((2, 2), columns))
    others = [
        lambda seed, shape=shape, placement=placement: sharded(meshes_of(*shape), seed=seed, placement=placement)[0]
        for shape, placement in layouts
    ]
    plain = Mixtral(DenseMoE)
    mesh_bodies.checkpoints_load(model, stepped(model), others, lambda model: adamw(model.parameters()), plain)


def adopted(model: nn.Module, tools: Tools) -> nn.Module:
    """What FSDP2 has sharded is taken over; there and back again."""
    shard_blocks(model, tools)
    if tools.system.ours:
        model = fxshard.adopt(fxshard.release(fxshard.adopt(model)))
    return tools.compile(model)


def listed(model: nn.Module, tools: Tools) -> nn.Module:
    """Each block gathers its experts ahead, and these the next block."""
    shard_blocks(model, tools)
    blocks: list[Any] = list(blocks_of(model))
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        if tools.system.fully_shard is not None:
            block.set_modules_to_forward_prefetch([block.moe.experts])
            block.moe.experts.set_modules_to_forward_prefetch([following] if following else [])
            block.moe.experts.set_modules_to_backward_prefetch([block])
    return tools.compile(model)


def overlapped(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return fxshard.overlap_step(adamw(parameters))


def plain_experts_train_as_those_of_fsdp2(meshes: Meshes) -> None:
    """Experts that are no DTensors: others under one name on each rank of expert parallelism."""
    runs = []
    for system in (fxshard_system(dtype=torch.float64), replace(FSDP2, dtype=torch.float64)):
        runs.append(train(on(meshes, DroplessMoE, local_experts=True), system))
    compare(*runs, rtol=0.0, atol=0.0)
    ups = [torch.empty_like(runs[0].params["blocks.0.moe.experts.up"]) for _ in range(meshes.ep.size())]
    dist.all_gather(ups, runs[0].params["blocks.0.moe.experts.up"], group=meshes.ep.get_group())
    assert not torch.equal(ups[0], ups[-1])


def plain_experts_beside_replicas_are_no_checkpoint(meshes: Meshes) -> None:
    """Their mesh is a slice of that of the rest, which is the same on each of its slices."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "fsdp"))
    for local_experts in (False, True):
        torch.manual_seed(0)
        model: Any = Mixtral(DenseMoE)
        parallelize(model, both["ep"], local_experts=local_experts)
        for experts in experts_of(model):
            fxshard.fully_shard(experts, mesh=both["fsdp"])
        fxshard.fully_shard(model, mesh=both["ep", "fsdp"])
        with pytest.raises(ConfigError, match=r"experts\.up, .*distribute_tensor") if local_experts else nullcontext():
            fxshard.save_checkpoint(mesh_bodies.shared_folder(), model)


def on_the_outer_axis(meshes: Meshes) -> None:
    """Ranks next to each other share experts."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "fsdp"))
    other = replace(meshes, ep=both["ep"], experts=both["fsdp"])
    check(on(other))
    full_state_travels(other)
    checkpoints_load_into_other_layouts(other)


class SkippingExperts(Experts):
    """Reads no parameter where there are no rows."""

    def forward(self, x: Tensor, counts: list[int] | None = None) -> Tensor:
        return super().forward(x, counts) if x.shape[0] else x * 1.0


class FirstExpertsMoE(DroplessMoE):
    """Chooses the first experts for every token: the last ranks of expert parallelism get none."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = SkippingExperts()

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.router(x).softmax(-1)[:, :TOP], torch.arange(TOP).expand(x.shape[0], TOP)


def train_without_rows(meshes: Meshes, compiled: Callable[[Any], Any], check: Callable[[Any], None]) -> None:
    """Train by us, `compiled`, and by FSDP2, and `check` each model after each backward."""
    found = []
    for fully_shard in (fxshard.fully_shard, FSDP2.fully_shard):
        model, _ = sharded(meshes, fully_shard, kind=FirstExpertsMoE)
        call = compiled(model) if fully_shard is fxshard.fully_shard else model
        optim = adamw(model.parameters())
        for step in range(3):
            torch.manual_seed(10 * step + dist.get_rank())
            call(torch.randint(VOCAB, (2, 6))).square().mean().backward()
            check(model)
            optim.step()
            optim.zero_grad()
        found.append({name: p.to_local() for name, p in model.named_parameters()})
    assert_same(found[0], found[1])


def experts_without_rows_are_left_uncompiled(meshes: Meshes) -> None:
    """What is not compiled gathers where FSDP2 does, whatever it reads."""

    def compiled(model: Any) -> Any:
        for experts in experts_of(model):
            experts.forward = torch.compiler.disable(experts.forward)  # type: ignore[method-assign]
        return compile_module(model, options=EAGER)

    def check(model: Any) -> None:
        assert (model.blocks[0].moe.experts.up.grad is None) == (meshes.ep.get_local_rank() > 0)

    train_without_rows(meshes, compiled, check)


def experts_without_rows_on_all_their_ranks_train(meshes: Meshes) -> None:
    """Compiled, their graph has no unit, and is on the others a part of one that has."""
    train_without_rows(meshes, partial(compile_module, options=EAGER), lambda model: None)


class FirstExpertsOnSomeMoE(FirstExpertsMoE):
    """Half of the ranks choose the first experts, so that of two that share some one has no rows for them."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = super().route(x)
        if dist.get_rank() < 2:
            chosen = (chosen + torch.arange(x.shape[0]).unsqueeze(1)) % NUM_EXPERTS
        return weights, chosen


def experts_without_rows_on_one_rank_are_an_error(meshes: Meshes) -> None:
    """Within seconds, where all would wait for half an hour."""
    model, _ = sharded(meshes, kind=FirstExpertsOnSomeMoE)
    call, began = compile_module(model, options=EAGER), time.monotonic()
    with pytest.raises(RankMismatchError) as caught:
        call(torch.randint(VOCAB, (2, 6))).square().mean().backward()
    assert time.monotonic() - began < 120  # much of it compiles
    text = str(caught.value)
    assert re.search(r"(?s)ranks \d, .* wait for each other", text), text
    assert re.search(r"rank \d waits for rank \d in run .*experts", text), text
    assert "let zero rows (x[:0]) go through what has no input" in text


def only_root_not_compiled(model: nn.Module, tools: Tools) -> nn.Module:
    tools.shard(model)
    return model


def without_breaks(meshes: Meshes, check: Callable[[Scenario], object]) -> None:
    """Sizes that the data decides are symbols of one graph."""
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        check(on(meshes, DroplessMoE, compile_kwargs={"fullgraph": True}))


def released_whole(meshes: Meshes) -> None:
    model, whole = sharded(meshes)
    found = dict(fxshard.release(model, whole=True).named_parameters())
    experts = found["blocks.0.moe.experts.up"]
    assert (experts.device_mesh, experts.placements) == (meshes.ep, (Shard(0),))  # type: ignore[attr-defined]
    assert_same({name: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for name, p in found.items()}, whole)


BODIES: dict[str, Body] = {
    "dense": lambda meshes: check(on(meshes, model=partial(Mixtral, DenseMoE, num_blocks=1))),
    "dense, two blocks": lambda meshes: check(on(meshes, DenseMoE)),
    "dense, one shard": lambda meshes: check_against_unsharded(on(meshes, DenseMoE)),
    "dropless": lambda meshes: check(on(meshes, DroplessMoE)),
    **mesh_bodies.bodies_of(partial(on, kind=DroplessMoE), "not compiled", "block by block", "float32"),
    "placements": parameters_lie_as_those_of_fsdp2,
    "accumulation": lambda meshes: check(on(meshes, backward=several)),
    "columns": lambda meshes: check(on(meshes, expert_kwargs={"shard_placement_fn": columns})),
    "replicas of the dense part": on_two_axes,
    "no rows": experts_without_rows_are_left_uncompiled,
    "no rows, compiled": experts_without_rows_on_all_their_ranks_train,
    "no rows on one rank": experts_without_rows_on_one_rank_are_an_error,
    "prefetch lists": lambda meshes: check(on(meshes, prepare=listed)),
    "an overlapped step": lambda meshes: check(on(meshes, optimizer=overlapped)),
    "mixed precision": lambda meshes: check_sums_in_few_bits(
        on(meshes, shard_kwargs={"mp_policy": BF16}, expert_kwargs={"mp_policy": BF16})
    ),
    "plain experts": plain_experts_train_as_those_of_fsdp2,
    "plain experts, no checkpoint": plain_experts_beside_replicas_are_no_checkpoint,
    "the outer axis": on_the_outer_axis,
    "clipped gradients": lambda meshes: check(on(meshes, update=clip_each_mesh)),
    "full state": full_state_travels,
    "checkpoints": checkpoints_load_into_other_layouts,
    "adopt and release": lambda meshes: check(on(meshes, prepare=adopted, by_torch=True)),
    "columns, adopted": lambda meshes: check(
        on(meshes, prepare=adopted, by_torch=True, expert_kwargs={"shard_placement_fn": columns})
    ),
    "released whole": released_whole,
    "own mesh": lambda meshes: check(on_their_own_mesh(meshes, shard_root)),
    "own mesh, not compiled": lambda meshes: check(on_their_own_mesh(meshes, only_root_not_compiled)),
    "without breaks": lambda meshes: without_breaks(meshes, check),
    "inductor, without breaks": lambda meshes: without_breaks(meshes, check_inductor),
    "inductor": lambda meshes: check_inductor(on(meshes, DenseMoE)),
    "inductor, dropless": lambda meshes: check_inductor(on(meshes, DroplessMoE)),
}


def run(shape: tuple[int, int], *names: str) -> None:
    """Run some bodies on a mesh of (fsdp, ep)."""
    mesh_bodies.run(BODIES, names, meshes_of(*shape))


DEFAULT = ("placements", "dense")

pytestmark = pytest.mark.skipif(
    torch_fsdp2.ShardPlacementResult is None, reason="all_to_all of torch 2.11 takes no gradients but contiguous ones"
)


@pytest.mark.multi_rank
def test_two_by_two_ranks_train_as_fsdp2() -> None:
    processes.run(4, run, (2, 2), *DEFAULT)


@pytest.mark.multi_rank
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in BODIES if name not in DEFAULT])
def test_two_by_two_ranks_train_as_fsdp2_also(name: str) -> None:
    processes.run(4, run, (2, 2), name)


@pytest.mark.multi_rank
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ((1, 4), "dense, one shard"),  # FSDP2 divides gradients of a mesh of one rank twice: docs/fsdp2.md
        ((4, 1), "dense, two blocks"),
    ],
)
def test_meshes_of_other_shapes(shape: tuple[int, int], name: str) -> None:
    processes.run(4, run, shape, "placements", name)
