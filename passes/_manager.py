"""Run passes: check facts, apply, lint, verify, time, log, record; recompile. The only place that does any of these."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

from torch.fx import GraphModule

from fxshard.errors import InvariantError
from fxshard.ir import contract, fake, spec, tags
from fxshard.ir.journal import CAPTURED, Record
from fxshard.passes._base import Fact, GraphPass, PassContext

_log = logging.getLogger(__name__)


def run(
    gm: GraphModule, passes: Sequence[GraphPass], ctx: PassContext, *, given: Iterable[Fact], stage: str = ""
) -> bool:
    """Apply `passes` in order.

    Args:
        gm: edited in place.
        passes: a stage of the pipeline.
        ctx: handed to every pass.
        given: facts that hold before the first pass.
        stage: what the journal calls it; by default the kind of the graph.

    Returns:
        Whether any pass changed the graph.

    Raises:
        InvariantError: a pass requires what nothing before it ensures (checked before the first pass runs), or left a
            graph that is malformed or breaks an invariant (`ir/spec.py`).
    """
    given = tuple(given)
    check_facts(passes, given)
    facts = set(given)
    agreed = _agree(gm, ctx, facts)
    stage = ctx.journal.begin(stage or ctx.kind, gm.graph, "as the stage received it")
    _publish(ctx.journal.stages[stage][CAPTURED], "00/00")
    before = len(ctx.journal.stages[stage])
    for i, step in enumerate(passes):
        facts |= step.ensures
        agreed = _run_one(gm, step, ctx, agreed, facts, stage, f"{i + 1:02}/{len(passes):02}")
    changed = any(record.changed for record in list(ctx.journal.stages[stage].values())[before:])
    if changed:
        gm.recompile()
    return changed


def _agree(gm: GraphModule, ctx: PassContext, facts: Iterable[Fact]) -> contract.Contract:
    """What the graph must keep from now on."""
    if Fact.MARKED in facts:
        tags.tag_markers(gm.graph, ctx.plan)
    return contract.contract_of(
        gm.graph,
        ctx.plan,
        ctx.kind,
        num_results=ctx.num_results,
        unsharded_budget_bytes=ctx.unsharded_budget_bytes,
    )


def check_facts(passes: Sequence[GraphPass], given: Iterable[Fact]) -> frozenset[Fact]:
    """The facts that hold after `passes`.

    Raises:
        InvariantError: a pass requires a fact that is neither given nor ensured by a pass before it.
    """
    known = set(given)
    for step in passes:
        missing = sorted(fact.name for fact in step.requires - known)
        if missing:
            raise InvariantError(f"{step} requires {', '.join(missing)}; run the pass that ensures it before this one.")
        known |= step.ensures
    return frozenset(known)


def _run_one(
    gm: GraphModule,
    step: GraphPass,
    ctx: PassContext,
    agreed: contract.Contract,
    facts: set[Fact],
    stage: str,
    place: str,
) -> contract.Contract:
    """Run a pass; return what the graph must keep from then on."""
    start, nodes = time.perf_counter(), len(gm.graph.nodes)
    ctx.declined.clear()
    ctx.notes.clear()
    changed = step.apply(gm, ctx)
    if changed:
        try:
            gm.graph.lint()
        except RuntimeError as error:
            raise InvariantError(f"{step} left a malformed {ctx.kind} graph: {error}") from error
    if changed and step.changes_signature:
        agreed = _agree(gm, ctx, facts)
    if ctx.verify and (changed or step.ensures):
        spec.verify(gm.graph, agreed, facts, broken_by=str(step), debug=ctx.verify == "debug")
    seconds = time.perf_counter() - start
    ctx.journal.add(
        stage,
        step.name,
        str(step),
        gm.graph,
        changed=changed,
        seconds=seconds,
        declined=tuple(ctx.declined),
        notes=tuple(ctx.notes),
    )
    _log.info("[%s %s] %s  nodes %d -> %d  %.0f ms", stage, place, step, nodes, len(gm.graph.nodes), seconds * 1e3)
    _publish(ctx.journal.last(stage), place)
    return agreed


def _publish(record: Record, place: str) -> None:
    """Give a record to those who listen: the debug log, and torch's structured trace."""
    for reason in record.reasons():
        _log.info("[%s %s] %s: %s", record.stage, place, record.name, reason)
    if _log.isEnabledFor(logging.DEBUG):
        after = "" if record.name == CAPTURED else "after "
        _log.debug("%s graph %s%s:\n%s", record.stage, after, record.description, record)
    fake.trace_artifact(f"fxshard_{record.stage}_{place[:2]}_{record.name}", lambda: str(record))
