"""Subclasses with unusual hooks, and what is trained with them on four ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fxshard
from tests.numerics.float8 import Float8Weight, give_hooks
from tests.numerics.harness import Scenario, blocks_of, check_bitwise, only_shard, world_mesh
from tests.numerics.microbatches import several
from tests.numerics.models import WIDTH, rows


class Rowwise(Float8Weight):
    """Sent as fp8, a scale in float32 for each row, and its sign: three tensors, of sizes that align with nothing."""

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Rowwise:
        return cls(inner["rows"])

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        scale = 448 / self.rows.abs().amax(1, keepdim=True).clamp(1e-12)
        values = (self.rows.abs() * scale).to(torch.float8_e4m3fn)
        return (values, scale, self.rows.sign().to(torch.int8)), {"shift": torch.full((), 0.5), "kind": ["rowwise", 1]}

    def fsdp_post_all_gather(
        self, all_gather_outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        values, scale, sign = all_gather_outputs
        shift = 1 / metadata["shift"]
        whole = (values.float() / scale * sign * shift).to(param_dtype)
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(whole)
            return None
        return whole, (values, scale, sign, whole)


class Factored(Float8Weight):
    """The second hook reads an attribute that is in no context."""

    factor: float

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        made = super().__torch_dispatch__(func, types, args, kwargs)
        given = [each for each in args if isinstance(each, cls)]
        if isinstance(made, cls) and given and hasattr(given[0], "factor"):
            made.factor = given[0].factor
        return made

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        return (self.rows.to(torch.bfloat16),), None

    def fsdp_post_all_gather(
        self, all_gather_outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        whole = all_gather_outputs[0].to(param_dtype) * self.factor
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(whole)
            return None
        return whole, (whole,)


class Odd(nn.Module):
    """A unit of rows and columns in odd numbers, with plain parameters between those with hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, 5), nn.Linear(5, 6), nn.Linear(6, 6, bias=False)
        self.d = nn.Linear(6, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, x + self.d(torch.relu(self.c(self.b(torch.relu(self.a(x)))))))


class OddModel(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Odd() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)
        if tied:
            self.extra = nn.Linear(WIDTH, WIDTH)
            self.extra.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.extra(self.head(x)) if hasattr(self, "extra") else self.head(x))


def odd(cls: type[Float8Weight] = Rowwise, *, tied: bool = False, **kwargs: Any) -> Scenario:
    """A model of which only matrices of even rows have hooks: no padding."""

    def model() -> nn.Module:
        made = OddModel(tied=tied)
        for module in (each for block in made.blocks for each in (block.b, block.c)):
            give_hooks(cast(nn.Module, module), cls)
        give_hooks(made.head, cls)
        if tied:
            made.extra.weight = made.head.weight
        factor = 1.0
        for parameter in made.parameters():
            if isinstance(parameter, Factored) or isinstance(parameter.data, Factored):
                factor += 0.5
                cast(Any, parameter).factor = factor
        return made

    return Scenario(model=model, batch=rows(), cast_model=False, **kwargs)


def four(hidden: int, **kwargs: Any) -> Scenario:
    """A unit of which some ranks have no rows, or replicas of it."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return give_hooks(nn.Sequential(nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)))

    return Scenario(model=model, batch=rows(), cast_model=False, **kwargs)


def on_four_ranks() -> None:
    """Ranks without rows, and two replicas of two ranks each."""
    check_bitwise(four(1))
    check_bitwise(four(5, prepare=only_shard))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for scenario in (four(6), four(3), four(6, prepare=only_shard), four(6, backward=several)):
        check_bitwise(replace(scenario, shard_kwargs={"mesh": mesh}))


def sharded_odd(cls: type[Float8Weight] = Float8Weight) -> Any:
    """A sharded model whose matrices all have hooks."""
    model = give_hooks(OddModel(), cls)
    for part in (*blocks_of(model), model):
        fxshard.fully_shard(part, mesh=world_mesh())
    return model


def is_first() -> bool:
    return dist.get_rank() == 0
