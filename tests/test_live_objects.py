"""Objects are found whatever the program has told the garbage collector."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from fxshard.live_objects import instances_of, referrers_of

pytestmark = pytest.mark.usefixtures("thaws")


@pytest.fixture(params=["watched", "frozen"])
def frozen(request: pytest.FixtureRequest) -> bool:
    """Whether a test is to freeze its objects."""
    return bool(request.param == "frozen")


@pytest.mark.slow
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


def test_frozen_objects_stay_so_where_they_do_not_count(caplog: pytest.LogCaptureFixture) -> None:
    class Own(nn.Linear): ...

    model = Own(2, 2)
    gc.freeze()
    assert instances_of(Own, thaw=False) == []
    assert gc.get_freeze_count() > 0
    assert caplog.messages == []
    assert instances_of(Own) == [model]
    assert gc.get_freeze_count() == 0
    assert [message for message in caplog.messages if "undoes gc.freeze()" in message] == caplog.messages != []


def test_a_step_of_a_model_that_is_not_ours_leaves_frozen_what_is(fake_group: None) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    gc.freeze()
    optimizer.step()
    assert gc.get_freeze_count() > 0


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
