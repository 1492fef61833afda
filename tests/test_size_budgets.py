"""Size budgets: a file fits in one reading, a function on one screen, and the whole has ceilings."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.size_ceilings import CEILINGS, Ceiling

ROOT = Path(__file__).parents[1]
MAX_FILE, MAX_PASS, MAX_FUNCTION = 500, 250, 40  # lines; a docstring does not count against its function

# What may be longer, as "path" or "path:function", and why.
EXCEPTIONS: dict[str, str] = {}


def python_files(*folders: str) -> list[Path]:
    found = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sorted({path.resolve() for path in found})


def file_sizes() -> Iterator[tuple[str, int, int]]:
    for path in python_files("fxshard", "passes", "tests", "benchmarks"):
        budget = MAX_PASS if path.parent == ROOT / "passes" else MAX_FILE
        yield str(path.relative_to(ROOT)), len(path.read_text().splitlines()), budget


def function_sizes() -> Iterator[tuple[str, int, int]]:
    for path in python_files("fxshard", "passes"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{path.relative_to(ROOT)}:{node.name}", num_lines(node), MAX_FUNCTION


def num_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None:
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


@functools.cache
def over_budget() -> dict[str, str]:
    sizes = [*file_sizes(), *function_sizes()]
    return {name: f"{lines} lines, budget {budget}" for name, lines, budget in sizes if lines > budget}


def test_nothing_is_longer_than_its_budget() -> None:
    assert {name: size for name, size in over_budget().items() if name not in EXCEPTIONS} == {}


def test_every_exception_is_still_needed() -> None:
    assert EXCEPTIONS.keys() <= over_budget().keys()


@pytest.mark.parametrize("ceiling", CEILINGS, ids=lambda ceiling: ceiling.what)
def test_no_part_is_above_its_ceiling(ceiling: Ceiling) -> None:
    assert 0 < ceiling.now <= ceiling.most
