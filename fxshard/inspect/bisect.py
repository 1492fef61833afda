"""`bisect_numerics`: which scheduling pass is the first to change a bit, and at which node.

A pass that `reorders_only` may decide when things happen, not what comes out. The graphs before and after each such
pass run on the same values, on all ranks in this process ([Note: lockstep]), and every node that both have is compared.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from fxshard import torch_private
from fxshard.compile import backend
from fxshard.compile.inductor import require_known_flags
from fxshard.errors import ConfigError, UnsupportedGraph
from fxshard.inspect.all_ranks import AllRanksRun, Captured, InputValues, PerRank, constant, originals_of, run
from fxshard.inspect.explain import nothing_captured, type_name
from fxshard.inspect.fake_model import FakeModel, fake_model_of
from fxshard.ir import signature, tags
from fxshard.ir.history import CAPTURED, PassResult, Stage
from fxshard.ir.text import name_of, window
from fxshard.options import Options, parse
from fxshard.passes import pipeline
from fxshard.passes._base import GraphPass, PassContext, Property
from fxshard.passes.pipeline import CODEGEN_GIVEN, LAST_GIVEN, SPLIT_GIVEN, Pipeline
from fxshard.runtime.frame import Frame
from fxshard.runtime.raw import as_bytes
from fxshard.sharding.sharded_module import plain_module, units_under

_DEFAULT_RANKS = 2
_SEED = 0


@dataclass(frozen=True, kw_only=True)
class BitDifference:
    """The first bit that a pass changed.

    Attributes:
        frame: index of the captured graph, in the order of capture.
        stage: `forward`, `backward` or `inference`; `forward_last`, ... after Inductor's own passes, `forward_codegen`,
            ... right before there is code.
        pass_name: of the pass.
        node: the first node whose value differs, as it prints after the pass.
        max_difference: between the two values, over all elements and ranks; infinite where shape or dtype differ or
            only one is NaN, 0 where only the sign of a zero or the bits of a NaN differ.
        window: the graph after the pass, around the node.
    """

    frame: int
    stage: str
    pass_name: str
    node: str
    max_difference: float
    window: str = field(repr=False)

    def __str__(self) -> str:
        return (
            f"{self.pass_name} is the first pass to change a bit: in the {self.stage} graph of frame {self.frame}, "
            f"{self.node} differs by up to {self.max_difference:g}.\n{self.window}"
        )


def bisect_numerics(
    model: nn.Module,
    *args: Any,
    world_size: int | None = None,
    options: Mapping[str, Any] | None = None,
    all_passes: bool = False,
    **kwargs: Any,
) -> BitDifference | None:
    """Name the first pass and node that change a bit of what a model computes; on one process, without a group.

    The graphs are those of `explain`, interpreted node by node, with the parameters and inputs that are given. Other
    ranks than the first get floating-point inputs of their own, derived from these. What only a run of the whole model
    knows is random with a fixed seed: gradients of the outputs, and what flows from one captured graph into the next.
    Random ops start from the same seed in every run. The model, its gradients and a process group stay as they are.

        print(fxshard.bisect_numerics(model, tokens, options={"passes": my_pipeline}))

    Args:
        model: as for `explain`, but with values: not on meta.
        *args: of the model's forward.
        world_size: ranks to simulate, 2 by default; of a sharded model those that it is sharded over, of which this
            process knows its own rows only: the others get the same values in another order.
        options: as for `torch.compile(model, backend="fxshard", options=...)`; `lower` is "eager" unless given.
        all_passes: whether to compare also passes that are not `reorders_only`.
        **kwargs: of the model's forward.

    Returns:
        The first difference in the order in which the passes ran; `None` if every pass left every bit alone.

    Raises:
        ConfigError: a parameter or input has no values, units are shared by numbers of ranks of which one is no
            multiple of another, or what `explain` raises it for.
        UnsupportedGraph: as `explain`, or a graph has a collective of which no size is known.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"bisect_numerics expects an nn.Module, got {type(model).__name__}.")
    model = plain_module(model)
    _require_values(model, args, kwargs)
    parsed = parse({"lower": "eager", **(options or {})})
    require_known_flags(parsed)
    if world_size is None and parsed.mesh is None and not units_under(model):
        world_size = _DEFAULT_RANKS
    keeper = _Keeper()
    chosen = _keeping(pipeline.chosen(parsed), keeper)
    fake_model = fake_model_of(model, world_size=world_size, options=parsed)
    captures = _capture(fake_model, args, kwargs, dataclasses.replace(parsed, passes=lambda _: chosen))
    if not captures:
        raise nothing_captured(type_name(model))
    num_ranks = _num_ranks(fake_model.model)
    originals = originals_of(model, (args, kwargs), fake_model)
    for number, captured in enumerate(captures):
        values = InputValues(captured, originals, {id(leaf) for leaf in tree_leaves((args, kwargs))}, num_ranks)
        found = _Bisection(captured, values, chosen, keeper, all_passes).first(number)
        if found is not None:
            return found
    return None


def _num_ranks(model: nn.Module) -> int:
    sizes = sorted({unit.world_size for unit in units_under(model)})
    if any(sizes[-1] % size for size in sizes):
        raise ConfigError(
            f"bisect_numerics: units are shared by different numbers of ranks, {', '.join(map(str, sizes))}, of which "
            "one is no multiple of another. Bisect a part of the model that has one mesh, or one that is not sharded, "
            "with world_size=...."
        )
    return sizes[-1]


def _require_values(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    tensors += [("an input", leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    for name, tensor in tensors:
        if tensor.is_meta or torch_private.is_fake(tensor):
            raise ConfigError(
                f"{name} has no values (it is on the meta device or fake), but bisect_numerics compares values. Call "
                "model.to_empty(device=...) and initialize the parameters, and pass real inputs."
            )


# ---- capture


@dataclass(frozen=True, kw_only=True)
class _Keeper(GraphPass):
    """Changes nothing; keeps the module of each graph, for what its `get_attr` nodes read."""

    modules: dict[tuple[int, str], fx.GraphModule] = field(default_factory=dict, repr=False)

    def apply(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        self.modules[id(ctx.history), next(reversed(ctx.history.stages))] = gm
        return False


def _keeping(chosen: Pipeline, keeper: _Keeper) -> Pipeline:
    stages = {name: getattr(chosen, name) for name in ("split", "last", "codegen")}
    return dataclasses.replace(chosen, **{name: (keeper, *passes) for name, passes in stages.items() if passes})


def _capture(fake_model: FakeModel, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> list[Captured]:
    frames: list[Frame] = []
    captures: list[Captured] = []

    def keep(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        called = backend.capture_only(gm, inputs, options, frames)
        if len(frames) > len(captures):
            captures.append(Captured(frame=frames[-1], inputs=tuple(inputs)))
        return called

    try:
        fake_model.compile(keep, args, kwargs)
    except torch_private.NO_VALUE as error:
        raise UnsupportedGraph(
            f"the forward reads values of a tensor ({error.func}), but bisect_numerics captures graphs on tensors "
            "that have none. Take the read out of forward, or bisect the part of the model before it."
        ) from error
    return captures


# ---- comparison


class _Bisection:
    """One frame: which graphs to compare, on which values."""

    def __init__(
        self, captured: Captured, values: InputValues, chosen: Pipeline, keeper: _Keeper, all_passes: bool
    ) -> None:
        self._history, self._values, self._keeper = captured.frame.history, values, keeper
        self._chosen, self._all_passes = chosen, all_passes
        self._left: dict[str, dict[str, PerRank]] = {}

    def first(self, number: int) -> BitDifference | None:
        for records in self._history.stages.values():
            before: tuple[PassResult, AllRanksRun] | None = None
            for record, previous, only_reorders in self._suspects([*records.values()]):
                known = before[1] if before and before[0].graph is previous.graph else self._run(previous)
                ran = self._run(record)
                if (found := _difference(record.graph, known, ran, launches=only_reorders)) is not None:
                    return BitDifference(
                        frame=number,
                        stage=str(record.stage),
                        pass_name=record.name,
                        node=f"%{name_of(found.node)}",
                        max_difference=found.gap,
                        window=window(found.place),
                    )
                before = record, ran
        return None

    def _suspects(self, found: Sequence[PassResult]) -> Iterator[tuple[PassResult, PassResult, bool]]:
        """Each pass of a stage: its record, the one before, and whether it promises to do nothing but reorder."""
        stage = found[0].stage
        if stage.kind in ("dynamo", "joint"):
            return
        steps = getattr(self._chosen, stage.phase or "split")
        known = {*{"": SPLIT_GIVEN, "last": LAST_GIVEN, "codegen": CODEGEN_GIVEN}[stage.phase]}
        for step, record, previous in zip(steps, found[1:], found[:-1], strict=True):
            runs = Property.COLLECTIVES in known and record.changed
            if runs and (step.reorders_only or self._all_passes):
                yield record, previous, step.reorders_only
            known |= step.ensures

    def _run(self, record: PassResult, *, keep: bool = True) -> AllRanksRun:
        values = self._values.of(record.graph, self._saved(record.stage))
        owner = self._keeper.modules[id(self._history), str(record.stage)]
        reads = {node.target for node in record.graph.find_nodes(op="get_attr")}
        attributes = {name: constant(owner, name) for name in reads}
        devices = {v.device for v in tree_leaves(values) if isinstance(v, Tensor) and v.device.type == "cuda"}
        with torch.random.fork_rng(devices=devices):
            torch.default_generator.manual_seed(_SEED)
            for device in devices:
                torch.cuda.default_generators[device.index].manual_seed(_SEED)
            return run(record.graph, values, attributes, keep=keep)

    def _saved(self, stage: Stage) -> dict[str, PerRank]:
        forward = str(replace(stage, kind="forward"))
        if stage.kind != "backward" or forward not in self._history.stages:
            return {}
        if forward not in self._left:
            # Backward knows them by the names that they had before the passes of forward.
            results: Any = self._history.stages[forward][CAPTURED].graph.output_node().args[0]
            ran = self._run(self._history.last(forward), keep=False)
            pairs = zip(results, ran.results, strict=True)
            self._left[forward] = {result.name: value for result, value in pairs if isinstance(result, fx.Node)}
        return self._left[forward]


@dataclass(frozen=True, kw_only=True)
class _Found:
    """A difference: the node, the place in the graph to show, and how large it is."""

    node: fx.Node
    place: fx.Node
    gap: float


def _difference(after: fx.Graph, expected: AllRanksRun, actual: AllRanksRun, *, launches: bool) -> _Found | None:
    """The first node of both graphs with other bits, else the first such result; only some passes keep `launches`."""
    for node in after.nodes:
        is_ours = bool(tags.meta_of(node).calls)
        if node.name in expected.values and node.name in actual.values and (launches or not is_ours):
            gap = _gap(expected.values[node.name], actual.values[node.name])
            if gap is not None:
                return _Found(node=node, place=node, gap=gap)
    output = after.output_node()
    for member, before, now in zip(signature.results_of(after), expected.results, actual.results, strict=False):
        gap = _gap(before, now)
        if gap is not None:
            return _Found(node=member if isinstance(member, fx.Node) else output, place=output, gap=gap)
    same_number = len(expected.results) == len(actual.results)
    return None if same_number else _Found(node=output, place=output, gap=math.inf)


def _gap(expected: Any, actual: Any) -> float | None:
    """The largest difference between two values, `None` if their bits are equal."""
    left, right = tree_leaves(expected), tree_leaves(actual)
    if len(left) != len(right):
        return math.inf
    return max((gap for pair in zip(left, right, strict=True) if (gap := _leaf_gap(*pair)) is not None), default=None)


def _leaf_gap(left: Any, right: Any) -> float | None:
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return None if left == right else math.inf
    if left.shape != right.shape or left.dtype != right.dtype:
        return math.inf
    if torch.equal(_bits(left), _bits(right)):
        return None
    if bool((left.isnan() != right.isnan()).any()):
        return math.inf
    wide = torch.complex128 if left.is_complex() else torch.float64
    return float((left.to(wide) - right.to(wide)).abs().nan_to_num(nan=0.0, posinf=math.inf).max())


def _bits(tensor: Tensor) -> Tensor:
    return as_bytes(tensor.resolve_conj().resolve_neg())
