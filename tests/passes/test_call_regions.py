"""CallRegions: calls of a subgraph, or the region's own nodes where a tensor lies otherwise than it expects."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fxshard.compile import regions as compile_regions
from fxshard.ir import ops, regions
from fxshard.ir.plan import FramePlan
from fxshard.ir.regions import Region
from fxshard.options import Options
from fxshard.passes._base import PassContext
from fxshard.passes.call_regions import CallRegions
from fxshard.torch_private import FakeMode
from tests import graphs
from tests.graphs import assert_changes_nothing, assert_golden, run_pass


def traced(code: Callable[..., object], *inputs: Tensor, lower: str = "eager") -> Region | str:
    """The region of a function of fake tensors."""
    gm = fx.GraphModule(nn.Module(), fx.symbolic_trace(code).graph)
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
        node.meta["example_value"] = value
    return compile_regions.trace("Code", repr(gm.graph), gm, [False] * len(inputs), Options(lower=lower))


def double(x: Tensor) -> tuple[Tensor]:
    return (torch.sin(x.t()).t() * 2,)


def calling(region: Region, operand: Tensor) -> fx.GraphModule:
    """A graph that calls a region with one operand, and gives its first result."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = operand
    call = graph.call_function(ops.REGION, ([x], region.name, 0))
    call.meta["val"] = [result.meta["val"] for result in regions.results_of(region.forward)]
    first = graph.call_function(operator.getitem, (call, 0))
    first.meta["val"] = call.meta["val"][0]
    graph.output((first,))
    return fx.GraphModule(nn.Module(), graph)


CONTEXT = PassContext(plan=FramePlan(units={}, shard_inputs={}), kind="inference", verify=False)


def test_calls_a_subgraph() -> None:
    called = graphs.regions().history.stages["forward"]["call_regions"]
    assert_golden(str(called), "call_regions")


def test_the_region_is_one_subgraph_however_often_it_is_called() -> None:
    for kind in ("forward", "backward"):
        graph = graphs.regions().history.stages[kind]["call_regions"].graph
        calls = graph.find_nodes(op="call_function", target=regions.INVOKE)
        assert len(calls) == 2
        assert len({id(regions.code_of(call)) for call in calls}) == 1


def test_puts_the_nodes_in_line_where_strides_differ() -> None:
    with FakeMode() as mode:
        region = traced(double, torch.empty(2, 3))
        assert isinstance(region, Region)
        gm = calling(region, torch.empty(3, 2).t())
    assert mode is not None
    assert run_pass(CallRegions(), gm, CONTEXT)
    assert not gm.graph.find_nodes(op="get_attr")
    (remark,) = CONTEXT.notes
    assert "put in line: it reads other strides than Code_forward" in remark.why
    x = torch.randn(3, 2).t()
    assert torch.equal(gm(x)[0], double(x)[0])


def test_leaves_a_graph_without_regions_alone() -> None:
    assert_changes_nothing(CallRegions(), *graphs.two_layers().at("forward"))


def test_a_called_graph_computes_what_the_code_does() -> None:
    with FakeMode():
        region = traced(double, torch.empty(2, 3))
        assert isinstance(region, Region)
        gm = calling(region, torch.empty(2, 3))
    run_pass(CallRegions(), gm, CONTEXT)
    x = torch.randn(2, 3)
    assert torch.equal(gm(x)[0], double(x)[0])


@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_backward_takes_views_of_operands_again_and_saves_them_not(lower: str) -> None:
    with FakeMode():
        x, w = (torch.empty(4, 4, requires_grad=True) for _ in range(2))
        region = traced(lambda x, w: (torch.tanh(x @ w.t()),), x, w, lower=lower)
    assert isinstance(region, Region)
    assert region.num_results == len(regions.results_of(region.forward)) == 1  # tanh is a result and what is saved
    assert {source.kind for source in region.sources} == {"operand", "result", "gradient"}
    assert region.trained == (0, 1)


def handed_on(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor]:
    """Gradients of `x`: the result's own; of `y`: a view of it; of `z`: neither."""
    return (x + y.t() + torch.tanh(z),)


@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_returns_no_gradient_that_shares_memory_with_another_tensor(lower: str) -> None:
    with FakeMode():
        region = traced(handed_on, *(torch.empty(4, 4, requires_grad=True) for _ in range(3)), lower=lower)
    assert isinstance(region, Region)
    assert region.backward is not None
    assert region.trained == (1, 2)
    assert set(region.passed) == {0}
    assert regions.shared_results(region.backward) == []
    x, y, z = (torch.randn(4, 4, requires_grad=True) for _ in range(3))
    (made,) = ops.REGION([x, y, z], region.name, 0)[:1]
    gradient = torch.randn(4, 4)
    found = torch.autograd.grad(made, (x, y, z), gradient)
    expected = torch.autograd.grad(handed_on(x, y, z)[0], (x, y, z), gradient)
    torch.testing.assert_close(found, expected)


def test_finds_results_in_the_memory_of_others() -> None:
    def code(x: Tensor) -> tuple[Tensor, ...]:
        y = torch.ops.aten.sin.default(x)
        parts = torch.ops.aten.split.Tensor(y, 2)
        return y, torch.ops.aten.t.default(x), parts[1], torch.ops.aten.cos.default(y)

    gm = make_fx(code, tracing_mode="fake")(torch.empty(4, 4))
    assert regions.shared_results(gm) == [1, 2]


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (lambda x: (x.add_(1) * 2,), "it changes what it reads"),
        (lambda x: (x.t(),), "a result shares memory with another tensor"),
        (lambda x: (x.new_empty_strided((2, 3), (4, 1)),), "a result has gaps in memory"),
    ],
    ids=["writes", "view", "strides"],
)
def test_says_why_code_can_be_no_region(code: Callable[..., object], why: str) -> None:
    with FakeMode():
        assert traced(code, torch.empty(2, 3)) == why


def test_says_why_code_could_not_be_traced() -> None:
    def fails(x: Tensor) -> tuple[Tensor]:
        return (x @ x,)

    with FakeMode():
        why = traced(fails, torch.empty(2, 3))
    assert isinstance(why, str)
    assert why.startswith("it could not be traced by itself: ")


@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_a_bug_around_the_trace_is_no_reason(lower: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(compile_regions, "min_cut_rematerialization_partition")
    with FakeMode(), pytest.raises((NameError, RuntimeError), match="min_cut"):
        traced(double, torch.empty(2, 3, requires_grad=True), lower=lower)
