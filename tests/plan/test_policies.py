"""Policies of blocks: what is traced and priced under each, and what is recommended within a budget."""

import dataclasses
import functools
import itertools

import pytest
import torch
from rich.console import Console
from torch import nn

from fxshard.cost.solver import PolicyProblem
from fxshard.errors import ConfigError
from fxshard.hardware import load
from fxshard.inspect.explain import explained
from fxshard.plan.outline import order_of
from fxshard.plan.plan import SCHEDULES, PlanSettings
from fxshard.plan.policies import KINDS, Policy, TracedPolicies, policies_of
from fxshard.plan.prices import Prices
from fxshard.plan.recommend import Recommendation, best_mix, recommend
from fxshard.plan.run import GIB
from fxshard.tools.plan.recommendation import advice, table_of
from tests.models import Doing
from tests.pairwise import slow
from tests.plan.models import LAYERS, ROWS, WIDTH, Stack, build

DEVICE = dataclasses.replace(load("h100-sxm"), link_bandwidth=2e9, network_bandwidth=0.25e9, host_bandwidth=1e9)
KEEP, SUBGROUP = Policy(reshard_after_forward=False), Policy(reshard_after_forward=8)
RESIDENT, OFFLOAD = Policy(reshard_after_forward=False, resident=True), Policy(offloads=True)


@functools.cache
def traced(accumulation: int) -> TracedPolicies:
    settings = PlanSettings(param_dtype=torch.float32, accumulation=accumulation, reduces_each=False)
    how, (model, args) = SCHEDULES["FSDP2"], build()
    policies = policies_of(KINDS, shards=16, ranks_per_node=8, accumulation=accumulation)
    options = settings.options(DEVICE, how)
    return TracedPolicies(
        (model, args, {}), policies, DEVICE, how, world_size=16, options=options, tokens=ROWS, **settings.run
    )


@functools.cache
def problem(accumulation: int) -> PolicyProblem:
    return Prices(traced(accumulation)).problem()


def picks(accumulation: int, *policies: Policy) -> tuple[int, ...]:
    return tuple(traced(accumulation).policies.index(policy) for policy in policies)


def test_policies_are_those_that_make_a_difference() -> None:
    def names(**given: int) -> list[str]:
        return [
            each.name for each in policies_of(KINDS, **{"shards": 8, "ranks_per_node": 8, "accumulation": 1, **given})
        ]

    assert names() == ["reshard", "keep", "offload", "reshard, checkpoint", "keep, checkpoint", "offload, checkpoint"]
    assert "reshard to 8" in names(shards=64)
    assert "resident" in names(accumulation=2)
    with pytest.raises(ConfigError, match="there is no policy recompute; there are reshard, keep, subgroup"):
        policies_of(["keep", "recompute"], shards=8, ranks_per_node=8, accumulation=1)


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [slow(1), 3])
def test_the_solver_counts_the_bytes_of_the_simulation(accumulation: int) -> None:
    found, asked = traced(accumulation), problem(accumulation)
    backward = found.frames_of(found.all_alike()[0])[1][0].memory.backward  # offloaded blocks end their reduction late
    some = itertools.islice(itertools.product(range(len(found.policies)), repeat=LAYERS), 0, None, 37)
    for mix in (*found.all_alike(), *some):
        held, offloads = found.simulate(mix).peak_bytes, any(found.policies[pick].offloads for pick in mix)
        assert held <= asked.peak_bytes(mix) <= held + backward.late_bytes * offloads


@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_solver_counts_the_seconds_of_the_simulation_but_for_what_is_the_same_in_all(accumulation: int) -> None:
    found, asked = traced(accumulation), problem(accumulation)
    base = found.all_alike()[0]
    for mix in itertools.islice(itertools.product(range(len(found.policies)), repeat=LAYERS), 0, None, 37):
        simulated = found.simulate(mix).seconds - found.simulate(base).seconds
        counted = asked.step_seconds(mix) - asked.step_seconds(base)
        assert counted == pytest.approx(simulated, abs=0.1 * found.simulate(base).seconds)


@pytest.mark.parametrize("policy", [slow(KEEP), OFFLOAD])
def test_policies_are_traced_on_few_blocks_and_cost_what_tracing_all_says(policy: Policy) -> None:
    model, given = Stack(8).to("meta"), (torch.empty(ROWS, WIDTH, device="meta"),)
    how, settings = SCHEDULES["FSDP2"], PlanSettings(param_dtype=torch.float32)
    options = settings.options(DEVICE, how)
    found = TracedPolicies(
        (model, given, {}), [Policy(), policy], DEVICE, how, world_size=16, options=options, tokens=ROWS, **settings.run
    )
    called = [name for number in {*found.orders[1]} for call in found.frames[number].calls for name in call]
    assert called == ["blocks.0", "blocks.4", "blocks.7"]
    every = explained(
        model, given, {}, world_size=16, options={**options, **policy.options, "regional": True}, saves_all=True
    )
    frames = (every.frames[number] for number in order_of(every, found.names))
    for number, frame in zip(found.orders[1], frames, strict=True):
        for stage in ("forward", "backward"):
            assert str(found.frames[number].running(stage).graph) == str(frame.running(stage).graph)


def test_keeping_a_block_saves_its_second_gather() -> None:
    reshard, kept = (
        traced(1).simulate(picks(1, *[Policy()] * 3)),
        traced(1).simulate(picks(1, Policy(), KEEP, Policy())),
    )
    assert kept.seconds < reshard.seconds
    gathers = [
        sum(each.name.startswith(("unshard", "all_gather")) for each in c.record.intervals if each.stream != "compute")
        for c in (reshard, kept)
    ]
    assert gathers[0] - gathers[1] == 1


def test_resident_blocks_are_gathered_once_in_all_microbatches() -> None:
    reshard, resident = (traced(3).simulate(picks(3, *[each] * 3)) for each in (Policy(), RESIDENT))
    gathers = [
        sum("unshard_blocks" in each.name for each in c.record.intervals if each.stream != "compute")
        for c in (reshard, resident)
    ]
    assert gathers == [3 * 2 * LAYERS, LAYERS]
    assert resident.memory["unsharded"] > reshard.memory["unsharded"]


def test_the_record_of_a_mix_has_its_peak_its_kernels_and_its_blocks() -> None:
    cost = traced(3).simulate(picks(3, RESIDENT, OFFLOAD, Policy(checkpoints=True)))
    record = cost.record
    assert record.memory().nbytes.sum(1).max() == cost.peak_bytes
    assert [run.name for run in record.runs if run.name and run.graph.stage == "forward"] == 3 * list(traced(3).names)
    assert sum(kernel.seconds for kernel in record.kernels()) <= cost.compute
    assert sum(each.seconds for each in record.exposed) == pytest.approx(sum(cost.exposed.values()))


def test_offloaded_blocks_have_neither_shards_nor_optimizer_state_on_the_device() -> None:
    reshard, offload = (traced(1).simulate(picks(1, *[each] * 3)) for each in (Policy(), OFFLOAD))
    shards = LAYERS * 256 * 256 // 16 * 4
    assert reshard.memory["parameters"] - offload.memory["parameters"] == shards
    assert reshard.memory["optimizer"] - offload.memory["optimizer"] == 2 * shards
    assert offload.optimizer > reshard.optimizer
    assert {each.stream for each in offload.record.intervals} >= {"to_device", "to_host"}


def test_checkpointed_blocks_hold_less_and_compute_more() -> None:
    plain, again = (traced(1).simulate(picks(1, *[Policy(checkpoints=each)] * 3)) for each in (False, True))
    assert again.compute > plain.compute
    assert again.flops == plain.flops


def test_the_best_mix_is_that_of_simulating_all() -> None:
    found, asked = traced(1), problem(1)
    every = [*itertools.product(range(len(found.policies)), repeat=LAYERS)]
    peaks = sorted({found.simulate(mix).peak_bytes for mix in found.all_alike()})
    for budget in peaks:
        best = best_mix(found, asked, budget, 5.0)
        assert best is not None
        least = min(found.simulate(m).seconds for m in every if found.simulate(m).peak_bytes <= budget)
        assert best.cost.peak_bytes <= budget
        assert least <= best.cost.seconds <= 1.05 * least
        assert best.cost.seconds <= min(
            found.simulate(m).seconds for m in found.all_alike() if found.simulate(m).peak_bytes <= budget
        )


@functools.cache
def recommended(budget_gib: float) -> Recommendation:
    settings = PlanSettings(param_dtype=torch.float32, schedules=("FSDP2",))
    return recommend(build, world_size=8, budget_gib=budget_gib, settings=settings, kinds=["keep"], name="stack")


def test_a_recommendation_says_what_to_write_and_what_other_budgets_buy() -> None:
    found = recommended(1.0)
    assert [*advice(found)] == ["blocks.0 to blocks.2: fully_shard(block, reshard_after_forward=False)"]
    assert [mix.cost.peak_bytes <= mix.budget for mix in found.pareto] == [True] * len(found.pareto)
    steps = [mix.cost.seconds for mix in found.pareto]
    assert steps == sorted(steps, reverse=True)
    console = Console(width=160, record=True)
    console.print(table_of(found))
    text = console.export_text()
    assert "stack on 8 x h100-sxm, batch 1, FSDP2" in text
    assert "3 keep" in text


def test_a_budget_that_nothing_fits_into_is_said() -> None:
    found = recommended(1.0 / GIB)
    assert found.best is None
    assert [*advice(found)] == ["no policies fit into the budget: use more ranks, a smaller batch or a larger budget."]


def test_a_model_without_blocks_has_no_policies() -> None:
    plain = Doing(lambda m, x: m.linear(x).sum(), linear=nn.Linear(64, 1)).to("meta")
    with torch.device("meta"), pytest.raises(ConfigError, match="Doing has no blocks to choose policies for"):
        recommend(lambda batch: (plain, (torch.empty(8, 64),)), world_size=8)
