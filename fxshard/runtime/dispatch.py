"""Compiled graphs that ask, when they run, which of their variants is meant: [Note: variants] in `ir/variant.py`.

[Note: layouts]
Inductor may lay out what it saves as it likes (channels last for convolutions, padded rows on GPUs) and compiles the
backward for that. Every variant of the backward is compiled for what the plain forward saves. Another variant of the
forward need not agree, and the code of a backward checks the strides of its inputs. So what lies otherwise is copied.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxshard import torch_private
from fxshard.errors import FxshardError, InvariantError, RankMismatchError, UnsupportedGraph
from fxshard.ir import collectives
from fxshard.ir.launches import Launch
from fxshard.ir.liveness import hint_of
from fxshard.ir.tags import ShardKey
from fxshard.ir.variant import PLAIN, Slots, Variant
from fxshard.runtime import accumulation, profiler_ranges, rank_check, unsharded_cache
from fxshard.runtime.accumulation import Units
from fxshard.runtime.frame import Frame
from fxshard.runtime.late_gradients import Reduction
from fxshard.runtime.prefetcher import Prefetcher
from fxshard.runtime.rank_check import Agreement


class MemoryLayout(NamedTuple):
    """How a tensor must lie in memory."""

    order: tuple[int, ...]  # its dims, those with the largest strides first
    strides: tuple[int, ...] | None  # of its dims; `None` if one is a symbol, then only the order counts

    def fits(self, value: Tensor) -> bool:
        """Return whether a tensor lies so; the stride of a dim of one row does not count."""
        dims = [dim for dim in self.order if value.shape[dim] > 1]
        strides = [value.stride(dim) for dim in dims]
        if self.strides is None:
            return strides == sorted(strides, reverse=True)
        return strides == [self.strides[dim] for dim in dims]

    def copy_of(self, value: Tensor) -> Tensor:
        """Return a copy that lies so."""
        if self.strides is None:
            made = torch.empty_permuted(value.shape, self.order, dtype=value.dtype, device=value.device)
        else:
            made = torch.empty_strided(value.shape, self.strides, dtype=value.dtype, device=value.device)
        return made.copy_(value)


def layouts_of(inputs: Sequence[Any]) -> dict[int, MemoryLayout]:
    """The layout that code compiled for `inputs` wants of each; nothing where any will do, or memory is shared."""
    found: dict[int, MemoryLayout] = {}
    for i, value in enumerate(inputs):
        if isinstance(value, Tensor) and value.dim() > 1:
            hints = [hint_of(stride) for stride in value.stride()]
            known = tuple(stride for stride in value.stride() if isinstance(stride, int))
            if all(hints):
                order = tuple(sorted(range(value.dim()), key=lambda dim: -hints[dim]))
                found[i] = MemoryLayout(order, known if len(known) == len(hints) else None)
    return found


def restride(inputs: list[Any], layouts: dict[int, MemoryLayout]) -> None:
    """Copy those of `inputs` that lie otherwise than is wanted."""
    for i, layout in layouts.items():
        if not layout.fits(inputs[i]):
            inputs[i] = layout.copy_of(inputs[i])


class GuardedCode:
    """A graph's code, preceded by the ranks' agreement on what it launches; profiles name its launches.

    It takes the inputs in one list, which it empties, and after them the names of the units of this run where they are
    not those of the launches: key in the graph -> name.
    """

    def __init__(self, run: Callable[[list[Any]], Any], kind: str, launches: Sequence[Launch]) -> None:
        """`run` makes these launches, in this order; `kind`: as in `rank_check.CollectiveSequence`."""
        self._run, self._launches, self._agreement = run, launches, Agreement(kind)
        self.takes = False  # whether its last run took gathers that may have been launched before it
        self._renamed: dict[tuple[tuple[str, str], ...], Sequence[Launch]] = {}
        self._boxed_call = True  # AOTAutograd asks for it, and looks for it in the instance

    def __call__(
        self, inputs: list[Any], names: Mapping[str, str] = MappingProxyType({}), *, is_known: bool = True
    ) -> Any:
        """Run the code, once the ranks have agreed on what it launches; `is_known`: as in `Agreement.before`."""
        if not self._launches:
            return self._run(inputs)
        launches = self._launched(names)
        with self._agreement.before(launches, is_known=is_known), profiler_ranges.of_graph(launches):
            return self._run(inputs)

    def waiting(self, names: Mapping[str, str]) -> AbstractContextManager[None]:
        """Return a context for a wait, after a run of units with these names has returned, for what it left."""
        return self._agreement.after(self._launched(names))

    def aligned(self, inputs: Sequence[int], count: int, outputs: Sequence[int]) -> GuardedCode:
        """Return the same, which takes `inputs` of the first `count` and then the rest, and gives `outputs`."""

        def run(given: list[Any]) -> Any:
            chosen = [given[place] for place in inputs] + given[count:]
            given.clear()
            results = self._run(chosen)
            return [results[place] for place in outputs]

        made = copy.copy(self)
        made._run = run
        return made

    def _launched(self, names: Mapping[str, str]) -> Sequence[Launch]:
        if not names:
            return self._launches
        key = tuple(names.items())
        if key not in self._renamed:
            self._renamed[key] = [launch.renamed(names) for launch in self._launches]
        return self._renamed[key]


class Code(NamedTuple):
    """A compiled graph."""

    run: GuardedCode  # its code, which makes the ranks agree first
    layouts: dict[int, MemoryLayout]  # how the inputs must lie in memory; see [Note: layouts] in `runtime/dispatch.py`
    # index of a result that it returns while it is in flight -> the unit and shard whose gradient it is
    late: Mapping[int, ShardKey] = MappingProxyType({})


class Dispatch(ABC):
    """The variants of one graph; all but the plain one are compiled when first needed."""

    def __init__(self, plain: Code, reads: Slots, frame: Frame, compile_variant: Callable[[Variant], Code]) -> None:
        """Begin with one; `compile_variant` gives code that takes the inputs of `plain`, then those of the variant."""
        self._code, self._reads, self._frame, self._compile = {PLAIN: plain}, reads, frame, compile_variant
        self._boxed_call = True  # AOTAutograd asks for it, and looks for it in the instance

    @abstractmethod
    def __call__(self, inputs: list[Any]) -> Any:
        """Run the variant that the units of this call want."""

    def _run(self, code: Code, inputs: list[Any], units: Units) -> Any:
        """Run code on the units of this call; see [Note: prefetch across graphs] on graphs that were not guessed."""
        prefetchers = _prefetchers(units)
        is_known = not code.run.takes or not any(each.goes_another_way(units.values()) for each in prefetchers)
        taken = [each.begin_graph() for each in prefetchers]
        try:
            with rank_check.telling_others(self._groups):
                results = code.run(inputs, self._frame.names_of(units), is_known=is_known)
        except RankMismatchError:
            for prefetcher in prefetchers:
                prefetcher.forget()
            raise
        code.run.takes = taken != [each.num_requests for each in prefetchers]
        return results

    def _resident(self, which: Variant, units: Units) -> list[Tensor]:
        """The parameters that stay gathered, in the order of a variant."""
        if which.resident and self._frame.replays:
            raise UnsupportedGraph(
                "cudagraphs=True and set_reshard_after_backward(False): each replay would copy the parameters that "
                "stay gathered. Leave one out."
            )
        return unsharded_cache.parameters_for(which.resident, units, self._reads)

    def _compiled(self, which: Variant, units: Units) -> Code:
        if which not in self._code:
            try:
                self._code[which] = self._compile(which)
            except (FxshardError, NotImplementedError) as error:
                rank_check.report_failure(self._groups(), str(error))  # the others need not wait for this rank
                for prefetcher in _prefetchers(units):
                    prefetcher.forget()  # as they do
                raise
        return self._code[which]

    def _groups(self) -> set[str]:
        return {name for unit in self._frame.plan.units.values() for name in unit.groups}


def _prefetchers(units: Units) -> list[Prefetcher]:
    return list(dict.fromkeys(unit.model.prefetcher for unit in units.values()))


class ForwardDispatch(Dispatch):
    """The variants of a forward graph, or of one without backward."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._next: tuple[Variant, list[Tensor], Units] | None = None
        self._frame.begin = self._begin

    def _begin(self, units: Units) -> None:
        """Choose for the call that comes next; here, because nothing can be compiled inside an autograd function."""
        for prefetcher in _prefetchers(units):
            prefetcher.require_seen_writes()
        budget, trains = self._frame.resident_budget_bytes, bool(self._frame.trained)
        chosen = torch_private.as_in_forward(
            lambda: unsharded_cache.chosen_for(units, self._reads, budget, trains=trains)
        )
        which = Variant(resident=chosen)
        self._compiled(which, units)
        self._next = which, self._resident(which, units), units
        for unit in units.values():
            unit.model.prefetcher.settle(unit.device)

    def __call__(self, inputs: list[Any]) -> Any:
        """Run the variant that `_begin` has chosen, with the parameters that it takes."""
        if self._next is None:
            raise InvariantError("a captured graph runs, and no call has announced it.")
        (which, parameters, units), self._next = self._next, None
        inputs.extend(parameters)
        self._frame.ran = which
        return self._run(self._compiled(which, units), inputs, units)


class BackwardDispatch(Dispatch):
    """The variants of a backward graph."""

    def __call__(self, inputs: list[Any]) -> Any:
        """Run the variant that the units of this call want."""
        call, self._frame.running = self._frame.running, None
        if call is None:
            raise InvariantError("the backward of a captured graph runs, and no forward has announced it.")
        units, trained = call.units, self._frame.trained
        separate = accumulation.waiting_separately(units, trained, self._frame.reduced_separately)
        sums = accumulation.variant_for(units, trained, separate)
        chosen = unsharded_cache.chosen_for(units, self._reads, self._frame.resident_budget_bytes, trains=True)
        chosen |= call.forward.resident  # of these the forward saved what is not the graph's to write into
        apart = frozenset(
            key for key in trained if key not in sums.accumulates and units[key].step.replica_sums.defers_all_reduce()
        )
        which = dataclasses.replace(sums, resident=chosen, apart=apart)
        code = self._compiled(which, units)  # before anything is launched
        for key, slots in separate.items():
            units[key].model.reduce_separately(units[key], slots)
        inputs.extend(accumulation.sums_for(which, units, trained))
        inputs.extend(self._resident(which, units))
        for unit in units.values():
            unsharded_cache.reshard_if_reduced(unit)  # if they end: then the graph frees each after its last use
        for model in dict.fromkeys(unit.model for unit in units.values()):
            model.late.arrive(keep=self._frame.max_late)
        if call.forward != PLAIN or which != PLAIN:
            restride(inputs, code.layouts)
        results = self._run(code, inputs, units)
        if code.late:
            results = self._deferred(results, code, units)
        accumulation.note_run(which, units, trained)
        return results

    def _deferred(self, results: Sequence[Any], code: Code, units: Units) -> list[Any]:
        left, waiting = list(results), functools.partial(code.run.waiting, self._frame.names_of(units))
        for i, (key, shard) in code.late.items():
            unit, trained = units[key], [slot for j, slot in self._frame.trained[key] if j == shard]
            reduction = Reduction(unit.fqn, functools.partial(collectives.WAIT, results[i]), waiting)
            left[i] = unit.model.late.defer(reduction, unit.shards[shard].sink, trained)
        return left
