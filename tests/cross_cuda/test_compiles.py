"""All that is compiled for CUDA compiles, in the order that the graphs say, and runs without a race or a wait."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import pytest

from fxshard.ir import collectives, launches
from tests.cross_cuda import layouts, patches, reading
from tests.cross_cuda.cases import (
    CUDAGRAPHS,
    EXCHANGING,
    FP8,
    HOOKED,
    HYBRID,
    LAYOUTS,
    MORE,
    NCCL,
    OTHER_GPUS,
    QUICK,
    SIDE,
    SUBGROUPS,
)
from tests.cross_cuda.dry_run import Step
from tests.cross_cuda.gpus import Gpu
from tests.cross_cuda.lane import installed
from tests.cross_cuda.training import WORLD_SIZE, Case, Trained, trained_once

pytestmark = [pytest.mark.cuda_lane, pytest.mark.timeout(900)]


LOOKS_FOR = {"torch.cuda.synchronize"}
"""Patches that are there to be called by nobody."""


def _cases() -> Iterator[object]:
    for name, case in QUICK.items():
        yield pytest.param(case, id=name)
        for gpu in OTHER_GPUS:
            other = dataclasses.replace(case, gpu=gpu)
            yield pytest.param(other, id=f"{name}, {gpu.architecture}", marks=pytest.mark.slow)
    for name, case in MORE.items():
        yield pytest.param(case, id=name, marks=pytest.mark.slow)


@pytest.fixture(params=_cases())
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture
def made(case: Case) -> Trained:
    return trained_once(case)


def test_compiles_and_runs_in_order_without_a_race(case: Case, made: Trained) -> None:
    assert made.compiled.failed == []
    assert {kernel.architecture for kernel in made.compiled.kernels} == {case.gpu.architecture}
    assert made.compiled.order.num_launches > 0
    assert made.compiled.order.problems == []
    assert made.run.streams.races == []
    assert made.run.unwaited == {}, "launched, and never waited for"


def test_waits_launches_and_kernels_run_as_the_graphs_say() -> None:
    made = trained_once(NCCL)
    (graphs,) = made.graphs
    said = reading.scheduled([graphs["forward"], graphs["backward"]])
    assert "gather" in said
    assert "reduce" in said
    assert reading.ran(made.run.steps) == said


def test_gradients_reach_the_buffer_of_a_reduction_by_one_kernel() -> None:
    copies = reading.copies_in(trained_once(NCCL).run.steps)
    assert copies == [1] * len(copies)
    assert len(copies) == NCCL.num_layers + 1


def test_replicas_average_each_unit_in_the_order_of_the_graphs() -> None:
    made = trained_once(HYBRID)
    (graphs,) = made.graphs
    said = reading.scheduled([graphs["forward"], graphs["backward"]])
    assert reading.by_collective(reading.ran(made.run.steps)) == reading.by_collective(said)
    reduced = [step.name for step in made.run.steps if step.kind == "reduce"]
    assert sum("reduce_scatter" in name for name in reduced) == HYBRID.num_layers + 1
    assert sum("all_reduce" in name for name in reduced) == HYBRID.num_layers + 1


def test_one_kernel_casts_what_a_gather_sends() -> None:
    casts = reading.copies_in(trained_once(NCCL).run.steps, "gather")
    assert casts == [1] * len(casts)


@pytest.mark.parametrize("case", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_gradients_of_all_layouts_reach_the_buffer_of_a_reduction_by_one_kernel(case: Case) -> None:
    steps = trained_once(case).run.steps
    sent = zip((step for step in steps if step.kind == "reduce"), reading.copies_in(steps), strict=True)
    copies = [writers for step, writers in sent if "reduce_scatter" in step.name]
    assert copies == [1] * len(copies)
    assert len(copies) >= case.num_layers + 1


def test_what_dtensor_exchanges_is_launched_as_the_graphs_say() -> None:
    made = trained_once(EXCHANGING)
    (graphs,) = made.graphs
    said = [launch.kind for stage in ("forward", "backward") for launch in launches.sequence(graphs[stage])]
    assert said.count("shard_dim_alltoall") == 4 * EXCHANGING.num_layers
    assert [step.kind for step in made.run.steps].count("exchange") == 4 * EXCHANGING.num_layers


def test_backward_gathers_within_the_subgroup() -> None:
    (graphs,) = trained_once(SUBGROUPS).graphs
    ranks = {stage: [*map(collectives.world_size_of, collectives.unshard_launches(graphs[stage]))] for stage in graphs}
    assert {*ranks["forward"]} == {WORLD_SIZE}
    assert ranks["backward"].count(layouts.SUBGROUP) == SUBGROUPS.num_layers + 1


def test_weights_are_gathered_in_fp8() -> None:
    fewer, all_of_them = (reading.gathered_bytes(trained_once(case).run.steps) for case in (FP8, HOOKED))
    assert fewer < 0.7 * all_of_them  # the other one has the same parameters


def test_the_hook_runs_behind_the_all_reduce_and_before_the_optimizer() -> None:
    steps = trained_once(HOOKED).run.steps
    hooks = [i for i, step in enumerate(steps) if step.name.startswith("aten::mul_")]
    averaged = {storage for step in steps if "all_reduce" in step.name for storage in step.writes}
    assert {storage for i in hooks for storage in steps[i].writes} == averaged
    assert all(any("all_reduce" in step.name for step in steps[:i]) for i in hooks)


@pytest.mark.slow
def test_a_block_runs_at_most_two_kernels_per_launch_more_than_torch_alone_in_either_direction() -> None:
    alone = dataclasses.replace(NCCL, policy=None, options=())
    launches = _of_block(NCCL, reading.num_launches)
    ours, theirs = (_of_block(case, reading.num_kernels) for case in (NCCL, alone))
    assert launches == [1, 2]
    assert all(n <= m + 2 * more for n, m, more in zip(ours, theirs, launches, strict=True)), (ours, theirs)


def _of_block(case: Case, count: Callable[[Sequence[Step]], int]) -> list[int]:
    """Count what one more block adds to a forward, and to a backward."""
    few, many = (
        trained_once(dataclasses.replace(case, num_layers=case.num_layers + more)).run.steps for more in (0, 1)
    )
    pairs = zip(reading.by_direction(few), reading.by_direction(many), strict=True)
    return [count(more) - count(less) for less, more in pairs]


@pytest.mark.parametrize(
    "case", [NCCL, SIDE, pytest.param(MORE["defaults"], marks=pytest.mark.slow)], ids=["nccl", "side", "defaults"]
)
def test_matrices_are_not_copied_out_of_what_was_gathered(case: Case) -> None:
    steps = trained_once(case).run.steps
    assert reading.copied_bytes(steps) <= 0.02 * reading.gathered_bytes(steps)


def test_python_is_called_once_for_each_launch_beside_the_streams_of_a_group() -> None:
    steps = trained_once(SIDE).run.steps
    assert 0 < reading.num_python_calls(steps) <= reading.num_launches(steps)


@pytest.mark.parametrize("gpu", OTHER_GPUS, ids=lambda gpu: str(gpu.architecture))
@pytest.mark.slow
def test_keeps_its_order_on_other_gpus(gpu: Gpu) -> None:
    made = trained_once(dataclasses.replace(NCCL, gpu=gpu))
    (graphs,) = made.graphs
    assert reading.ran(made.run.steps) == reading.scheduled([graphs["forward"], graphs["backward"]])


def test_every_patch_is_needed() -> None:
    lane = installed()
    for case in (NCCL, CUDAGRAPHS):
        trained_once(case)
    called = {patch.name for patch in patches.patches(lane) if not patch.is_read}
    assert called - lane.used == LOOKS_FOR
