"""docs/fsdp2_tests.md: what the tests of other implementations hold, and the test of ours that holds it."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.fsdp2_scenarios import DEEPCOMPILE, FAIRSCALE, FSDP2, Held
from tests.pages import assert_page

TESTS = Path(__file__).parent

HEAD = """# Scenarios of other implementations

These scenarios are tested by torch's FSDP2 (`test/distributed/_composable/fsdp`), DeepSpeed's DeepCompile and \
fairscale. Each links to a test file here, or gives the reason why there is none. `tests/fsdp2_scenarios.py` names the \
tests, and `tests/test_fsdp2_tests_page.py` checks them and writes this page.
"""


def section(title: str, rows: Mapping[str, Held]) -> str:
    """The scenarios below one title."""
    return f"\n{title}\n\n" + "".join(f"- {_shown(scenario, held)}\n" for scenario, held in rows.items())


def _shown(scenario: str, held: Held) -> str:
    if held.why:
        return f"{scenario} (none: {held.why})"
    return f"[{scenario}](../tests/{held.tests[0].partition('::')[0]})"


def page() -> str:
    """The document."""
    parts = [HEAD, "\n## FSDP2\n", *(section(f"### {title}", rows) for title, rows in FSDP2.items())]
    return "".join([*parts, section("## DeepCompile", DEEPCOMPILE), section("## fairscale", FAIRSCALE)])


def every_row() -> Iterator[tuple[str, Held]]:
    for rows in (*FSDP2.values(), DEEPCOMPILE, FAIRSCALE):
        yield from rows.items()


@functools.cache
def names_in(file: str) -> frozenset[str]:
    """The names of the tests that a file below `tests/` defines."""
    path = TESTS / file
    tree = ast.parse(path.read_text() if path.exists() else "")
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_the_page_is_up_to_date() -> None:
    assert_page("docs/fsdp2_tests.md", page())


def test_every_test_that_is_named_is_there() -> None:
    named = [test.split("::") for _, held in every_row() for test in held.tests]
    assert len(named) > 80
    assert [f"{file}::{name}" for file, name in named if name not in names_in(file)] == []


def test_every_scenario_is_held_or_says_why_not() -> None:
    assert [scenario for scenario, held in every_row() if bool(held.tests) == bool(held.why)] == []
