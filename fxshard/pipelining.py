"""Stages of torch's pipeline schedules whose parameters fxshard has sharded: `torch.distributed.pipelining`.

torch's own `PipelineStage` knows DDP and FSDP2 by their classes; others reduce their gradients in every microbatch.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from fxshard.errors import ConfigError
from fxshard.sharding.sharded_module import ShardedModule, plain_module


class ShardedStage(PipelineStage):
    """A `PipelineStage` of a sharded module, compiled or not: its gradients are reduced once per step.

        stage = ShardedStage(torch.compile(part, backend="fxshard"), index, num_stages, device,
                             input_args=x, output_args=y, group=mesh["pp"].get_group())
        Schedule1F1B(stage, num_microbatches, loss_fn=loss_fn).step(inputs)

    Microbatches are added up unsharded. The last backward reduces their sum during its own compute, and what it did not
    touch is reduced when the schedule asks for it. Give it `input_args` and `output_args`, requiring gradients as the
    real ones will: without them torch runs the module once on the meta device, where nothing is gathered.

    Raises:
        ConfigError: the module, or the module inside the compiled one, is not sharded.
    """

    def __init__(self, submodule: nn.Module, *args: Any, **kwargs: Any) -> None:
        module = plain_module(submodule) if isinstance(submodule, nn.Module) else submodule
        if not isinstance(module, ShardedModule):
            raise ConfigError(
                f"ShardedStage expects a module that fully_shard has sharded, got {type(module).__name__}. Call "
                "fxshard.fully_shard on it first, or use torch's PipelineStage."
            )
        super().__init__(submodule, *args, **kwargs)

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]:
        """Run one microbatch's backward; only the last one reduces."""
        self._module.set_requires_gradient_sync(last_backward)
        self._module.set_is_last_backward(False)  # what it does not touch waits for `perform_reduce_grad`
        try:
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        finally:
            self._module.set_requires_gradient_sync(True)
            self._module.set_is_last_backward(True)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce what still waits; torch then divides gradients by the number of microbatches."""
        self._module.reduce_waiting_gradients()
        super().perform_reduce_grad(grad_scale_factor)

    @property
    def _module(self) -> ShardedModule:
        return cast(ShardedModule, plain_module(self.submod))
