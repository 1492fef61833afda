"""Ranks that meet at the store: all texts, a rank that never comes, one decision, and how texts differ."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from fxshard import torch_private
from fxshard.errors import ConfigError
from fxshard.ranks.rendezvous import Rendezvous, difference_from, gather_texts
from tests.ranks import two_ranks


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


@two_ranks
def test_every_rank_sees_the_texts_of_all_in_rank_order() -> None:
    for exchange in ("first", "second"):
        texts = gather_texts("order", f"{exchange} of {dist.get_rank()}", world())
        assert texts == [f"{exchange} of 0", f"{exchange} of 1"]


@two_ranks
def test_texts_that_all_have_read_are_deleted() -> None:
    for _ in range(3):
        gather_texts("deleted", "a text", world())
    dist.barrier()
    store, place = torch_private.default_store(), Rendezvous("deleted", [0, 1]).place
    assert store.check([f"{place}/times/0", f"{place}/times/1"])
    assert not any(store.check([f"{place}/3/{key}"]) for key in ("came", "decision", "left", 0, 1))


@two_ranks
def test_names_the_rank_that_never_comes() -> None:
    if dist.get_rank() == 0:
        with pytest.raises(ConfigError, match=r"(?s)late: rank 0 waited .* for rank 1\. All ranks must"):
            gather_texts("late", "here", world(), timeout=timedelta(seconds=1))
    dist.barrier()
    if dist.get_rank() == 1:  # it must not go on alone
        with pytest.raises(ConfigError, match=r"late: rank 1 came after others had waited .*\. All ranks must"):
            gather_texts("late", "here", world(), timeout=timedelta(seconds=1))


@two_ranks
def test_what_one_rank_decides_first_counts_for_all() -> None:
    meeting, rank = Rendezvous("decision", [0, 1], again=True), dist.get_rank()
    assert meeting.decision(0.0) == ""
    dist.barrier()
    decided = meeting.decide(f"by {rank}")
    assert decided in {"by 0", "by 1"}
    assert gather_texts("decided", decided, world()) == [decided] * 2
    assert meeting.decision(0.0) == decided


@two_ranks
def test_the_last_rank_knows_that_all_have_come_and_what_with() -> None:
    meeting, rank = Rendezvous("last", [0, 1], again=True), dist.get_rank()
    if rank == 0:
        assert not meeting.arrive("a")
        assert meeting.texts() == {0: "a"}
    dist.barrier()
    if rank == 1:
        assert meeting.arrive("b")
        assert meeting.texts() == {0: "a", 1: "b"}


def test_the_first_line_that_differs_is_given_with_its_ranks() -> None:
    assert difference_from(0, {0: ["a", "b"], 2: ["a", "b"]}) == ""
    assert difference_from(2, {0: ["a"], 2: ["a", "b"]}) == "rank 2 has b, rank 0 has nothing"
