"""`whole_matrices` in the hands of training scripts: what they do to an optimizer between and in its steps."""

from __future__ import annotations

import copy
import pickle
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.optim import Optimizer

import fxshard
from fxshard.errors import ConfigError, RankMismatchError
from fxshard.runtime.matrix_exchange import RowExchange
from tests.numerics.whole_matrices import Shampoo, assert_equal, batch, muon_of_matrices, net, sharded, take_steps
from tests.ranks import fresh_ranks, two_ranks

Make = Callable[[Iterable[Any]], Any]


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2,))


def trained(make: Make = muon_of_matrices, steps: int = 0, kind: Any = net) -> list[tuple[Any, Any]]:
    """Return the unsharded model and the sharded one, with their optimizers, after some steps."""
    plain, model = kind(), sharded(kind(), mesh())
    pairs = [(plain, make(plain.parameters())), (model, fxshard.whole_matrices(make(model.parameters())))]
    for each, optimizer in pairs:
        take_steps(each, optimizer, range(steps))
    return pairs


def assert_same_after(pairs: Iterable[tuple[Any, Any]], steps: Iterable[int]) -> None:
    (plain, expected), (model, optimizer) = pairs
    steps = list(steps)
    take_steps(plain, expected, steps)
    take_steps(model, optimizer, steps)
    assert_equal(model, plain)


def clear(optimizer: Optimizer) -> None:
    optimizer.state.clear()


def assign(optimizer: Optimizer) -> None:
    optimizer.state = defaultdict(dict)


def pop(optimizer: Optimizer) -> None:
    optimizer.state.pop(optimizer.param_groups[0]["params"][1])


def save(optimizer: Optimizer) -> None:
    clear(optimizer)
    optimizer.state_dict()


@two_ranks
@pytest.mark.parametrize("reset", [clear, assign, pop, save])
def test_state_that_is_reset_is_forgotten_by_owners(reset: Callable[[Optimizer], None]) -> None:
    pairs = trained(steps=2)
    for _, optimizer in pairs:
        reset(optimizer)
    assert_same_after(pairs, [2, 3])


@two_ranks
def test_state_is_written_once_it_is_cut_and_refused_before() -> None:
    pairs = trained(steps=2)
    parameter, optimizer = pairs[1][1].param_groups[0]["params"][0], pairs[1][1]
    for use in (
        lambda: optimizer.state[parameter]["momentum_buffer"],
        lambda: optimizer.state[parameter].clear(),
        lambda: optimizer.state[parameter].update(momentum_buffer=parameter),
        lambda: pickle.dumps(dict(optimizer.state[parameter].items())) and copy.deepcopy(optimizer.state[parameter]),
        lambda: fxshard.whole_matrices(optimizer._given),
    ):
        with pytest.raises(ConfigError, match="the state of this parameter is with its owner"):
            use()
    optimizer.shard_state()
    for _, each in pairs:
        for parameter in each.param_groups[0]["params"]:
            each.state[parameter]["momentum_buffer"].mul_(0.5)
    assert_same_after(pairs, [2, 3])


@two_ranks
def test_refuses_copies_and_steps_of_the_given_optimizer() -> None:
    model = sharded(net(), mesh())
    given = muon_of_matrices(model.parameters())
    optimizer = fxshard.whole_matrices(given)
    take_steps(model, optimizer, [0])
    with pytest.raises(ConfigError, match="Muon was given to whole_matrices"):
        given.step()
    with pytest.raises(ConfigError, match="Muon cannot be copied or pickled"):
        copy.deepcopy(optimizer)
    with pytest.raises(ConfigError, match="Muon cannot be copied or pickled"):
        pickle.dumps(optimizer)


@two_ranks
def test_gradients_that_are_cut_otherwise() -> None:
    (plain, expected), (model, optimizer) = trained()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(0), dtype=p.dtype)
        q.grad = distribute_tensor(p.grad.clone(), q.device_mesh, [Replicate()], src_data_rank=None)
    expected.step()
    optimizer.step()
    assert_equal(model, plain)
    for q in model.parameters():
        q.grad = torch.zeros(q.shape, dtype=q.dtype)
    with pytest.raises(ConfigError, match=r"gradient of the parameter blocks.0.up.weight is no DTensor"):
        optimizer.step()


class Fails(Shampoo):
    """Raises in the update of one matrix."""

    fails = False

    def _update(self, p: Tensor, lr: float) -> None:
        super()._update(p, lr)
        if self.fails and p.shape == (2, 8):
            raise ValueError("no more memory")


@fresh_ranks
def test_a_step_that_fails_on_one_rank_is_known_to_the_others_and_leaves_all_in_order() -> None:
    pairs = trained(Fails, steps=1)
    model, optimizer = pairs[1]
    optimizer.state_dict()  # so that state is on its way to owners where the step fails
    optimizer._given.fails = True
    owners = {name: rank for rank, share in optimizer.explain().owners.items() for name in share.matrices}
    model(batch(1, torch.float64)).square().sum().backward()
    if owners["head.weight [2, 8]"] == dist.get_rank():
        with pytest.raises(ValueError, match="no more memory"):
            optimizer.step()
    else:
        optimizer.step()
    state = optimizer.state_dict()["state"].values()
    assert len(state) == len(list(model.parameters()))
    assert {each["count"] for each in state} <= {1, 2}
    assert all(each["momentum"].full_tensor().isfinite().all() for each in state)
    with pytest.raises(RankMismatchError, match="its optimizer failed: no more memory"):
        take_steps(model, optimizer, [2])


@two_ranks
def test_refuses_parameters_in_another_order_on_another_rank() -> None:
    model = sharded(net(), mesh())
    matrices = [p for p in model.parameters() if p.dim() == 2]
    optimizer = fxshard.whole_matrices(torch.optim.Muon(matrices[:: -1 if dist.get_rank() else 1]))
    with pytest.raises(RankMismatchError, match=r"of the parameter head.weight"):
        take_steps(model, optimizer, [0])


@two_ranks
def test_settings_that_differ_are_an_error_in_the_first_step_and_later_in_the_next_backward() -> None:
    for step in (0, 1):
        model = sharded(net(), mesh())
        optimizer = fxshard.whole_matrices(muon_of_matrices(model.parameters()))
        take_steps(model, optimizer, range(step))
        optimizer.param_groups[0]["ns_steps"] = 5 - dist.get_rank()
        with pytest.raises(RankMismatchError, match=r"different values in run \d+(.|\n)*rank 1 .*ns_steps=4") as error:
            take_steps(model, optimizer, [1, 2])
        assert ("found after the run" in str(error.value)) == (step == 1)


@fresh_ranks
def test_a_rank_that_runs_out_of_memory_in_an_exchange_ends_the_wait_of_the_others() -> None:
    (model, optimizer) = trained()[1]
    model(batch(1, torch.float64)).square().sum().backward()
    if dist.get_rank() == 0:
        full = mock.patch.object(RowExchange, "_buffer", side_effect=torch.OutOfMemoryError("no more memory"))
        with full, pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
        time.sleep(9)  # alive, as a rank that saves before it ends
    else:
        with pytest.raises(RankMismatchError, match="rank 0 has got an error: OutOfMemoryError: no more memory"):
            optimizer.step()


class Normed(Optimizer):
    """Assigns `data`, and may talk to other ranks, as a Muon that is written for several."""

    def __init__(self, params: Iterable[Any], *, talks: bool = False) -> None:
        super().__init__(params, {"lr": 0.1})
        self.talks = talks

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.data = p.data - 0.1 * p.grad / p.grad.norm()
            if self.talks:
                dist.all_gather([torch.empty_like(p) for _ in range(2)], p.detach())


def one_row() -> nn.Module:
    """Return a model with a matrix that lies on one rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 4, bias=False), nn.Linear(4, 1, bias=False)).double()


@two_ranks
def test_an_optimizer_that_assigns_data() -> None:
    pairs = trained(Normed, kind=one_row)
    assert_same_after(pairs, range(2))


@two_ranks
def test_refuses_an_optimizer_that_communicates() -> None:
    model = sharded(nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(2))), mesh())
    optimizer = fxshard.whole_matrices(Normed(model.parameters(), talks=True))
    with pytest.raises(ConfigError, match="the step of Normed launches collectives itself"):
        take_steps(model, optimizer, [0])


@two_ranks
def test_explains_who_owns_what() -> None:
    model = sharded(one_row(), mesh())
    optimizer = fxshard.whole_matrices(Normed(model.parameters()))
    found = optimizer.explain()
    first, second = found.owners.values()
    assert found.title == "Normed: 2 of 2 parameters whole"
    assert (first.matrices, second.matrices) == (["1.weight [1, 4]"], ["0.weight [4, 8]"])
    assert (first.bytes_back, second.bytes_back) == (0, 2 * 8 * 8)
    assert (first.cost, second.cost) == (1 * 1 * (2 * 4 + 1), 4 * 4 * (2 * 8 + 4))
    assert "0.weight [4, 8]" in str(found)
