"""Small graphs for the tests of passes: traced as the backend traces them, seen before and after every pass.

`trace` compiles a sharded module with the library's own capture and lowering, in one process on a fake group; the
history of the frame has the graphs. `tests/steps.py` runs them.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from fxshard import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from fxshard.compile import dynamo
from fxshard.compile.capture import capture
from fxshard.compile.variants import lower
from fxshard.errors import InvariantError
from fxshard.hardware import BUILTIN
from fxshard.ir import pins
from fxshard.ir.history import CAPTURED, PassHistory
from fxshard.ir.plan import FramePlan
from fxshard.ir.text import graph_text
from fxshard.options import Options
from fxshard.passes import _manager
from fxshard.passes._base import GraphKind, GraphPass, PassContext, Property
from fxshard.passes.pipeline import DEFAULT, Pipeline, default
from fxshard.runtime.frame import Frame
from fxshard.tools.demo.gpt import GPT
from tests.fake_ranks import fake_ranks, split_axis

GOLDEN = Path(__file__).parent / "golden"
WIDTH = 4
HARDWARE = dataclasses.replace(BUILTIN["h100"], gather_tensor_overhead=5e-6)
"""What costs are counted on: a copy of anything so small is cheaper than a tensor of a launch."""

Graph = tuple[fx.GraphModule, PassContext]
SPLIT: tuple[GraphKind, GraphKind] = ("forward", "backward")
"""The graphs of a training step, once the joint one is split."""


# ---- models: few nodes, and ops whose trace is the same in every supported torch


class Layer(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))
        self.bias = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Norms(nn.Module):
    """A matrix between two vectors on each side."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(4)) for _ in range(2))
        self.weight = nn.Parameter(torch.randn(8, 4))
        self.c, self.d = (nn.Parameter(torch.randn(8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.a + self.b) @ self.weight.t() * self.c + self.d


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Layers(nn.Module):
    """Calls `count` layers, one after the other."""

    def __init__(self, count: int, layer: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Residual(Layer):
    """A layer whose result is added to its input."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x)) + x


class ResidualLayers(Layers):
    """Calls residual layers; the first reads what needs no gradient."""

    def __init__(self, count: int = 3) -> None:
        super().__init__(count, Residual)


class ThereAndBack(nn.Module):
    """Reads its only parameter twice in one call, as an embedding that is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight) @ self.weight


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer()])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](self.layers[0](x))


class CheckpointedTwice(CalledTwice):
    """Calls one layer twice, each time in a region of activation checkpointing."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.layers[0], x, use_reentrant=False)
        return x


class Casting(nn.Module):
    """Computes with a transposed bfloat16 copy of its matrix, as under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x.bfloat16() @ self.weight.bfloat16().t()


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.unsqueeze(0)).squeeze(0)


# ---- tracing


@dataclass(frozen=True, kw_only=True)
class Skip(GraphPass):
    """Stands in the place of DedupUnshard where a test leaves it out."""

    ensures = frozenset({Property.DEDUPED})

    def apply(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        return False


@dataclass(frozen=True, kw_only=True, eq=False)
class Traced:
    """The graphs of a training step before and after all passes, and the module that they came from."""

    module: nn.Module  # before it was sharded
    plan: FramePlan  # of the captured frame
    history: PassHistory  # of the captured frame
    width: int  # of the module's input

    def at(self, kind: GraphKind, after: type[GraphPass] | None = None) -> Graph:
        """A graph that is the caller's to edit, and the context of its passes.

        Args:
            kind: of the graph.
            after: the pass that made it; `None` for the graph before the first pass.
        """
        record = self.history.stages[kind][after().name if after else CAPTURED]
        called = [str(node.target) for node in record.graph.find_nodes(op="get_attr")]
        code = {name: record.graph.owning_module.get_submodule(name) for name in called}  # type: ignore[union-attr]
        ctx = PassContext(plan=self.plan, kind=kind, hardware=HARDWARE)
        return fx.GraphModule(code, copy.deepcopy(record.graph)), ctx

    @property
    def world_size(self) -> int:
        return next(iter(self.plan.units.values())).world_size

    @property
    def replicas(self) -> int:
        """How many ranks hold the same shard."""
        return next(iter(self.plan.units.values())).replicas


def trace(
    module: nn.Module,
    *,
    units: Callable[[nn.Module], Sequence[nn.Module]] = lambda module: [module],
    world_size: int = 2,
    replicas: int = 1,
    parallelize: Callable[[nn.Module, DeviceMesh], object] | None = None,
    mesh_of: Callable[[DeviceMesh, int], DeviceMesh] = lambda mesh, _: mesh,
    pipeline: Pipeline = DEFAULT,
    train: bool = True,
    width: int = WIDTH,
    inputs: Sequence[Tensor] = (),
    lowering: Literal["eager", "inductor"] = "eager",
    verify: bool = True,
    offloads: bool = False,
    then: Callable[[Any], object] = lambda unit: None,
    **shard_kwargs: Any,
) -> Traced:
    """Shard, compile and run a module once, forward and (if `train`) backward.

    Args:
        units: the modules to make units of, inner ones first.
        world_size: number of fake ranks that share the parameters.
        replicas: how many of them hold the same shard.
        parallelize: makes the module tensor-parallel over two ranks of the mesh that it is given.
        mesh_of: the mesh of the n-th unit, of that of all units.
        pipeline: the passes; those that only Inductor can run are left out for the interpreter.
        train: whether to run with autograd.
        width: of the module's input.
        inputs: of the module; by default one tensor of ones, `[2, width]`.
        lowering: in whose dialect of aten; Inductor generates no code.
        verify: off where the pipeline leaves out what the verifier would miss.
        offloads: whether shards are in the host's memory.
        then: is called with each sharded module, to set more.
        **shard_kwargs: of fully_shard.
    """
    frames: list[Frame] = []
    original = copy.deepcopy(module)
    if lowering == "eager":
        pipeline = dataclasses.replace(pipeline, last=(), codegen=default(lower="eager").codegen)
    given = inputs or [torch.ones(2, width, dtype=next(module.parameters()).dtype)]

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Frame:
        options = Options(lower=lowering, verify=verify)
        frame = Frame(capture(gm, inputs, dynamo.flats_of(inputs), options).plan, hardware=HARDWARE)
        frames.append(frame)
        lower(gm, inputs, frame, pipeline, options, generate_code=lowering == "eager")
        return frame

    tensor_parallel = 1 if parallelize is None else 2
    with fake_ranks(world_size, replicas, tensor_parallel=tensor_parallel) as mesh, torch.set_grad_enabled(train):
        if parallelize is not None:
            parallelize(module, split_axis(mesh))
            mesh = mesh["shard"]
        offload = CPUOffloadPolicy() if offloads else OffloadPolicy()
        for i, unit in enumerate(units(module)):
            then(fully_shard(unit, mesh=mesh_of(mesh, i), offload_policy=offload, **shard_kwargs))
        result = torch.compile(module, backend=backend)(*given)
        if train:
            result.sum().backward()
    return Traced(module=original, plan=frames[0].plan, history=frames[0].history, width=width)


def traced_once(build: Callable[..., Traced]) -> Callable[..., Traced]:
    """Make a builder trace once for all tests, with the same random weights: `Traced.at` gives each its own graphs."""

    @functools.cache
    @functools.wraps(build)
    def seeded(**kwargs: Any) -> Traced:
        torch.manual_seed(0)
        return build(**kwargs)

    return seeded


def layers_of(module: nn.Module) -> Sequence[nn.Module]:
    """The units of the models with layers: each layer, then the rest."""
    return [*module.get_submodule("layers").children(), module]


@traced_once
def two_layers(**kwargs: Any) -> Traced:
    return trace(TwoLayers(), units=layers_of, **kwargs)


def in_subgroups(*, world_size: int = 4, **kwargs: Any) -> Traced:
    """Two units that half of the ranks share between forward and backward."""
    return two_layers(world_size=world_size, reshard_after_forward=max(1, world_size // 2), **kwargs)


OFFLOADED = {"offloads": True}
"""To trace a model whose shards are in the host's memory."""


def offloaded(**kwargs: Any) -> Traced:
    """Two units whose shards are in the host's memory."""
    return two_layers(**OFFLOADED, **kwargs)


def two_meshes(*, world_size: int = 2, **kwargs: Any) -> Traced:
    """Two units, of which half of the ranks share the first, and all the second."""
    return two_layers(world_size=world_size, replicas=2, mesh_of=half_of_the_ranks_first, **kwargs)


def half_of_the_ranks_first(mesh: DeviceMesh, i: int) -> DeviceMesh:
    """Return the axis of a mesh that shards for the first unit, all ranks for the others."""
    return mesh["shard"] if i == 0 else init_device_mesh("cpu", (mesh.size(),))


@traced_once
def uneven(**kwargs: Any) -> Traced:
    """One unit whose five rows no two ranks or more can share equally."""
    return trace(Layer(5), width=5, **kwargs)


@traced_once
def two_dtypes(**kwargs: Any) -> Traced:
    layer = Layer()
    layer.bias = nn.Parameter(layer.bias.detach().bfloat16())
    return trace(layer, **kwargs)


@traced_once
def doubles(**kwargs: Any) -> Traced:
    """One unit in float64, which the collectives do not average themselves."""
    return trace(Layer().double(), **kwargs)


@traced_once
def mixed_precision(reduce_dtype: torch.dtype | None = torch.float32, **kwargs: Any) -> Traced:
    """One unit that is gathered in bfloat16 and reduced in float32, or as it is computed."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    return trace(Layer(), mp_policy=policy, **kwargs)


@traced_once
def frozen_weight(**kwargs: Any) -> Traced:
    layer = Layer()
    layer.weight.requires_grad_(False)
    return trace(layer, **kwargs)


@traced_once
def read_twice(**kwargs: Any) -> Traced:
    return trace(ThereAndBack(), **kwargs)


@traced_once
def called_twice(**kwargs: Any) -> Traced:
    return trace(CalledTwice(), units=layers_of, **kwargs)


@traced_once
def checkpointed_twice(**kwargs: Any) -> Traced:
    """One unit whose layer is called in two regions of activation checkpointing."""
    return trace(CheckpointedTwice(), **kwargs)


@traced_once
def casting(**kwargs: Any) -> Traced:
    """One unit whose matrix is cast and transposed before use."""
    return trace(Casting(), **kwargs)


@traced_once
def scalar(**kwargs: Any) -> Traced:
    """One unit of one number."""
    return trace(Scale(), **kwargs)


@traced_once
def convolution(**kwargs: Any) -> Traced:
    return trace(Convolution(), **kwargs)


@traced_once
def gpt(**kwargs: Any) -> Traced:
    """The GPT of the demo, two narrow blocks of it, each a unit."""
    model = GPT(max_seq_len=8, dim=16, num_layers=2, num_heads=2)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    return trace(model, units=lambda m: [*m.get_submodule("blocks").children(), m], inputs=[tokens], **kwargs)


@traced_once
def regions(**kwargs: Any) -> Traced:
    """Three residual layers, of which the second and the third call one region."""
    return trace(ResidualLayers(), units=layers_of, pipeline=default(), **kwargs)


EVERY_UNIT = (
    two_layers,
    uneven,
    two_dtypes,
    frozen_weight,
    read_twice,
    called_twice,
    scalar,
    doubles,
    mixed_precision,
)
"""A model for each way in which a unit can be laid out, gathered and reduced."""


# ---- passes and texts


def in_split(*added: GraphPass) -> Callable[[Pipeline], Pipeline]:
    return lambda pipeline: dataclasses.replace(pipeline, split=(*pipeline.split, *added))


def run_pass(pass_: GraphPass, gm: fx.GraphModule, ctx: PassContext, given: Sequence[Property] | None = None) -> bool:
    """Run one pass as the pipeline does; `given` is what it requires unless said otherwise."""
    return _manager.run(gm, [pass_], ctx, given=pass_.requires if given is None else given)


def assert_changes_nothing(pass_: GraphPass, gm: fx.GraphModule, ctx: PassContext) -> None:
    before = text(gm)
    assert not run_pass(pass_, gm, ctx)
    assert text(gm) == before


def broken_by(
    pass_: GraphPass,
    mistake: Callable[[fx.Graph], object],
    gm: fx.GraphModule,
    ctx: PassContext,
    given: Sequence[Property] | None = None,
) -> str:
    """The invariant that catches a mistake of a pass; the error names pass and graph."""
    right = type(pass_)

    class Wrong(right):  # type: ignore[misc, valid-type]
        def apply(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
            changed: bool = pass_.apply(gm, ctx)
            mistake(gm.graph)
            return changed

    with pytest.raises(InvariantError, match=rf"Wrong.* broke `\w+` in the {ctx.kind} graph") as caught:
        run_pass(Wrong(), gm, ctx, given)
    return str(caught.value).split("`")[1]


def text(gm: fx.GraphModule) -> str:
    return graph_text(pins.inlined(gm.graph))


def without_subgroup_name(graph: str) -> str:
    """Leave out the name of the subgroup's process group, which torch makes up."""
    return re.sub(r"(, 2, )'[0-9a-f]{40}'", r"\1'subgroup'", graph)


def accepts() -> bool:
    """Whether expected texts are to be written anew: `EXPECTTEST_ACCEPT=1`."""
    return bool(os.environ.get("EXPECTTEST_ACCEPT"))


def assert_golden(actual: str, name: str) -> None:
    path = GOLDEN / f"{name}.txt"
    if accepts():
        path.parent.mkdir(exist_ok=True)
        path.write_text(actual + "\n")
    assert actual + "\n" == path.read_text(), f"{path.name} differs; EXPECTTEST_ACCEPT=1 writes it anew"
