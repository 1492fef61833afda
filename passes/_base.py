"""What a pass is: a frozen dataclass whose fields are its options and whose `apply` edits a graph in place.

The graph is well-formed before and after `apply`; it need not be in between. A pass never lints, verifies, recompiles,
logs or dumps: `_manager.run` does, for every pass in the same way.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import fx
from torch.fx import GraphModule

from fxshard.hardware import BUILTIN, HardwareSpec
from fxshard.ir import text
from fxshard.ir.graph_edit import TracedCode
from fxshard.ir.history import PassHistory, Remark
from fxshard.ir.plan import FramePlan
from fxshard.ir.properties import GraphKind as GraphKind
from fxshard.ir.properties import Property as Property
from fxshard.ir.regions import Region


@dataclass(kw_only=True)
class PassContext:
    """What a pass may know besides the graph."""

    plan: FramePlan  # passes of the dynamo stage may set another one
    kind: GraphKind
    decompositions: Mapping[Any, Any] = field(default_factory=dict)  # for code that a pass traces into the graph
    traced: TracedCode = field(default_factory=dict)  # such code that was traced already, for any graph of the frame
    num_results: int | None = None  # of a forward graph; its other outputs are saved for backward
    hardware: HardwareSpec = BUILTIN["h100"]  # what passes that weigh costs count on
    unsharded_budget_bytes: int | None = None  # at any time; `None` for no limit
    verify: bool | str = True  # after every pass; "debug" also re-runs the graph on fake tensors
    history: PassHistory = field(default_factory=PassHistory)  # where the manager keeps the graphs
    trace_region: Callable[[str, str, GraphModule, list[bool]], Region | str] = lambda *_: "nothing here can trace it"
    declined: list[Remark] = field(default_factory=list)  # what the running pass left alone
    notes: list[Remark] = field(default_factory=list)  # why it did what it did

    def decline(self, node: fx.Node, why: str) -> None:
        """Say that the running pass leaves `node` alone, and why; shown by `fxshard.explain`."""
        self.declined.append(Remark(node=text.name_of(node), why=why))

    def note(self, node: fx.Node, why: str) -> None:
        """Say why the running pass made `node` as it is; shown by `fxshard.explain`."""
        self.notes.append(Remark(node=text.name_of(node), why=why))


@dataclass(frozen=True, kw_only=True)
class GraphPass(ABC):
    """One graph transformation.

    Class attributes:
        requires: properties that must hold before.
        ensures: properties that hold after.
        version: raised whenever the pass changes its result; part of every compile cache key.
        changes_signature: whether the pass adds inputs or takes results away; later passes keep what it leaves.
        reorders_only: whether the pass changes nothing but when things happen; `bisect_numerics` holds it to the bit.
    """

    requires: ClassVar[frozenset[Property]] = frozenset()
    ensures: ClassVar[frozenset[Property]] = frozenset()
    version: ClassVar[int] = 1
    changes_signature: ClassVar[bool] = False
    reorders_only: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """The class's name as its module is called: `InsertCollectives` -> `insert_collectives`."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(self).__name__).lower()

    @abstractmethod
    def apply(self, gm: GraphModule, ctx: PassContext) -> bool:
        """Edit `gm.graph` in place; return whether anything changed."""
