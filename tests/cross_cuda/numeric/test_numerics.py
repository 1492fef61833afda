"""What the code for CUDA computes is right, in every order that streams allow, and a missing wait shows."""

from __future__ import annotations

import itertools
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
import torch

from tests.cross_cuda import layouts
from tests.cross_cuda.clocks import Seeded
from tests.cross_cuda.numeric.apart import Apart
from tests.cross_cuda.numeric.cases import APART, CORE, GRAPHED, MORE
from tests.cross_cuda.numeric.computed import compiled
from tests.cross_cuda.numeric.exchanges import Collective
from tests.cross_cuda.numeric.executor import Item, Order, drawn, first, run_all, unordered
from tests.cross_cuda.numeric.faults import Judge, Verdict, faults_of
from tests.drawn import commit

pytestmark = [pytest.mark.cuda_lane, pytest.mark.timeout(900)]

ONE_ROUNDING = torch.finfo(torch.float32).eps
NUM_SEEDS, NUM_FAULTS, NUM_ITEMS = 3, 4, 4
"""Of the tests that are not slow: drawn orders and faults of a case, others at each commit."""


def _cases() -> Iterator[object]:
    for name, case in CORE.items():
        yield pytest.param(case, id=name)
    for name, case in (MORE | APART).items():
        yield pytest.param(case, id=name, marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=_cases())
def judge(request: pytest.FixtureRequest) -> Iterator[Judge]:
    """A case, compiled once, and two steps of it without a fault."""
    if request.param in APART.values():
        yield Judge(Apart(request.param))
        return
    with compiled(request.param) as computed:
        yield Judge(computed)


def seeds(number: int) -> list[int]:
    """Draw seeds, others at each commit."""
    found = [zlib.crc32(f"{commit()} {i}".encode()) for i in range(number)]
    print("seeds:", found)
    return found


def some(of: Sequence[object], number: int) -> list[int]:
    """Draw places in a sequence, others at each commit."""
    return sorted({seed % len(of) for seed in seeds(number)})


def pairs_of(streams: Sequence[str]) -> list[tuple[str, str]]:
    """Return every ordered pair; where ranks have their own streams, those of one rank, and one of each two ranks."""
    ranks = {stream: stream.partition(" of ")[2] for stream in streams}
    firsts = {rank: stream for stream, rank in reversed(ranks.items())}
    pairs = itertools.permutations(streams, 2)
    return [pair for pair in pairs if ranks[pair[0]] == ranks[pair[1]] or {*pair} <= {*firsts.values()}]


def test_trains_as_well_as_the_cpu(judge: Judge) -> None:
    errors = judge.computed.errors(judge.clean.computed(drawn(seeds(1)[0])))
    print("largest error, and that of the CPU:", *map(max, zip(*errors.values(), strict=True)))
    of_losses = max(error.cpu for name, error in errors.items() if "loss" in name)  # each is but one number
    for name, (ours, cpu) in errors.items():
        assert ours <= 2 * max(of_losses if "loss" in name else cpu, ONE_ROUNDING), (name, ours, cpu)
    assert {"step 0 loss 0", "step 1 gradient head.weight", "parameter tokens.weight"} <= errors.keys()


def test_has_no_race_and_gives_the_same_bits_in_every_order(judge: Judge) -> None:
    assert judge.clean.races == []
    assert unordered(judge.clean.items) == []
    assert judge.computed.case.overlaps_step or not any(run.unwaited for run in judge.clean.runs), (
        "launched, and never waited for"
    )
    for seed in seeds(NUM_SEEDS):
        assert judge.is_same(judge.clean, drawn(seed)), f"seed {seed}"
    for pair in pairs_of(judge.clean.streams):
        assert judge.is_same(judge.clean, first(*pair)), f"{pair} first"


def test_an_order_lets_one_stream_run_ahead_and_then_another(judge: Judge) -> None:
    items, traces = [item._replace(work=lambda: None) for item in judge.clean.items], set[tuple[str, ...]]()
    for one, other in pairs_of(judge.clean.streams):
        picked = list[tuple[set[str], str]]()
        traces.add((*run_all(items, _watched(first(one, other), picked)),))
        assert all(stream == one for ready, stream in picked if one in ready)
        assert all(stream == other for ready, stream in picked if other in ready and one not in ready)
    assert len(traces) > 1, "all orders are the same"


def _watched(order: Order, picked: list[tuple[set[str], str]]) -> Order:
    """Note which streams could run, and which one did."""

    def pick(ready: Sequence[Item]) -> Item:
        item = order(ready)
        picked.append(({one.stream for one in ready}, item.stream))
        return item

    return pick


def require_found(verdict: Verdict) -> None:
    """The clocks find whatever a comparison of all pairs finds, and nothing goes unseen."""
    assert verdict.num_races or not verdict.num_unordered, verdict
    assert verdict.found_by != "neither", verdict


def test_reduces_in_the_dtype_of_the_policy(judge: Judge) -> None:
    recorded = [item for run in judge.clean.runs for item in run.streams.items]
    reductions = [item.work for item in recorded if "reduce" in item.name]
    sent = [part for work in reductions if isinstance(work, Collective) for call in work.calls for part in call.sent]
    policy, layout = judge.computed.case.policy, judge.computed.case.layout
    assert policy is not None
    of_model = {policy.param_dtype} if layout is layouts.tensor_parallel else set()
    assert {part.dtype for part in sent} - of_model == {policy.reduce_dtype or torch.float32}


def test_finds_faults_that_are_drawn(judge: Judge) -> None:
    if not isinstance(judge.computed, Apart):  # the code of its ranks is gone, all but the last one's
        for kind in {"fork", "join"} & judge.clean.count.keys():
            assert judge.seeded(Seeded(kind)).found_by == "clocks and numbers"
        faults = [*faults_of(judge.clean)]
        for place in some(faults, NUM_FAULTS):
            require_found(judge.seeded(faults[place]))
    if judge.computed.case.overlaps_step:
        return  # its last gathers are for a third step
    for place in some(judge.ops, NUM_ITEMS):
        verdict = judge.without(judge.ops[place])
        assert verdict.by_numbers, verdict


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("judge", (CORE | GRAPHED).values(), ids=(CORE | GRAPHED).keys(), indirect=True)
def test_finds_every_fault(judge: Judge) -> None:
    table = Counter[tuple[str, bool, str]]()
    for fault in faults_of(judge.clean):
        verdict = judge.seeded(fault)
        require_found(verdict)
        table[fault.forgets, fault.moved, verdict.found_by] += 1
    for number in judge.ops:
        for kind, of_item in (("left out", judge.without(number)), ("exchanged", judge.exchanged(number))):
            assert of_item is None or of_item.by_numbers, of_item
            table[kind, False, of_item.found_by if of_item else "no fault"] += 1
    print("found:", table)
