"""Objects are found whatever the program has told the garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from fxshard.ir.alive import instances_of, referrers_of


@pytest.fixture(params=["watched", "frozen"])
def frozen(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether a test is to freeze its objects."""
    yield request.param == "frozen"
    gc.unfreeze()


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


def test_nothing_is_kept_that_was_alive_while_one_looked() -> None:
    """As freezing again would do."""
    gc.freeze()
    model = nn.Linear(2, 2)
    model.itself = model
    gone = weakref.ref(model)
    instances_of(nn.Module)
    referrers_of(model.weight)
    del model
    gc.collect()
    assert gone() is None
