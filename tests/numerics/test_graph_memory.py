"""What the graphs of a sharded model launch and keep: read off the graphs that were compiled."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import fxshard
from tests.numerics.harness import compile_module
from tests.numerics.models import MLP, WIDTH
from tests.pairwise import slow

NUM_BLOCKS = 6
LINE = re.compile(r"%(?P<name>\w+)(: \w+\[(?P<shape>[\d, ]*)\])? = (?P<op>[\w.]+)(\((?P<arguments>.*)\))?")
VIEWS = ("wait_tensor", "aten.view", "aten.slice", "aten.t", "aten.transpose", "aten.permute", "getitem")
COPIES = ("aten.clone", "aten._to_copy", "prims.convert_element_type")


@dataclass
class Buffer:
    """Unsharded memory: made by one node, alive until the last node that reads it or a view of it."""

    size: int
    first: int
    last: int


def lines_of(text: str) -> Iterator[tuple[str, int, str, list[str]]]:
    """Give name, number of elements, op and operands of each node, and of the return."""
    for line in text.splitlines():
        if line.startswith("return"):
            yield "", 0, "return", re.findall(r"%(\w+)", line)
        elif found := LINE.match(line):
            shape = [int(size) for size in (found["shape"] or "").split(", ") if size]
            yield found["name"], math.prod(shape), found["op"], re.findall(r"%(\w+)", found["arguments"] or "")


def unsharded_buffers(text: str) -> list[Buffer]:
    """Find what the gathers of a graph allocate, copies of it included."""
    buffers: list[Buffer] = []
    owner: dict[str, Buffer] = {}
    for index, (name, size, op, operands) in enumerate(lines_of(text)):
        read = [owner[operand] for operand in operands if operand in owner]
        for buffer in read:
            buffer.last = index
        if "all_gather" in op or (read and op.startswith(COPIES)):
            owner[name] = Buffer(size, index, index)
            buffers.append(owner[name])
        elif read and any(view in op for view in VIEWS):
            owner[name] = read[0]
    return buffers


def most_unsharded_elements(text: str) -> int:
    """Return the largest number of unsharded elements that are alive at once."""
    buffers = unsharded_buffers(text)
    return max(sum(b.size for b in buffers if b.first <= node <= b.last) for node in range(len(text.splitlines())))


def graphs_of(
    mesh: DeviceMesh, *, reshard_after_forward: bool | None, prefetch: int = 1
) -> dict[str, fxshard.CompiledGraph]:
    model = MLP(NUM_BLOCKS)
    for block in model.blocks:
        fxshard.fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fxshard.fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward)
    compiled = compile_module(model, options={"lower": "eager", "prefetch": prefetch})
    compiled(torch.ones(2, WIDTH)).sum().backward()
    return {graph.kind: graph for graph in fxshard.compiled_graphs(compiled)}


@pytest.mark.slow
@pytest.mark.parametrize(("reshard_after_forward", "again"), [(True, NUM_BLOCKS + 1), (None, NUM_BLOCKS), (False, 0)])
def test_launches_one_gather_and_one_reduction_per_unit(
    mesh: DeviceMesh, reshard_after_forward: bool | None, again: int
) -> None:
    graphs = graphs_of(mesh, reshard_after_forward=reshard_after_forward)
    assert graphs["forward"].collectives == {"all_gather": NUM_BLOCKS + 1}
    assert graphs["backward"].collectives.get("all_gather", 0) == again
    assert graphs["backward"].collectives["reduce_scatter"] == NUM_BLOCKS + 1


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 1, slow(2)])
@pytest.mark.parametrize("reshard_after_forward", [True, slow(None)])
def test_keeps_no_more_unsharded_than_a_unit_its_copy_the_prefetched_ones_and_the_root(
    mesh: DeviceMesh, reshard_after_forward: bool | None, prefetch: int
) -> None:
    graphs = graphs_of(mesh, reshard_after_forward=reshard_after_forward, prefetch=prefetch)
    model = MLP(1)
    root, unit = (sum(p.numel() + p.shape[-1] for p in m.parameters()) for m in (model.head, model.blocks[0]))
    for kind in ("forward", "backward"):
        assert unit < most_unsharded_elements(graphs[kind].text) <= root + (2 + prefetch) * unit


def test_forward_keeps_all_units_unsharded_where_it_was_told_to(mesh: DeviceMesh) -> None:
    graphs = graphs_of(mesh, reshard_after_forward=False)
    model = MLP(NUM_BLOCKS)
    assert most_unsharded_elements(graphs["forward"].text) >= sum(p.numel() for p in model.parameters())


@pytest.mark.slow
def test_saves_no_unsharded_parameter_for_backward(mesh: DeviceMesh) -> None:
    forward = graphs_of(mesh, reshard_after_forward=True)["forward"].text
    returned = set(re.findall(r"%(\w+)", forward.splitlines()[-1]))
    names = re.findall(r"^%(\w+)", forward, flags=re.MULTILINE)
    gathered = {name for name in names if name.endswith(("weight", "bias"))}
    assert gathered
    assert not returned & gathered
