"""Ranks compare their runs through the store: agreement, difference, lateness, failure."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from fxshard.errors import RankMismatchError
from fxshard.ir.launches import Launch
from fxshard.ranks.rendezvous import Rendezvous, is_alone, longest_wait
from fxshard.runtime import rank_check, rank_group
from fxshard.runtime.dispatch import GuardedCode
from fxshard.runtime.rank_check import Agreement
from fxshard.runtime.rank_group import ARRIVAL_S, LOOK_EVERY, RING, CollectiveSequence, RankGroup
from fxshard.runtime.stalled_runs import TELL_AFTER_S, watching
from tests.ranks import fresh_ranks, join_group, two_ranks
from tests.watching import said_by

REMEDY = (
    "Where a rank's data decides which modules run, call all of them on every rank, in one order: give those without "
    "input a dummy (an image of zeros, or zero rows: x[:0]) and add 0 times their output's sum to the loss."
)


def both() -> RankGroup:
    """Start a rank group of the two ranks; each test has a store namespace of its own by that."""
    return RankGroup([0, 1])


def launches(text: str) -> list[Launch]:
    """One for each line; the names are those that the nodes have on this rank."""
    return [Launch("0", line, f"%{line}_{dist.get_rank()}") for line in text.splitlines()]


def begin(rank_group: RankGroup, text: str, kind: str = "forward") -> bool:
    is_news = rank_group.begin(CollectiveSequence.of(kind, launches(text)))
    rank_group.tell()
    return is_news


def meet(rank_group: RankGroup, warn: float = 0.2, limit: float = 1.0) -> None:
    rank_group.wait_and_compare(warn=warn, limit=limit)


def of_rank(*texts: str) -> str:
    return texts[dist.get_rank()]


@contextmanager
def refused(message: str) -> Iterator[None]:
    with pytest.raises(RankMismatchError) as caught:
        yield
    assert str(caught.value) == message


@two_ranks
def test_ranks_that_launch_the_same_go_on_whatever_the_kind_of_their_graphs() -> None:
    rank_group = both()
    begin(rank_group, "a\nb", of_rank("forward", "inference"))
    meet(rank_group)


@two_ranks
def test_all_ranks_hear_of_the_first_difference_in_the_same_words() -> None:
    rank_group = both()
    begin(rank_group, "a")
    begin(rank_group, of_rank("a\nb\nd", "a\nc\nd"), of_rank("forward", "backward"))
    with refused(
        "the ranks launch different collectives. In run 2, collective 2 is the first that differs:"
        "\n    rank 0 (forward): b  # %b_0"
        "\n    rank 1 (backward): c  # %c_1\n"
        "Build, shard and compile the same model with the same options on every rank, and make the same calls of it "
        f"in the same order. {REMEDY}"
    ):
        meet(rank_group)


@two_ranks
def test_a_rank_that_launches_less_differs() -> None:
    rank_group = both()
    begin(rank_group, of_rank("a\nb", "a"))
    with pytest.raises(
        RankMismatchError, match=r"(?s)collective 2 .*rank 0 .*: b  # %b_0\n    rank 1 .*: nothing more"
    ):
        meet(rank_group)


@two_ranks
def test_only_what_never_followed_the_run_before_it_is_news() -> None:
    rank_group = both()
    news = []
    for text in ("forward", "backward", "forward", "backward", "forward", "backward", "forward", "forward"):
        news.append(begin(rank_group, text))
        if news[-1]:
            meet(rank_group)
    assert news == [True, True, True, False, False, False, False, True]


@two_ranks
def test_what_was_refused_stays_news() -> None:
    rank_group = both()
    assert begin(rank_group, "a")
    meet(rank_group)
    assert begin(rank_group, of_rank("b", "c"))
    with pytest.raises(RankMismatchError):
        meet(rank_group)
    assert begin(rank_group, "a")
    meet(rank_group)
    assert begin(rank_group, "b")
    meet(rank_group)


@two_ranks
def test_a_rank_that_looks_finds_what_the_other_wrote_without_looking() -> None:
    rank_group = both()
    for run in range(RING + 3):  # more than the store keeps
        begin(rank_group, f"{run % 2}")
    meet(rank_group)
    begin(rank_group, of_rank("0", "1"))
    if dist.get_rank() == 1:
        with pytest.raises(RankMismatchError, match=f"In run {RING + 4}, collective 1 is"):
            meet(rank_group)


def known(rank_group: RankGroup, *texts: str) -> None:
    """Let the ranks agree on these runs, so that none is news later."""
    for text in texts:
        if begin(rank_group, text):
            meet(rank_group)


@two_ranks
def test_ranks_that_look_back_find_where_known_runs_parted() -> None:
    rank_group = both()
    known(rank_group, "h", "a", "h", "b", "h", "a", "h")
    rank_group.look_back(is_over=True)
    assert not begin(rank_group, of_rank("a", "b"))
    assert not begin(rank_group, "h", "backward")
    with refused(
        "the ranks launch different collectives. In run 8, collective 1 is the first that differs:"
        f"\n    rank 0 (forward): {of_rank('a  # %a_0', 'a  # %a_0')}"
        "\n    rank 1 (forward): b  # %b_1\n"
        "Build, shard and compile the same model with the same options on every rank, and make the same calls of it "
        f"in the same order. {REMEDY}\nThis was found after the run: outputs and gradients since then are wrong on all "
        "ranks, so drop them before the optimizer steps."
    ):
        rank_group.look_back(is_over=True)
    for _ in range(3):  # it is said once
        begin(rank_group, "h")
        rank_group.look_back(is_over=True)


@two_ranks
@pytest.mark.parametrize("is_over", [True, False])
def test_what_was_refused_is_not_found_again_by_a_look(is_over: bool) -> None:
    """A script that catches the error goes on."""
    rank_group = both()
    begin(rank_group, of_rank("a", "b"))
    with pytest.raises(RankMismatchError, match="In run 1"):
        meet(rank_group)
    rank_group.look_back(is_over=is_over)
    known(rank_group, "h", "a")
    rank_group.look_back(is_over=is_over)


@two_ranks
def test_a_look_is_over_all_runs_though_the_last_ones_are_the_same_again() -> None:
    rank_group = both()
    begin(rank_group, of_rank("a", "b"))
    for _ in range(RING + 5):
        begin(rank_group, "h")
    rank = dist.get_rank()
    message = rf"ranks {1 - rank} and {rank} launched different collectives before run 7. Where a rank's"
    with pytest.raises(RankMismatchError, match=message):
        rank_group.look_back(is_over=True)


@two_ranks
def test_runs_that_are_under_way_are_looked_at_later_and_nobody_waits() -> None:
    rank_group = both()
    known(rank_group, "h", "a", "b", "h", "b")
    rank_group.look_back(is_over=False)
    began = time.monotonic()
    if dist.get_rank() == 0:  # it is a run ahead
        begin(rank_group, "a")
        rank_group.look_back(is_over=False)
    assert time.monotonic() - began < ARRIVAL_S
    dist.barrier()
    if dist.get_rank() == 1:
        begin(rank_group, "b")
    dist.barrier()
    if dist.get_rank() == 1:  # what it has begun since the last look counts at the next one
        rank_group.look_back(is_over=False)
    with pytest.raises(RankMismatchError, match="In run 6"):
        rank_group.look_back(is_over=False)


@two_ranks
def test_a_difference_before_the_run_in_which_a_rank_waits_is_known() -> None:
    """What was launched in the earlier run may be waited for now."""
    rank_group = both()
    begin(rank_group, "a")
    dist.barrier()
    assert rank_group.known_difference() == ""
    begin(rank_group, of_rank("b", "c"), "backward")
    begin(rank_group, "a")
    dist.barrier()
    found = rank_group.known_difference()
    assert "In run 2, collective 1 is the first that differs" in found
    assert "rank 0 (backward): b" in found
    assert "rank 1 (backward): c" in found
    rank_group.forget()
    begin(rank_group, "a")
    dist.barrier()
    assert rank_group.known_difference() == ""


def begin_untold(rank_group: RankGroup, *texts: str) -> None:
    for text in texts:
        rank_group.begin(CollectiveSequence.of("forward", launches(text)))


@two_ranks
def test_a_rank_tells_of_many_runs_in_one_message_when_it_looks_back() -> None:
    rank_group = both()
    known(rank_group, "h", "a", "h", "b", "h")
    with pytest.MonkeyPatch.context() as patch:
        told, write_all = [], Rendezvous.write_all

        def counted(at: Rendezvous, values: Mapping[str, object]) -> None:
            told.append(len(values))
            write_all(at, values)

        patch.setattr(Rendezvous, "write_all", counted)
        begin_untold(rank_group, "a", "h", of_rank("a", "b"), "h")
        assert told == []
        with pytest.raises(RankMismatchError, match=r"In run 8, collective 1 is the first that differs"):
            rank_group.look_back(is_over=True)
        rank_group.tell()
        assert told == [4]


@two_ranks
def test_a_rank_that_is_slow_to_look_has_told_of_its_runs_after_a_while() -> None:
    rank_group = both()
    known(rank_group, "a", "b", "a")
    if dist.get_rank() == 0:
        begin_untold(rank_group, "b")
        with watching([rank_group], []):
            time.sleep(3 * TELL_AFTER_S)
        dist.barrier()
    else:
        begin(rank_group, "a")
        with pytest.raises(RankMismatchError, match="In run 4, collective 1 is the first that differs"):
            meet(rank_group, limit=3 * TELL_AFTER_S)
        dist.barrier()


@two_ranks
def test_a_rank_that_is_done_waits_until_one_that_is_stuck_has_told_of_its_runs() -> None:
    """It has one reduction less, and would step its optimizer."""
    rank_group = both()
    known(rank_group, "a", "b", "c", "a", "c", "a")
    dist.barrier()
    if dist.get_rank() == 0:
        begin_untold(rank_group, "b", "c")
        time.sleep(2.5 * TELL_AFTER_S)  # its thread may wait for the interpreter
        rank_group.tell()
    else:
        begin_untold(rank_group, "c")
        with pytest.raises(RankMismatchError, match="In run 7, collective 1 is the first that differs"):
            rank_group.look_back(is_over=True)


@two_ranks
def test_without_a_backward_ranks_look_back_once_in_many_runs() -> None:
    rank_group = both()
    for _ in range(LOOK_EVERY - 1):
        begin(rank_group, "a")
    assert not rank_group.is_look_due
    begin(rank_group, "a")
    assert rank_group.is_look_due
    rank_group.look_back(is_over=False)
    assert not rank_group.is_look_due


@two_ranks
def test_after_an_error_that_one_rank_saw_only_the_runs_themselves_are_compared() -> None:
    rank_group = both()
    known(rank_group, "a", "b")
    failed, ran = CollectiveSequence.failure("no memory"), CollectiveSequence.of("forward", launches("a"))
    rank_group.begin(ran if dist.get_rank() else failed)
    begin(rank_group, "a")
    rank_group.look_back(is_over=True)
    begin(rank_group, of_rank("a", "b"))
    with pytest.raises(RankMismatchError, match="In run"):
        rank_group.look_back(is_over=True)


@two_ranks
def test_a_rank_that_others_have_left_far_behind_is_told_so() -> None:
    rank_group = both()
    for run in range(1 + dist.get_rank() * RING):
        begin(rank_group, "a")
        if run == 0:
            meet(rank_group)
    dist.barrier()
    if dist.get_rank() == 0:
        with refused(
            f"rank 1 is at run {RING + 1} (forward graph), but rank 0 has only come to run 1 (forward graph). Every "
            "rank must make the same calls of the compiled model."
        ):
            meet(rank_group)


@two_ranks
def test_a_line_says_who_is_late_and_the_late_rank_is_waited_for() -> None:
    ranks = both()
    if dist.get_rank() == 1:
        time.sleep(1.0)
    with said_by(rank_group.__name__) as lines:
        begin(ranks, "a")
        meet(ranks, limit=30.0)
    if dist.get_rank() == 1:
        assert lines == []
    else:
        assert 1 <= len(lines) <= 3, lines  # after 0.2, 0.4 and 0.8 s
        assert lines[0].startswith("fxshard: rank 0 has waited 0 s for rank 1 (still compiling?) before run 1 (forw")


@two_ranks
def test_a_rank_that_never_comes_is_named_in_the_end() -> None:
    rank_group = both()
    if dist.get_rank() == 0:
        begin(rank_group, "a")
        with refused(
            "rank 1 never came to run 1 (forward graph), for which rank 0 waited 1 s. Every rank must "
            "make the same calls of the compiled model."
        ):
            meet(rank_group)


@two_ranks
def test_a_run_outside_of_graphs_is_called_so() -> None:
    rank_group = both()
    if dist.get_rank() == 0:
        begin(rank_group, "a", "waiting")
        with refused(
            "rank 1 never came to run 1 (waiting, outside of graphs), for which rank 0 waited 1 s. Every rank must "
            "make the same calls of the compiled model."
        ):
            meet(rank_group)


@two_ranks
def test_waits_an_hour_or_ten_times_the_timeout_of_the_group() -> None:
    store = _get_default_store()
    assert longest_wait() == max(3600.0, 10 * store.timeout.total_seconds())  # type: ignore[attr-defined]


@two_ranks
def test_a_rank_that_cannot_compile_tells_the_others() -> None:
    rank_group = both()
    if dist.get_rank() == 0:
        rank_group.begin(CollectiveSequence.failure("no such option"))
    else:
        begin(rank_group, "a")
        with refused("rank 0 could not compile what is run 1 (forward graph) on rank 1: no such option"):
            meet(rank_group)
    begin(rank_group, "a")
    meet(rank_group)


@fresh_ranks
def test_a_lost_store_ends_the_wait() -> None:
    rank, meeting = dist.get_rank(), _get_default_store()
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        meeting.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(meeting.get("port")), 2, is_master=False)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    del store
    rank_group = both()
    dist.barrier()
    if rank == 0:
        time.sleep(1.0)
        dist.destroy_process_group()  # the server ends with the last reference to its store
        return
    begin(rank_group, "a")
    with pytest.raises(RankMismatchError, match="the store of the process group failed while rank 1 waited"):
        meet(rank_group, warn=30.0, limit=60.0)


@pytest.mark.slow
@fresh_ranks
def test_a_new_process_group_begins_at_its_first_run() -> None:
    runs: list[int] = []
    run = GuardedCode(lambda inputs: runs.append(len(inputs)), "forward", launches("a"))
    for generation in range(2):
        rank = dist.get_rank()
        for _ in range(3 + rank if generation == 0 else 2):  # the first group ends out of step
            run([1, 2])
        dist.destroy_process_group()
        if generation == 0:
            join_group("another")
    assert runs == [2] * (5 + rank)


@two_ranks
def test_replicas_compare_the_order_of_what_they_launch_over_both_axes() -> None:
    """The reductions of each go over a group of its own, under another name."""
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()].group_name
    together = cast(dist.ProcessGroup, dist.group.WORLD).group_name

    def launch(kind: str, group: str, unit: str) -> Launch:
        return Launch(group, f"{kind} f32[4] on group {group!r} for {unit}", f"%{kind}_{unit}", kind, unit)

    run = [launch(*of) for unit in "ab" for of in (("reduce_scatter", alone, unit), ("all_reduce", together, unit))]
    with Agreement("backward").before(run):
        pass
    in_another_order = [run[0], run[2], run[1], run[3]] if dist.get_rank() else run
    expected = (
        r"collective 2 is the first that differs:\n"
        r"    rank 0 \(backward\): all_reduce f32\[4\] for a  # %all_reduce_a\n"
        r"    rank 1 \(backward\): reduce_scatter f32\[4\] for b  # %reduce_scatter_b\n"
    )
    with pytest.raises(RankMismatchError, match=expected), Agreement("backward").before(in_another_order):
        pass


def test_one_process_alone_never_waits(fake_group: None) -> None:
    run = GuardedCode(lambda inputs: "ran", "forward", launches("a"))
    assert run([]) == "ran"
    rank_check.report_failure(["0"], "nobody hears it")


def test_emulated_ranks_are_never_waited_for() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert is_alone()
    finally:
        dist.destroy_process_group()


def test_a_graph_without_collectives_runs_unguarded() -> None:
    inputs: list[object] = [1]
    GuardedCode(list.clear, "forward", [])(inputs, {"a": "b"})
    assert inputs == []
