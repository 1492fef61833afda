"""Every way to write parameters that torch counts, or after which the user has called `reshard()`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed.checkpoint.state_dict as torch_state
from torch import nn
from torch.distributed.tensor import DTensor

from fxshard.sharding.sharded_module import ShardedModule
from tests.numerics.harness import Run, blocks_of


def with_optimizer(**kwargs: Any) -> Callable[[Run], None]:
    def write(run: Run) -> None:
        torch.optim.AdamW(run.model.parameters(), lr=0.1, **kwargs).step()

    return write


def _scaled(run: Run) -> dict[str, Any]:
    with torch.no_grad():
        return {name: value * 0.5 for name, value in run.model.state_dict().items()}


def load(run: Run) -> None:
    run.model.load_state_dict(_scaled(run))


def load_and_assign(run: Run) -> None:
    run.model.load_state_dict(_scaled(run), assign=True)


def load_by_torch(run: Run) -> None:
    plain = cast(Any, run.model)._orig_mod
    halves: dict[str, Any] = {name: value * 0.5 for name, value in plain.state_dict().items()}
    torch_state.set_model_state_dict(plain, halves)


def copy(run: Run) -> None:
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.copy_(parameter * 0.5)


def write_locally(run: Run) -> None:
    with torch.no_grad():
        for parameter in run.model.parameters():
            cast(DTensor, parameter).to_local().mul_(0.5)
    for module in (*blocks_of(cast(Any, run.model)._orig_mod), run.model):
        cast(ShardedModule, module).reshard()


def replace(run: Run) -> None:
    for module in run.model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                setattr(module, name, nn.Parameter(parameter.detach() * 0.5))


def with_closure(**kwargs: Any) -> Callable[[Run], None]:
    """A step that runs forward and backward itself, before it writes."""

    def write(run: Run) -> None:
        def closure() -> float:
            loss = run.loss(0)
            loss.backward()
            return float(loss)

        torch.optim.AdamW(run.model.parameters(), lr=0.1, **kwargs).step(closure)

    return write


WRITES = {
    "closure, foreach": with_closure(foreach=True),
    "closure, fused": with_closure(fused=True),
    "for loop": with_optimizer(foreach=False),
    "foreach": with_optimizer(foreach=True),
    "fused": with_optimizer(fused=True),
    "load_state_dict": load,
    "load_state_dict, assign": load_and_assign,
    "set_model_state_dict": load_by_torch,
    "copy_": copy,
    "to_local, reshard": write_locally,
    "another parameter": replace,
}
