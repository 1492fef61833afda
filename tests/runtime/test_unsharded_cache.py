"""What is gathered outside of graphs is taken, or waited for when it is dropped."""

from __future__ import annotations

import gc

import torch
from torch import nn
from torch._C._distributed_c10d import _get_work_registry_size

from fxshard import fully_shard
from fxshard.ir import collectives
from fxshard.runtime.unit import Unit
from fxshard.runtime.unsharded_cache import Gathered, UnshardedCache, Why, wait_for
from fxshard.sharding.sharded_module import units_under
from fxshard.testing import EmulatedLink


def unit_of(link: EmulatedLink) -> Unit:
    (unit,) = units_under(fully_shard(nn.Linear(4, 4), mesh=link.mesh))
    return unit


def launched(unit: Unit, why: Why = "next") -> Gathered:
    flat = unit.shards[0].flat.detach()
    return Gathered(unit, dict(enumerate(collectives.launch_gather([flat], 2, unit.plan.group))), why)


def test_drops_what_is_asked_for_and_waits_for_it(link: EmulatedLink) -> None:
    unit, cache, unwaited = unit_of(link), UnshardedCache(), _get_work_registry_size()
    for key, why in (("a", "next"), ("b", "asked"), ("c", "listed")):
        cache[key] = launched(unit, why)  # type: ignore[arg-type]
    assert _get_work_registry_size() == unwaited + 3
    cache.drop_if(lambda gathered: gathered.why == "next")
    cache.drop("b", "what is not there")
    assert [gathered.why for gathered in cache.values()] == ["listed"]
    assert _get_work_registry_size() == unwaited + 1
    cache.drop_if()
    assert _get_work_registry_size() == unwaited


def test_who_takes_it_waits_for_it(link: EmulatedLink) -> None:
    unit, cache, unwaited = unit_of(link), UnshardedCache(), _get_work_registry_size()
    cache["a"] = launched(unit)
    taken = cache.pop("a").tensors.values()
    cache.drop("a")
    assert _get_work_registry_size() == unwaited + 1
    wait_for(taken)
    assert _get_work_registry_size() == unwaited


def test_what_is_left_of_a_unit_that_is_gone_is_waited_for(link: EmulatedLink) -> None:
    gc.collect()  # what other tests have left
    unit, unwaited = unit_of(link), _get_work_registry_size()
    unit.model.unsharded[unit] = launched(unit, "resident")
    assert _get_work_registry_size() == unwaited + 1
    del unit
    gc.collect()
    assert _get_work_registry_size() == unwaited


def test_a_write_to_a_parameter_makes_it_old(link: EmulatedLink) -> None:
    unit = unit_of(link)
    gathered = launched(unit)
    assert gathered.is_current
    with torch.no_grad():
        unit.members[0].parameter.mul_(2.0)
    assert not gathered.is_current
    wait_for(gathered.tensors.values())
