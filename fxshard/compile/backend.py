"""The entry of `torch.compile(..., backend="fxshard")`: options, capture, passes, lowering."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx, nn

from fxshard import hardware
from fxshard.compile import cudagraphs, dynamo
from fxshard.compile.capture import capture
from fxshard.compile.inductor import compile_plain, require_known_flags
from fxshard.compile.interpreter import interpret_plain
from fxshard.compile.one_line import first_call
from fxshard.compile.variants import lower
from fxshard.cost import measured
from fxshard.errors import ConfigError, FxshardError
from fxshard.ir.memory_budget import GIB
from fxshard.options import Options, parse
from fxshard.passes import pipeline
from fxshard.passes.refuse_writes import refuse_writes
from fxshard.runtime import eager, rank_check
from fxshard.runtime.flat_shard import Home
from fxshard.runtime.frame import Frame
from fxshard.sharding.sharded_module import plain_module, units_under

_log = logging.getLogger(__name__)


def fxshard(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile `gm`, a graph that Dynamo captured, and return what Dynamo calls in its place.

    `gm` is taken over; `example_inputs` are its real inputs; for `options` see `fxshard.options.Options`; `mode` must
    be None or "default". `docs/errors.md` lists what it raises.
    """
    try:
        return _dispatch(gm, example_inputs, parse(options, mode))
    except (FxshardError, NotImplementedError) as error:
        groups = {name for home in dynamo.flats_of(example_inputs).values() for name in home.unit.plan.groups}
        rank_check.report_failure(groups, str(error))
        raise dynamo.as_raised_by_backend(error) from error.__cause__


def _dispatch(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    dynamo.refuse_compiled_autograd()
    require_known_flags(options)
    # A wrong pipeline or hardware is refused before anything is sharded.
    pipeline.chosen(options)
    if options.hardware is not None:
        hardware.load(options.hardware)
    flats = dynamo.flats_of(example_inputs)
    unsharded = dynamo.unsharded_parameters(gm, example_inputs)
    if flats:
        if options.regional is True and len({id(home.unit) for home in flats.values()}) > 1:
            raise ConfigError(dynamo.REGIONAL_OF_A_FUNCTION)
        _require_one_way(options, flats)
        first_call.require_no_replicas(unsharded, flats)
        return _compile(gm, example_inputs, flats, options)
    if unsharded:
        first_call.shard_root(gm, example_inputs, unsharded, options)  # returns only with nothing to shard over
    first_call.require_all_ranks(dynamo.parameters_of(gm, example_inputs))
    _refuse_writes_of_plain(gm, example_inputs)
    return compile_plain(gm, example_inputs, options)


def _refuse_writes_of_plain(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Raise if a graph that reads no shard writes into a parameter that an earlier one has returned."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    refuse_writes(gm, {placeholders[i]: fqn for i, fqn in eager.returned_names(example_inputs).items()})


def frames_of(module: nn.Module) -> list[Frame]:
    """Return the live captured graphs of a sharded module, compiled or plain, in the order of their capture."""
    return list(dict.fromkeys(frame for unit in units_under(plain_module(module)) for frame in unit.step.frames))


def capture_only(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options, frames: list[Frame], saves_all: bool = False
) -> Callable[..., Any]:
    """Do what `fxshard` does with a graph of a sharded model, without code generation; return the graph, interpreted.

    For `explain`. `example_inputs` may be fake. `frames` gets the new frame; a graph without sharded parameters makes
    none. `saves_all` as of `Stages`.
    """
    try:
        dynamo.refuse_compiled_autograd()
        flats = dynamo.flats_of(example_inputs)
        if not flats:
            _refuse_writes_of_plain(gm, example_inputs)
            return interpret_plain(gm, example_inputs)
        _require_one_way(options, flats)
        first_call.require_no_replicas(dynamo.unsharded_parameters(gm, example_inputs), flats)
        frame = _compile(gm, example_inputs, flats, options, generate_code=False, saves_all=saves_all)
    except (FxshardError, NotImplementedError) as error:
        raise dynamo.as_raised_by_backend(error) from error.__cause__
    frames.append(frame)
    return frame


def _compile(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    flats: dict[int, Home],
    options: Options,
    *,
    generate_code: bool = True,
    saves_all: bool = False,
) -> Frame:
    device = next(iter(flats.values())).unit.device
    budget, captured = options.memory_budget_gib, capture(gm, example_inputs, flats, options)
    plan = captured.plan
    cudagraphs.require_device(options, device, plan)
    frame = Frame(
        plan,
        returned=captured.returned,
        reduced_separately=captured.reduced_separately,
        hardware=measured.numbers_of((home.unit for home in flats.values()), options.hardware),
        unsharded_budget_bytes=None if budget is None else int(budget * GIB),
        resident_budget_bytes=int(options.resident_gib * GIB),
        max_late=options.reduce_scatter_max_input_buffers - 1,
        replays=options.cudagraphs,
    )
    for home in flats.values():
        home.unit.step.frames[frame] = None
    chosen = pipeline.chosen(options)
    lower(gm, example_inputs, frame, chosen, options, generate_code=generate_code, saves_all=saves_all)
    names = [key or "root" for key in plan.units if key not in plan.in_subgroups]
    _log.info("captured %d units: %s", len(names), ", ".join(names))
    return frame


def _require_one_way(options: Options, flats: dict[int, Home]) -> None:
    if options.one_line_only and not all(home.unit.settings.from_one_line for home in flats.values()):
        raise ConfigError(
            f"options {', '.join(options.one_line_only)} only act where torch.compile shards the model itself; this "
            "one was sharded by fully_shard. Pass them to fully_shard (mesh, reshard_after_forward, mp_policy, "
            "offload_policy) instead, or call set_separate_reduce_scatter_group()."
        )
