"""Ranks that wait for each other in different process groups get an error within seconds, not at a timeout."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import fxshard
from fxshard import RankMismatchError
from fxshard.runtime import gloo
from tests.models import Chain, FeedForward, Towers
from tests.pairwise import slow
from tests.state import processes
from tests.watching import said_by

EAGER: dict[str, Any] = {"lower": "eager"}


def mesh_of_its_own(backend: str, timeout: timedelta) -> DeviceMesh:
    return DeviceMesh.from_group(dist.new_group(backend=backend, timeout=timeout), "cpu")


def sharded(backend: str = gloo.BACKEND, timeout: timedelta = timedelta(minutes=30)) -> Any:
    """Each part has a process group of its own."""
    torch.manual_seed(0)
    model = Towers()
    for part in (*model.children(), model):
        fxshard.fully_shard(part, mesh=mesh_of_its_own(backend, timeout))
    return model


def whole(model: Any) -> Any:
    return torch.compile(model, backend="fxshard", options=EAGER)


def by_block(model: Any) -> Any:
    for part in model.children():
        part.compile(backend="fxshard", options=EAGER)
    return model


def uncompiled(model: Any) -> Any:
    return model


def call(model: Any, which: str) -> None:
    model(torch.ones(2, 8), which).sum().backward()


def learn_both_ways(model: Any) -> None:
    for which in ("image", "image", "text", "text", "image"):
        call(model, which)


FORMS: dict[str, Callable[[Any], Any]] = {"whole": whole, "by block": by_block, "uncompiled": uncompiled}


def wait_for_each_other(form: str) -> None:
    model = FORMS[form](sharded())
    learn_both_ways(model)
    began = time.monotonic()
    with pytest.raises(RankMismatchError) as caught:
        call(model, ("image", "text")[dist.get_rank()])
    assert time.monotonic() - began < 20
    text = str(caught.value)
    assert "the ranks launch different collectives" in text
    assert "image" in text
    assert "text" in text
    assert "call all of them on every rank, in one order" in text
    dist.barrier()  # the other groups are as they were


@pytest.mark.multi_rank
@pytest.mark.parametrize("form", ["whole", slow("by block"), slow("uncompiled")])
def test_ranks_that_wait_for_each_other_are_an_error(form: str) -> None:
    processes.run(2, wait_for_each_other, form)


def leave_out_a_block(bucket: str) -> None:
    torch.manual_seed(0)
    model: Any = Chain(6, 8)
    for part in (*model.blocks, model):
        fxshard.fully_shard(part)
    run: Any = torch.compile(model, backend="fxshard", options={**EAGER, "regional": True, "bucket": bucket})
    for _ in range(3):
        run(torch.ones(2, 8), range(6)).sum().backward()
    began = time.monotonic()
    with pytest.raises(RankMismatchError, match="the ranks launch different collectives"):
        run(torch.ones(2, 8), (range(6), (0, 1, 3, 4, 5))[dist.get_rank()]).sum().backward()
    assert time.monotonic() - began < 20
    time.sleep(6)  # the rank that was refused at once lives on, as where a script catches the error


@pytest.mark.multi_rank
@pytest.mark.parametrize("bucket", [slow("unit"), "auto"])
def test_a_rank_that_waits_for_one_that_was_refused_and_lives_on_hears_of_it(bucket: str) -> None:
    processes.run(2, leave_out_a_block, bucket)


def turn_off_what_was_guessed() -> None:
    torch.manual_seed(0)
    model: Any = Towers()
    model.image, model.text = FeedForward(8, 16), FeedForward(8, 300)  # so that their launches do not fit
    for part in (*model.children(), model):
        fxshard.fully_shard(part)
    learn_both_ways(by_block(model))
    call(model, "image")
    began = time.monotonic()
    with pytest.raises(RankMismatchError, match=r"(?s)the ranks launch different collectives.*image.*text"):
        call(model, ("image", "text")[dist.get_rank()])
    assert time.monotonic() - began < 20
    time.sleep(6)  # who was refused at once lives on until the other one knows


@pytest.mark.multi_rank
def test_a_rank_whose_next_block_was_not_guessed_launches_nothing_before_all_are_there() -> None:
    processes.run(2, turn_off_what_was_guessed)


def be_slow() -> None:
    model = whole(sharded())
    learn_both_ways(model)
    if dist.get_rank():
        time.sleep(16)
    call(model, "image")
    call(model, "text")


@pytest.mark.multi_rank
def test_a_rank_that_is_slow_is_waited_for() -> None:
    processes.run(2, be_slow)


def wait_on_another_backend() -> None:
    model = uncompiled(sharded("gloo", timedelta(seconds=8)))
    learn_both_ways(model)
    refusal = pytest.raises(RankMismatchError, match="the ranks launch different collectives")
    with said_by("fxshard") as said, refusal:
        call(model, ("image", "text")[dist.get_rank()])
    assert any("a run will never end, for other ranks went another way" in text for text in said)


@pytest.mark.multi_rank
def test_on_another_backend_it_is_said_at_once_and_an_error_at_the_timeout() -> None:
    processes.run(2, wait_on_another_backend)
