"""The classes that modules get when their parameters are sharded.

[Note: swapped classes]
A module that owns a sharded parameter gets a subclass of its class with a property per parameter (`ParameterOwner`);
a module that was given to `fully_shard` also gets the FSDP methods and a call that opens a scope (`ShardedModule`).
`isinstance` keeps working, and Dynamo's type guards tell a sharded module from a plain one. The subclass has the name
of the class, for code that prints it or writes it into a file.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fxshard import torch_private
from fxshard.errors import ConfigError
from fxshard.runtime import eager, uncompiled_warning
from fxshard.runtime.parameters import REFS, TRACED, ParameterRef, full_tensor_of, placed, traced_key
from fxshard.sharding.fixed_places import PARAMETRIZED, member_at
from fxshard.sharding.sharded_module import ParameterOwner, ShardedModule, units_under


def _read(module: nn.Module, ref: ParameterRef, name: str) -> Any:
    if eager.inside_forward():
        return eager.read(ref)
    registered = module._parameters[name]
    unsharded = eager.read_after_forward(ref, registered)
    return registered if unsharded is None else unsharded


_read_eagerly = torch.compiler.disable(_read)


def _getter(name: str, dim: int, is_tensor_parallel: bool, num_inputs: int, num_metadata: int) -> property:
    its_flat, its_layout = traced_key(name, "flat"), traced_key(name, "layout")
    its_reader, its_inputs = traced_key(name, "reader"), traced_key(name, "inputs")
    inputs = tuple(traced_key(name, f"input{i}") for i in range(num_inputs))
    metadata = tuple(traced_key(name, f"metadata{i}") for i in range(num_metadata))

    @torch_private.run_this_frame_eagerly
    def get(self: nn.Module) -> Any:
        if torch.compiler.is_compiling():  # never touch self._parameters here: Dynamo would trace the DTensors in it
            traced = self.__dict__[TRACED]
            what = traced[its_flat], traced[name]  # a result in a variable would be called after it in graphs
            if inputs:
                sent = [torch.ops.fxshard.parameter(traced[its_inputs], traced[text]) for text in inputs]
                rows = torch.ops.fxshard.parameter(*what)
                return traced[its_reader](rows, *sent, *[traced[each] for each in metadata])
            if is_tensor_parallel and dim:
                return placed(torch.ops.fxshard.whole(torch.ops.fxshard.parameter(*what), dim), traced[its_layout])
            if is_tensor_parallel:
                return placed(torch.ops.fxshard.parameter(*what), traced[its_layout])
            if dim:
                return torch.ops.fxshard.whole(torch.ops.fxshard.parameter(*what), dim)
            return torch.ops.fxshard.parameter(*what)
        callback = torch_private.eval_frame_callback()  # a C function: a Python one would be offered to Dynamo
        if callback is False:
            uncompiled_warning.refuse_fallback(self, name)
        if name not in self._parameters:
            return nn.Module.__getattr__(self, name)
        if callback is not None and uncompiled_warning.SEEN not in self.__dict__:
            uncompiled_warning.notice(self, name)
        return _read_eagerly(self, self.__dict__[REFS][name], name)

    return property(get)


@functools.cache
def _swapped_class(
    cls: type[nn.Module], names: frozenset[tuple[str, int, bool, int, int]], is_unit: bool
) -> type[nn.Module]:
    """Return the subclass of `cls` with a property for each of `names`; equal requests give the same class.

    `names` come with the dimension along which the parameter is cut, whether it is tensor-parallel, and how many
    all-gather inputs and tensors of metadata it has, if it has hooks.
    """
    mixin = ShardedModule if is_unit else ParameterOwner
    body: dict[str, Any] = {each[0]: _getter(*each) for each in sorted(names)}
    if issubclass(cls, nn.RNNBase):
        # RNNs keep their weights in a list of their own beside _parameters.
        body["_flat_weights"] = property(
            lambda self: [getattr(self, name, None) for name in self._flat_weights_names], lambda self, weights: None
        )
    defined_in = getattr(cls.forward, "__module__", None) or ""  # that of a `torch.fx.GraphModule` is None
    if is_unit and defined_in.startswith("torch.nn"):
        # torch.compile traces the call of torch.nn's own modules from outside; ours must run first, as it is.
        body["forward"] = _own_forward(cls)
    if is_unit and callable(save := getattr(cls, "save_pretrained", None)):
        body["save_pretrained"] = _save_whole(save)
    if callable(resize := getattr(cls, "resize_token_embeddings", None)):
        body["resize_token_embeddings"] = _keep_size(resize)
    body["_fxshard_base"] = cls
    body["__qualname__"] = cls.__qualname__
    if not cls.__module__.startswith("torch."):  # Dynamo has rules of its own for classes of torch
        body["__module__"] = cls.__module__
    return type(cls.__name__, (mixin, cls), body)


def _save_whole(save: Callable[..., Any]) -> Callable[..., Any]:
    """Let Hugging Face's `save_pretrained` write whole parameters: all ranks call it, the main process writes."""

    @functools.wraps(save)
    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(save).bind_partial(self, *args, **kwargs).arguments
        if given.get("state_dict") is not None:
            return save(self, *args, **kwargs)
        writes = given.get("is_main_process", not dist.is_initialized() or dist.get_rank() == 0)
        unit = units_under(self)[0]
        whole = {}
        with unit.agreed("saved", "all_gather", "the parameters that save_pretrained writes"):
            for name, value in self.state_dict().items():
                full = full_tensor_of(value) if isinstance(value, DTensor) else value
                if writes:
                    whole[name] = full.cpu()
        return save(self, *args, **kwargs, state_dict=whole) if writes else None

    return save_pretrained


def _keep_size(resize: Callable[..., Any]) -> Callable[..., Any]:
    """Let Hugging Face's `resize_token_embeddings` do what changes no size, and refuse the rest.

    It would fail in torch's DTensors, or resize the copy that a module has after a forward, and lose it.
    """

    @functools.wraps(resize)
    def resize_token_embeddings(self: Any, *args: Any, **kwargs: Any) -> Any:
        member = member_at(self.get_input_embeddings(), "weight")
        given = inspect.signature(resize).bind_partial(self, *args, **kwargs).arguments
        rows = member.parameter.shape[0] if member else 0
        wanted = rows if (asked := given.get("new_num_tokens")) is None else asked
        if multiple := given.get("pad_to_multiple_of"):
            wanted = -(-wanted // multiple) * multiple
        if member and wanted != rows:
            raise ConfigError(
                f"resize_token_embeddings: {member.fqn} is sharded with {rows} rows, and cannot get {wanted}. Resize "
                "before fully_shard, or before the first call of the compiled model."
            )
        return resize(self, *args, **kwargs)

    return resize_token_embeddings


def _own_forward(cls: type[nn.Module]) -> Callable[..., Any]:
    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return cls.forward(self, *args, **kwargs)

    made: Any = forward
    made.__code__ = made.__code__.replace()  # a code object of its own: Dynamo counts recompilations by code
    return forward


def swap_class(module: nn.Module, is_unit: bool) -> None:
    """Give `module` the class that goes with the parameters it has sharded by now."""
    cls = type(module)
    base = original_class(cls)
    refs = module.__dict__.get(REFS, {})
    sizes = {n: (len(ref.hooks.texts), len(ref.hooks.metadata)) if ref.hooks else (0, 0) for n, ref in refs.items()}
    names = frozenset((name, ref.dim, ref.layout is not None, *sizes[name]) for name, ref in refs.items())
    if issubclass(base, nn.RNNBase):
        module.__dict__.pop("_flat_weights", None)
    module.__class__ = _swapped_class(cast(Any, base), names, is_unit or issubclass(cls, ShardedModule))
    for name in module.__dict__.get(PARAMETRIZED, ()):
        # `remove_parametrizations` deletes it of the class itself, and then registers the parameter: that is refused.
        setattr(module.__class__, name, getattr(base, name))


def original_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the class that `swap_class` has replaced, or the class itself."""
    return cast("type[nn.Module]", getattr(cls, "_fxshard_base", cls))
