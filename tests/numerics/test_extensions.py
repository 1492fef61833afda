"""Tensor subclasses with hooks around the all_gather, on two ranks: what FSDP2 makes of the same ones, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import fxshard
from fxshard import ConfigError
from fxshard.runtime.parameters import local_of
from tests.models import FeedForward
from tests.numerics import harness
from tests.numerics.float8 import Float8Weight, Half, give_hooks
from tests.numerics.harness import (
    EAGER,
    FSDP2,
    Run,
    Scenario,
    check_bitwise,
    check_inductor,
    compare,
    compile_each_block,
    compile_module,
    fxshard_system,
    only_shard,
    shard_and_compile,
    train,
    world_mesh,
)
from tests.numerics.microbatches import kept, several
from tests.numerics.models import MLP, WIDTH, CheckpointedMLP, rows
from tests.numerics.scenarios import BF16
from tests.pairwise import each_once, slow
from tests.ranks import two_ranks
from tests.state.helpers import shared_folder


def block(hidden: int = 2 * WIDTH) -> FeedForward:
    return FeedForward(WIDTH, hidden, norm=True)


def mlp(hidden: int = 2 * WIDTH, *, checkpoints: bool = False, num_blocks: int = 2) -> MLP:
    """Its head has a bias: FSDP2 gives gloo bytes only where dtypes differ."""
    return (CheckpointedMLP if checkpoints else MLP)(num_blocks, block=partial(block, hidden))


def scenario(
    cls: type[Float8Weight] = Float8Weight,
    *,
    frozen: bool = False,
    hidden: int = 2 * WIDTH,
    checkpoints: bool = False,
    num_blocks: int = 2,
    **kwargs: Any,
) -> Scenario:
    """A model whose weights have hooks, in float32 whatever the system."""

    def model() -> nn.Module:
        made = give_hooks(mlp(hidden, checkpoints=checkpoints, num_blocks=num_blocks), cls)
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(not frozen or "up" not in name)
        return made

    return Scenario(model=model, batch=rows(), cast_model=False, **kwargs)


@two_ranks
@each_once(cls=[Half, Float8Weight], prepare=[only_shard, shard_and_compile])
def test_trains_as_fsdp2_with_the_same_subclass(cls: type[Float8Weight], prepare: Callable[..., nn.Module]) -> None:
    check_bitwise(scenario(cls, prepare=prepare))


@two_ranks
@pytest.mark.parametrize(
    "kwargs",
    [
        pytest.param({"shard_kwargs": {"mp_policy": BF16}, "num_blocks": 1}, id="mixed precision"),
        pytest.param({"frozen": True, "checkpoints": True}, id="frozen and checkpointed"),
        pytest.param({"hidden": 7, "num_blocks": 1}, id="uneven rows"),
        pytest.param({"prepare": compile_each_block}, id="block by block", marks=pytest.mark.slow),
        pytest.param({"backward": several}, id="microbatches", marks=pytest.mark.slow),
        pytest.param(
            {"shard_kwargs": {"reshard_after_forward": False}, "backward": kept}, id="kept", marks=pytest.mark.slow
        ),
    ],
)
def test_trains_as_fsdp2_in_other_settings(kwargs: dict[str, Any]) -> None:
    check_bitwise(scenario(**kwargs))


@pytest.mark.slow
@two_ranks
@pytest.mark.parametrize(
    "options", [slow({"bucket": 1.0}), {"prefetch": 2, "streams": "side"}, slow({"resident_gib": 1.0})]
)
def test_passes_move_bytes_as_they_move_others(options: dict[str, Any]) -> None:
    which = scenario(backward=several)
    compare(train(which, fxshard_system(**options)), train(which, FSDP2), rtol=0.0, atol=0.0)


@pytest.mark.slow
@two_ranks
def test_trains_in_code_of_inductor() -> None:
    check_inductor(scenario(num_blocks=1), rtol=1e-4, atol=1e-5)


def set_scales(run: Run, step: int) -> None:
    """Give each weight its scale before the step, as torchao does for all of them at once."""
    for parameter in run.named_parameters().values():
        local = getattr(parameter, "_local_tensor", None)
        if step and isinstance(local, Float8Weight):
            largest = local.rows.abs().max().detach()
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            local.scale = 224 / largest  # half of what the hook itself would take


@pytest.mark.slow
@two_ranks
def test_hooks_see_what_is_set_on_the_local_tensor() -> None:
    check_bitwise(scenario(before_step=set_scales))


def sharded(**kwargs: Any) -> nn.Module:
    return harness.sharded(give_hooks(mlp()), mesh=world_mesh(), **kwargs)


@two_ranks
def test_states_have_the_values_that_are_trained() -> None:
    torch.manual_seed(1)
    plain = mlp()
    torch.manual_seed(1)
    model = sharded()
    whole = fxshard.full_state_dict(model)
    for name, value in plain.state_dict().items():
        if dist.get_rank() == 0:
            assert type(whole[name]) is Tensor
            torch.testing.assert_close(whole[name], value, rtol=0, atol=0)
    fxshard.load_full_state_dict(model, {name: value + 1 for name, value in plain.state_dict().items()})
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), plain.state_dict()[name] + 1)  # type: ignore[attr-defined]


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    return optimizer


@two_ranks
def test_checkpoints_have_plain_rows() -> None:
    with shared_folder() as folder:
        model, other = sharded(), sharded()
        fxshard.save_checkpoint(folder / "1", model, stepped(model))
        fxshard.load_checkpoint(folder / "1", other, stepped(other))
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(local_of(one), local_of(two))


@two_ranks
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_state_that_is_assigned_keeps_the_hooks(device: str) -> None:
    model = sharded()
    with torch.device(device):
        plain = give_hooks(mlp())
    other = harness.sharded(plain, mesh=world_mesh())
    other.load_state_dict(model.state_dict(), assign=True)
    x = torch.ones(2, WIDTH)
    assert torch.equal(compile_module(other, EAGER)(x), model(x))
    assert isinstance(cast(Any, other.get_parameter("head.weight"))._local_tensor, Float8Weight)


@two_ranks
def test_a_write_that_torch_does_not_count_is_gathered() -> None:
    model = sharded()
    compiled, x = compile_module(model, EAGER), torch.ones(2, WIDTH)
    with torch.no_grad():
        before = compiled(x)
        for parameter in model.parameters():
            local_of(parameter).data.zero_()
        assert torch.equal(compiled(x), x @ torch.zeros(WIDTH, WIDTH))
        assert not torch.equal(before, compiled(x))


@pytest.mark.slow
@two_ranks
def test_a_model_on_meta_gets_its_values_later() -> None:
    with torch.device("meta"):
        model = give_hooks(mlp())
    harness.sharded(model, mesh=world_mesh())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            nn.init.ones_(parameter)
    y = compile_module(model, EAGER)(torch.ones(2, WIDTH))
    plain = mlp()
    with torch.no_grad():
        for parameter in plain.parameters():
            nn.init.ones_(parameter)
    assert torch.equal(y, plain(torch.ones(2, WIDTH)))  # ones are ones in fp8, too


# ---- refusals


class OneHook(Float8Weight):
    fsdp_post_all_gather = property()


class Curious(Float8Weight):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        return (self.rows.half() if self.rows.max() > 1 else self.rows,), None


class Unpadded(Float8Weight):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        return (self.rows.half(),), (torch.ones(()), "scaled")


class Fickle(Float8Weight):
    calls = 0

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        return (self.rows.to(torch.float8_e4m3fn),), (torch.ones(()), "scaled" if self.scale is None else "given")


def by_columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.dim() > 1 else None


def refused(match: str, cls: type[Float8Weight], hidden: int = 2 * WIDTH, **kwargs: Any) -> None:
    with pytest.raises(ConfigError, match=match):
        fxshard.fully_shard(give_hooks(block(hidden), cls), mesh=world_mesh(), **kwargs)


@two_ranks
def test_refuses_hooks_that_it_cannot_use() -> None:
    refused(r"up.weight is a OneHook .* belong together", OneHook)
    refused(r"up.weight is a Curious .* may not look at values", Curious)
    refused(r"up.weight is a Unpadded .* gives torch.float16\[3, 12\] of rows \[3, 12\].* must pad", Unpadded, hidden=7)
    refused(r"up.weight, down.weight.* offload_policy", Float8Weight, offload_policy=fxshard.CPUOffloadPolicy())
    refused(r"up.weight is a Float8Weight .* another dimension than 0", Float8Weight, shard_placement_fn=by_columns)


@two_ranks
def test_refuses_hooks_that_change() -> None:
    model = give_hooks(block(), Fickle)
    fxshard.fully_shard(model, mesh=world_mesh())
    model(torch.ones(2, WIDTH))
    cast(Any, model.get_parameter("down.weight"))._local_tensor.scale = torch.ones(())
    with pytest.raises(ConfigError, match=r"down.weight is a Fickle .* must stay the same"):
        model(torch.ones(2, WIDTH))


@two_ranks
def test_refuses_hooks_that_come_after_fully_shard() -> None:
    model = block()
    fxshard.fully_shard(model, mesh=world_mesh())
    local = local_of(model.up.weight)
    local.fsdp_pre_all_gather = partial(print)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"up.weight was a plain tensor at fully_shard"):
        model(torch.ones(2, WIDTH))


@two_ranks
def test_refuses_to_shard_in_the_first_call_to_release_and_to_compare() -> None:
    with pytest.raises(ConfigError, match=r"blocks.0.up.weight.*Call fully_shard before torch.compile"):
        compile_module(give_hooks(mlp()), EAGER)(torch.ones(2, WIDTH))
    with pytest.raises(ConfigError, match=r"release.*blocks.0.up.weight"):
        fxshard.release(sharded())


@two_ranks
@pytest.mark.parametrize("cls", [Float8Weight, Half])
def test_refuses_a_write_into_the_unsharded_parameter(cls: type[Float8Weight]) -> None:
    class Writing(FeedForward):
        def forward(self, x: Tensor) -> Tensor:
            self.up.weight.add_(1)
            return super().forward(x)

    model = give_hooks(Writing(WIDTH, WIDTH, norm=True), cls)
    fxshard.fully_shard(model, mesh=world_mesh())
    with pytest.raises(fxshard.UnsupportedGraph, match=r"changed in place during forward: up.weight"), torch.no_grad():
        compile_module(model, EAGER)(torch.ones(2, WIDTH))


@two_ranks
def test_sends_the_bytes_that_the_hook_gives() -> None:
    """Of the matrices a quarter of what float32 takes, and the rest as it is; in forward and in backward."""
    sent: list[tuple[torch.dtype, int]] = []

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "all_gather" in str(func):
                tensors = args[0] if isinstance(args[0], list) else [args[0]]
                sent.extend((tensor.dtype, tensor.nbytes) for tensor in tensors)
            return func(*args, **(kwargs or {}))

    model = give_hooks(block())
    fxshard.fully_shard(model, mesh=world_mesh(), reshard_after_forward=True)
    with Seen():  # type: ignore[no-untyped-call]
        model(torch.ones(2, WIDTH)).sum().backward()
    found = {dtype: sum(nbytes for each, nbytes in sent if each is dtype) for dtype, _ in sent}
    others = sum(local_of(p).nbytes for p in model.parameters() if p.dim() == 1)
    assert found == {torch.uint8: 2 * 2 * WIDTH * WIDTH // 2, torch.float32: others}
