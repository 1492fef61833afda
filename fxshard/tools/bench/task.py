"""The model that is trained: what `build()` of the user returns, on one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

from fxshard.compile.one_line.units import blocks_of
from fxshard.errors import ConfigError
from fxshard.inspect.target import function_of, kind_of
from fxshard.tools.bench.config import DTYPES, BenchConfig

RETURN: Final = "return (model, batch) or (model, batch, loss_fn)"

_WEIGHT_SEED: Final = 0
_BATCH_SEED: Final = 1  # plus the rank

LossFn = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, this rank's batch, and the loss on it."""

    model: nn.Module  # with the same weights on every rank
    batch: Any  # a tuple or list of inputs, a dict of named ones, or the only one
    # maps the model's output and the batch to the loss; `None` if the output is the loss or has it
    loss_fn: LossFn | None

    def loss(self, forward: Callable[..., Any]) -> Tensor:
        """The loss of a forward of the batch, or a ConfigError if it is no scalar."""
        batch = self.batch
        if isinstance(batch, dict):
            output = forward(**batch)
        elif isinstance(batch, tuple | list):
            output = forward(*batch)
        else:
            output = forward(batch)
        loss = self.loss_fn(output, batch) if self.loss_fn is not None else getattr(output, "loss", output)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ConfigError(
                f"the loss must be a tensor of one element, got {_shape(loss)}. Without loss_fn the model must return "
                "the loss, or an object with an attribute loss; or return (model, batch, loss_fn)."
            )
        return loss


def units_of(model: nn.Module) -> list[nn.Module]:
    """Return what every system shards: the blocks of a model, and what is around them."""
    return [*blocks_of(model), model]


def make_task(config: BenchConfig, rank: int, split_over: DeviceMesh | None = None) -> Task:
    """Build the model with the weights that all ranks share, and the batch of `rank`, by two calls of the function."""
    dtype = DTYPES[config.dtype] if config.dtype is not None else None
    given = () if split_over is None else (split_over,)
    model = _build(config.target, _WEIGHT_SEED, given)[0].to(config.device, dtype)  # of what is floating-point
    _, batch, loss_fn = _build(config.target, _BATCH_SEED + rank, given)

    def place(tensor: Tensor) -> Tensor:
        return tensor.to(config.device, dtype if tensor.is_floating_point() else None)

    return Task(model=model, batch=tree_map_only(Tensor, place, batch), loss_fn=loss_fn)


def _build(target: str, seed: int, given: tuple[DeviceMesh, ...]) -> tuple[nn.Module, Any, LossFn | None]:
    torch.manual_seed(seed)
    made = function_of(target, RETURN)(*given)
    is_legal = isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], nn.Module)
    if not is_legal or not (made[2:] == () or made[2] is None or callable(made[2])):
        raise ConfigError(f"{target} returned {kind_of(made)}; {RETURN}.")
    return made[0], made[1], made[2] if len(made) == 3 else None


def _shape(value: object) -> str:
    return f"one of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {kind_of(value)}"
