"""What is said where Dynamo leaves code of a sharded model uncompiled, of which it says nothing itself.

[Note: uncompiled frames]
A frame that Dynamo gives up on runs as it is, and so does what it calls of torch's own modules: each parameter is then
gathered where it is read, and no pass has a part in it. That a getter runs while torch.compile is on, instead of being
traced, is how we learn of it, and the stack says who reads. Functions that the user disabled are ignored.
"""

from __future__ import annotations

import functools
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Final, NoReturn

import torch
from torch import nn

from fxshard import torch_private
from fxshard.errors import UnsupportedGraph
from fxshard.runtime import eager
from fxshard.runtime.flat_shard import home_of
from fxshard.runtime.parameters import REFS

SEEN: Final = "_fxshard_uncompiled"
"""Key in the `__dict__` of a module of which a read was looked at; one read tells of all."""

_OURS: Final = str(Path(__file__).parents[1])
_EXPLAINED: Final = re.compile(r"^(\S.*)\n  Explanation: (.*)$", re.MULTILINE)

_log = logging.getLogger(__name__)


def refuse_fallback(module: nn.Module, name: str) -> NoReturn:
    """Raise in place of a read: all frames of a function run eagerly once Dynamo has hit its recompile limit."""
    raise UnsupportedGraph(
        f"reading {name!r} of {type(module).__name__}: Dynamo hit its recompile limit and would run the sharded model "
        "eagerly from now on, slowly. Let shapes that vary be dynamic (torch.compile(dynamic=True) or "
        "torch._dynamo.mark_dynamic), see what recompiles with TORCH_LOGS=recompiles, or raise "
        "torch._dynamo.config.recompile_limit."
    )


@torch_private.run_this_frame_eagerly
def notice(module: nn.Module, name: str) -> None:
    """Warn of the code that reads a parameter eagerly though torch.compile is on: once, and not if that is wanted."""
    _look_eagerly(module, name, sys._getframe(1))


def _look(module: nn.Module, name: str, getter: FrameType) -> None:
    ref, running = module.__dict__[REFS][name], eager.running()
    home = home_of(ref.flat)
    if running is None or running.is_backward or home is None:
        return
    if torch_private.is_fake(ref.flat):  # it is `explain`'s
        return
    module.__dict__[SEEN] = True
    frames = list(_frames(getter))
    reader = next((frame for frame in frames if not _is_library(frame.f_code)), None)
    if reader is not None and _is_wanted(reader):
        return
    where = f"the forward of {type(module).__name__}" if reader is None else _place(reader.f_code)
    if where not in _told():
        _told().add(where)
        fqn = home.unit.plan.shards[home.shard].slots[ref.slot].fqn
        why = next(filter(None, (_why(frame.f_code) for frame in frames)), "")
        _log.warning(
            "fxshard: Dynamo left %s uncompiled: %s, and what else it reads, is gathered where it is read, with none "
            "of fxshard's passes.%s TORCH_LOGS=graph_breaks says more; torch.compiler.disable on it ends this warning.",
            where,
            fqn,
            why and f" Why: {why}",
        )


# The caller's frame is run as it is, but Dynamo would still offer itself the frames of what it calls.
_look_eagerly = torch.compiler.disable(_look)


@functools.cache
def _told() -> set[str]:
    return set()


def _frames(inner: FrameType) -> Iterator[FrameType]:
    """The frames around a getter, the innermost first, as far as the entry of torch.compile."""
    frame: FrameType | None = inner
    while frame is not None and frame.f_code.co_filename != torch_private.ENTRY_OF_DYNAMO:
        yield frame
        frame = frame.f_back


def _is_library(code: CodeType) -> bool:
    """Whether Dynamo never compiles this code for itself (torch's, Python's), or it is ours."""
    return code.co_filename.startswith(_OURS) or torch_private.is_never_compiled(code)


def _is_wanted(reader: FrameType) -> bool:
    disabled = reader.f_back is not None and reader.f_back.f_code is torch_private.CALLS_WHAT_IS_DISABLED
    return disabled or not (
        torch_private.was_given_to_dynamo(reader.f_code) or torch_private.was_made_by_dynamo(reader.f_code)
    )


def _place(code: CodeType) -> str:
    """`MoE.forward (model.py:16)`; what a part of a function is called inside, it has from the function."""
    function = re.sub(r"\.<locals>\.<\w+>$", "", code.co_qualname).rpartition("<locals>.")[2]
    function = re.sub(r"torch_dynamo_resume_in_(\w+?)_at_\d+", r"\1", function)
    part = "a part of " * torch_private.was_made_by_dynamo(code)
    return f"{part}{function} ({code.co_filename}:{code.co_firstlineno})"


def _why(code: CodeType) -> str:
    """Why Dynamo gave up on some code when it last met it, as far as it says."""
    place = (code.co_name, code.co_filename, code.co_firstlineno)
    met = [m for m in torch_private.compilation_metrics() if (m.co_name, m.co_filename, m.co_firstlineno) == place]
    if not met:
        return ""
    reasons = _EXPLAINED.findall("\n\n".join((met[-1].fail_reason or "", *(met[-1].restart_reasons or ()))))
    return "; ".join(f"{title}: {text.removesuffix('.')}" for title, text in reasons) + "." * bool(reasons)
