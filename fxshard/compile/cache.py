"""Compiled code in torch's caches: what decides it besides the graph, and what comes out on a hit.

See [Note: caches] in `variants.py` and `docs/adr/0006-caches.md`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch._inductor import config as inductor_config
from torch._inductor.output_code import CompiledFxGraph
from torch._library.fake_class_registry import FakeScriptObject
from torch.distributed.device_mesh import DeviceMesh

from fxshard.errors import InvariantError
from fxshard.hardware import HardwareSpec
from fxshard.ir import meshes
from fxshard.ir.collectives import SlotIndex
from fxshard.ir.launches import Launch
from fxshard.ir.plan import FramePlan
from fxshard.ir.tags import ShardKey
from fxshard.options import Options
from fxshard.passes import pipeline as pipelines
from fxshard.passes._base import GraphKind, GraphPass
from fxshard.passes.pipeline import Pipeline
from fxshard.runtime.dispatch import MemoryLayout

Strides = Sequence[tuple[str, ...] | None] | None
"""The strides of each result of a graph, as Inductor writes them; `None` where it does not know."""


@dataclass(frozen=True, kw_only=True)
class CompiledFacts:
    """What fxshard must know of a compiled graph to run it; kept with its code."""

    kind: GraphKind
    launches: tuple[Launch, ...]  # its collectives, in order
    trained: dict[str, list[SlotIndex]]  # as in `Frame`
    reads: dict[str, list[SlotIndex]]  # unit key -> the parameters that the graph gathers
    inputs: tuple[str, ...]  # name and type of each
    outputs: tuple[str, ...]  # type of each
    layouts: dict[int, MemoryLayout]  # of a backward: how its inputs must lie in memory
    strides: Strides = None  # of a forward's results
    late: dict[int, ShardKey] = dataclasses.field(default_factory=dict)  # as in `dispatch.Code`

    @property
    def signature(self) -> list[str]:
        """What the graph takes and gives, without the names of symbolic sizes."""
        # Tracing again makes new names, and may give two to one size. A size stands in brackets; the u8 before them
        # is none.
        return [re.sub(r"\b(?:s|u|zuf|zf)\d+\b(?![\[:])", "n", text) for text in (*self.inputs, "->", *self.outputs)]

    def aligned_with(self, plain: CompiledFacts) -> tuple[list[int], list[int]] | None:
        """Return how to run this graph in place of `plain`, of which it is a variant; `None` if they do not fit.

        For each input of this graph its place in those of `plain`, and for each output of `plain` its place here. To
        trace again may save a size twice that was saved once, or the other way round; all else is equal.
        """
        inputs = _aligned([_typed(text) for text in self.inputs], [_typed(text) for text in plain.inputs])
        outputs = _aligned([("", text) for text in plain.outputs], [("", text) for text in self.outputs])
        return None if inputs is None or outputs is None else (inputs, outputs)


def _typed(text: str) -> tuple[str, str]:
    name, _, kind = text.partition(": ")
    return name, kind


def _aligned(wanted: Sequence[tuple[str, str]], given: Sequence[tuple[str, str]]) -> list[int] | None:
    """For each wanted value, by name and type, its place among the given: sizes by type, the others in their order."""
    sizes = {kind: place for place, (_, kind) in enumerate(given) if kind.startswith("Sym(")}
    others = [place for place, (_, kind) in enumerate(given) if not kind.startswith("Sym(")]
    left, found = iter(others), []
    for name, kind in wanted:
        is_size = kind.startswith("Sym(")
        place = sizes.get(kind) if is_size else next(left, None)
        if place is None or (not is_size and given[place] != (name, kind)):
            return None
        found.append(place)
    return found if next(left, None) is None else None


class CodeOwner(Protocol):
    """The compilation that code belongs to, as a compiler or a cache sees it."""

    found: set[GraphKind]  # the graphs that were compiled, or found in a cache

    def restore(self, facts: CompiledFacts) -> None:
        """Take over what the passes found out when the code was compiled."""

    def prepared(self, code: Callable[..., Any], facts: CompiledFacts) -> Callable[..., Any]:
        """Return what is to run in place of the code."""


class CachedCode(CompiledFxGraph):
    """Inductor's code of one graph in the form in which AOTAutograd caches it; see [Note: caches]."""

    facts: CompiledFacts

    @classmethod
    def of(cls, compiled: CompiledFxGraph, facts: CompiledFacts, owner: CodeOwner) -> CachedCode:
        """Return the same object, ready to run."""
        compiled.__class__ = cls  # a copy would not do: the original's `__del__` ends the code that they share
        code = cast(CachedCode, compiled)
        code.facts = facts
        code._prepare(owner)
        return code

    def post_compile(self, *args: Any, **kwargs: Any) -> None:
        """Prepare code that was found in the cache, in the process that will run it."""
        super().post_compile(*args, **kwargs)
        owner: CodeOwner | None = getattr(inductor_config.custom_partitioner_fn, "owner", None)  # who looks for it
        if owner is None:
            raise InvariantError("compiled code of fxshard was found by somebody else.")
        owner.restore(self.facts)
        self._prepare(owner)

    def _prepare(self, owner: CodeOwner) -> None:
        if self.current_callable is None:
            raise InvariantError("Inductor handed over a graph without code.")
        self.current_callable = owner.prepared(self.current_callable, self.facts)


class _KeyedMesh(FakeScriptObject):
    """A mesh that a graph takes, in torch's key as its axes: by itself it gives another key in each process."""

    def __init__(self, given: FakeScriptObject) -> None:
        for name, value in vars(given).items():
            object.__setattr__(self, name, value)  # the class refuses to be written to

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (repr(meshes.axes_of([self.real_obj])),)


def with_stable_keys(inputs: Sequence[Any], fake: Sequence[Any]) -> list[Any]:
    """Return the inputs of a graph so that torch's key of it is the same in every process; `fake` are Dynamo's."""
    return [
        _KeyedMesh(traced) if isinstance(traced, FakeScriptObject) and isinstance(value, DeviceMesh) else value
        for value, traced in zip(inputs, fake, strict=True)
    ]


_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_log = logging.getLogger(__name__)


def digest(options: Options, plan: FramePlan, pipeline: Pipeline, hardware: HardwareSpec) -> str | None:
    """Hash what decides compiled code besides the graph: equal exactly if two processes may share the code.

    Returns `None` if no text can stand for a value, such as a function: then nothing may be cached. `plan` holds names
    and sizes of process groups, but nothing of this rank. Passes count by class, `version`, fields and source; of
    `hardware` the numbers count, for a file may have changed under its name.
    """
    # `options.passes` is a function; what it returned is the pipeline.
    numbers = dataclasses.replace(hardware, source="")
    values = (dataclasses.replace(options, passes=None, regional=False), plan, pipeline, numbers)
    try:
        parts = [torch.__version__, _own_sources(), *map(stable_text, values), *_foreign_sources(pipeline)]
    except (OSError, TypeError) as error:
        _log.info("fxshard: compiled code is not cached, for a pass has no source file: %s", error)
        return None
    text = "\n".join(parts)
    if found := _ADDRESS.search(text):
        _log.info("fxshard: compiled code is not cached: %s", text[max(0, found.start() - 100) : found.end()])
        return None
    return hashlib.sha256(text.encode()).hexdigest()


def stable_text(value: Any) -> str:
    """Return `repr`, but with all fields of a dataclass, and independent of the order of sets and mappings."""
    if isinstance(value, GraphPass):
        cls = type(value)  # no field need be declared as one
        return f"{cls.__module__}.{cls.__qualname__} v{value.version} {stable_text(vars(value))}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return f"{type(value).__qualname__} {stable_text(fields)}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{stable_text(key)}: {stable_text(item)}' for key, item in value.items()))}}}"
    if isinstance(value, Set):
        return f"{{{', '.join(sorted(map(stable_text, value)))}}}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(stable_text, value))})"
    return repr(value)


@functools.cache
def _own_sources() -> str:
    """Hash fxshard itself: a new release, or an edit, may compile other code."""
    package, passes = Path(__file__).resolve().parents[1], Path(pipelines.__file__).resolve().parent  # may be a link
    folders = {package, passes}
    return _hash_of({path for folder in folders for path in folder.rglob("*.py")})


def _foreign_sources(pipeline: Pipeline) -> Iterator[str]:
    passes = chain.from_iterable(getattr(pipeline, stage.name) for stage in dataclasses.fields(pipeline))
    classes = {c for step in passes for c in type(step).__mro__}
    foreign = {c for c in classes if c.__module__.partition(".")[0] not in ("fxshard", "abc", "builtins")}
    files = {inspect.getsourcefile(c) for c in foreign}
    if None in files:
        raise OSError("its class was not read from a file")
    yield _hash_of({Path(file) for file in files if file is not None})


def _hash_of(files: Iterable[Path]) -> str:
    total = hashlib.sha256()
    for name, content in sorted((file.name, file.read_bytes()) for file in files):  # wherever they are installed
        total.update(f"{name} {len(content)}\n".encode() + content)
    return total.hexdigest()
