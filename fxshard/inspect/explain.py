"""`explain`: compile a model without its data, its ranks or its device, and keep every graph."""

from __future__ import annotations

import dataclasses
import functools
import os
import traceback
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fxshard import hardware, torch_private
from fxshard.compile import backend, dynamo
from fxshard.compile.inductor import require_known_flags
from fxshard.cost.optimizer_step import OptimizerBuilder, OptimizerCost, cost_of_step
from fxshard.errors import ConfigError, UnsupportedGraph
from fxshard.hardware import HardwareSpec
from fxshard.inspect.explanation import Explanation, FrameExplanation
from fxshard.inspect.fake_model import FakeModel, fake_model_of
from fxshard.options import Options, parse
from fxshard.passes import pipeline
from fxshard.runtime.frame import Frame
from fxshard.runtime.unit import Unit
from fxshard.sharding.blocks import AutoChoice, choose
from fxshard.sharding.sharded_module import plain_module, state_of, states_under, units_under

DEFAULT_HARDWARE = "h100"


def explain(
    model: nn.Module,
    *args: Any,
    world_size: int | tuple[int, int] | None = None,
    mesh: DeviceMesh | None = None,
    options: Mapping[str, Any] | None = None,
    optimizer: OptimizerBuilder | None = None,
    **kwargs: Any,
) -> Explanation:
    """Show what every pass does to a model, without a cluster: no process group, no data, no code generation.

    A copy of the model is sharded and compiled on fake tensors, as `torch.compile(model, backend="fxshard")` would on
    one of `world_size` ranks, and called once. The model, its gradients, random state and compiled code stay as they
    are, and so does a process group. With gradients on, the graphs are those of training; under `torch.no_grad()` those
    of inference.

        fxshard.explain(model, tokens, world_size=64).print("insert_collectives")

    Args:
        model: sharded by `fully_shard` or not, compiled or not; may be on the meta device.
        *args: of the model's forward; tensors may be on meta, too.
        world_size: ranks of a model that is not sharded; default: those of the process group, if there is one. Two
            numbers are a mesh of two axes: how many replicas, and over how many ranks each is sharded.
        mesh: instead of `world_size`.
        options: as for `torch.compile(model, backend="fxshard", options=...)`.
        optimizer: called with the sharded copy, returns its optimizer or several, as the training script makes them
            (`fxshard.whole_matrices` among them): what their steps cost is in `Explanation.optimizers`.
        **kwargs: of the model's forward.

    Returns:
        The graphs of every frame and stage after every pass, and what they cost.

    Raises:
        ConfigError: a wrong option, an unknown or contradictory number of ranks, nothing of the model was captured.
        UnsupportedGraph: the model cannot be copied, or fxshard declines to compile it.
        Exception: whatever the model's forward raises.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"explain expects an nn.Module, got {type(model).__name__}.")
    builders = {"optimizer": optimizer} if optimizer else {}
    return explained(model, args, kwargs, world_size=world_size, mesh=mesh, options=options, optimizers=builders)


def explained(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    world_size: int | tuple[int, int] | None = None,
    mesh: DeviceMesh | None = None,
    options: Mapping[str, Any] | None = None,
    saves_all: bool = False,
    optimizers: Mapping[str, OptimizerBuilder] = MappingProxyType({}),
) -> Explanation:
    """Do what `explain` does; with `saves_all` forward keeps for backward what it would keep without a compiler."""
    parsed = parse({"hardware": DEFAULT_HARDWARE, **(options or {})})
    require_known_flags(parsed)
    pipeline.chosen(parsed)
    hardware.load(parsed.hardware or DEFAULT_HARDWARE)  # an unknown one is refused before the work
    name = type_name(model)
    fake_model = fake_model_of(model, world_size=world_size, mesh=mesh, options=parsed)
    frames: list[Frame] = []
    try:
        capture = functools.partial(
            backend.capture_only,
            options=dataclasses.replace(parsed, regional=False),
            frames=frames,
            saves_all=saves_all,
        )
        choice = _choice(fake_model, model, parsed, (args, kwargs))
        by_block = parsed.regional is True or (choice is not None and choice.by_block)
        fake_model.compile(capture, args, kwargs, by_block=by_block)
    except torch_private.NO_VALUE as error:
        raise reads_values(name, error) from error
    if not frames:
        raise nothing_captured(name)
    found = explanation(name, units_under(fake_model.model), fake_model.replica.device, frames, choice)
    costs = {each: _costs_of(build, fake_model, found.hardware) for each, build in optimizers.items()}
    return dataclasses.replace(found, optimizers=costs, buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()))


def _choice(fake_model: FakeModel, model: nn.Module, options: Options, inputs: object) -> AutoChoice | None:
    """What "auto" would choose, or has chosen."""
    places, outermost = states_under(fake_model.model), state_of(plain_module(model))
    if options.regional is True and "" not in places:
        raise ConfigError(dynamo.REGIONAL_OF_A_FUNCTION)
    if options.regional != "auto" or "" not in places:
        return None
    places[""][1].compiled.agreed = outermost.compiled.agreed if outermost else None
    return choose(places, options, inputs, alone=True)


def _costs_of(build: OptimizerBuilder, fake_model: FakeModel, spec: HardwareSpec) -> tuple[OptimizerCost, ...]:
    with fake_model.replica.faking():
        made = build(fake_model.model)
        several = [made] if isinstance(made, torch.optim.Optimizer) else list(made)
        if wrong := [type(each).__name__ for each in several if not isinstance(each, torch.optim.Optimizer)]:
            raise ConfigError(f"the function for optimizers returned {wrong[0]}; return optimizers of torch.")
    return tuple(cost_of_step(each, spec) for each in several)


def explanation_of(model: nn.Module) -> Explanation:
    """Show what every pass did to a model that was compiled with `backend="fxshard"` and has been called.

    Args:
        model: the compiled model, or the module that was compiled.

    Returns:
        As `explain`. What is compiled later (another shape, the first backward) appears in it where it belongs to a
        frame that was there; call again for new frames.

    Raises:
        ConfigError: the model is not sharded, or nothing has been compiled for it yet.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"explanation_of expects an nn.Module, got {type(model).__name__}.")
    units = units_under(plain_module(model))
    if not units:
        raise ConfigError(
            f"{type_name(model)} is not sharded. Call it once, compiled with backend='fxshard' on several ranks, or "
            "use fxshard.explain(model, *args, world_size=...)."
        )
    frames = backend.frames_of(model)
    if not frames:
        raise ConfigError(
            f"nothing has been compiled for {type_name(model)} yet. Compile it with backend='fxshard' and call it "
            "once, or use fxshard.explain(model, *args)."
        )
    outermost = state_of(plain_module(model))
    choice = outermost.compiled.choice if outermost else None
    return explanation(type_name(model), units, units[0].device, frames, choice)


def explanation(
    name: str, units: Sequence[Unit], device: torch.device, frames: Sequence[Frame], choice: AutoChoice | None
) -> Explanation:
    """The explanation of captured frames of a model with these units, the outermost one first."""
    kept = tuple(
        FrameExplanation(
            plan=frame.plan,
            history=frame.history,
            hardware=frame.hardware,
            unsharded_budget_bytes=frame.unsharded_budget_bytes,
            calls=tuple(frame.calls),
        )
        for frame in frames
    )
    place = {unit.fqn: number for number, unit in enumerate(units)}
    calls = [
        (min(place.get(name, len(place)) for name in call), number)
        for number, frame in enumerate(kept)
        for call in frame.calls
    ]
    captured = {name for frame in kept for call in frame.calls for name in call}
    offloaded = [unit for unit in units if unit.settings.offload is not None]
    host_bytes = sum(unit.plan.shard_bytes for unit in offloaded)
    trained, trained_on_host = (sum(unit.plan.trained_bytes for unit in each) for each in (units, offloaded))
    return Explanation(
        model=name,
        world_size=units[0].world_size,
        replicas=units[0].plan.replicas,
        frames=kept,
        calls=tuple(number for _, number in sorted(calls)),
        choice=choice,
        hardware=kept[0].hardware,
        device=device.type,
        device_bytes=sum(unit.plan.shard_bytes for unit in units) - host_bytes,
        host_bytes=host_bytes,
        trained_bytes=(trained - trained_on_host, trained_on_host),
        offloaded=tuple(unit.label for unit in offloaded),
        uncaptured={unit.label: unit.plan.unsharded_bytes for unit in units if unit.fqn not in captured},
    )


def reads_values(name: str, error: Any) -> UnsupportedGraph:
    """What to raise where the forward of a model needs values of fake tensors: `error` is one of `NO_VALUE`."""
    return UnsupportedGraph(
        f"the forward of {name} reads values of a tensor ({error.func} at {_place(error)}), but explain runs "
        "on tensors that have none. Take the read out of forward, or explain the part of the model before it."
    )


def nothing_captured(name: str) -> ConfigError:
    """What to raise where no frame of a model has parameters that are sharded."""
    return ConfigError(
        f"no graph with sharded parameters was captured from {name}: its forward reads no parameter that is "
        "sharded, or no graph of it could be captured (TORCH_LOGS=graph_breaks says why)."
    )


def _place(error: BaseException) -> str:
    library = tuple(os.path.join(os.path.dirname(path), "") for path in (str(torch.__file__), str(backend.__file__)))
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith((*library, "<"))]
    return f"{outside[-1].filename}:{outside[-1].lineno}, {outside[-1].line}" if outside else "an unknown line"


def type_name(model: nn.Module) -> str:
    """Name of the class that the user wrote."""
    cls = type(plain_module(model))
    name: str = getattr(cls, "_fxshard_base", cls).__name__
    return name
