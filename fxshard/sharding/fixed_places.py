"""Sharded parameters stay where they are: what would take them away, or give them other names, is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import nn

from fxshard.errors import ConfigError
from fxshard.runtime.flat_shard import Home, Member, home_of
from fxshard.runtime.parameters import REFS

PARAMETRIZED = "_fxshard_parametrized"
"""Key in a module's `__dict__`: name that torch's parametrizations compute -> the members of which they do."""


def member_at(module: nn.Module, name: str) -> Member | None:
    """Return the sharded parameter that `module` has under a name, if it has one."""
    if (ref := module.__dict__.get(REFS, {}).get(name)) is None:
        return None
    members = cast(Home, home_of(ref.flat)).unit.members
    return next(m for m in members if any(owner is module and own == name for owner, own in m.owners))


def refuse_to_delete(module: nn.Module, name: str) -> None:
    """Raise a ConfigError if what is about to be deleted is sharded."""
    _refuse([member] if (member := member_at(module, name)) else [])


def refuse_to_displace(module: nn.Module, name: str) -> None:
    """Raise a ConfigError if registering a name means that a sharded parameter moves, or is gone already.

    `prune` and `spectral_norm` register `weight_orig` for `weight`, `weight_norm` what it has made of a deleted one,
    and `remove_parametrizations` what was parametrized.
    """
    refs = module.__dict__.get(REFS, {})
    names = [each for each in refs if name not in refs and (name == f"{each}_orig" or each not in module._parameters)]
    found = [member for each in names if (member := member_at(module, each))]
    _refuse([*found, *module.__dict__.get(PARAMETRIZED, {}).get(name, ())])


def _refuse(members: Sequence[Member]) -> None:
    if members:
        raise ConfigError(
            "sharded parameters cannot be taken away or get other names: "
            f"{', '.join(member.fqn for member in members)}. Apply and remove pruning, parametrizations, weight_norm "
            "and spectral_norm, and delete parameters, before fully_shard, or before the first call of the compiled "
            "model."
        )
