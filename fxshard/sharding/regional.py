"""Compile a model block by block: each block is a compiled function, and what is around them runs as it is.

[Note: regional compilation]
`torch.compile(model, backend="fxshard", options={"regional": True})`. Blocks whose code and layout are alike share one
graph, so what is traced and compiled does not grow with the number of blocks. torch's recipe ("regional compilation")
has the user call `block.compile()` for each; here that happens when the model is called. The model's own frames run
with Dynamo off: a frame that calls blocks in a loop cannot be compiled, and each of the small ones beside it (a norm, a
rotary table) would gather the root's parameters once more.

The option is read from the compiled call that is under way (`torch.compile(model)`), or from what `model.compile()` was
given. The one-line form shards in the middle of the first trace, which is of the whole model: Dynamo then leaves that
frame, and breaks its graph at blocks that it meets in frames inside. The model was not sharded when
that call began, so no scope is open: until the next call, parameters are read as after a forward, [Note: after a
forward] in `runtime/eager.py`.
"""

from __future__ import annotations

import contextlib
import logging
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.compiler.config
from torch import nn

from fxshard import torch_private
from fxshard.errors import ConfigError
from fxshard.options import parse
from fxshard.runtime import uncompiled_warning
from fxshard.sharding.blocks import HAS_LIMIT, AutoChoice, ShardedModules, blocks_of, choose, hooks_inside
from fxshard.torch_private import CompiledWith

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class CompiledCalls:
    """How the modules of one `fully_shard` call are compiled."""

    options_from: object = None  # the compiled call, or Dynamo's callback, of which the options were read last
    # id of a module -> what runs in place of its call
    runs: dict[int, Callable[..., Any]] = field(default_factory=dict)
    blocks: set[int] = field(default_factory=set)  # ids of those that are functions of their own
    has_blocks: bool = False  # whether there are any; a trace may read this, where ids would be guarded
    agreed: AutoChoice | None = None  # of a model: what all ranks keep to, once the first call has chosen
    choice: AutoChoice | None = None  # of a model: what "auto" chose for the compiled call that ran last


def compile_as_wanted(places: ShardedModules, callback: Any, inputs: object) -> None:
    """Compile a model block by block, or as a whole again, as the call wants that is about to run under `callback`.

    `inputs` are its arguments.
    """
    for _, state in places.values():
        for unit in state.units:
            if unit.plan.reshard_after_forward:  # a first call of the one-line form had begun it
                unit.step.after_forward.end()
    _compile_as(places, _ours(places[""][0], callback), inputs)


def begin_in_first_call(places: ShardedModules, compiled: nn.Module, inputs: object, then: Callable[[], None]) -> bool:
    """Compile the blocks of a model that its first call has sharded; `then` is called before a block runs."""
    if not _compile_as(places, _ours(compiled), inputs):
        return False
    places[""][1].compiled.options_from = compiled
    for module, state in places.values():
        for unit in state.units:
            unit.step.after_forward.begin()
        if id(module) in state.compiled.blocks:
            state.compiled.runs[id(module)] = _preceded(then, state.compiled.runs[id(module)])
    blocks = [module for module, state in places.values() if id(module) in state.compiled.blocks]
    in_blocks = {id(part) for block in blocks for part in block.modules()}
    for module in places[""][0].modules():
        if id(module) not in in_blocks:
            module.__dict__[uncompiled_warning.SEEN] = True  # that it runs as it is needs no warning
    return True


def _preceded(by: Callable[[], None], run: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        by()
        return run(*args, **kwargs)

    return cast("Callable[..., Any]", torch.compiler.disable(call))


def _compile_as(places: ShardedModules, compiled_with: CompiledWith | None, inputs: object) -> bool:
    """Compile block by block or not, as the options of a backend say, and return which."""
    model, state = places[""]
    state.compiled.choice = None
    if compiled_with is None:
        forget_blocks(places)
        return False
    backend, fullgraph = compiled_with
    given = backend.kwargs.get("options") or {}
    by_block = given.get("regional", "auto")
    if by_block == "auto":
        with contextlib.suppress(ConfigError):  # the backend raises it
            choice = choose(places, parse(given), inputs, fullgraph=fullgraph)
            state.compiled.choice, by_block = choice, choice.by_block
            _log.info("fxshard: %s: %s.", type(model).__name__, choice)
    if by_block is True:
        given = {**given, "regional": False}
        return compile_blocks(places, backend.compiler_fn, options=given, dynamic=backend.dynamic, fullgraph=fullgraph)
    forget_blocks(places)
    return False


@dataclass(frozen=True)
class _WithHooks:
    """A backend for blocks with these hooks inside; Dynamo shares graphs among equal backends."""

    backend: Callable[..., Any]
    hooks: tuple[Any, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.backend(*args, **kwargs)


def compile_blocks(places: ShardedModules, backend: Callable[..., Any], **kwargs: Any) -> bool:
    """Have each block run as a compiled function, and the model around them as it is; return whether there are any."""
    forget_blocks(places)
    blocks = [places[name] for name in blocks_of(places)]
    if not blocks:
        _log.warning(
            "fxshard: regional=True compiles units by themselves, and %s has none beside its root: it is compiled as a "
            "whole. Call fully_shard on its blocks.",
            type(places[""][0]).__name__,
        )
        return False
    hooks = [hooks_inside(module) for module, _ in blocks]
    for (module, state), inside in zip(blocks, hooks, strict=True):
        call, own = _call_of(module), _WithHooks(backend, inside) if inside else backend
        state.compiled.runs[id(module)] = cast(Any, torch.compile)(
            call, backend=own, **kwargs, **_recompile_limit(len(blocks))
        )
        state.compiled.blocks.add(id(module))
        state.compiled.has_blocks = True
    model, state = places[""]
    state.compiled.runs[id(model)] = torch.compiler.disable(_call_of(model))
    return True


def _call_of(module: nn.Module) -> Callable[..., Any]:
    """Return a module's call: hooks and what its class puts around them, but not what `module.compile()` was given."""
    classes = (each for each in type(module).__mro__ if not each.__module__.startswith("fxshard.sharding."))
    around = next(vars(each)["__call__"] for each in classes if "__call__" in vars(each))
    if around is nn.Module.__call__:
        return torch_private.uncompiled_call(module)
    if module._compiled_call_impl is not None:
        raise ConfigError(
            f"{type(module).__name__} has a __call__ of its own, which compile() of it with regional=True would leave "
            "out. Use torch.compile(model, ...) in place of model.compile()."
        )
    return types.MethodType(around, module)


def _recompile_limit(num_blocks: int) -> dict[str, int]:
    """Allow Dynamo `recompile_limit` graphs for each block: they share code, but each may read its own numbers."""
    return {"recompile_limit": num_blocks * torch.compiler.config.recompile_limit} if HAS_LIMIT else {}


def forget_blocks(places: ShardedModules) -> None:
    """Let all modules run uncompiled; a module inside that was compiled by itself is so again when it is called."""
    for name, (_, state) in places.items():
        if name:
            state.compiled.options_from = None
        state.compiled.runs.clear()
        state.compiled.blocks.clear()
        state.compiled.has_blocks = False
    for module in places[""][0].modules():
        module.__dict__.pop(uncompiled_warning.SEEN, None)


def _ours(model: nn.Module, callback: Any = None) -> CompiledWith | None:
    """Return the backend "fxshard" with the options that a model was compiled with; `None` if it is another one."""
    backends = torch_private.backends_of(model, callback)
    return next((each for each in backends if getattr(each.backend, "compiler_name", None) == "fxshard"), None)
