"""Models that are compiled block by block by one option: the same numbers, and one graph for all blocks."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fxshard import explain, fully_shard, no_sync
from fxshard.compile.backend import frames_of
from fxshard.errors import ConfigError, UnsupportedGraph
from fxshard.sharding.blocks import HAS_LIMIT
from fxshard.sharding.sharded_module import states_under
from fxshard.testing import emulated_link
from tests.fake_ranks import fake_ranks
from tests.models import Doing, FeedForward
from tests.numerics.harness import (
    EAGER,
    FSDP2,
    UNSHARDED,
    Prepare,
    Tools,
    adopted,
    blocks_of,
    compare,
    full,
    fxshard_system,
    only_compile,
    shard_and_compile,
    shard_blocks,
    shard_blocks_as_one_unit,
    sharded,
    train,
)
from tests.numerics.scenarios import CHECKPOINTED, LANGUAGE, REGRESSION, TIED
from tests.pairwise import slow
from tests.ranks import two_ranks

REGIONAL = {**EAGER, "regional": True}


EMULATED = pytest.mark.usefixtures("emulated_ranks")


@pytest.fixture
def emulated_ranks() -> Iterator[None]:
    torch._dynamo.reset()
    with emulated_link(2):
        yield


SCENARIOS = {"language": LANGUAGE, "tied": TIED, "checkpoints": CHECKPOINTED, "mlp": REGRESSION}


def in_place(model: nn.Module, tools: Tools) -> nn.Module:
    """Compile by `model.compile()`."""
    shard_blocks(model, tools)
    tools.compile_in_place(model)
    return model


@two_ranks
@pytest.mark.parametrize(
    ("name", "prepare"),
    [
        row if row in (("mlp", shard_and_compile), ("language", only_compile)) else slow(*row)
        for row in itertools.product(
            SCENARIOS, (shard_and_compile, only_compile, in_place, adopted, shard_blocks_as_one_unit)
        )
    ],
)
def test_trains_as_fsdp2_and_unsharded(name: str, prepare: Prepare) -> None:
    """To the bit as FSDP2, but where a weight is tied: its two gradients are added in another order."""
    scenario = replace(SCENARIOS[name], prepare=prepare)
    ours = train(scenario, fxshard_system(dtype=torch.float64, regional=True))
    rtol, atol = (1e-9, 1e-11) if name == "tied" else (0.0, 0.0)
    compare(ours, train(scenario, replace(FSDP2, dtype=torch.float64)), rtol=rtol, atol=atol)
    compare(ours, train(scenario, UNSHARDED), rtol=1e-9, atol=1e-11)


class Deep(nn.Module):
    """Blocks of which all but the last are alike, between an embedding and a head."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList([*(FeedForward(8, 16) for _ in range(num_blocks)), FeedForward(8, 12)])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * 2
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class InARow(Deep):
    """The same as one call of a Sequential."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(nn.Sequential(*self.blocks)(self.embedding(tokens) * 2)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Deep, slow(InARow)])
def test_blocks_that_are_alike_share_one_graph(kind: Callable[[int], Deep]) -> None:
    graphs = []
    for num_blocks in (2, 9):
        torch._dynamo.reset()
        with emulated_link(2):
            model = sharded(kind(num_blocks))
            torch.compile(model, backend="fxshard", options=REGIONAL)(torch.arange(6)).sum().backward()
            graphs.append(sum("blocks.0" in frame.plan.units for frame in frames_of(model)))
            assert all(len(frame.plan.units) == 1 for frame in frames_of(model))
    assert graphs == [1, 1]


class Numbered(FeedForward):
    """A block that reads its own number, as one of transformers with a cache of keys and values does."""

    number: int = 0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.number)


@EMULATED
@pytest.mark.slow
@pytest.mark.skipif(not HAS_LIMIT, reason="torch 2.11 has one limit of graphs for all blocks")
def test_blocks_that_read_their_own_number_have_a_graph_each() -> None:
    """Also more of them than Dynamo compiles of one function."""
    model, tokens = Deep(0), torch.arange(6)
    model.blocks = nn.ModuleList(Numbered(8, 16) for _ in range(10))
    for i, block in enumerate(blocks_of(model)):
        block.__dict__["number"] = i
        fully_shard(block)
    fully_shard(model)
    compiled = torch.compile(model, backend="fxshard", options=REGIONAL)
    with torch.no_grad():
        torch.testing.assert_close(compiled(tokens), model(tokens))
    assert sum(frame.plan.units.keys() != {""} for frame in frames_of(model)) == 10


@EMULATED
def test_a_call_that_is_not_compiled_runs_as_it_is() -> None:
    """`generate` of a model that `torch.compile` has wrapped calls the model itself."""
    model, tokens = sharded(Deep(2)), torch.arange(6)
    compiled = torch.compile(model, backend="fxshard", options=REGIONAL)
    with torch.no_grad():
        compiled(tokens)
        graphs = len(frames_of(model))
        model(tokens[:1])
        torch.testing.assert_close(model(tokens), compiled(tokens))
    assert len(frames_of(model)) == graphs


@EMULATED
def test_the_option_may_change(caplog: pytest.LogCaptureFixture) -> None:
    model, tokens = sharded(Deep(2)), torch.arange(6)
    counts = []
    for options in (REGIONAL, EAGER, REGIONAL):
        torch.compile(model, backend="fxshard", options=options)(tokens).sum().backward()
        gc.collect()
        counts.append({len(frame.plan.units) for frame in frames_of(model)})
    assert counts == [{1}, {1, 4}, {1, 4}]  # the graphs of the other choice stay
    assert "uncompiled" not in caplog.text  # the frame around the blocks runs as it is because the user wants it


@EMULATED
@pytest.mark.parametrize("kind", [Deep, slow(InARow)])
def test_one_line_has_one_graph_for_all_blocks(kind: Callable[[int], Deep]) -> None:
    model, tokens = kind(5), torch.arange(6)
    compiled = torch.compile(model, backend="fxshard", options=REGIONAL)
    for _ in range(2):
        compiled(tokens).sum().backward()
    assert [len(frame.plan.units) for frame in frames_of(model)].count(1) == len(frames_of(model))
    assert sum("blocks.0" in frame.plan.units for frame in frames_of(model)) == 1


class Breaking(nn.Linear):
    """A block that breaks its graph."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        torch._dynamo.graph_break()
        return x.relu()


@pytest.mark.parametrize("in_place", [False, True])
def test_fullgraph_holds_in_blocks(in_place: bool) -> None:
    torch._dynamo.reset()
    model: Any = nn.Sequential(*[Breaking(4, 4) for _ in range(2)])
    with fake_ranks(2):
        for part in (*model, model):
            fully_shard(part)
        if in_place:
            model.compile(backend="fxshard", options=REGIONAL, fullgraph=True)
        else:
            model = torch.compile(model, backend="fxshard", options=REGIONAL, fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
            model(torch.ones(2, 4))


class Broken(nn.Module):
    """Breaks its graph in a loop: Dynamo gives up on the frame, and captures those that it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Middle() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            torch._dynamo.graph_break()
            x = torch.cat([layer(x)] * 2, 1)
        return x


class Other(nn.Sequential):
    """Another class with the layout of its base."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2  # type: ignore[no-untyped-call]


class Kinds(nn.Module):
    """Four blocks: of two classes, or with a unit inside each."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        kinds = [nn.Sequential] * 4 if nested else [nn.Sequential, nn.Sequential, Other, Other]
        self.blocks = nn.ModuleList(kind(nn.Linear(4, 4), nn.Linear(4, 4)) for kind in kinds)
        self.head = nn.Linear(4, 4)
        if nested:
            with fake_ranks(4):
                for block in self.blocks:
                    fully_shard(cast(nn.Sequential, block)[0])
                    fully_shard(block)
                fully_shard(self)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Middle(nn.Module):
    """Reads a block's weight beside the block, and goes through a part by two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.also = self.blocks

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        for block in (*self.blocks, *self.also):
            y = block(y)
        linear = cast(nn.Linear, cast(nn.Sequential, self.blocks[0])[0])
        return y @ linear.weight[:2].t()


@EMULATED
@pytest.mark.parametrize("options", [EAGER, REGIONAL])
def test_two_models_of_one_class_run_as_unsharded_from_the_first_call(options: dict[str, Any]) -> None:
    for seed in range(2):
        torch.manual_seed(seed)
        model = Middle().double()
        with torch.no_grad():  # whatever emulated ranks gather is this one's rows
            for p in model.parameters():
                p.copy_(p[: len(p) // 2].repeat(2, *[1] * (p.dim() - 1)))
        plain, x = copy.deepcopy(model), torch.randn(3, 4, dtype=torch.float64)
        compiled: Any = torch.compile(model, backend="fxshard", options=options)
        for _ in range(2):
            torch.testing.assert_close(compiled(x), plain(x), rtol=1e-12, atol=1e-12)


@EMULATED
def test_a_hook_inside_one_of_several_blocks_that_are_alike_runs_in_that_one() -> None:
    calls = []
    model = sharded(Deep(3))
    cast(FeedForward, model.blocks[1]).up.register_forward_hook(lambda *_: calls.append(1))
    compiled: Any = torch.compile(model, backend="fxshard", options=REGIONAL)
    for step in range(1, 3):
        compiled(torch.arange(6)).sum().backward()
        assert len(calls) == step


@EMULATED
@pytest.mark.parametrize("options", [EAGER, REGIONAL])
def test_two_parts_may_share_blocks(options: dict[str, Any]) -> None:
    shared = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    body = {"body": shared}
    two = Doing(
        lambda m, x: m.left["body"](x) + m.right["body"](x), left=nn.ModuleDict(body), right=nn.ModuleDict(body)
    )

    compiled: Any = torch.compile(two, backend="fxshard", options=options)
    compiled(torch.ones(2, 4)).sum().backward()
    compiled(torch.ones(2, 4)).sum().backward()
    assert all(p.grad is not None for p in shared.parameters())


@EMULATED
@pytest.mark.slow
def test_more_kinds_of_blocks_than_dynamo_compiles_anew() -> None:
    blocks = [nn.Sequential(nn.Linear(4, 2 * i), nn.Linear(2 * i, 4)) for i in range(1, 6) for _ in range(2)]
    model: Any = torch.compile(nn.Sequential(*blocks), backend="fxshard", options=REGIONAL)
    with contextlib.ExitStack() as stack:
        if "recompile_limit" not in inspect.signature(torch.compile).parameters:
            stack.enter_context(pytest.raises(UnsupportedGraph, match=r"torch\._dynamo\.config\.recompile_limit"))
        for train in (True, False, True):
            model.train(train)
            with torch.set_grad_enabled(train):
                model(torch.ones(2, 4))


@EMULATED
@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_model_without_blocks_is_compiled_as_a_whole_and_told_so(
    is_sharded: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    for number in range(2):
        model = fully_shard(Plain()) if is_sharded else Plain()
        compiled: Any = torch.compile(model, backend="fxshard", options=REGIONAL)
        for _ in range(2):
            compiled(torch.ones(2, 4)).sum().backward()
        assert all(isinstance(p.grad, DTensor) for p in model.parameters())
        assert frames_of(model) or number  # models that are alike share a frame
    assert "Plain has none beside its root: it is compiled as a whole. Call fully_shard" in caplog.text


@EMULATED
def test_a_first_call_without_gradients_leaves_blocks_sharded_in_the_next_one() -> None:
    model = Middle().double()
    compiled: Any = torch.compile(model, backend="fxshard", options=REGIONAL)
    with torch.no_grad():
        for _ in range(2):
            compiled(torch.ones(2, 4, dtype=torch.float64))
    assert isinstance(cast(Any, model.blocks[0])[0].weight, DTensor)
    runs = [dict(state.compiled.runs) for _, state in states_under(model).values()]
    for _ in range(2):
        compiled(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    assert runs == [dict(state.compiled.runs) for _, state in states_under(model).values()]


@EMULATED
def test_a_graph_break_before_the_blocks_of_an_unsharded_model_is_named() -> None:
    compiled: Any = torch.compile(Broken(), backend="fxshard", options=REGIONAL)
    with pytest.raises(ConfigError, match=r"compiled Broken that was captured holds only its part Middle.*fully_shard"):
        compiled(torch.ones(2, 4))


def test_explain_counts_units_in_units_and_tells_kinds_of_one_layout_apart() -> None:
    found = explain(Kinds(nested=True), torch.ones(2, 4), world_size=4, options=REGIONAL)
    text = repr(found)
    assert "3 calls share frame 1: blocks.1 to blocks.3" in text  # the first one's input needs no gradient
    assert "no frame reads root:" in text
    found = explain(Kinds(nested=False), torch.ones(2, 4), world_size=4, options=REGIONAL)
    assert [frame.calls for frame in found.frames] == [
        (("blocks.0",),),  # its input needs no gradient
        (("blocks.1",),),
        (("blocks.2",), ("blocks.3",)),
    ]


class Rotary(nn.Module):
    """Two inputs of one length, which is saved twice where it is traced once more."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, places: Tensor, scale: float = 1.0) -> Tensor:
        y = self.layer(x).view(2, x.shape[1], 2, 4) * places[:, :, None] * scale
        return x + y.view(x.shape)


class Rotaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Rotary() for _ in range(2))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        places = torch.arange(4 * x.shape[1], dtype=x.dtype).view(1, -1, 4).sin()
        for block in self.blocks:
            x = block(x, places, scale)
        return x


def rotaries(options: dict[str, Any]) -> tuple[nn.Module, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = sharded(Rotaries().double())
    return model, torch.compile(model, backend="fxshard", options={**REGIONAL, **options})


@two_ranks
@pytest.mark.parametrize("options", [slow({}), {"resident_gib": 1}])
def test_microbatches_of_changing_lengths_add_up_as_unsharded(options: dict[str, Any]) -> None:
    model, compiled = rotaries(options)
    torch.manual_seed(0)
    plain = Rotaries().double()
    for step in range(3):
        for length in (6, 7, 5 + step):
            x = torch.randn(2, length, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(length))
            with no_sync(model) if length < 7 and length != 5 + step else contextlib.nullcontext():
                compiled(x).square().mean().backward()
            plain(x).square().mean().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(full(ours.grad), theirs.grad, rtol=1e-9, atol=1e-12)


@EMULATED
def test_a_float_that_changes_between_microbatches_is_refused_with_what_to_write() -> None:
    model, compiled = rotaries({})

    def train() -> None:
        for scale in (0.5, 0.25, 0.125):
            with no_sync(model):
                compiled(torch.ones(2, 6, 8, dtype=torch.float64), scale).sum().backward()

    with pytest.raises(UnsupportedGraph, match=r"Python float that changes.*torch\.tensor\(value\)"):
        train()


def test_explain_shows_blocks_that_are_alike_once() -> None:
    found = explain(Deep(3), torch.arange(6), world_size=4, options={"regional": True})
    assert [list(frame.plan.units) for frame in found.frames] == [["blocks.0"], ["blocks.3"]]
    text = repr(found)
    assert text.startswith("Explanation of Deep: 5 units, world size 4, 2 frames\n")
    assert "3 calls share frame 0: blocks.0 to blocks.2\nall 4 calls in a row: " in text
    assert "\nno frame reads root: 880 B are gathered where" in text
    assert found.calls == (0, 0, 0, 1)
    frames = [found.frames[number] for number in found.calls]
    alone = [frame.stats_of(frame.running(stage)).evaluate() for frame in frames for stage in frame.scheduled]
    assert found.step.seconds - found.step.exposed == pytest.approx(sum(float(at.compute_seconds) for at in alone))
    assert found.step.exposed > 0


@EMULATED
@pytest.mark.parametrize("is_sharded", [False, True])
def test_refuses_a_function_that_calls_the_model(is_sharded: bool) -> None:
    model = sharded(Deep(2)) if is_sharded else Deep(2)
    step = torch.compile(lambda tokens: model(tokens).sum(), backend="fxshard", options=REGIONAL)
    with pytest.raises(ConfigError, match=r"(?s)regional=True is for a model.*torch.compile\(model"):
        step(torch.arange(6))


class _Around:
    """Doubles what a module gives, around the hooks, as transformers' layers checkpoint theirs."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().__call__(*args, **kwargs)  # type: ignore[misc]


class _Doubling(_Around, FeedForward): ...


class _DoublingSequence(_Around, nn.Sequential): ...


@two_ranks
@pytest.mark.parametrize("cls", [nn.Sequential, _DoublingSequence])
def test_runs_what_a_class_has_around_its_call(cls: type[nn.Sequential]) -> None:
    torch.manual_seed(0)
    model = copy.deepcopy(plain := cls(*(_Doubling(8, 8) for _ in range(3))))
    for part in (*model, model):
        fully_shard(part)
    run = cast(Any, torch.compile)(model, backend="fxshard", options=REGIONAL)
    for x in torch.randn(2, 2, 8):
        torch.testing.assert_close(run(x), plain(x))


@EMULATED
def test_refuses_to_leave_out_what_a_class_has_around_its_call() -> None:
    model = fully_shard(_DoublingSequence(*(fully_shard(FeedForward(8, 8)) for _ in range(3))))
    model.compile(backend="fxshard", options=REGIONAL)
    with pytest.raises(ConfigError, match=r"_DoublingSequence has a __call__ of its own.*Use torch.compile"):
        model(torch.randn(2, 8))
