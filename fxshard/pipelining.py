"""Stages of torch's pipeline schedules whose parameters fxshard has sharded: `torch.distributed.pipelining`.

torch's own `PipelineStage` knows DDP and FSDP2 by their classes; others reduce their gradients in every microbatch.
Schedules speak to a stage by the methods below, which are all that there is to answer: they unshard and reshard
modules of FSDP2's class alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from fxshard.errors import ConfigError
from fxshard.runtime import unsharded_cache
from fxshard.runtime.unit import Unit
from fxshard.sharding.sharded_module import ShardedModule, plain_module, state_of


class ShardedStage(PipelineStage):
    """A `PipelineStage` of a sharded module, compiled or not: its gradients are reduced once per step.

        stage = ShardedStage(torch.compile(part, backend="fxshard"), index, num_stages, device,
                             input_args=x, output_args=y, group=mesh["pp"].get_group())
        Schedule1F1B(stage, num_microbatches, loss_fn=loss_fn).step(inputs)

    Any of torch's schedules runs it, with one stage on a rank or several. Microbatches are added up unsharded, and the
    last backward reduces their sum during its own compute. What the option `resident_gib` has room for, or
    `set_reshard_after_backward(False)` keeps, is gathered once per step. Inside of `no_sync()` a step reduces nothing,
    and the sums wait for the next one.

    Where a schedule splits a backward into that of the inputs and that of the weights (`ScheduleZBVZeroBubble`), the
    first part runs both and the second nothing: a compiled graph gives all gradients at once. The numbers are those of
    the split; the bubble that it would fill stays.

    Give it `input_args` and `output_args`, requiring gradients as the real ones will. Without them torch runs the
    module once to see what comes out: with gathers, and with torch 2.13 and later a backward.

    Raises:
        ConfigError: the module, or the module inside the compiled one, is not sharded; or a `dw_builder` is given.
    """

    def __init__(self, submodule: nn.Module, *args: Any, **kwargs: Any) -> None:
        module = plain_module(submodule) if isinstance(submodule, nn.Module) else submodule
        if not isinstance(module, ShardedModule):
            raise ConfigError(
                f"ShardedStage expects a module that fully_shard has sharded, got {type(module).__name__}. Call "
                "fxshard.fully_shard on it first, or use torch's PipelineStage."
            )
        super().__init__(module, *args, **kwargs)  # schedules that split backwards refuse a compiled one
        if self.dw_builder is not None:
            raise ConfigError(
                "ShardedStage takes no dw_builder: the backward of a sharded module reduces the gradients of its "
                "weights, and would not know of those that come later. Leave dw_builder out."
            )
        self._call = submodule
        self._num_backwards = 0

    def clear_runtime_states(self) -> None:
        """Begin a step."""
        super().clear_runtime_states()
        self._num_backwards = 0
        for unit in self._units if self.has_backward else ():
            unit.step.stages.add(self)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Run one microbatch's forward; what is gathered for it may stay until the last backward."""
        with _without_sync(self._units) if self.has_backward else contextlib.nullcontext():
            return self._call(*args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run one microbatch's backward, for inputs and weights; the last one of the step reduces."""
        self._num_backwards += 1
        is_last = last_backward or self._num_backwards == self.chunks  # torch's flag is for weights
        super().backward_one_chunk(bwd_chunk_id, loss=loss, full_backward=True, last_backward=is_last)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Do nothing: `backward_one_chunk` has run the backward for weights, too."""

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]:
        """Run one microbatch's backward; only the last one reduces."""
        with contextlib.nullcontext() if last_backward else _without_sync(self._units):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Return what goes to the stage before this one on the same rank; torch refuses in `eval()`."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        """Take what comes from the stage behind this one on the same rank; torch refuses in `eval()`."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce what still waits; torch then divides gradients by the number of microbatches."""
        if not self.has_backward:
            return  # torch 2.13 calls it in eval(), too, and would divide gradients that are there
        for unit in self._units:
            if unit.settings.sync:
                unit.model.reduce([unit])
            unsharded_cache.reshard_if_reduced(unit)
        super().perform_reduce_grad(grad_scale_factor)
        self._leave_units()  # torch scales nothing by 1

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divide the gradients of the step; those of a unit of two stages when both have added to them."""
        self._leave_units()
        members = (member for unit in self._units if unit.step.stages for member in unit.members)
        later = {id(member.parameter) for member in members}
        for parameter in self.submod.parameters():
            if parameter.grad is not None and id(parameter) not in later:
                parameter.grad.div_(grad_scale_factor)

    def _leave_units(self) -> None:
        for unit in self._units:
            unit.step.stages.discard(self)

    @property
    def _units(self) -> tuple[Unit, ...]:
        state = state_of(self.submod)
        return state.nested if state is not None else ()


@contextlib.contextmanager
def _without_sync(units: Iterable[Unit]) -> Iterator[None]:
    """Let backwards inside add gradients up; what the user has said holds again after."""
    before = {unit: unit.settings.sync for unit in units}
    try:
        for unit in before:
            unit.set_sync(False)
        yield
    finally:
        for unit, sync in before.items():
            unit.set_sync(sync)
