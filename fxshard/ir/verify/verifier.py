"""What must hold of every graph, whatever the passes did to it: the invariants as a table, and who broke one.

[Note: verification]
A *baseline* is taken when a stage receives its graph: the signature, and which gradients the markers will reduce
into which output. After every pass `verify` checks each invariant of `INVARIANTS` that applies by then: the properties
say whether parameters are markers or collectives. An invariant is a generator of `(node, why)`. The first thing it
yields is an error that names the pass, the invariant and the node, with the lines around it.

As in JAX's `check_jaxpr` (jax/_src/core.py) and tinygrad's `spec.py`, the rules are data, all in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from fxshard.errors import InvariantError
from fxshard.ir import text
from fxshard.ir.properties import Property
from fxshard.ir.verify import invariants, region_invariants, unit_invariants
from fxshard.ir.verify.baseline import Baseline, Subject
from fxshard.ir.verify.invariants import Violation


def verify(
    graph: fx.Graph, expected: Baseline, properties: Collection[Property], *, broken_by: str, debug: bool
) -> None:
    """Raise `InvariantError` for the first invariant of `expected` that does not hold of `graph` after a pass.

    The message names the pass (`broken_by`), the invariant and the node, and shows the lines around it. `properties`
    are those that the passes so far ensure. With `debug` also the invariants are checked that are too slow for every
    compile.
    """
    subject = Subject(graph=graph, baseline=expected, properties=properties)
    for invariant in INVARIANTS:
        if not invariant.applies.holds(subject) or (invariant.slow and not debug):
            continue
        for node, why in invariant.check(subject):
            raise InvariantError(
                f"{broken_by} broke `{invariant.name}` in the {expected.kind} graph at %{text.name_of(node)}: {why}\n"
                f"Rule: {invariant.statement}\n\n{text.window(node)}\n"
            )


class When(NamedTuple):
    """When a rule means anything for a graph: in words, and for a graph."""

    words: str
    holds: Callable[[Subject], bool]


@dataclass(frozen=True, kw_only=True)
class Invariant:
    """One rule: the name and docstring of `check` are the rule's."""

    check: Callable[[Subject], Iterator[Violation]]  # yields where it is broken, and how
    applies: When
    slow: bool = False  # checked at `verify="debug"` only

    @property
    def name(self) -> str:
        """What errors call it."""
        return self.check.__name__

    @property
    def statement(self) -> str:
        """The rule in one sentence."""
        return (self.check.__doc__ or "").strip()

    @property
    def when(self) -> str:
        """When it is checked, in words."""
        return f'{self.applies.words}, at `verify="debug"` only' if self.slow else self.applies.words


_ALWAYS = When("After every pass", lambda subject: True)
_MARKED = When("Until collectives are inserted", lambda subject: Property.COLLECTIVES not in subject.properties)
_DEDUPED = When(
    "From the removal of double reads until collectives are inserted",
    lambda subject: _MARKED.holds(subject) and Property.DEDUPED in subject.properties,
)
_TAGGED = When(
    "Once markers say whether backward gathers again", lambda subject: Property.RESHARD_TAGGED in subject.properties
)
_EXPLICIT = When("Once collectives are inserted", lambda subject: Property.COLLECTIVES in subject.properties)
_UNLOWERED = When(  # Inductor makes the layouts of a subgraph's operands equal itself
    "Until Inductor's own passes run", lambda subject: Property.LOWERED not in subject.properties
)
_FOLLOWED = When(
    "Once collectives are inserted, until Inductor's own passes run",
    lambda subject: _EXPLICIT.holds(subject) and _UNLOWERED.holds(subject),
)
_SCHEDULED = When("Once the launches are final", lambda subject: Property.SCHEDULED in subject.properties)
_LIMITED = When(
    "Once collectives are inserted, where a budget is set",
    lambda subject: _EXPLICIT.holds(subject) and subject.baseline.unsharded_budget_bytes is not None,
)

INVARIANTS: tuple[Invariant, ...] = (
    Invariant(check=invariants.values_are_read_after_they_are_there, applies=_ALWAYS),  # first: the others count on it
    Invariant(check=invariants.signature_is_unchanged, applies=_ALWAYS),
    Invariant(check=invariants.markers_match_the_plan, applies=_MARKED),
    Invariant(check=invariants.markers_keep_their_promise, applies=_MARKED),
    Invariant(check=invariants.parameters_are_read_once_per_call, applies=_DEDUPED),
    Invariant(check=invariants.markers_say_whether_backward_gathers_again, applies=_TAGGED),
    Invariant(check=invariants.what_a_subgroup_shares_is_read_from_it, applies=_TAGGED),
    Invariant(check=unit_invariants.zero_gradients_are_of_their_parameters, applies=_TAGGED),
    Invariant(check=invariants.no_marker_is_left, applies=_EXPLICIT),
    Invariant(check=invariants.launch_has_one_wait, applies=_EXPLICIT),
    Invariant(check=invariants.deferred_waits_are_for_results, applies=_EXPLICIT),
    Invariant(check=invariants.buffers_in_flight_are_waited_for, applies=_FOLLOWED),
    Invariant(check=invariants.side_streams_meet_the_main_one_at_waits, applies=_EXPLICIT),
    Invariant(check=invariants.nothing_is_written_while_in_use, applies=_EXPLICIT),
    Invariant(check=unit_invariants.units_in_step_are_moved_whole, applies=_FOLLOWED),
    Invariant(check=unit_invariants.objects_are_given_whole_units, applies=_FOLLOWED),
    Invariant(check=invariants.gathers_match_the_plan, applies=_FOLLOWED),
    Invariant(check=invariants.parameters_are_their_slots, applies=_FOLLOWED),
    Invariant(check=invariants.gathered_buffers_are_read_as_parameters, applies=_FOLLOWED),
    Invariant(check=invariants.nothing_is_read_after_reshard, applies=_FOLLOWED),
    Invariant(check=invariants.what_a_subgroup_keeps_is_its_shard, applies=_UNLOWERED),
    Invariant(check=invariants.gradients_reach_their_slots, applies=_FOLLOWED),
    Invariant(check=invariants.gradients_are_reduced_once, applies=_FOLLOWED),
    Invariant(check=invariants.reductions_match_the_plan, applies=_FOLLOWED),
    Invariant(check=invariants.reduced_shards_are_averaged_over_replicas, applies=_FOLLOWED),
    Invariant(check=unit_invariants.copies_between_host_and_device_have_one_wait, applies=_EXPLICIT),
    Invariant(check=unit_invariants.offloaded_shards_are_read_on_the_device, applies=_FOLLOWED),
    Invariant(check=unit_invariants.gradients_of_offloaded_shards_are_on_the_host, applies=_FOLLOWED),
    Invariant(check=invariants.collectives_keep_their_order, applies=_SCHEDULED),
    Invariant(check=invariants.launches_send_what_they_sent, applies=_SCHEDULED),
    Invariant(check=invariants.compute_reads_what_it_read, applies=_ALWAYS),
    Invariant(check=region_invariants.regions_are_called_as_they_were, applies=_ALWAYS),
    Invariant(check=region_invariants.regions_read_what_they_were_traced_with, applies=_UNLOWERED),
    Invariant(check=region_invariants.results_of_regions_share_no_memory, applies=_ALWAYS),
    Invariant(check=invariants.unsharded_bytes_stay_within_the_budget, applies=_LIMITED),
    Invariant(check=invariants.types_agree_with_a_fake_run, applies=_ALWAYS, slow=True),
)
"""Every rule, in the order in which they are checked; `docs/invariants.md` is written from this table."""
