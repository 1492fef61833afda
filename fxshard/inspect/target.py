"""The model that a command line names: `my_module:build`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from fxshard.errors import ConfigError

Target = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

_RETURN = "return (model, args) or (model, args, kwargs), args being a tuple of its forward's inputs"


def build(target: str) -> Target:
    """Call the function that `module:function` names; return the model, positional and named inputs of its forward."""
    return checked(function_of(target, _RETURN)(), target)


def checked(made: Any, target: str) -> Target:
    """What the function that `target` names returned, as `build` returns it."""
    parts = made if isinstance(made, tuple) else (made,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], nn.Module):
        raise ConfigError(f"{target} returned {kind_of(made)}; {_RETURN}.")
    model: nn.Module = parts[0]
    args = parts[1] if len(parts) > 1 else ()
    kwargs = parts[2] if len(parts) > 2 else {}
    if not isinstance(kwargs, dict):
        raise ConfigError(f"{target} returned {kind_of(made)}; kwargs must be a dict of its forward's named inputs.")
    if len(parts) == 1:
        _require_no_inputs(model, target)
    return model, tuple(args) if isinstance(args, tuple | list) else (args,), kwargs


def function_of(target: str, returns: str, gives: Collection[str] = ()) -> Callable[..., Any]:
    """The function that `module:function` names, with no other parameters than those that `gives` names."""
    module_name, _, path = target.partition(":")
    if not module_name or not path:
        raise ConfigError(f"{target!r} names no function; write MODULE:FUNCTION, such as my_module:build.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # something that the module imports is missing, and the traceback says where
        raise ConfigError(
            f"there is no module {module_name!r}: it is neither installed nor in the current directory."
        ) from error
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError as error:
            raise ConfigError(f"{module_name} has no {path!r}.") from error
    if not callable(found) or isinstance(found, nn.Module):
        raise ConfigError(f"{target} is no function but {kind_of(found)}; write one without parameters: {returns}.")
    if missing := [name for name in _required(found) if name not in gives]:
        raise ConfigError(f"{target} is called without arguments, but it needs {', '.join(missing)}.")
    function: Callable[..., Any] = found
    return function


def _require_no_inputs(model: nn.Module, target: str) -> None:
    if missing := _required(model.forward):
        raise ConfigError(
            f"{target} returned the model alone, but {type(model).__name__}.forward needs {', '.join(missing)}; "
            f"{_RETURN}."
        )


def _required(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a builtin
        return []
    positional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in positional]


def kind_of(value: object) -> str:
    """How a message names what it got."""
    if isinstance(value, tuple):
        return f"({', '.join(type(part).__name__ for part in value)})"
    return type(value).__name__
