"""The classes of errors; docs/errors.md lists the messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FxshardError(Exception):
    """Base of all errors raised by fxshard: what failed, where, what was expected and found, what to do."""


class ConfigError(FxshardError, ValueError):
    """The user asked for something that cannot be done as asked: a wrong option, mesh, parameter or order of calls."""


class UnsupportedGraph(FxshardError, RuntimeError):
    """The model or the way it is run is legal PyTorch, but fxshard declines it by name."""


class InvariantError(FxshardError, AssertionError):
    """A graph or the runtime broke one of fxshard's own rules: a bug in fxshard, or in a third-party pass."""

    def __init__(self, message: str) -> None:
        super().__init__(f"{message}\nThis is a bug in fxshard or in a pass that was added to it: please report it.")


class RankMismatchError(FxshardError, RuntimeError):
    """The ranks are about to launch different collectives, or one of them never came."""

    told: tuple[object, ...] = ()
    """The groups of ranks whose members meet the run that was refused, or its error, by themselves."""


class CheckpointError(FxshardError, RuntimeError):
    """A checkpoint is missing, damaged or does not fit, or could not be written; what was there before still is."""


class MissingExtraError(FxshardError, ImportError):
    """An optional dependency is needed; the message is the pip line that installs it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed. Type: python -m pip install 'fxshard[{extra}]'")


def nearest(name: object, known: Iterable[str]) -> str:
    """Of the known names the one that was probably meant; nothing if none is known."""
    return next(iter(difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.0)), "")
