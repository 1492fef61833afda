"""Which parameters a captured graph writes into.

[Note: writes]
A gathered parameter is a copy: what a forward writes into it never reaches the shard. Dynamo's graph says little about
it (`w[0] = 0`, `w.data.clamp_()`, `torch._foreach_mul_([w], 2)`, `F.embedding(x, w, max_norm=1)`), but the ops behind
these say all in their schemas. So each node that takes a parameter, or a tensor that shares its memory, is run once
more on fake tensors, and each op that runs is asked what it writes into.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from fxshard import torch_private

LOST_WRITE = (
    "The change would be lost with the gathered copy. Change parameters outside of forward, under torch.no_grad(): "
    "after the optimizer's step, say."
)


class Write(NamedTuple):
    """One write into the parameter that the node `parameter` gives."""

    parameter: fx.Node
    node: fx.Node  # that writes; `parameter` itself where only its version tells
    op: str  # such as `aten.mul_.Tensor`; empty if it is not known

    @property
    def user_line(self) -> str:
        """`File "model.py", line 7, in forward: self.weight[0] = 0`; empty where Dynamo does not say."""
        frames = str(self.node.meta.get("stack_trace") or "").strip().split("\n  File ")
        own = [frame for frame in frames if "/torch/" not in frame.partition("\n")[0]] or frames
        return ": ".join(" ".join(line.split()) for line in own[-1].splitlines()[:2]).removeprefix("File ")


class _WriteRecorder(torch_private.DispatchMode):
    """Notes which storages the ops that run write into."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: dict[int, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | (kwargs or {})
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in _tensors(given.get(argument.name)):
                    self.written.setdefault(torch_private.storage_id(tensor), str(func))
        return func(*args, **(kwargs or {}))


def writes_of(gm: fx.GraphModule, parameters: Collection[fx.Node]) -> Iterator[Write]:
    """Find the first write into each of `parameters` in Dynamo's graph and its subgraphs; see [Note: writes]."""
    found: dict[fx.Node, Write] = {}
    with torch.no_grad(), torch_private.beside_a_trace(_plain(next(iter(parameters)).meta["example_value"])):
        for write in _Search(parameters).writes_in(gm):
            found.setdefault(write.parameter, write)
    for node in parameters:
        if node in found:
            yield found[node]
        elif node.op != "placeholder" and node.meta["example_value"]._version:  # Dynamo has run it on fake tensors too
            yield Write(node, node, "")


def _plain(value: Any) -> Tensor:
    while torch_private.is_wrapper(value):
        value = getattr(value, value.__tensor_flatten__()[0][0])
    return cast(Tensor, value)


def _has_all_ops(parameter: fx.Node) -> bool:
    """Whether a parameter is no tensor subclass that may have few ops, whose version tells of writes."""
    value = parameter.meta["example_value"]
    return isinstance(value, DTensor) or not torch_private.is_wrapper(value)


class _Search:
    """Runs the nodes that touch parameters, in the order of the graphs."""

    def __init__(self, parameters: Collection[fx.Node]) -> None:
        self.owners: dict[int, fx.Node] = {}  # by storage of its stand-in
        self.values: dict[fx.Node, Any] = {}  # of nodes that share memory with a parameter
        parameters = list(filter(_has_all_ops, parameters))
        self.lifted = {torch_private.storage_id(node.meta["example_value"]): node for node in parameters}
        for node in parameters:
            self.values[node] = torch.empty_like(node.meta["example_value"])
            self.owners[torch_private.storage_id(self.values[node])] = node

    def writes_in(self, gm: fx.GraphModule) -> Iterator[Write]:
        for module in gm.modules():
            for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
                if node.op == "placeholder":
                    self._enter(node)
                elif node.op in ("call_function", "call_method") and not self.values.keys().isdisjoint(
                    node.all_input_nodes
                ):
                    yield from self._run(node)

    def _enter(self, placeholder: fx.Node) -> None:
        """Give a subgraph's inputs the fake tensors that the graph around it has."""
        value = placeholder.meta.get("example_value")
        owner = self.lifted.get(torch_private.storage_id(value)) if isinstance(value, Tensor) else None
        if owner is not None and placeholder not in self.values:
            self.values[placeholder] = self.values[owner]

    def _run(self, node: fx.Node) -> Iterator[Write]:
        target: Any = node.target
        if isinstance(target, torch._ops.HigherOrderOperator):
            return  # its subgraphs are searched themselves
        args, kwargs = fx.map_arg(
            (node.args, node.kwargs), lambda source: self.values.get(source, source.meta.get("example_value"))
        )
        with _WriteRecorder() as watch:
            try:
                result = getattr(args[0], target)(*args[1:], **kwargs) if node.op == "call_method" else None
                result = target(*args, **kwargs) if node.op == "call_function" else result
            except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError, AssertionError):
                result = None  # it needs what stands around it (a level of vmap); the parameter's version tells
        for leaf in _tensors(result):
            _release_mask(leaf)
        for storage, op in watch.written.items():
            if storage in self.owners:
                yield Write(self.owners[storage], node, op)
        if any(torch_private.storage_id(leaf) in self.owners for leaf in _tensors(result)):
            self.values[node] = result


def _release_mask(tensor: Tensor) -> None:
    """Take back what an embedding of split rows has left for the redistribution behind it, which is not run here."""
    for placement in getattr(tensor, "placements", ()):
        mask = getattr(placement, "mask_buffer", None)
        if mask is not None and mask.data is not None:
            mask.release_mask()


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.layout is torch.strided]
