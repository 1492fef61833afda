"""docs/fsdp2_tests.md: the tests that it links to are there, and each scenario has one or says why not."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

TESTS = Path(__file__).parent
ROWS = [line for line in (TESTS.parent / "docs/fsdp2_tests.md").read_text().splitlines() if line.startswith("- ")]


def linked(row: str) -> list[tuple[str, str]]:
    return re.findall(r"\]\(\.\./tests/([\w/]+\.py)#(test_\w+)\)", row)


@functools.cache
def names_in(file: str) -> frozenset[str]:
    path = TESTS / file
    tree = ast.parse(path.read_text() if path.exists() else "")
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_every_test_that_is_named_is_there() -> None:
    named = [test for row in ROWS for test in linked(row)]
    assert len(named) > 80
    assert [test for test in named if test[1] not in names_in(test[0])] == []


def test_every_scenario_is_held_or_says_why_not() -> None:
    assert [row for row in ROWS if row.count("](") != len(linked(row))] == []
    assert [row for row in ROWS if bool(linked(row)) == ("(none: " in row)] == []
