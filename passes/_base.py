"""What a pass is: a frozen dataclass whose fields are its options and whose `apply` edits a graph in place.

The graph is well-formed before and after `apply`; it need not be in between. A pass never lints, verifies, recompiles,
logs or dumps: `_manager.run` does, for every pass alike.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch.fx import GraphModule

from fxshard.ir.plan import FramePlan

GraphKind = Literal["joint", "forward", "backward", "inference"]


class Fact(enum.Enum):
    """What a graph is known to satisfy; passes require and ensure facts, and the manager checks the chain."""

    MARKED = "parameters are read through fxshard.unshard markers"
    DEDUPED = "a parameter is read by at most one marker per call of its unit"
    RESHARD_TAGGED = "every marker says whether backward gathers again or keeps the parameter"
    COLLECTIVES = "no marker is left: gathers and reductions are collectives on whole units"


@dataclass(frozen=True, kw_only=True)
class PassContext:
    """What a pass may know besides the graph.

    Attributes:
        plan: the units of the frame.
        kind: which graph of the frame this is.
        decompositions: table for code that a pass traces into the graph; empty keeps aten ops whole.
    """

    plan: FramePlan
    kind: GraphKind
    decompositions: Mapping[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class GraphPass(ABC):
    """One graph transformation.

    Class attributes:
        requires: facts that must hold before.
        ensures: facts that hold after.
        version: raised whenever the pass changes its result; part of every compile cache key.
    """

    requires: ClassVar[frozenset[Fact]] = frozenset()
    ensures: ClassVar[frozenset[Fact]] = frozenset()
    version: ClassVar[int] = 1

    @abstractmethod
    def apply(self, gm: GraphModule, ctx: PassContext) -> bool:
        """Edit `gm.graph` in place; return whether anything changed."""
