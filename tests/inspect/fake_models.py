"""Models, ways to shard them, and a backend that keeps what it captured, for the tests of fake models."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch.distributed.device_mesh import DeviceMesh

from fxshard import MixedPrecisionPolicy, fully_shard
from fxshard.compile import dynamo
from fxshard.compile.capture import capture
from fxshard.compile.variants import lower
from fxshard.inspect.fake_model import FakeModel
from fxshard.ir.plan import FramePlan, UnitPlan
from fxshard.options import Options
from fxshard.passes.pipeline import default
from fxshard.runtime.frame import Frame
from fxshard.sharding.sharded_module import units_under

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(self.norm(x)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("scale", torch.full((WIDTH,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Broken(Stack):
    """Breaks the graph after each block."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.first(x))
        torch._dynamo.graph_break()
        x = self.blocks[1](x)
        torch._dynamo.graph_break()
        return self.last(x)


class Tied(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.last.weight = self.first.weight


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(0)
        return self.attention(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    """Has a part that Dynamo leaves to Python."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


def blocks_then_root(model: Any, mesh: DeviceMesh, **kwargs: Any) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **kwargs)
    fully_shard(model, mesh=mesh, **kwargs)


def list_as_one_unit(model: Any, mesh: DeviceMesh) -> None:
    fully_shard(model.blocks[0].linear, mesh=mesh)
    fully_shard([model.first, model.blocks[0], model.last], mesh=mesh)
    fully_shard(model, mesh=mesh)


def in_bfloat16(model: Any, mesh: DeviceMesh) -> None:
    inner = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model.blocks[0], mesh=mesh, mp_policy=inner, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=replace(inner, output_dtype=torch.float32))


def partly_ignored(model: Any, mesh: DeviceMesh) -> None:
    ignored = {model.first.weight, *model.blocks[1].parameters()}
    fully_shard(model.blocks[1], mesh=mesh, ignored_params=ignored)  # makes no unit
    fully_shard(model, mesh=mesh, ignored_params=ignored)


def partly_frozen(model: Any, mesh: DeviceMesh) -> None:
    model.first.requires_grad_(False)
    blocks_then_root(model, mesh)
    model.blocks[0].norm.requires_grad_(False)


def changed_later(model: Any, mesh: DeviceMesh) -> None:
    blocks_then_root(model, mesh)
    model.set_reshard_after_forward(False)
    model.blocks[1].to(torch.float64).float()


def whole(model: Any, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh)


def in_evaluation(model: Any, mesh: DeviceMesh) -> None:
    blocks_then_root(model.eval(), mesh)


def hooked(model: Any, mesh: DeviceMesh) -> None:
    blocks_then_root(model, mesh)
    model.blocks[0].register_forward_hook(lambda module, args, output: output * 2)
    model.blocks[1].register_forward_pre_hook(lambda module, args: (args[0] + 1,))


def rows() -> Tensor:
    return torch.ones(4, WIDTH)


OFFSET = torch.ones(WIDTH)


class Reaching(Stack):
    """Reads a tensor that it does not own, and hooks itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_forward_hook(self.scaled)

    def scaled(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * self.get_buffer("scale")

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + OFFSET)


@dataclass
class Traces:
    """A test backend, and what it compiled."""

    plans: list[FramePlan] = field(default_factory=list)  # of the captured graphs, in order
    graphs: list[str] = field(default_factory=list)  # as Dynamo captured them
    # unit -> parameters with gradients, of each captured graph
    trained: list[dict[str, Any]] = field(default_factory=list)

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Frame:
        options = Options(lower="eager", verify=False)
        frame = Frame(capture(gm, inputs, dynamo.flats_of(inputs), options).plan)
        self.plans.append(frame.plan)
        lower(gm, inputs, frame, default(lower="eager"), options, generate_code=False)
        graph = frame.history.stages["dynamo"]["bind_markers"].graph
        self.graphs.append(re.sub(r" : torch\.\S+", "", str(graph)))  # without the types of the inputs
        self.trained.append(frame.trained)
        return frame


def traced(model: nn.Module, *args: Any, **kwargs: Any) -> Traces:
    traces = Traces()
    result = torch.compile(model, backend=traces)(*args, **kwargs)
    result = getattr(result, "logits", result)
    if result.requires_grad:
        result.sum().backward()
    return traces


def traced_shadow(fake_model: FakeModel, *args: Any, **kwargs: Any) -> Traces:
    args, kwargs = fake_model.inputs(args, kwargs)
    with fake_model.tracing():
        return traced(fake_model.model, *args, **kwargs)


def plans_of(model: nn.Module) -> list[UnitPlan]:
    return [replace(unit.plan, group="") for unit in units_under(model)]


def entries_on(*functions: Any) -> list[int]:
    return [len(_debug_get_cache_entry_list(function.__code__)) for function in functions]
