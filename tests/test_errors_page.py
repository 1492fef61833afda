"""docs/errors.md quotes the messages that the code raises: no others, and all of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import fxshard

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/errors.md").read_text()
NOT_HERE = ("tools", "testing")  # the command line says what is wrong with its own flags
ERRORS = ("CheckpointError", "ConfigError", "UnsupportedGraph", "NotImplementedError")
COMMANDS = ("target.py", "targets.py")  # what the command line is given


def trees() -> list[ast.Module]:
    """The library, without its commands and demo."""
    paths = [path for folder in ("fxshard", "passes") for path in (ROOT / folder).rglob("*.py")]
    elsewhere = [path for path in paths if {*path.relative_to(ROOT).parts} & {*NOT_HERE} or path.name in COMMANDS]
    return [ast.parse(path.read_text()) for path in sorted({*paths} - {*elsewhere})]


def text_of(node: ast.AST) -> str:
    """The text of a literal, with dots for what an f-string inserts."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def texts_in_code() -> str:
    """All literals of the library."""
    return "\n".join(text for tree in trees() for node in ast.walk(tree) if (text := text_of(node)))


def raised_messages() -> Iterator[str]:
    """What users may meet: the literals in `raise`, but for reports of our own bugs."""
    for node in (node for tree in trees() for node in ast.walk(tree)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            text = text_of(node.exc.args[0])
            if text and ast.unparse(node.exc.func) in ERRORS:
                yield text


def quoted_messages() -> dict[str, list[str]]:
    """The first column of the tables after the one of classes -> the literal pieces of each message."""
    tables = PAGE.split("## ")[1:]
    rows = [line for table in tables for line in table.splitlines() if line.startswith("| `")]
    messages = [message for row in rows for message in re.findall(r"`([^`]+)`", row.split("|")[1])]
    return {m: [piece for piece in re.split(r"\.\.\.|PROPERTY", m) if piece.strip(" %.:(),;?")] for m in messages}


def test_quotes_only_messages_that_exist() -> None:
    texts = texts_in_code()
    missing = {m: [p for p in pieces if p.strip() not in texts] for m, pieces in quoted_messages().items()}
    assert {message: found for message, found in missing.items() if found} == {}


def test_quotes_every_message_that_users_may_meet() -> None:
    quoted = [pieces for pieces in quoted_messages().values() if pieces]
    raised = list(raised_messages())
    assert len(raised) > 40
    assert [text for text in raised if not any(all(p.strip() in text for p in pieces) for pieces in quoted)] == []


def test_names_every_class_of_error() -> None:
    public = {name: getattr(fxshard, name) for name in fxshard.__all__}
    errors = [name for name, found in public.items() if isinstance(found, type) and issubclass(found, Exception)]
    assert len(errors) == 7
    assert [name for name in errors if f"`{name}`" not in PAGE and f"`fxshard.{name}`" not in PAGE] == []
