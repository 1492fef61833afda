"""The fake model is planned as the model would be, on ranks that need not exist."""

from __future__ import annotations

import gc
import importlib
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fxshard.errors import ConfigError, UnsupportedGraph
from fxshard.inspect.fake_model import fake_model_of
from fxshard.options import Options
from fxshard.sharding.sharded_module import units_under
from tests.inspect.fake_models import (
    WIDTH,
    Attention,
    Block,
    Broken,
    Reaching,
    Recurrent,
    Stack,
    Tied,
    blocks_then_root,
    changed_later,
    hooked,
    in_bfloat16,
    in_evaluation,
    list_as_one_unit,
    partly_frozen,
    partly_ignored,
    plans_of,
    rows,
    traced,
    traced_shadow,
    whole,
)
from tests.pairwise import slow

SHARDED: dict[str, tuple[Callable[[], nn.Module], Callable[..., None]]] = {
    "blocks": (Stack, blocks_then_root),
    "a list as one unit": (Stack, list_as_one_unit),
    "mixed precision": (Stack, in_bfloat16),
    "ignored parameters": (Stack, partly_ignored),
    "frozen parameters": (Stack, partly_frozen),
    "changed after sharding": (Stack, changed_later),
    "evaluation": (Stack, in_evaluation),
    "hooks": (Stack, hooked),
    "tied weights": (Tied, whole),
    "graph breaks": (Broken, blocks_then_root),
    "attention": (Attention, whole),
    "recurrent": (Recurrent, whole),
    "a global tensor and a hook of its own": (Reaching, blocks_then_root),
}


@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("grad", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_shadow_of_a_sharded_model_is_captured_as_the_model_is(name: str, grad: bool, mesh: DeviceMesh) -> None:
    build, shard = SHARDED[name]
    model = build()
    shard(model, mesh)
    with torch.set_grad_enabled(grad):
        fake_model = fake_model_of(model)
        of_shadow = traced_shadow(fake_model, rows())
        of_model = traced(model, rows())
    assert plans_of(fake_model.model) == plans_of(model)
    assert {unit.plan.group for unit in units_under(fake_model.model)} == {"fsdp"}
    assert of_shadow.trained == of_model.trained
    assert len(of_shadow.graphs) == len(of_model.graphs)
    assert [[*p.units] for p in of_shadow.plans] == [[*p.units] for p in of_model.plans]
    assert of_shadow.graphs == of_model.graphs


@pytest.mark.parametrize("build", [Stack, Tied, Broken, Attention, Recurrent])
@pytest.mark.parametrize("device", [slow("cpu"), "meta"])
def test_an_unsharded_model_is_sharded_as_in_one_line(build: Callable[[], nn.Module], device: str) -> None:
    with torch.device(device):
        model = build()
    options = Options(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, reshard_after_forward=False)
    fake_model = fake_model_of(model, world_size=3, options=options)
    with torch.device(device):
        traces = traced_shadow(fake_model, rows())
    expected = ["", "blocks.0", "blocks.1"] if isinstance(model, Stack) else [""]
    assert [unit.fqn for unit in units_under(fake_model.model)] == expected
    assert all(unit.settings.from_one_line for unit in units_under(fake_model.model))
    for plan in plans_of(fake_model.model):
        assert (plan.world_size, plan.reshard_after_forward) == (3, False)
        assert (plan.param_dtype, plan.reduce_dtype) == (torch.bfloat16, torch.float32)
    assert {name for plan in traces.plans for name in plan.units} == set(expected)
    assert all(traces.trained)
    assert not dist.is_initialized()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", slow("gpt2")])
def test_a_hugging_face_model_is_traced(name: str) -> None:
    transformers: Any = importlib.import_module("transformers")  # takes seconds, and only this test needs it
    if name == "llama":
        config = transformers.LlamaConfig(
            num_hidden_layers=2, hidden_size=32, intermediate_size=52, num_attention_heads=4, vocab_size=64
        )
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=64, n_positions=32)
        model = transformers.GPT2LMHeadModel(config)
    tokens = torch.zeros(2, 16, dtype=torch.long)
    fake_model = fake_model_of(model, world_size=8)
    traces = traced_shadow(fake_model, input_ids=tokens, labels=tokens, use_cache=False)
    assert sum(len(trained) for trained in traces.trained) == 3
    assert len({unit for plan in traces.plans for unit in plan.units}) == 3


def test_a_model_that_fits_in_no_memory_is_traced() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(200_000, 200_000, bias=False) for _ in range(3)))
    fake_model = fake_model_of(model, world_size=512)
    traces = traced_shadow(fake_model, torch.empty(1, 200_000, device="meta"))
    assert [len(plan.units) for plan in traces.plans] == [3]


def test_a_compiled_model_is_explained_plain() -> None:
    model = Stack()
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")  # type: ignore[assignment]
    model.compile(backend="eager")
    fake_model = fake_model_of(torch.compile(model, backend="eager"), world_size=2)  # type: ignore[arg-type]
    assert type(fake_model.model).__name__ == "Stack"
    assert [unit.fqn for unit in units_under(fake_model.model)] == ["", "blocks.0", "blocks.1"]
    assert len(traced_shadow(fake_model, rows()).plans) == 1


def test_part_of_a_sharded_model_keeps_its_whole_units(mesh: DeviceMesh) -> None:
    model = Stack()
    list_as_one_unit(model, mesh)
    fake_model = fake_model_of(model.blocks[0])
    traces = traced_shadow(fake_model, rows())
    names = {unit.fqn: unit.plan for unit in units_under(model)}
    assert [{**plan.units} for plan in traces.plans] == [
        {name: replace(names[name], group="fsdp") for name in traces.plans[0].units}
    ]
    assert len(traces.plans[0].units) == 2


class Mixed(nn.Module):
    """Reads tensors that no module registers, and a parameter that it keeps in a list as well."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.again = [self.linear.weight]
        self.table = {"offset": torch.ones(WIDTH)}
        self.unregistered = [Block()]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y + self.table["offset"]


def test_tensors_outside_of_parameters_and_buffers_become_fake() -> None:
    model = Mixed()
    fake_model = fake_model_of(model, world_size=2)
    copied: Any = fake_model.model
    assert type(copied.table["offset"]) is FakeTensor
    assert all(isinstance(p, FakeTensor) for p in copied.unregistered[0].parameters())
    assert len(traced_shadow(fake_model, rows()).plans) == 1
    assert type(model.table["offset"]) is Tensor


def test_strides_dtypes_and_attributes_of_parameters_are_kept() -> None:
    model = Stack()
    model.first.weight = nn.Parameter(torch.ones(WIDTH, WIDTH).t())
    model.register_buffer("wide", torch.ones(1, 1).expand(5, 3), persistent=False)
    model.first.weight.no_decay = True  # type: ignore[attr-defined]
    fake_model = fake_model_of(model, world_size=2)
    wide = fake_model.model.get_buffer("wide")
    assert wide.stride() == (0, 0)
    assert "wide" in fake_model.model._non_persistent_buffers_set
    assert fake_model.model.get_submodule("first")._parameters["weight"].no_decay  # type: ignore[union-attr]


# ---- inputs


def test_inputs_become_fake_however_deep_they_lie() -> None:
    fake_model = fake_model_of(Stack(), world_size=2)
    shared = torch.ones(3, 2).t().requires_grad_()
    with FakeTensorMode():
        other = torch.ones(5)
    given = ([shared, {"a": shared}], torch.ones(2, device="meta", dtype=torch.long), other, "text")
    args, kwargs = fake_model.inputs(given, {"flag": True, "mask": torch.ones(1, dtype=torch.bool)})
    assert args[0][0] is args[0][1]["a"]
    assert (args[0][0].shape, args[0][0].stride(), args[0][0].requires_grad) == ((2, 3), (1, 2), True)
    assert (args[1].device.type, args[1].dtype) == ("cpu", torch.long)
    assert args[3] == "text"
    assert kwargs["flag"] is True
    for tensor in (args[0][0], args[1], args[2], kwargs["mask"]):
        assert tensor.fake_mode is fake_model.replica.mode


def test_a_distributed_input_stays_one(mesh: DeviceMesh) -> None:
    fake_model = fake_model_of(Stack(), world_size=2)
    given = DTensor.from_local(torch.ones(2, WIDTH), mesh, (Shard(0),), run_check=False)
    ((copied,), _) = fake_model.inputs((given,), {})
    assert isinstance(copied, DTensor)
    assert type(copied.to_local()) is FakeTensor


def test_dynamic_dimensions_stay_dynamic() -> None:
    fake_model = fake_model_of(Stack(), world_size=2)
    x = rows()
    torch._dynamo.mark_dynamic(x, 0)
    (graph,) = traced_shadow(fake_model, x).graphs
    assert "s" in graph.split("return")[0].split("=")[0]


# ---- what cannot be copied


class Service:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.numbers = (i for i in range(3))
        self.seen: list[Tensor] = [torch.ones(1)]


class Holder(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.service = Service()
        self.generator = torch.Generator()
        self.library = gc


def test_what_cannot_be_copied_is_shared(mesh: DeviceMesh) -> None:
    model = Holder()
    model.mesh, model.group = mesh, {"group": mesh.get_group()}  # type: ignore[assignment]
    fake_model = fake_model_of(model, world_size=4)
    copied: Any = fake_model.model
    assert copied.service is not model.service
    assert copied.service.lock is model.service.lock
    assert copied.service.numbers is model.service.numbers
    assert type(copied.service.seen[0]) is FakeTensor
    assert copied.generator is model.generator
    assert copied.library is gc
    assert copied.mesh is mesh
    assert copied.group["group"] is mesh.get_group()
    assert len(traced_shadow(fake_model, rows()).plans) == 1


class Stubborn:
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise OSError("there is only one")


def test_an_attribute_that_refuses_to_be_copied_is_named() -> None:
    model = Stack()
    model.blocks[0].stubborn = [Stubborn()]  # type: ignore[assignment]
    with pytest.raises(UnsupportedGraph, match=r"Block\.stubborn cannot be copied \(OSError: there is only one\)"):
        fake_model_of(model, world_size=2)


# ---- how many ranks


def test_the_number_of_ranks_comes_from_what_is_known(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fake_model_of(Stack()).world_size == 2
    assert fake_model_of(Stack(), world_size=1).world_size == 1
    assert fake_model_of(Stack(), mesh=mesh).world_size == 2
    assert fake_model_of(Stack(), options=Options(mesh=mesh)).world_size == 2
    model = Stack()
    whole(model, mesh)
    assert fake_model_of(model, world_size=2).world_size == 2


def test_a_launcher_says_how_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert fake_model_of(Stack()).world_size == 16


def test_an_unknown_number_of_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match=r"Pass world_size=\.\.\."):
        fake_model_of(Stack())


@pytest.mark.parametrize("world_size", [0, -1, 2.0, True, "2", (2, 0), (1, 2, 3)])
def test_a_number_of_ranks_that_means_nothing_is_refused(world_size: Any) -> None:
    with pytest.raises(ConfigError, match="world_size must be a positive int"):
        fake_model_of(Stack(), world_size=world_size)


def test_contradictory_numbers_of_ranks_are_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(ConfigError, match="world_size is 4, but the mesh has 2 ranks"):
        fake_model_of(Stack(), world_size=4, mesh=mesh)
    with pytest.raises(ConfigError, match="world_size is 2 x 2, but the mesh has 2 ranks"):
        fake_model_of(Stack(), world_size=(2, 2), mesh=mesh)
    model = Stack()
    whole(model, mesh)
    with pytest.raises(ConfigError, match="asked for 4 ranks, but the model is sharded over 2"):
        fake_model_of(model, world_size=4)


def test_replicas_are_copied_as_such(fake_group: None) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = Stack()
    whole(model, mesh)
    plans = [unit.plan for found in (model, Stack()) for unit in units_under(fake_model_of(found, mesh=mesh).model)]
    assert plans
    assert all((plan.replicas, plan.world_size, plan.replicate_group) == (2, 1, "fsdp_replicas") for plan in plans)
