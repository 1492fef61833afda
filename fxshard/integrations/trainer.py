"""Hugging Face's `Trainer` on fxshard: `pip install fxshard[hf]`.

[Note: Trainer]
What `Trainer` knows of sharding is what accelerate knows. So this one shards by itself, right before it makes its
optimizer, and hands `Trainer` a compiled model, which that leaves as it is. Accumulation, clipping, evaluation,
schedulers and callbacks stay those of `Trainer`; what reads or writes a whole state asks all ranks for their part.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import fxshard
from fxshard.errors import ConfigError, MissingExtraError

try:
    from transformers import Trainer
except ImportError as error:
    raise MissingExtraError("transformers", "hf") from error

STATE = "fxshard"
"""The folder in a checkpoint of `Trainer` that holds the sharded model and its optimizer."""

SCHEDULER = "scheduler.pt"


class FxshardTrainer(Trainer):
    """A `Trainer` whose model is sharded and compiled by fxshard; start it with torchrun.

    It takes the arguments of `Trainer`, and works in front of a trainer derived from it:
    `class Tuner(FxshardTrainer, SFTTrainer): ...`. Each module of a class that the model names in `_no_split_modules`
    is a unit, and the model is the root; a model that `fxshard.fully_shard` has sharded before is taken as it is.
    `bf16=True` computes in bfloat16 with parameters and sums of gradients in float32, as FSDP2's mixed precision does.
    A checkpoint has the whole model, for `from_pretrained`, and the sharded model and optimizer, from which any number
    of ranks resumes.

    Attributes:
        fxshard_options: `options` of `torch.compile`; set it in a derived class.
    """

    fxshard_options: ClassVar[Mapping[str, Any]] = {}

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Shard the model, then make the optimizer of its parameters."""
        if not self._is_sharded:
            self._require_plain()
            policy = self._policy()
            for block in _blocks_of(self._module):
                fxshard.fully_shard(block, mp_policy=policy)
            fxshard.fully_shard(self._module, mp_policy=policy)
        made: Optimizer = super().create_optimizer(model)
        return made

    @property
    def _module(self) -> nn.Module:
        return cast(nn.Module, self.model)

    @property
    def _is_sharded(self) -> bool:
        return isinstance(self.model, fxshard.ShardedModule)

    def _require_plain(self) -> None:
        asked = {
            "fsdp": bool(self.args.fsdp),
            "deepspeed": bool(self.args.deepspeed),
            "torch_compile": bool(self.args.torch_compile),
            "fp16": bool(self.args.fp16),
        }
        if wrong := [name for name, given in asked.items() if given]:
            raise ConfigError(
                f"FxshardTrainer and TrainingArguments({', '.join(f'{name}=...' for name in wrong)}): FxshardTrainer "
                "shards and compiles the model itself, in float32 or with bf16=True. Leave these arguments out."
            )
        if self.optimizer is not None:
            raise ConfigError(
                "FxshardTrainer(optimizers=...): this optimizer has the parameters as they were before the model is "
                "sharded. Shard the model first (fxshard.fully_shard), make the optimizer of its parameters, and pass "
                "both; or let the Trainer make it (optim=..., optimizer_cls_and_kwargs=...)."
            )

    def _policy(self) -> MixedPrecisionPolicy:
        if not self.args.bf16:
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """Compile the model once, in place of `DistributedDataParallel`; for evaluation it is the same one."""
        if not self._is_sharded:
            return super()._wrap_model(model, training, dataloader)
        if model is not self.model:
            return model  # `train` again
        if self.model_wrapped is self.model:
            compiled: Any = torch.compile(self._module, backend="fxshard", options=dict(self.fxshard_options))
            self.model_wrapped = compiled
        return self.model_wrapped

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """Reduce gradients in the last microbatch of a step alone."""
        last = self.accelerator.sync_gradients or not self._is_sharded
        with contextlib.nullcontext() if last else fxshard.no_sync(self._module):
            loss: Tensor = super().training_step(model, *args, **kwargs)
            return loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm)  # type: ignore[no-untyped-call]
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write the whole model, for `from_pretrained`; all ranks call it."""
        if state_dict is None and self._is_sharded:
            state_dict = fxshard.full_state_dict(self._module)
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write the sharded model and optimizer; all ranks call it."""
        if not self._is_sharded:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        fxshard.save_checkpoint(os.path.join(output_dir, STATE), self._module, _inner(self.optimizer))
        if self.args.should_save:
            torch.save(cast(LRScheduler, self.lr_scheduler).state_dict(), os.path.join(output_dir, SCHEDULER))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Leave a sharded model alone: it is read together with its optimizer, once there is one."""
        if not self._is_sharded:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Read the sharded model and optimizer on all ranks; a ConfigError if another trainer has written them."""
        if checkpoint is None or not self._is_sharded:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        folder = os.path.join(checkpoint, STATE)
        if not os.path.isdir(folder):
            raise ConfigError(
                f"{checkpoint} has no folder {STATE!r}: FxshardTrainer did not write it, or with save_only_model=True. "
                "Start from its model with from_pretrained, without resume_from_checkpoint."
            )
        fxshard.load_checkpoint(folder, self._module, _inner(self.optimizer))
        cast(LRScheduler, self.lr_scheduler).load_state_dict(
            torch.load(os.path.join(checkpoint, SCHEDULER), weights_only=True)
        )

    def _load_best_model(self) -> None:
        """Read the best model on all ranks, or raise a ConfigError if its checkpoint has no sharded model."""
        if not self._is_sharded:
            super()._load_best_model()
            return
        folder = os.path.join(cast(str, self.state.best_model_checkpoint), STATE)
        if not os.path.isdir(folder):
            raise ConfigError(f"load_best_model_at_end=True needs the folder {folder}: leave save_only_model out.")
        fxshard.load_checkpoint(folder, self._module)


def _inner(optimizer: Any) -> Optimizer:
    found: Optimizer = getattr(optimizer, "optimizer", optimizer)
    return found


def _blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules that the model says are not to be split, innermost first."""
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    return [module for module in reversed(list(model.modules())) if type(module).__name__ in names]
