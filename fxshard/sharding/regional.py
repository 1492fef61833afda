"""Compile a model block by block: Dynamo breaks its graph at each block that is alike another one.

[Note: regional compilation]
`torch.compile(model, backend="fxshard", options={"regional": True})`. Blocks whose code and layout are alike share one
graph, so what is traced and compiled does not grow with the number of blocks. torch's recipe ("regional compilation")
has the user call `block.compile()` for each; here blocks are marked when the model is called. Where Dynamo traces the
call of a marked block it breaks its graph: the frame around runs as it is if the call is in a loop, else the parts of
it before and behind are compiled. In both cases Dynamo is offered the block's own frame, and compiles that.

Marks must be there before Dynamo traces anything. So the option is read from the compiled call that is under way
(`torch.compile(model)`), or from what `model.compile()` was given. The one-line form shards in the middle of the first
trace, which is of the whole model; the trace begins anew with the marks. That call is none of a sharded module, so what
its frame reads eagerly around the blocks is read as after a forward: [Note: after a forward] in `runtime/eager.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from fxshard import torch_private
from fxshard.runtime import uncompiled_warning

if TYPE_CHECKING:
    from fxshard.sharding.sharded_module import ModuleState

ShardedModules = Mapping[str, "tuple[nn.Module, ModuleState]"]
"""The sharded modules of a model by their names in it, outer ones first."""


def is_wanted(root: nn.Module, callback: Any) -> bool | None:
    """Return whether the compiled call of a model that is about to run is regional; `None` if it is not ours.

    Args:
        root: the model.
        callback: Dynamo's on this thread.
    """
    for backend in torch_private.backends_of(root, callback):
        if getattr(backend, "compiler_name", None) == "fxshard":
            return bool((getattr(backend, "kwargs", {}).get("options") or {}).get("regional"))
    return None


def mark_blocks(places: ShardedModules, *, regional: bool) -> None:
    """Mark each module that is alike another one, and inside of no marked one; or none."""
    kinds = {name: _kind(module, state) for name, (module, state) in places.items() if name and state.units}
    count = Counter(kinds.values())
    marked: list[str] = []
    for name, (_, state) in places.items():
        inside = any(name.startswith(f"{outer}.") for outer in marked)
        state.compiles_alone = regional and not inside and name in kinds and count[kinds[name]] > 1
        marked += [name] * state.compiles_alone
    if marked:  # what is around them runs eagerly, for a reason that needs no warning
        for name, module in places[""][0].named_modules():
            if not any(name == outer or name.startswith(f"{outer}.") for outer in marked):
                module.__dict__[uncompiled_warning.SEEN] = True


def begin_in_first_call(places: ShardedModules) -> None:
    """Mark the blocks of a model that has just been sharded, in the middle of a call, and let this read the others."""
    mark_blocks(places, regional=True)
    for _, state in places.values():
        for unit in () if state.compiles_alone else state.units:
            unit.after_forward.begin()


def _kind(module: nn.Module, state: ModuleState) -> tuple[type[nn.Module], tuple[str, ...]]:
    """What two blocks have in common that may share a graph."""
    return type(module), tuple(unit.plan.sharing_key for unit in state.units)
