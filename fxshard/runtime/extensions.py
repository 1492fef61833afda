"""Tensor subclasses that say what is gathered of them: `fsdp_pre_all_gather` and `fsdp_post_all_gather`, as FSDP2's.

[Note: extensions]
A parameter may be a tensor subclass around its rows, with two hooks. The first makes of this rank's rows what is sent:
fp8 values, say, and beside it metadata for this rank alone, such as their scale. The second makes the unsharded
parameter of what was gathered. Gradients, optimizers and states know the rows, in high precision.

The rows lie in a shard of their own, which is never gathered. What the first hook gives is written, as bytes, into a
second shard, which *encodes* it: `InputShard`. That is a frozen parameter like any other to the passes: they gather it,
bucket and prefetch it, and forward and backward send the same bytes. The hook runs before a forward, once: whatever has
written to the rows since the last one, and in whatever way, is in them. Metadata are inputs of the graph.

What modules read is made by a function of the rows' marker and those of the bytes. Dynamo puts it into its graph as it
is, AOTAutograd traces what it does, the second hook, and hands the gradient of its result to the rows' marker, which
nothing else reads and which is gone after that. Functions are shared by parameters of which all that decides what the
hook does is equal, so that equal blocks share a graph.

Source: FSDP2 `_fsdp_param.py` (`all_gather_inputs`, `init_unsharded_param`).
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils import _pytree as pytree

from fxshard import torch_private
from fxshard.errors import ConfigError
from fxshard.ir.plan import Slot
from fxshard.runtime.raw import as_bytes

_PRE, _POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"

_ALIGNMENT = 8
"""Bytes: an input begins where a tensor of any dtype may. On one rank it is read where it lies."""

SizeAndDtype = tuple[torch.Size, torch.dtype]
"""Shape and dtype of one all-gather input, or of a tensor in the metadata."""


def has_hooks(tensor: Tensor) -> bool:
    """Whether a tensor says what is gathered of it."""
    return hasattr(tensor, _PRE) or hasattr(tensor, _POST)


def name_of_rows(tensor: Any) -> str:
    """Return the attribute in which a subclass with hooks has its values, empty if it cannot be told."""
    names = tensor.__tensor_flatten__()[0] if torch_private.is_wrapper(tensor) else ()
    like = [n for n in names if (getattr(tensor, n).shape, getattr(tensor, n).dtype) == (tensor.shape, tensor.dtype)]
    return like[0] if len(like) == 1 else ""


def rows_of(local: Tensor) -> Tensor:
    """Return the plain tensor that is in a subclass with hooks, or the tensor itself."""
    return getattr(local, name_of_rows(local)) if type(local) is not Tensor and has_hooks(local) else local


def around(rows: Tensor, like: Tensor) -> Tensor:
    """Return a subclass as `like` around other rows; a plain tensor if `like` is one, or does not give a subclass."""
    if not has_hooks(like) or not name_of_rows(like):
        return rows
    made = like.new_zeros(rows.shape, device=rows.device)
    if type(made) is type(like):
        setattr(made, name_of_rows(made), rows)
    return made


@dataclass(frozen=True, eq=False)
class Unsharding:
    """How gathered bytes become a parameter; equal ones do the same."""

    prototype: Tensor  # the subclass whose hook is called, without any tensor in it
    settings: tuple[Any, dict[str, Any]]  # all that tells it from others of its class
    inputs: tuple[SizeAndDtype, ...]  # of the all_gather, on one rank
    metadata: tuple[Any, tuple[Any, ...]]  # how they are put together; what is no tensor in them
    shape: tuple[int, ...]  # of the unsharded parameter
    dtype: torch.dtype

    @property
    def _key(self) -> tuple[Any, ...]:
        return type(self.prototype), self.inputs, self.shape, self.dtype, self.settings, self.metadata

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unsharding) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key[:4])

    def __call__(self, gathered: Sequence[Tensor], metadata: Sequence[Tensor]) -> Tensor:
        """Make the unsharded parameter."""
        outputs = []
        for each, (shape, dtype) in zip(gathered, self.inputs, strict=True):
            nbytes = math.prod(shape) * dtype.itemsize
            if nbytes != _aligned(nbytes):
                each = each.view(-1, _aligned(nbytes))[:, :nbytes].reshape(-1)
            outputs.append(each.view(dtype).view(-1, *shape[1:]))
        tensors, (spec, leaves) = iter(metadata), self.metadata
        whole = pytree.tree_unflatten([next(tensors) if leaf is Tensor else leaf for leaf in leaves], spec)
        made = getattr(self.prototype, _POST)(tuple(outputs), whole, self.dtype)[0]
        if made.shape != self.shape:  # padded rows come last
            made = torch.as_strided(made, self.shape, torch.empty(self.shape, device="meta").stride(), 0)
        return cast(Tensor, made)


class _Unshard(torch.autograd.Function):
    """Make the parameter of bytes; its gradient is that of the rows."""

    @staticmethod
    def forward(ctx: Any, unsharding: Unsharding, rows: Tensor, *tensors: Tensor) -> Tensor:
        ctx.count = len(tensors)
        number = len(unsharding.inputs)
        return unsharding(tensors[:number], tensors[number:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, grad, *(None for _ in range(ctx.count))


@functools.cache
def reader_of(unsharding: Unsharding) -> Callable[..., Tensor]:
    """Return what makes the parameter, of the rows' marker, the bytes and the metadata; Dynamo does not look inside."""

    def read(rows: Tensor, *tensors: Tensor) -> Tensor:
        made: Tensor = _Unshard.apply(unsharding, rows, *tensors)  # type: ignore[no-untyped-call]
        return made

    read.makes_parameter = True  # type: ignore[attr-defined]
    return cast("Callable[..., Tensor]", torch.compiler.allow_in_graph(read))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _layouts(tensors: Sequence[Tensor]) -> tuple[SizeAndDtype, ...]:
    return tuple((tensor.shape, tensor.dtype) for tensor in tensors)


def _text(layouts: Sequence[SizeAndDtype]) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in layouts)


def _settings_of(local: Tensor) -> tuple[Any, dict[str, Any]]:
    """What decides what the hooks of a subclass do, beside its tensors: its context and its attributes."""
    values = {name: value for name, value in vars(local).items() if value is not None and not isinstance(value, Tensor)}
    return cast(Any, local).__tensor_flatten__()[1], values


def _is_plain(value: object) -> bool:
    return isinstance(value, Tensor) and not torch_private.is_wrapper(value)


class Extension:
    """One parameter with hooks: its subclass around this rank's rows (`local`), and what the hooks make of it."""

    def __init__(
        self,
        fqn: str,
        local: Tensor,
        module: nn.Module,
        mesh: DeviceMesh,
        policy: MixedPrecisionPolicy,
        whole: tuple[torch.Size, torch.dtype],
    ) -> None:
        """Run the hooks without values, as every rank will; `whole`: shape and dtype of the unsharded parameter."""
        self.fqn, self.local, self._module, self._mesh, self._policy = fqn, local, module, mesh, policy
        self._shape, self._dtype = whole
        if not (hasattr(local, _PRE) and hasattr(local, _POST)):
            self._refuse(f"{_PRE} and {_POST} belong together, and it has one of them")
        if not name_of_rows(local):
            self._refuse(
                "__tensor_flatten__ must name exactly one tensor of its own shape and dtype, the rows that are trained"
            )
        number = len(inspect.signature(getattr(local, _PRE)).parameters)
        if number not in (1, 5):
            self._refuse(
                f"{_PRE} takes {number} arguments, and FSDP2 gives it mesh, or mesh, outer_size, outer_stride, module, "
                "mp_policy"
            )
        self._takes_all = number == 5
        self.unsharding, self._metadata_layouts = self._lay_out()
        device = rows_of(local).device
        # the tensors that the first hook gave the last time
        self.metadata = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in self._metadata_layouts]

    @property
    def input_bytes(self) -> tuple[int, ...]:
        """Bytes of each all-gather input on one rank, with those that align the next one."""
        return tuple(_aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in self.unsharding.inputs)

    @property
    def reader(self) -> Callable[..., Tensor]:
        """What modules read it with; see `reader_of`."""
        return reader_of(self.unsharding)

    def hold(self, rows: Tensor, found: Tensor) -> Tensor:
        """Put `rows` into the subclass, and return it: the one that somebody has put in its place, if it is one."""
        if type(found) is type(self.local):
            self.local = found
        setattr(self.local, name_of_rows(self.local), rows)
        return self.local

    def encode(self, into: Sequence[Tensor]) -> None:
        """Write what is sent, as bytes, and keep the metadata."""
        if _settings_of(self.local) != self.unsharding.settings:
            self._refuse(
                f"its attributes have changed from {self.unsharding.settings[1]} to {_settings_of(self.local)[1]}, and "
                f"{_POST} is traced with those that it had at fully_shard. Give it what changes as tensors in the "
                "metadata"
            )
        with torch.no_grad():
            inputs, metadata, leaves = self._run_pre(self.local)
            found, known = (*_layouts(inputs), *_layouts(metadata)), (*self.unsharding.inputs, *self._metadata_layouts)
            if (found, leaves) != (known, self.unsharding.metadata):
                self._refuse(
                    f"{_PRE} gives {_text(found)}, metadata included, and at fully_shard {_text(known)}. Shapes, "
                    "dtypes and what is no tensor in the metadata must stay the same"
                )
            for view, tensor in zip(into, inputs, strict=True):
                view[: tensor.nbytes].copy_(as_bytes(tensor))
            self.metadata = [tensor.detach().clone() for tensor in metadata]

    def _run_pre(self, local: Tensor) -> tuple[tuple[Tensor, ...], list[Tensor], tuple[Any, tuple[Any, ...]]]:
        """Return the inputs, the tensors of the metadata, and the rest of these."""
        stride = torch.empty(self._shape, device="meta").stride()
        rest = (self._shape, stride, self._module, self._policy) if self._takes_all else ()
        given = getattr(local, _PRE)(self._mesh, *rest)
        inputs, metadata = given if isinstance(given, tuple) and len(given) == 2 else (None, None)
        if not isinstance(inputs, tuple | list) or not inputs or not all(map(_is_plain, inputs)):
            self._refuse(f"{_PRE} must return a tuple of plain tensors to send, and metadata")
        leaves, spec = pytree.tree_flatten(metadata)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not all(map(_is_plain, tensors)):
            self._refuse(f"{_PRE} gives a {type(tensors[0]).__name__} in its metadata; give plain tensors")
        return tuple(inputs), tensors, (spec, tuple(Tensor if isinstance(x, Tensor) else x for x in leaves))

    def _lay_out(self) -> tuple[Unsharding, tuple[SizeAndDtype, ...]]:
        """Run both hooks on fake rows, those of every rank, so that all ranks come to the same."""
        slot, ranks = Slot(fqn=self.fqn, shape=tuple(self._shape), offset=0, numel=0), self._mesh.size()
        first, *others = dict.fromkeys(slot.local_shape(rank, ranks) for rank in range(ranks))
        is_fake = torch_private.is_fake(rows_of(self.local))
        with torch.no_grad(), nullcontext() if is_fake else torch_private.FakeMode(allow_non_fake_inputs=True):
            prototype, (inputs, metadata, leaves) = self._pre_without_values(first)
            for shape in others:
                _, (found, _, _) = self._pre_without_values(shape)
                if _layouts(found) != _layouts(inputs):
                    self._refuse(
                        f"{_PRE} gives {_text(_layouts(found))} of rows {list(shape)}, which the last ranks have, and "
                        f"{_text(_layouts(inputs))} of {list(first)}. It must pad what it sends to the rows of rank 0"
                    )
            settings = _settings_of(self.local)
            vars(prototype).update(settings[1])
            for name, value in (vars(self.local) | vars(prototype)).items():
                if isinstance(value, Tensor):  # of no use to a graph, or stale in the next step
                    vars(prototype).pop(name, None)
            made = Unsharding(prototype, settings, _layouts(inputs), leaves, tuple(self._shape), self._dtype)
            gathered = [tensor.new_empty(ranks * _aligned(tensor.nbytes), dtype=torch.uint8) for tensor in inputs]
            whole = self._without_values(_POST, lambda: made(gathered, metadata))
        if whole.dtype is not self._dtype:
            self._refuse(f"{_POST} gives {whole.dtype}, and param_dtype is {self._dtype}")
        return made, _layouts(metadata)

    def _pre_without_values(self, shape: tuple[int, ...]) -> tuple[Tensor, Any]:
        """Return a subclass around fake rows of that shape, and what the first hook gives for it."""
        local = self._without_values("new_zeros", lambda: self.local.new_zeros(shape))
        if type(local) is not type(self.local):
            self._refuse("its new_zeros gives a plain tensor. FSDP2 needs the subclass of it, too")
        return local, self._without_values(_PRE, lambda: self._run_pre(local))

    def _without_values(self, name: str, run: Callable[[], Any]) -> Any:
        try:
            return run()
        except ConfigError:
            raise
        except Exception as error:  # the hook is the user's code
            self._refuse(
                f"{name} was run on tensors without values, to see what will be gathered, and raised "
                f"{type(error).__name__}: {error}. It must take rows of any rank, may not look at values "
                f"(`if scale > 1`, .item()), and {_POST} gets tensors from all_gather and metadata, not from self"
            )

    def _refuse(self, why: str) -> NoReturn:
        raise ConfigError(
            f"{self.fqn} is a {type(self.local).__name__} with {_PRE}, and cannot be gathered with it: {why}."
        )
