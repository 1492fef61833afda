"""OutlineRegions: one call in the place of code that occurs twice, and remarks where it must stay as it is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fxshard.cost.bucket_sizes import MIB
from fxshard.ir import collectives, regions
from fxshard.ir.history import PassResult
from fxshard.ir.text import graph_text
from fxshard.passes.bind_markers import BindMarkers
from fxshard.passes.outline_regions import OutlineRegions
from fxshard.passes.pipeline import default
from tests import graphs
from tests.graphs import Layers, Residual, ResidualLayers, assert_changes_nothing, assert_golden, layers_of
from tests.nodes import regions_called
from tests.steps import assert_same_step, reference_step, step


def outlined(module: nn.Module, **kwargs: Any) -> PassResult:
    """Dynamo's graph of a model with layers, after the pass."""
    traced = graphs.trace(module, units=layers_of, pipeline=default(lower="eager"), **kwargs)
    return traced.history.stages["dynamo"]["outline_regions"]


def layers(*made: nn.Module) -> Layers:
    model = Layers(0)
    model.layers = nn.ModuleList(made)
    return model


class Then(Residual):
    """A residual layer, and something after it."""

    def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(super().forward(x))


def refusal(then: Callable[[Tensor], Tensor]) -> str:
    """Why layers that end so are left alone; it names the first node of one."""
    result = outlined(layers(*(Then(then) for _ in range(3))))
    assert not result.changed
    return result.declined[-1].why


def test_calls_code_that_occurs_twice() -> None:
    result = graphs.regions().history.stages["dynamo"]["outline_regions"]
    assert_expected_inline(
        str(result),
        """\
%shard_layers_0: f32[10] = input  # flat of layers.0
%l_x_: f32[2, 4] = input
%shard_layers_1: f32[10] = input  # flat of layers.1
%shard_layers_2: f32[10] = input  # flat of layers.2
# layers.0
%parameter: f32[4, 4] = fxshard.unshard(%shard_layers_0, 'layers.0#0@0', 0, [4, 4], f32)  # param=layers.0.weight
%matmul: f32[2, 4] = matmul(%l_x_, %parameter)
%parameter_1: f32[4] = fxshard.unshard(%shard_layers_0, 'layers.0#0@0', 1, [4], f32)  # param=layers.0.bias
%add: f32[2, 4] = add(%matmul, %parameter_1)
%tanh: f32[2, 4] = tanh(%add)
%x: f32[2, 4] = add(%tanh, %l_x_)
# layers.1
%parameter_2: f32[4, 4] = fxshard.unshard(%shard_layers_1, 'layers.1#0@0', 0, [4, 4], f32)  # param=layers.1.weight
%parameter_3: f32[4] = fxshard.unshard(%shard_layers_1, 'layers.1#0@0', 1, [4], f32)  # param=layers.1.bias
%region_default: (f32[2, 4]) = fxshard.region([%x, %parameter_2, %parameter_3], 'Residual', 0)
%getitem: f32[2, 4] = getitem(%region_default, 0)
# layers.2
%parameter_4: f32[4, 4] = fxshard.unshard(%shard_layers_2, 'layers.2#0@0', 0, [4, 4], f32)  # param=layers.2.weight
%parameter_5: f32[4] = fxshard.unshard(%shard_layers_2, 'layers.2#0@0', 1, [4], f32)  # param=layers.2.bias
%region_default_1: (f32[2, 4]) = fxshard.region([%getitem, %parameter_4, %parameter_5], 'Residual', 1)
%getitem_1: f32[2, 4] = getitem(%region_default_1, 0)
return %getitem_1""",
    )


def test_gives_equal_code_the_same_name_in_every_compilation() -> None:
    assert regions_called(outlined(ResidualLayers()).graph) == regions_called(outlined(ResidualLayers()).graph)


class SummedBehind(Residual):
    """A residual layer whose result is summed over the ranks, and then scaled by code of several nodes."""

    def forward(self, x: Tensor) -> Tensor:
        summed: Tensor = funcol.all_reduce(super().forward(x), "sum", list(range(dist.get_world_size())))
        return torch.tanh(torch.sin(summed) + torch.cos(summed)) + summed


class Checkpointed(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def test_ends_a_region_before_a_collective_of_the_models_own_and_begins_another_behind_it() -> None:
    result = outlined(layers(*(SummedBehind() for _ in range(3))))
    names = regions_called(result.graph)
    behind, before, *rest = (name.partition(":")[0] for name in names)  # the first has no gradient to pass on
    assert behind != before
    assert rest == [behind, before, behind]
    assert len([node for node in result.graph.nodes if "c10d" in str(node.target)]) == 6  # three launches, three waits


def test_leaves_a_checkpointed_block_with_a_collective_alone() -> None:
    result = outlined(Checkpointed(3, SummedBehind))
    assert not result.changed
    assert result.declined[-1].why == "it launches a collective"


def test_tells_constants_apart() -> None:
    first, second = (lambda x: x * 2), (lambda x: x * 3)
    names = regions_called(outlined(layers(*map(Then, (first, first, second, first, second, first)))).graph)
    assert len(names) == 5
    assert len(set(names)) == 2


def test_tells_frozen_layers_apart() -> None:
    model = ResidualLayers(6)
    for layer in model.layers[2:4]:
        layer.requires_grad_(False)
    names = regions_called(outlined(model).graph)
    assert [names.count(name) for name in names] == [3, 2, 2, 3, 3]


def test_leaves_what_occurs_once_alone() -> None:
    assert not regions_called(outlined(ResidualLayers(2)).graph)


def test_leaves_a_result_that_is_a_view_alone() -> None:
    why = refusal(lambda x: x.t().t())
    assert_expected_inline(why, """its code occurs 2 times, but a result shares memory with another tensor""")


class Writes(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.add_(1))


def test_leaves_what_writes_to_its_input_alone() -> None:
    result = outlined(layers(*(Writes() for _ in range(3))))
    assert not result.changed
    assert_expected_inline(result.declined[-1].why, """what it reads or gives is written to elsewhere""")


class OfStatistics(Residual):
    """Reads statistics that another module takes of its batches."""

    def __init__(self, statistics: nn.BatchNorm1d) -> None:
        super().__init__()
        self.statistics = [statistics]  # of the model's

    def forward(self, x: Tensor) -> Tensor:
        mean = self.statistics[0].running_mean
        assert mean is not None
        return super().forward(x * (1 + mean))


class TakesStatistics(ResidualLayers):
    """Normalizes between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(graphs.WIDTH)
        self.layers = nn.ModuleList(OfStatistics(self.norm) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.norm(layer(x))
        return x


def test_leaves_what_reads_statistics_of_a_norm_alone() -> None:
    result = outlined(TakesStatistics())
    assert not result.changed
    assert_expected_inline(result.declined[-1].why, """what it reads or gives is written to elsewhere""")


@torch.library.custom_op("fxshard_tests::count", mutates_args=("counts",))
def count(counts: Tensor) -> None:
    """Write to what it is given, as an op of a user's library does."""
    counts.add_(1)


class OfCounts(Residual):
    """Takes counts."""

    def forward(self, x: Tensor, counts: Tensor | None = None) -> Tensor:
        return super().forward(x if counts is None else x + counts)


class CountsInside(ResidualLayers):
    """Gives its layers what an op of a user's library writes to in between."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(OfCounts() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        counts = torch.ones_like(x)
        for layer in self.layers:
            x = layer(x, counts)
            torch.ops.fxshard_tests.count(counts)
        return x


def test_leaves_what_reads_a_tensor_that_an_op_writes_to_alone() -> None:
    assert not outlined(CountsInside()).changed


class BehindAnAssignment(ResidualLayers):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x[:, 0] = 0
        return super().forward(x + 1)


def test_an_assignment_decides_nothing() -> None:
    assert outlined(BehindAnAssignment()).changed


class Within(ResidualLayers):
    def __init__(self, context: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__()
        self.context = context

    def forward(self, x: Tensor) -> Tensor:
        with self.context():
            return super().forward(x)


@pytest.mark.parametrize(
    "context",
    [partial(torch.autocast, "cpu", torch.bfloat16), partial(sdpa_kernel, SDPBackend.MATH)],
    ids=["autocast", "attention"],
)
def test_leaves_what_stands_inside_of_a_context_alone(context: Callable[[], AbstractContextManager[None]]) -> None:
    result = outlined(Within(context))
    assert not result.changed
    assert "which may decide what it computes" in result.declined[-1].why


class After(Within):
    """Runs its layers behind a context that has ended."""

    def forward(self, x: Tensor) -> Tensor:
        with self.context():
            factor = torch.cos(x).mean()
        return ResidualLayers.forward(self, x) * factor


@pytest.mark.parametrize(
    "context",
    [torch.no_grad, torch.enable_grad, partial(torch.autocast, "cpu", torch.bfloat16)],
    ids=["no_grad", "enable_grad", "autocast"],
)
@pytest.mark.parametrize("train", [True, False])
def test_a_context_that_has_ended_decides_nothing(
    context: Callable[[], AbstractContextManager[None]], train: bool
) -> None:
    assert outlined(After(context), train=train).changed


class DrawsTwice(nn.Module):
    """Adds noise of two draws to the same values, in code of its own that reads no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def noisy(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(nn.functional.gelu(x) * 1.5 + 0.1, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.layers
        x = first(x)
        left, right = second(self.noisy(x)), second(self.noisy(x))
        return left - right


def test_calls_that_draw_random_numbers_are_never_one() -> None:
    inner = DrawsTwice()
    model = nn.Sequential(inner)
    traced = graphs.trace(model, units=lambda _: [*inner.layers, inner, model], pipeline=default(lower="eager"))
    assert len(regions_called(traced.history.stages["dynamo"]["outline_regions"].graph)) == 2
    assert len(regions_called(traced.history.stages["forward"]["captured"].graph)) == 2


class Scaled(Residual):
    """Its code depends on a number."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


class Scaled_1(Residual):  # as the second region of the other class would be called
    """Has a name that a number makes of another."""


def test_no_two_regions_have_one_name() -> None:
    model = layers(Residual(), Scaled(2.0), Scaled(2.0), Scaled(3.0), Scaled(3.0), Scaled_1(), Scaled_1())
    traced = graphs.trace(model, units=layers_of, pipeline=default(lower="eager"))
    called = regions_called(traced.history.stages["dynamo"]["outline_regions"].graph)
    names = {name.partition(":")[0] for name in called}
    assert names == {"Scaled", "Scaled_1", "Scaled_1_1"}
    assert_same_step(step(traced), reference_step(traced))


class WritesToResults(ResidualLayers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x += 1.0
        return x


def test_leaves_what_is_written_to_elsewhere_alone() -> None:
    result = outlined(WritesToResults())
    assert not result.changed
    assert {remark.why for remark in result.declined} == {"what it reads or gives is written to elsewhere"}


def scaled(factor: float) -> Callable[[Tensor], Tensor]:
    def act(x: Tensor) -> Tensor:
        return x * factor

    return torch._dynamo.allow_in_graph(act)


def test_leaves_functions_alone_whose_names_say_nothing() -> None:
    why = refusal(scaled(2.0))
    assert why.startswith("nothing tells what ")
    assert why.endswith("act computes")


def test_leaves_tensors_of_constants_alone() -> None:
    why = refusal(lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert why == "its code occurs 2 times, but it makes tensors of constants"


def test_ends_a_region_before_activation_checkpointing() -> None:
    then = Then(lambda x: checkpoint(torch.tanh, x, use_reentrant=False))
    result = outlined(layers(*(then if i == 0 else Then(then.then) for i in range(3))))
    assert len(regions_called(result.graph)) == 2
    assert sum("tag_activation_checkpoint" in str(node.target) for node in result.graph.nodes) == 3


def test_calls_layers_under_activation_checkpointing() -> None:
    text = str(outlined(Checkpointed(3, Residual))).replace("_dict_fxshard", "_fxshard")  # which torch 2.11 leaves out
    assert_golden(text, "outline_regions_checkpointed")


def test_computes_again_inside_of_the_region_what_checkpointing_does_not_keep() -> None:
    pipeline = default(lower="eager", regions="auto")
    history = graphs.trace(Checkpointed(3, Residual), units=layers_of, pipeline=pipeline).history
    (code,) = regions.codes_in(history.last("backward").graph)
    assert "aten.tanh(" in graph_text(code.graph)
    without = graphs.regions().history.last("backward").graph
    (plain,) = regions.codes_in(without)
    assert "aten.tanh(" not in graph_text(plain.graph)


def nothing(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


def everything(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    """A policy that keeps what it can."""
    return CheckpointPolicy.MUST_SAVE


class Selected(ResidualLayers):
    """Asks a policy what to keep, another one in the last layer."""

    def __init__(self, last: Callable[..., CheckpointPolicy]) -> None:
        super().__init__(4)
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            policy = partial(create_selective_checkpoint_contexts, self.last if i == 3 else nothing)
            x = checkpoint(layer, x, use_reentrant=False, context_fn=policy)
        return x


def test_calls_layers_under_one_policy_of_selective_checkpointing() -> None:
    assert str(outlined(Selected(last=nothing))).count("fxshard.region") == 3  # the first reads what needs no gradient
    assert str(outlined(Selected(last=everything))).count("fxshard.region") == 2


def test_asks_the_policy_what_to_keep() -> None:
    for policy, recomputed in ((nothing, 1), (everything, 0)):
        history = graphs.trace(EveryLayerUnder(policy), units=layers_of, pipeline=default(lower="eager")).history
        (code,) = regions.codes_in(history.last("backward").graph)
        assert graph_text(code.graph).count("aten.tanh(") == recomputed


class EveryLayerUnder(ResidualLayers):
    """Makes a policy of its own for each layer, of one text."""

    def __init__(self, decide: Callable[..., CheckpointPolicy]) -> None:
        super().__init__()
        self.decide = decide

    def forward(self, x: Tensor) -> Tensor:
        decide = self.decide
        for layer in self.layers:
            policy = partial(create_selective_checkpoint_contexts, lambda *args, **kwargs: decide(*args, **kwargs))
            x = checkpoint(layer, x, use_reentrant=False, context_fn=policy)
        return x


class TwoProducts(graphs.Layer):
    """A layer with a second matrix, which is read last."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Parameter(torch.randn(graphs.WIDTH, graphs.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(super().forward(x)) + x
        return torch.tanh(y @ self.last) * y + x


def cut(module: nn.Module) -> graphs.Traced:
    """The same with launches of at most a matrix and a half."""
    pipeline = default(lower="eager", bucket=6 * graphs.WIDTH**2 / MIB)
    return graphs.trace(module, units=layers_of, pipeline=pipeline)


def test_cuts_a_region_where_a_launch_of_its_own_brings_the_next_parameter() -> None:
    traced = cut(layers(*(TwoProducts() for _ in range(3))))
    called = regions_called(traced.history.stages["dynamo"]["outline_regions"].graph)
    assert [name.partition(":")[0] for name in called] == ["TwoProducts", "TwoProducts_1"] * 2
    assert_same_step(step(traced), reference_step(traced))


def test_reads_what_each_launch_brings_right_before_its_own_region() -> None:
    graph = cut(layers(*(TwoProducts() for _ in range(3)))).history.last("forward").graph
    seen = [node for node in graph.nodes if regions.called_by(node) or collectives.is_wait(node)]
    text = " ".join("call" if regions.called_by(node) else "wait" for node in seen)
    assert text.endswith("wait call wait call wait call wait call")


def test_does_not_cut_off_a_few_nodes() -> None:
    result = cut(ResidualLayers()).history.stages["dynamo"]["outline_regions"]
    assert str(result) == str(graphs.regions().history.stages["dynamo"]["outline_regions"])


def test_says_that_nothing_can_trace_a_region() -> None:
    gm, ctx = graphs.regions().at("dynamo", after=BindMarkers)
    assert_changes_nothing(OutlineRegions(), gm, ctx)
    assert [remark.why for remark in ctx.declined] == ["its code occurs 2 times, but nothing here can trace it"]
