"""Code that one rank compiles and the others load, and what happens where that cannot be."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache
from torch.compiler._cache import CacheArtifactManager
from torch.distributed.device_mesh import DeviceMesh

import fxshard
from fxshard.compile import shared_code
from fxshard.compile.shared_code import SharedCode
from tests.fake_ranks import fake_ranks
from tests.numerics.harness import compile_module
from tests.ranks import two_ranks
from tests.watching import said_by


class Model(nn.Module):
    """Two layers without kernels of their own, which a cold cache would have the C++ compiler make.

    The store forgets nothing: tests take other numbers of `turns`.
    """

    def __init__(self, turns: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.turns = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2)), turns

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        for _ in range(self.turns):
            x = x.T
        return x


def losses_of(model: Model, mesh: DeviceMesh | None = None, compile_on: str = "one") -> list[float]:
    """Train two steps of two microbatches."""
    torch._dynamo.reset()
    counters.clear()
    for part in (*model.layers, model):
        fxshard.fully_shard(part, mesh=mesh)
    compiled: Any = compile_module(model, options={"compile_on": compile_on})
    losses = []
    for i in range(4):
        compiled.set_requires_gradient_sync(i % 2 == 1)
        loss = compiled(torch.full((8, 8), 1.0 + i)).sum()
        loss.backward()
        losses.append(loss.item())
        if i % 2:
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(parameter.grad, alpha=1e-5)
            model.zero_grad()
    return losses


def gathered(value: Any) -> list[Any]:
    """Return what both ranks say."""
    found: list[Any] = [None, None]
    dist.all_gather_object(found, value)
    return found


@two_ranks
def test_each_graph_is_lowered_on_one_rank() -> None:
    with said_by(shared_code.__name__) as said, fresh_cache():  # a folder for each rank, as on two machines
        shared = losses_of(Model(1))
        hits = sum(gathered(counters["aot_autograd"]["autograd_cache_hit"]))
        hits_of_variants = sum(gathered(counters["inductor"]["fxgraph_cache_hit"]))
    with fresh_cache():
        assert shared == losses_of(Model(1), compile_on="all")
    assert (said, hits, hits_of_variants) == ([], 1, 2)  # forward with backward; both once more, to add up gradients


@two_ranks
def test_ranks_with_different_graphs_compile_one_each() -> None:
    with said_by(shared_code.__name__) as said, fresh_cache():
        losses_of(Model(2 + dist.get_rank()))
        assert counters["aot_autograd"]["autograd_cache_hit"] == 0
    assert said == []


@two_ranks
def test_a_rank_says_why_its_graphs_cannot_be_shared() -> None:
    with said_by(shared_code.__name__) as said, fresh_cache(), functorch_config.patch(enable_autograd_cache=False):
        losses_of(Model(4))
    assert said[0] == (
        'fxshard: compile_on="one": this rank compiles a graph by itself: '
        "torch._functorch.config.enable_autograd_cache is off."
    )


@two_ranks
def test_an_entry_that_torch_does_not_take_is_no_error() -> None:
    """The second rank has Inductor's options otherwise, by an environment that torch reads and we do not."""
    with (
        said_by(shared_code.__name__) as said,
        fresh_cache(),
        inductor_config.patch(epilogue_fusion=dist.get_rank() == 0),
    ):
        losses_of(Model(5))
    texts = [text for each in gathered(said) for text in each]
    assert texts
    assert set(texts) == {
        'fxshard: compile_on="one": this rank compiles a graph by itself: what another rank made does not fit here: '
        "torch found no entry for this graph."
    }


SOON: Final = 0.05


def claims(text: str = "graph") -> tuple[SharedCode, SharedCode]:
    """Return what two ranks have of one graph, after both have claimed it."""
    store = dist.HashStore()
    first, second = SharedCode(store, text), SharedCode(store, text)
    assert first.is_first()
    assert not second.is_first()
    return first, second


def test_a_failure_is_told() -> None:
    first, second = claims()

    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.compile_for_all(fail)
    assert second.load(SOON) == "it failed on the rank that compiled it for all"


def test_a_rank_that_is_not_ready_is_not_waited_for_without_end() -> None:
    _, second = claims()
    assert second.load(SOON) == "the rank that compiles it for all was not ready after 0 s"


def test_nothing_cached_is_told() -> None:
    first, second = claims()
    assert first.compile_for_all(lambda: 3) == 3
    assert second.load(SOON).startswith("torch cached nothing on the rank that compiled it for all (TORCH_LOGS=")


def test_what_cannot_be_read_is_told() -> None:
    first, second = claims()
    first._store.set(f"{first._key}/0", "no artifacts")
    first._store.set(first._key, "pieces 1")
    assert second.load(SOON) == "what another rank made could not be read"


def test_a_lost_store_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = claims()
    first.compile_for_all(lambda: 3)

    def lose(*args: object) -> None:
        raise dist.DistNetworkError("connection closed")

    monkeypatch.setattr(second, "_store", SimpleNamespace(check=lose, timeout=timedelta(seconds=1)))
    assert second.load(SOON) == "the store of the process group failed: connection closed"


def test_large_artifacts_travel_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = claims()
    monkeypatch.setattr(shared_code, "_PIECE", 3)
    assert first._put(b"12345678") == "pieces 3"
    loaded: list[bytes] = []
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", loaded.append)
    first._store.set(first._key, "pieces 3")
    second.load(SOON)
    assert loaded == [b"12345678"]


def test_what_the_user_records_has_what_was_recorded_for_others() -> None:
    with CacheArtifactManager.with_fresh_cache():
        CacheArtifactManager.record_artifact("inductor", "before", b"1")
        with shared_code._recording() as recorded:
            CacheArtifactManager.record_artifact("inductor", "inside", b"2")
            assert b"before" not in recorded()
        saved = torch.compiler.save_cache_artifacts()
    assert saved is not None
    assert saved[1].artifacts["inductor"] == ["before", "inside"]


def test_a_process_alone_has_nobody_to_wait_for() -> None:
    with fake_ranks(2) as mesh, fresh_cache(), said_by(shared_code.__name__) as said:
        losses_of(Model(1), mesh=mesh)
    assert said == []
