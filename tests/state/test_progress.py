"""A bar for whoever sits at a terminal, and nothing for anybody else."""

from __future__ import annotations

import contextlib
import io

import pytest

from fxshard.state.progress import showing


class Terminal(io.StringIO):
    """Says that it is one."""

    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO, *sizes: int) -> str:
    with contextlib.redirect_stderr(stream), showing("optimizer state", sizes) as advance:
        advance(sum(sizes))
    return stream.getvalue()


def test_shows_how_much_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    text = shown(Terminal(), 3_000_000, 1_000_000)
    assert "optimizer state" in text
    assert "4.0/4.0 MB" in text


def test_is_silent_where_there_is_no_terminal() -> None:
    assert shown(io.StringIO(), 4_000_000) == ""


def test_is_silent_where_nothing_moves() -> None:
    assert shown(Terminal()) == ""


def test_is_silent_where_there_is_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = Terminal()
    closed.close()
    for stream in (None, closed):
        monkeypatch.setattr("sys.stderr", stream)
        with showing("optimizer state", [1]) as advance:
            advance(1)
