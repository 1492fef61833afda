"""A gloo process group that survives collectives that overlap.

[Note: gloo]
Two threads work on the collectives of a group of torch's gloo, and each writes down the name of the one it completed,
without a lock (`ProcessGroupGloo::runLoop`). "ALLGATHER_COALESCED", as functional all_gathers are called there, is too
long a name to be stored in place: two threads that write at the same time free the same memory twice, and the rank dies
then or later. torch 2.11, 2.13 and 2.15 do (`docs/adr/0013-gloo.md` has the lines that show it). Collectives that
overlap are what fxshard makes, so on gloo it launches them on a group of its own: the same ranks, but one thread. That
is also faster, since the threads fight over the same connections.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fxshard.errors import RankMismatchError

BACKEND = "fxshard_gloo"


def group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The group on which the collectives of a 1-D mesh are launched.

    It is the mesh's own, unless that is one of gloo; then the first call is collective. It lives as long as that one,
    and ends with `torch.distributed.destroy_process_group()`.

    Raises:
        RankMismatchError: other ranks of the mesh did not come to make the group, within its timeout.
    """
    group = mesh.get_group()
    if mesh.device_type != "cpu" or mesh.size() == 1 or not _is_gloo(group):
        return group
    own = _own().get(group, lambda: None)()
    if own is None:
        own = _with_one_thread(group)
        _own()[group] = weakref.ref(own)
    return own


def _with_one_thread(group: dist.ProcessGroup) -> dist.ProcessGroup:
    if BACKEND not in dist.Backend.backend_list:  # torch has no way to take a backend back
        dist.Backend.register_backend(BACKEND, _make, extended_api=True, devices=["cpu"])
    ranks = dist.get_process_group_ranks(group)
    given: Any = group._get_backend(torch.device("cpu"))
    timeout = given.options._timeout
    try:
        made: dist.ProcessGroup = dist.new_group(
            ranks,
            timeout=timeout,
            backend=BACKEND,
            use_local_synchronization=len(ranks) < dist.get_world_size(),  # else it is named by a number
        )
    except RuntimeError as error:
        raise RankMismatchError(
            f"rank {dist.get_rank()} could not reach all of ranks {ranks} to shard over them with gloo, in {timeout}. "
            "All of them must call fully_shard, or the compiled model, on the same meshes in the same order."
        ) from error
    return made


@functools.cache
def _own() -> weakref.WeakKeyDictionary[dist.ProcessGroup, Callable[[], dist.ProcessGroup | None]]:
    """The group of each group of gloo that lives; torch holds both until they are destroyed."""
    return weakref.WeakKeyDictionary()


def _is_gloo(group: dist.ProcessGroup) -> bool:
    is_real = isinstance(group, dist.ProcessGroup)  # `explain` has stand-ins
    return is_real and "cpu:gloo" in dist.get_backend_config(group).split(",")


def _make(given: Any, _: object) -> Any:
    """Called by torch, which passes no options to its own gloo."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices, options._threads = [gloo.create_default_device()], 1
    options._timeout = given.timeout
    options.global_ranks_in_group, options.group_name = given.global_ranks_in_group, given.group_id
    return gloo(given.store, given.group_rank, given.group_size, options)
