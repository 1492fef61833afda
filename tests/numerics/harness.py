"""Train one scenario in several systems and compare what they computed.

A `Scenario` says what to train: model, batches, loss, how to shard and compile, what happens in a step. A `System`
says by what:

    UNSHARDED    the plain module on the global batch, in float64
    FSDP2        torch.distributed.fsdp.fully_shard in eager mode, in either precision
    fxshard(..)  ours, in either precision, lowered to the FX interpreter or to Inductor

`check` trains ours once, in float64 and lowered to the interpreter, and holds it to bitwise equality with FSDP2 and to
rtol 1e-9 against UNSHARDED. `check_bitwise` is for scenarios in which the dtype decides what is computed: float32, as
far as a policy does not say otherwise. `check_inductor` holds the compiled code to rtol 1e-5 against FSDP2. The loss of
a rank is a mean over its rows, and all ranks have equally many, so the mean over ranks is the loss of the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import fxshard
from fxshard.torch_private import REDUCES_IN_STORAGE_DTYPE
from tests.numerics.models import MLP, WIDTH

NUM_STEPS = 4
COMPILE_PREFIX = "_orig_mod."
EAGER: dict[str, Any] = {"lower": "eager"}
"""Options of our backend where no code needs to be made."""

Batch = tuple[Tensor, ...]
Model = TypeVar("Model", bound=nn.Module)
Grads = dict[str, Tensor | None]


@dataclass(frozen=True, kw_only=True)
class System:
    """How a scenario is trained."""

    name: str
    fully_shard: Callable[..., Any] | None = None
    backend: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    global_batch: bool = False
    ours: bool = False


UNSHARDED = System(name="unsharded float64", dtype=torch.float64, global_batch=True)
FSDP2 = System(name="FSDP2", fully_shard=fsdp2_fully_shard)


def fxshard_system(
    *, dtype: torch.dtype = torch.float32, lower: str = "eager", device: str = "cpu", **options: Any
) -> System:
    """Return the system under test."""
    return System(
        name=f"fxshard, lower={lower}, {dtype}",
        fully_shard=fxshard.fully_shard,
        backend="fxshard",
        ours=True,
        options={"lower": lower, **options},
        dtype=dtype,
        device=device,
    )


def world_mesh(device: str = "cpu") -> DeviceMesh:
    """Return the 1-D mesh of all ranks."""
    return init_device_mesh(device, (dist.get_world_size(),))


def compile_module(module: nn.Module, options: Mapping[str, Any] | None = None, **kwargs: Any) -> nn.Module:
    """Compile with our backend; torch's own signature does not say that a module in gives a module out."""
    return cast(nn.Module, cast(Any, torch.compile)(module, backend="fxshard", options=options, **kwargs))


def loss_on_ones(model: nn.Module, rows: int = 2) -> Tensor:
    """Return a loss of the MLP."""
    return model(torch.ones(rows, WIDTH)).square().mean()


@dataclass(frozen=True, kw_only=True)
class Tools:
    """What `prepare` shards and compiles with; both do nothing where the system does not."""

    system: System
    scenario: Scenario

    def shard(self, module: nn.Module | list[nn.Module], **kwargs: Any) -> None:
        """Apply the system's fully_shard with the scenario's arguments, unless `kwargs` says otherwise."""
        if self.system.fully_shard is not None:
            mesh = world_mesh(self.system.device)
            self.system.fully_shard(module, **{"mesh": mesh, **self.scenario.shard_kwargs, **kwargs})

    def compile(self, module: nn.Module) -> nn.Module:
        """Return the module compiled by the system's backend."""
        if self.system.backend is None:
            return module
        return compile_module(module, options=self.system.options, **self.scenario.compile_kwargs)

    def compile_in_place(self, module: nn.Module) -> None:
        """Compile the module's own call."""
        if self.system.backend is not None:
            kwargs = {"backend": self.system.backend, "options": dict(self.system.options)}
            module.compile(**kwargs, **self.scenario.compile_kwargs)


def blocks_of(model: nn.Module) -> Iterable[nn.Module]:
    """Return the units of a model besides its root: its `blocks`, if it has any."""
    blocks = getattr(model, "blocks", ())
    assert isinstance(blocks, Iterable)
    return blocks


def sharded(model: Model, **kwargs: Any) -> Model:
    """Make a unit of each block, and one of the rest, for tests that are no scenario; return the model."""
    for block in blocks_of(model):
        fxshard.fully_shard(block, **kwargs)
    fxshard.fully_shard(model, **kwargs)
    return model


def sharded_as(
    model: nn.Module, way: str, *, parts: Iterable[nn.Module] | None = None, lower: str = "eager"
) -> nn.Module:
    """Shard and compile in one of the ways that a user has; return what is to be called.

    Args:
        model: is sharded, by its first call if in "one line".
        way: "one line"; or of a unit for each part and one of the rest: "compiled", compiled "in parts", or "eager".
        parts: by default its blocks.
        lower: to what.
    """
    if way == "one line":
        return compile_module(model, {"lower": lower})
    for part in blocks_of(model) if parts is None else parts:
        fxshard.fully_shard(part)
        if way == "in parts":
            part.compile(backend="fxshard", options={"lower": lower})
    fxshard.fully_shard(model)
    return compile_module(model, {"lower": lower}) if way == "compiled" else model


def sharded_mlp(mesh: DeviceMesh, *, compiled: bool = False) -> nn.Module:
    """Return a sharded model, for tests that call it once or twice."""
    model = sharded(MLP(), mesh=mesh)
    return compile_module(model, options=EAGER) if compiled else model


def shard_blocks(model: nn.Module, tools: Tools) -> None:
    """Make a unit of each block, and one of the rest."""
    for block in blocks_of(model):
        tools.shard(block)
    tools.shard(model)


def shard_and_compile(model: nn.Module, tools: Tools) -> nn.Module:
    """Shard block by block, compile the whole."""
    shard_blocks(model, tools)
    return tools.compile(model)


def only_shard(model: nn.Module, tools: Tools) -> nn.Module:
    """Shard block by block, compile nothing."""
    shard_blocks(model, tools)
    return model


def only_compile(model: nn.Module, tools: Tools) -> nn.Module:
    """Leave the sharding to the first call of our compiled module; shard block by block elsewhere."""
    if not tools.system.ours:
        shard_blocks(model, tools)
    return tools.compile(model)


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return the optimizer of most scenarios; `eps` keeps the rounding of zero gradients (a bias of keys) small."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-5)


def squared_error(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean squared error of the model."""
    return (model(x) - y).square().mean()


@dataclass(kw_only=True, eq=False)
class Run:
    """A training run and what it has computed so far."""

    scenario: Scenario
    system: System
    model: nn.Module
    optim: Optimizer
    losses: list[Tensor] = field(default_factory=list)
    grads: Grads = field(default_factory=dict)
    params: dict[str, Tensor] = field(default_factory=dict)
    extra: list[Tensor] = field(default_factory=list)
    """What a scenario wants compared besides; it must not depend on the rank."""

    def batch(self, step: int) -> Batch:
        """Return this rank's rows of a step, or all rows where the system trains on the global batch."""
        ranks = range(dist.get_world_size()) if self.system.global_batch else [dist.get_rank()]
        parts = zip(*(self.scenario.batch(step, rank) for rank in ranks), strict=True)
        rows = (torch.cat(part).to(self.system.device) for part in parts)
        return tuple(x.to(self.system.dtype) if x.is_floating_point() else x for x in rows)

    def loss(self, step: int) -> Tensor:
        """Return the loss of a step's batch."""
        return self.scenario.loss(self.model, *self.batch(step))

    def record_loss(self, loss: Tensor) -> None:
        """Keep the mean over ranks of a step's loss."""
        mean = loss.detach().clone()
        if not self.system.global_batch:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        self.losses.append(mean)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by the names that they have without the compiler's wrapper."""
        return {name.replace(COMPILE_PREFIX, ""): p for name, p in self.model.named_parameters()}


def full(x: Tensor) -> Tensor:
    """Return a copy of the whole of a tensor that may be sharded; rows on the host are gathered where the ranks are."""
    x = x.detach()
    return (cast(DTensor, x.to(x.device_mesh.device_type)).full_tensor() if isinstance(x, DTensor) else x).clone()


def backward_of_one_loss(run: Run, step: int) -> Tensor:
    """Run forward and backward of one batch."""
    loss = run.loss(step)
    loss.backward()
    return loss


def update(run: Run) -> None:
    """Step the optimizer and drop the gradients."""
    run.optim.step()
    run.optim.zero_grad()


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is trained, and how one step of it goes."""

    model: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    """(step, rank) -> rows of that rank."""
    cast_model: bool = True
    """Whether the model takes the dtype of the system."""
    loss: Callable[..., Tensor] = squared_error
    prepare: Callable[[nn.Module, Tools], nn.Module] = shard_and_compile
    shard_kwargs: Mapping[str, Any] = field(default_factory=dict)
    compile_kwargs: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = adamw
    before_step: Callable[[Run, int], None] = lambda run, step: None
    backward: Callable[[Run, int], Tensor] = backward_of_one_loss
    """Forward and backward of a step; returns its loss."""
    update: Callable[[Run], None] = update


def start(scenario: Scenario, system: System) -> Run:
    """Build the model, shard and compile it, and build its optimizer."""
    torch.manual_seed(0)
    model = scenario.model()
    if scenario.cast_model:
        model = model.to(system.dtype)
    model = model.to(system.device)
    model = scenario.prepare(model, Tools(system=system, scenario=scenario))
    return Run(scenario=scenario, system=system, model=model, optim=scenario.optimizer(model.parameters()))


def train_step(run: Run, step: int) -> None:
    """Do one step, and keep its loss and the first step's gradients."""
    run.scenario.before_step(run, step)
    torch.manual_seed(1000 * step + dist.get_rank())
    run.record_loss(run.scenario.backward(run, step))
    if step == 0:
        run.grads = {name: None if p.grad is None else full(p.grad) for name, p in run.named_parameters().items()}
    run.scenario.update(run)


def train(scenario: Scenario, system: System, *, fresh: bool = True) -> Run:
    """Train the scenario in a system, whose graphs count towards no other system's recompile limit.

    Unless `fresh`, graphs that are there are used again: those of another model of one class and layout serve.
    """
    if fresh:
        torch._dynamo.reset()
    run = start(scenario, system)
    for step in range(NUM_STEPS):
        train_step(run, step)
    run.params = {name: full(p) for name, p in run.named_parameters().items()}
    return run


# ---- comparisons


def assert_close(actual: Any, expected: Any, what: str, *, rtol: float, atol: float) -> None:
    """Compare tensors (or sequences of them), saying what they are."""
    torch.testing.assert_close(
        actual, expected, rtol=rtol, atol=atol, equal_nan=True, msg=lambda text: f"{what}: {text}"
    )


def assert_same_tensors(
    actual: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None], what: str, *, rtol: float, atol: float
) -> None:
    """Compare tensors by name, absent ones included."""
    assert actual.keys() == expected.keys(), f"{what}: {sorted(actual)} against {sorted(expected)}"
    for name, value in expected.items():
        ours = actual[name]
        assert (ours is None) == (value is None), f"{what} of {name}: {ours} against {value}"
        if ours is not None:
            assert_close(ours, value, f"{what} of {name}", rtol=rtol, atol=atol)


def compare(ours: Run, reference: Run, *, rtol: float, atol: float, params: bool = True) -> None:
    """Compare the losses, the first step's gradients, the extras and (if asked) the final parameters."""
    title = f"{ours.system.name} against {reference.system.name}"
    assert_same_tensors(ours.grads, reference.grads, f"{title}: gradient", rtol=rtol, atol=atol)
    for step, (loss, expected) in enumerate(zip(ours.losses, reference.losses, strict=True)):
        assert_close(loss, expected, f"{title}: loss of step {step}", rtol=rtol, atol=atol)
    assert_close(ours.extra, reference.extra, f"{title}: extra", rtol=rtol, atol=atol)
    if params:
        assert_same_tensors(ours.params, reference.params, f"{title}: final parameter", rtol=rtol, atol=atol)


def check_against_unsharded(
    scenario: Scenario, *, lower: str = "eager", system: System | None = None, fresh: bool = True
) -> None:
    """Hold ours, in float64, to unsharded training on the global batch, on the same device."""
    system = system or fxshard_system(dtype=torch.float64, lower=lower)
    ours = train(scenario, system, fresh=fresh)
    compare(ours, train(scenario, replace(UNSHARDED, device=system.device), fresh=False), rtol=1e-9, atol=1e-11)


def check_bitwise(scenario: Scenario) -> Run:
    """Hold ours, in float32 and lowered to the interpreter, to bitwise equality with FSDP2; return our run."""
    ours = train(scenario, fxshard_system())
    compare(ours, train(scenario, FSDP2), rtol=0.0, atol=0.0)
    return ours


def check_sums_in_few_bits(scenario: Scenario) -> None:
    """Hold ours, in float32, to FSDP2 where gradients of fewer bits are added up: to the bit up to torch 2.13.

    FSDP2 of torch 2.15 lets autograd add in the dtype of the reduction (`FSDPParam.unsharded_grad_dtype`): it rounds
    before it adds where that has fewer bits, and after where it has more. There a few roundings of bfloat16 are
    allowed, of gradients and losses; an optimizer may make more of them.
    """
    ours, reference = train(scenario, fxshard_system()), train(scenario, FSDP2)
    if REDUCES_IN_STORAGE_DTYPE:
        compare(ours, reference, rtol=2**-6, atol=2**-8, params=False)
    else:
        compare(ours, reference, rtol=0.0, atol=0.0)


def check(scenario: Scenario, *, rtol: float = 0.0, atol: float = 0.0, fresh: bool = True) -> Run:
    """Hold ours, in float64 and lowered to the interpreter, to both references; return our run.

    `rtol` and `atol` are for FSDP2, `fresh` is that of `train`.
    """
    ours = train(scenario, fxshard_system(dtype=torch.float64), fresh=fresh)
    compare(ours, train(scenario, replace(FSDP2, dtype=torch.float64), fresh=False), rtol=rtol, atol=atol)
    compare(ours, train(scenario, UNSHARDED, fresh=False), rtol=1e-9, atol=1e-11)
    return ours


def check_each(scenarios: Mapping[str, Scenario]) -> dict[str, Run]:
    """Hold scenarios to both references that differ in what the loop does: the graphs of the first serve all."""
    torch._dynamo.reset()
    runs = {}
    for name, scenario in scenarios.items():
        try:
            runs[name] = check(scenario, fresh=False)
        except Exception as error:
            error.add_note(f"in {name!r}")
            raise
    return runs


def check_close(scenario: Scenario) -> None:
    """Hold ours, in float64, to both references where FSDP2 adds up the parts of a gradient in another order."""
    check(scenario, rtol=1e-9, atol=1e-11)


def check_inductor(scenario: Scenario, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Hold our compiled code to FSDP2: losses and first-step gradients."""
    ours = train(scenario, fxshard_system(lower="inductor"))
    compare(ours, train(scenario, FSDP2), rtol=rtol, atol=atol, params=False)


Prepare = Callable[[nn.Module, Tools], nn.Module]


def compile_each_block(model: nn.Module, tools: Tools) -> nn.Module:
    shard_blocks(model, tools)
    for block in blocks_of(model):
        tools.compile_in_place(block)
    return model


def shard_blocks_as_one_unit(model: nn.Module, tools: Tools) -> nn.Module:
    tools.shard(list(blocks_of(model)))
    tools.shard(model)
    return tools.compile(model)


def adopted(model: nn.Module, tools: Tools) -> nn.Module:
    """Take over what FSDP2 has sharded, give it back, and take it over again."""
    fully_shard = FSDP2.fully_shard if tools.system.fully_shard is not None else None
    model = only_shard(model, replace(tools, system=replace(tools.system, fully_shard=fully_shard, backend=None)))
    if tools.system.ours:
        model = fxshard.adopt(fxshard.release(fxshard.adopt(model)))
    return tools.compile(model)


def shard_root(model: nn.Module, tools: Tools) -> nn.Module:
    tools.shard(model)
    return tools.compile(model)


def shard_nested(model: nn.Module, tools: Tools) -> nn.Module:
    for block in blocks_of(model):
        tools.shard(block.get_submodule("mlp"))
        tools.shard(block)
    tools.shard(model)
    return tools.compile(model)


def with_a_break(model: nn.Module, tools: Tools) -> nn.Module:
    for block in list(blocks_of(model))[1:2]:
        block.register_forward_pre_hook(lambda module, args: torch._dynamo.graph_break())
    return shard_and_compile(model, tools)
