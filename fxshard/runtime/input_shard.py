"""The bytes that are gathered in place of parameters with hooks: [Note: extensions] in `extensions.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fxshard import torch_private
from fxshard.ir import ops
from fxshard.ir.plan import ShardPlan
from fxshard.runtime import parameters
from fxshard.runtime.extensions import Extension
from fxshard.runtime.flat_shard import FlatShard, Home, Member
from fxshard.runtime.gradients import GradientSink
from fxshard.runtime.parameters import HookRef


@dataclass(frozen=True, eq=False)
class Metadata:
    """What the first hooks of a shard gave beside the bytes; equal if the values are."""

    tensors: tuple[Tensor, ...] = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Metadata) and all(map(torch.equal, self.tensors, other.tensors))

    __hash__ = None  # type: ignore[assignment]


class InputShard(FlatShard):
    """A flat without parameters: the all-gather inputs of those of another shard."""

    def __init__(self, plan: ShardPlan, encoded: FlatShard, home: Home) -> None:
        """Make room for the inputs of `encoded`."""
        self.plan, self.members, self._encoded = plan, [], encoded
        flat = torch.zeros(plan.numel, dtype=plan.dtype, device=encoded.flat.device)
        self.flat = nn.Parameter(flat, requires_grad=False)
        self.flat._fxshard_home = home  # type: ignore[attr-defined]
        self.sink = GradientSink([], plan)
        self.metadata = Metadata()  # of all of them, as they are now

    def attach(self) -> None:
        """Do nothing: no parameter is a view of it."""

    def is_attached(self) -> bool:
        """Whether nothing that the alias rests on has changed."""
        return True

    def encode(self) -> None:
        """Run the first hook of each parameter on its rows."""
        if self.flat.is_meta or torch_private.is_fake(self.flat):
            return
        for member, slots in self.inputs():
            extension = extension_of(member)
            parts = [self.plan.slots[i] for i in slots]
            # `.data` counts no write: code that saved the bytes finds those of the same rows.
            extension.encode([self.flat.data[part.offset : part.offset + part.numel] for part in parts])
            for module, name in member.owners:
                parameters.publish_metadata(module, name, extension.metadata)
        self.metadata = Metadata(tuple(t for member, _ in self.inputs() for t in extension_of(member).metadata))

    def refs(self, key: str) -> list[HookRef]:
        """What modules need to read each parameter; `key` is that of the markers of this shard."""
        refs = []
        for member, slots in self.inputs():
            extension = extension_of(member)
            texts = [ops.marker_text(key, i, self.plan.slots[i].shape, self.plan.dtype) for i in slots]
            refs.append(HookRef(extension.reader, self.flat, tuple(texts), tuple(extension.metadata)))
        return refs

    def inputs(self) -> Iterator[tuple[Member, range]]:
        """Each parameter that is encoded, and the slots of its inputs."""
        start = 0
        for member in self._encoded.members:
            end = start + len(extension_of(member).input_bytes)
            yield member, range(start, end)
            start = end

    def unshard(self, gathered: dict[tuple[int, int], Tensor], number: int) -> Iterator[tuple[tuple[int, int], Tensor]]:
        """Make whole parameters of gathered bytes; `number` is this shard's. Metadata may have changed until backward.

        Yields:
            (shard, slot) of the parameter, and the parameter.
        """
        encoded = self.plan.encodes
        assert encoded is not None
        for i, (member, slots) in enumerate(self.inputs()):
            extension = extension_of(member)
            yield (encoded, i), extension.unsharding([gathered[number, j] for j in slots], extension.metadata)


def extension_of(member: Member) -> Extension:
    """The extension of a parameter that has one."""
    assert member.extension is not None
    return member.extension
