"""What decides compiled code besides the graph, as one digest for torch's caches; see `docs/adr/0006-caches.md`."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import logging
import re
from collections.abc import Iterator, Mapping, Set
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from fxshard.cost.hardware import HardwareSpec
from fxshard.ir.plan import FramePlan
from fxshard.options import Options
from fxshard.passes import pipeline as pipelines
from fxshard.passes._base import GraphPass
from fxshard.passes.pipeline import Pipeline

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_log = logging.getLogger(__name__)


def digest(options: Options, plan: FramePlan, pipeline: Pipeline, hardware: HardwareSpec) -> str | None:
    """The same in two processes exactly if they may share compiled code of equal graphs.

    Args:
        options: the user's.
        plan: of the frame; holds names and sizes of process groups, but nothing of this rank.
        pipeline: its passes count by their class, `version`, fields and source.
        hardware: what the passes weigh costs with; a file may have changed under its name.

    Returns:
        A hash; `None` where no text can stand for a value, such as a function: then nothing may be cached.
    """
    # `options.passes` is a function; what it returned is the pipeline.
    values = (dataclasses.replace(options, passes=None), plan, pipeline, hardware)
    try:
        parts = [torch.__version__, _own_sources(), *map(_stable, values), *_foreign_sources(pipeline)]
    except (OSError, TypeError) as error:
        _log.info("fxshard: compiled code is not cached, for a pass has no source file: %s", error)
        return None
    text = "\n".join(parts)
    if found := _ADDRESS.search(text):
        _log.info("fxshard: compiled code is not cached: %s", text[max(0, found.start() - 100) : found.end()])
        return None
    return hashlib.sha256(text.encode()).hexdigest()


def _stable(value: Any) -> str:
    """`repr`, but with all fields of a dataclass, and independent of the order of sets and mappings."""
    if isinstance(value, GraphPass):
        cls = type(value)  # no field need be declared as one
        return f"{cls.__module__}.{cls.__qualname__} v{value.version} {_stable(vars(value))}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return f"{type(value).__qualname__} {_stable(fields)}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{_stable(key)}: {_stable(item)}' for key, item in value.items()))}}}"
    if isinstance(value, Set):
        return f"{{{', '.join(sorted(map(_stable, value)))}}}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_stable, value))})"
    return repr(value)


@functools.cache
def _own_sources() -> str:
    """A hash of fxshard itself: a new release, or an edit, may compile other code."""
    folders = {Path(file).resolve().parent for file in (__file__, pipelines.__file__)}  # fxshard/passes may be a link
    return _hash_of({path for folder in folders for path in folder.rglob("*.py")})


def _foreign_sources(pipeline: Pipeline) -> Iterator[str]:
    """Hashes of the files that define the passes which are not fxshard's own."""
    classes = {c for step in chain(pipeline.joint, pipeline.split, pipeline.last) for c in type(step).__mro__}
    foreign = {c for c in classes if c.__module__.partition(".")[0] not in ("fxshard", "abc", "builtins")}
    files = {inspect.getsourcefile(c) for c in foreign}
    if None in files:
        raise OSError("its class was not read from a file")
    yield _hash_of({Path(file) for file in files if file is not None})


def _hash_of(files: Set[Path]) -> str:
    total = hashlib.sha256()
    for file in sorted(files, key=lambda file: (file.name, file.parent.name)):  # wherever it is installed
        content = file.read_bytes()
        total.update(f"{file.name} {len(content)}\n".encode() + content)
    return total.hexdigest()
