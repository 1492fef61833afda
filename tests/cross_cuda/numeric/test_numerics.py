"""What the code for CUDA computes is right, in every order that streams allow, and a missing wait shows."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Sequence

import pytest
import torch

from tests.cross_cuda.clocks import Seeded
from tests.cross_cuda.numeric.cases import CORE, GRAPHED, MORE
from tests.cross_cuda.numeric.executor import drawn, first, unordered
from tests.cross_cuda.numeric.faults import Judge, Verdict, faults_of, judged
from tests.drawn import commit

pytestmark = [pytest.mark.cuda_lane, pytest.mark.timeout(900)]

ONE_ROUNDING = torch.finfo(torch.float32).eps
NUM_SEEDS, NUM_PAIRS, NUM_FAULTS, NUM_ITEMS = 3, 2, 4, 4
"""Of the tests that are not slow: drawn orders and faults of a case, others at each commit."""


def _cases() -> Iterator[object]:
    for name, case in CORE.items():
        yield pytest.param(case, id=name)
    for name, case in MORE.items():
        yield pytest.param(case, id=name, marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=_cases())
def judge(request: pytest.FixtureRequest) -> Iterator[Judge]:
    """A case, compiled once, and two steps of it without a fault."""
    with judged(request.param) as judge:
        yield judge


def seeds(number: int) -> list[int]:
    """Draw seeds, others at each commit."""
    found = [zlib.crc32(f"{commit()} {i}".encode()) for i in range(number)]
    print("seeds:", found)
    return found


def some(of: Sequence[object], number: int) -> list[int]:
    """Draw places in a sequence, others at each commit."""
    found = sorted({seed % len(of) for seed in seeds(number)})
    print("places:", found)
    return found


def test_trains_as_well_as_the_cpu(judge: Judge) -> None:
    errors = judge.computed.errors(judge.clean.computed(drawn(seeds(1)[0])))
    of_losses = max(error.cpu for name, error in errors.items() if "loss" in name)  # each is but one number
    for name, (ours, cpu) in errors.items():
        assert ours <= 2 * max(of_losses if "loss" in name else cpu, ONE_ROUNDING), (name, ours, cpu)
    assert {"step 0 loss 0", "step 1 gradient head.weight", "parameter tokens.weight"} <= errors.keys()


def test_orders_every_two_ops_that_touch_the_same_memory(judge: Judge) -> None:
    assert unordered(judge.clean.items) == []
    assert judge.clean.run.streams.races == []
    assert judge.clean.run.unwaited == {}, "launched, and never waited for"


def test_gives_the_same_bits_in_orders_that_are_drawn(judge: Judge) -> None:
    pairs = [*itertools.permutations(judge.clean.streams, 2)]
    for seed in seeds(NUM_SEEDS):
        assert judge.is_same(judge.clean, drawn(seed)), f"seed {seed}"
    for place in some(pairs, NUM_PAIRS):
        assert judge.is_same(judge.clean, first(*pairs[place])), f"{pairs[place]} first"


@pytest.mark.slow
@pytest.mark.parametrize("judge", CORE.values(), ids=CORE.keys(), indirect=True)
def test_gives_the_same_bits_in_the_order_of_every_pair_of_streams(judge: Judge) -> None:
    for pair in itertools.permutations(judge.clean.streams, 2):
        assert judge.is_same(judge.clean, first(*pair)), f"{pair} first"


def require_found(verdict: Verdict) -> None:
    """The clocks find whatever a comparison of all pairs finds, and nothing goes unseen."""
    assert verdict.num_races or not verdict.num_unordered, verdict
    assert verdict.found_by != "neither", verdict


def test_finds_faults_that_are_drawn(judge: Judge) -> None:
    for kind in ("fork", "join"):
        if judge.clean.run.streams.count[kind]:
            assert judge.seeded(Seeded(kind), 1).found_by == "clocks and numbers"
    faults = [*faults_of(judge.clean)]
    for place in some(faults, NUM_FAULTS):
        require_found(judge.seeded(faults[place]))
    for place in some(judge.ops, NUM_ITEMS):
        verdict = judge.without(judge.ops[place])
        assert verdict.by_numbers, verdict


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("judge", (CORE | GRAPHED).values(), ids=(CORE | GRAPHED).keys(), indirect=True)
def test_finds_every_fault(judge: Judge) -> None:
    for fault in faults_of(judge.clean):
        require_found(judge.seeded(fault))
    for number in judge.ops:
        for verdict in (judge.without(number), judge.exchanged(number)):
            assert verdict is None or verdict.by_numbers, verdict
