"""The invariants of units with settings that few have: collectives of the user's, unused parameters, offload."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import fx

from fxshard.ir import collectives, dataflow, ops, tags
from fxshard.ir.plan import UnitPlan
from fxshard.ir.verify import baseline, slot_layout
from fxshard.ir.verify.baseline import Subject
from fxshard.ir.verify.invariants import Violation

# ---- units whose collectives an object of the user's does


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
            yield from ((launch, why) for _, why in _cut_shards(subject, launch))
        else:
            sent = slot_layout.sent_by(launch, subject.flow)
            reduced.update((served[0], each.dtype) for each in sent if each is not None)
            if any(number > 1 for number in reduced.values()):
                yield launch, f"an object reduces {served[0]} in one call; this is a later one, or one of parts"


def _cut_shards(subject: Subject, launch: fx.Node) -> Iterator[tuple[dataflow.Flat, str]]:
    """Find shards of which an all_gather sends a part: yield the part, and how large it is."""
    for value in subject.flow.sent_by(launch):
        if isinstance(value, dataflow.Flat):
            numel = subject.baseline.plan.units[value.unit].shards[value.shard].numel
            if value.numel != numel:
                yield value, f"it sends {value.numel} of {numel} elements of shard {value.shard}"


# ---- units of which other ranks run other graphs: `FramePlan.in_step`


def zero_gradients_are_of_their_parameters(subject: Subject) -> Iterator[Violation]:
    """A zero gradient reads all parameters of its unit in one call, in order, and is that of the one it is made for."""
    plan = subject.baseline.plan
    for node in subject.graph.find_nodes(op="call_function", target=ops.ZERO_GRADIENT):
        parameters, index = node.args
        if subject.baseline.kind != "joint":
            return  # in backward parameters may have been saved, and read from elsewhere
        if others := [marker for marker in parameters if not ops.is_unshard(marker)]:
            yield node, f"it reads %{others[0].name}, which is no parameter"
            continue
        keys = [ops.parameter_key_of(marker) for marker in parameters]
        calls = {(ops.key_of(marker).unit, ops.key_of(marker).call) for marker in parameters}
        shards = plan.units[keys[0][0]].shards if keys[0][0] in plan.units else ()
        slots = [(i, j) for i, shard in enumerate(shards) for j in range(len(shard.slots))]
        if len(calls) != 1 or [key[1:] for key in keys] != slots:
            yield node, f"it reads {', '.join(plan.parameter_name(*key) for key in keys)}"
            continue
        found = [ops.parameter_key_of(user) for user in node.users if ops.is_reduce_grad(user)]
        wanted = (plan.owner_of(keys[index][0]), *keys[index][1:])
        if found != [wanted]:
            names = ", ".join(plan.parameter_name(*key) for key in found) or "nothing"
            yield node, f"it is made for {plan.parameter_name(*wanted)}, and reduced for {names}"


def units_in_step_are_moved_whole(subject: Subject) -> Iterator[Violation]:
    """Of a unit that other ranks use in other ways, shards are gathered whole, and all that is trained is reduced."""
    units = subject.baseline.plan.units
    for launch in (each for each in subject.launches if each.target in collectives.GATHERS):
        yield from ((launch, why) for flat, why in _cut_shards(subject, launch) if units[flat.unit].reduces_unused)
    for output, (key, shard) in subject.baseline.gradients.items():
        for slot, place in baseline.parameter_keys_of(subject.baseline.plan, key, shard):
            if units[key].reduces_unused and not subject.baseline.promised.get(place):
                yield subject.graph.output_node(), f"output {output} has no gradient of {slot.fqn}"


# ---- copies between host and device; see [Note: offloaded shards]


def copies_between_host_and_device_have_one_wait(subject: Subject) -> Iterator[Violation]:
    """A copy between host and device has one wait, which is read, and is what its unit's plan says."""
    for copy in (node for node in subject.graph.nodes if node.target in ops.BETWEEN_HOST_AND_DEVICE):
        if [user.target for user in copy.users] != [collectives.WAIT]:
            names = ", ".join(f"%{user.name}" for user in copy.users) or "none"
            yield copy, f"expected one user, its wait; found {names}"
        elif not next(iter(copy.users)).users:
            yield copy, "it is waited for, and nothing reads it"
        for key in tags.units_of(copy):
            yield from ((copy, why) for why in _wrong_copy(copy, subject.baseline.plan.units[key]))


def _wrong_copy(copy: fx.Node, unit: UnitPlan) -> Iterator[str]:
    if unit.offload is None:
        yield f"unit {unit.fqn or 'root'!r} is not offloaded"
        return
    is_to_host = copy.target is ops.COPY_TO_HOST
    how, stream = (unit.offload.pinned, tags.TO_HOST) if is_to_host else (unit.offload.device, tags.TO_DEVICE)
    if copy.args[1:] != (how, stream):
        yield f"expected {(how, stream)}, found {copy.args[1:]}"


def offloaded_shards_are_read_on_the_device(subject: Subject) -> Iterator[Violation]:
    """What is gathered of an offloaded unit is a copy of its shard on the device that has been waited for."""
    units = subject.baseline.plan.units
    read = [(node, value) for node, value in subject.flow.parameters.items()]  # of one rank nothing is gathered
    gathers = (launch for launch in subject.launches if launch.target in collectives.GATHERS)
    read += [(launch, sent) for launch in gathers for sent in subject.flow.sent_by(launch)]
    for node, value in read:
        flat = value.flat if isinstance(value, dataflow.Window) else value
        if isinstance(flat, dataflow.Flat) and flat.is_copy != (units[flat.unit].offload is not None):
            where = "the host, and it is not copied to the device" if not flat.is_copy else "the device already"
            yield node, f"shard {flat.shard} of unit {flat.unit or 'root'!r} is on {where}"


def gradients_of_offloaded_shards_are_on_the_host(subject: Subject) -> Iterator[Violation]:
    """The gradient of an offloaded shard is given out when its copy on the host has been waited for; no other is."""
    for output, (unit, shard) in subject.baseline.gradients.items():
        is_on_host = isinstance(subject.value_of(output), dataflow.OnHost)
        if is_on_host != (subject.baseline.plan.units[unit].offload is not None):
            where = "was copied to the host" if is_on_host else "is on the device, its shard on the host"
            yield subject.graph.output_node(), f"the gradient of shard {shard} of unit {unit or 'root'!r} {where}"
