"""The verifier catches every way in which a graph was broken, and passes every graph that was not.

By default one in 40 of the ways, others at each commit; all of them with `-m slow`, as `.ci/run` does.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping

import pytest
import torch
from expecttest import assert_expected_inline

from fxshard.errors import InvariantError
from fxshard.ir import launches
from fxshard.ir.verify.verifier import INVARIANTS, Invariant
from tests.drawn import commit, is_drawn
from tests.mutation import (
    codegen_mutators,
    collective_mutators,
    encoded_mutators,
    gradient_mutators,
    in_step_mutators,
    marker_mutators,
    offload_mutators,
    parameter_mutators,
    region_mutators,
    replica_mutators,
    subgroup_mutators,
)
from tests.mutation.cases import CODEGEN_GIVEN, MODELS, Case, Mutant, correct_cases, mutants, mutated_cases
from tests.mutation.edits import Mutator, launch_nodes
from tests.pages import ROOT, assert_page
from tests.pairwise import slow
from tests.steps import Step, step

pytestmark = pytest.mark.timeout(1800)  # the first test that needs all mutants makes them
EXPLICIT: tuple[Mutator, ...] = (
    *collective_mutators.MUTATORS,
    *parameter_mutators.MUTATORS,
    *gradient_mutators.MUTATORS,
    *region_mutators.MUTATORS,
    *replica_mutators.MUTATORS,
    *subgroup_mutators.MUTATORS,
    *offload_mutators.MUTATORS,
    *in_step_mutators.MUTATORS,
    *encoded_mutators.MUTATORS,
)
RESULTS: tuple[Mutator, ...] = (
    gradient_mutators.return_none,
    gradient_mutators.drop_a_result,
    gradient_mutators.swap_two_results,
    gradient_mutators.return_an_input,
)
MARKED: tuple[Mutator, ...] = (
    *marker_mutators.MUTATORS,
    *RESULTS,
    *region_mutators.MUTATORS,
    *subgroup_mutators.MUTATORS,
    *in_step_mutators.MUTATORS,
)


LONG = frozenset(
    {"gpt", "two_replicas_of_doubles", "offloaded", "in_subgroups", "square_batch", "called_twice", "two_replicas"}
    | {"two_meshes", "encoded", "two_regions"}
)
"""Models whose correct graphs reach no line of the verifier that those of the others do not."""


def mutators_of(case: Case) -> tuple[Mutator, ...]:
    """What breaks a graph of this kind."""
    if case.held == "stage":
        return MARKED if case.kind == "joint" else EXPLICIT
    by_held: dict[str, tuple[Mutator, ...]] = {
        "last": collective_mutators.OF_ORDER,
        "budget": collective_mutators.OF_MEMORY,
        "types": collective_mutators.OF_TYPES,
        **dict.fromkeys(CODEGEN_GIVEN, codegen_mutators.MUTATORS),
    }
    return by_held[case.held]


def all_mutants(*, drawn: bool) -> Iterator[Mutant]:
    for case in mutated_cases():
        for mutator in mutators_of(case):
            if not drawn or is_drawn(f"{mutator.__name__} {case}", one_in=40):
                yield from mutants(case, mutator)


@functools.cache
def outcomes(*, drawn: bool = False) -> tuple[tuple[Mutant, str | None], ...]:
    """Every mutant, or those that were drawn, and the invariant that caught it."""
    return tuple((mutant, mutant.caught_by()) for mutant in all_mutants(drawn=drawn))


@functools.cache
def correct_step(case: Case) -> Step:
    return step(case.traced)


def changes_nothing(mutant: Mutant) -> bool:
    """Whether a step on all ranks gives the same to the bit, and takes no more memory."""
    if mutant.case.kind == "joint" or mutant.case.held != "stage" or mutant.takes_more_memory():
        return False
    expected = correct_step(mutant.case)
    try:
        found = step(mutant.case.with_graph(mutant.graph))
    except (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError, AssertionError):
        return False
    same_grads = found.grads.keys() == expected.grads.keys() and all(
        torch.equal(grad, expected.grads[fqn]) for fqn, grad in found.grads.items()
    )
    return same_grads and all(map(torch.equal, found.outputs, expected.outputs))


@functools.cache
def survivors(*, drawn: bool = False) -> tuple[tuple[Mutant, ...], tuple[Mutant, ...]]:
    """The mutants that were not caught: those that change something, and those that do not."""
    missed = [mutant for mutant, invariant in outcomes(drawn=drawn) if invariant is None]
    harmless = [mutant for mutant in missed if changes_nothing(mutant)]
    return tuple(mutant for mutant in missed if mutant not in harmless), tuple(harmless)


@pytest.mark.parametrize("model", [slow(model) if model in LONG else model for model in MODELS])
def test_passes_every_correct_graph(model: str) -> None:
    for case in correct_cases([model]):
        case.verify(case.graph, debug=True)


SOME, ALL = pytest.param(True, id="one in 40"), pytest.param(False, id="all", marks=pytest.mark.slow)


@pytest.mark.parametrize("drawn", [SOME, ALL])
def test_catches_every_mutant_that_changes_something(drawn: bool) -> None:
    assert outcomes(drawn=drawn)
    missed, _ = survivors(drawn=drawn)
    assert "\n".join(map(str, missed)) == "", f"drawn by commit {commit()}"


@pytest.mark.slow
def test_catches_at_least_three_hundred_mutants_of_five_models() -> None:
    caught = [mutant for mutant, invariant in outcomes() if invariant]
    assert len(caught) >= 300
    assert len({mutant.case.model for mutant in caught}) >= 5


@pytest.mark.slow
def test_every_mutator_breaks_something() -> None:
    counts = Counter(mutant.mutator for mutant, invariant in outcomes() if invariant)
    mutators = {mutator.__name__ for case in mutated_cases() for mutator in mutators_of(case)}
    assert sorted(name for name in mutators if not counts[name]) == []


@pytest.mark.slow
def test_every_invariant_catches_something() -> None:
    names = {invariant for _, invariant in outcomes()}
    assert [invariant.name for invariant in INVARIANTS if invariant.name not in names] == []


@pytest.mark.slow
def test_discards_only_a_few_mutants_that_change_nothing() -> None:
    _, harmless = survivors()
    assert len(harmless) * 20 < len(outcomes())


def test_ranks_that_swap_two_launches_do_not_agree_on_the_order() -> None:
    """What no rank can see alone: the graph is correct, and another one than that of the other ranks."""
    case = Case(model="gpt", world_size=2, dialect="eager", kind="forward")
    expected = launches.sequence(case.graph)
    swapped = 0
    for i, j in itertools.combinations(range(len(expected)), 2):
        if expected[i].text != expected[j].text:
            graph = case.graph
            gathers = launch_nodes(graph)
            gathers[i].prepend(gathers[j])
            case.verify(graph)
            assert [launch.text for launch in launches.sequence(graph)] != [launch.text for launch in expected]
            swapped += 1
    assert swapped


def test_the_error_names_pass_invariant_and_node_and_shows_the_lines_around_it() -> None:
    case = Case(model="two_layers", world_size=2, dialect="eager", kind="forward")
    mutant = next(mutants(case, collective_mutators.name_another_group))
    with pytest.raises(InvariantError) as refused:
        case.verify(mutant.graph)
    assert_expected_inline(
        str(refused.value),
        """\
Mutant() broke `gathers_match_the_plan` in the forward graph at %unshard_layers_0: expected group '0', found 'other'
Rule: An all_gather sends whole slots, as its unit gathers them and in that dtype, to its group; each once per call.

   %shard_layers_0: f32[10] = input  # flat of layers.0
   %x: f32[2, 4] = input
   %shard_layers_1: f32[10] = input  # flat of layers.1
-> %unshard_layers_0: f32[20] = c10d.all_gather_into_tensor(%shard_layers_0, 2, 'other')  # unit=layers.0@0
   %wait_layers_0: f32[20] = c10d.wait_tensor(%unshard_layers_0)  # unit=layers.0@0
   %view: f32[2, 10] = aten.view(%wait_layers_0, [2, 10])
   %slice_1: f32[2, 8] = aten.slice.Tensor(%view, 1, 0, 8)
   %clone: f32[2, 8] = aten.clone(%slice_1, memory_format=contiguous_format)
   %layers_0_weight: f32[4, 4] = aten.view(%clone, [4, 4])  # param=layers.0.weight
   %slice_2: f32[2, 2] = aten.slice.Tensor(%view, 1, 8, 10)
   %clone_1: f32[2, 2] = aten.clone(%slice_2, memory_format=contiguous_format)
   %layers_0_bias: f32[4] = aten.view(%clone_1, [4])  # param=layers.0.bias
   %mm: f32[2, 4] = aten.mm(%x, %layers_0_weight)
   %add: f32[2, 4] = aten.add.Tensor(%mm, %layers_0_bias)

This is a bug in fxshard or in a pass that was added to it: please report it.""",
    )


@pytest.mark.slow
def test_the_page_of_invariants_is_current() -> None:
    if torch.__version__.startswith("2.13."):
        return assert_page("docs/invariants.md", page())
    text = (ROOT / "docs/invariants.md").read_text()
    for invariant in INVARIANTS:
        assert entry(invariant) in text  # what catches which mutant depends on the ops of the installed torch


HEAD = """# Invariants

After every pass the verifier checks the graph against these rules, in this order. The first broken rule is the error. \
`INVARIANTS` in `fxshard/ir/verify/verifier.py` is the table of rules, and `tests/mutation` writes this page from it.

The tests break the correct graphs of {models} models in {mutators} ways, at each place where that is possible. The \
verifier catches {caught} of {total} broken graphs. The other {harmless} give the same outputs and gradients to the \
bit and take no more memory, so they are not wrong. Each rule names its number of caught graphs and the most frequent \
ways to break it.
"""


def page() -> str:
    """The document."""
    caught: dict[str, Counter[str]] = {invariant.name: Counter() for invariant in INVARIANTS}
    for mutant, invariant in outcomes():
        if invariant:
            caught[invariant][mutant.mutator] += 1
    head = HEAD.format(
        models=len({mutant.case.model for mutant, _ in outcomes()}),
        mutators=len({mutant.mutator for mutant, _ in outcomes()}),
        total=len(outcomes()),
        caught=sum(counts.total() for counts in caught.values()),
        harmless=len(survivors()[1]),
    )
    _, heading_of_attacks, attacks = (ROOT / "docs/invariants.md").read_text().partition("\n## Random scripts\n")
    return head + rules(caught) + heading_of_attacks + attacks  # the last section is written by hand


def rules(caught: Mapping[str, Counter[str]]) -> str:
    """The rules in their order, those that follow each other and are checked at one time below one line."""
    parts: list[str] = []
    for when, group in itertools.groupby(INVARIANTS, lambda invariant: invariant.when):
        listed = "\n".join(f"{entry(invariant)} {most_of(caught[invariant.name])}" for invariant in group)
        parts.append(f"\n**{when}**\n\n{listed}\n")
    return "".join(parts)


def entry(invariant: Invariant) -> str:
    return f"- `{invariant.name}`: {invariant.statement}"


def most_of(counts: Counter[str]) -> str:
    """How many graphs a rule catches first, and the two most frequent ways in which they were broken."""
    names = sorted(counts, key=lambda name: (-counts[name], name))
    return f"*{counts.total()}: {', '.join(f'`{name}`' for name in names[:2]) or 'no mutant'}*"
