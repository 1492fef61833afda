"""What is done with models on meshes of every kind: bodies that ranks run, and how some of them are run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import fxshard
from tests.numerics.harness import (
    FSDP2,
    Scenario,
    Tools,
    adopted,
    check,
    check_bitwise,
    check_inductor,
    compile_each_block,
    only_shard,
    with_a_break,
)
from tests.numerics.loops import clip_and_update, freeze_then_thaw
from tests.numerics.microbatches import kept, several
from tests.numerics.models import CalledTwice, CheckpointedMLP, LoRA
from tests.state.states import assert_same

Body = Callable[..., object]


def run(bodies: Mapping[str, Body], names: Iterable[str], *args: Any) -> None:
    """Run some bodies on `args`, one after the other in one process group."""
    for name in names:
        torch.manual_seed(0)
        try:
            bodies[name](*args)
        except Exception as error:
            error.add_note(f"in {name!r}")
            raise


def bodies_of(on: Callable[..., Scenario], *names: str) -> dict[str, Body]:
    """Return what is trained alike on every mesh, as far as it is named; `on` makes the scenario of a mesh."""
    bodies: dict[str, Body] = {
        "compiled": lambda mesh: check(on(mesh)),
        "not compiled": lambda mesh: check(on(mesh, prepare=only_shard)),
        "block by block": lambda mesh: check(on(mesh, prepare=compile_each_block)),
        "float32": lambda mesh: check_bitwise(on(mesh)),
        "clipped gradients": lambda mesh: check(on(mesh, update=partial(clip_and_update, foreach=None))),
        "kept parameters": lambda mesh: check_bitwise(on(mesh, shard_kwargs={"reshard_after_forward": False})),
        "inductor": lambda mesh: check_inductor(on(mesh)),
    }
    return {name: bodies[name] for name in names}


FEATURES: Mapping[str, Mapping[str, Any]] = {
    "compiled": {},
    "not compiled": {"prepare": only_shard},
    "block by block": {"prepare": compile_each_block},
    "a graph break": {"prepare": with_a_break},
    "adopted": {"prepare": adopted},
    "checkpointed": {"model": CheckpointedMLP},
    "called twice": {"model": CalledTwice},
    "some frozen": {"model": LoRA},
    "frozen and thawed": {"before_step": freeze_then_thaw},
    "microbatches": {"backward": several},
    "microbatches, unsharded in between": {"backward": kept},
    "clipped": {"update": partial(clip_and_update, foreach=None)},
}


def checks_of(plain: Scenario) -> dict[str, Body]:
    """Return a check of the scenario with each of the features."""
    return {name: partial(check, replace(plain, **changes)) for name, changes in FEATURES.items()}


def shared_folder() -> str:
    """Return a folder that all ranks see."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    return folder[0]


def lie_as_those_of_fsdp2(shard: Callable[[Any], nn.Module]) -> None:
    """Compare the parameters of a model that `shard` makes with our `fully_shard`, and with FSDP2's."""
    ours, theirs = (dict(shard(f).named_parameters()) for f in (fxshard.fully_shard, FSDP2.fully_shard))
    assert ours.keys() == theirs.keys()
    for name, p in cast(dict[str, Any], ours).items():
        expected: Any = theirs[name]
        assert (p.device_mesh, p.placements) == (expected.device_mesh, expected.placements), name
        assert torch.equal(p.to_local(), expected.to_local()), name


def take_over(model: nn.Module, tools: Tools) -> nn.Module:
    """An FSDP2 model trains on under fxshard."""
    found = only_shard(model, replace(tools, system=FSDP2))
    return tools.compile(fxshard.adopt(found)) if tools.system.ours else found


def there_and_back(model: nn.Module, tools: Tools) -> nn.Module:
    """A model of ours trains on under FSDP2."""
    found = only_shard(model, tools)
    return fxshard.release(found) if tools.system.ours else found


def adopted_and_released(on: Callable[..., Scenario], mesh: Any) -> None:
    check_bitwise(on(mesh, prepare=take_over))
    check_bitwise(on(mesh, prepare=there_and_back))


def whole(model: nn.Module) -> Any:
    return fxshard.full_state_dict(model, recipient_rank=None)


def checkpoints_load(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    others: Iterable[Callable[[int], nn.Module]],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    plain: nn.Module | None = None,
    weights_of: Callable[[nn.Module], Any] = whole,
) -> None:
    """Load ours and torch's into each of `others`, which get a seed, and ours into a model that is not sharded."""
    folder = shared_folder()
    weights, state = weights_of(model), fxshard.full_optim_state_dict(model, optim, recipient_rank=None, keys="fqn")
    fxshard.save_checkpoint(f"{folder}/ours", model, optim, extra=3)
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/torch")
    for build in others:
        other = build(1)
        other_optim = optimizer(other)
        assert fxshard.load_checkpoint(f"{folder}/ours", other, other_optim) == 3
        assert_same(weights_of(other), weights)
        assert_same(fxshard.full_optim_state_dict(other, other_optim, recipient_rank=None, keys="fqn"), state)
        third = build(2)
        loaded = {"model": third.state_dict()}
        dcp.load(loaded, checkpoint_id=f"{folder}/torch")
        third.load_state_dict(loaded["model"])
        assert_same(weights_of(third), weights)
    if plain is not None:
        fxshard.load_checkpoint(f"{folder}/ours", plain, optimizer(plain))
        assert_same(dict(plain.state_dict()), dict(weights))
