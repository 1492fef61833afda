"""Run passes: check properties, apply, lint, verify, time, log, record. The only place that does any of these."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

from torch.fx import GraphModule

from fxshard import torch_private
from fxshard.errors import InvariantError
from fxshard.ir import pins, tags
from fxshard.ir.history import CAPTURED, PassResult, Snapshot, Stage
from fxshard.ir.verify import baseline, verifier
from fxshard.passes._base import GraphPass, PassContext, Property

_log = logging.getLogger(__name__)


def run(
    gm: GraphModule,
    passes: Sequence[GraphPass],
    ctx: PassContext,
    *,
    given: Iterable[Property],
    stage: Stage | None = None,
    follows: PassResult | None = None,
) -> bool:
    """Apply `passes` to `gm`, in place and in order; return whether any of them changed the graph.

    `given` are the properties that hold before the first pass. `stage` is by default the first one of the graph's kind;
    `follows` is what the history kept of the same graph last, if nothing has touched it since.

    Raises:
        InvariantError: a pass requires what nothing before it ensures (checked before the first pass runs), or left a
            graph that is malformed or breaks an invariant (`ir/verify/verifier.py`).
    """
    given = tuple(given)
    check_properties(passes, given)
    properties = set(given)
    expected = _take_baseline(gm, ctx, properties)
    kept = Snapshot(gm.graph) if follows is None else follows.kept
    stage = ctx.history.begin(stage or Stage(ctx.kind), kept, "as the stage received it")
    _publish(ctx.history.last(stage), "00/00")
    for i, step in enumerate(passes):
        properties |= step.ensures
        expected = _run_one(gm, step, ctx, expected, properties, stage, f"{i + 1:02}/{len(passes):02}")
    _, *records = ctx.history.stages[str(stage)].values()
    changed = any(record.changed for record in records)
    if changed:
        gm.recompile()
    return changed


def _take_baseline(gm: GraphModule, ctx: PassContext, properties: Iterable[Property]) -> baseline.Baseline:
    """Return what the graph must keep from now on."""
    if Property.MARKED in properties:
        tags.tag_markers(gm.graph, ctx.plan)
    return baseline.baseline_of(
        gm.graph, ctx.plan, ctx.kind, num_results=ctx.num_results, unsharded_budget_bytes=ctx.unsharded_budget_bytes
    )


def check_properties(passes: Sequence[GraphPass], given: Iterable[Property]) -> frozenset[Property]:
    """Return the properties that hold after `passes`, or raise an InvariantError where one lacks what it requires."""
    known = set(given)
    for step in passes:
        missing = sorted(each.name for each in step.requires - known)
        if missing:
            raise InvariantError(f"{step} requires {', '.join(missing)}; run the pass that ensures it before this one.")
        known |= step.ensures
    return frozenset(known)


def _run_one(
    gm: GraphModule,
    step: GraphPass,
    ctx: PassContext,
    expected: baseline.Baseline,
    properties: set[Property],
    stage: Stage,
    place: str,
) -> baseline.Baseline:
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
    if (changed and step.changes_signature) or ctx.plan is not expected.plan:
        expected = _take_baseline(gm, ctx, properties)
    graph = pins.inlined(gm.graph)
    if ctx.verify and (changed or step.ensures):
        verifier.verify(graph, expected, properties, broken_by=str(step), debug=ctx.verify == "debug")
    seconds = time.perf_counter() - start
    result = PassResult(
        name=step.name,
        stage=stage,
        description=str(step),
        kept=Snapshot(graph) if changed else ctx.history.last(stage).kept,
        changed=changed,
        seconds=seconds,
        declined=tuple(ctx.declined),
        notes=tuple(ctx.notes),
    )
    ctx.history.add(result)
    _log.info("[%s %s] %s  nodes %d -> %d  %.0f ms", stage, place, step, nodes, len(gm.graph.nodes), seconds * 1e3)
    _publish(ctx.history.last(stage), place)
    return expected


def _publish(record: PassResult, place: str) -> None:
    """Give a pass result to those who listen: the debug log, and torch's structured trace."""
    for reason in record.reasons():
        _log.info("[%s %s] %s: %s", record.stage, place, record.name, reason)
    if _log.isEnabledFor(logging.DEBUG):
        after = "" if record.name == CAPTURED else "after "
        _log.debug("%s graph %s%s:\n%s", record.stage, after, record.description, record)
    torch_private.trace_artifact(f"fxshard_{record.stage}_{place[:2]}_{record.name}", lambda: str(record))
