"""Keep forward's last unit unsharded until backward, which reads it first: `prefetch="auto"`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx

from fxshard.ir import ops
from fxshard.ir.plan import FramePlan
from fxshard.runtime.flat_shard import Home


def keep_last_unit_unsharded(gm: fx.GraphModule, plan: FramePlan, flats: Mapping[int, Home]) -> FramePlan:
    """Let the last unit of a model's forward stay unsharded until backward, which would gather it again at once.

    This saves one gather per step and takes no more memory than one unit ahead: backward's first gather would be in
    flight while forward's last unit is read. `gm` has bound markers; `flats` maps input index -> unit.

    Returns the plan with that unit's `reshard_after_forward` off; unchanged if the graph is not the whole model,
    nothing is trained, or the unit was told what to do.
    """
    units = {key: flats[position].unit for position, (key, _) in plan.shard_inputs.items()}
    whole = {unit for some in units.values() for unit in some.model.units}
    if not torch.is_grad_enabled() or whole != set(units.values()):
        return plan
    order = dict.fromkeys(ops.key_of(node).unit for node in gm.graph.nodes if ops.is_unshard(node))
    ahead = [key for key in order if plan.units[key].regathers]
    if len(ahead) < 2 or units[ahead[-1]].settings.reshard_after_forward is not None:
        return plan
    last = ahead[-1]
    return replace(plan, units={**plan.units, last: replace(plan.units[last], reshard_after_forward=False)})
