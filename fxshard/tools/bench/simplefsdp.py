"""Sharding without a wrapper, as torchtitan's SimpleFSDP does it: parameters are DTensors, a property gathers them.

Reading `module.weight` redistributes the DTensor to replicated and returns the local tensor, whose gradient is
a partial average; autograd makes a reduce_scatter of it. All of it is traced by `torch.compile`. The gathered
parameter is not saved for backward: selective activation checkpointing gathers it again there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def parametrize(model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Shard every parameter over `mesh`, in place, and have every read of one gather it in the dtypes of `policy`."""
    sharded: dict[nn.Parameter, nn.Parameter] = {}  # a tied parameter stays one
    classes: dict[tuple[type[nn.Module], tuple[str, ...]], type[nn.Module]] = {}  # equal modules share compiled code
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        for name, parameter in own.items():
            if parameter not in sharded:
                sharded[parameter] = _shard(parameter, mesh)
            module.register_parameter(name, sharded[parameter])
        if own:
            key = type(module), tuple(own)
            if key not in classes:
                readers = {name: property(_reader(name, policy)) for name in own}
                classes[key] = type(f"Gathering{type(module).__name__}", (type(module),), readers)
            module.__class__ = classes[key]


def _shard(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    # Every rank has the same weights already, so nothing need be sent.
    dtensor = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
    return nn.Parameter(dtensor, requires_grad=parameter.requires_grad)


def _reader(name: str, policy: MixedPrecisionPolicy) -> Callable[[nn.Module], Tensor]:
    dtypes: dict[str, Any] = {"forward_dtype": policy.param_dtype, "backward_dtype": policy.reduce_dtype}

    def gather(parameter: DTensor) -> Tensor:
        replicated = parameter.redistribute(placements=[Replicate()], **dtypes)
        return replicated.to_local(grad_placements=[Partial(reduce_op="avg")])

    def read(module: nn.Module) -> Any:
        return checkpoint(gather, module._parameters[name], use_reentrant=False, context_fn=_regather)

    return read


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE  # by default the partitioner would rather save than communicate


_regather = functools.partial(create_selective_checkpoint_contexts, _policy)
