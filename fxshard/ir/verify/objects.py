"""The invariants of units whose collectives an object of the user's does, as those in `invariants.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import fx

from fxshard.ir import collectives, dataflow, tags
from fxshard.ir.verify import slot_layout
from fxshard.ir.verify.baseline import Subject
from fxshard.ir.verify.invariants import Violation


def objects_are_given_whole_units(subject: Subject) -> Iterator[Violation]:
    """What an object of the user's gathers is whole shards of one unit; what it reduces is all of one, in one call."""
    units = subject.baseline.plan.units
    reduced: Counter[tuple[str, object]] = Counter()
    for launch in subject.launches:
        served = list(tags.units_of(launch))
        is_gather, is_reduction = launch.target in collectives.GATHERS, launch.target in collectives.REDUCTIONS
        name = "gathers_whole" if is_gather else "reduces_whole"
        if not (is_gather or is_reduction) or not any(getattr(units[unit], name) for unit in served):
            continue
        if len(served) > 1:
            yield launch, f"it serves {', '.join(served)}, of which an object does one at a time"
        elif is_gather:
            yield from ((launch, why) for _, why in cut_shards(subject, launch))
        else:
            sent = slot_layout.sent_by(launch, subject.flow)
            reduced.update((served[0], each.dtype) for each in sent if each is not None)
            if any(number > 1 for number in reduced.values()):
                yield (
                    launch,
                    f"an object reduces {served[0]} in one call, and it is not the first, or has several parts",
                )


def cut_shards(subject: Subject, launch: fx.Node) -> Iterator[tuple[dataflow.Flat, str]]:
    """Find shards of which an all_gather sends a part: yield the part, and how large it is."""
    for value in subject.flow.sent_by(launch):
        if isinstance(value, dataflow.Flat):
            numel = subject.baseline.plan.units[value.unit].shards[value.shard].numel
            if value.numel != numel:
                yield value, f"it sends {value.numel} of {numel} elements of shard {value.shard}"
