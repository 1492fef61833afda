"""Trace a model for a plan: one block of each kind, and what is around the blocks with a call in the place of each.

[Note: outlined traces]
The time of a trace must not grow with the depth. Blocks are compiled one by one (`regional=True`), and those that are
alike share a trace. What is around them runs uncompiled there and is in no graph; so it is traced as a model of its
own, in which each block is one op, `fxshard::planned_block`, that returns tensors like the block's results. A step is
then the graphs of the outer model, at each such op interrupted by the graphs of the block. Where the model's code
checkpoints the call of a block, the block is traced inside a checkpoint of its own, and is what computes itself again.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

from fxshard import hardware, torch_private
from fxshard.compile.one_line.units import blocks_of
from fxshard.cost.bucket_sizes import copy_seconds
from fxshard.cost.optimizer_step import OptimizerBuilder
from fxshard.errors import ConfigError
from fxshard.inspect.explain import DEFAULT_HARDWARE, explained, reads_values
from fxshard.inspect.explanation import Explanation
from fxshard.inspect.replica import Replica
from fxshard.ir.collectives import ALONE_BYTES
from fxshard.ir.planned_block import is_backward, number_of, planned_block, text_of
from fxshard.plan.optimizers import adamw
from fxshard.sharding.call_values import cast_inputs


@dataclass(frozen=True, kw_only=True)
class OutlinedModel:
    """The graphs of a model, see [Note: outlined traces]."""

    model: nn.Module  # it, with checkpoints around the blocks that its code checkpoints
    outer: Explanation  # of what is around the blocks
    blocks: Explanation | None  # of one block of each kind
    # for each call of a block in `outer`, by the number that the call carries, the frame of `blocks`
    order: tuple[int, ...]
    names: tuple[str, ...] = ()  # the same calls -> FQN of the block
    calls: tuple[_BlockCall, ...] = ()  # what stands for these blocks in `outer`
    resident: frozenset[int] = frozenset()  # frames of `blocks` whose parameters stay gathered throughout a step

    def shortened(self) -> tuple[nn.Module, tuple[str, ...]]:
        """Return a copy of `model` with the first, the middle and the last block of each kind, which it shares.

        Also return for each call of a block the name of the one that stands for it: itself or the middle one.
        """
        alike: dict[int, list[int]] = {}
        for number, frame in enumerate(self.order):
            alike.setdefault(frame, []).append(number)
        kept = {each for numbers in alike.values() for each in (numbers[0], numbers[len(numbers) // 2], numbers[-1])}
        middle = {frame: numbers[len(numbers) // 2] for frame, numbers in alike.items()}
        blocks = [self.model.get_submodule(name) for name in self.names]
        memo = {id(block): block if i in kept else self.calls[i] for i, block in enumerate(blocks)}
        stand_ins = (i if i in kept else middle[frame] for i, frame in enumerate(self.order))
        return copy.deepcopy(self.model, memo), tuple(self.names[i] for i in stand_ins)


class _BlockCall(nn.Module):
    """What stands for a block in the outer model."""

    def __init__(self, number: int, block: nn.Module, results: str, structure: Any) -> None:
        super().__init__()
        self.number, self.results = number, results
        trains = any(parameter.requires_grad for parameter in block.parameters())
        self.trained = torch.empty(1, requires_grad=True) if trains else None  # in the place of its parameters
        # A function, which copies of the module share: to copy the structure of a single tensor, torch warns of.
        self.arrange: Callable[[Any], Any] | None = lambda made: pytree.tree_unflatten(made, structure)
        if structure.is_leaf():
            self.arrange = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # Dynamo traces this once for every block: what it need not look into it should not see.
        tensors: list[Tensor] = []
        for given in (*args, *kwargs.values()):
            leaves = [given] if isinstance(given, Tensor) else pytree.tree_leaves(given)
            tensors += [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if self.trained is not None and not any(t.requires_grad for t in tensors):
            tensors.append(self.trained)
        made = planned_block(tensors, self.number, self.results)
        return made[0] if self.arrange is None else self.arrange(made)


def outline(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    world_size: int | tuple[int, int],
    options: dict[str, Any],
    saves_all: bool = False,
    optimizers: Mapping[str, OptimizerBuilder] | None = None,
) -> OutlinedModel:
    """Trace a model that is not sharded, with one block of each kind; arguments as of `explained`.

    `optimizers`: by default AdamW for all.

    A model without blocks is traced as a whole. What is around blocks runs uncompiled under all options.

    Raises:
        ConfigError: a block returns something else than tensors, is called more than once, runs without gradients
            and has a backward, or is in a checkpoint with others; attention has dropout.
        Exception: as `explain` raises.
    """
    blocks, steps = blocks_of(model), optimizers or {"AdamW": adamw}
    names = {id(module): name for name, module in model.named_modules()}
    trace = functools.partial(explained, args=args, kwargs=kwargs, world_size=world_size)
    if not blocks:
        whole = trace(model, options=options, saves_all=saves_all, optimizers=steps)
        return OutlinedModel(model=model, outer=_in_one_graph(whole), blocks=None, order=())
    called = _called(model, blocks, names, args, kwargs, options)
    calls = {id(block): _BlockCall(number, block, *result) for number, (block, result) in enumerate(called)}
    around = copy.deepcopy(model, dict(calls))
    outer = _in_one_graph(trace(around, options=_uncompiled(options), saves_all=True))
    forward, backward = (outer.frames[0].running(stage).graph for stage in ("forward", "backward"))
    fqns = tuple(names[id(block)] for block, _ in called)
    again = {number_of(node) for node in forward.nodes if node.meta.get("recompute") in _AGAIN}
    _refuse_together(outer.frames[0].graphs["dynamo"]["captured"].graph, again, fqns)
    model = checkpointed(model, [block for i, (block, _) in enumerate(called) if i in again])
    traced = trace(model, options={**options, "regional": True}, saves_all=saves_all, optimizers=steps)
    order = order_of(traced, fqns)
    for number in backward_numbers(backward).values():
        if "backward" not in traced.frames[order[number]].scheduled:
            raise ConfigError(
                f"{fqns[number]} is trained, but its forward runs without gradients, as under torch.no_grad() and in "
                "reentrant checkpoints: use checkpoint(..., use_reentrant=False)."
            )
    return OutlinedModel(model=model, outer=outer, blocks=traced, order=order, names=fqns, calls=tuple(calls.values()))


def backward_numbers(graph: fx.Graph) -> dict[fx.Node, int]:
    """The nodes of a backward that stand for those of blocks; one that computes a block again stands for nothing."""
    return {node: number for node in graph.nodes if (number := number_of(node)) is not None and is_backward(node)}


def _uncompiled(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options whose graphs launch as code that runs uncompiled: a unit as a whole, large parameters by themselves."""
    spec = hardware.load(options.get("hardware") or DEFAULT_HARDWARE)
    spec = dataclasses.replace(spec, gather_tensor_overhead=copy_seconds(ALONE_BYTES, spec) / 2)
    return {**options, "lower": "eager", "schedule": "fsdp2", "hardware": spec.to_json()}


def _refuse_together(captured: fx.Graph, again: Collection[int | None], fqns: Sequence[str]) -> None:
    """Refuse checkpoints that call several of these blocks."""
    for node in captured.find_nodes(op="get_attr"):
        assert captured.owning_module is not None
        body = getattr(captured.owning_module, str(node.target), None)
        calls = map(number_of, body.graph.nodes) if isinstance(body, fx.GraphModule) else ()
        if len(numbers := [number for number in calls if number is not None and number in again]) > 1:
            raise ConfigError(
                f"{', '.join(fqns[number] for number in numbers)} are called in one checkpoint, and a plan knows only "
                "checkpoints of one block: checkpoint each block by itself."
            )


_AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def checkpointed(model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
    """Return a copy of a model, which shares these blocks, that are computed again in backward; itself without any."""
    return copy.deepcopy(model, {id(b): torch_private.checkpoint_wrapper(b) for b in blocks}) if blocks else model


def order_of(blocks: Explanation, names: Sequence[str]) -> tuple[int, ...]:
    """The frames of the blocks of these names."""
    frame_of = {name: i for i, frame in enumerate(blocks.frames) for call in frame.calls for name in call}
    return tuple(frame_of[name] for name in names)


def _in_one_graph(outer: Explanation) -> Explanation:
    """Return what is around the blocks, which must be one graph: a plan knows no order of several."""
    if len(outer.frames) != 1 or "backward" not in outer.frames[0].scheduled:
        raise ConfigError(
            f"what {outer.model} does around its blocks is captured in {len(outer.frames)} graphs, and a plan needs "
            "one with a backward: TORCH_LOGS=graph_breaks says where it breaks; the forward must return the loss, with "
            "gradients on."
        )
    return outer


class _NoAttentionDropout(TorchFunctionMode):
    """Refuse dropout inside of attention, which the CPU of a trace computes by products of whole matrices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        is_attention = func is torch.nn.functional.scaled_dot_product_attention
        if is_attention and (args[4] if len(args) > 4 else given.get("dropout_p")):
            raise ConfigError(
                "the model has dropout inside of scaled_dot_product_attention, which a plan would count as products of "
                "whole matrices: build it with an attention dropout of 0, which takes a GPU about as long."
            )
        return func(*args, **given)


def _called(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    names: dict[int, str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: dict[str, Any],
) -> list[tuple[nn.Module, tuple[str, Any]]]:
    """Run the model on fake tensors; return its blocks in the order of their calls, and what each returned."""
    replica = Replica(torch.device("cpu"))
    fake = replica.copy(model, "the model")
    dtype = options.get("param_dtype")  # in which a block's results are, once its parameters are gathered
    fake_args, fake_kwargs = replica.copy((args, kwargs), "the arguments")
    found: dict[int, tuple[nn.Module, tuple[str, Any]]] = {}

    def note(block: nn.Module, module: nn.Module, inputs: Any, result: Any) -> None:
        (leaves, structure), name = pytree.tree_flatten(result), names[id(block)]
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            raise ConfigError(
                f"{name} returns {type(result).__name__} with other values than tensors. A plan traces one block of "
                "each kind by itself: have the blocks return tensors."
            )
        if id(block) in found:
            raise ConfigError(f"{name} is called more than once in a forward, which a plan cannot count yet.")
        found[id(block)] = (block, (text_of(leaves), structure))

    _ = [replica.of(block).register_forward_hook(functools.partial(note, block)) for block in blocks]
    for unit in (model, *blocks):
        replica.of(unit).register_forward_pre_hook(functools.partial(_cast_inputs, dtype), with_kwargs=True)
    try:
        with replica.faking(), torch.no_grad(), _NoAttentionDropout():
            cast = {name: p.to(dtype) for name, p in fake.named_parameters() if dtype and p.is_floating_point()}
            torch.func.functional_call(fake, cast, fake_args, fake_kwargs)
    except torch_private.NO_VALUE as error:
        raise reads_values(type(model).__name__, error) from error
    if not found:
        raise ConfigError(
            f"{type(model).__name__}.forward calls none of its {len(blocks)} blocks, which stand in ModuleLists and "
            "Sequentials; call them as modules."
        )
    return list(found.values())


def _cast_inputs(dtype: torch.dtype | None, unit: nn.Module, args: Any, kwargs: Any) -> Any:
    return cast_inputs(MixedPrecisionPolicy(param_dtype=dtype), args, kwargs)
