"""What a graph is known to satisfy at a place of the pipeline, and which graph of a frame it is."""

from __future__ import annotations

import enum
from typing import Literal

GraphKind = Literal["dynamo", "joint", "forward", "backward", "inference"]


class Property(enum.Enum):
    """What passes require and ensure; the manager checks the chain before, and the verifier the graph after a pass."""

    MARKED = "parameters are read through fxshard.unshard markers"
    DEDUPED = "a parameter is read by at most one marker per call of its unit"
    RESHARD_TAGGED = "every marker says whether backward gathers again or keeps the parameter"
    COLLECTIVES = "no marker is left: gathers and reductions are collectives on whole units"
    SCHEDULED = "the launches are final: what each of them sends, and their order"
    LOWERED = "Inductor's own passes have run: views and copies are no longer ours to follow"
