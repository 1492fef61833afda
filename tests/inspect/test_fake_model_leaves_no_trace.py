"""Tracing a fake model leaves the model, its compiled code and the process as they were."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh

from fxshard.inspect.fake_model import fake_model_of
from fxshard.sharding.sharded_module import units_under
from tests.inspect.fake_models import (
    WIDTH,
    Attention,
    Block,
    Broken,
    Recurrent,
    Stack,
    Traces,
    blocks_then_root,
    entries_on,
    hooked,
    rows,
    traced_shadow,
)

pytestmark = pytest.mark.usefixtures("thaws")


def state_of(model: nn.Module) -> dict[str, Any]:
    """All that a caller can see of a model; tensors by identity, version and value."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "tensors": {name: (id(t), t._version, t.requires_grad, id(t.grad)) for name, t in tensors.items()},
        "values": {name: getattr(t, "_local_tensor", t).detach().clone().tolist() for name, t in tensors.items()},
        "types": [type(m) for m in model.modules()],
        "dicts": [{name: id(value) for name, value in vars(m).items()} for m in model.modules()],
        "hooks": [list(m._forward_hooks.items()) for m in model.modules()],
        "training": [m.training for m in model.modules()],
        "random": torch.get_rng_state().tolist(),
        "grad mode": torch.is_grad_enabled(),
    }


@pytest.mark.parametrize("shard", [hooked, None])
def test_the_model_is_left_as_it_was(shard: Callable[..., None] | None, mesh: DeviceMesh) -> None:
    model = nn.Sequential(Stack(), nn.Dropout(0.5))
    model(rows()).sum().backward()
    if shard:
        model.zero_grad()
        shard(model[0], mesh)
        model(rows()).sum().backward()
    model[1].eval()
    before = state_of(model)
    explained = model[0] if shard else model
    traced_shadow(fake_model_of(explained, world_size=2), rows())
    assert state_of(model) == before


def test_a_live_process_group_is_left_alone(mesh: DeviceMesh) -> None:
    group = dist.group.WORLD
    fake_model = fake_model_of(Stack(), world_size=5)
    traced_shadow(fake_model, rows())
    assert dist.group.WORLD is group
    assert dist.get_world_size() == 2
    assert {unit.world_size for unit in units_under(fake_model.model)} == {5}


@pytest.mark.slow
def test_a_compiled_model_does_not_compile_again() -> None:
    torch._dynamo.reset()
    model = Broken()
    compiled = torch.compile(model, backend="eager")
    compiled(rows())
    before = entries_on(Broken.forward)
    counted = copy.deepcopy(dict(counters))
    with torch._dynamo.config.patch(recompile_limit=2):
        for size in range(2, 5):  # more often than that
            fake_model = fake_model_of(model, world_size=size)
            assert len(traced_shadow(fake_model, rows()).plans) == 3
            traced_shadow(fake_model, rows()[:2])
    assert entries_on(Broken.forward) == before
    assert before == [1]
    assert dict(counters) == counted
    with torch._dynamo.config.patch(error_on_recompile=True), torch.compiler.set_stance("fail_on_recompile"):
        compiled(rows())


@pytest.mark.slow
def test_code_that_dynamo_did_not_know_is_forgotten() -> None:
    torch._dynamo.reset()
    traced_shadow(fake_model_of(Broken(), world_size=2), rows())
    assert entries_on(Broken.forward, Block.forward, Stack.forward) == [0, 0, 0]


@pytest.mark.slow
def test_sizes_that_only_the_shadow_saw_do_not_become_dynamic() -> None:
    torch._dynamo.reset()
    model = Stack()
    traced_shadow(fake_model_of(model, world_size=2), torch.ones(6, WIDTH))
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        graphs.append(gm)
        return gm.forward

    torch.compile(model, backend=backend)(torch.ones(5, WIDTH))
    (graph,) = graphs
    assert [n for n in graph.graph.nodes if isinstance(n.meta.get("example_value"), torch.SymInt)] == []


@pytest.mark.slow
def test_no_compiled_graph_stays_among_the_globals_of_the_model() -> None:
    def made_by_dynamo() -> set[str]:
        return {name for name in globals() if name.startswith(("__compiled_fn", "__resume_at"))}

    torch._dynamo.reset()
    gc.collect()
    before = made_by_dynamo()
    traces = traced_shadow(fake_model_of(Broken(), world_size=2), rows())
    assert len(traces.plans) == 3
    assert made_by_dynamo() == before


def helper(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x * 2


class Helped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return helper(self.linear(x))


def test_functions_that_the_model_calls_are_left_alone_as_well() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(helper, backend="eager")
    compiled(rows())
    code, before = helper.__code__, entries_on(helper)
    traced_shadow(fake_model_of(Helped(), world_size=2), rows())
    assert helper.__code__ is code
    assert entries_on(helper) == before
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled(rows())


@pytest.mark.slow
def test_a_sharded_compiled_model_does_not_compile_again(mesh: DeviceMesh) -> None:
    model = Broken()
    blocks_then_root(model, mesh)
    traces = Traces()
    compiled = torch.compile(model, backend=traces)
    compiled(rows())
    for _ in range(3):
        assert len(traced_shadow(fake_model_of(model), rows()).plans) == 3
    compiled(rows())
    assert len(traces.plans) == 3


@pytest.mark.slow
@pytest.mark.parametrize("build", [Broken, Attention, Recurrent])
def test_a_shadow_is_freed(build: Callable[[], nn.Module]) -> None:
    model = build()

    def explain() -> list[weakref.ref[Any]]:
        fake_model = fake_model_of(model, world_size=2)
        traces = Traces()
        args, _ = fake_model.inputs((rows(),), {})
        with fake_model.tracing():
            torch.compile(fake_model.model, backend=traces)(*args).sum().backward()
        return [weakref.ref(m) for m in (*fake_model.model.modules(), traces, fake_model.replica)]

    references = explain()
    gc.collect()
    assert [reference() for reference in references if reference() is not None] == []


def test_a_failed_trace_restores_what_it_borrowed() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(helper, backend="eager")
    compiled(rows())
    code, before = helper.__code__, entries_on(helper)
    fake_model = fake_model_of(Helped(), world_size=2)
    with pytest.raises(ZeroDivisionError), fake_model.tracing():
        raise ZeroDivisionError
    assert helper.__code__ is code
    assert entries_on(helper) == before
