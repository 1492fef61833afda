"""Groups of some of the ranks that share a unit: what is launched on both is compared in its order."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fxshard.errors import RankMismatchError
from fxshard.ir.launches import Launch
from fxshard.runtime.rank_check import Agreement
from tests.state import processes


def is_refused(run: list[Launch]) -> bool:
    try:
        with Agreement("forward").before(run):
            return False
    except RankMismatchError:
        return True


def ranks_that_are_refused() -> dict[str, bool]:
    """Rank 0 launches in another order than the others; each rank says whether it is told so."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "ep"))
    world, rank = dist.group.WORLD, dist.get_rank()
    assert world is not None

    def launch(group: dist.ProcessGroup, size: int, unit: str) -> Launch:
        text = f"all_gather f32[{size}] on group {group.group_name!r} for {unit}"
        return Launch(group.group_name, text, f"%unshard_{unit}", "all_gather", unit)

    ep = mesh["ep"].get_group().group_name
    experts = launch(mesh["fsdp"].get_group(), 4 + rank % 2, "experts")  # an uneven number of them
    block = launch(world, 8, "block")
    own = Launch(ep, f"all_to_all [?] on group {ep!r}", "%exchange", "all_to_all", "")

    def refused(of_rank_0: list[Launch], of_others: list[Launch]) -> bool:
        return is_refused(of_others if rank else of_rank_0)

    return {
        "the same": refused([experts, block, own], [experts, block, own]),
        "experts and block": refused([block, experts, own], [experts, block, own]),
        "block and own": refused([experts, own, block], [experts, block, own]),
        "experts and own": refused([block, own, experts], [block, experts, own]),
        "another order for other experts": is_refused([block, experts] if rank % 2 else [experts, block]),
    }


@pytest.mark.multi_rank
def test_ranks_hear_of_another_order_across_groups_and_experts_may_be_uneven() -> None:
    refused = processes.run(4, ranks_that_are_refused)
    assert {what: [rank for rank in range(4) if refused[rank][what]] for what in refused[0]} == {
        "the same": [],
        "experts and block": [0, 2],  # those that share the experts
        "block and own": [0, 1, 2],  # and those of one axis of expert parallelism
        "experts and own": [0, 2],
        "another order for other experts": [],
    }
