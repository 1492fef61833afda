"""What `fxshard plan --answers` prints: from where on communication is hidden, what fits, when latency dominates.

A block's compute and the peak are polynomials of the batch size, or of the sequence length, through three simulations.
A block's gather is an expression of the world size, as the sizes of its shards are. sympy solves for where two meet.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import sympy

from fxshard.cost.comm import transfer_seconds
from fxshard.cost.symbols import WORLD_SIZE, Quantity, Sum
from fxshard.hardware import HardwareSpec
from fxshard.inspect.target import Target
from fxshard.ir.collectives import GATHERS
from fxshard.plan.outline import outline
from fxshard.plan.plan import SCHEDULES, PlanSettings, WorldSize, tokens_of
from fxshard.plan.run import GIB, RunCost, cost_of, planned_frames

X = sympy.Symbol("x", positive=True)
"""The batch size, or the sequence length."""


class BlockSample(NamedTuple):
    """One simulation, and the block of it that is called most often: its compute, and what it launches."""

    forward: float
    backward: float
    gather: Quantity  # seconds, of the world size
    reduction: Quantity  # seconds of all that backward launches besides
    gathered: Quantity  # bytes
    cost: RunCost


Sampled = tuple[int, BlockSample]
"""A batch size or sequence length, and the simulation there."""


def sample(target: Target, world_size: WorldSize, spec: HardwareSpec, how: PlanSettings) -> BlockSample:
    """Trace and simulate a run on the first schedule of its settings."""
    model, args, kwargs = target
    schedule, saves_all = SCHEDULES[how.schedules[0]], not SCHEDULES[how.schedules[0]].fuses
    traced = outline(
        model, args, kwargs, world_size=world_size, options=how.options(spec, schedule), saves_all=saves_all
    )
    cost = cost_of(traced, spec, schedule, tokens=tokens_of((args, kwargs)), **how.run)
    outer, called = planned_frames(traced, spec, schedule, {})
    most = collections.Counter(traced.order).most_common(1)
    block = called[traced.order.index(most[0][0])] if most else outer
    there, back = (graph.timeline.launches.values() for graph in (block.forward, block.backward))
    gathers = [launch for launch in there if launch.node.target in GATHERS]
    return BlockSample(
        block.forward.timeline.compute_seconds,
        block.backward.timeline.compute_seconds,
        Sum(launch.seconds for launch in gathers).total,
        Sum(launch.seconds for launch in back if launch.node.target not in GATHERS).total,
        Sum(launch.nbytes for launch in gathers).total,
        cost,
    )


def curve(points: Sequence[tuple[int, float]]) -> sympy.Expr:
    """The polynomial of `X` through points, in exact numbers."""
    return sympy.expand(sympy.interpolate([(x, sympy.Rational(y)) for x, y in points], X))


def crossings(expression: sympy.Expr, symbol: sympy.Symbol = X) -> list[float]:
    """The positive values at which a rational expression is 0, in rising order."""
    numerator = sympy.numer(sympy.together(sympy.nsimplify(expression, rational=True)))
    roots = [complex(root) for root in sympy.Poly(numerator, symbol).nroots()] if numerator.has(symbol) else []
    return sorted(root.real for root in roots if abs(root.imag) < 1e-9 and root.real > 0)


def hidden_from(samples: Sequence[Sampled], ranks: int) -> float | None:
    """From which value on a block's compute is longer than what is on the link beside it, forward and backward."""
    gather, reduction = (float(sympy.sympify(each).subs(WORLD_SIZE, ranks)) for each in samples[0][1][2:4])
    forward = curve([(x, each.forward) for x, each in samples]) - sympy.Rational(gather)
    backward = curve([(x, each.backward) for x, each in samples]) - sympy.Rational(gather + reduction)
    found = [crossings(each)[:1] for each in (forward, backward)]
    return max(first for (first,) in found) if all(found) else None


def largest(samples: Sequence[Sampled], capacity: float) -> float | None:
    """The largest value whose peak fits."""
    return next(iter(crossings(curve([(x, each.cost.peak_bytes) for x, each in samples]) - int(capacity))), None)


def latency_dominates_from(gathered: Quantity, spec: HardwareSpec, ranks: int) -> float:
    """From how many ranks on the latency of a gather of so many bytes is longer than its transfer: 1 if always."""
    link = spec.link(max(ranks, 2 * spec.ranks_per_node))
    nbytes = sympy.Integer(int(sympy.sympify(gathered).subs(WORLD_SIZE, ranks)))  # but for padding the same for all
    whole, latency = (transfer_seconds("all_gather", each, WORLD_SIZE, link) for each in (nbytes, 0))
    return max(crossings(whole - 2 * latency, WORLD_SIZE), default=1.0)


def answers(
    build: Callable[[int, int], Target],
    world_size: int,
    batch: int,
    sequence: int,
    spec: HardwareSpec,
    how: PlanSettings,
) -> Iterator[str]:
    """Answer in a line each; `build` makes a model for so many sequences, of so many tokens."""
    along = {
        "batch": [(batch * n, sequence) for n in (1, 2, 4)],
        "sequence": [(batch, sequence * n) for n in (1, 2, 4)],
    }
    for place, (what, points) in enumerate(along.items()):
        samples = [(point[place], sample(build(*point), world_size, spec, how)) for point in points]
        first = samples[0][1]
        hidden, most = hidden_from(samples, world_size), largest(samples, first.cost.capacity)
        yield f"a block hides its communication {_number(f'from {what}', hidden, samples) or f'at no {what}'}"
        yield f"what fits has {_number(f'at most {what}', most, samples) or f'any {what}'}"
    dominated = latency_dominates_from(first.gathered, spec, world_size)
    yield f"the latency of a block's gather is longer than its transfer from {dominated:,.0f} ranks on"
    inside = spec.ranks_per_node
    if inside and world_size > inside:
        hybrid = sample(build(batch, sequence), (world_size // inside, inside), spec, how).cost
        seconds, nbytes = hybrid.seconds / first.cost.seconds - 1, (hybrid.peak_bytes - first.cost.peak_bytes) / GIB
        yield f"sharding over {inside} ranks in {world_size // inside} replicas: {seconds:+.1%} step, {nbytes:+.1f} GiB"


def _number(text: str, value: float | None, samples: Sequence[Sampled]) -> str:
    """The value behind a text, and whether it is beyond what was simulated; empty without a value."""
    if value is None:
        return ""
    return f"{text} {'' if samples[0][0] <= value <= samples[-1][0] else 'about '}{value:,.1f}"
