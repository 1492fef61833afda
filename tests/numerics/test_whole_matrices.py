"""`whole_matrices`: optimizers that need whole matrices step sharded parameters as they step unsharded ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import Optimizer

import fxshard
from fxshard.errors import ConfigError, RankMismatchError
from fxshard.runtime.matrix_owners import Matrix, RowSplit, assign_owners, box_of
from tests.numerics import whole_matrices
from tests.numerics.harness import EAGER, compile_module
from tests.numerics.mesh_bodies import shared_folder
from tests.numerics.whole_matrices import (
    Shampoo,
    assert_equal,
    batch,
    check,
    counting_bytes,
    muon_of_matrices,
    net,
    sharded,
    take_steps,
)
from tests.ranks import two_ranks
from tests.state import processes
from tests.state.states import assert_same


def mesh_of_all() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


@two_ranks
def test_steps_as_the_unsharded_optimizer() -> None:
    whole_matrices.without_other_axes(2)


@pytest.mark.multi_rank
def test_four_ranks_on_every_mesh() -> None:
    processes.run(4, whole_matrices.every_mesh)


def by_group(params: Iterable[nn.Parameter]) -> Optimizer:
    """Return an optimizer that needs whole matrices, and steps vectors as rows."""
    matrices, vectors = ([p for p in params if p.dim() == dim] for params in [list(params)] for dim in (2, 1))
    return Shampoo([{"params": matrices}, {"params": vectors, "plain": True}])


@two_ranks
def test_leaves_groups_that_are_elementwise_sharded() -> None:
    _, optimizer = check(mesh_of_all(), by_group, elementwise=lambda group: "plain" in group)
    assert all(isinstance(optimizer.state[p]["last"], DTensor) for p in optimizer.param_groups[1]["params"])


@two_ranks
def test_trains_compiled_with_all_that_a_loop_has() -> None:
    """Clipping, two optimizers, a scheduler, a gradient scaler, accumulation, and the first gather behind a step."""
    models = [net(dtype=torch.float32), net(dtype=torch.float32)]
    sharded(models[1], mesh_of_all())
    for model in models:
        called = compile_module(model, options=EAGER) if model is models[1] else model
        muon: Any = muon_of_matrices(model.parameters())
        if model is models[1]:
            muon = fxshard.whole_matrices(fxshard.overlap_step(muon))
        rest = torch.optim.AdamW([p for p in model.parameters() if p.dim() < 2], lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(muon, 1, gamma=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(3):
            for part in range(2):
                scaler.scale(called(batch(2 * step + part, torch.float32)).square().sum()).backward()
            for each in (muon, rest):
                scaler.unscale_(each)
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
            for each in (muon, rest):
                scaler.step(each)
                each.zero_grad()
            scaler.update()
            schedule.step()
        assert muon.param_groups[0]["lr"] == 0.05 / 8
    assert_equal(models[1], models[0])


@two_ranks
def test_state_is_that_of_the_unsharded_optimizer() -> None:
    plain, model = net(), sharded(net(), mesh_of_all())
    expected, optimizer = Shampoo(plain.parameters()), fxshard.whole_matrices(Shampoo(model.parameters()))
    take_steps(plain, expected, range(2))
    take_steps(model, optimizer, range(2))
    assert_same(
        fxshard.full_optim_state_dict(model, optimizer, recipient_rank=None, cpu_offload=False), expected.state_dict()
    )
    take_steps(plain, expected, [2])
    take_steps(model, optimizer, [2])
    other = sharded(net(), mesh_of_all())
    loaded = fxshard.whole_matrices(Shampoo(other.parameters()))
    fxshard.load_full_state_dict(other, plain.state_dict())
    fxshard.load_full_optim_state_dict(other, loaded, expected.state_dict())
    for each, optim in ((plain, expected), (model, optimizer), (other, loaded)):
        take_steps(each, optim, [3])
    assert_equal(model, plain)
    assert_equal(other, plain)


@two_ranks
def test_checkpoints_of_ours_and_of_torch() -> None:
    plain, model = net(), sharded(net(), mesh_of_all())
    expected, optimizer = Shampoo(plain.parameters()), fxshard.whole_matrices(Shampoo(model.parameters()))
    take_steps(plain, expected, range(2))
    take_steps(model, optimizer, range(2))
    folder = shared_folder()
    fxshard.save_checkpoint(f"{folder}/ours", model, optimizer)
    others = [sharded(net(), mesh_of_all()) for _ in range(2)]
    loaded = [fxshard.whole_matrices(Shampoo(other.parameters())) for other in others]
    fxshard.load_checkpoint(f"{folder}/ours", others[0], loaded[0])
    state = {"optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=f"{folder}/torch")
    others[1].load_state_dict(model.state_dict())
    empty = {"optim": get_optimizer_state_dict(others[1], loaded[1])}
    dcp.load(empty, checkpoint_id=f"{folder}/torch")
    set_optimizer_state_dict(others[1], loaded[1], empty["optim"])
    for each, optim in ((plain, expected), (model, optimizer), *zip(others, loaded, strict=True)):
        take_steps(each, optim, [2, 3])
    for each in (model, *others):
        assert_equal(each, plain)


@two_ranks
def test_parameters_without_gradient_come_later_and_groups_are_added() -> None:
    plain, model = net(), sharded(net(), mesh_of_all())
    found = []
    for each in (plain, model):
        vectors = [p for p in each.parameters() if p.dim() == 1]
        optimizer: Any = Shampoo([p for p in each.parameters() if p.dim() == 2])
        optimizer = fxshard.whole_matrices(optimizer) if each is model else optimizer
        for step in range(3):
            if step == 2:
                optimizer.add_param_group({"params": vectors, "lr": 0.01})
            each(batch(step, torch.float64)).square().sum().backward()
            cast(Any, each).head.weight.grad = None if step == 0 else cast(Any, each).head.weight.grad
            cast(Any, each).blocks[0].up.weight.lr_factor = 0.5
            optimizer.step(scale=2.0)
            optimizer.zero_grad()
        found.append(optimizer)
    assert_equal(model, plain)
    assert [group["calls"] for group in found[0].param_groups] == [group["calls"] for group in found[1].param_groups]


@two_ranks
def test_a_closure_computes_the_loss_once_per_step() -> None:
    model = sharded(net(), mesh_of_all())
    optimizer = fxshard.whole_matrices(torch.optim.SGD(model.parameters(), lr=0.1))
    calls: list[float] = []

    def closure() -> Any:
        loss = model(batch(0, torch.float64)).square().sum()
        loss.backward()
        calls.append(loss.item())
        return loss

    assert [optimizer.step(closure).item() for _ in range(2)] == calls
    assert calls[1] != calls[0]


@pytest.mark.parametrize("bucket_mib", [1e-5, None])
@two_ranks
def test_rounds_hold_a_bucket_or_an_eighth_and_change_nothing(bucket_mib: float | None) -> None:
    plain, model = net(dtype=torch.float32), sharded(net(dtype=torch.float32), mesh_of_all())
    expected = muon_of_matrices(plain.parameters())
    optimizer = fxshard.whole_matrices(muon_of_matrices(model.parameters()), bucket_mib=bucket_mib)
    take_steps(plain, expected, range(2))
    with counting_bytes() as counts:
        take_steps(model, optimizer, range(2))
    assert_equal(model, plain)
    assert len(counts) == 2 * 2 * 3, "two launches for each of the three matrices of the rank with most"


@two_ranks
def test_refuses_rows_that_do_not_fit_and_state_that_has_no_place() -> None:
    model = sharded(net(), mesh_of_all())
    optimizer = fxshard.whole_matrices(Shampoo(model.parameters()), rows=lambda p: [5, 5])
    with pytest.raises(ConfigError, match=r"rows gave \[5, 5\] for the parameter blocks.0.norm.weight \(8,\)"):
        take_steps(model, optimizer, range(1))
    stacked = [p for p in model.parameters() if p.shape == (13, 8)]
    optimizer = fxshard.whole_matrices(Shampoo(stacked), rows=lambda p: [6, 7])
    take_steps(model, optimizer, range(1))
    with pytest.raises(ConfigError, match=r"keeps a tensor \(6, 6\) of a matrix \(6, 8\)"):
        optimizer.state_dict()


@two_ranks
def test_ranks_that_step_different_matrices_hear_of_it() -> None:
    model = sharded(net(), mesh_of_all())
    optimizer = fxshard.whole_matrices(Shampoo(model.parameters()))
    model(batch(0, torch.float64)).square().sum().backward()
    if dist.get_rank():
        next(model.parameters()).grad = None
    with pytest.raises(RankMismatchError, match=r"all_to_all of the gradient .* of the parameter blocks.0"):
        optimizer.step()


def test_boxes_are_those_of_dtensors() -> None:
    """Rows that tensor parallelism has cut are cut again, though its axis comes second; else axes cut in order."""
    strided = _StridedShard(0, split_factor=2)
    for rows, placements in itertools.product((1, 5, 8, 13), ((strided, Shard(0)), (Shard(0), Shard(1)))):
        whole = torch.arange(rows * 6).view(rows, 6)
        for dp, tp in itertools.product(range(3), range(2)):
            outer = _chunk(_chunk(whole, 2, tp, placements[1].dim), 3, dp, 0)
            box = box_of(whole.shape, placements, (3, 2), (dp, tp))
            assert torch.equal(whole[box[0][0] : box[0][1], box[1][0] : box[1][1]], outer)


def _chunk(tensor: torch.Tensor, count: int, index: int, dim: int) -> torch.Tensor:
    size = -(-tensor.shape[dim] // count)
    first = min(index * size, tensor.shape[dim])
    return tensor.narrow(dim, first, min(size, tensor.shape[dim] - first))


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_owners_have_nearly_equal_costs(num_ranks: int) -> None:
    """Those of a GPT of 12 blocks; the bound is that of the longest processing time first."""
    shapes = 12 * [(768, 768)] * 4 + 12 * [(3072, 768), (768, 3072)]
    split = RowSplit(cast(Any, object()), [((0, 1), (0, 1))] * num_ranks, (0, 1))
    parameters = [cast(Any, torch.empty(shape, device="meta")) for shape in shapes]
    matrices = [
        Matrix(p, str(i), i, RowSplit(split.team, split.boxes, (0, p.shape[0])), False)
        for i, p in enumerate(parameters)
    ]
    loads = [0] * num_ranks
    for matrix in assign_owners(matrices):
        loads[matrix.owner] += matrix.cost
    assert max(loads) <= sum(loads) / num_ranks * (4 / 3 - 1 / (3 * num_ranks))
