"""Compile where Dynamo keeps nothing of it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any, cast

from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo import pgo
from torch._dynamo.convert_frame import Tracker, input_codes, output_codes
from torch._dynamo.eval_frame import cached_backends
from torch._dynamo.utils import CleanupManager, counters

from fxshard.live_objects import referrers_of


@contextmanager
def untouched_dynamo() -> Iterator[None]:
    """Have Dynamo forget, at the end, everything that it compiled inside.

    [Note: Dynamo's caches]
    Dynamo keeps what it compiles with code objects, which all instances of a class share. Compiling a copy of a model
    adds entries that the model's own calls would search and count against the recompile limit, and no entry can be
    removed by itself. So functions that Dynamo knows already run with a copy of their code meanwhile, and code that it
    came to know is reset afterwards, flags included. Sizes noted for automatic dynamic shapes (by file and line, not by
    code object), backends, counters and the lists of code that Dynamo has seen are put back, and what Dynamo put among
    the globals of the model's modules (compiled graphs, functions that resume after a graph break) is removed. Limit: a
    function that is defined anew in every call shares the code of its earlier definitions; if Dynamo knows that,
    entries are added to it.
    """
    known = {id(code): code for code in [*_alive(input_codes), *_alive(output_codes)]}
    borrowed = [(function, function.__code__) for function in _functions_of(known)]
    sizes, counts = copy.deepcopy(dict(pgo.get_code_state())), copy.deepcopy(dict(counters))
    backends = {*cached_backends}
    for function, code in borrowed:
        function.__code__ = code.replace()
    try:
        yield
    finally:
        for function, code in borrowed:
            function.__code__ = code
        for code in _alive(input_codes):
            if id(code) not in known:
                reset_code(code)
        for code in _alive(output_codes):
            if id(code) not in known and code in CleanupManager.instance:
                CleanupManager.instance._remove_id(id(code))
        for tracker in (input_codes, output_codes):  # else the next one inside would look for its functions
            tracker.seen[:] = [each for each in tracker.seen if (seen := each()) is not None and id(seen) in known]
            tracker.seen_ids.intersection_update(known)
        for current, saved in ((pgo.get_code_state(), sizes), (counters, counts)):
            current.clear()
            current.update(cast(Any, saved))
        for key in cached_backends.keys() - backends:
            del cached_backends[key]


def _alive(codes: Tracker) -> list[CodeType]:
    return [code for reference in codes.seen if (code := reference()) is not None]


def _functions_of(codes: dict[int, CodeType]) -> list[FunctionType]:
    owners = referrers_of(*codes.values()) if codes else []
    return [owner for owner in owners if type(owner) is FunctionType and id(owner.__code__) in codes]
