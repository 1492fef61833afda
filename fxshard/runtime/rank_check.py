"""Before a compiled graph runs, the ranks compare its collectives, so that a difference is an error, not a hang.

[Note: agreement]
Ranks that launch different collectives hang, or reduce one gradient into another. A rank numbers its runs (of compiled
graphs, and of what is gathered or reduced outside of them), separately for each set of ranks that collectives join (a
`RankGroup`): what is the n-th run on one of them must be the n-th on all. That number is finer than the ordinal of the
root's call; it also orders several models, several graphs of a call, forwards without a backward, and recomputation.
A rank writes a digest of each run's collectives (op, group, dtype, numel) under the run's number into the store of the
default process group: those of many runs in one message without an answer, before it reads what others wrote, and at
the latest after `TELL_AFTER_S` (a message per run took 0.1 ms of processor time).

Only where a run is new does a rank read what the others wrote, and wait until all have come as far: at the first run
of a compiled graph, where these collectives never followed those of the run before (an evaluation on one rank), and
where those that came here the last time had other sizes: unlike sizes that meet end a process on gloo.
Everybody writes before it waits here or in a collective, so this wait ends where that of the first collective would.

Where no run is new, ranks look back: when a backward ends, before an optimizer can step, each reads what up to `PEERS`
others wrote of the runs that are past. Every entry has a hash of all runs up to it, so one entry shows whether any of
them differed: which modules run may hang on a rank's data, and every path be known (a tower for images, one for text).
They do so, too, where a forward ends without gradients, and else once in `LOOK_EVERY` runs.

- What differs without harm is not in the digest: batch sizes, recompilations, cache hits, forward against inference.
- A graph break on one rank only is a difference: a graph is compared before it is known which ones follow.
- Ranks that hold the same shard (a mesh of two axes) compare all of a run that all_reduces gradients, with the gathers
  and reductions over the other axis: in another order across the axes the ranks would wait for each other in a circle.
  So do all that share a unit, where backward gathers over subgroups of them.
- Where some of the ranks that share a unit share another one (experts), or have collectives of the model's own among
  themselves, these compare how theirs and those of all follow each other: then there is one order that all ranks keep.
- A failed compilation takes a number too, with its message, so that the others need not wait for it. So does a
  run that was refused, in the groups that it was not compared in: replicas whose own shards agree would wait for it.
- A rank that turns off a known path may hang in a collective that does not fit. When that fails (the other rank has
  ended), what is in the store explains it: `rank_group.RankGroup.compare`. Where both wait, a thread ends the wait:
  [Note: stalled runs] in `stalled_runs.py`.
- On an accelerator collectives end later than the calls that launch them, and a rank that looks back does not wait for
  one that has not come as far: it looks again at the next step.
- The store forgets nothing, so the numbers share `RING` keys per rank. No rank is that many runs ahead of another:
  they wait for each other's data, and an accelerator's queue of launches is shorter.
- A new default group may come with an old store: a `RankGroup` begins at 1 in a namespace of its own.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch.distributed as dist

from fxshard import torch_private
from fxshard.errors import FxshardError, RankMismatchError
from fxshard.ir.launches import Launch
from fxshard.ir.plan import BY, is_in_subgroup
from fxshard.ranks.rendezvous import is_alone
from fxshard.runtime.rank_group import FAILED, REFUSED, CollectiveSequence, RankGroup
from fxshard.runtime.stalled_runs import TELL_AFTER_S, watching

_log = logging.getLogger(__name__)


@functools.cache
def _rank_groups() -> weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], RankGroup]]:
    return weakref.WeakKeyDictionary()


def _rank_group_of(group_name: str) -> RankGroup | None:
    """Who takes part in the collectives of a group; `None` if that is this process alone."""
    world = dist.group.WORLD
    if world is None or is_alone():
        return None
    group = torch_private.process_group_of(group_name.partition(BY)[0])
    if group.size() == 1 or "fake" in dist.get_backend(group):  # of a new group it is a list of devices
        return None
    rank_groups = _rank_groups().setdefault(world, {})
    ranks = tuple(dist.get_process_group_ranks(group))
    if ranks not in rank_groups:
        rank_groups[ranks] = RankGroup(ranks)
    return rank_groups[ranks]


def report_failure(group_names: Iterable[str], message: str, kind: str = FAILED, told: tuple[object, ...] = ()) -> None:
    """Tell the ranks of these groups that this rank could not compile a graph of theirs, or was refused before it."""
    found = [_rank_group_of(name) for name in sorted(group_names)]
    for rank_group in dict.fromkeys(group for group in found if group is not None and group not in told):
        rank_group.begin(CollectiveSequence.failure(message, kind))


def look_back(group_names: Collection[str], *, are_over: bool) -> None:
    """Compare what is past with other ranks of these groups, whose runs are over or may still be under way."""
    found = [_rank_group_of(name) for name in sorted(group_names)]
    with telling_others(lambda: group_names):
        for rank_group in dict.fromkeys(group for group in found if group is not None):
            rank_group.look_back(is_over=are_over)


@contextmanager
def telling_others(groups: Callable[[], Iterable[str]]) -> Iterator[None]:
    """Around a run of units with these groups, asked for only where it is refused: ranks that come later hear of it."""
    try:
        yield
    except RankMismatchError as error:
        with suppress(RuntimeError):  # the store may be what is lost
            report_failure(groups(), str(error), REFUSED, error.told)
        raise


@contextmanager
def waiting_for_unread(group_names: Collection[str]) -> Iterator[None]:
    """Around a wait for gathers in these groups that nobody reads: it ends where another rank never launched them."""
    found = [_rank_group_of(name) for name in sorted(group_names)]
    rank_groups = dict.fromkeys(group for group in found if group is not None)
    launches = [Launch(name, "all_gather that nobody reads", "outside of graphs", "all_gather") for name in group_names]
    with suppress(RankMismatchError), watching(rank_groups, launches, goes_on=False) as run:
        yield
        if run.why:
            raise RankMismatchError(run.why)  # so that others hear of it


class Agreement:
    """The ranks' agreement on what a graph launches, or one collective outside of graphs, before each run of it."""

    def __init__(self, kind: str) -> None:
        """`kind`: as in `CollectiveSequence`."""
        self._kind = kind
        self._world: Callable[[], dist.ProcessGroup | None] = lambda: None
        # By the units of a run; found once per default process group.
        self._sequences: dict[tuple[str, ...], dict[RankGroup, CollectiveSequence]] = {}
        self._ran = False

    @contextmanager
    def before(self, launches: Sequence[Launch], *, is_known: bool = True, values: str = "") -> Iterator[None]:
        """Around one run that makes these launches; wait for ranks that may make others, or `values`."""
        sequences = self._sequences_of(launches)
        if values:
            sequences = {group: each._replace(values=values) for group, each in sequences.items()}
        for rank_group in sequences:
            if rank_group.is_look_due:
                rank_group.look_back(is_over=False)
        try:
            with watching(sequences, launches) as run:
                self._agree(sequences, run.reason, is_known=is_known)
                with _explained(sequences, run.reason):
                    yield
        except RankMismatchError as error:
            error.told += tuple(sequences)
            raise

    @contextmanager
    def after(self, launches: Sequence[Launch]) -> Iterator[None]:
        """Around a wait for what a run that made these launches has left on the link."""
        sequences = self._sequences_of(launches)
        with watching(sequences, launches) as run, _explained(sequences, run.reason):
            yield

    def _sequences_of(self, launches: Sequence[Launch]) -> Mapping[RankGroup, CollectiveSequence]:
        world = dist.group.WORLD
        if world is None:
            return {}
        if world is not self._world():
            self._sequences.clear()
            self._world, self._ran = weakref.ref(world), False
        units = tuple(launch.serves for launch in launches)
        if units not in self._sequences:
            self._sequences[units] = self._by_rank_group(launches)
        return self._sequences[units]

    def _agree(
        self, sequences: Mapping[RankGroup, CollectiveSequence], never: Callable[[], str], *, is_known: bool
    ) -> None:
        begun = [(rank_group, rank_group.begin(sequence)) for rank_group, sequence in sequences.items()]
        unknown = [rank_group for rank_group, is_news in begun if is_news or not (self._ran and is_known)]
        for rank_group in sequences if unknown else ():
            rank_group.tell()
        for rank_group in unknown:
            rank_group.wait_and_compare(never=never)
        self._ran = self._ran or bool(begun)

    def _by_rank_group(self, launches: Sequence[Launch]) -> dict[RankGroup, CollectiveSequence]:
        on = {launch.group: _rank_group_of(launch.group) for launch in launches}
        found: dict[RankGroup, list[Launch]] = {}
        for launch in launches:
            if (rank_group := on[launch.group]) is not None:
                found.setdefault(rank_group, []).append(launch)
        for rank_group, mine in found.items():
            averages = any(launch.kind == "all_reduce" and launch.serves for launch in mine)
            wider = {name for name, other in on.items() if other is not None and rank_group.ranks < other.ranks}
            if averages or any(is_in_subgroup(launch.serves) for launch in launches if launch not in mine):
                found[rank_group] = [each.on_any_group for each in launches if each.serves or each in mine]
            elif wider:
                found[rank_group] = list(_with_those_of_all(launches, mine, wider))
        return {rank_group: CollectiveSequence.of(self._kind, mine) for rank_group, mine in found.items()}


def _with_those_of_all(launches: Sequence[Launch], mine: Sequence[Launch], wider: Collection[str]) -> Iterator[Launch]:
    """Yield the launches of a rank group, and those for units over groups with more ranks, in their order."""
    shares = any(launch.serves for launch in mine)
    for launch in launches:
        if launch in mine or (launch.serves and launch.group in wider):
            yield launch
        elif shares and not launch.serves:
            yield launch._replace(text=f"{launch.kind} of the model's own")


@contextmanager
def _explained(rank_groups: Iterable[RankGroup], known: Callable[[], str]) -> Iterator[None]:
    """Around a run: where a collective fails, raise what the store knows about it, if anything and if not `known`."""
    try:
        yield
    except FxshardError:
        raise
    except RuntimeError as error:
        if not known():
            _explain(rank_groups, error)
        raise


def _explain(rank_groups: Iterable[RankGroup], error: RuntimeError) -> None:
    for rank_group in rank_groups:
        try:
            rank_group.compare(timeout=2 * TELL_AFTER_S)
            if why := rank_group.known_difference():
                raise RankMismatchError(why)
        except RankMismatchError as mismatch:
            raise mismatch from error
        except (RuntimeError, ValueError) as lost:  # the store is gone as well, or the group
            _log.info("fxshard: the store cannot say why a graph failed: %s", lost)
