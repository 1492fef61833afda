"""The invariants, one generator each: it yields the nodes at which the rule in its docstring is broken, and how."""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Iterator

from torch import fx

from fxshard import torch_private
from fxshard.ir import collectives, dataflow, liveness, ops, signature, tags, text
from fxshard.ir.plan import qualified
from fxshard.ir.verify import baseline, slot_layout
from fxshard.ir.verify.baseline import Subject

Violation = tuple[fx.Node, str]
"""The node at which a rule is broken, and how."""


# ---- markers


def markers_match_the_plan(subject: Subject) -> Iterator[Violation]:
    """A marker names a parameter of the plan, reads the flat that holds it, and has its shape and dtype."""
    for node in subject.graph.nodes:
        if not (ops.is_unshard(node) or ops.is_reduce_grad(node)):
            continue
        found = baseline.find(subject.baseline.plan, ops.parameter_key_of(node))
        if found is None:
            yield node, f"the plan has no slot {ops.parameter_key_of(node)}"
            continue
        unit, shard, slot = found
        if ops.is_reduce_grad(node):
            if node.args[3:5] != (shard.numel, shard.dtype):
                yield node, f"the shard of {slot.fqn} has {shard.numel} elements of {shard.dtype}"
            continue
        key, flat = ops.key_of(node), node.args[0]
        if not isinstance(flat, fx.Node) or tags.meta_of(flat).shard != (key.unit, key.shard):
            yield node, f"it reads {_name(flat)}, which is not the flat of shard {key.shard} of unit {key.unit!r}"
        shape, dtype = node.args[3:5]
        if (tuple(shape), dtype) != (slot.shape, unit.unsharded_dtype(shard)):
            yield node, f"{slot.fqn} has shape {list(slot.shape)} and dtype {unit.unsharded_dtype(shard)}"


def markers_keep_their_promise(subject: Subject) -> Iterator[Violation]:
    """As many gradients are reduced for each parameter as when the stage began."""
    last = {ops.parameter_key_of(node): node for node in subject.graph.nodes if ops.is_reduce_grad(node)}
    found, promised = baseline.expected_reductions(subject.results), subject.baseline.promised
    for place in sorted(found.keys() | promised.keys() | last.keys()):
        if found.get(place, 0) != promised.get(place, 0):
            node = last.get(place, subject.graph.output_node())
            slot = baseline.find(subject.baseline.plan, place)
            counts = f"{found.get(place, 0)} gradients to reduce, and had {promised.get(place, 0)}"
            yield node, f"{slot[2].fqn if slot else place} has {counts}"


def parameters_are_read_once_per_call(subject: Subject) -> Iterator[Violation]:
    """One marker reads a parameter in one call of its unit."""
    seen: dict[tuple[object, ...], fx.Node] = {}
    for node in subject.graph.nodes:
        if ops.is_unshard(node):
            first = seen.setdefault(node.args[:3], node)
            if first is not node:
                yield node, f"%{first.name} reads the same parameter in the same call"


def markers_say_whether_backward_gathers_again(subject: Subject) -> Iterator[Violation]:
    """Every marker is tagged for the partitioner as its unit's reshard_after_forward says."""
    for node in subject.graph.nodes:
        if ops.is_unshard(node):
            unit = subject.baseline.plan.units[ops.key_of(node).unit]
            wanted = "MUST_RECOMPUTE" if unit.regathers else "MUST_SAVE"
            found = getattr(node.meta.get("recompute"), "name", None)
            if found != wanted:
                yield node, f"expected recompute={wanted}, found {found}"


def what_a_subgroup_shares_is_read_from_it(subject: Subject) -> Iterator[Violation]:
    """Nobody reads a unit that a subgroup shares but to keep it, once, in a call in which it is read."""
    for node in filter(ops.is_unshard, subject.graph.nodes):
        key = ops.key_of(node)
        if not subject.baseline.plan.units[key.unit].subgroup:
            continue
        calls = {ops.key_of(reader).call for kept in node.users for reader in kept.users if ops.is_unshard(reader)}
        if [reader.target for reader in node.users] != [ops.KEEP_ROWS] or key.call not in calls:
            yield node, f"it is read by {', '.join(map(_name, node.users))}, and what is kept in calls {sorted(calls)}"


def no_marker_is_left(subject: Subject) -> Iterator[Violation]:
    """Once collectives stand in the graph, no marker does."""
    for node in subject.graph.nodes:
        if ops.is_unshard(node) or ops.is_reduce_grad(node):
            yield node, "the marker was not replaced"


# ---- launches and waits


def launch_has_one_wait(subject: Subject) -> Iterator[Violation]:
    """Every result of a launch is read by its wait alone, or by copies on a side stream, each with its wait."""
    for launch in subject.launches:
        results = [launch]
        if launch.target in collectives.COALESCED:
            results, sent = list(launch.users), collectives.launch_inputs(launch)
            indices = sorted(str(user.args[-1]) for user in results)
            if indices != sorted(str(i) for i in range(len(sent))):
                yield launch, f"a coalesced launch of {len(sent)} tensors has the results {', '.join(indices)}"
        for result in results:
            copies = [reader for reader in result.users if reader.target is ops.COPY_OUT]
            if copies and len(copies) == len(result.users):
                yield from ((copy, why) for copy in copies for why in _not_waited_for(copy))
                yield from ((copy, "nothing reads it") for copy in copies for wait in copy.users if not wait.users)
            else:
                yield from ((result, why) for why in _not_waited_for(result))


def _not_waited_for(result: fx.Node) -> Iterator[str]:
    readers = list(result.users)
    if len(readers) != 1 or readers[0].target not in collectives.WAITS:
        names = ", ".join(_name(reader) for reader in readers) or "none"
        yield f"expected one user, its wait; found {names}"


def deferred_waits_are_for_results(subject: Subject) -> Iterator[Violation]:
    """What a graph leaves on the link is a reduced gradient that it returns once, and reads in no other way."""
    for node in subject.graph.find_nodes(op="call_function", target=ops.DEFERRED_WAIT):
        launch = node.all_input_nodes[0]
        launch = launch.all_input_nodes[0] if launch.target is operator.getitem else launch
        if launch.target not in (*collectives.REDUCTIONS, *collectives.ALL_REDUCES):
            yield node, f"{_name(launch)} is no reduction"
        output = subject.results.index(node) if node in subject.results else -1
        if output not in subject.baseline.gradients and not subject.baseline.had_launches:
            yield node, "it is no gradient that the graph returns"
        if len(node.users) != 1 or subject.results.count(node) != 1:
            yield node, "it is read before it has arrived"


def side_streams_meet_the_main_one_at_waits(subject: Subject) -> Iterator[Violation]:
    """What a side stream makes is read there, or by what waits for it; no compute there reads more than one tensor."""
    for node in subject.graph.nodes:
        here = tags.meta_of(node).stream
        if here and not collectives.is_launch(node) and len(node.all_input_nodes) > 1:
            yield node, "until the wait Inductor keeps the first tensor that it reads, and frees the others"
        for source in node.all_input_nodes:
            there = tags.meta_of(source).stream
            if there not in ("", here) and node.target not in (collectives.WAIT, ops.COPY_OUT):
                where = f"stream {here}" if here else "the main stream"
                yield node, f"it runs on {where} and reads {_name(source)} of stream {there} without a wait"


def nothing_is_written_while_in_use(subject: Subject) -> Iterator[Violation]:
    """What a launch or a side stream reads or fills is written by nothing else until it has been waited for."""
    for user, writer in liveness.written_in_use(subject.graph):
        yield writer, f"it writes what {_name(user)} uses, before that has been waited for"


def collectives_keep_their_order(subject: Subject) -> Iterator[Violation]:
    """What the ranks have agreed to launch is what is launched, in the same order."""
    found = baseline.sequence_of(subject.graph)
    if found != subject.baseline.sequence:
        pairs = itertools.zip_longest(subject.baseline.sequence, found, fillvalue="nothing")
        before, after = next(pair for pair in pairs if pair[0] != pair[1])
        yield subject.graph.output_node(), f"first difference: {before} before, {after} now"


def launches_send_what_they_sent(subject: Subject) -> Iterator[Violation]:
    """A launch sends the parts of flats and the gradients that it sent when the launches became final."""
    launches = [launch for launch in subject.launches if tags.meta_of(launch).calls]
    names = {f"%{node.name}" for node in subject.graph.nodes}
    for launch, expected in zip(launches, subject.baseline.payloads, strict=False):
        found = baseline.payload_of(launch, subject.flow)
        for now, before in itertools.zip_longest(found, expected, fillvalue="nothing"):
            replaced = before.startswith("%") and before.partition(" ")[0] not in names
            if now != before and not replaced:
                yield launch, f"it sent {before}, and sends {now}"


def values_are_read_after_they_are_there(subject: Subject) -> Iterator[Violation]:
    """A node stands after everything it reads."""
    order_of = {node: i for i, node in enumerate(subject.graph.nodes)}
    for node, at in order_of.items():
        for source in node.all_input_nodes:
            if order_of.get(source, at) >= at:
                yield node, f"it reads {_name(source)}, which comes later"


def buffers_in_flight_are_waited_for(subject: Subject) -> Iterator[Violation]:
    """Between a launch and its wait nothing reads the buffer, and a wait of ours completes a launch."""
    for node in subject.graph.nodes:
        is_wait = node.target in collectives.WAITS
        values = {n: subject.flow.values.get(n) for n in node.all_input_nodes}
        for source, value in values.items():
            if isinstance(value, dataflow.InFlight) and not is_wait and value.index is not None:
                if node.target is ops.COPY_OUT and value.copied is None:
                    continue  # it waits itself
                yield node, f"it reads {_name(source)}, which no wait has completed"
        if is_wait and tags.meta_of(node).calls:
            if not any(isinstance(value, dataflow.InFlight) for value in values.values()):
                yield node, "it waits for something that no launch returned"


def gathers_match_the_plan(subject: Subject) -> Iterator[Violation]:
    """An all_gather sends whole slots, as its unit gathers them and in that dtype, to its group; each once per call."""
    gathered: dict[tuple[str, str, str], fx.Node] = {}
    for launch in (n for n in subject.launches if n.target in collectives.GATHERS):
        flats = subject.flow.sent_by(launch)
        if not all(isinstance(flat, dataflow.Flat) for flat in flats):
            yield launch, "it sends something that is not of the flat of a unit, or of its one cast"
            continue
        calls = tags.units_of(launch)
        for flat in (f for f in flats if isinstance(f, dataflow.Flat)):
            unit = subject.baseline.plan.units[flat.unit]
            expected = unit.unsharded_dtype(unit.shards[flat.shard])
            yield from ((launch, why) for why in slot_layout.wrong_ranks(launch, unit))
            if flat.shard in unit.encoded:
                yield launch, f"it sends {_shard(flat)}, in place of which another one is gathered"
            if flat.dtype is not expected:
                yield launch, f"unit {flat.unit or 'root'!r} is gathered in {expected}, this is {flat.dtype}"
            end = flat.start + flat.numel
            slots = [s for s in unit.shards[flat.shard].slots if s.numel and flat.start <= s.offset < end]
            if sum(slot.numel for slot in slots) != flat.numel:
                yield launch, f"it cuts a slot: elements {flat.start} to {end} of {_shard(flat)}"
            for slot in slots:
                first = gathered.setdefault((flat.unit, calls.get(flat.unit, ""), slot.fqn), launch)
                if first is not launch:
                    yield launch, f"{_name(first)} gathers {slot.fqn} for the same call"


# ---- parameters


def parameters_are_their_slots(subject: Subject) -> Iterator[Violation]:
    """An unsharded parameter is exactly its slot of what was gathered: every rank's rows, without the padding."""
    units = subject.baseline.plan.units
    for node, value in subject.flow.parameters.items():
        fqn = tags.meta_of(node).param
        if _is_saved(node):
            continue  # forward made it, and forward's own graph is verified
        found = subject.slots.get(fqn, [])
        if not found:
            yield node, f"the plan has no parameter {fqn}"
        elif tags.resident_behind(node) == fqn:
            continue  # its type is what `graph_edit.add_parameter` made it
        elif not isinstance(value, dataflow.Window | dataflow.Flat):
            yield node, f"{fqn} does not come from what was gathered"
        elif not any(slot_layout.is_slot(value, key, shard, slot, units[key]) for key, shard, slot in found):
            slot = found[0][2]
            where = f"{slot.numel} elements per rank from {slot.offset} on"
            yield node, f"{fqn} has shape {list(slot.shape)}; its slot is {where}"


def gathered_buffers_are_read_as_parameters(subject: Subject) -> Iterator[Violation]:
    """Compute reads parameters; a flat, a buffer in flight or a gathered buffer is read on the way to one only."""
    for reader, source in subject.flow.unexpected_reads:
        yield reader, f"it reads {_name(source)} without being on the way to a parameter"


def nothing_is_read_after_reshard(subject: Subject) -> Iterator[Violation]:
    """What reshards after forward is not saved for backward; what is gathered for a call is read in it."""
    for saved in subject.results[subject.baseline.num_results :] if subject.baseline.num_results is not None else ():
        origin = _parameter_behind(saved)
        if origin is not None and _reshards(subject, origin):
            yield origin, f"its unit reshards after forward, but {_name(saved)} is saved for backward"
    for node in subject.flow.parameters:
        if _is_saved(node) and _reshards(subject, node):
            yield node, "its unit reshards after forward, but backward is given the parameter"
        elif not node.users and node.op != "placeholder":
            yield node, "it is gathered for this call, and nothing reads it"


def what_a_subgroup_keeps_is_its_shard(subject: Subject) -> Iterator[Violation]:
    """What forward keeps of a unit for a subgroup is all parameters of that shard, in its order, for its ranks."""
    for node in subject.graph.find_nodes(op="call_function", target=ops.KEEP_ROWS):
        parameters, key, *ranks = node.args
        unit, _, shard = str(key).rpartition("#")
        plan = subject.baseline.plan.units[unit]
        expected = [qualified(unit, slot.fqn) for slot in plan.shards[int(shard)].slots]
        found = [tags.meta_of(parameter).param or tags.resident_behind(parameter) for parameter in parameters]
        if found != expected:
            yield node, f"it keeps {', '.join(found)}; shard {shard} of {unit} has {', '.join(expected)}"
        if ranks != [plan.world_size, plan.group]:
            yield node, f"{plan.world_size} ranks of group {plan.group!r} share {unit}"


# ---- gradients


def gradients_reach_their_slots(subject: Subject) -> Iterator[Violation]:
    """The gradient of each parameter is in its slot of its shard's gradient: all of its terms, each once."""
    for output, (unit, shard) in subject.baseline.gradients.items():
        found = subject.gradients[output]
        node = _result_node(subject, output)
        if found is None:
            yield node, f"output {output} is not the reduced gradient of shard {shard} of unit {unit or 'root'!r}"
            continue
        for slot, place in baseline.parameter_keys_of(subject.baseline.plan, unit, shard):
            (row, _), promised = found.at(slot), subject.baseline.promised.get(place, 0)
            if row is not None and not promised:
                yield node, f"{slot.fqn} has no gradient, but {_name(row.terms[0])} is in its slot"
            elif row is not None:
                yield from ((node, why) for why in _wrong_terms(subject, qualified(unit, slot.fqn), row, promised))
            elif promised or not found.is_zero(slot):
                yield node, f"{slot.fqn} is not in its slot of the reduced gradient"


def gradients_are_reduced_once(subject: Subject) -> Iterator[Violation]:
    """Every gradient is sent by one launch, and what a launch reduces is used."""
    placed: Counter[int] = Counter()
    for output, (unit, shard) in subject.baseline.gradients.items():
        if found := subject.gradients[output]:
            keys = baseline.parameter_keys_of(subject.baseline.plan, unit, shard)
            placed.update(id(row) for slot, _ in keys if (row := found.at(slot)[0]) is not None)
    concats = [(launch, each) for launch in subject.reductions for each in slot_layout.sent_by(launch, subject.flow)]
    sent = [(launch, row) for launch, concat in concats if concat is not None for row in concat.rows]
    counts = Counter(id(row) for _, row in sent)
    for launch, row in sent:
        if counts[id(row)] > placed[id(row)] and not subject.baseline.had_launches:
            names = ", ".join(tags.meta_of(row.terms[0]).grads)
            slots = f"{placed[id(row)]} slots"
            yield launch, f"the gradient of {names} is sent {counts[id(row)]} times, and lies in {slots}"


def reductions_match_the_plan(subject: Subject) -> Iterator[Violation]:
    """A reduction has its unit's group, dtype, operator and divisors."""
    units = subject.baseline.plan.units
    for launch in subject.reductions:
        for value in slot_layout.sent_by(launch, subject.flow):
            if value is None:
                yield launch, "it reduces something that is not made of gradients"
            elif value.world_size != collectives.world_size_of(launch):
                yield launch, f"its gradients are cut for {value.world_size} ranks"
    for output, (key, shard) in subject.baseline.gradients.items():
        unit, plan = units[key], units[key].shards[shard]
        if (found := subject.gradients[output]) is None:
            continue
        for piece in found.pieces:
            if isinstance(piece, dataflow.Piece):
                yield from ((_result_node(subject, output), why) for why in slot_layout.wrong_result(piece, unit, plan))
        for slot, _ in baseline.parameter_keys_of(subject.baseline.plan, key, shard):
            row, sent = found.at(slot)
            reduced_by = sent.launch if sent is not None else None
            if row is not None and sent is not None and reduced_by is not None:
                wrong = [*slot_layout.wrong_ranks(reduced_by, unit)]
                wrong += slot_layout.wrong_reduction(reduced_by, sent.concat, row, unit, plan)
                yield from ((reduced_by, f"{slot.fqn}: {why}") for why in wrong)


def reduced_shards_are_averaged_over_replicas(subject: Subject) -> Iterator[Violation]:
    """A reduced gradient goes through one all_reduce over the ranks that hold the same shard, if there are any."""
    used: set[fx.Node | None] = set()
    for output, (key, _) in subject.baseline.gradients.items():
        unit, node = subject.baseline.plan.units[key], _result_node(subject, output)
        found = subject.gradients[output]
        for piece in found.pieces if found is not None else ():
            if isinstance(piece, dataflow.Piece):
                used.add(piece.all_reduce)
                yield from ((piece.all_reduce or node, why) for why in slot_layout.wrong_all_reduce(piece, unit))
    for launch in subject.all_reduces:
        sent = [dataflow.on_one_rank(value) for value in subject.flow.sent_by(launch)]
        for value in sent:
            if not isinstance(value, dataflow.Piece):
                yield launch, "it sends something that is not a reduced gradient"
            elif value.divisor != 1 or value.dtype is not value.concat.dtype:
                yield launch, "what it sends was divided or cast before: that comes after the all_reduce"
        if launch not in used and not subject.baseline.had_launches:
            yield launch, "nothing of what it averages is the gradient of a shard"


# ---- the whole graph


def signature_is_unchanged(subject: Subject) -> Iterator[Violation]:
    """Inputs and outputs are those that AOTAutograd recorded: number, order, shapes, dtypes, and which are None."""
    inputs = signature.inputs_of(subject.graph)
    outputs = [signature.type_of(result) for result in subject.results]
    for output, (key, shard) in subject.baseline.gradients.items():  # autograd's own casts come after the graph
        plan = subject.baseline.plan.units[key].shards[shard]
        if plan.grad_dtype is not None and outputs[output] == f"{text.dtype_text(plan.grad_dtype)}[{plan.numel}]":
            outputs[output] = subject.baseline.outputs[output]
    end = subject.graph.output_node()
    if inputs != subject.baseline.inputs:
        yield end, f"the inputs were {list(subject.baseline.inputs)}, and are {list(inputs)}"
    if outputs != list(subject.baseline.outputs):
        yield end, f"the outputs were {list(subject.baseline.outputs)}, and are {outputs}"


def compute_reads_what_it_read(subject: Subject) -> Iterator[Violation]:
    """A node that passes left in place reads what it read before, and a parameter in the same call of its unit."""
    nodes = {node.name: node for node in subject.graph.nodes}
    for name, (target, expected) in subject.baseline.reads.items():
        node = nodes.get(name)
        if node is None or baseline.target_of(node) != target:
            continue
        for want, argument in zip(expected, baseline.reads_of(node), strict=False):
            found = subject.read_names_of(argument)
            is_new = len(found) == 1 and argument.name not in subject.baseline.reads
            if want[0].startswith("%") and (want[0][1:] not in nodes or is_new):
                continue  # what it read was replaced
            if not any(name == want[0] and call in (want[1], None) for name, call in found):  # one rank gathers nothing
                yield node, f"it read {_read(want)}, and reads {_read(found[0])}"
        if ops.is_reduce_grad(node) and (was := subject.baseline.slots[name]) != (now := ops.parameter_key_of(node)):
            yield node, f"it reduced the gradient of {was}, now of {now}"


def unsharded_bytes_stay_within_the_budget(subject: Subject) -> Iterator[Violation]:
    """Unsharded parameters, gathered buffers included, never take more bytes than the budget."""
    budget = subject.baseline.unsharded_budget_bytes
    for node, used in liveness.unsharded_bytes(subject.graph):
        if budget is not None and used > budget:
            yield node, f"{used} bytes of unsharded parameters are alive here, the budget is {budget}"
            return


def types_agree_with_a_fake_run(subject: Subject) -> Iterator[Violation]:
    """Running the node on fake tensors gives the shape and dtype that its `meta["val"]` says."""
    for node, recorded, found in torch_private.disagreements(subject.graph):
        yield node, f'meta["val"] is {recorded}, running it gives {found}'


# ---- what the rules ask


def _read(name: baseline.ReadName) -> str:
    return name[0] if name[1] is None else f"{name[0]}, call {name[1]}"


def _name(value: object) -> str:
    return f"%{text.name_of(value)}" if isinstance(value, fx.Node) else str(value)


def _shard(flat: dataflow.Flat) -> str:
    return f"shard {flat.shard} of unit {flat.unit or 'root'!r}"


def _result_node(subject: Subject, output: int) -> fx.Node:
    result = subject.results[output] if output < len(subject.results) else None
    return result if isinstance(result, fx.Node) else subject.graph.output_node()


def _wrong_terms(subject: Subject, fqn: str, row: dataflow.GradientRow, promised: int) -> Iterator[str]:
    foreign = [_name(term) for term in row.terms if fqn not in tags.meta_of(term).grads]
    if foreign:
        yield f"in the slot of {fqn} is {', '.join(foreign)}, which is not its gradient"
    elif len(row.terms) != promised:
        yield f"{fqn} has {promised} gradients to add up, in its slot are {len(row.terms)}"
    elif missing := subject.gradient_nodes[fqn] - set(row.terms):
        yield f"{', '.join(sorted(map(_name, missing)))} is a gradient of {fqn}, but not in its slot"


def _is_saved(node: fx.Node) -> bool:
    return node.op == "placeholder" and tags.meta_of(node).shard is None


def _reshards(subject: Subject, parameter: fx.Node) -> bool:
    found = subject.slots.get(tags.meta_of(parameter).param, [])
    units = [subject.baseline.plan.units[key] for key, _, _ in found]
    return bool(units) and all(unit.world_size > 1 and unit.regathers for unit in units)


def _parameter_behind(value: fx.node.Argument) -> fx.Node | None:
    """The parameter that a saved value only casts, views or copies."""
    while isinstance(value, fx.Node):
        if tags.meta_of(value).param:
            return value
        if value.target not in ops.MOVEMENT and value.target is not operator.getitem:
            return None
        value = value.args[0]
    return None
