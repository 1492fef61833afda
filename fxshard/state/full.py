"""The full state of models and optimizers, as the unsharded ones would have it; the public functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from fxshard.state import full_optimizer_state, load_optimizer_state, model_state


def full_optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    *,
    recipient_rank: int | None = 0,
    cpu_offload: bool = True,
    keys: Literal["id", "fqn"] = "id",
    bucket_mib: float = 64,
) -> dict[str, Any]:
    """The state that the optimizer of the unsharded model would have, gathered from the ranks.

    What `optim.state_dict()` gives, with full tensors, new ones: no sharding shows. All ranks that share the model must
    call it; if they hold different state, all of them raise. Of modules on a smaller mesh than the model's, such as
    experts, it has what the mesh of the recipient holds.

    Args:
        model: sharded; compiled or plain. Not yet sharded, in the one-line form, will do too.
        optim: of parameters of `model`, any class; with several groups, parameters without state, other keys beside
            `state` and `param_groups`, which stay. Plain tensors in the state of sharded parameters are rows if all of
            one name have the shape of their parameter's local rows; else they are whole, and the same on all ranks.
        recipient_rank: who gets it, counted among the ranks that share the model; `None` for all of them.
        cpu_offload: whether the result is on the CPU; else it is where its tensors are.
        keys: "id" for torch's numbering of the parameters, "fqn" for their names in the model.
        bucket_mib: small tensors travel together in buckets of this size, large ones to other devices in pieces. Of
            device memory beside the result this takes two buckets on a rank that receives, and one elsewhere; and the
            rows of two tensors that are not contiguous, or all of one that is sharded otherwise than by rows.

    Returns:
        The state where it is wanted, `{}` elsewhere.

    Raises:
        ConfigError: an argument means nothing, or the ranks differ (what differs is named, on every rank).
    """
    return full_optimizer_state.gather_optimizer(
        model,
        optim,
        recipient_rank=recipient_rank,
        cpu_offload=cpu_offload,
        keys=keys,
        bucket_mib=bucket_mib,
    )


def load_full_optim_state_dict(
    model: nn.Module, optim: Optimizer, state: Mapping[str, Any], *, bucket_mib: float = 64
) -> None:
    """Load the state of an unsharded optimizer: every rank takes its rows of it, unchanged to the bit.

    It may come from `full_optim_state_dict` under any number of ranks and any units, or from `state_dict()` of an
    optimizer that was never sharded. All ranks that share the model must call it. Nothing is written before
    everything has been checked; the old state lives until the new one is there.

    Args:
        model: as for `full_optim_state_dict`.
        optim: with the same param groups; its own state is replaced.
        state: the full state, by id or FQN, on one rank (the others pass `{}`) or the same on every rank: all that
            ranks share of it is compared.
        bucket_mib: as for `full_optim_state_dict`.

    Raises:
        ConfigError: groups, keys, shapes or dtypes do not fit (what does not is named, on every rank).
    """
    load_optimizer_state.load_optimizer(model, optim, state, bucket_mib=bucket_mib)


def full_state_dict(
    model: nn.Module, *, recipient_rank: int | None = 0, cpu_offload: bool = True, bucket_mib: float = 64
) -> dict[str, Any]:
    """The `state_dict` of the unsharded model, gathered from the ranks: its keys, order, full parameters and buffers.

    Args:
        model: as for `full_optim_state_dict`; so are the others.
        recipient_rank: who gets it; `None` for all.
        cpu_offload: whether the result is on the CPU.
        bucket_mib: size of a bucket.

    Returns:
        The state where it is wanted, `{}` elsewhere. Buffers are those of the rank that gets it.

    Raises:
        ConfigError: as for `full_optim_state_dict`, or parameters are on the meta device.
    """
    return model_state.gather_model(
        model,
        recipient_rank=recipient_rank,
        cpu_offload=cpu_offload,
        bucket_mib=bucket_mib,
    )


def load_full_state_dict(model: nn.Module, state: Mapping[str, Any], *, bucket_mib: float = 64) -> None:
    """Load the `state_dict` of the unsharded model: every rank takes its rows, in place.

    Args:
        model: as for `full_optim_state_dict`.
        state: the full state, on one rank (the others pass `{}`) or on every rank: then the values of sharded
            parameters must be the same, and of buffers and extra state each rank takes its own.
        bucket_mib: as for `full_optim_state_dict`.

    Raises:
        ConfigError: keys, shapes or dtypes do not fit (what does not is named, on every rank); nothing was written.
    """
    model_state.load_model(model, state, bucket_mib=bucket_mib)
