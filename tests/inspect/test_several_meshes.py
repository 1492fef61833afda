"""Models of several mesh axes or with other layouts are explained as they were compiled, and bisected as others are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fxshard
from fxshard import torch_fsdp2
from fxshard.errors import ConfigError
from fxshard.ir import collectives
from fxshard.passes._base import GraphPass, PassContext
from tests.fake_ranks import fake_ranks, split_axis
from tests.graphs import in_split
from tests.models import FeedForward
from tests.numerics.harness import EAGER, compile_module
from tests.numerics.models import MLP, WIDTH

AXES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "several that shard": ({"dp": 2, "cp": 2, "tp": 2}, {"shard": ("dp", "cp")}),
    "replicas": ({"replicate": 2, "dp": 4}, {"replicate": "replicate", "shard": "dp"}),
}


class Halved(GraphPass):
    """Promises to reorder only, and halves what the last collective brings."""

    reorders_only = True

    def apply(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        *_, wait = gm.graph.find_nodes(op="call_function", target=collectives.WAIT)
        with gm.graph.inserting_after(wait):
            half = gm.graph.call_function(torch.ops.aten.mul.Tensor, (wait, 0.5))
        half.meta["val"] = wait.meta["val"]
        wait.replace_all_uses_with(half, delete_user_cb=lambda user: user is not half)
        return True


def whole(axes: dict[str, int], dims: dict[str, Any]) -> tuple[Any, Tensor]:
    """Return two layers whose parameters are DTensors on all axes, in a unit each, and their input."""
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    for layer, dim in zip(model, (0, 1), strict=True):
        where = [Shard(dim) if name == "tp" else Replicate() for name in axes]
        weight = distribute_tensor(layer.weight.detach(), mesh, where, src_data_rank=None)
        layer.weight, layer.bias = nn.Parameter(weight), None
        fxshard.fully_shard(layer, mesh=mesh, dp_mesh_dims=fsdp.DataParallelMeshDims(**dims))
    where = [Replicate() if name == "tp" else Shard(0) for name in axes]
    return model, DTensor.from_local(torch.ones(2, 4), mesh, where, run_check=False)


def launches(explanation: fxshard.Explanation) -> list[tuple[str, str | None]]:
    (frame,) = explanation.frames
    return [(found.op, found.unit) for kind in ("forward", "backward") for found in frame.collectives(kind)]


@pytest.mark.skipif(not torch_fsdp2.HAS_MESH_DIMS, reason="this torch has no DataParallelMeshDims")
@pytest.mark.parametrize("how", AXES)
def test_explains_and_bisects_parameters_on_all_axes(how: str) -> None:
    with fake_ranks(8):
        model, x = whole(*AXES[how])
        explained = launches(fxshard.explain(model, x, options=EAGER))
        assert fxshard.bisect_numerics(model, x, options=EAGER) is None
        compiled = compile_module(model, options=EAGER)
        compiled(x).to_local().sum().backward()
        assert explained == launches(fxshard.explanation_of(compiled))
        assert ("all_gather", "") in explained


def tensor_parallel(mesh: DeviceMesh) -> Any:
    """Return layers that are alike, so that they are regions, with collectives of their own."""
    model = nn.Sequential(*(FeedForward(4, 8) for _ in range(3)))
    for layer in model:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(layer, split_axis(mesh), plan, src_data_rank=None)  # fake ranks send nothing
        fxshard.fully_shard(layer, mesh=mesh["shard"])
    return fxshard.fully_shard(model, mesh=mesh["shard"])


class Experts(nn.Module):
    """A matrix for the rows that come from other ranks."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.weight, self.group = nn.Parameter(torch.randn(4, 4)), group

    def forward(self, x: Tensor) -> Tensor:
        arrived = functional.all_to_all_single_autograd(x, None, None, self.group) @ self.weight
        return functional.all_to_all_single_autograd(arrived, None, None, self.group)


def experts(mesh: DeviceMesh) -> Any:
    """Return a model whose second layer is shared by fewer ranks than the first."""
    model = nn.Sequential(nn.Linear(4, 4), Experts(split_axis(mesh).get_group()))
    fxshard.fully_shard(model[1], mesh=mesh["shard"])
    return fxshard.fully_shard(model, mesh=init_device_mesh("cpu", (8,)))


MODELS = {"tensor parallelism": tensor_parallel, "experts": experts}


@pytest.mark.parametrize("lower", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("what", MODELS)
def test_bisects_models_with_collectives_of_their_own(what: str, lower: str) -> None:
    with fake_ranks(4, tensor_parallel=2) as mesh:
        model, x = MODELS[what](mesh), torch.randn(4, 4)
        assert fxshard.bisect_numerics(model, x, options={"lower": lower}) is None
        found = fxshard.bisect_numerics(
            model, x, options={"lower": lower, "verify": False, "passes": in_split(Halved())}
        )
        assert found is not None
        assert found.pass_name == "halved"


def test_refuses_to_bisect_meshes_that_are_no_parts_of_each_other() -> None:
    with fake_ranks(12):
        mesh = init_device_mesh("cpu", (4, 3), mesh_dim_names=("a", "b"))
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for layer, name in zip(model, ("a", "b"), strict=True):
            fxshard.fully_shard(layer, mesh=mesh[name])
        with pytest.raises(ConfigError, match="numbers of ranks, 3, 4, of which one is no multiple"):
            fxshard.bisect_numerics(model, torch.ones(2, 4), options=EAGER)


KWARGS: dict[str, dict[str, Any]] = {
    "shared by two ranks after forward": {"reshard_after_forward": 2},
    "cut along columns": {"shard_placement_fn": lambda p: Shard(1) if p.dim() == 2 and p.shape[1] % 4 == 0 else None},
}


@pytest.mark.parametrize("how", KWARGS)
def test_explains_and_bisects_parameters_that_are(how: str) -> None:
    x = torch.ones(2, WIDTH)
    with fake_ranks(4) as mesh:
        model: Any = MLP()
        for block in model.blocks:
            fxshard.fully_shard(block, mesh=mesh, **KWARGS[how])
        fxshard.fully_shard(model, mesh=mesh, **KWARGS[how])
        assert fxshard.explain(model, x, options=EAGER).units == ("blocks.0", "blocks.1", "")
        assert fxshard.bisect_numerics(model, x, options=EAGER) is None
