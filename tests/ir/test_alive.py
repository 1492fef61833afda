"""Objects are found whatever the program has told the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from fxshard.ir.alive import instances_of, referrers_of


@pytest.fixture(params=["watched", "frozen"])
def frozen(request: pytest.FixtureRequest) -> Iterator[bool]:
    """As every test sees it, after this suite has frozen what it imported; or with the test's objects frozen too."""
    yield request.param == "frozen"
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def test_instances_and_holders_are_found(frozen: bool) -> None:
    class Own(nn.Linear): ...

    model = Own(2, 2)
    holder = [model.weight]
    if frozen:
        gc.freeze()
    assert instances_of(Own) == [model]
    assert any(found is model for found in instances_of(nn.Linear))
    assert any(found is holder for found in referrers_of(model.weight))
    assert any(found is holder for found in referrers_of(torch, model.weight))


def test_what_holds_nothing_is_no_holder(frozen: bool) -> None:
    value = nn.Parameter(torch.zeros(1))
    if frozen:
        gc.freeze()
    assert not [found for found in referrers_of(value) if isinstance(found, tuple | list)]


def test_what_was_frozen_stays_so() -> None:
    before = gc.get_freeze_count()
    assert before > 10_000, "tests/conftest.py freezes what it has imported"
    instances_of(nn.Module)
    assert gc.get_freeze_count() >= before


def test_what_was_not_frozen_is_left_alone() -> None:
    gc.unfreeze()
    try:
        instances_of(nn.Module)
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()
