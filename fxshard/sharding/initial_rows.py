"""What is said where ranks that initialise their shards by themselves draw the same rows.

torch's DTensor splits the random numbers of a sharded tensor over the ranks on accelerators; on a CPU mesh it has no
`OffsetBasedRNGTracker` (`torch/distributed/tensor/_random.py`), so with one seed every rank draws the rows of rank 0.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch.distributed as dist
from torch import Tensor

from fxshard.ranks.rendezvous import gather_texts, is_alone
from fxshard.runtime import mesh_axes
from fxshard.runtime.flat_shard import Member
from fxshard.runtime.parameters import local_of
from fxshard.runtime.raw import checksum
from fxshard.runtime.unit import Unit

_log = logging.getLogger(__name__)


def warn_of_equal_rows(units: Sequence[Unit]) -> None:
    """Say so once where parameters got values after they were sharded, and ranks have the same random rows of one now.

    Collective over the ranks of each mesh, through the store; it does nothing on accelerators.
    """
    real = [unit for unit in units if unit.world_size > 1 and unit.mesh.device_type == "cpu"]
    made_here = [unit for unit in real if any(m.was_on_meta or m.parameter._version for m in unit.members)]
    for unit in made_here[:1]:
        group = mesh_axes.shard_group(unit.mesh)
        if not isinstance(group, dist.ProcessGroup) or is_alone():
            continue
        members = [member for each in made_here if each.mesh == unit.mesh for member in each.members]
        texts = gather_texts("initial rows", " ".join(map(_text, members)), group)
        equal = _equal(members, [text.split(" ") for text in texts])
        if equal:
            _log.warning(
                "fxshard: ranks initialised the same rows of %s: torch draws the same numbers on every rank of a CPU "
                "mesh. Seed each rank by itself around the initialisation, torch.manual_seed(seed + "
                "torch.distributed.get_rank()), or initialise before fully_shard, or load a full state.",
                ", ".join(equal[:3]) + (f" and {len(equal) - 3} more" if len(equal) > 3 else ""),
            )


def _text(member: Member) -> str:
    """A checksum of this rank's first row; `-` if it has none, or all its numbers are the same."""
    rows: Tensor = local_of(member.parameter).detach()
    if rows.dim() < 2 or not rows.numel() or bool((rows[0] == rows[0].reshape(-1)[0]).all()):
        return "-"
    return str(checksum([rows[0].contiguous()]))


def _equal(members: Iterable[Member], of_ranks: Sequence[Sequence[str]]) -> list[str]:
    found = []
    for member, *texts in zip(members, *of_ranks, strict=True):
        known = [text for text in texts if text != "-"]
        if len({*known}) < len(known):
            found.append(member.fqn)
    return found
