"""Every setting of FSDP2 goes to fxshard, to the copy of `explain` and back, and means the same everywhere."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, register_fsdp_forward_method
from torch.distributed.fsdp import fully_shard as fsdp2

import fxshard
from fxshard import torch_fsdp2
from fxshard.inspect.fake_model import fake_model_of
from fxshard.sharding.fsdp2_settings import MEANINGLESS
from fxshard.sharding.sharded_module import units_under
from fxshard.unit_settings import IN_GRAPHS, BackwardSettings, UnitSettings
from tests.numerics.comms import CountingGather, CountingReduce
from tests.ranks import two_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.shift = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x)) + self.shift
        return out

    def encode(self, x: Tensor) -> Tensor:
        return self.forward(x)


def doubled(grad: Tensor) -> None:
    grad.mul_(2)


VALUES: dict[str, Callable[[Net], Any]] = {
    "mp_policy": lambda _: MixedPrecisionPolicy(reduce_dtype=torch.float64),
    "reshard_after_forward": lambda _: True,
    "offload": lambda _: CPUOffloadPolicy(pin_memory=False),
    "divide_factor": lambda _: 4.0,
    "sums_only": lambda _: True,
    "reduces_unused": lambda _: True,
    "forward_prefetch": lambda net: [net.first, net.last],
    "backward_prefetch": lambda net: [net.last],
    "all_gather_comm": lambda _: CountingGather(),
    "reduce_scatter_comm": lambda _: CountingReduce(),
    "uses_reduce_group": lambda _: True,
    "sync": lambda _: False,
    "averages": lambda _: False,
    "reshard_after_backward": lambda _: False,
    "all_reduce_hook": lambda _: doubled,
    "is_last": lambda _: False,
    "ended_by_hand": lambda _: True,
}
"""Of each setting one that is not the default."""

FIELDS = {each.name: each for kind in (UnitSettings, BackwardSettings) for each in fields(kind)}
OURS = {"ignored", "from_one_line"}
"""Settings that FSDP2 keeps nowhere."""

ARGUMENTS = {"mp_policy": "mp_policy", "reshard_after_forward": "reshard_after_forward", "offload": "offload_policy"}
"""What `fully_shard` calls the settings that have no method."""

NO_SETTINGS = {*MEANINGLESS, "set_keep_unsharded_storage", "set_post_optim_event", "set_reduce_scatter_divide_factor"}
NO_SETTINGS -= {"set_custom_all_gather", "set_custom_reduce_scatter"}  # of which torch's own objects mean nothing
"""Methods of FSDP2 that set nothing here, are refused, hold for one forward, or are another one's name of before."""


def test_every_setting_of_fsdp2_is_in_the_table() -> None:
    assert VALUES.keys() == FIELDS.keys() - OURS
    theirs = {name for name in dir(FSDPModule) if name.startswith("set_")}
    ours = {each.metadata["setter"] for each in FIELDS.values() if each.metadata} | {"set_reshard_after_forward"}
    assert theirs - NO_SETTINGS <= ours
    assert all(hasattr(fxshard.ShardedModule, name) for name in ours)


def test_what_is_in_the_plan_tells_graphs_apart() -> None:
    settings = [UnitSettings(), *(UnitSettings(**{name: VALUES[name](Net())}) for name in IN_GRAPHS & VALUES.keys())]
    assert len({each.reduction_words for each in settings}) == 4


def sharded(name: str) -> Any:
    """What FSDP2 makes of a model that is told one thing."""
    torch.manual_seed(0)
    model: Any = Net()
    is_of_replicas = name in ("averages", "all_reduce_hook")
    mesh = init_device_mesh("cpu", (2, 1) if is_of_replicas else (2,), mesh_dim_names=("r", "s")[-1 - is_of_replicas :])
    given = {ARGUMENTS[name]: VALUES[name](model)} if name in ARGUMENTS else {}
    for part in (model.first, model.last, model):
        fsdp2(part, mesh=mesh, **given)
    if name == "divide_factor":
        model.set_force_sum_reduction_for_comms(True)  # gloo can do nothing else
    if name not in ARGUMENTS:
        tell(model, name, VALUES[name](model))
    return model


def tell(model: Any, name: str, value: Any) -> None:
    getattr(model, FIELDS[name].metadata["setter"])(value)


def told(model: nn.Module) -> list[Any]:
    """What each unit was told, with modules in place of units."""
    ours = units_under(model)
    if ours:
        settings = [replace(unit.settings.with_lists(modules_of), ignored=frozenset()) for unit in ours]
        return [*settings, ours[0].model.settings]
    theirs = torch_fsdp2.units_of(model)
    return [unit.settings for unit in theirs] + [theirs[0].of_model]


def modules_of(listed: Sequence[Any] | None) -> tuple[nn.Module, ...]:
    return tuple(unit.modules[0] for unit in listed or ())


def step(model: Any, optimizer: torch.optim.Optimizer, name: str) -> None:
    """Two microbatches, the second under the default of what is on by default."""
    own, default = VALUES[name](model), FIELDS[name].default
    for is_last in (False, True):
        if default is True:
            tell(model, name, is_last or own)
        model(torch.arange(8.0).view(2, 4)).square().mean().backward()
        if name == "ended_by_hand":
            model.finalize_backward()
    if default is True:
        tell(model, name, own)
    optimizer.step()
    optimizer.zero_grad()


@two_ranks
@pytest.mark.parametrize("name", VALUES)
def test_a_setting_survives_adopt_and_release_and_trains_like_fsdp2(name: str) -> None:
    if name not in ARGUMENTS and not hasattr(FSDPModule, FIELDS[name].metadata["setter"]):
        return  # of a later torch
    model, theirs = sharded(name), sharded(name)
    before = told(model)
    assert any(getattr(each, name, None) != getattr(type(each)(), name, None) for each in before)
    optimizers = {each: torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, theirs)}
    for change in (fxshard.adopt, fxshard.release, fxshard.adopt, partial(fxshard.release, whole=False)):
        step(model, optimizers[model], name)
        change(model)
        assert told(model) == before
        step(theirs, optimizers[theirs], name)
    for mine, other in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.to_local(), other.to_local(), rtol=1e-6, atol=1e-6)


@two_ranks
@pytest.mark.parametrize("name", sorted(IN_GRAPHS & VALUES.keys()))
def test_the_copy_that_explain_compiles_was_told_the_same(name: str) -> None:
    if name not in ARGUMENTS and not hasattr(FSDPModule, FIELDS[name].metadata["setter"]):
        return
    model = fxshard.adopt(sharded(name))
    copies = units_under(fake_model_of(model).model)
    assert [copy.settings.with_lists(names_of) for copy in copies] == [
        unit.settings.only(IN_GRAPHS).with_lists(names_of) for unit in units_under(model)
    ]


def names_of(listed: Sequence[Any] | None) -> tuple[str, ...] | None:
    return None if listed is None else tuple(unit.fqn for unit in listed)


@two_ranks
def test_gradient_sync_may_be_off_where_replicas_are_averaged() -> None:
    """FSDP2 takes both alone; its setter of the first one sets the other one, too."""
    model = sharded("averages")
    model.set_requires_gradient_sync(False)
    model.set_requires_all_reduce(True)
    before = told(model)
    assert (before[0].sync, before[0].averages) == (False, True)
    assert told(fxshard.adopt(model)) == before
    assert told(fxshard.release(model)) == before


@two_ranks
def test_what_the_outermost_module_was_told_of_backwards_counts() -> None:
    """As in FSDP2, also where it has no parameters of its own."""
    mesh = init_device_mesh("cpu", (2,))
    model: Any = nn.Sequential(nn.Linear(4, 4))
    fsdp2(model[0], mesh=mesh)
    fsdp2(model, mesh=mesh)
    model[0].set_is_last_backward(False)
    assert told(fxshard.adopt(model))[-1] == BackwardSettings()
    model.set_is_last_backward(False)
    fxshard.release(model)
    assert torch_fsdp2.units_of(model)[0].of_model == BackwardSettings(is_last=False)


@two_ranks
def test_registered_methods_go_there_and_back() -> None:
    model = sharded("sync")
    register_fsdp_forward_method(model, "encode")
    adopted: Any = fxshard.adopt(model)
    assert adopted.encode(torch.ones(2, 4)).shape == (2, 4)
    back = fxshard.release(adopted)
    assert [name for name, _ in torch_fsdp2.forward_methods(back)] == ["encode"]
