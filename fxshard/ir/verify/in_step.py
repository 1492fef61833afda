"""The invariants of units of which other ranks run other graphs, as those in `invariants.py`: `FramePlan.in_step`."""

from __future__ import annotations

from collections.abc import Iterator

from fxshard.ir import collectives, ops
from fxshard.ir.verify import baseline
from fxshard.ir.verify.baseline import Subject
from fxshard.ir.verify.invariants import Violation
from fxshard.ir.verify.objects import cut_shards


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
        yield from ((launch, why) for flat, why in cut_shards(subject, launch) if units[flat.unit].reduces_unused)
    for output, (key, shard) in subject.baseline.gradients.items():
        for slot, place in baseline.parameter_keys_of(subject.baseline.plan, key, shard):
            if units[key].reduces_unused and not subject.baseline.promised.get(place):
                yield subject.graph.output_node(), f"output {output} has no gradient of {slot.fqn}"
