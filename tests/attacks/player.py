"""The actions of a script, on a sharded model and, in step with it, on an unsharded one; the two must stay equal.

Among real ranks the unsharded model sees the batches of all of them, so that each rank has the whole reference for
itself. Among emulated ones (`fxshard.testing.emulated_link`), where all peers hold what this process holds, a parameter
is this rank's rows over and over, and so is its gradient: the reference begins with such parameters, and a hook makes
such gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as torch_state
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

import fxshard
from fxshard.sharding.sharded_module import ShardedModule
from tests.attacks.grammar import Setup
from tests.attacks.models import WIDTH, Block, Net, write_in_place
from tests.numerics.harness import full

RANKS = 2
LR = 0.05


class Player:
    """Two systems in step: ours, and the unsharded reference."""

    def __init__(self, setup: Setup, *, emulated: bool) -> None:
        self.setup, self.number, self.rank, self.emulated = setup, 0, dist.get_rank(), emulated
        self.batches = [0] if emulated else range(RANKS)
        self.waits = self.breaks = False
        self.plain, self.models = self._build(), self._build()
        if emulated:
            for p in (p for model in self.plain for p in model.parameters()):
                p.register_hook(_own_rows)
        self.runs = [self._shard(model) for model in self.models]
        if setup.units == "one line":
            for run in self.runs:
                run(torch.ones(1, WIDTH, dtype=torch.float64))
        self.values = [[p.detach().clone() for p in model.parameters()] for model in self.models]
        self.begin()

    def begin(self) -> None:
        """Put back what a draw has changed."""
        for model in self.models:
            for module in model.modules():
                if isinstance(module, ShardedModule):
                    module.reset_iter_state()
                    module.set_reshard_after_backward(True)
        first = [[full(value) for value in values] for values in self.values]
        for models, values_of in ((self.models, self.values), (self.plain, first)):
            for model, values in zip(models, values_of, strict=True):
                model.fails = False
                for block in model.blocks:
                    cast(Block, block).write = None
                model.requires_grad_(True)
                with torch.no_grad():
                    for p, value in zip(model.parameters(), values, strict=True):
                        p.grad = None
                        p.copy_(value)
        self.waits = False
        self.optims = [[self._optimizer(model) for model in models] for models in (self.plain, self.models)]

    def _build(self) -> list[Net]:
        torch.manual_seed(1)
        models = [Net(self.setup).double() for _ in range(self.setup.models)]
        for p in (p for model in models for p in model.parameters() if self.setup.grad_dtype):
            p.grad_dtype = getattr(torch, self.setup.grad_dtype)
        if self.emulated:
            with torch.no_grad():
                for p in (p for model in models for p in model.parameters()):
                    p.copy_(_own_rows(p))
        return models

    def _shard(self, model: Net) -> nn.Module:
        setup = self.setup
        options: dict[str, Any] = {"lower": "eager", "regional": setup.compiled == "regional"} | setup.options
        if setup.units != "one line":
            for block in model.blocks if setup.units == "blocks" else ():
                fxshard.fully_shard(block, reshard_after_forward=setup.reshard)
                if setup.compiled == "blocks":
                    block.compile(backend="fxshard", options=options)
            fxshard.fully_shard(model, reshard_after_forward=setup.reshard)
        else:
            options["reshard_after_forward"] = setup.reshard
        return (
            cast(nn.Module, torch.compile(model, backend="fxshard", options=options))
            if setup.compiled in ("whole", "regional")
            else model
        )

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        name, form = self.setup.optimizer
        kind = getattr(torch.optim, name)
        return cast(
            torch.optim.Optimizer,
            kind(model.parameters(), lr=LR, foreach=form == "foreach", **({"fused": True} if form == "fused" else {})),
        )

    # ---- what is compared

    def same(self, ours: Tensor, theirs: Tensor, where: str) -> None:
        rtol, atol = (1e-4, 1e-6) if self.setup.grad_dtype else (1e-9, 1e-11)
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol, msg=lambda text: f"{where}: {text}")

    def compare(self) -> None:
        for i, (model, plain) in enumerate(zip(self.models, self.plain, strict=True)):
            for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
                where = f"model {i}, {name}"
                self.same(full(ours), theirs.detach(), where)
                if self.waits:
                    continue  # gradients without sync are not there yet
                if (ours.grad is None) != (theirs.grad is None):
                    raise AssertionError(
                        f"{where}: gradient {ours.grad is not None}, reference {theirs.grad is not None}"
                    )
                if ours.grad is not None and theirs.grad is not None:
                    self.same(full(ours.grad), theirs.grad, f"{where}: gradient")

    # ---- data and losses

    def batch(self, rows: tuple[int, int], rank: int) -> Tensor:
        seed = torch.Generator().manual_seed(100 * self.number + rank)
        return torch.randn(rows[rank], WIDTH, dtype=torch.float64, generator=seed)

    def loss(self, runs: list[Any], models: list[Net], x: Tensor, kind: str = "plain") -> Tensor:
        hidden = x
        for run in runs:
            hidden = run(hidden)
        loss = hidden.square().mean()
        if kind == "reads the head" and self._root_is_unsharded():
            loss = loss + (hidden @ models[-1].read_by_loss.weight.t()).square().mean()
        if kind == "two losses":
            for run in runs:
                x = run(x)
            loss = loss + x.abs().mean()
        return loss

    def _root_is_unsharded(self) -> bool:
        return self.setup.reshard is not True

    def both(self, rows: tuple[int, int], kind: str, backward: bool = True) -> tuple[Tensor, list[Tensor]]:
        """Ours of this rank's batch, and the reference of all."""
        ours = self.loss(self.runs, self.models, self.batch(rows, self.rank), kind)
        seen = [self.loss(self.plain, self.plain, self.batch(rows, rank), kind) for rank in self.batches]
        theirs = [loss / len(seen) for loss in seen]
        self.same(_mean(ours), torch.stack([loss.detach() for loss in theirs]).sum(), "loss")
        return ours, theirs

    def _trains(self) -> bool:
        return any(p.requires_grad for model in self.plain for p in model.parameters())

    # ---- actions

    def backward(self, rows: tuple[int, int], kind: str) -> None:
        if not self._trains():
            return
        ours, theirs = self.both(rows, kind)
        if kind == "penalty":  # on the DTensors: every rank adds the gradient of its own rows
            penalty = sum((p.square().sum() for p in self.models[0].parameters() if p.requires_grad), start=0)
            if isinstance(penalty, DTensor):
                penalty.backward()
                sum(p.square().sum() for p in self.plain[0].parameters() if p.requires_grad).backward()  # type: ignore[union-attr]
        ours.backward()
        for loss in theirs:
            loss.backward()
        self.waits = False

    def accumulate(self, rows: tuple[int, int]) -> None:
        if not self._trains():
            return
        with contextlib.ExitStack() as stack:
            for model in self.models:
                stack.enter_context(fxshard.no_sync(model))
            ours, theirs = self.both(rows, "plain")
            ours.backward()
        for loss in theirs:
            loss.backward()
        self.waits = True

    def step(self, which: int) -> None:
        which %= len(self.models)
        self.optims[1][which].step()
        self.optims[0][which].step()

    def zero_grad(self, to_none: bool) -> None:
        if self.waits:
            return
        for models in (self.models, self.plain):
            for model in models:
                model.zero_grad(set_to_none=to_none)

    def freeze(self, which: int, block: int, on: bool) -> None:
        if self.waits:
            return
        for models in (self.models, self.plain):
            part = models[which % len(models)].blocks[block]
            part.requires_grad_(not on)
            for parameter in part.parameters():
                parameter.grad = None

    def write(self, which: int, how: str) -> None:
        which %= len(self.models)
        self._write(self.models[which], how)
        self._write(self.plain[which], how)
        if how in ("data", "foreach", "load_state_dict"):
            for module in self.models[which].modules():
                if isinstance(module, ShardedModule):
                    module.reshard()

    def _write(self, model: Net, how: str) -> None:
        parameters: list[Tensor] = list(model.parameters())
        with torch.no_grad():
            if how == "copy_":
                parameters[0].copy_(parameters[0] * torch.full_like(parameters[0], 0.5))
            elif how == "to_local":
                for p in parameters:
                    (p.to_local() if isinstance(p, DTensor) else p).mul_(0.9)
            elif how == "data":
                for p in parameters:
                    p.data.mul_(0.9)
            elif how == "foreach":
                torch._foreach_mul_(parameters, 0.9)
            elif how == "load_state_dict":
                model.load_state_dict({k: v * 0.9 for k, v in model.state_dict().items()})
            elif how == "set_state_dict":
                state: dict[str, Any] = torch_state.get_model_state_dict(model)
                torch_state.set_model_state_dict(model, {k: v * 0.9 for k, v in state.items()})
            elif how == "full_state_dict":
                self._load_full(model)
            elif how == "attribute":
                model.head.weight.mul_(0.9)
            else:
                for p in parameters:
                    p.mul_(0.9)

    def _load_full(self, model: Net) -> None:
        if self.emulated or any(model is plain for plain in self.plain):
            model.load_state_dict({k: v * 0.9 for k, v in model.state_dict().items()})
            return
        fxshard.load_full_state_dict(model, {k: v * 0.9 for k, v in fxshard.full_state_dict(model).items()})

    def stale_backward(self, rows: tuple[int, int], how: str) -> None:
        """Backward after a write: refused, or of what was gathered before the write."""
        if not self._trains() or self.waits:
            return
        self.zero_grad(True)
        ours, theirs = self.both(rows, "plain")
        for loss in theirs:
            loss.backward()
        grads = [[p.grad for p in model.parameters()] for model in self.plain]
        for optims, models in zip(self.optims, (self.plain, self.models), strict=True):
            self._write_or_step(models, optims, how)
        ours.backward()
        for model, kept in zip(self.plain, grads, strict=True):
            for p, grad in zip(model.parameters(), kept, strict=True):
                p.grad = grad

    def _write_or_step(self, models: list[Net], optims: list[torch.optim.Optimizer], how: str) -> None:
        if not how.startswith("step"):
            self._write(models[0], how)
            return
        which = 0 if how == "step" else len(models) - 1
        for p in models[which].parameters():
            p.grad = torch.ones_like(p, dtype=p.grad_dtype) if p.requires_grad else None
        optims[which].step()
        for model in models:
            model.zero_grad()

    def write_in_forward(self, block: int, how: str, graph_break: bool) -> None:
        self.breaks |= graph_break
        if how == "data" and (self.breaks or self.setup.compiled == "no"):
            return  # what runs eagerly writes to .data unseen: docs/errors.md, "Not detected"

        def write(w: Tensor) -> None:
            if graph_break:
                torch._dynamo.graph_break()
            write_in_place(w, how)

        cast(Block, self.models[0].blocks[block]).write = write
        with torch.no_grad():
            self.runs[0](self.batch((2, 2), 0))
        raise AssertionError(f"a write in forward ({how}) was not refused")

    def evaluate(self, rows: tuple[int, int], mode: str) -> None:
        context: Any = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "grad": torch.enable_grad}[
            mode
        ]
        both = self.models, self.plain
        with context():
            x = self.batch(rows, self.rank)
            theirs = x
            ours = x
            for run, plain in zip(self.runs, self.plain, strict=True):
                ours, theirs = run(ours), plain(theirs)
            self.same(ours.detach(), theirs.detach(), f"evaluation with {mode}")
            if self._root_is_unsharded():
                heads = [x @ models[-1].read_by_loss.weight.t() for x, models in zip((ours, theirs), both, strict=True)]
                self.same(heads[0].detach(), heads[1].detach(), f"a head read after an evaluation with {mode}")

    def functional_call(self, rows: tuple[int, int], kind: str) -> None:
        run, plain = self.runs[0], self.plain[0]
        x = self.batch(rows, self.rank)
        if kind == "computed":
            functional_call(run, {n: p * 0.5 for n, p in run.named_parameters()}, (x,))
            if self._trains():
                raise AssertionError("computed parameters were not refused")
            return
        ours = functional_call(run, {n: p.detach() * 0.5 for n, p in run.named_parameters()}, (x,))
        theirs = functional_call(plain, {n: p.detach() * 0.5 for n, p in plain.named_parameters()}, (x,))
        self.same(ours.detach(), theirs.detach(), "functional_call")

    def read(self, which: int, block: int) -> None:
        ours, theirs = (cast(Block, models[which % len(models)].blocks[block]) for models in (self.models, self.plain))
        self.same(full(ours.linear.weight), theirs.linear.weight.detach(), "a weight read outside of forward")

    def clip(self, which: int) -> None:
        if self.waits:
            return
        which %= len(self.models)
        norms = [nn.utils.clip_grad_norm_(models[which].parameters(), 0.5) for models in (self.models, self.plain)]
        self.same(full(norms[0]), norms[1], "norm of the gradients")

    def fail_in_forward(self, rows: tuple[int, int]) -> None:
        self.models[0].fails = True
        with contextlib.suppress(ArithmeticError):
            self.runs[0](self.batch(rows, self.rank))
            raise AssertionError("the user's error was lost")
        self.models[0].fails = False

    def fail_in_backward(self, rows: tuple[int, int], waits: bool) -> None:
        """Fail between the backwards of two forwards; the script drops what there is, and goes on."""
        if not self._trains():
            return
        with contextlib.ExitStack() as stack:
            for model in self.models if waits else ():
                stack.enter_context(fxshard.no_sync(model))
            outputs = []
            for _ in range(2):
                x = self.batch(rows, self.rank)
                for run in self.runs:
                    x = run(x)
                outputs.append(x)
            outputs[0].register_hook(_fail)
            with contextlib.suppress(ArithmeticError):
                (outputs[0].sum() + outputs[1].sum()).backward()
                raise AssertionError("the user's error was lost")
        for model in (*self.models, *self.plain):
            model.zero_grad()
        self.waits = False

    def hook(self, which: int, block: int) -> None:
        """Halve a gradient by a hook of its parameter."""
        which %= len(self.models)
        blocks = [cast(Block, models[which].blocks[block]) for models in (self.models, self.plain)]
        weights = [each.linear.get_parameter("weight") for each in blocks]
        if self.waits or not weights[0].requires_grad:
            return  # what waits has been added up before the hook on one side alone
        handles = [weight.register_hook(lambda grad: grad * 0.5) for weight in weights]
        try:
            self.backward((2, 2), "plain")
        finally:
            for handle in handles:
                handle.remove()

    def swap_weights(self, which: int) -> None:
        """Evaluate with other weights, and put the old ones back, as averages of weights do."""
        which %= len(self.models)
        old = [p.detach().clone() for p in self.models[which].parameters()]
        for models in (self.models, self.plain):
            _scale(models[which], 0.5)
        self.evaluate((2, 1), "no_grad")
        with torch.no_grad():
            for p, saved in zip(self.models[which].parameters(), old, strict=True):
                p.copy_(saved)
        _scale(self.plain[which], 2.0)

    def keep_unsharded(self, on: bool) -> None:
        for model in self._sharded_models():
            model.set_reshard_after_backward(not on)

    def set_reshard(self, on: bool) -> None:
        for model in self._sharded_models():
            for block in model.modules():
                if isinstance(block, Block) and isinstance(block, ShardedModule):
                    block.set_reshard_after_forward(on)

    def _sharded_models(self) -> Iterator[ShardedModule]:
        yield from (model for model in self.models if isinstance(model, ShardedModule))

    def input_gradient(self, rows: tuple[int, int]) -> None:
        """A soft prompt: everything may be frozen, the input is not."""
        x = self.batch(rows, self.rank).requires_grad_()
        y = x.detach().clone().requires_grad_()
        frozen = [(p, p.requires_grad) for models in (self.models, self.plain) for m in models for p in m.parameters()]
        if self.waits:
            return
        for p, _ in frozen:
            p.requires_grad_(False)
        self.loss(self.runs, self.models, x).backward()
        self.loss(self.plain, self.plain, y).backward()
        self.same(cast(Tensor, x.grad), cast(Tensor, y.grad), "gradient of an input")
        for p, trains in frozen:
            p.requires_grad_(trains)

    def save_and_load(self, which: int) -> None:
        if self.emulated:
            return  # the state travels by other ways than the emulated ones
        which %= len(self.models)
        model, optim = self.models[which], self.optims[1][which]
        weights = fxshard.full_state_dict(model)
        state = fxshard.full_optim_state_dict(model, optim)
        fxshard.load_full_state_dict(model, weights)
        fxshard.load_full_optim_state_dict(model, optim, state)


def _fail(grad: Tensor) -> None:
    raise ArithmeticError("the user's own")


def _own_rows(value: Tensor) -> Tensor:
    """What emulated ranks make of a gathered or reduced tensor: the rows of the first one, for each."""
    return value[: len(value) // RANKS].repeat(RANKS, *[1] * (value.dim() - 1))


def _scale(model: nn.Module, factor: float) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(factor)


def _mean(loss: Tensor) -> Tensor:
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean / RANKS
