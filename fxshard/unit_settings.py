"""The settings of a unit: for each its name in FSDP2, its default, and whether graphs depend on it.

[Note: settings of a unit]
`adopt` and `release` carry all fields of `UnitSettings`, `explain` those of `IN_GRAPHS`. Our modules and FSDP2's have
methods of the same names to change a setting, so `apply` serves both. The fields without such a method are arguments of
`fully_shard`. The plan and the sharing key have the fields of `ReductionSettings`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy


def _named(name: str, *, at: str = "", word: str = "", in_graphs: bool = True) -> dict[str, Any]:
    """Describe a setting that a sharded module has a method for.

    Args:
        name: of the method, without `set_`.
        at: where FSDP2 keeps it, if that is not an attribute of this name; `Fsdp2Unit.settings` reads what is private.
        word: stands for it in the sharing key.
        in_graphs: whether graphs are compiled for it.
    """
    return {"setter": f"set_{name}", "fsdp2": at or name, "word": word, "in_graphs": in_graphs}


@dataclass(frozen=True, kw_only=True)
class ReductionSettings:
    """How a unit's gradients are reduced.

    Attributes:
        divide_factor: by which gradients are divided; `None`: by the number of ranks.
        sums_only: whether reductions may only add.
        reduces_unused: whether zeros are reduced for what a backward gives no gradient.
    """

    divide_factor: float | None = field(default=None, metadata=_named("gradient_divide_factor", word=" /{:.17g}"))
    sums_only: bool = field(default=False, metadata=_named("force_sum_reduction_for_comms", word=" sums"))
    reduces_unused: bool = field(default=False, metadata=_named("reduce_scatter_unused_params", word=" unused"))

    @property
    def reduction_words(self) -> str:
        """The settings that are not the default, as the sharing key has them."""
        found = ((each.metadata["word"], getattr(self, each.name)) for each in fields(ReductionSettings))
        return "".join(word.format(value) for word, value in found if value is not None and value is not False)


@dataclass(frozen=True, kw_only=True)
class UnitSettings(ReductionSettings):
    """Everything that the user may set for a unit; see [Note: settings of a unit].

    Attributes:
        mp_policy: as given.
        reshard_after_forward: as given; `None` means True for all but the root, a number that a subgroup of so many
            ranks shares the parameters until backward.
        offload: the policy of its shards, `None` if they are on the device; see [Note: offloaded shards].
        forward_prefetch: units to launch in forward right after this one has been waited for; none listed: as the
            option has it; `None`: nothing. While a setting goes from or to FSDP2, modules.
        backward_prefetch: the same in backward.
        all_gather_comm: object of the user's that gathers.
        reduce_scatter_comm: object of the user's that reduces.
        uses_reduce_group: whether reductions run on a process group of their own.
        sync: whether a backward that runs now reduces the gradients.
        averages: whether a backward that runs now averages over replicas. `sync` sets it, too.
        reshard_after_backward: whether the user wants the parameters freed after backward.
        all_reduce_hook: called with each reduced gradient of a flat, which it may change in place.
        ignored: parameters of the modules that stay unsharded on purpose; FSDP2 does not keep them.
        from_one_line: whether `torch.compile` made it, not the user.
    """

    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    reshard_after_forward: bool | int | None = None
    offload: CPUOffloadPolicy | None = None
    forward_prefetch: tuple[Any, ...] | None = field(default=(), metadata=_named("modules_to_forward_prefetch"))
    backward_prefetch: tuple[Any, ...] | None = field(default=(), metadata=_named("modules_to_backward_prefetch"))
    all_gather_comm: Any = field(default=None, metadata=_named("custom_all_gather"))
    reduce_scatter_comm: Any = field(default=None, metadata=_named("custom_reduce_scatter"))
    uses_reduce_group: bool = field(default=False, metadata=_named("separate_reduce_scatter_group"))
    sync: bool = field(default=True, metadata=_named("requires_gradient_sync", at="reduce_grads", in_graphs=False))
    averages: bool = field(default=True, metadata=_named("requires_all_reduce", at="all_reduce_grads", in_graphs=False))
    reshard_after_backward: bool = field(default=True, metadata=_named("reshard_after_backward", in_graphs=False))
    all_reduce_hook: Callable[[Any], None] | None = field(
        default=None, metadata=_named("all_reduce_hook", in_graphs=False)
    )
    ignored: frozenset[nn.Parameter] = frozenset()
    from_one_line: bool = False

    @property
    def subgroup_size(self) -> int:
        """Ranks that share the parameters between forward and backward, 0 if those are not fewer."""
        given = self.reshard_after_forward
        return 0 if given is None or isinstance(given, bool) else given

    def with_lists(self, convert: Callable[[tuple[Any, ...] | None], tuple[Any, ...] | None]) -> UnitSettings:
        """Return the same with other prefetch lists: of modules in place of units, say."""
        lists = convert(self.forward_prefetch), convert(self.backward_prefetch)
        return replace(self, forward_prefetch=lists[0], backward_prefetch=lists[1])

    @functools.cached_property
    def with_other_sync(self) -> UnitSettings:
        """The same but for `sync`. Made once, because `no_sync` switches there and back in every microbatch."""
        other = replace(self, sync=not self.sync)
        other.__dict__["with_other_sync"] = self
        return other

    def only(self, names: Iterable[str]) -> UnitSettings:
        """Return these settings, and the rest as by default."""
        return UnitSettings(**{name: getattr(self, name) for name in names})


IN_GRAPHS = frozenset(each.name for each in fields(UnitSettings) if each.metadata.get("in_graphs", True))
"""The settings that graphs are compiled for."""

ARGUMENTS = frozenset(each.name for each in fields(UnitSettings) if "setter" not in each.metadata)
"""The settings without a method: what `fully_shard` takes, and what it finds out."""


@dataclass(frozen=True, kw_only=True)
class BackwardSettings:
    """The settings of a model: whether a backward ends its step, or `finalize_backward` does."""

    is_last: bool = field(default=True, metadata=_named("is_last_backward"))
    ended_by_hand: bool = field(default=False, metadata=_named("manual_backward_finalization"))


def apply(settings: UnitSettings | BackwardSettings, module: Any) -> None:
    """Give a module, ours or FSDP2's, these settings, but for those that its torch does not have.

    In the order of the fields: `sync` sets `averages`, too, so that comes after it.
    """
    for each in fields(settings):
        value, setter = getattr(settings, each.name), getattr(module, each.metadata.get("setter", ""), None)
        if setter is not None and value is not None and value != ():  # a new module has these
            setter(value, **({"recurse": False} if "recurse" in inspect.signature(setter).parameters else {}))
