"""The order of eager FSDP2: its record is right, and with its prefetch lists compiled models launch in that order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import fxshard
from fxshard.ir import collectives, tags
from fxshard.ir.liveness import tensors_in
from tests import fake_ranks
from tests.numerics.fsdp2_order import (
    CONFIGS,
    LAUNCHES,
    NO_LISTS,
    ONE_AHEAD,
    RECORDED,
    REVERSED,
    ROOT,
    TWO_AHEAD,
    UNIT_NAMES,
    Issue,
    Prefetch,
    SizedBlocks,
    in_words,
    issued_by_fsdp2,
    loss_of,
    sharded_model,
    steps_of_fsdp2,
    unit_of_product,
)
from tests.numerics.harness import EAGER, compile_module
from tests.pairwise import slow
from tests.ranks import two_ranks

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
@each_config
def test_sees_one_all_gather_per_unit_and_direction_and_one_reduce_scatter_per_unit(name: str) -> None:
    (step,) = steps_of_fsdp2(CONFIGS[name])
    forward, backward = Counter(step.forward), Counter(step.backward)
    for unit in UNIT_NAMES:
        in_backward = 0 if unit == ROOT else 1  # the root stays gathered after forward
        assert (forward["all_gather", unit], forward["wait", unit]) == (1, 1)
        assert (backward["all_gather", unit], backward["wait", unit]) == (in_backward, in_backward)
        assert (forward["reduce_scatter", unit], backward["reduce_scatter", unit]) == (0, 1)


@two_ranks
@pytest.mark.parametrize("config", [NO_LISTS, TWO_AHEAD, REVERSED])
def test_the_sizes_that_the_process_group_sees_belong_to_the_units_named(config: Prefetch) -> None:
    sizes = sizes_of_units()
    named = [(op, sizes[unit]) for op, unit in issued_by_fsdp2(config) if op != "wait"]
    model = sharded_model(fsdp2_fully_shard, config)
    with LaunchSizes() as seen:
        loss_of(model).backward()
    assert seen.launches == named


@two_ranks
def test_only_the_compute_tells_no_lists_from_one_block_ahead() -> None:
    assert issued_by_fsdp2(NO_LISTS) == issued_by_fsdp2(ONE_AHEAD)
    assert issued_by_fsdp2(NO_LISTS, compute=True) != issued_by_fsdp2(ONE_AHEAD, compute=True)


def test_for_ours_spells_fsdp2s_defaults_out() -> None:
    ours = REVERSED.for_ours()
    assert {unit for unit in UNIT_NAMES if ours.forward[unit] is None} == {*UNIT_NAMES} - {"blocks.0"}
    assert ours.forward["blocks.0"] == REVERSED.forward["blocks.0"]
    assert ours.backward["blocks.5"] == REVERSED.backward["blocks.5"]
    assert [ours.backward[unit] for unit in ("", "blocks.0", "blocks.1")] == [("blocks.5",), None, ("blocks.0",)]


PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm)


def issues_in(graph: fx.Graph) -> Iterator[Issue]:
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
    if getattr(node.target, "overloadpacket", None) in PRODUCTS:
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
        ours = tuple(in_words(issues_in(frame.history.last(kind).graph)) for kind in ("forward", "backward"))
    assert ours == RECORDED[name]
