"""Large parameters that code outside of graphs reads: each is gathered, waited for and reduced by itself."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import _get_work_registry_size
from torch.distributed.tensor import DTensor

from fxshard.errors import UnsupportedGraph
from fxshard.ir.collectives import ALONE_BYTES
from fxshard.sharding.sharded_module import ShardedModule
from fxshard.testing import EmulatedLink
from tests.runtime.blocks import Blocks, block_by_block, issued, sharded, step, warm

ROWS = ALONE_BYTES // 16


class Wide(Blocks):
    """Blocks between a large embedding and a large head of the root."""

    reads_head = True

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(ROWS, 4, bias=False), nn.Linear(4, ROWS)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x + self.embed.weight[:, :1].t()[:, :4].sum())
        return cast(Tensor, self.head(y)) if self.reads_head else y


class BiasFirst(Wide):
    """The same, where the parameter that is read first is not the one that was registered first."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.head.bias.mean())


def in_one_part(model: Blocks) -> Blocks:
    cast(ShardedModule, model).set_reduce_scatter_unused_params(True, recurse=False)
    return model


def test_the_head_arrives_while_blocks_run_and_its_reduction_runs_beside_their_backward(link: EmulatedLink) -> None:
    forward, backward = issued(warm(block_by_block(link, Wide)))
    assert forward == "agroot ag0 agroot wroot ag1 w0 c ag2 w1 c ag3 w2 c w3 c wroot c"
    assert backward == ("ag3 c rsroot ag2 w3 c rs3 wroot ag1 w2 c rs2 w3 ag0 w1 c rs1 w2 w0 c rs0 w1 rsroot w0 wroot")


def test_parts_are_launched_in_one_order_whichever_is_read_first(link: EmulatedLink) -> None:
    models = [warm(block_by_block(link, kind)) for kind in (Wide, BiasFirst)]
    first, other = (issued(model)[0].split() for model in models)
    assert [word for word in first if "ag" in word] == [word for word in other if "ag" in word]


@pytest.mark.parametrize("kind", [Wide, BiasFirst])
def test_gradients_are_those_of_one_part_to_the_bit(link: EmulatedLink, kind: Callable[[], Blocks]) -> None:
    model, whole = sharded(link, kind), in_one_part(sharded(link, kind))
    for sync in (True, False, False, True):  # steps of microbatches, of which the first is by itself
        for each in (model, whole):
            cast(ShardedModule, each).set_requires_gradient_sync(sync)
            torch.manual_seed(1)
            each(torch.randn(3, 4)).square().mean().backward()
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(cast(DTensor, ours.grad).to_local(), cast(DTensor, theirs.grad).to_local())


def test_what_waits_of_a_part_that_the_last_microbatch_does_not_reach_is_reduced_at_its_end(link: EmulatedLink) -> None:
    model, whole = sharded(link, Wide), in_one_part(sharded(link, Wide))
    for each in (model, whole):
        for sync in (False, True):
            cast(ShardedModule, each).set_requires_gradient_sync(sync)
            cast(Wide, each).reads_head = not sync
            torch.manual_seed(1)
            each(torch.randn(3, 4)).square().sum().backward()
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(cast(DTensor, ours.grad).to_local(), cast(DTensor, theirs.grad).to_local())


def test_what_is_not_read_or_follows_an_error_is_waited_for(link: EmulatedLink) -> None:
    model = cast(Wide, warm(sharded(link, Wide)))
    gc.collect()  # what other tests have left
    waiting = _get_work_registry_size()
    model.reads_head = False
    step(model)
    assert _get_work_registry_size() == waiting
    model.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(model)
    assert _get_work_registry_size() == waiting


def test_a_write_between_the_launch_and_the_read_of_a_part_is_found_in_backward(link: EmulatedLink) -> None:
    model = cast(Wide, warm(sharded(link, Wide)))

    def write(*_: Any) -> None:
        with torch.no_grad():
            model.get_parameter("head.bias").add_(1)

    model.blocks[3].register_forward_hook(write)
    with pytest.raises(UnsupportedGraph, match="unit 'root' were changed between forward and backward"):
        step(model)


def test_a_hook_sees_a_gradient_once_and_whole(link: EmulatedLink) -> None:
    model, whole = sharded(link, Wide), in_one_part(sharded(link, Wide))
    seen: list[Tensor] = []
    for each in (model, whole):
        each.get_parameter("embed.weight").register_hook(lambda grad: seen.append(grad.to_local().clone()))
        step(each)
    assert len(seen) == 2
    assert torch.equal(*seen)


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
def test_forwards_without_gradients_give_what_one_part_gives(link: EmulatedLink, grad: Callable[[], Any]) -> None:
    model, whole = sharded(link, Wide), in_one_part(sharded(link, Wide))
    with grad():
        for _ in range(3):
            assert torch.equal(model(torch.ones(3, 4)), whole(torch.ones(3, 4)))
