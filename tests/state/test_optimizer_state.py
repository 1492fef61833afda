"""The full state of a sharded optimizer is that of an unsharded one, whatever the optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import fxshard
from tests.numerics.harness import EAGER
from tests.ranks import two_ranks
from tests.state.helpers import on_first, refused
from tests.state.states import adamw, assert_same, net, sharded, take_steps, trained, two_groups

OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "foreach": (torch.optim.AdamW, {"foreach": True}),
    "fused": (torch.optim.AdamW, {"fused": True}),
    "tensor lr": (torch.optim.AdamW, {"lr": torch.tensor(0.01)}),
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {}),
    "adadelta": (torch.optim.Adadelta, {}),
    "radam": (torch.optim.RAdam, {}),
    "adafactor": (torch.optim.Adafactor, {}),
}

STEPPED = [name for name in OPTIMIZERS if name != "adafactor"]  # torch cannot step that one on DTensors


def full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def optimizer(name: str, model: nn.Module) -> Optimizer:
    kind, options = OPTIMIZERS[name]
    return kind(two_groups(model), **options)


@two_ranks
@pytest.mark.parametrize(("name", "from_every_rank"), [("adamw", True), *((name, False) for name in OPTIMIZERS)])
def test_what_an_unsharded_optimizer_had_comes_back(name: str, from_every_rank: bool) -> None:
    _, reference = trained(lambda model: optimizer(name, model))
    model = sharded(net())
    optim = optimizer(name, model)
    given = on_first(reference.state_dict(), from_every_rank)
    fxshard.load_full_optim_state_dict(model, optim, given)
    assert_same(fxshard.full_optim_state_dict(model, optim), on_first(reference.state_dict()))


@two_ranks
@pytest.mark.parametrize(("name", "recipient"), [("adamw", 1), ("adamw", None), *((name, 0) for name in STEPPED)])
def test_steps_show_in_the_full_state(name: str, recipient: int | None) -> None:
    model = sharded(net())
    optim = optimizer(name, model)
    take_steps(model, optim)
    kept = optim.state_dict()["state"]
    expected = {i: {key: full(value) for key, value in each.items()} for i, each in sorted(kept.items())}
    state = fxshard.full_optim_state_dict(model, optim, recipient_rank=recipient)
    if recipient not in (None, dist.get_rank()):
        assert state == {}
        return
    assert_same(state["state"], expected)
    unsharded = optimizer(name, net())
    unsharded.load_state_dict(state)
    assert_same(unsharded.state_dict()["state"], state["state"])


@two_ranks
@pytest.mark.parametrize("name", ["adamw", "momentum", "adagrad", "fused"])
def test_training_goes_on_as_if_nothing_had_happened(name: str) -> None:
    model = sharded(net())
    optim = optimizer(name, model)
    take_steps(model, optim)
    weights, state = fxshard.full_state_dict(model), fxshard.full_optim_state_dict(model, optim)
    take_steps(model, optim, first=2)
    resumed = sharded(net(seed=1))
    again = optimizer(name, resumed)
    fxshard.load_full_state_dict(resumed, weights)
    fxshard.load_full_optim_state_dict(resumed, again, state)
    take_steps(resumed, again, first=2)
    assert_same(fxshard.full_state_dict(resumed), fxshard.full_state_dict(model))
    assert_same(fxshard.full_optim_state_dict(resumed, again), fxshard.full_optim_state_dict(model, optim))


@two_ranks
def test_names_parameters_by_fqn_where_asked() -> None:
    model, optim = sharded_by_adamw()
    by_id = fxshard.full_optim_state_dict(model, optim)
    by_fqn = fxshard.full_optim_state_dict(model, optim, keys="fqn")
    if dist.get_rank() == 0:
        names = {id(p): name for name, p in model.named_parameters()}
        fqns = [names[id(p)] for group in optim.param_groups for p in group["params"]]
        assert "embedding.weight" in fqns
        assert_same(by_fqn["state"], {fqns[i]: value for i, value in by_id["state"].items()})
        assert [fqn for group in by_fqn["param_groups"] for fqn in group["params"]] == fqns
    fresh = adamw(model)
    fxshard.load_full_optim_state_dict(model, fresh, by_fqn)
    assert_same(fxshard.full_optim_state_dict(model, fresh), by_id)


def sharded_by_adamw(steps: int = 2) -> tuple[nn.Module, Optimizer]:
    model = sharded(net())
    optim = adamw(model)
    take_steps(model, optim, steps)
    return model, optim


@two_ranks
def test_names_survive_other_groups() -> None:
    model, optim = sharded_by_adamw()
    state = fxshard.full_optim_state_dict(model, optim, keys="fqn")
    for group in state.get("param_groups", []):
        group["params"] = group["params"][::-1]
    fresh = adamw(model)
    fxshard.load_full_optim_state_dict(model, fresh, state)
    assert_same(fxshard.full_optim_state_dict(model, fresh), fxshard.full_optim_state_dict(model, optim))


@two_ranks
def test_an_optimizer_without_state_has_none() -> None:
    model = sharded(net())
    optim = adamw(model)
    state = fxshard.full_optim_state_dict(model, optim)
    assert_same(state, on_first(adamw(net()).state_dict()))
    take_steps(model, optim)
    fxshard.load_full_optim_state_dict(model, optim, state)
    assert not optim.state


class WithScale(torch.optim.AdamW):
    """Keeps more than state and groups in its state_dict, and state that belongs to no parameter."""

    scale = 8.0

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        state["state"]["num_skipped"] = 3
        return {**state, "loss_scale": self.scale, "scheduler": {"last": [1, 2], "table": torch.arange(3)}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scale = state_dict["loss_scale"]
        super().load_state_dict(state_dict)


@two_ranks
def test_other_keys_are_kept() -> None:
    model = sharded(net())
    optim = WithScale(two_groups(model))
    take_steps(model, optim)
    optim.scale = 4.0
    state = fxshard.full_optim_state_dict(model, optim)
    if dist.get_rank() == 0:
        assert state["loss_scale"] == 4.0
        assert state["state"]["num_skipped"] == 3
        assert_same(state["scheduler"], {"last": [1, 2], "table": torch.arange(3)})
    fresh = WithScale(two_groups(model))
    fxshard.load_full_optim_state_dict(model, fresh, state)
    assert fresh.scale == 4.0
    assert_same(fxshard.full_optim_state_dict(model, fresh), state)


@two_ranks
def test_state_of_no_parameter_is_kept_unless_it_would_be_taken_for_ones() -> None:
    model, optim = sharded_by_adamw()
    kept = {"skipped": [1, 2], "table": torch.arange(3)}
    optim.state["global"] = kept  # type: ignore[index]
    state = fxshard.full_optim_state_dict(model, optim)
    fresh = adamw(model)
    fxshard.load_full_optim_state_dict(model, fresh, state)
    assert_same(fresh.state["global"], kept)  # type: ignore[index]
    assert_same(fxshard.full_optim_state_dict(model, fresh), state)
    assert "under 'global', where a load would take it for" in refused(
        fxshard.full_optim_state_dict, model, optim, keys="fqn"
    )
    optim.state[77] = optim.state.pop("global")  # type: ignore[index,call-overload]
    assert "under 77, where a load would take it for" in refused(fxshard.full_optim_state_dict, model, optim)


class OnLocalRows(Optimizer):
    """Works on local rows, keeps plain tensors of their shape, in a list and in double, and skips empty ones."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                local = p.to_local() if isinstance(p, DTensor) else p
                if p.grad is None or not local.numel():
                    continue
                state = self.state.setdefault(p, {"sums": [torch.zeros_like(local, dtype=torch.double)], "count": 0})
                state["sums"][0] += p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
                state["count"] += 1
                local.sub_(state["sums"][0] * group["lr"])


@two_ranks
@pytest.mark.parametrize("recipient", [0, 1])
def test_plain_tensors_of_local_rows_are_rows(recipient: int) -> None:
    model = sharded(net())
    optim = OnLocalRows(model.parameters())
    take_steps(model, optim)
    weights = {name: full(p.detach()) for name, p in model.named_parameters()}
    before = {name: p.detach() for name, p in net().named_parameters()}
    state = fxshard.full_optim_state_dict(model, optim, recipient_rank=recipient, keys="fqn")
    fresh = OnLocalRows(model.parameters())
    take_steps(model, fresh, steps=1)
    fxshard.load_full_optim_state_dict(model, fresh, state)
    again = fxshard.full_optim_state_dict(model, fresh, recipient_rank=recipient, keys="fqn")
    assert_same(again, state)
    if dist.get_rank() != recipient:
        return
    assert state["state"]["one_row"]["count"] == 2  # rank 1 has no row of it
    for name, kept in state["state"].items():
        (sums,) = kept["sums"]
        assert sums.dtype is torch.double
        assert sums.shape == weights[name].shape
        assert weights[name].equal(before[name]) == (not sums.any())


@two_ranks
def test_a_plain_tensor_that_has_the_shape_of_local_rows_by_chance_stays_whole() -> None:
    torch.manual_seed(0)
    model: Any = fxshard.fully_shard(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 8)))
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optim.step()
    history = torch.arange(3.0)  # the rows that a rank has of the first bias
    for kept in optim.state.values():
        kept["history"] = history.clone()
    state = fxshard.full_optim_state_dict(model, optim, recipient_rank=None)
    assert [kept["history"].tolist() for kept in state["state"].values()] == [history.tolist()] * 4
    for kept in optim.state.values():
        kept["history"].zero_()
    fxshard.load_full_optim_state_dict(model, optim, state)
    assert all(kept["history"].equal(history) for kept in optim.state.values())


class Counts(Optimizer):
    """Counts in plain tensors of one element."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                counts = {"step": torch.zeros(1), "count": torch.zeros(1), "momentum": torch.zeros_like(p.detach())}
                for value in self.state.setdefault(p, counts).values():
                    value += 1


class Ones(nn.Module):
    """Has parameters, some of one element, as counters have it, or of one for each rank."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(shape) for shape in shapes)


@two_ranks
@pytest.mark.parametrize("from_every_rank", [False, True])
def test_counters_stay_plain_for_parameters_of_their_shape(from_every_rank: bool) -> None:
    for shapes in ([(1,), (3, 2)], [(1,), (2,), (4,)], [(1,), (), (4,)], [(1,)], [(2,)], [()]):
        model = fxshard.fully_shard(Ones(*shapes))
        optim = Counts(model.parameters())
        if len(shapes) == 1:  # by its name alone a counter is known
            for p in model.parameters():
                optim.state[p] = {"step": torch.zeros(1), "momentum": torch.zeros_like(p.detach())}
        optim.step()
        state = fxshard.full_optim_state_dict(model, optim, recipient_rank=None)
        assert [kept["step"].shape for kept in state["state"].values()] == [(1,)] * len(shapes)
        fresh = Counts(model.parameters())
        fxshard.load_full_optim_state_dict(model, fresh, on_first(state, from_every_rank))
        for parameter, kept in optim.state.items():
            found = fresh.state[parameter]
            assert {name: type(value) for name, value in found.items()} == {k: type(v) for k, v in kept.items()}
            assert_same({k: full(v) for k, v in found.items()}, {k: full(v) for k, v in kept.items()})
        fresh.step()


@two_ranks
def test_parameters_that_are_not_sharded_travel_nowhere() -> None:
    model = net()
    fxshard.fully_shard(model, ignored_params={model.norm.weight, model.norm.bias})
    optim = adamw(model)
    take_steps(model, optim)
    state = fxshard.full_optim_state_dict(model, optim, recipient_rank=1, keys="fqn")
    fresh = adamw(model)
    fxshard.load_full_optim_state_dict(model, fresh, state)
    assert not isinstance(fresh.state[model.norm.weight]["exp_avg"], DTensor)
    if dist.get_rank() == 1:
        kept = optim.state[model.norm.weight]
        assert_same(state["state"]["norm.weight"], dict(kept))
        assert state["state"]["norm.weight"]["exp_avg"] is not kept["exp_avg"]


@two_ranks
def test_units_may_be_on_fewer_ranks() -> None:
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("apart", "alone"))["alone"]
    model = net()
    fxshard.fully_shard(model.blocks[0], mesh=alone)
    torch.nn.init.constant_(model.blocks[0][0].weight, float(dist.get_rank()))
    fxshard.fully_shard(model.blocks[1])
    fxshard.fully_shard(model)
    optim = adamw(model)
    take_steps(model, optim)
    for recipient in (0, 1, None):
        state = fxshard.full_optim_state_dict(model, optim, recipient_rank=recipient, keys="fqn")
        weights = fxshard.full_state_dict(model, recipient_rank=recipient)
        if recipient in (None, dist.get_rank()):
            own = optim.state[model.blocks[0][0].weight]["exp_avg"].to_local()
            assert_same(state["state"]["blocks.0.0.weight"]["exp_avg"], own)
            assert_same(weights["blocks.0.0.weight"], model.blocks[0][0].weight.to_local().detach())
    fresh = adamw(model)
    fxshard.load_full_optim_state_dict(model, fresh, fxshard.full_optim_state_dict(model, optim, recipient_rank=None))
    found, expected = (fxshard.full_optim_state_dict(model, each, recipient_rank=None) for each in (fresh, optim))
    assert_same(found, expected)


@two_ranks
def test_a_compiled_model_will_do() -> None:
    model, optim = sharded_by_adamw()
    expected = fxshard.full_optim_state_dict(model, optim, keys="fqn")
    compiled = torch.compile(model, backend="fxshard", options=EAGER)
    assert_same(fxshard.full_optim_state_dict(compiled, optim, keys="fqn"), expected)  # type: ignore[arg-type]


@two_ranks
def test_the_one_line_form_takes_it_before_the_first_call() -> None:
    _, reference = trained()
    model = net()
    optim = adamw(model)
    compiled: Any = torch.compile(model, backend="fxshard", options=EAGER)
    fxshard.load_full_optim_state_dict(compiled, optim, on_first(reference.state_dict()))
    assert_same(fxshard.full_optim_state_dict(compiled, optim), on_first(reference.state_dict()))
    compiled(torch.arange(4)).sum().backward()
    assert isinstance(optim.param_groups[0]["params"][0], DTensor)
    assert_same(fxshard.full_optim_state_dict(compiled, optim), on_first(reference.state_dict()))


def test_works_on_one_rank_without_a_process_group() -> None:
    model, reference = trained()
    state = fxshard.full_optim_state_dict(model, reference)
    assert_same(state, reference.state_dict())
    kept: Tensor = reference.state_dict()["state"][0]["exp_avg"]
    assert state["state"][0]["exp_avg"].data_ptr() != kept.data_ptr()
    fresh = adamw(model)
    fxshard.load_full_optim_state_dict(model, fresh, state)
    assert_same(fxshard.full_optim_state_dict(model, fresh, recipient_rank=None), state)
