"""Plain English in docs, docstrings and comments: words of a private dialect do not come back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PLAIN = {
    "in vain": "without success",
    "let be": "ignored",
    "its affair": "a matter of another part",
    "whoever": "the code that",
    "news": "new, or a message",
    "mend": "fix",
    "strays": "unexpected reads",
    "patience": "timeout",
    "held against": "compared with",
}
"""Words that a reader has to guess at -> what to write instead."""

FILES = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("fxshard/**/*.py"), *ROOT.glob("passes/*.py")]


@pytest.mark.parametrize("word", PLAIN)
def test_says_it_in_plain_words(word: str) -> None:
    pattern = re.compile(rf"\b{word}\b", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in FILES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found, f"write {PLAIN[word]!r}"
