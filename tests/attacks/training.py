"""Trains what a case describes, by fxshard and by a reference, and compares them in every step.

The reference is the unsharded model, or with a policy of mixed precision torch's FSDP2, for only that says what is
rounded when. Among real ranks the unsharded model sees the batches of all. Among emulated ones, where all peers hold
what this process holds, its parameters begin as this rank's rows over and over, and a hook makes such gradients.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.tensor import DTensor

import fxshard
from fxshard.errors import ConfigError
from fxshard.testing import emulated_link
from fxshard.torch_private import REDUCES_IN_STORAGE_DTYPE
from tests.attacks.drawn_model import DrawnModel, DrawnPart, batch, build, split
from tests.attacks.model_grammar import Case

LR = 0.25
BF16, FP16 = torch.bfloat16, torch.float16
POLICIES: Mapping[str, MixedPrecisionPolicy] = {
    "": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=BF16),
    "sums in fp32": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32),
    "sums in bf16": MixedPrecisionPolicy(reduce_dtype=BF16),
    "fp16": MixedPrecisionPolicy(param_dtype=FP16, reduce_dtype=FP16),
}


class Sharded:
    """A case under fxshard, or under FSDP2."""

    def __init__(self, case: Case, model: DrawnModel, mesh: DeviceMesh, *, ours: bool) -> None:
        self.case, self.model, self.ours = case, model, ours
        self.units: list[Any] = []
        self._fully_shard: Callable[..., Any] = fxshard.fully_shard if ours else fsdp2_fully_shard
        self._kwargs: dict[str, Any] = {"mesh": mesh, "mp_policy": POLICIES[case.policy]}
        self._shard_all()
        self._set_lists()
        self.run: nn.Module = self._compiled() if ours else model

    def _shard(self, what: nn.Module | list[nn.Module], **kwargs: Any) -> None:
        self._fully_shard(what, **self._kwargs, **kwargs)
        self.units.append(what[0] if isinstance(what, list) else what)

    def _shard_all(self) -> None:
        case, model = self.case, self.model
        for i, (part, module) in enumerate(zip(case.parts, model.parts, strict=True)):
            assert isinstance(module, DrawnPart)
            reshard = {"reshard_after_forward": part.reshard}
            if part.unit in ("nested", "first layer"):
                self._shard(module.layers[0], **reshard)
            if part.unit in ("own", "nested"):
                self._shard(module, **reshard)
            if part.unit == "with the next":
                self._shard([module, model.parts[i + 1]], **reshard)
        if case.unit_of_ends == "one":
            self._shard([model.embedding, model.head])
        if case.unit_of_ends == "two":
            self._shard(model.embedding)
            self._shard(model.head)
        self._shard(model, **({"ignored_params": {model.offset}} if case.ignored else {}))

    def _set_lists(self) -> None:
        ignored = self.model.offset if self.case.ignored else None
        units = [u for u in self.units if any(p is not ignored for p in _own_parameters(u, self.units))]
        for direction, order in (("forward", units), ("backward", units[::-1])):
            for i, unit in enumerate(order):
                how = getattr(self.case, f"{direction}_prefetch")
                listed = {"next": order[i + 1 : i + 2], "next two": order[i + 1 : i + 3], "last": order[-1:]}.get(how)
                if how and (listed or how == "none") and self.ours:
                    getattr(unit, f"set_modules_to_{direction}_prefetch")(listed)

    def _compiled(self) -> nn.Module:
        options: dict[str, Any] = {"lower": "eager", **self.case.options}
        if self.case.compiled == "parts":
            for part in self.model.parts:
                part.compile(backend="fxshard", options=options)
        if self.case.compiled != "whole":
            return self.model
        return cast(nn.Module, torch.compile(self.model, backend="fxshard", options=options))

    @contextlib.contextmanager
    def microbatch(self, how: str) -> Iterator[None]:
        """Set what a backward does with gradients."""
        model = cast(Any, self.model)
        model.set_requires_gradient_sync(how not in ("no sync", "in no_sync"))
        model.set_requires_all_reduce(how != "no all_reduce" and how not in ("no sync", "in no_sync"))
        if how == "root does not sync":
            model.set_requires_gradient_sync(False, recurse=False)
        if how == "first does not sync":
            self.units[0].set_requires_gradient_sync(False)
        with fxshard.no_sync(model) if how == "in no_sync" and self.ours else contextlib.nullcontext():
            yield


class Unsharded:
    """The reference without shards."""

    def __init__(self, case: Case, model: DrawnModel, mesh: DeviceMesh, *, emulated: bool) -> None:
        self.model = self.run = model
        shards = mesh.size(mesh.ndim - 1)
        for parameter in model.parameters() if emulated else ():
            if not (case.ignored and parameter is model.offset):
                trains = parameter.requires_grad
                parameter.requires_grad_(True).register_hook(lambda grad: own_rows(grad, shards))
                parameter.requires_grad_(trains)

    def microbatch(self, how: str) -> contextlib.AbstractContextManager[None]:
        """All gradients add up."""
        return contextlib.nullcontext()


System = Sharded | Unsharded


def _own_parameters(unit: nn.Module, units: list[Any]) -> Iterator[nn.Parameter]:
    for child in unit.children():
        if all(child is not other for other in units):
            yield from _own_parameters(child, units)
    yield from (p for p in unit._parameters.values() if p is not None)


def own_rows(value: Tensor, shards: int) -> Tensor:
    """Return what emulated ranks make of a gathered or reduced tensor: the rows of the first one, for each."""
    if value.dim() == 0 or len(value) == 0:
        return value
    rows = -(-len(value) // shards)
    return value[:rows].repeat(shards, *[1] * (value.dim() - 1))[: len(value)]


def full(value: Tensor) -> Tensor:
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


def train_emulated(case: Case) -> None:
    """Train both in this process, and compare."""
    with emulated_link(math.prod(case.mesh)):
        train(case, emulated=True)


def train_all(cases: list[Case]) -> None:
    """Train several, one after the other, on real ranks."""
    for case in cases:
        try:
            train(case, emulated=False)
        except Exception as error:
            error.add_note(f"in {case!r}")
            raise


def train(case: Case, *, emulated: bool) -> None:
    """Train both, and compare."""
    torch._dynamo.reset()
    names = ("replicate", "shard")[-len(case.mesh) :]
    axes, sizes = (names, case.mesh) if case.split == 1 else ((*names, "split"), (*case.mesh, case.split))
    whole = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
    mesh = whole[names] if axes != names else whole
    dtype = torch.float32 if emulated or case.policy else torch.float64
    shards = case.mesh[-1]
    models = [build(case, dtype) for _ in range(2)]
    for model in models[: 2 if case.policy else 1] if case.split > 1 else ():
        split(model, whole["split"])
    for parameter in (p for model in models for p in model.parameters() if emulated):
        with torch.no_grad():
            parameter.copy_(own_rows(parameter, shards))
    if case.ties_units:
        with pytest.raises(ConfigError, match="are one parameter"):
            Sharded(case, models[0], mesh, ours=True)
        return
    ours = Sharded(case, models[0], mesh, ours=True)
    theirs: System = (
        Sharded(case, models[1], mesh, ours=False)
        if case.policy
        else Unsharded(case, models[1], mesh, emulated=emulated)
    )
    with torch._dynamo.config.patch(recompile_limit=100):
        _train_both(case, ours, theirs, dtype, emulated)


def _train_both(case: Case, ours: Sharded, theirs: System, dtype: torch.dtype, emulated: bool) -> None:
    systems = (ours, theirs)
    optims = [torch.optim.SGD(system.model.parameters(), lr=LR, foreach=False) for system in systems]
    number = 0
    for step, microbatches in enumerate(case.steps):
        for system in systems if case.thaws and step == len(case.steps) - 1 else ():
            system.model.requires_grad_(True)
        for system in systems:
            system.model.skips = step == 1
        for how in microbatches:
            number += 1
            evaluates = case.evaluates and step == 1
            losses = [_backward(case, system, number, dtype, emulated, evaluates, how) for system in systems]
            _same(losses[0], losses[1], f"loss of microbatch {number}", case)
        compares = step == 0 or not _adds_few_bits(case)  # later gradients are those of parameters that have parted
        if compares:
            _compare(case, systems, f"step {step}, gradient", lambda p: p.grad)
        for system, optim in zip(systems, optims, strict=True):
            # The norm of what emulated ranks have of uneven parameters is that of nothing that is whole.
            if case.clips and not emulated and any(p.grad is not None for p in system.model.parameters()):
                nn.utils.clip_grad_norm_(system.model.parameters(), 0.1)
            optim.step()
            optim.zero_grad()
        if compares:
            _compare(case, systems, f"step {step}", lambda p: p)


def _backward(
    case: Case, system: System, number: int, dtype: torch.dtype, emulated: bool, evaluates: bool, how: str
) -> Tensor:
    """Run forward and backward of one microbatch; return its loss, the mean over the ranks."""
    whole = isinstance(system, Unsharded) and not emulated
    ranks = range(math.prod(case.mesh)) if whole else [0 if emulated else dist.get_rank() // case.split]
    x = torch.cat([batch(case, number, rank, dtype) for rank in ranks])
    with system.microbatch(how):
        loss: Tensor = system.run(x).to(dtype).square().mean()
        if evaluates:
            with torch.no_grad():
                system.run(x)
        if loss.requires_grad:
            loss.backward()
    found = loss.detach().clone()
    if not emulated and not whole:
        dist.all_reduce(found)
        found /= dist.get_world_size()
    return found


def _compare(
    case: Case, systems: tuple[System, System], what: str, value: Callable[[nn.Parameter], Tensor | None]
) -> None:
    ours, theirs = ({name: value(p) for name, p in system.model.named_parameters()} for system in systems)
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        found = ours[name]
        assert (found is None) == (expected is None), f"{what} of {name}: {found} against {expected}"
        if found is not None and expected is not None:
            _same(full(found), full(expected), f"{what} of {name}", case)


def _adds_few_bits(case: Case) -> bool:
    """Whether sums in few bits are rounded at other places than the reference rounds them."""
    if case.policy:
        return case.rounds_otherwise or (REDUCES_IN_STORAGE_DTYPE and case.adds_up)
    return case.adds_in_another_order and any(part.bfloat16 for part in case.parts)


def _same(found: Tensor, expected: Tensor, what: str, case: Case) -> None:
    """Compare to the bit where both do the same arithmetic, else as close as a few roundings of the dtype allow."""
    rtol = atol = 0.0
    if not case.policy and found.dtype == torch.float64:  # a mean over ranks, against that of a larger batch
        rtol, atol = 1e-9, 1e-11
    elif _adds_few_bits(case):
        rtol, atol = 2**-6, 2**-8
    elif not case.policy and case.adds_in_another_order:
        rtol, atol = 1e-5, 1e-6
    torch.testing.assert_close(
        found, expected, rtol=rtol, atol=atol, equal_nan=True, msg=lambda text: f"{what}: {text}"
    )
