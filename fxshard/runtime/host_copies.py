"""The copies between host and device of units that are offloaded, as they run outside of graphs.

[Note: offloaded shards]
The shards of an *offloaded* unit are in the host's memory; so are their gradients, and the optimizer's state, and there
it steps: FSDP2's `CPUOffloadPolicy`. What is gathered and reduced is on the device. So a shard is copied to the device
before it is sent, `fxshard::copy_to_device`, and the reduced gradient of a shard to the host, `fxshard::copy_to_host`.
Both are launches: they run on a stream of their own for each direction, and each has a wait. For a copy to the device
the current stream waits; for one to the host the host itself does, since a CPU reads the gradient next. So when a
backward has given a gradient, all copies that went before it are done, and the optimizer may write.

In graphs `passes/offload_shards.py` puts them; `passes/hoist_copies.py` and `passes/chain_reductions.py` say when they
run.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fxshard.ir import ops, tags
from fxshard.ir.plan import UnitPlan

_WAIT = torch.ops._c10d_functional.wait_tensor.default


def on_device(shards: Mapping[int, Tensor], plan: UnitPlan) -> dict[int, Tensor]:
    """Return the shards of a unit, by index, where they are gathered."""
    if plan.offload is None:
        return dict(shards)
    device = plan.offload.device
    copies = {i: ops.COPY_TO_DEVICE(shard.detach(), device, tags.TO_DEVICE) for i, shard in shards.items()}
    return {i: _WAIT(copy) for i, copy in copies.items()}


def on_host(gradients: Mapping[int, Tensor], plan: UnitPlan) -> dict[int, Tensor]:
    """Return the reduced gradients of a unit's shards, by index, where the shards are."""
    if plan.offload is None:
        return dict(gradients)
    pinned = plan.offload.pinned
    copies = {i: ops.COPY_TO_HOST(gradient, pinned, tags.TO_HOST) for i, gradient in gradients.items()}
    return {i: _WAIT(copy) for i, copy in copies.items()}
