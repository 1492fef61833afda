"""docs/fsdp2_tests.md: what the tests of other implementations hold, and the test of ours that holds it."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.fsdp2_scenarios import DEEPCOMPILE, FAIRSCALE, FSDP2, Held
from tests.pages import assert_page

TESTS = Path(__file__).parent

HEAD = """# Beside the tests of FSDP2, DeepCompile and fairscale

What the tests of torch's FSDP2 (`test/distributed/_composable/fsdp`), of DeepSpeed's DeepCompile and of \
fairscale's FSDP hold, in our words, and which test below `tests/` holds it here; "none" says why. The page is \
generated from `tests/fsdp2_scenarios.py` by `tests/test_fsdp2_tests_page.py`, which checks that every test is there.
"""


def table(title: str, rows: Mapping[str, Held]) -> str:
    """One table of the document."""
    lines = [f"| {scenario} | {_shown(held)} |" for scenario, held in rows.items()]
    return "\n".join([f"\n{title}\n", "| scenario | held by |", "|---|---|", *lines]) + "\n"


def _shown(held: Held) -> str:
    return "<br>".join(f"`{test}`" for test in held.tests) or f"none: {held.why}"


def page() -> str:
    """The document."""
    parts = [HEAD, "\n## FSDP2\n", *(table(f"### {title}", rows) for title, rows in FSDP2.items())]
    return "".join([*parts, table("## DeepCompile", DEEPCOMPILE), table("## fairscale", FAIRSCALE)])


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
