"""Recommend what the blocks of a run do: the fastest policies within a memory budget, and what other budgets buy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fxshard import hardware as hardwares
from fxshard.cost.solver import Picks, PolicyProblem, solve
from fxshard.inspect.target import checked
from fxshard.plan.plan import SCHEDULES, PlanSettings, WorldSize, ranks_text, require_whole_nodes, tokens_of
from fxshard.plan.policies import KINDS, Policy, TracedPolicies, policies_of
from fxshard.plan.prices import Prices
from fxshard.plan.run import GIB, RunCost

_POINTS = 6  # budgets of the table
_TRIES = 5  # how often a budget is lowered because the simulation holds more than the solver has counted


@dataclass(frozen=True, kw_only=True)
class PolicyMix:
    """A policy for each block of a run, and what the simulated step costs."""

    budget: float  # bytes that it had to fit into
    policies: Sequence[Policy]  # of the blocks, in the order in which they are called
    cost: RunCost  # of the step
    # by how much of the step better policies could be faster at most, as far as the solver counts; `None` where it has
    # found none that fit
    gap: float | None


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """What the blocks of a run should do."""

    title: str  # the run
    blocks: Sequence[str]  # their names
    best: PolicyMix | None  # within the budget; `None` if nothing fits
    alike: Sequence[PolicyMix]  # one policy for all blocks
    # the best within budgets from the least that a policy needs up to what the fastest one takes
    pareto: Sequence[PolicyMix]

    @property
    def policies(self) -> dict[str, Policy]:
        """Of the best mix, by name of the block: what `apply_policies` takes; empty if nothing fits."""
        return dict(zip(self.blocks, self.best.policies, strict=True)) if self.best else {}


def recommend(
    build: Callable[[int], Any],
    *,
    world_size: WorldSize,
    batch: int = 1,
    budget_gib: float | None = None,
    hardware: str = "h100-sxm",
    settings: PlanSettings | None = None,
    kinds: Iterable[str] = KINDS,
    time_limit: float = 5.0,
    name: str | None = None,
) -> Recommendation:
    """Choose for each block of a run whether it gathers again, keeps, offloads or computes again.

    Args:
        build: as of `plan`.
        world_size: as of `plan`.
        batch: sequences of a rank in a microbatch.
        budget_gib: what a step may hold; default: the device's memory.
        hardware: a name, or the path of a JSON file.
        settings: how the run trains, on the first of its schedules.
        kinds: what policies may be made of.
        time_limit: seconds for each budget, after which the best that is known counts.
        name: what the table calls the model; default: its class.

    Raises:
        ConfigError: as `plan` raises, for an unknown kind, or a model without blocks.
        MissingExtraError: scipy is not installed.
    """
    spec, how = hardwares.load(hardware), settings or PlanSettings()
    require_whole_nodes(world_size, spec)
    target, schedule = checked(build(batch), "the builder"), SCHEDULES[how.schedules[0]]
    shards = world_size if isinstance(world_size, int) else world_size[1]
    traced = TracedPolicies(
        target,
        policies_of(kinds, shards=shards, ranks_per_node=spec.ranks_per_node, accumulation=how.accumulation),
        spec,
        schedule,
        world_size=world_size,
        options=how.options(spec, schedule),
        optimizers=how.optimizers,
        tokens=tokens_of(target[1:]),
        **how.run,
    )
    title = f"{name or type(target[0]).__name__} on {ranks_text(world_size)} x {spec.name}, batch {batch}"
    budget = spec.memory_gib if budget_gib is None else budget_gib
    return _recommended(traced, budget * GIB, time_limit, f"{title}, {how.schedules[0]}")


def _recommended(traced: TracedPolicies, budget: float, time_limit: float, title: str) -> Recommendation:
    problem = Prices(traced).problem()
    alike = [_mix(traced, picks, budget, None) for picks in traced.all_alike()]
    least = min(mix.cost.peak_bytes for mix in alike)
    fastest = best_mix(traced, problem, np.inf, time_limit)
    assert fastest is not None
    budgets = np.linspace(least, fastest.cost.peak_bytes, _POINTS)[:-1]
    found = [mix for each in budgets if (mix := best_mix(traced, problem, float(each), time_limit))]
    found.append(dataclasses.replace(fastest, budget=fastest.cost.peak_bytes))
    return Recommendation(
        title=title,
        blocks=traced.names,
        best=best_mix(traced, problem, budget, time_limit),
        alike=alike,
        pareto=[*{tuple(mix.policies): mix for mix in reversed(found)}.values()][::-1],
    )


def best_mix(traced: TracedPolicies, problem: PolicyProblem, budget: float, time_limit: float) -> PolicyMix | None:
    """The fastest simulated mix within a budget of bytes: the solver's, or one policy for all."""
    gap, candidates, allowed = None, [*traced.all_alike()], budget
    for _ in range(_TRIES):
        solution = solve(problem, allowed, time_limit=time_limit)
        if solution is None:
            break
        candidates.append(solution.picks)
        gap, over = solution.gap, traced.simulate(solution.picks).peak_bytes - budget
        if over <= 0:
            break
        allowed -= over
    fitting = [picks for picks in candidates if traced.simulate(picks).peak_bytes <= budget]
    best = min(fitting, key=lambda picks: traced.simulate(picks).seconds, default=None)
    return None if best is None else _mix(traced, best, budget, gap)


def _mix(traced: TracedPolicies, picks: Picks, budget: float, gap: float | None) -> PolicyMix:
    policies = [traced.policies[pick] for pick in picks]
    return PolicyMix(budget=budget, policies=policies, cost=traced.simulate(picks), gap=gap)
