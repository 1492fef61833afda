"""What holds the parameters that sharding replaces: optimizers get the new ones, anything else is refused."""

from __future__ import annotations

import gc
import types
import weakref
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from fxshard.errors import ConfigError
from fxshard.live_objects import instances_of, referrers_of
from fxshard.runtime import mesh_axes
from fxshard.runtime.parameters import as_dtensor, shard_rows


def rebind_optimizers(replaced: dict[int, tuple[nn.Parameter, nn.Parameter]]) -> None:
    """Put the sharded parameters into every live optimizer, with their rows of its state."""
    for optimizer in instances_of(Optimizer):
        for group in optimizer.param_groups:
            counts_there = group.get("capturable") or group.get("fused")
            for old in [p for p in group["params"] if id(p) in replaced and p in optimizer.state]:
                new, state = replaced[id(old)][1], optimizer.state.pop(old)
                step = {"step": state.pop("step")} if "step" in state and not counts_there else {}
                optimizer.state[new] = step | {name: _beside(new, name, each, old) for name, each in state.items()}
            group["params"] = [replaced[id(p)][1] if id(p) in replaced else p for p in group["params"]]


def _beside(new: nn.Parameter, name: str, value: Any, old: nn.Parameter) -> Any:
    """Return what an optimizer keeps of a parameter where that is now: this rank's rows of what is shaped like it."""
    if not isinstance(value, Tensor):
        return value
    if name == "step" or value.shape != old.shape:
        return value.to(new.device)
    mesh = new.device_mesh  # type: ignore[attr-defined]
    rows = shard_rows(value, mesh_axes.shard_rank(mesh), mesh_axes.num_shards(mesh))
    return as_dtensor(value, rows.to(new.device, copy=True), mesh).detach()


def require_no_holders(orphans: dict[str, weakref.ref[nn.Parameter]]) -> None:
    """Raise if something still holds a replaced parameter: its values are dead, its gradient stays None."""
    if all(reference() is None for reference in orphans.values()):
        return
    gc.collect()
    alive = [(fqn, parameter) for fqn, reference in orphans.items() if (parameter := reference()) is not None]
    ours = {id(alive), *map(id, alive)}
    holders = {fqn: [r for r in referrers_of(p) if id(r) not in ours and _holds(r)] for fqn, p in alive}
    held = {fqn: found for fqn, found in holders.items() if found}
    if not held:
        return
    kinds = sorted({type(holder).__name__ for found in held.values() for holder in found})
    raise ConfigError(
        f"parameters taken from the model before its first call are still held (by: {', '.join(kinds)}): "
        f"{', '.join(held)}. The first call sharded the model and replaced them, so clipping or averaging the old ones "
        "does nothing. Read model.parameters() after the first call, or call fxshard.fully_shard(model) before it."
    )


def _holds(referrer: object) -> bool:
    """Return whether a referrer is more than variables; loops over `model.parameters()` leave one behind."""
    if isinstance(referrer, dict):
        return "__builtins__" not in referrer
    return not isinstance(referrer, types.FrameType | types.CellType | types.GeneratorType)
