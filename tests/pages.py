"""Documents whose graphs and code come from the library: fill them in, or check that they are up to date.

A place in a document is a line `<!-- name -->`; the code block after it is generated.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path

from tests.graphs import accepts

ROOT = Path(__file__).parents[1]
PLACE = re.compile(r"^<!-- (?P<name>[^\n]+) -->\n(?:\n```\w*\n.*?\n```\n)?", flags=re.MULTILINE | re.DOTALL)


def code_block(text: str, language: str = "text") -> str:
    return f"```{language}\n{text.strip()}\n```"


def filled(page: str, blocks: Mapping[str, str]) -> str:
    """The page with each of `blocks`, all of which it must have a place for, in its place."""
    places = [match["name"] for match in PLACE.finditer(page)]
    assert sorted(places) == sorted(blocks), f"places {places}, blocks {list(blocks)}"
    return PLACE.sub(lambda match: f"<!-- {match['name']} -->\n\n{blocks[match['name']]}\n", page)


def assert_page(path: str, expected: str) -> None:
    """Compare with a document, or write it where expected texts are accepted."""
    page = ROOT / path
    if accepts():
        page.parent.mkdir(exist_ok=True)
        page.write_text(expected)
    assert page.read_text() == expected, f"{path} is out of date; EXPECTTEST_ACCEPT=1 writes it anew"


def assert_filled(path: str, blocks: Mapping[str, str]) -> None:
    """Compare the generated parts of a document, or write them where expected texts are accepted."""
    assert_page(path, filled((ROOT / path).read_text(), blocks))


def changes(before: str, after: str) -> str:
    """What differs between two texts as a fenced block: one line around each change, and dots between them."""
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=1))[2:]
    return code_block("\n".join("..." if line.startswith("@@") else line for line in lines), "diff")
