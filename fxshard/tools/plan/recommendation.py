"""What `fxshard plan --memory-budget-gib` prints: a table of what budgets buy, and what to write."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator

from rich.table import Table

from fxshard.inspect.tables import duration, size
from fxshard.plan.policies import Policy
from fxshard.plan.recommend import Recommendation


def table_of(found: Recommendation) -> Table:
    """The recommended mix, one policy for all, and the best within other budgets."""
    table = Table(title=found.title)
    for name in ("within", "step", "peak", "exposed", "gap", "blocks"):
        table.add_column(name, justify="left" if name == "blocks" else "right")
    best = [found.best] if found.best else []
    for mixes, style in ((best, "bold"), (found.alike, "dim"), (found.pareto, None)):
        for mix in mixes:
            cost, counts = mix.cost, collections.Counter(policy.name for policy in mix.policies)
            within = "" if mixes is found.alike else size(int(mix.budget))
            exposed = f"{sum(cost.exposed.values()) / cost.seconds:.1%}"
            gap = "" if mix.gap is None else f"{mix.gap:.2%}"
            words = ", ".join(f"{count} {name}" for name, count in counts.most_common())
            table.add_row(within, duration(cost.seconds), size(cost.peak_bytes), exposed, gap, words, style=style)
        table.add_section()
    return table


def advice(found: Recommendation) -> Iterator[str]:
    """What to write for the recommended mix: a line for each row of blocks that do the same."""
    if found.best is None:
        yield "no policies fit into the budget: use more ranks, a smaller batch or a larger budget."
        return
    for policy, row in itertools.groupby(zip(found.blocks, found.best.policies, strict=True), key=lambda pair: pair[1]):
        names = [name for name, _ in row]
        yield f"{names[0]}{f' to {names[-1]}' if len(names) > 1 else ''}: {_code(policy)}"


def _code(policy: Policy) -> str:
    given = []
    if policy.reshard_after_forward is not True and not policy.resident:
        given.append(f"reshard_after_forward={policy.reshard_after_forward}")
    if policy.offloads:
        given.append("offload_policy=CPUOffloadPolicy()")
    code = f"fully_shard({', '.join(['block', *given])})"
    code += ".set_reshard_after_backward(False)" if policy.resident else ""
    return f"checkpoint it, {code}" if policy.checkpoints else code
