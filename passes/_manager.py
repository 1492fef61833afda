"""Run passes: check their facts, apply, lint, recompile, time, log. The only place that does any of these."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

from torch.fx import GraphModule

from fxshard.errors import InvariantError
from fxshard.ir import fake, text
from fxshard.passes._base import Fact, GraphPass, PassContext

_log = logging.getLogger(__name__)


def run(gm: GraphModule, passes: Sequence[GraphPass], ctx: PassContext, *, given: Iterable[Fact]) -> bool:
    """Apply `passes` in order.

    Args:
        gm: edited in place.
        passes: a stage of the pipeline.
        ctx: handed to every pass.
        given: facts that hold before the first pass.

    Returns:
        Whether any pass changed the graph.

    Raises:
        InvariantError: a pass requires what nothing before it ensures (checked before the first pass runs), or left a
            malformed graph.
    """
    _check_facts(passes, given)
    changed = [_run_one(gm, step, ctx, f"{i + 1:02}/{len(passes):02}") for i, step in enumerate(passes)]
    return any(changed)


def _check_facts(passes: Sequence[GraphPass], given: Iterable[Fact]) -> None:
    known = set(given)
    for step in passes:
        missing = sorted(fact.name for fact in step.requires - known)
        if missing:
            raise InvariantError(f"{step} requires {', '.join(missing)}; run the pass that ensures it before this one.")
        known |= step.ensures


def _run_one(gm: GraphModule, step: GraphPass, ctx: PassContext, place: str) -> bool:
    start, nodes = time.perf_counter(), len(gm.graph.nodes)
    changed = step.apply(gm, ctx)
    if changed:
        try:
            gm.graph.lint()
        except RuntimeError as error:
            raise InvariantError(f"{step} left a malformed {ctx.kind} graph: {error}") from error
        gm.recompile()
    took_ms = (time.perf_counter() - start) * 1e3
    _log.info("[%s %s] %s  nodes %d -> %d  %.0f ms", ctx.kind, place, step, nodes, len(gm.graph.nodes), took_ms)
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug("%s graph after %s:\n%s", ctx.kind, step, text.graph_text(gm.graph))
    fake.trace_artifact(f"fxshard_{ctx.kind}_{place[:2]}_{type(step).__name__}", lambda: text.graph_text(gm.graph))
    return changed
