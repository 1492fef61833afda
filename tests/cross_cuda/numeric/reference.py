"""The same training without sharding, in eager mode on the CPU, and how far two trainings are from each other."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fxshard.tools.demo.text import VOCAB_SIZE
from tests.cross_cuda import layouts
from tests.cross_cuda.training import ADAMW, NUM_STEPS, SEQ_LEN, Case, loss_of

Values = dict[str, list[Tensor]]  # what training gives, by name: a tensor of each rank


class Errors(NamedTuple):
    """Errors of a value against float64, relative to its norm, the largest of all ranks."""

    ours: float
    cpu: float  # of unsharded training in the same dtypes


class Reference:
    """Unsharded training of a case's model on the tokens of all ranks.

    Attributes:
        tokens: int64 `[rank, step, microbatch, batch, seq]`.
        initial: parameters by name.
    """

    def __init__(self, case: Case) -> None:
        assert case.policy is not None
        self._case, self._dtype = case, case.policy.param_dtype or torch.float32
        generator = torch.Generator().manual_seed(0)
        shape = (case.world_size, NUM_STEPS, case.microbatches, case.batch, SEQ_LEN)
        self.tokens = torch.randint(0, VOCAB_SIZE, shape, generator=generator)
        if case.layout is layouts.tensor_parallel:  # its ranks compute one batch together
            self.tokens = self.tokens[:: layouts.TP].repeat_interleave(layouts.TP, 0)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self._model = case.model(SEQ_LEN, dim=case.dim, num_layers=case.num_layers, num_heads=4)
        self.initial = {name: it.detach() for name, it in self._model.named_parameters()}
        self.exact, self.cpu = self._trained(torch.float64), self._trained(None)

    def _trained(self, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """Train in `dtype`, or in the dtypes of the case's policy."""
        master = copy.deepcopy(self._model).to(dtype or torch.float32)
        optimizer = torch.optim.AdamW(master.parameters(), **ADAMW)
        values = {}
        for number in range(NUM_STEPS):
            total = {name: torch.zeros_like(it) for name, it in master.named_parameters()}
            for rank in range(self._case.world_size):
                model = copy.deepcopy(master)
                if self._case.layout is layouts.encoded:
                    _encode(model)
                model = model.to(dtype or self._dtype)
                summed = {name: torch.zeros_like(it) for name, it in total.items()}  # as FSDP2 adds up microbatches
                for i, tokens in enumerate(self.tokens[rank, number]):
                    loss = loss_of(model(tokens))
                    loss.backward()
                    values[f"step {number} loss {i} of rank {rank}"] = loss.detach()
                    for name, it in model.named_parameters():
                        if it.grad is not None:
                            summed[name] += it.grad
                    model.zero_grad()
                for name, mine in summed.items():
                    total[name] += mine
            for name, it in master.named_parameters():
                it.grad = values[f"step {number} gradient {name}"] = total[name] / self._num_averaged(name)
            optimizer.step()
        return values | {f"parameter {name}": it.detach() for name, it in master.named_parameters()}

    def _num_averaged(self, name: str) -> float:
        """By how much the sum of all ranks' gradients is divided."""
        if self._case.layout is layouts.hooked:
            return 2 * self._case.world_size  # the hook halves
        if ".experts." in name:
            return self._case.world_size / layouts.TP  # the ranks that have the same experts
        return self._case.world_size

    def errors(self, values: Values, owners: Mapping[str, Tensor]) -> dict[str, Errors]:
        """Compare values of all ranks with both trainings; `owners`: sharded parameters by name."""
        found = {}
        for name, parts in values.items():
            owner = owners.get(name.rpartition(" ")[2])
            pairs = []
            for rank, part in enumerate(parts):
                full = f"{name} of rank {rank}" if owner is None else name
                exact, cpu = (rows_of(wanted[full], owner, rank) for wanted in (self.exact, self.cpu))
                assert part.dtype == cpu.dtype, f"{name} is {part.dtype}, and on the CPU {cpu.dtype}"
                pairs.append((_error(part, exact), _error(cpu, exact)))
            found[name] = Errors(*map(max, zip(*pairs, strict=True)))
        return found


def _error(found: Tensor, wanted: Tensor) -> float:
    error = float((found.double() - wanted).norm() / wanted.norm().clamp(min=1e-20))
    return error if error == error else float("inf")


def _encode(model: nn.Module) -> None:
    """Round the weights of linear layers as `Float8Weight` does."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight = module.weight.data.float()
            scale = torch.finfo(torch.float8_e4m3fn).max / weight.abs().max()
            module.weight.data.copy_((weight * scale).to(torch.float8_e4m3fn).float() / scale)


def rows_of(whole: Tensor, owner: Tensor | None, rank: int) -> Tensor:
    """Return the part of a whole tensor that a rank has of a sharded parameter."""
    if not isinstance(owner, DTensor):
        return whole
    if whole.ndim and whole.shape[0] > owner.shape[0]:  # experts, which were spread before
        whole = whole.chunk(layouts.TP)[rank % layouts.TP]
    ranks = owner.device_mesh.mesh
    for axis in reversed(range(ranks.ndim)):  # the last one was cut first
        size, dim = ranks.shape[axis], getattr(owner.placements[axis], "dim", None)
        if dim is not None and size > 1:
            step = int(ranks.select(axis, 1).flatten()[0] - ranks.flatten()[0])
            parts, place = whole.chunk(size, dim), rank // step % size
            whole = parts[place] if place < len(parts) else whole.narrow(dim, 0, 0)
    return whole
