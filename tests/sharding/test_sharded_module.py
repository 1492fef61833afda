"""What a sharded model refuses: copies of itself, and ways of running autograd that its graphs do not support."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fxshard import fully_shard
from fxshard.errors import ConfigError, FxshardError, UnsupportedGraph
from tests.numerics.harness import EAGER, compile_module, loss_on_ones, sharded_as, sharded_mlp
from tests.numerics.models import MLP, WIDTH
from tests.pairwise import slow

BOTH_WAYS = pytest.mark.parametrize("compiled", [True, False])


@BOTH_WAYS
@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps])
def test_refuses_to_copy_a_sharded_module(
    mesh: DeviceMesh, duplicate: Callable[[nn.Module], object], compiled: bool
) -> None:
    model = sharded_mlp(mesh, compiled=compiled)
    with pytest.raises(ConfigError, match=r"(?s)(deepcopy|pickl).*state_dict"):
        duplicate(model)
    with pytest.raises(ConfigError, match=r"(?s)deepcopy.*state_dict"):
        copy.deepcopy(model.get_submodule("_orig_mod.head" if compiled else "head"))
    loss_on_ones(model).backward()


@pytest.mark.parametrize("lower", ["eager", slow("inductor")])
def test_refuses_to_keep_the_graph_for_a_second_backward(mesh: DeviceMesh, lower: str) -> None:
    model = compile_module(sharded_mlp(mesh, compiled=False), options={"lower": lower})
    loss = loss_on_ones(model)
    with pytest.raises(UnsupportedGraph, match=r"(?s)retain_graph.*forward again"):
        loss.backward(retain_graph=True)
    assert all(p.grad is None for p in model.parameters())


def test_refuses_to_differentiate_a_gradient_through_a_compiled_graph(mesh: DeviceMesh) -> None:
    model = sharded_mlp(mesh, compiled=True)
    x = torch.ones(2, WIDTH, requires_grad=True)
    loss = model(x).square().mean()
    with pytest.raises(UnsupportedGraph, match=r"(?s)(create_graph|double backward)"):
        torch.autograd.grad(loss, [x], create_graph=True)


@BOTH_WAYS
def test_refuses_autograd_grad_with_respect_to_sharded_parameters(mesh: DeviceMesh, compiled: bool) -> None:
    # The graph holds the flat shards, not the parameters, so torch itself refuses before any graph runs.
    model = sharded_mlp(mesh, compiled=compiled)
    loss = loss_on_ones(model)
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(loss, list(model.parameters()))


@BOTH_WAYS
def test_gives_the_gradient_of_an_input_alone(mesh: DeviceMesh, compiled: bool) -> None:
    model = sharded_mlp(mesh, compiled=compiled)
    x = torch.ones(2, WIDTH, requires_grad=True)
    (grad,) = torch.autograd.grad(model(x).square().mean(), [x])
    assert grad.shape == x.shape


def test_refuses_compiled_autograd(mesh: DeviceMesh) -> None:
    model = sharded_mlp(mesh, compiled=True)
    with (
        torch._dynamo.config.patch(compiled_autograd=True),
        pytest.raises(FxshardError, match=r"(?i)compiled.autograd"),
    ):
        loss_on_ones(model).backward()


def test_refuses_to_fall_back_to_eager_at_the_recompile_limit(mesh: DeviceMesh) -> None:
    model = compile_module(sharded_mlp(mesh, compiled=False), options=EAGER, dynamic=False)

    def train_on_many_shapes() -> None:
        for rows in range(2, 6):
            loss_on_ones(model, rows).backward()

    with (
        torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=False),
        pytest.raises(FxshardError, match=r"(?s)recompile.*(dynamic|recompile_limit)"),
    ):
        train_on_many_shapes()


@BOTH_WAYS
def test_refuses_a_backward_after_the_parameters_have_changed(mesh: DeviceMesh, compiled: bool) -> None:
    model = sharded_mlp(mesh, compiled=compiled)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_on_ones(model).backward()
    loss = loss_on_ones(model)
    optim.step()
    with pytest.raises(FxshardError, match=r"(?s)changed between forward and backward"):
        loss.backward()


@BOTH_WAYS
def test_refuses_assigned_data_whose_values_torch_drops(mesh: DeviceMesh, compiled: bool) -> None:
    model = sharded_mlp(mesh, compiled=compiled)
    weight = dict(model.named_parameters())["_orig_mod.head.weight" if compiled else "head.weight"]
    weight.data = weight.data * 0.5
    with pytest.raises(ConfigError, match=r"(?s)head\.weight.*data.*copy_"):
        loss_on_ones(model)


@pytest.mark.parametrize("compiled", [False, True])
def test_shards_a_graph_module_whose_forward_has_no_module(compiled: bool, mesh: DeviceMesh) -> None:
    model = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    assert type(model).forward.__module__ is None
    fully_shard(model, mesh=mesh)
    run = compile_module(model, options=EAGER) if compiled else model
    run(torch.ones(2, 4)).sum().backward()
    assert all(isinstance(p.grad, DTensor) for p in model.parameters())


class _Freezing(MLP):
    """Its forward freezes and thaws a block by a counter."""

    step = 0

    def forward(self, x: Tensor) -> Tensor:
        self.blocks[1].requires_grad_(self.step % 2 == 0)
        return super().forward(x)


@pytest.mark.parametrize("way", ["one line", "compiled", "in parts", "eager"])
def test_refuses_a_forward_that_freezes_or_thaws_parameters(mesh: DeviceMesh, way: str) -> None:
    model = _Freezing()
    run = sharded_as(model, way)
    loss_on_ones(run).backward()
    for model.step in (1, 2):
        with pytest.raises(ConfigError, match=r"requires_grad of blocks.1.*Freeze or thaw parameters before the call"):
            loss_on_ones(run)
        model.blocks[1].requires_grad_(model.step % 2 == 0)
        loss_on_ones(run).backward()


@dataclass
class _Batch:
    x: Tensor
    sizes: Tensor
    nested: list[Tensor] = field(default_factory=list)


class _OnBatches(MLP):
    def forward(self, batch: _Batch) -> _Batch:  # type: ignore[override]
        assert (batch.x.dtype, batch.sizes.dtype) == (torch.bfloat16, torch.int64)
        return _Batch(super().forward(batch.x), batch.sizes, [batch.nested[0]])


@BOTH_WAYS
def test_casts_tensors_in_dataclasses(mesh: DeviceMesh, compiled: bool) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    model = fully_shard(_OnBatches(), mesh=mesh, mp_policy=policy)
    run = compile_module(model, options=EAGER) if compiled else model
    given = _Batch(torch.ones(2, WIDTH), torch.ones(2, dtype=torch.int64), [torch.ones(2)])
    result = run(given)
    assert given.x.dtype is torch.float32
    assert (result.x.dtype, result.sizes.dtype, result.nested[0].dtype) == (torch.float64, torch.int64, torch.float64)
