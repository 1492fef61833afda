"""The order of eager FSDP2: its record is right, and with its prefetch lists compiled models launch in that order.

FSDP2 is only watched: torch's profiler records the ranges that FSDP2 opens around its work, and the operators of the
process group within them. A range names its unit; the root is the unit "". The model and the lists of a `Prefetch`
serve FSDP2 and fxshard alike.

[Note: where the compute is]
Launches and waits alone cannot tell "launched before the compute of block 0" from "launched after it": no lists and one
block ahead both read all_gather 0, wait 0, all_gather 1, wait 1. So the matrix products stand between them, each run of
products of one unit once; a product belongs to the block whose hidden size is in its shapes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.autograd.profiler_util import FunctionEvent
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import fxshard
from fxshard.ir import collectives, tags
from fxshard.ir.liveness import tensors_in
from tests import fake_ranks
from tests.models import FeedForward
from tests.numerics.harness import EAGER, compile_module, world_mesh
from tests.numerics.models import VOCAB, cross_entropy, tokens
from tests.pairwise import slow
from tests.ranks import two_ranks

NUM_BLOCKS = 6
WIDTH = 8
ROOT = ""
UNIT_NAMES = (ROOT, *(f"blocks.{i}" for i in range(NUM_BLOCKS)))
# The size that only this unit's products have: no hidden size may equal WIDTH, VOCAB or the number of tokens.
UNIT_OF_SIZE = {VOCAB: ROOT} | {WIDTH + 2 + 4 * i: f"blocks.{i}" for i in range(NUM_BLOCKS)}
HIDDEN_SIZES = tuple(size for size, unit in UNIT_OF_SIZE.items() if unit != ROOT)

Issue = tuple[str, str]
"""("all_gather", "wait", "reduce_scatter" or "compute", name of the unit)."""

Lists = Mapping[str, tuple[str, ...] | None]
"""Names of the modules that a module prefetches, by its own name; `None`, known to fxshard alone, switches it off."""

PRODUCTS = {"aten::addmm", "aten::mm"}
LAUNCHES = {"c10d::_allgather_base_": "all_gather", "c10d::_reduce_scatter_base_": "reduce_scatter"}
# What follows "FSDP::", and which operator of the process group belongs into it; a wait is a range of its own.
RANGES = {"all_gather": "all_gather", "all_gather_copy_out": "wait", "post_backward_reduce": "reduce_scatter"}
RANGE = re.compile(rf"FSDP::({'|'.join(RANGES)})(?: \((?P<unit>.*)\))?")


# ---- the model


class SizedBlocks(nn.Module):
    """An embedding, blocks of which no two have the same size, and a head; the size of a transfer tells the unit."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(FeedForward(WIDTH, hidden) for hidden in HIDDEN_SIZES)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# ---- the configurations


def block(index: int) -> str:
    """Return the name of a block, which is the name of its unit."""
    return UNIT_NAMES[1 + index]


@dataclass(frozen=True, kw_only=True)
class Prefetch:
    """Which modules prefetch which, by name; a module that is not named keeps the default."""

    forward: Lists = field(default_factory=dict)
    backward: Lists = field(default_factory=dict)

    def apply(self, model: nn.Module) -> None:
        """Hand the lists to the modules of a sharded model, of FSDP2 or of fxshard."""
        for name, targets in self.forward.items():
            prefetching(model, name).set_modules_to_forward_prefetch(modules_of(model, targets))
        for name, targets in self.backward.items():
            prefetching(model, name).set_modules_to_backward_prefetch(modules_of(model, targets))

    def for_ours(self) -> Prefetch:
        """Return the lists that mean the same in fxshard, where FSDP2's defaults have to be spelt out.

        In forward FSDP2 has none; in backward each module prefetches the one before it, right after its own wait.
        """
        before = {name: (UNIT_NAMES[i - 1],) if i > 1 else None for i, name in enumerate(UNIT_NAMES)}
        before[ROOT] = (UNIT_NAMES[-1],)
        return Prefetch(
            forward={name: self.forward.get(name) or None for name in UNIT_NAMES},
            backward={name: self.backward.get(name) or before[name] for name in UNIT_NAMES},
        )


def prefetching(model: nn.Module, name: str) -> FSDPModule:
    """Return a submodule; FSDPModule stands for whatever has FSDP2's methods."""
    return cast(FSDPModule, model.get_submodule(name))


def modules_of(model: nn.Module, names: Iterable[str] | None) -> list[FSDPModule]:
    """Return the submodules of a list; `None`, which FSDP2's annotation does not know, stays."""
    return cast("list[FSDPModule]", None if names is None else [prefetching(model, name) for name in names])


def ahead(depth: int, *, root: bool = False) -> Prefetch:
    """Let each block, and the root if it is asked for, prefetch the `depth` blocks that are computed next."""
    forward = {block(i): tuple(map(block, range(NUM_BLOCKS)[i + 1 : i + 1 + depth])) for i in range(NUM_BLOCKS)}
    backward = {block(i): tuple(map(block, range(NUM_BLOCKS)[:i][: -depth - 1 : -1])) for i in range(NUM_BLOCKS)}
    if root:
        forward[ROOT] = tuple(map(block, range(depth)))
        backward[ROOT] = tuple(map(block, range(NUM_BLOCKS)[: -depth - 1 : -1]))
    return Prefetch(forward=forward, backward=backward)


NO_LISTS = Prefetch()
ONE_AHEAD = ahead(1)
TWO_AHEAD = ahead(2, root=True)
FOUR_AHEAD = ahead(4)
SOME_BLOCKS = Prefetch(
    forward={block(1): (block(2),), block(3): (block(4), block(5))},
    backward={block(1): (block(0),), block(3): (block(1),)},
)
REVERSED = Prefetch(forward={block(0): (block(2), block(1))}, backward={block(5): (block(3), block(4))})

CONFIGS: Mapping[str, Prefetch] = {
    "no lists": NO_LISTS,
    "one ahead": ONE_AHEAD,
    "two ahead, the root too": TWO_AHEAD,
    "four ahead": FOUR_AHEAD,
    "only blocks 1 and 3": SOME_BLOCKS,
    "reversed lists": REVERSED,
}


# ---- training


def sharded_model(fully_shard: Callable[..., Any], config: Prefetch) -> SizedBlocks:
    """Build the model, make a unit of each block and one of the rest, and set the prefetch lists."""
    torch.manual_seed(0)
    model = SizedBlocks()
    for part in (*model.blocks, model):
        fully_shard(part, mesh=world_mesh())
    config.apply(model)
    return model


def loss_of(model: nn.Module) -> Tensor:
    """Run forward on the batch that all ranks and steps share."""
    return cross_entropy(model, *tokens()(0, 0))


# ---- recording


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one forward and one backward issued, in order, with the compute between."""

    forward: list[Issue]
    backward: list[Issue]


def issued_by_fsdp2(config: Prefetch) -> list[Issue]:
    """Return what FSDP2 issues in a step of the model, forward and then backward."""
    (step,) = steps_of_fsdp2(config)
    return [*step.forward, *step.backward]


def steps_of_fsdp2(config: Prefetch, num_steps: int = 1) -> list[Step]:
    """Return what FSDP2 issues in each of the first steps of the model."""
    model = sharded_model(fsdp2_fully_shard, config)
    return [recorded_step(model) for _ in range(num_steps)]


def recorded_step(model: nn.Module) -> Step:
    """Run forward and backward of a model that FSDP2 sharded, and drop the gradients."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as forward:
        loss = loss_of(model)
        dist.barrier()  # torch's profiler must not end while gloo still works: it frees what gloo then writes to
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as backward:
        loss.backward()
        dist.barrier()
    model.zero_grad()
    return Step(forward=issues_in(forward), backward=issues_in(backward))


def issues_in(record: profile) -> list[Issue]:
    """Return what a profile shows, in the order in which it began."""
    issued: list[Issue] = []
    for event in sorted(record.events() or (), key=lambda event: event.time_range.start):
        for issue in issues_of(event):
            if issue[0] != "compute" or issued[-1:] != [issue]:
                issued.append(issue)
    return issued


def issues_of(event: FunctionEvent) -> Iterator[Issue]:
    """Yield what an event of the profiler stands for, if it is a launch, a wait or a product."""
    found = RANGE.fullmatch(event.name)
    if event.name in LAUNCHES:
        yield LAUNCHES[event.name], unit_that_launches(event)
    elif event.name in PRODUCTS:
        yield "compute", unit_of_product(cast("Iterable[Sequence[int]]", event.input_shapes))
    elif found is not None and RANGES[found[1]] == "wait":
        yield "wait", found["unit"] or ROOT


def unit_of_product(shapes: Iterable[Sequence[int]]) -> str:
    """Return the unit whose matrix product takes inputs of these shapes."""
    (unit,) = {UNIT_OF_SIZE[size] for shape in shapes for size in shape if size in UNIT_OF_SIZE}
    return unit


def unit_that_launches(event: FunctionEvent) -> str:
    """Return the unit of the range around an operator of the process group, which must be the range for it."""
    around = event.cpu_parent
    while around is not None:
        found = RANGE.fullmatch(around.name)
        if found is not None:
            assert RANGES[found[1]] == LAUNCHES[event.name], f"{event.name} in {around.name}"
            return found["unit"] or ROOT
        around = around.cpu_parent
    raise AssertionError(f"{event.name} outside FSDP2's ranges: this torch has other ranges")


# ---- what was recorded

WORDS = {"all_gather": "ag", "wait": "w", "reduce_scatter": "rs", "compute": "c"}


def in_words(issued: Iterable[Issue]) -> str:
    """Write issues as in `RECORDED`: a word for the operation and the number of the block, or R for the root."""
    return " ".join(f"{WORDS[op]}{unit.removeprefix('blocks.') or 'R'}" for op, unit in issued)


RECORDED: Mapping[str, tuple[str, str]] = {
    "no lists": (
        "agR wR ag0 w0 c0 ag1 w1 c1 ag2 w2 c2 ag3 w3 c3 ag4 w4 c4 ag5 w5 c5 cR",
        "ag5 cR w5 ag4 c5 rs5 w4 ag3 c4 rs4 w3 ag2 c3 rs3 w2 ag1 c2 rs2 w1 ag0 c1 rs1 w0 c0 rs0 rsR",
    ),
    "one ahead": (
        "agR wR ag0 w0 ag1 c0 w1 ag2 c1 w2 ag3 c2 w3 ag4 c3 w4 ag5 c4 w5 c5 cR",
        "ag5 cR w5 ag4 c5 rs5 w4 ag3 c4 rs4 w3 ag2 c3 rs3 w2 ag1 c2 rs2 w1 ag0 c1 rs1 w0 c0 rs0 rsR",
    ),
    "two ahead, the root too": (
        "agR wR ag0 ag1 w0 ag2 c0 w1 ag3 c1 w2 ag4 c2 w3 ag5 c3 w4 c4 w5 c5 cR",
        "ag5 ag4 cR w5 ag3 c5 rs5 w4 ag2 c4 rs4 w3 ag1 c3 rs3 w2 ag0 c2 rs2 w1 c1 rs1 w0 c0 rs0 rsR",
    ),
    "four ahead": (
        "agR wR ag0 w0 ag1 ag2 ag3 ag4 c0 w1 ag5 c1 w2 c2 w3 c3 w4 c4 w5 c5 cR",
        "ag5 cR w5 ag4 ag3 ag2 ag1 c5 rs5 w4 ag0 c4 rs4 w3 c3 rs3 w2 c2 rs2 w1 c1 rs1 w0 c0 rs0 rsR",
    ),
    "only blocks 1 and 3": (
        "agR wR ag0 w0 c0 ag1 w1 ag2 c1 w2 c2 ag3 w3 ag4 ag5 c3 w4 c4 w5 c5 cR",
        "ag5 cR w5 ag4 c5 rs5 w4 ag3 c4 rs4 w3 ag1 c3 rs3 ag2 w2 c2 rs2 w1 ag0 c1 rs1 w0 c0 rs0 rsR",
    ),
    "reversed lists": (
        "agR wR ag0 w0 ag2 ag1 c0 w1 c1 w2 c2 ag3 w3 c3 ag4 w4 c4 ag5 w5 c5 cR",
        "ag5 cR w5 ag3 ag4 c5 rs5 w4 c4 rs4 w3 ag2 c3 rs3 w2 ag1 c2 rs2 w1 ag0 c1 rs1 w0 c0 rs0 rsR",
    ),
}
"""Forward and backward of each of `CONFIGS`, equal on torch 2.11, 2.13 and 2.15, in `in_words`."""


each_config = pytest.mark.parametrize("name", CONFIGS)


class LaunchSizes(TorchDispatchMode):
    """Keeps each launch and the number of elements that it gathers or scatters: a second, unrelated recorder."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        name = func.name()
        if name in LAUNCHES:
            self.launches.append((LAUNCHES[name], max(args[0].numel(), args[1].numel())))
        return func(*args, **(kwargs or {}))


def sizes_of_units() -> dict[str, int]:
    sizes = dict.fromkeys(UNIT_NAMES, 0)
    for name, parameter in SizedBlocks().named_parameters():
        sizes[next((unit for unit in UNIT_NAMES[1:] if name.startswith(f"{unit}.")), ROOT)] += parameter.numel()
    return sizes


def test_no_two_units_have_the_same_size() -> None:
    assert len(set(sizes_of_units().values())) == len(UNIT_NAMES)


@two_ranks
@each_config
def test_every_step_issues_what_is_recorded(name: str) -> None:
    for step in steps_of_fsdp2(CONFIGS[name], num_steps=2):
        assert (in_words(step.forward), in_words(step.backward)) == RECORDED[name]


@two_ranks
@pytest.mark.parametrize("config", [NO_LISTS, TWO_AHEAD, REVERSED])
def test_the_sizes_that_the_process_group_sees_belong_to_the_units_named(config: Prefetch) -> None:
    sizes = sizes_of_units()
    named = [(op, sizes[unit]) for op, unit in issued_by_fsdp2(config) if op in LAUNCHES.values()]
    model = sharded_model(fsdp2_fully_shard, config)
    with LaunchSizes() as seen:
        loss_of(model).backward()
    assert seen.launches == named


def test_for_ours_spells_fsdp2s_defaults_out() -> None:
    ours = REVERSED.for_ours()
    assert {unit for unit in UNIT_NAMES if ours.forward[unit] is None} == {*UNIT_NAMES} - {"blocks.0"}
    assert ours.forward["blocks.0"] == REVERSED.forward["blocks.0"]
    assert ours.backward["blocks.5"] == REVERSED.backward["blocks.5"]
    assert [ours.backward[unit] for unit in ("", "blocks.0", "blocks.1")] == [("blocks.5",), None, ("blocks.0",)]


MATRIX_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm)


def issues_in_graph(graph: fx.Graph) -> Iterator[Issue]:
    """What a graph launches, waits for and computes; the waits of reductions, which FSDP2 does not show, left out."""
    last: Issue | None = None
    for node in graph.nodes:
        issue = issue_of(node)
        if issue is not None and (issue != last or issue[0] not in ("wait", "compute")):
            yield issue
        last = issue or last


def issue_of(node: fx.Node) -> Issue | None:
    (unit,) = tags.units_of(node) or (ROOT,)
    if node.target in collectives.GATHERS:
        return "all_gather", unit
    if node.target in collectives.REDUCTIONS:
        return "reduce_scatter", unit
    if collectives.is_wait(node):
        launch = node.all_input_nodes[0]
        launch = launch.all_input_nodes[0] if launch.target not in collectives.LAUNCHES else launch
        return ("wait", unit) if launch.target in collectives.GATHERS else None
    if getattr(node.target, "overloadpacket", None) in MATRIX_PRODUCTS:
        inputs: list[Tensor] = [tensor for source in node.all_input_nodes for tensor in tensors_in(source)]
        return "compute", unit_of_product([tuple(tensor.shape) for tensor in inputs])
    return None


SHOWN = ("two ahead, the root too", "only blocks 1 and 3")


@pytest.mark.parametrize("name", [name if name in SHOWN else slow(name) for name in CONFIGS])
def test_lists_give_the_order_of_fsdp2(name: str) -> None:
    with fake_ranks.fake_ranks(2):
        model = sharded_model(fxshard.fully_shard, CONFIGS[name].for_ours())
        compiled = compile_module(model, EAGER)
        loss_of(compiled).backward()
        (frame,) = fxshard.explanation_of(compiled).frames
        ours = tuple(in_words(issues_in_graph(frame.history.last(kind).graph)) for kind in ("forward", "backward"))
    assert ours == RECORDED[name]
