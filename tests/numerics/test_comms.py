"""Objects that do a unit's collectives (FSDP2's `set_custom_all_gather`): they get, and make, what they do in FSDP2."""

from __future__ import annotations

import pytest

from tests.numerics import comms
from tests.pairwise import each_once, slow
from tests.ranks import two_ranks
from tests.state import processes

ALSO = ("gathers alone", "reductions alone", "counted", "kept", "frozen", "accumulation", "resident", "offloaded")
"""Scenarios of which "one buffer", "one buffer to send", "all" and the tests that count calls run the lines."""


@two_ranks
@pytest.mark.parametrize("name", [slow(name) if name in ALSO else name for name in comms.SCENARIOS])
def test_trains_as_fsdp2_with_the_same_object(name: str) -> None:
    comms.train(name)


@two_ranks
@pytest.mark.parametrize("lower", ["eager", slow("inductor")])  # equal blocks below count calls of Inductor's code
@pytest.mark.parametrize(("bucket", "prefetch"), [slow("unit", 1), ("auto", "auto"), (64.0, 2)])
def test_gets_what_it_gets_in_fsdp2(bucket: str | float, prefetch: int | str, lower: str) -> None:
    comms.get_what_they_get_in_fsdp2(True, bucket=bucket, prefetch=prefetch, lower=lower)


@two_ranks
def test_gets_what_it_gets_in_fsdp2_where_nothing_is_compiled() -> None:
    comms.get_what_they_get_in_fsdp2(False)


@two_ranks
@pytest.mark.parametrize("compiled", [True, False])
def test_an_error_is_what_the_object_raises_or_gets_wrong(compiled: bool) -> None:
    comms.fail_with_what_they_raise(compiled)


@two_ranks
@pytest.mark.parametrize("compiled", [True, False])
def test_ranks_with_and_without_an_object_are_an_error(compiled: bool) -> None:
    comms.differ_between_ranks(compiled)


@pytest.mark.slow
@two_ranks
def test_cached_code_calls_the_object_that_is_there_now() -> None:
    comms.are_found_again_by_their_type()


@two_ranks
def test_an_object_of_torchs_takes_it_back() -> None:
    comms.may_be_taken_back()


@two_ranks
def test_adopt_and_release_carry_objects_over() -> None:
    comms.are_carried_over()


@pytest.mark.slow
@pytest.mark.multi_rank
def test_on_four_ranks_and_on_two_replicas() -> None:
    processes.run(4, comms.train, "all")
    processes.run(4, comms.train_replicas)
    processes.run(4, comms.train_in_subgroups)


@pytest.mark.slow
@two_ranks
def test_trains_with_code_of_inductors() -> None:
    comms.train_compiled()


@two_ranks
def test_trains_block_by_block() -> None:
    comms.train_blocks()


@two_ranks
@each_once(lower=["eager", "inductor"], each=[False, True])
def test_equal_blocks_have_objects_of_their_own(lower: str, each: bool) -> None:
    comms.are_told_apart(lower, each)


@pytest.mark.slow
@two_ranks
def test_serves_inference() -> None:
    comms.serve_inference()


@two_ranks
def test_explain_says_which_object() -> None:
    comms.are_explained()
