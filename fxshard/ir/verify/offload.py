"""The invariants of copies between host and device, as those in `invariants.py`; see [Note: offloaded shards]."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from fxshard.ir import collectives, dataflow, ops, tags
from fxshard.ir.plan import UnitPlan
from fxshard.ir.verify.baseline import Subject
from fxshard.ir.verify.invariants import Violation


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
