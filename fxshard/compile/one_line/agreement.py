"""The values that all ranks begin with: the first rank's parameters and buffers."""

from __future__ import annotations

import gc
import logging

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter
from torch.optim.swa_utils import AveragedModel

from fxshard.errors import ConfigError
from fxshard.live_objects import instances_of
from fxshard.ranks.rendezvous import difference_from, gather_texts
from fxshard.runtime.raw import checksum
from fxshard.sharding.sharded_module import plain_module

_log = logging.getLogger(__name__)


def require_no_averages(root: nn.Module, group: dist.ProcessGroup) -> None:
    """Raise on all ranks if an `AveragedModel` holds whole parameters of `root`: it would mix them with shards."""
    names = _averaged(root)
    if names:
        gc.collect()  # it may be dead
        names = _averaged(root)
    texts = gather_texts("one_line_averages", ", ".join(names), group)
    if held := next(filter(None, texts), ""):
        raise ConfigError(
            f"an AveragedModel made before the first call holds copies of parameters: {held}. The call "
            "shards the model, and whole copies cannot be averaged with shards. Make it of the plain model and shard "
            "it as well, before the first call: fxshard.fully_shard(averaged). Or keep averages of your own, made "
            "after the first call: {name: p.detach().clone() for name, p in model.named_parameters()}."
        )


def _averaged(root: nn.Module) -> list[str]:
    """Return the names of parameters of which an `AveragedModel` holds whole copies with their present values."""
    found: dict[str, None] = {}
    for averaged in instances_of(AveragedModel):
        copied = plain_module(averaged.module)
        for path, part in root.named_modules():
            # A copy with other values may be of another model of the class.
            if _is_copy(copied, part):
                found |= dict.fromkeys(name for name, _ in part.named_parameters(path))
    return list(found)


def _is_copy(copied: nn.Module, module: nn.Module) -> bool:
    """Return whether `copied` has the parameters of `module`, none of them sharded."""
    ours, theirs = dict(module.named_parameters()), dict(copied.named_parameters())
    return ours.keys() == theirs.keys() and all(_equal(p, theirs[name]) for name, p in ours.items())


def _equal(ours: Tensor, theirs: Tensor) -> bool:
    if isinstance(theirs, DTensor | UninitializedParameter) or theirs.is_meta:
        return False
    same_kind = (theirs.dtype, theirs.shape) == (ours.dtype, ours.shape)
    return same_kind and torch.equal(ours, theirs.to(ours.device))  # an AveragedModel may be on another device


def agree_on_values(root: nn.Module, group: dist.ProcessGroup) -> None:
    """Give all ranks the first rank's parameters and buffers; raise if names, shapes or dtypes differ."""
    named = dict(root.named_parameters()) | dict(root.named_buffers())
    layout = [f"{name}: {tensor.dtype}{list(tensor.shape)}" for name, tensor in named.items()]
    texts = gather_texts("one_line_layout", "\n".join(layout), group)
    lines = dict(zip(dist.get_process_group_ranks(group), map(str.splitlines, texts), strict=True))
    if difference := difference_from(dist.get_rank(), lines):
        raise ConfigError(f"the ranks' models differ: {difference}. Build the same model on every rank.")
    tensors = list(named.values())
    if len(set(gather_texts("one_line", str(checksum(tensors)), group))) > 1:
        _broadcast(tensors, group)


def _broadcast(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    source = dist.get_process_group_ranks(group)[0]
    if dist.get_rank() == source:
        _log.warning("fxshard: ranks start from different parameters (seeds?); rank %d's are broadcast.", source)
    with torch.no_grad():
        for tensor in tensors:
            values = tensor.detach().clone(memory_format=torch.contiguous_format)  # gloo ignores strides
            dist.broadcast(values, src=source, group=group)
            _write(tensor.detach(), values)


def _write(tensor: Tensor, values: Tensor) -> None:
    """Do `tensor.copy_(values)`, also for an expanded tensor: write each element of its memory once."""
    for dim in range(tensor.dim()):
        if tensor.stride(dim) == 0 and tensor.size(dim) > 1:
            tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    tensor.copy_(values)
