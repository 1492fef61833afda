"""A torch profiler shows launches and waits under the names of their units; the policy of a checkpoint sees none."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import _functional_collectives
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fxshard import fully_shard, torch_private
from fxshard.runtime import profiler_ranges
from fxshard.testing import EmulatedLink
from tests.models import Doing
from tests.numerics.harness import EAGER

Step = Callable[[], Tensor]


def two_layers() -> Any:
    """Two layers and a bias of the root, so three units."""
    layers, bias = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), nn.Parameter(torch.ones(8))
    return Doing(lambda m, x: m.layers[1](m.layers[0](x).relu()).relu() + m.bias, layers=layers, bias=bias)


def step_of(link: EmulatedLink, options: dict[str, Any] | None) -> Step:
    """A step that gives the gradients in one tensor; `None` leaves the model uncompiled."""
    torch.manual_seed(0)
    model = two_layers()
    for layer in model.layers:
        fully_shard(layer, mesh=link.mesh)
    fully_shard(model, mesh=link.mesh)
    run = model if options is None else torch.compile(model, backend="fxshard", options=options)
    x = torch.randn(4, 8)

    def step() -> Tensor:
        model.zero_grad()
        run(x).square().sum().backward()
        return torch.cat([cast(DTensor, p.grad).to_local().flatten() for p in model.parameters()])

    return step


def ranges_of(step: Callable[[], object]) -> Counter[str]:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    return Counter(
        event.name for event in profiler.events() if event.name.startswith("fxshard::") and "(" in event.name
    )


ONCE_PER_UNIT = Counter(
    {
        "fxshard::unshard(layers.0)": 1,
        "fxshard::unshard(layers.1)": 1,
        "fxshard::unshard(root)": 1,
        "fxshard::reduce(layers.0)": 1,
        "fxshard::reduce(layers.1)": 1,
        "fxshard::reduce(root)": 1,
        "fxshard::wait(layers.0)": 2,
        "fxshard::wait(layers.1)": 2,
        "fxshard::wait(root)": 2,
    }
)
# The first layer's weight is not needed for the gradient of its own input, which nobody wants.
GATHERED_AGAIN = Counter({"fxshard::unshard(layers.1)": 1, "fxshard::wait(layers.1)": 1})
# Weight and bias are gathered by one launch of two tensors, and each is waited for.
TWO_TENSORS = Counter({"fxshard::wait(layers.0)": 1, "fxshard::wait(layers.1)": 1})


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_a_compiled_step_names_each_launch_and_wait_of_each_unit(link: EmulatedLink, lowering: str) -> None:
    step = step_of(link, {"lower": lowering, "schedule": "fsdp2"})
    step()
    assert ranges_of(step) == ONCE_PER_UNIT + GATHERED_AGAIN + TWO_TENSORS


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_a_step_with_side_streams_names_the_same_launches(link: EmulatedLink, lowering: str) -> None:
    step = step_of(link, {"lower": lowering, "schedule": "fsdp2", "streams": "side"})
    step()
    found, expected = ranges_of(step), ONCE_PER_UNIT + GATHERED_AGAIN
    assert found.keys() == expected.keys()
    launches = {name for name in expected if "wait" not in name}
    assert {name: found[name] for name in launches} == {name: expected[name] for name in launches}


def test_a_step_without_compilation_names_them_too(link: EmulatedLink) -> None:
    step = step_of(link, None)
    step()
    assert ranges_of(step) == ONCE_PER_UNIT


def test_a_collective_of_the_users_code_gets_no_range(link: EmulatedLink) -> None:
    model = fully_shard(nn.Linear(8, 8), mesh=link.mesh)

    def step(x: Tensor) -> Tensor:
        everything: Tensor = _functional_collectives.all_gather_tensor(model(x), 0, (link.mesh, 0))
        return everything.sum()

    compiled = torch.compile(step, backend="fxshard", options=EAGER)
    with torch.no_grad():
        compiled(torch.ones(2, 8))
        found = ranges_of(lambda: compiled(torch.ones(2, 8)))
    assert found == Counter({"fxshard::unshard(root)": 1, "fxshard::wait(root)": 2})  # weight and bias


def test_a_graph_with_a_higher_order_op_runs_under_a_profiler(link: EmulatedLink) -> None:
    class Chooses(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return cast(Tensor, torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,)))

    compiled = torch.compile(fully_shard(Chooses(8, 8), mesh=link.mesh), backend="fxshard", options=EAGER)
    with torch.no_grad():
        compiled(torch.ones(2, 8))
        found = ranges_of(lambda: compiled(torch.ones(2, 8)))
    assert found == Counter({"fxshard::unshard(root)": 1, "fxshard::wait(root)": 2})


@pytest.mark.slow
def test_other_ops_stand_in_the_trace_once(link: EmulatedLink) -> None:
    step = step_of(link, {"lower": "eager"})
    step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    assert [event.name for event in profiler.events()].count("aten::addmm") == 2


@pytest.mark.parametrize("options", [None, {"lower": "eager"}, {"lower": "inductor"}], ids=str)
def test_a_profiler_changes_no_bit_of_the_gradients(link: EmulatedLink, options: dict[str, Any] | None) -> None:
    step = step_of(link, options)
    expected = step()
    with profile(activities=[ProfilerActivity.CPU]):
        assert torch.equal(step(), expected)
    assert torch.equal(step(), expected)


def test_without_a_profiler_no_op_is_looked_at() -> None:
    assert not torch_private.profiler_runs()
    with profiler_ranges.of_unit("layers.0") as entered:
        assert entered is None
    with profiler_ranges.of_graph(()) as entered:
        assert entered is None


def test_a_profiler_that_has_ended_leaves_nothing_on() -> None:
    with profile(activities=[ProfilerActivity.CPU]):
        assert torch_private.profiler_runs()
    assert not torch_private.profiler_runs()


class Gathers(nn.Linear):
    """A layer with a collective of its own."""

    group = ""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(y.detach(), 2, self.group)
        return y + cast(Tensor, torch.ops._c10d_functional.wait_tensor(gathered))[: len(y)]


def gathers(link: EmulatedLink, options: dict[str, Any] | None) -> nn.Module:
    """One, sharded; `None` leaves it uncompiled."""
    layer = fully_shard(Gathers(8, 8), mesh=link.mesh)
    layer.group = link.mesh.get_group().group_name
    if options is not None:
        layer.compile(backend="fxshard", options=options)
    return layer


def seen_by_policy(layer: nn.Module, profiled: bool = False) -> tuple[list[Any], list[Tensor]]:
    """What the policy of a checkpoint around the layer sees in a second step, and the gradients of both."""
    seen: list[Any] = []

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if not context.is_recompute:  # torch 2.11 asks again there
            seen.append(op)
        return CheckpointPolicy.MUST_SAVE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    grads = []
    for _ in range(2):
        seen.clear()
        x = torch.ones(2, 8, requires_grad=True)
        with profile(activities=[ProfilerActivity.CPU]) if profiled else nullcontext():
            loss = cast(Tensor, checkpoint(layer, x, use_reentrant=False, context_fn=contexts)).square().sum()
        loss.backward()
        grads.append(cast(Tensor, x.grad))
    return seen, grads


@pytest.mark.parametrize("options", [None, {"lower": "eager"}, {"lower": "eager", "streams": "side"}], ids=str)
def test_a_policy_sees_the_collectives_of_the_model_alone(link: EmulatedLink, options: dict[str, Any] | None) -> None:
    seen, _ = seen_by_policy(gathers(link, options))
    launches = [op.__name__ for op in seen if op.namespace in ("_c10d_functional", "fxshard")]
    assert launches == ["all_gather_into_tensor.default", "wait_tensor.default"]


@pytest.mark.parametrize("options", [None, {"lower": "eager"}], ids=str)
def test_a_forward_may_be_profiled_and_recomputed_without(link: EmulatedLink, options: dict[str, Any] | None) -> None:
    layer = gathers(link, options)
    (seen, grads), (seen_in_profile, profiled) = seen_by_policy(layer), seen_by_policy(layer, profiled=True)
    assert seen_in_profile == seen
    assert all(map(torch.equal, grads, profiled))
