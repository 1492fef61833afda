"""Which modules of an unsharded model become units, and which of these are offloaded."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from fxshard.ir.collectives import ALONE_BYTES
from fxshard.options import Options
from fxshard.runtime.unit import Unit
from fxshard.sharding import shard_module
from fxshard.sharding.sharded_module import units_under
from fxshard.unit_settings import UnitSettings

_log = logging.getLogger(__name__)


def make_units(root: nn.Module, mesh: DeviceMesh, options: Options) -> tuple[Unit, ...]:
    """Shard the modules of an unsharded model as `options` say."""
    policy = MixedPrecisionPolicy(param_dtype=options.param_dtype, reduce_dtype=options.reduce_dtype)
    modules, blocks = units_of(root), set(blocks_of(root))
    offloaded, offload = offloaded_of(modules, options), options.offload or {}
    for module in modules:
        shard_module.shard(
            [module],
            mesh,
            UnitSettings(
                mp_policy=policy,
                # None is True for all but the root; a loss may read the head's weight as it may read the root's.
                reshard_after_forward=(
                    False
                    if options.reshard_after_forward is None and module not in blocks
                    else options.reshard_after_forward
                ),
                offload=CPUOffloadPolicy(offload.get("pin_memory", True)) if module in offloaded else None,
                from_one_line=True,
            ),
        )
    return units_under(root)


def units_of(root: nn.Module) -> list[nn.Module]:
    """Choose the modules to make units of, inner ones first: the ends of a model with blocks, its blocks, the root."""
    blocks = blocks_of(root)
    return [*(_ends_of(root, blocks) if blocks else ()), *blocks, root]


def blocks_of(root: nn.Module) -> list[nn.Module]:
    """Return what stands in ModuleLists and Sequentials, outermost, and shares no parameter with the rest."""
    found: dict[nn.Module, None] = {}  # a part that two others share is met twice

    def visit(module: nn.Module) -> None:
        for child in module.children():
            inside_container = isinstance(module, nn.ModuleList | nn.Sequential)
            is_container = isinstance(child, nn.ModuleList | nn.ModuleDict)
            if inside_container and not is_container and next(child.parameters(), None) is not None:
                found[child] = None
            else:
                visit(child)

    visit(root)
    return [block for block in found if not _shares(block, root)]


def _ends_of(root: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the large layers beside the blocks, such as an embedding and a head that are not tied.

    As a part of the root both would be gathered before the first block and reduced after the last one.
    """
    inside = {module for block in blocks for module in block.modules()}
    beside = [each for each in root.modules() if each is not root and each not in inside]
    leaves = [each for each in beside if next(each.children(), None) is None]
    large = [m for m in leaves if sum(p.numel() * p.element_size() for p in m.parameters()) >= ALONE_BYTES]
    return [each for each in large if not _shares(each, root)]


def offloaded_of(modules: Sequence[nn.Module], options: Options) -> set[nn.Module]:
    """Choose the units that are offloaded: the last ones, up to the part of the bytes that the option says.

    What a step begins and ends with has no compute that hides its copies: the first units, and the root.
    """
    taken: set[int] = set()
    sizes = []
    for module in modules:  # inner ones first: each has what they left
        own = {id(p): p.numel() * p.element_size() for p in module.parameters() if id(p) not in taken}
        taken.update(own)
        sizes.append((module, sum(own.values())))
    *blocks, root = sizes
    whole, part = sum(size for _, size in sizes), (options.offload or {}).get("params", 0)
    left, chosen, in_turn = part * whole, set[nn.Module](), [*reversed(blocks), root]
    for module, size in in_turn:
        if (left := left - size) < 0:
            break
        chosen.add(module)
    if part and not chosen:
        _log.warning(
            "fxshard: nothing is offloaded: whole units are, the last one first, and it has %.2g of the bytes of the "
            'parameters. Give offload={"params": ...} as much, or make smaller units with fully_shard.',
            in_turn[0][1] / whole,
        )
    return chosen


def _shares(block: nn.Module, root: nn.Module) -> bool:
    inside = {id(module) for module in block.modules()}
    outside = {id(p) for m in root.modules() if id(m) not in inside for p in m._parameters.values()}
    return any(id(p) in outside for p in block.parameters())
