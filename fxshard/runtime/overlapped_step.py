"""A step that launches the next forward's first gather as soon as its parameters are stepped: `fxshard.overlap_step`.

[Note: a step in two parts]
The gather that a forward begins with can be launched when the parameters of its unit have been stepped; the others are
stepped while it is on the link. torch's own optimizers treat parameters one by one, so the same step is taken for some
of them first, then for the rest: `param_groups` show only these meanwhile. What else is called around a step (torch's
hooks, a scheduler's counter) is called once, with the rest. A step is taken as a whole where that could be seen: with
an optimizer that is not torch's or looks at all parameters (LBFGS), a closure, hooks or wrappers of others (which may
clip gradients), or in a compiled step. As within a step, what fails in the second part leaves the first one taken.
"""

from __future__ import annotations

import atexit
import functools
import logging
import types
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from fxshard import torch_private
from fxshard.runtime.step_hooks import step_hooks

BY_PARAMETER = frozenset(
    getattr(torch.optim, name)
    for name in (
        *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop"),
        *("Rprop", "SGD"),
    )
    if hasattr(torch.optim, name)
)
"""Optimizers whose step of one parameter does not depend on the others."""

_log = logging.getLogger(__name__)


def overlap_step(optimizer: Optimizer) -> None:
    """From now on launch in the steps of an optimizer what the next forward takes first."""
    hooks = step_hooks()
    if optimizer in hooks.overlapped:
        return
    if not hooks.overlapped:
        atexit.register(_wait_for_last_step)
    hooks.overlapped.add(optimizer)
    if type(optimizer) in BY_PARAMETER:
        # Nothing here holds the optimizer, which would hold its state until the garbage collector comes.
        step = types.MethodType(_in_two_parts(optimizer), weakref.proxy(optimizer))
        optimizer.step = step  # type: ignore[method-assign]
    else:
        _log.warning(
            "fxshard: overlap_step takes the steps of %s as a whole: it is not known to treat parameters one by one.",
            type(optimizer).__name__,
        )


def _in_two_parts(optimizer: Optimizer) -> Callable[..., Any]:
    reference, replaced = weakref.ref(optimizer), optimizer.__dict__.get("step")
    is_seen = replaced is not None and not (  # torch's schedulers wrap it, and only note that there was a step
        hasattr(replaced, "_wrapped_by_lr_sched") and replaced.__wrapped__ is type(optimizer).step
    )

    @functools.wraps(replaced or type(optimizer).step)
    def step(_: object, *args: Any, **kwargs: Any) -> Any:
        optimizer = reference()
        assert optimizer is not None
        whole = replaced or functools.partial(type(optimizer).step, optimizer)
        has_closure = any(given is not None for given in (*args, *kwargs.values()))
        if has_closure or is_seen or torch.compiler.is_compiling():
            return whole(*args, **kwargs)
        return _step_eagerly(optimizer, whole)

    return step


def _step(optimizer: Optimizer, whole: Callable[[], Any]) -> Any:
    hooks, plain = step_hooks(), without_hooks(type(optimizer).step)
    owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    first = owned & hooks.read_first()
    homes = [str(getattr(hook, "__module__", "")) for hook in torch_private.step_hooks_of(optimizer)]
    is_seen = plain is None or not all(home.startswith("fxshard.") for home in homes)
    if is_seen or plain is None or not first or first == owned:
        return whole()
    hooks.step_begins(optimizer)  # what may not be stepped is an error before anything is
    with _only(optimizer, first):
        plain(optimizer)
        hooks.step_ends(optimizer)
    with _only(optimizer, owned - first):
        return whole()


# A whole train step may be compiled: then Dynamo is on, and must leave the first part alone.
_step_eagerly = torch.compiler.disable(_step)


def without_hooks(step: Any) -> Callable[[Optimizer], Any] | None:
    """Return what torch's `Optimizer` has wrapped with its hooks; `None` if somebody has wrapped that once more."""
    plain = getattr(step, "__wrapped__", None)
    is_torchs = hasattr(step, "hooked") and plain is not None and not hasattr(plain, "hooked")
    return plain if is_torchs else None


@contextmanager
def _only(optimizer: Optimizer, chosen: Collection[int]) -> Iterator[None]:
    """Let an optimizer have some of its parameters alone, by their ids."""
    groups = optimizer.param_groups
    given = [group["params"] for group in groups]
    try:
        for group, parameters in zip(groups, given, strict=True):
            group["params"] = [parameter for parameter in parameters if id(parameter) in chosen]
        optimizer.param_groups = [group for group in groups if group["params"]]
        yield
    finally:
        optimizer.param_groups = groups
        for group, parameters in zip(groups, given, strict=True):
            group["params"] = parameters


def _wait_for_last_step() -> None:
    """Wait for what no forward took any more, once its group is gone: torch warns of what nobody waited for."""
    if not dist.is_initialized():  # else another rank may be gone, and the wait be long
        for model in list(step_hooks().models):
            for unit in model.units:
                unit.model.prefetcher.drop_stepped()
