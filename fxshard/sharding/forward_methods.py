"""Methods other than `forward` that need whole parameters: `generate`, `encode`."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fxshard.errors import ConfigError
from fxshard.sharding.call_values import cast_inputs, cast_output
from fxshard.sharding.sharded_module import end_call, enter_call, leave_call, state_of


def register(module: nn.Module, name: str) -> None:
    """Let `module.name(...)` do what a call of the sharded module does: cast, gather and free."""
    method = getattr(module, name, None)
    if not callable(method):
        raise ConfigError(f"{type(module).__name__} has no method {name!r}.")

    module.__dict__[name] = types.MethodType(_gathering(method), module)


def registered(module: nn.Module) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the name of each registered method, and what it was before."""
    for name, method in list(module.__dict__.items()):
        function: Any = getattr(method, "__func__", None)
        if getattr(function, "_fxshard_gathering", False):
            yield name, function.__wrapped__


def put_back(module: nn.Module, name: str, method: Callable[..., Any]) -> None:
    """Make `module.name` what it was before it was registered."""
    module.__dict__.pop(name, None)
    if getattr(method, "__func__", None) is not getattr(type(module), name, None):
        module.__dict__[name] = method


def _gathering(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state = state_of(self)
        if state is None:
            return method(*args, **kwargs)
        if torch.compiler.is_compiling():
            args, kwargs = cast_inputs(state.mp_policy, args, kwargs)
            return cast_output(state.mp_policy, method(*args, **kwargs))
        state, args, kwargs = enter_call(self, args, kwargs)
        try:
            return end_call(state, method(*args, **kwargs))
        finally:
            leave_call(state)

    call._fxshard_gathering = True  # type: ignore[attr-defined]
    return call
