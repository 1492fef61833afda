"""Which passes run on which graph, in which order, and why there."""

from __future__ import annotations

from dataclasses import dataclass

from fxshard.passes._base import Fact, GraphPass
from fxshard.passes.dedup_unshard import DedupUnshard
from fxshard.passes.insert_collectives import InsertCollectives
from fxshard.passes.reshard_policy import ReshardPolicy

OPTIONAL: tuple[type[GraphPass], ...] = ()
"""Passes that no default pipeline runs."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The passes of each stage, in order.

    Attributes:
        joint: on the joint forward-backward graph, before it is split.
        split: on the forward, the backward and the inference graph, each for itself.
    """

    joint: tuple[GraphPass, ...]
    split: tuple[GraphPass, ...]

    @property
    def digest(self) -> str:
        """What a compile cache must know of the passes: names, options, versions."""
        return repr([(p, p.version) for p in (*self.joint, *self.split)])


DEFAULT = Pipeline(
    joint=(
        DedupUnshard(),  # first: later passes count on one marker per parameter and call
        ReshardPolicy(),  # before the split: the partitioner reads its tags
    ),
    split=(
        DedupUnshard(),  # again: a graph without backward has seen no joint stage
        InsertCollectives(),  # after the split: each graph gathers where it reads and reduces where it writes
    ),
)

JOINT_GIVEN = (Fact.MARKED,)
SPLIT_GIVEN = (Fact.MARKED,)
