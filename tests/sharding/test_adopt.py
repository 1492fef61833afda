"""What `adopt` and `release` refuse, and that nothing has changed then; what they leave behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

import fxshard
from fxshard import torch_fsdp2
from fxshard.errors import ConfigError
from fxshard.sharding.sharded_module import units_under
from tests.fake_ranks import fake_ranks
from tests.numerics.harness import EAGER, compile_module
from tests.numerics.models import MLP, WIDTH


def fsdp2_mlp(mesh: DeviceMesh, **kwargs: Any) -> Any:
    model = MLP()
    for block in model.blocks:
        fsdp2_fully_shard(block, mesh=mesh, **kwargs)
    return fsdp2_fully_shard(model, mesh=mesh, **kwargs)


def test_names_the_module_and_the_setting_that_cannot_be_taken_over(mesh: DeviceMesh) -> None:
    model = fsdp2_mlp(mesh)
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, WIDTH)).sum().backward()
    before = [(id(p), type(m)) for m in model.modules() for p in m._parameters.values()]
    with pytest.raises(
        ConfigError, match=r"(?s)nothing was changed.*blocks\.0: gradients added up without .*keep FSDP2"
    ):
        fxshard.adopt(model)
    assert [(id(p), type(m)) for m in model.modules() for p in m._parameters.values()] == before
    assert isinstance(model, FSDPModule)


def test_takes_over_that_fewer_ranks_share_parameters_after_forward() -> None:
    with fake_ranks(4) as mesh:
        model = fsdp2_mlp(mesh, reshard_after_forward=2)
        before = [unit.settings for unit in torch_fsdp2.units_of(model)]
        assert [unit.plan.subgroup_size for unit in units_under(fxshard.adopt(model))] == [2, 2, 2]
        fxshard.release(model)
        assert [unit.settings for unit in torch_fsdp2.units_of(model)] == before


def test_refuses_communication_of_the_user(mesh: DeviceMesh) -> None:
    model = fsdp2_mlp(mesh)
    model.set_custom_all_gather(object())
    with pytest.raises(ConfigError, match="the root: set_custom_all_gather or set_custom_reduce_scatter"):
        fxshard.adopt(model)


@pytest.mark.parametrize("what", ["plain", "ours", "ddp", "inner"])
def test_refuses_what_it_was_not_made_for(mesh: DeviceMesh, what: str) -> None:
    model: Any = MLP()
    expected = {
        "plain": r"adopt\(MLP\): torch's fully_shard has sharded nothing in it. .*call fxshard.fully_shard",
        "ours": r"adopt\(MLP\): it is sharded by fxshard already. Leave adopt out.",
        "ddp": r"adopt\(DistributedDataParallel\): it is a DistributedDataParallel.*without DDP",
        "inner": r"adopt\(FSDPBlock\): it has run inside of FSDPMLP.*Pass the outermost module",
    }[what]
    if what == "ours":
        fxshard.fully_shard(model, mesh=mesh)
    if what == "ddp":
        model = DistributedDataParallel(model)
    if what == "inner":
        whole = fsdp2_mlp(mesh)
        whole(torch.ones(2, WIDTH))
        model = whole.blocks[0]
    with pytest.raises(ConfigError, match=expected):
        fxshard.adopt(model)


def test_gives_every_module_its_own_class(mesh: DeviceMesh) -> None:
    model = fsdp2_mlp(mesh)
    parameters = list(model.parameters())
    assert id(fxshard.adopt(model)) == id(model)
    assert [type(m).__name__ for m in (model, model.blocks[0], model.head)] == ["MLP", "Block", "Linear"]
    assert type(model).__module__ == MLP.__module__
    assert not isinstance(model, FSDPModule)
    assert isinstance(model, MLP)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert repr(model).startswith("MLP(")
    assert torch_fsdp2.units_of(model) == []
    back = fxshard.release(model)
    assert type(back).__name__ == "FSDPMLP"
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert len(torch_fsdp2.units_of(back)) == 3


@pytest.mark.parametrize("how", ["whole", "blocks", "in place"])
def test_forgets_how_the_model_was_compiled(mesh: DeviceMesh, how: str) -> None:
    model = fsdp2_mlp(mesh)
    given: Any = model
    if how == "whole":
        given = torch.compile(model, backend="eager")
    for i, block in enumerate(model.blocks):
        if how == "blocks":
            model.blocks[i] = torch.compile(block, backend="eager")
        elif how == "in place":
            block.compile(backend="eager")
    assert id(fxshard.adopt(given)) == id(model)
    assert [type(block).__name__ for block in model.blocks] == ["Block", "Block"]
    assert all(m._compiled_call_impl is None for m in model.modules())
    assert all(not name.startswith("_orig_mod") for name, _ in model.named_parameters())


def test_release_refuses_a_part_of_a_model(mesh: DeviceMesh) -> None:
    model = fxshard.adopt(fsdp2_mlp(mesh))
    block = model.get_submodule("blocks.0")
    with pytest.raises(ConfigError, match=r"release\(Block\): it is part of a sharded model. Pass the outermost"):
        fxshard.release(block)


def test_release_refuses_what_fsdp2_could_not_run() -> None:
    with fake_ranks(4) as mesh:
        model: Any = nn.Linear(4, 4, bias=False)
        fxshard.fully_shard(model, mesh=mesh, reshard_after_forward=2, shard_placement_fn=lambda _: Shard(1))
        with pytest.raises(ConfigError, match=r"another dimension than 0: weight\. Call set_reshard_after_forward"):
            fxshard.release(model)
        model.set_reshard_after_forward(True)
        assert isinstance(fxshard.release(model), FSDPModule)


@pytest.mark.parametrize("whole", [True, False])
def test_what_was_compiled_before_release_is_refused_and_the_model_itself_runs(mesh: DeviceMesh, whole: bool) -> None:
    model = fxshard.fully_shard(nn.Linear(WIDTH, WIDTH), mesh=mesh)
    compiled = compile_module(model, EAGER)
    compiled(torch.ones(2, WIDTH)).sum().backward()
    released = fxshard.release(compiled, whole=whole)
    with pytest.raises(ConfigError, match=r"was given back by fxshard.release\(\), and what torch.compile made of it"):
        compiled(torch.ones(2, WIDTH))
    released(torch.ones(2, WIDTH)).sum().backward()


def test_release_refuses_gradients_that_wait(mesh: DeviceMesh) -> None:
    model = fxshard.adopt(fsdp2_mlp(mesh))
    with fxshard.no_sync(model):
        compile_module(model, options=EAGER)(torch.ones(2, WIDTH)).sum().backward()
    with pytest.raises(ConfigError, match=r"gradients of .*blocks.0.* wait to be reduced. Run a backward outside"):
        fxshard.release(model)


class Encoder(nn.Module):
    """Reads a parameter of the root outside of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x))

    def encode(self, x: Tensor) -> Tensor:
        return nn.functional.embedding(x, self.table.weight)


def test_a_registered_method_gathers(mesh: DeviceMesh) -> None:
    model = Encoder()
    fxshard.fully_shard(model, mesh=mesh)
    with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):
        model.encode(torch.ones(2, dtype=torch.long))
    fxshard.register_fsdp_forward_method(model, "encode")
    assert model.encode(torch.ones(2, dtype=torch.long)).shape == (2, WIDTH)
    with pytest.raises(ConfigError, match=r"Encoder has no method 'decode'"):
        fxshard.register_fsdp_forward_method(model, "decode")
