"""One graph or blocks: what `regional="auto"` chooses, and that all ranks choose the same."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxshard import explain, explanation_of, fully_shard, hardware
from fxshard.compile.backend import frames_of
from fxshard.cost.blocks import transfers_per_compute
from fxshard.errors import ConfigError
from fxshard.ir.plan import ParameterSpec, UnitPlan, lay_out
from fxshard.options import Options
from fxshard.sharding import blocks
from fxshard.sharding.blocks import HAS_LIMIT, MIN_BLOCKS
from fxshard.testing import emulated_link
from tests.models import FeedForward
from tests.ranks import group_folder, two_ranks

pytestmark = pytest.mark.skipif(not HAS_LIMIT, reason="torch 2.11 has one limit of graphs for all blocks: one graph")

IDS = torch.arange(600).reshape(2, 300) % 10


@pytest.fixture
def two_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks to be compiled one by one: what is chosen does not depend on how many there are, beyond the limit."""
    monkeypatch.setattr(blocks, "MIN_BLOCKS", 2)


two_blocks_are_enough = pytest.mark.usefixtures("two_are_enough")


class Blocks(nn.Module):
    """Blocks that are alike, on token ids or on embeddings."""

    def __init__(self, num_blocks: int = 2, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, width)
        self.blocks = nn.ModuleList(FeedForward(width, 16) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.is_floating_point() else self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x


def link(bytes_per_s: float, folder: Path, name: str = "gpu") -> str:
    """Write what a GPU, as fast as a CPU, can do on such a link without latencies, and return the path."""
    free = dataclasses.replace(hardware.load("cpu"), link_latency=0.0, launch_overhead=0.0)
    spec = dataclasses.replace(free, name=name, link_bandwidth=bytes_per_s)
    path = folder / f"{name}-{bytes_per_s}.json"
    path.write_text(spec.to_json())
    return str(path)


def is_by_block(model: nn.Module, x: Tensor, *, whole_call: bool = False, **options: Any) -> bool:
    """Call the model, and return whether each graph has one unit."""
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="fxshard", options={"lower": "eager", **options}, fullgraph=whole_call)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), compiled(x))
    return {len(frame.plan.units) for frame in frames_of(model)} == {1}


def shard(model: Blocks) -> Blocks:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def test_counts_products_and_launches() -> None:
    spec = dataclasses.replace(
        hardware.load("cpu"), peak_flops={"f32": 1e9}, gemm_efficiency=(), link_bandwidth=1e6, link_latency=1e-3
    )
    spec = dataclasses.replace(spec, launch_overhead=0.0, hop_latency=0.0, ranks_per_node=0)
    weights = [ParameterSpec(fqn=name, shape=shape, dtype=torch.float32, trainable=True) for name, shape in SHAPES]
    unit = UnitPlan(fqn="block", shards=lay_out(weights, 2), world_size=2, group="0")
    compute = 6 * (64 * 32) * 100 / 1e9  # the bias costs nothing
    gather = 1e-3 + (64 * 32 + 64) * 4 / 2 / 1e6
    assert transfers_per_compute([unit], 100, spec) == pytest.approx(3 * gather / compute)
    kept = dataclasses.replace(unit, reshard_after_forward=False, reduce_dtype=torch.bfloat16)
    reduction = 1e-3 + (64 * 32 + 64) * 2 / 2 / 1e6
    assert transfers_per_compute([kept], 100, spec) == pytest.approx((gather + reduction) / compute)
    twice = dataclasses.replace(unit, replicas=2, replicate_group="1")
    average = 1e-3 + (64 * 32 + 64) * 4 / 2 / 1e6  # of a shard, there and back
    assert transfers_per_compute([twice], 100, spec) == pytest.approx((3 * gather + average) / compute)
    assert transfers_per_compute([unit], 0, spec) == float("inf")
    assert transfers_per_compute([dataclasses.replace(unit, world_size=1)], 100, spec) == 0


SHAPES = [("weight", (64, 32)), ("bias", (64,))]


@two_blocks_are_enough
@pytest.mark.parametrize("one_line", [False, True])
def test_chooses_blocks_where_they_hide_their_launches(one_line: bool, tmp_path: Path) -> None:
    def model(num_blocks: int = 2) -> nn.Module:
        return Blocks(num_blocks) if one_line else shard(Blocks(num_blocks))

    fast, slow = link(1e15, tmp_path), link(1e6, tmp_path)
    with emulated_link(2):
        assert is_by_block(model(), IDS, hardware=fast)
        assert not is_by_block(model(), IDS, hardware=slow)
        assert not is_by_block(model(), IDS, hardware=link(1e15, tmp_path, "cpu"))
        assert not is_by_block(model(1), IDS, hardware=fast)
        assert not is_by_block(model(), IDS, hardware=fast, regional=False)
        assert is_by_block(model(), IDS, hardware=slow, regional=True)


@two_blocks_are_enough
def test_leaves_one_graph_where_the_call_or_an_option_says_so(tmp_path: Path) -> None:
    fast = link(1e15, tmp_path)
    with emulated_link(2):
        assert is_by_block(shard(Blocks()), torch.randn(2, 300, 8), hardware=fast)
        assert not is_by_block(shard(Blocks()), torch.randn(600, 8), hardware=fast)  # nothing says how many tokens
        assert not is_by_block(shard(Blocks()), IDS, hardware=fast, whole_call=True)
        hooked, caching = shard(Blocks()), cast(Any, shard(Blocks()))
        hooked.get_submodule("blocks.0.up").register_forward_hook(lambda *_: None)
        caching.config = SimpleNamespace(use_cache=True)  # as of transformers
        assert not is_by_block(hooked, IDS, hardware=fast)
        assert not is_by_block(caching, IDS, hardware=fast)
        for option in ({"bucket": "unit"}, {"memory_budget_gib": 1.0}, {"passes": lambda pipeline: pipeline}):
            assert not is_by_block(shard(Blocks()), IDS, hardware=fast, **option)


@two_blocks_are_enough
def test_leaves_one_graph_on_torch_2_11(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "HAS_LIMIT", False)
    with emulated_link(2):
        assert not is_by_block(shard(Blocks()), IDS, hardware=link(1e15, tmp_path))


@pytest.mark.parametrize("value", [1, "yes", None])
def test_refuses_another_kind_of_value(value: object) -> None:
    with pytest.raises(ConfigError, match='regional must be True, False or "auto"'):
        Options(regional=cast(Any, value))


def test_so_many_blocks_are_enough(tmp_path: Path) -> None:
    fast = link(1e15, tmp_path)
    with emulated_link(2):
        assert is_by_block(shard(Blocks(MIN_BLOCKS)), IDS, hardware=fast)
        assert not is_by_block(shard(Blocks(MIN_BLOCKS - 1)), IDS, hardware=fast)


@two_blocks_are_enough
def test_keeps_what_the_first_call_chose(tmp_path: Path) -> None:
    fast = link(1e9, tmp_path)
    with emulated_link(2):
        model = shard(Blocks(width=16))
        assert is_by_block(model, IDS.repeat(50, 1), hardware=fast)
        assert is_by_block(model, IDS[:, :1], hardware=fast)
        assert not is_by_block(shard(Blocks(width=16)), IDS[:, :1], hardware=fast)


@two_blocks_are_enough
def test_explain_shows_what_would_run_and_why(tmp_path: Path) -> None:
    def explained(x: Tensor = IDS, num_blocks: int = 2, **options: Any) -> tuple[bool, str]:
        options = {"lower": "eager", "hardware": link(1e15, tmp_path), **options}
        made = explain(Blocks(num_blocks), x, world_size=2, options=options)
        assert not made.choice or str(made.choice) in repr(made).splitlines()
        return {len(frame.plan.units) for frame in made.frames} == {1}, str(made.choice)

    slow, cpu = link(1e6, tmp_path), link(1e15, tmp_path, "cpu")
    took = "the launches of a block take {} of its compute for 600 tokens on gpu (limit 0.25)"
    found = explained(hardware=slow)[1]
    assert explained() == (True, "block by block: " + took.format("0.00"))
    assert explained(hardware=slow) == (False, found)
    assert re.sub(r"[\d.]+", "{}", found, count=1) == f"one graph: {took}"
    assert explained(hardware=cpu) == (False, "one graph: on a CPU it is faster")
    assert explained(num_blocks=1) == (False, "one graph: fewer than 2 units below the root are alike")
    assert explained(prefetch=1, bucket="unit") == (False, "one graph: bucket, prefetch was set, which is of one graph")
    assert explained(torch.randn(600, 8)) == (False, "one graph: the arguments do not tell how many tokens there are")
    assert explained(regional=True) == (True, "None")


@pytest.mark.parametrize(
    ("tensors", "found"),
    [
        ((torch.ones(2, 7), torch.arange(14).reshape(2, 7)), 14),  # a mask of floats counts nothing
        ((torch.ones(2, 7, 8), torch.arange(2)), 14),  # embeddings and a time step of diffusion
        ((torch.ones(2, 0, 0), torch.arange(5)), 5),  # a placeholder; tokens that were packed
        ((torch.ones(2, 3, 8, 8),), 0),
        ((torch.ones(7, 7, dtype=torch.complex64), torch.ones(7, 7, dtype=torch.bool)), 0),
        ((torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged),), 0),
        ((), 0),
    ],
)
def test_counts_the_tokens_of_a_call(tensors: tuple[Tensor, ...], found: int) -> None:
    assert vars(blocks)["_tokens"]({"x": list(tensors), "other": None}) == found


def test_explain_of_a_function_around_a_model_is_refused_as_the_run_is() -> None:
    with emulated_link(2), pytest.raises(ConfigError, match="regional=True is for a model, but a function"):
        explain(nn.Sequential(shard(Blocks())), IDS, options={"regional": True})


@two_blocks_are_enough
def test_what_was_chosen_is_kept_and_told(tmp_path: Path) -> None:
    fast, slow = link(1e15, tmp_path), link(1e6, tmp_path)
    with emulated_link(2):
        model = shard(Blocks())
        assert is_by_block(model, IDS, hardware=fast)
        chosen = explanation_of(model).choice
        assert chosen is not None
        assert chosen.by_block
        assert explain(model, IDS, options={"lower": "eager", "hardware": slow}).choice == chosen
        with pytest.raises(Exception, match="another backend"):
            torch.compile(model, backend="aot_eager")(IDS)
        assert not is_by_block(model, IDS, hardware=fast, regional=False)
        assert explanation_of(model).choice is None
        is_by_block(model, IDS[:, :1], hardware=slow)
        assert explanation_of(model).choice == chosen


@two_ranks
@pytest.mark.parametrize("one_line", [False, True])
def test_ranks_with_unlike_batches_choose_the_same(one_line: bool) -> None:
    """By itself rank 0 would choose one graph, and rank 1 blocks."""
    mine = IDS[:, :1] if dist.get_rank() == 0 else IDS.repeat(50, 1)
    model = Blocks(MIN_BLOCKS, width=16)
    found = is_by_block(model if one_line else shard(model), mine, hardware=link(1e9, group_folder()))
    both: list[Any] = [None, None]
    dist.all_gather_object(both, found)
    assert both[0] == both[1]


@two_ranks
def test_hooks_on_one_rank_make_no_choice_of_its_own() -> None:
    model = shard(Blocks(MIN_BLOCKS))
    if dist.get_rank() == 0:
        model.get_submodule("blocks.0.up").register_forward_hook(lambda *_: None)
    found = is_by_block(model, IDS, hardware=link(1e15, group_folder()))
    both: list[Any] = [None, None]
    dist.all_gather_object(both, found)
    assert both[0] == both[1]
