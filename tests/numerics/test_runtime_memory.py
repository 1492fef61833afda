"""What unsharded parameters take while a step runs: no more than its explanation says, nor than the budget."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import fxshard
from fxshard.ir import collectives, ops
from fxshard.testing import emulated_link
from tests.numerics.harness import EAGER, compile_module, sharded
from tests.numerics.models import MLP, WIDTH, tied_gpt, tokens
from tests.pairwise import slow
from tests.watching import watched

COPIES = (torch.ops.aten.split_with_sizes_copy, torch.ops.aten.clone)
GIB = 2**30


class Unsharded(TorchDispatchMode):
    """Follows gathered buffers, and the parameters that are copied out of them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.gathered: set[int] = set()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        gathers = func in collectives.GATHERS or func is ops.PREFETCHED_ALL_GATHER
        if gathers or (func.overloadpacket in COPIES and args[0].untyped_storage()._cdata in self.gathered):
            for each in result if isinstance(result, list | tuple) else (result,):
                storage = each.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.gathered |= {storage._cdata} if gathers else set()
        self.storages = {key: each for key, each in self.storages.items() if not each[0].expired()}
        self.gathered &= self.storages.keys()
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.storages.values()))
        return result


def peaks_of(
    build: Callable[[], nn.Module],
    batch: tuple[Tensor, ...],
    *,
    reshard_after_forward: bool | None = None,
    **options: Any,
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of unsharded parameters in forward and backward: as they were, and as the explanation has them."""
    memory, measured = Unsharded(), {}

    torch._dynamo.reset()
    with emulated_link(4) as link:
        model = sharded(build(), mesh=link.mesh, reshard_after_forward=reshard_after_forward)
        step: Any = torch.compile(model, backend=watched(lambda: memory, lower="eager", hardware="cpu", **options))
        step(*batch).sum().backward()
        memory.peak = 0
        loss = step(*batch).sum()
        measured["forward"], memory.peak = memory.peak, 0
        with memory:
            loss.backward()
        measured["backward"] = memory.peak
        (frame,) = fxshard.explanation_of(model).frames
        expected = {stage: frame.schedules(stage)[0].unsharded_peak_bytes for stage in measured}
    torch._dynamo.reset()
    return measured, expected


BATCHES = {MLP: (torch.ones(2, WIDTH),), tied_gpt: tokens()(0, 0)[:1]}


@pytest.mark.parametrize("bucket", ["unit", slow("auto")])
@pytest.mark.parametrize("prefetch", [slow("off"), 1, slow(2), "auto"])
@pytest.mark.parametrize("build", [MLP, slow(tied_gpt)])
def test_explanations_say_what_a_step_takes(build: Any, prefetch: int | str, bucket: str) -> None:
    measured, expected = peaks_of(build, BATCHES[build], prefetch=prefetch, bucket=bucket)
    # What the last unit keeps for backward is counted there without the padding of its uneven rows.
    assert measured == pytest.approx(expected, rel=0.03 if prefetch == "auto" else 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("build", BATCHES)
@pytest.mark.parametrize("share", [slow(0.0), 0.5, slow(1.0)])
def test_automatic_prefetch_keeps_to_the_budget(build: Any, share: float) -> None:
    least, _ = peaks_of(build, BATCHES[build], prefetch="off")
    most, _ = peaks_of(build, BATCHES[build], prefetch="auto")
    budget = int(max(least.values()) + share * (max(most.values()) - max(least.values())))
    measured, expected = peaks_of(build, BATCHES[build], prefetch="auto", memory_budget_gib=budget / GIB)
    assert measured == expected
    assert 0 < max(measured.values()) <= budget


NUM_BLOCKS = 6
BLOCKS = partial(MLP, NUM_BLOCKS)


def padded_bytes(module: nn.Module) -> int:
    """Count the bytes of a unit's parameters, with rows padded to a multiple of four ranks."""
    return sum(-(-p.shape[0] // 4) * 4 * p.shape[1:].numel() * 4 for p in module.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", ["off", 1, slow(2)])
@pytest.mark.parametrize("reshard_after_forward", [True, slow(None)])
def test_keeps_no_more_unsharded_than_a_unit_its_copy_the_prefetched_ones_and_the_root(
    reshard_after_forward: bool | None, prefetch: int | str
) -> None:
    measured, _ = peaks_of(BLOCKS, BATCHES[MLP], reshard_after_forward=reshard_after_forward, prefetch=prefetch)
    root, unit = (padded_bytes(module) for module in (MLP(1).head, MLP(1).blocks[0]))
    ahead = 0 if prefetch == "off" else int(prefetch)
    for peak in measured.values():
        assert unit < peak <= root + (2 + ahead) * unit


def test_forward_keeps_all_units_unsharded_where_it_was_told_to() -> None:
    measured, _ = peaks_of(BLOCKS, BATCHES[MLP], reshard_after_forward=False)
    assert measured["forward"] >= 4 * sum(p.numel() for p in BLOCKS().parameters())


def graphs_of(mesh: DeviceMesh, *, reshard_after_forward: bool | None) -> dict[str, fxshard.CompiledGraph]:
    model = sharded(BLOCKS(), mesh=mesh, reshard_after_forward=reshard_after_forward)
    compiled = compile_module(model, options={**EAGER, "prefetch": 1})
    compiled(*BATCHES[MLP]).sum().backward()
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
def test_saves_no_unsharded_parameter_for_backward(mesh: DeviceMesh) -> None:
    forward = graphs_of(mesh, reshard_after_forward=True)["forward"].text
    returned = set(re.findall(r"%(\w+)", forward.splitlines()[-1]))
    names = re.findall(r"^%(\w+)", forward, flags=re.MULTILINE)
    gathered = {name for name in names if name.endswith(("weight", "bias"))}
    assert gathered
    assert not returned & gathered
