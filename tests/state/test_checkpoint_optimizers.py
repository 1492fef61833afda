"""What optimizers keep beside the state of their parameters: options that are tensors, and what they add."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.distributed.tensor import Shard, distribute_tensor

import fxshard
from fxshard.errors import ConfigError
from tests.ranks import two_ranks
from tests.state.bodies import build, state_of, train
from tests.state.helpers import load_saved, require_refusal, shared_folder
from tests.state.states import assert_same


class Adds(torch.optim.SGD):
    """Has something beside its state."""

    added: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "added": self.added}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.added = state_dict["added"]
        super().load_state_dict(state_dict)


@two_ranks
@pytest.mark.parametrize("where", ["option", "addition"])
def test_sharded_tensors_that_belong_to_no_parameter_are_refused(where: str) -> None:
    model, _ = build()
    optim = Adds(model.parameters(), lr=0.1)
    sharded = distribute_tensor(torch.ones(4), next(model.parameters()).device_mesh, [Shard(0)])  # type: ignore[attr-defined]
    if where == "option":
        optim.param_groups[0]["kept"] = {"inside": sharded}
    else:
        optim.added = sharded
    name = r"param_groups.0.kept.inside\." if where == "option" else r"added\."
    with shared_folder() as folder, pytest.raises(ConfigError, match=f"that belong to no parameter: {name}"):
        fxshard.save_checkpoint(folder / "a", model, optim)


def two_groups(model: nn.Linear, rate: float, **options: Any) -> torch.optim.Optimizer:
    """Return an optimizer of weight and bias, which share the tensor of the rate unless `options` has another."""
    groups = [{"params": [model.weight]}, {"params": [model.bias], **options}]
    return torch.optim.AdamW(groups, lr=torch.tensor(rate), foreach=False)


def test_groups_that_share_a_tensor_part_where_they_load_different_values(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    fxshard.save_checkpoint(tmp_path / "a", model, two_groups(model, 0.1, lr=torch.tensor(0.2)))
    optim = two_groups(model, 0.5)
    fxshard.load_checkpoint(tmp_path / "a", model, optim)
    assert [float(group["lr"]) for group in optim.param_groups] == pytest.approx([0.1, 0.2])


def test_groups_share_a_tensor_still_where_they_load_the_same_value(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    fxshard.save_checkpoint(tmp_path / "a", model, two_groups(model, 0.1))
    optim = two_groups(model, 0.5)
    shared = optim.param_groups[0]["lr"]
    fxshard.load_checkpoint(tmp_path / "a", model, optim)
    assert all(group["lr"] is shared for group in optim.param_groups)
    assert float(shared) == pytest.approx(0.1)


def test_parameters_that_share_state_part_where_they_load_different_values(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optim, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    shared = torch.zeros(())
    for count, parameter in enumerate(model.parameters()):
        optim.state[parameter] = {"step": torch.tensor(float(count))}
        other.state[parameter] = {"step": shared}
    fxshard.save_checkpoint(tmp_path / "a", model, optim)
    fxshard.load_checkpoint(tmp_path / "a", model, other)
    assert [float(other.state[parameter]["step"]) for parameter in model.parameters()] == [0.0, 1.0]


def post_local_sgd(model: nn.Module, rate: float) -> PostLocalSGDOptimizer:
    inner = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    return PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=1000, warmup_steps=1000))


@two_ranks
def test_options_reach_the_optimizer_that_another_one_wraps() -> None:
    model, _ = build()
    optim = post_local_sgd(model, 0.1)
    train(model, optim, range(2))
    expected = state_of(model, optim)
    other, _ = build(seed=1)
    other_optim = post_local_sgd(other, 0.5)
    load_saved((model, optim), (other, other_optim))
    assert other_optim.optim.param_groups is other_optim.param_groups
    assert (other_optim.optim.param_groups[0]["lr"], other_optim.averager.step) == (0.1, 2)
    assert_same(state_of(other, other_optim), expected)
    assert train(other, other_optim, range(2, 4)) == train(model, optim, range(2, 4))


class Counts(Adds):
    """Compares what it has added with the state that it is handed."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["added"] != len(state_dict["state"]):
            raise ValueError(f"{state_dict['added']} counted, {len(state_dict['state'])} in state")
        super().load_state_dict(state_dict)


@two_ranks
def test_an_optimizer_sees_its_additions_with_the_state_that_was_saved() -> None:
    model, _ = build()
    optim, other = (Counts(model.parameters(), lr=rate, momentum=0.9) for rate in (0.1, 0.5))
    train(model, optim, range(1))
    optim.added = len(optim.state)
    load_saved((model, optim), (model, other))
    assert other.added == optim.added
    assert_same(state_of(model, other), state_of(model, optim))


class WritesFirst(Adds):
    """Writes what it adds in place, then looks at it."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.added.copy_(state_dict["added"])
        if self.added.sum() > 2:
            raise ValueError("too much")


@two_ranks
def test_what_an_optimizer_writes_before_it_raises_is_taken_back() -> None:
    model, _ = build()
    optim = WritesFirst(model.parameters(), lr=0.1)
    optim.added = torch.full((2,), 3.0)
    with shared_folder() as folder:
        fxshard.save_checkpoint(folder / "a", model, optim)
        optim.added.fill_(1.0)
        require_refusal(folder / "a", model, optim, ConfigError, "WritesFirst.load_state_dict", "too much")
    assert optim.added.tolist() == [1.0, 1.0]


class AddsLater(torch.optim.SGD):
    """Adds something only once it has something to add."""

    average: Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        added = {} if self.average is None else {"average": self.average}
        return {**super().state_dict(), **added}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.average = state_dict.get("average")
        super().load_state_dict(state_dict)


def test_an_optimizer_without_state_takes_what_another_one_of_its_class_has_added(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optim, other = (AddsLater(model.parameters(), lr=0.1) for _ in range(2))
    optim.average = torch.ones(2)
    fxshard.save_checkpoint(tmp_path / "a", model, optim)
    fxshard.load_checkpoint(tmp_path / "a", model, other)
    assert other.average is not None
    assert other.average.tolist() == [1.0, 1.0]
