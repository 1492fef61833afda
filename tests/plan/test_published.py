"""The plan against published runs: docs/benchmarks/published.py."""

import importlib.util
import statistics
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from fxshard.errors import ConfigError

FOLDER = Path(__file__).parents[2] / "docs/benchmarks"


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("published", FOLDER / "published.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["published"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rows_that_tuned_nothing_make_the_errors() -> None:
    published = script()
    rows = list(published.rows(FOLDER / "published-runs.csv"))
    assert len(rows) == 18
    found = [(row, SimpleNamespace(tokens_per_second=1.1 * row.tokens_per_second, reserved=2**36)) for row in rows]
    lines = list(published.report(found))
    assert sum("(tuned)" in line for line in lines) == len(published.TUNED) == 6
    assert lines[2].endswith("(tuned)|5,762|6,338|+10.0%|82.4|64.0|-22.3%|")
    assert lines[-1] == "\nrows that tuned nothing: median error 10.0%, worst 10.0%"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": "mpt-8b"}, "row 3: model 'mpt-8b' is none of llama3.1-8b"),
        ({"gpu": "v100"}, "row 3: gpu 'v100' is none of h100-96"),
        ({"params": "7000000000"}, "row 3: llama3.1-8b has 8,030,261,248 parameters here, 7000000000 there"),
    ],
)
def test_a_row_of_something_unknown_is_refused(changed: dict[str, str], message: str) -> None:
    published = script()
    row = list(published.rows(FOLDER / "published-runs.csv"))[3]
    with pytest.raises(ConfigError, match=message):
        published.predict(published.Published(number=3, fields={**row.fields, **changed}))


@pytest.mark.slow  # ten minutes
@pytest.mark.timeout(1800)
def test_published_runs_are_planned_within_the_target() -> None:
    published = script()
    rows = list(published.rows(FOLDER / "published-runs.csv"))
    costs = {row.number: published.predict(row) for row in rows}
    errors = {row.number: abs(costs[row.number].tokens_per_second / row.tokens_per_second - 1) for row in rows}
    untuned = [error for number, error in errors.items() if number not in published.TUNED]
    assert statistics.median(untuned) <= 0.12
    assert max(untuned) <= 0.25
    for row in rows:
        if row.memory_gib is not None:
            assert costs[row.number].reserved / 2**30 == pytest.approx(row.memory_gib, rel=0.1)
