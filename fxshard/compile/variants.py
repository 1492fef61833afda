"""Compile a captured graph, and later its variants: from Dynamo's graph to code that a frame runs.

[Note: caches]
AOTAutograd looks for a Dynamo graph in its cache before any of our passes runs. So that a hit is worth as much as a
compilation, what goes in is a `CachedCode`: Inductor's code with the facts that our passes found out. When it comes
out, it puts the ranks' agreement before its collectives and tells the frame. A backward is compiled along with its
forward, because an entry is made of both. The history of a hit has only the captured graph until somebody looks
(`LazyHistory`). What the key consists of is in `compile/cache.py`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config

from fxshard import torch_private
from fxshard.compile import cudagraphs, inductor, interpreter
from fxshard.compile.cache import CompiledFacts, with_stable_keys
from fxshard.compile.stages import Stages
from fxshard.errors import InvariantError, UnsupportedGraph
from fxshard.ir import meshes
from fxshard.ir.history import LazyHistory, PassResult, with_variant
from fxshard.ir.variant import Variant
from fxshard.options import Options
from fxshard.passes._base import GraphKind
from fxshard.passes.bind_markers import BindMarkers
from fxshard.passes.pipeline import Pipeline
from fxshard.runtime.dispatch import BackwardDispatch, Code, ForwardDispatch, GuardedCode
from fxshard.runtime.frame import Frame


def lower(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    frame: Frame,
    pipeline: Pipeline,
    options: Options,
    *,
    generate_code: bool = True,
    saves_all: bool = False,
) -> None:
    """Compile a captured graph; set `frame.compiled` and fill `frame.history`.

    Without `generate_code` Inductor stops before code, the graphs are interpreted node by node, and backward is
    compiled at once even where AOTAutograd would wait for its first run. `saves_all` as of `Stages`.
    """
    stages = Stages(frame, pipeline, options, generate_code=generate_code, saves_all=saves_all)
    stages.capture(gm)
    frame.compiled = Compilation(stages).run(gm, inputs)


@dataclass(frozen=True, kw_only=True)
class CompileContext:
    """The surroundings of one compilation, kept for one that comes later."""

    inputs: list[Any]  # of the graph, fake
    mode: Any  # their fake mode
    grad: bool  # whether gradients are recorded
    autocast: tuple[str, torch.dtype, bool]  # device type, dtype and whether it is on

    @classmethod
    def capture(cls, graph: fx.Graph) -> CompileContext:
        """Keep those of a compilation of `graph`, which Dynamo captured, that begins now."""
        inputs = [node.meta.get("example_value") for node in graph.find_nodes(op="placeholder")]
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        device = tensors[0].device.type  # a flat is among them
        autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        return cls(inputs=inputs, mode=torch_private.mode_of(tensors), grad=torch.is_grad_enabled(), autocast=autocast)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore them, outside of all dispatch modes, as they were then: a forward's may be on by now."""
        device, dtype, on = self.autocast
        grad, autocast = torch.set_grad_enabled(self.grad), torch.autocast(device, dtype, on)
        with torch_private.without_modes(), torch_private.tracing_in(self.mode), grad, autocast:
            yield


class Compilation:
    """One compilation of a captured graph, and how its variants are made later; `found` are the kinds of its graphs."""

    def __init__(self, stages: Stages) -> None:
        self.found: set[GraphKind] = set()
        self._stages, self._frame = stages, stages.frame
        self._history = stages.history
        self._bound = self._history.stages["dynamo"][BindMarkers().name].kept  # what Dynamo captured, with markers
        self._context = CompileContext.capture(self._bound.graph)
        self._made: dict[GraphKind, tuple[GuardedCode, CompiledFacts]] = {}

    def run(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile the captured graph."""
        cached = self._may_be_cached(inputs)
        with functorch_config.patch(self._aot_patches(cached=cached)):
            if self._stages.options.lower == "eager":
                return interpreter.interpret(gm, inputs, self._stages, self)
            keyed = with_stable_keys(inputs, self._context.inputs) if cached else inputs
            compiled = inductor.compile_with_inductor(gm, keyed, self._stages, self)
        if not self.found:
            raise InvariantError("AOTAutograd returned code that fxshard has not seen.")
        return compiled

    def _may_be_cached(self, inputs: Sequence[Any]) -> bool:
        if self._stages.digest is None:  # no text stands for one of its passes or options
            return False
        if self._stages.options.cudagraphs:  # they are recorded in the process that replays them
            return False
        # The cache knows a tensor subclass by its global shape: one rank would get the code of another's rows.
        if any(isinstance(value, Tensor) and torch_private.is_wrapper(value) for value in inputs):
            return False
        # It computes with DTensors, in functions of Dynamo's that no text stands for.
        if self._stages.frame.plan.model_axes and not meshes.ARE_INPUTS:
            return False
        return bool(functorch_config.enable_autograd_cache)

    def _aot_patches(self, *, cached: bool) -> dict[str, Any]:
        stages = self._stages
        # Inductor takes the numbers of the inputs that backward may overwrite for those of a region's inputs, too; and
        # what a resident forward saves may be the unit's own copy.
        shares = bool(stages.history.regions) or stages.variant.resident
        may_overwrite = {"donated_buffer": False} if shares else {}
        if not stages.generate_code or stages.only is not None:
            at_once = stages.only in (None, "backward")
            return {"enable_autograd_cache": False, "force_non_lazy_backward_lowering": at_once, **may_overwrite}
        if not cached or stages.options.lower == "eager":
            return {"enable_autograd_cache": False, **may_overwrite}
        return {"bundled_autograd_cache": True, "force_non_lazy_backward_lowering": True, **may_overwrite}

    def prepared(self, code: Callable[..., Any], facts: CompiledFacts) -> Callable[..., Any]:
        """Return a graph's code behind the choice of its variant and the ranks' agreement."""
        code = cudagraphs.guarded(self._stages.options, code, facts.kind, counters["inductor"])
        run = GuardedCode(code, facts.kind, facts.launches)
        self._made[facts.kind] = run, facts
        if self._stages.only is not None:
            return run
        dispatch = BackwardDispatch if facts.kind == "backward" else ForwardDispatch
        compile_variant = functools.partial(self._compile_variant, facts.kind)
        return dispatch(Code(run, facts.layouts, facts.late), facts.reads, self._frame, compile_variant)

    def restore(self, facts: CompiledFacts) -> None:
        """Tell the frame what the passes found out when this code, found in a cache, was compiled."""
        self.found.add(facts.kind)
        self._frame.trained.update({unit: list(slots) for unit, slots in facts.trained.items()})
        if not isinstance(self._frame.history, LazyHistory):
            self._frame.history = LazyHistory(self._replay)

    def _compile_variant(self, kind: GraphKind, which: Variant) -> Code:
        other = self._again(which, kind, generate_code=True)
        made, plain = other._made.get(kind), self._made[kind][1]
        is_same = made is not None and made[1].signature == plain.signature
        aligned = made[1].aligned_with(plain) if made is not None and not is_same else None
        if made is None or not (is_same or aligned):
            name = which.name(self._frame.trained)
            raise InvariantError(f"the {name} {kind} takes or gives other things than the plain one.")
        ours, theirs = self._frame.history, other._frame.history
        self._frame.history = LazyHistory(lambda: with_variant(ours, theirs, kind))
        if aligned is None:
            return Code(made[0], made[1].layouts, made[1].late)
        (inputs, outputs), count = aligned, len(plain.inputs)
        moved = dict(enumerate(inputs))  # a variant's own inputs follow those
        layouts = {moved.get(i, i - len(inputs) + count): layout for i, layout in made[1].layouts.items()}
        late = {outputs.index(i): key for i, key in made[1].late.items()}
        return Code(made[0].aligned(inputs, count, outputs), layouts, late)

    def _replay(self) -> dict[str, dict[str, PassResult]]:
        """Run all passes again that a hit leaves out, and return what the history then has."""
        again = self._again(self._stages.variant, self._stages.only, generate_code=False)
        return again._history.stages | {"dynamo": self._history.stages["dynamo"]}

    def _again(self, variant: Variant, only: GraphKind | None, *, generate_code: bool) -> Compilation:
        """Compile the graph as Dynamo captured it once more, into a frame of its own."""
        graph = self._bound.copy()
        gm = fx.GraphModule(graph.owning_module or nn.Module(), graph)
        _pass_for_dynamos(gm)
        frame = Frame(
            self._frame.plan, hardware=self._frame.hardware, unsharded_budget_bytes=self._frame.unsharded_budget_bytes
        )
        with self._context.restored():
            stages = Stages(
                frame,
                self._stages.pipeline,
                self._stages.options,
                variant=variant,
                only=only,
                generate_code=generate_code,
                traced=self._stages.traced,
                saved=self._made["forward"][1].strides if only == "backward" and "forward" in self._made else None,
            )
            stages.capture(gm)
            again = Compilation(stages)
            try:
                again.run(gm, self._context.inputs)
            except torch_private.NO_VALUE as error:
                raise UnsupportedGraph(
                    "a Python float that changes from call to call comes into a graph that is compiled once more "
                    "(microbatches without sync, resident parameters), and torch has forgotten its value. Pass it as a "
                    "tensor, torch.tensor(value), or set torch._dynamo.config.specialize_float = True."
                ) from error
        return again


def _pass_for_dynamos(gm: fx.GraphModule) -> None:
    """Have AOTAutograd look which inputs are parameters: the partitioner then saves the same as the first time."""
    gm.meta["dynamo_compile_id"] = None
    vars(gm)["_param_name_to_source"] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        node._dynamo_source = None  # what it was stands in guards that exist
