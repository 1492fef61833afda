"""Compiled code that a process finds in torch's caches: it is the same, and never another model's."""

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor.utils import fresh_cache
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

import fxshard
from fxshard import GraphPass, PassContext, Pipeline, RankMismatchError, hardware
from fxshard.compile import cache
from fxshard.compile.backend import frames_of
from fxshard.ir import meshes
from fxshard.options import Options
from fxshard.passes.pipeline import DEFAULT
from fxshard.testing import emulated_link
from tests.graphs import in_split
from tests.models import Doing
from tests.numerics.harness import EAGER, compile_module
from tests.ranks import RankPool


@dataclass(frozen=True, kw_only=True)
class Idle(GraphPass):
    words: frozenset[str] = frozenset()

    def apply(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        return False


class NewerIdle(Idle):
    version = 2


@dataclass(frozen=True, kw_only=True)
class Calling(Idle):
    """Holds what no text can stand for."""

    call: Callable[[int], int] = lambda x: x


def in_last(step: GraphPass) -> Callable[[Pipeline], Pipeline]:
    return lambda pipeline: dataclasses.replace(pipeline, last=(*pipeline.last, step))


def test_every_file_of_fxshard_decides_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[set[Path]] = []
    monkeypatch.setattr(cache, "_hash_of", read.append)
    cache._own_sources.__wrapped__()
    root = Path(__file__).parents[2]
    assert read == [{path.resolve() for folder in ("fxshard", "passes") for path in (root / folder).rglob("*.py")}]


def build(mesh: DeviceMesh, width: int = 8, **kwargs: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width, bias=False), nn.Linear(width, 4, bias=False))
    for unit in (model[0], model):
        fxshard.fully_shard(unit, mesh=mesh, **kwargs)
    return model


def found() -> tuple[int, int]:
    """Hits and misses of AOTAutograd's cache since the last call."""
    seen = counters["aot_autograd"]
    result = seen["autograd_cache_hit"], seen["autograd_cache_miss"]
    seen.clear()
    return result


def compiled(model: nn.Module, **options: Any) -> tuple[int, int]:
    """Run a step of a freshly compiled model, and say what was found."""
    torch._dynamo.reset()
    found()
    compile_module(model, options=options)(torch.ones(2, 4)).sum().backward()
    return found()


@pytest.fixture
def warm(mesh: DeviceMesh) -> Iterator[DeviceMesh]:
    """A cache of this test's own, in which the default step of `build` already is."""
    with fresh_cache():
        assert compiled(build(mesh)) == (0, 1)
        yield mesh


# ---- in this process


def test_the_order_of_files_does_not_decide_the_key(tmp_path: Path) -> None:
    """They come in a set, whose order each process chooses; several have one name in folders of one name."""
    files = [tmp_path / outer / "plan" / "__init__.py" for outer in ("one", "two")]
    for i, file in enumerate(files):
        file.parent.mkdir(parents=True)
        file.write_text(f"x = {i}")
    assert cache._hash_of(files) == cache._hash_of(files[::-1])


def test_finds_code_and_what_the_frame_must_know(warm: DeviceMesh) -> None:
    before = build(warm)
    assert compiled(before, verify=False) == (0, 1)
    (expected,), graphs = frames_of(before), fxshard.compiled_graphs(before)  # before Dynamo is reset
    after = build(warm)
    assert compiled(after, verify=False) == (1, 0)
    (actual,) = frames_of(after)
    assert actual.trained == expected.trained
    assert sum(map(len, actual.trained.values())) == 2
    assert all(p.grad is not None for p in after.parameters())
    shown = fxshard.compiled_graphs(after)
    assert shown == graphs
    assert [graph.kind for graph in shown] == ["forward", "backward"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_accumulates_with_code_that_was_found_and_shows_its_graphs(dynamic: bool) -> None:
    def accumulated(mesh: DeviceMesh, expected: tuple[int, int]) -> tuple[list[Tensor], Any, dict[str, list[str]]]:
        torch._dynamo.reset()
        found()
        model = build(mesh)
        step = compile_module(model, options={"passes": in_last(Idle())}, dynamic=dynamic)
        with fxshard.no_sync(model):
            step(torch.ones(3, 4)).sum().backward()
        assert all(p.grad is None for p in model.parameters())
        step(torch.ones(3, 4)).sum().backward()
        assert found() == expected
        grads = [cast(DTensor, p.grad).to_local().clone() for p in model.parameters()]
        records = {stage: list(graphs) for stage, graphs in fxshard.explanation_of(model).graphs.items()}
        return grads, fxshard.compiled_graphs(model), records

    with fresh_cache(), emulated_link(2) as link:
        before, after = accumulated(link.mesh, (0, 1)), accumulated(link.mesh, (1, 0))
        torch._dynamo.reset()
    assert all(map(torch.equal, before[0], after[0]))
    assert after[1:] == before[1:]
    assert "idle" in after[2]["backward_last"]
    kinds = ["forward", "backward", "backward_accumulate", "backward_final"]
    assert [graph.kind for graph in after[1]] == kinds


def test_shows_the_last_stage_where_only_inductor_knew_the_graph(warm: DeviceMesh) -> None:
    options = {"passes": in_last(Idle())}
    compiled(build(warm), **options)
    model = build(warm)
    counters["inductor"].clear()
    with functorch_config.patch(enable_autograd_cache=False):
        assert compiled(model, **options) == (0, 0)
    assert counters["inductor"]["fxgraph_cache_hit"] == 2
    assert {"forward_last", "backward_last"} <= fxshard.explanation_of(model).graphs.keys()


def test_inductor_finds_a_graph_that_autograd_has_lost(warm: DeviceMesh) -> None:
    changed_key = {"view_replay_for_aliased_outputs": not functorch_config.view_replay_for_aliased_outputs}
    counters["inductor"].clear()
    with functorch_config.patch(changed_key):
        assert compiled(build(warm)) == (0, 1)
    assert counters["inductor"]["fxgraph_cache_hit"] == 2


def test_saves_the_step_of_a_model_that_is_only_run_forward(warm: DeviceMesh) -> None:
    for expected in [(0, 1), (1, 0)]:
        torch._dynamo.reset()
        found()
        with torch.no_grad():
            compile_module(build(warm, 12), options={})(torch.ones(2, 4))
        assert found() == expected


def shift() -> nn.Module:
    return Doing(lambda m, x: x + m.bias, bias=nn.Parameter(torch.zeros(())))


@pytest.mark.slow
def test_graphs_without_operations_are_found_like_others(mesh: DeviceMesh) -> None:
    with fresh_cache():
        for expected in [(0, 1), (1, 0)]:
            alone = fxshard.fully_shard(shift(), mesh=init_device_mesh("cpu", (2,)))
            assert compiled(alone) == expected


CHANGED: dict[str, Callable[[DeviceMesh], tuple[nn.Module, dict[str, Any]]]] = {
    "an option": lambda mesh: (build(mesh), {"verify": False}),
    "an option of Inductor": lambda mesh: (build(mesh), {"inductor": {"epilogue_fusion": False}}),
    "the hardware": lambda mesh: (build(mesh), {"hardware": "h200"}),
    "reshard_after_forward": lambda mesh: (build(mesh, reshard_after_forward=False), {}),
    "param_dtype": lambda mesh: (build(mesh, mp_policy=fxshard.MixedPrecisionPolicy(torch.bfloat16)), {}),
    "reduce_dtype": lambda mesh: (
        build(mesh, mp_policy=fxshard.MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)),
        {},
    ),
    "the group": lambda mesh: (build(DeviceMesh.from_group(dist.new_group([0, 1]), "cpu")), {}),
    "the world size": lambda mesh: (build(DeviceMesh.from_group(dist.new_group([0]), "cpu")), {}),
    "a pass": lambda mesh: (build(mesh), {"passes": in_split(Idle())}),
    "the stage of a pass": lambda mesh: (build(mesh), {"passes": in_last(Idle())}),
    "an option of a pass": lambda mesh: (build(mesh), {"passes": in_split(Idle(words=frozenset("ab")))}),
    "the version of a pass": lambda mesh: (build(mesh), {"passes": in_split(NewerIdle())}),
    "the order of passes": lambda mesh: (build(mesh), {"passes": in_split_twice}),
}


def in_split_twice(pipeline: Pipeline) -> Pipeline:
    return in_split(NewerIdle())(in_split(Idle())(pipeline))


@pytest.mark.slow
def test_compiles_anew_what_anything_has_changed_of(warm: DeviceMesh) -> None:
    assert compiled(build(warm)) == (1, 0)
    for what, change in CHANGED.items():
        model, options = change(warm)
        assert compiled(model, **options) == (0, 1), what
        model, options = change(warm)
        assert compiled(model, **options) == (0, 1) if what in ("the group", "the world size") else (1, 0), what


def test_caches_nothing_for_what_no_text_stands_for_or_the_user_has_switched_off(
    warm: DeviceMesh,
) -> None:
    for _ in range(2):
        counters["inductor"].clear()
        assert compiled(build(warm), passes=in_split(Calling())) == (0, 0)
        assert not counters["inductor"]["fxgraph_cache_hit"]
    space: dict[str, Any] = {"Idle": Idle, "__name__": "nowhere"}
    exec("class Typed(Idle):\n    version = 7", space)
    assert compiled(build(warm), passes=in_split(space["Typed"]())) == (0, 0)
    with functorch_config.patch(enable_autograd_cache=False):
        assert compiled(build(warm)) == (0, 0)
    assert compiled(build(warm), inductor={"fx_graph_cache": False}) == (0, 0)


@pytest.mark.slow
def test_caches_nothing_for_a_graph_that_reads_a_tensor_subclass(warm: DeviceMesh) -> None:
    model, value = build(warm), distribute_tensor(torch.ones(2), warm, [Shard(0)])

    def step(x: Tensor, value: DTensor) -> Tensor:
        return model(x).sum() + value.to_local().sum()

    found()
    torch.compile(step, backend="fxshard")(torch.ones(2, 4), value).backward()
    assert found() == (0, 0)


# ---- the digest


def digest_of(mesh: DeviceMesh, pipeline: Pipeline = DEFAULT, **options: Any) -> str | None:
    torch._dynamo.reset()
    model = build(mesh)
    compile_module(model, options=EAGER)(torch.ones(2, 4))
    (frame,) = frames_of(model)
    return cache.digest(Options(**options), frame.plan, pipeline, hardware.load(options.get("hardware", "cpu")))


def test_the_digest_knows_the_replicas(fake_group: None) -> None:
    meshes = [init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))]
    assert len({digest_of(mesh) for mesh in meshes}) == 2


def test_the_digest_does_not_depend_on_the_order_of_sets_and_mappings(mesh: DeviceMesh) -> None:
    words = [f"word{i}" for i in range(50)]
    one, other = (in_split(Idle(words=frozenset(order)))(DEFAULT) for order in (words, words[::-1]))
    assert digest_of(mesh, one) == digest_of(mesh, other) is not None
    flags = {"epilogue_fusion": False, "max_autotune": False}
    assert digest_of(mesh, inductor=flags) == digest_of(mesh, inductor=dict(reversed(flags.items())))


def test_the_digest_knows_a_hardware_file_by_its_content(mesh: DeviceMesh, tmp_path: Path) -> None:
    cpu, file = hardware.load("cpu"), tmp_path / "mine.json"
    file.write_text(cpu.to_json())
    before = digest_of(mesh, hardware=str(file))
    assert before == digest_of(mesh, hardware=str(file))
    file.write_text(dataclasses.replace(cpu, link_latency=1e-3).to_json())
    assert before != digest_of(mesh, hardware=str(file))


def test_the_digest_knows_a_pass_by_the_source_of_its_class(
    mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    digests = []
    for body in ("return False", "return 1 > 2"):
        (tmp_path / "someones_pass.py").write_text(
            "from fxshard import GraphPass\n\n\nclass Theirs(GraphPass):\n"
            f"    def apply(self, gm, ctx):\n        {body}\n"
        )
        sys.modules.pop("someones_pass", None)
        import someones_pass  # type: ignore[import-not-found]

        digests.append(digest_of(mesh, in_split(someones_pass.Theirs())(DEFAULT)))
    assert None not in digests
    assert digests[0] != digests[1]


# ---- in a second process


@dataclass(frozen=True, kw_only=True)
class Trained:
    losses: list[float]  # of each step
    hits: int  # of AOTAutograd's cache
    misses: int  # of it


def train(folders: list[str], widths: list[int]) -> Trained:
    """A few steps on this rank, with its own folder of compiled code and its own width."""
    rank = dist.get_rank()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folders[rank]
    torch._dynamo.reset()
    found()
    model = build(init_device_mesh("cpu", (2,)), widths[rank])
    step = compile_module(model, options={})
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(3):
        loss = step(torch.randn(2, 4, generator=generator)).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    hits, misses = found()
    return Trained(losses=losses, hits=hits, misses=misses)


def train_apart(folders: list[str]) -> tuple[str, tuple[int, int]]:
    """Two models are in the cache; the ranks take different ones."""
    for width in (8, 16):
        assert train(folders, [width, width]).hits == 1
    with pytest.raises(RankMismatchError) as caught:
        train(folders, [8, 16])
    return str(caught.value), found()


@pytest.mark.commands
@pytest.mark.multi_rank
@pytest.mark.timeout(1200)
def test_a_second_process_reuses_code_and_trains_to_the_same_bits(tmp_path: Path) -> None:
    ours, other = str(tmp_path / "ours"), str(tmp_path / "other")
    with RankPool() as pool:
        cold = pool.run(train, timeout=600, folders=[ours, str(tmp_path / "second")], widths=[8, 8])
        pool.run(train, timeout=600, folders=[ours, str(tmp_path / "second")], widths=[16, 16])
    assert [(run.hits, run.misses) for run in cold] == [(0, 1), (0, 1)]
    assert cold[0].losses != cold[1].losses
    with RankPool() as pool:
        warm = pool.run(train, timeout=600, folders=[ours, ours], widths=[8, 8])
        one_cold = pool.run(train, timeout=600, folders=[ours, other], widths=[8, 8])
        mismatches = pool.run(train_apart, timeout=600, keep=False, folders=[ours, ours])
    assert [(run.hits, run.misses) for run in warm] == [(1, 0), (1, 0)]
    assert [(run.hits, run.misses) for run in one_cold] == [(1, 0), (0, 1)]
    assert [run.losses for run in warm] == [run.losses for run in cold]
    assert [run.losses for run in one_cold] == [run.losses for run in cold]
    for message, hits in mismatches:
        assert "the ranks launch different collectives" in message
        assert hits == (1, 0)


# ---- tensor parallelism


STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "rows": lambda: RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
    "features": lambda: ColwiseParallel(output_layouts=Replicate()),
}


def train_split(folder: str, shape: tuple[int, int], style: str = "rows") -> Trained:
    """A few steps with an embedding and a layer that are split over the second axis of a mesh of this shape."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    torch._dynamo.reset()
    found()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("shard", "tp"))
    model: nn.Module = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 4))
    parallelize_module(model, mesh["tp"], {"0": STYLES[style](), "1": ColwiseParallel(output_layouts=Replicate())})
    step = compile_module(fxshard.fully_shard(model, mesh=mesh["shard"]), options={})
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = step(torch.arange(10)).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    hits, misses = found()
    return Trained(losses=losses, hits=hits, misses=misses)


@pytest.mark.commands
@pytest.mark.multi_rank
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(
    not meshes.ARE_INPUTS,
    reason="before torch 2.13 such code is not cached on disk: Dynamo hides the mesh (ir/meshes.py)",
)
def test_a_second_process_reuses_the_code_of_its_own_place_in_a_split(tmp_path: Path) -> None:
    """Both ranks look into one folder: one must not take the rows of the vocabulary that the other has."""
    folder = str(tmp_path)
    with RankPool() as pool:
        cold = pool.run(train_split, timeout=600, folder=folder, shape=(1, 2))
    assert [(run.hits, run.misses) for run in cold] == [(0, 1), (0, 1)]
    with RankPool() as pool:
        warm = pool.run(train_split, timeout=600, folder=folder, shape=(1, 2))
        columns = pool.run(train_split, timeout=600, folder=folder, shape=(1, 2), style="features")
        whole = pool.run(train_split, timeout=600, folder=folder, shape=(2, 1))
    assert [(run.hits, run.misses) for run in warm] == [(1, 0), (1, 0)]
    assert [(run.hits, run.misses) for run in columns + whole] == 4 * [(0, 1)]
    assert [run.losses for run in warm] == [run.losses for run in cold]
    for run in cold + columns:
        assert run.losses == pytest.approx(whole[0].losses)
