"""`fxshard.bisect_numerics`: names a planted faulty pass and its node, and nothing where every pass is right."""

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh

from fxshard import BitDifference, ConfigError, UnsupportedGraph, bisect_numerics, fully_shard
from fxshard.inspect.bisect import _gap
from fxshard.ir import collectives
from fxshard.passes._base import GraphPass, PassContext, Property
from fxshard.passes.pipeline import Pipeline
from tests.graphs import WIDTH, Layer, TwoLayers, in_split
from tests.inspect.models import Broken, shard
from tests.models import Doing, matrix

aten = torch.ops.aten
X = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1))


# ---- passes


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatherEarly(GraphPass):
    """A correct one: every gather is launched as soon as its shard is there."""

    requires = frozenset({Property.COLLECTIVES})
    reorders_only = True

    def apply(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        for launch in collectives.unshard_launches(gm.graph):
            launch.all_input_nodes[-1].append(launch)
        return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class AddLater(GraphPass):
    """(a + b) + c becomes a + (b + c)."""

    requires = frozenset({Property.COLLECTIVES})
    reorders_only = True

    def apply(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        for outer in gm.graph.find_nodes(op="call_function", target=aten.add.Tensor):
            inner, c = outer.args
            if inner.target is aten.add.Tensor:
                a, b = inner.args
                with gm.graph.inserting_before(outer):
                    outer.args = (a, gm.graph.call_function(aten.add.Tensor, (b, c)))
                return True
        return False


@dataclasses.dataclass(frozen=True, kw_only=True)
class AddLaterOpenly(AddLater):
    """The same, but does not promise to leave the bits alone."""

    reorders_only = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwapGradients(GraphPass):
    """The first two gradients of one shape change places in the copy-in of their reduction."""

    requires = frozenset({Property.COLLECTIVES})
    reorders_only = True

    def apply(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        for concat in gm.graph.find_nodes(op="call_function", target=aten._chunk_cat.default):
            grads: Any = concat.args[0]
            first, *others = grads
            for i, other in enumerate(others):
                if other.meta["val"].shape == first.meta["val"].shape:
                    others[i] = first
                    concat.args = ([other, *others], *concat.args[1:])
                    return True
        return False


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwapResults(GraphPass):
    """The last two gradients change places among the results."""

    requires = frozenset({Property.COLLECTIVES})
    reorders_only = True

    def apply(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        if ctx.kind != "backward":
            return False
        output = gm.graph.output_node()
        results: Any = output.args[0]
        *others, first, second = results
        output.args = ((*others, second, first),)
        return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForgetGain(GraphPass):
    """x * gain becomes x * 1."""

    requires = frozenset({Property.COLLECTIVES})
    reorders_only = True

    def apply(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        for product in gm.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
            product.args = (product.args[0], 1)
        return ctx.kind == "forward"


def then(*passes: GraphPass, **options: Any) -> dict[str, Any]:
    """Options that run `passes` after the default ones."""
    return {"passes": in_split(*passes), "verify": False, **options}


# ---- models


class Sums(nn.Module):
    """Adds three terms."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(WIDTH))
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain + self.bias + x


class Everything(TwoLayers):
    """Dropout, a buffer that forward writes, a constant, and a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.offset = torch.ones(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(self.norm(self.layers[0](x) + self.offset))
        return self.layers[1](x) * torch.tensor([1.0, 2.0, 3.0, 4.0])


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def one_unit(mesh: DeviceMesh) -> nn.Module:
    model = TwoLayers()
    fully_shard(model, mesh=mesh)
    return model


# ---- what it finds


def test_names_the_pass_and_node_that_change_a_bit_in_forward() -> None:
    found = bisect_numerics(Sums(), X, options=then(GatherEarly(), AddLater()))
    assert found is not None
    assert (found.frame, found.stage, found.pass_name, found.node) == (0, "forward", "add_later", "%add_1")
    assert 0 < found.max_difference < 1e-5
    assert "-> %add_1: f32[2, 4] = aten.add.Tensor(%mul, %add" in found.window


def test_names_the_pass_and_node_that_change_a_bit_in_inference() -> None:
    with torch.no_grad():
        found = bisect_numerics(Sums(), X, options=then(AddLater()))
    assert found is not None
    assert (found.stage, found.pass_name, found.node) == ("inference", "add_later", "%add_1")


@pytest.mark.parametrize("world_size", [2, 4])
def test_names_the_pass_that_swaps_two_gradients(world_size: int) -> None:
    two_matrices = Doing(lambda m, x: (x @ m.up) @ m.down, up=matrix(WIDTH, WIDTH), down=matrix(WIDTH, WIDTH))
    found = bisect_numerics(two_matrices, X, world_size=world_size, options=then(SwapGradients(), GatherEarly()))
    assert found is not None
    assert (found.stage, found.pass_name, found.node) == ("backward", "swap_gradients", "%_chunk_cat")
    assert "-> %_chunk_cat" in found.window


def test_names_the_pass_that_swaps_two_gradients_of_a_sharded_model(mesh: DeviceMesh) -> None:
    found = bisect_numerics(one_unit(mesh), X, options=then(SwapGradients()))
    assert found is not None
    assert (found.stage, found.pass_name, found.node) == ("backward", "swap_gradients", "%_chunk_cat")


def test_names_a_result_where_all_nodes_are_right() -> None:
    found = bisect_numerics(TwoLayers(), X, options=then(SwapResults()))
    assert found is not None
    assert (found.stage, found.pass_name, found.node) == ("backward", "swap_results", "%reduced_layers_1")
    assert "-> return" in found.window


def test_finds_a_pass_that_runs_after_those_of_inductor() -> None:
    def change(pipeline: Pipeline) -> Pipeline:
        return dataclasses.replace(pipeline, last=(AddLater(),))

    options = {"passes": change, "verify": False, "lower": "inductor"}
    found = bisect_numerics(Sums(), X, options=options)
    assert found is not None
    assert (found.stage, found.pass_name) == ("forward_last", "add_later")


def test_finds_the_frame_after_a_graph_break() -> None:
    model = Broken()
    model.layers[1] = Sums()
    found = bisect_numerics(model, X, options=then(AddLater()))
    assert found is not None
    assert (found.frame, found.stage, found.pass_name) == (1, "forward", "add_later")


def test_speaks_in_a_sentence() -> None:
    found = BitDifference(
        frame=1, stage="backward", pass_name="prefetch", node="%mm", max_difference=0.5, window="-> %mm = ..."
    )
    assert str(found) == (
        "prefetch is the first pass to change a bit: in the backward graph of frame 1, %mm differs by up to 0.5.\n"
        "-> %mm = ..."
    )


def test_computes_with_the_values_of_the_model_and_its_input() -> None:
    model = Sums()
    found = bisect_numerics(model, X, options=then(ForgetGain()))
    assert found is not None
    assert found.node == "%mul"
    assert found.max_difference == ((X * model.gain).double() - X.double()).abs().max().item()


def test_gives_every_rank_its_own_rows_of_the_parameters(mesh: DeviceMesh) -> None:
    model = Sums()
    model.gain.data = torch.tensor([1.0, 1.0, 1.0, 5.0])  # only the last rank has rows that matter
    found = bisect_numerics(model, torch.ones(2, WIDTH), options=then(ForgetGain()))
    assert found is not None
    assert found.max_difference == 4.0
    fully_shard(model, mesh=mesh)  # of which this process, rank 0, has the first rows only
    assert bisect_numerics(model, torch.ones(2, WIDTH), options=then(ForgetGain())) is None


def test_gives_every_rank_inputs_of_its_own() -> None:
    class Inverse(Sums):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.reciprocal())

    model = Inverse()
    model.gain.data.fill_(4.0)
    found = bisect_numerics(model, torch.ones(2, WIDTH), options=then(ForgetGain()))
    assert found is not None
    assert found.max_difference == pytest.approx(3.0 / 0.75)  # of rank 1, whose input is 0.75


# ---- what it does not find


@pytest.mark.parametrize("model", [TwoLayers, Sums, Everything, Broken], ids=lambda model: model.__name__)
def test_finds_nothing_in_a_pass_that_only_reorders(model: Callable[[], nn.Module]) -> None:
    assert bisect_numerics(model(), X, options=then(GatherEarly())) is None


@pytest.mark.parametrize("model", [TwoLayers, Everything], ids=lambda model: model.__name__)
def test_finds_nothing_in_a_pass_that_only_reorders_after_those_of_inductor(model: Callable[[], nn.Module]) -> None:
    def change(pipeline: Pipeline) -> Pipeline:
        return dataclasses.replace(pipeline, last=(GatherEarly(),))

    options = {"passes": change, "verify": False, "lower": "inductor"}
    assert bisect_numerics(model(), X, options=options) is None


def test_finds_nothing_in_the_default_passes(mesh: DeviceMesh) -> None:
    assert bisect_numerics(TwoLayers(), X, options={"verify": False}) is None
    assert bisect_numerics(shard(TwoLayers(), mesh), X, options={"verify": False}, all_passes=True) is None


def test_holds_passes_that_promise_nothing_to_nothing_unless_asked() -> None:
    options = then(AddLaterOpenly())
    assert bisect_numerics(Sums(), X, options=options) is None
    found = bisect_numerics(Sums(), X, options=options, all_passes=True)
    assert found is not None
    assert found.pass_name == "add_later_openly"


# ---- what it leaves alone


def test_leaves_the_model_the_random_state_and_a_live_group_alone(mesh: DeviceMesh) -> None:
    model = Everything()
    before, state, group = copy.deepcopy(model.state_dict()), torch.get_rng_state(), dist.group.WORLD
    bisect_numerics(model, X, world_size=4, options=then(GatherEarly()))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert dist.group.WORLD is group
    assert dist.get_world_size() == 2


# ---- what it refuses


def test_refuses_a_model_without_parameters() -> None:
    with pytest.raises(ConfigError, match=r"no graph with sharded parameters|no parameters"):
        bisect_numerics(nn.ReLU(), X)


def test_refuses_a_branch_on_a_value() -> None:
    class Branching(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if x.sum().item() > 0 else -x)

    with pytest.raises(UnsupportedGraph, match="reads values of a tensor"):
        bisect_numerics(Branching(), X)


# ---- how it compares


def test_counts_the_bits_of_zeros_and_nans() -> None:
    zero, nan = torch.zeros(1), torch.full((1,), math.nan)
    assert _gap(zero, zero.clone()) is None
    assert _gap(nan, nan.clone()) is None
    assert _gap(zero, -zero) == 0
    assert _gap(nan, zero) == math.inf
    assert _gap(torch.zeros(1), torch.zeros(2)) == math.inf
    assert _gap(torch.tensor(1.0), torch.tensor(1.5)) == 0.5
