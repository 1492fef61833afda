"""The blocks of a model, and whether each is compiled by itself.

[Note: one graph or blocks]
With `regional="auto"`, the default, a model is compiled block by block if that costs its steps next to nothing: it is
not on a CPU, has at least `MIN_BLOCKS` blocks that are alike, no option asks for one graph, and the launches of such a
block take at most `MAX_SHARE` of its compute, so that each graph hides its own. Measured:
docs/adr/0019-repeated-blocks.md. The first call chooses, by its tokens on the rank that comes first, and all ranks keep
to it. A call that does not tell its tokens leaves one graph.
"""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fxshard.cost import measured
from fxshard.cost.blocks import transfers_per_compute
from fxshard.hardware import describes
from fxshard.options import Options
from fxshard.ranks.rendezvous import Rendezvous, is_alone
from fxshard.runtime import mesh_axes

if TYPE_CHECKING:
    from fxshard.runtime.unit import Unit
    from fxshard.sharding.sharded_module import ModuleState

MIN_BLOCKS: Final = 8
"""Blocks that are alike from which on one graph takes much longer to compile."""

MAX_SHARE: Final = 0.25
"""How much of a block's compute its launches may take, so that it is compiled by itself."""

HAS_LIMIT: Final = "recompile_limit" in inspect.signature(torch.compile).parameters
"""Whether a function may have a limit of graphs of its own: from torch 2.13 on. Else "auto" leaves one graph."""

_IDS = (torch.int32, torch.int64)

_HOOKS = attrgetter("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

ShardedModules = Mapping[str, "tuple[nn.Module, ModuleState]"]
"""The sharded modules of a model by their names in it, outer ones first; its own is \"\"."""

BlockKind = tuple[type[nn.Module], tuple[str, ...]]
"""The class of a module, and the layouts of its units."""


class AutoChoice(NamedTuple):
    """What "auto" chose, and why."""

    by_block: bool
    reason: str

    def __str__(self) -> str:
        return f"{'block by block' if self.by_block else 'one graph'}: {self.reason}"


def choose(
    places: ShardedModules, options: Options, inputs: object, *, fullgraph: bool = False, alone: bool = False
) -> AutoChoice:
    """Choose for "auto", for a call with these arguments (`inputs`); see [Note: one graph or blocks].

    The model's state keeps what its first call chooses. `alone`: there are no other ranks to agree with.
    """
    model, state = places[""]
    blocks = blocks_of(places)
    kinds = Counter(blocks.values())
    if reason := _never_by_block(places, kinds, options, fullgraph):
        return AutoChoice(False, reason)
    if state.compiled.agreed is None:
        block = next(name for name, kind in blocks.items() if kind == kinds.most_common(1)[0][0])
        units = [unit for name in places if f"{name}.".startswith(f"{block}.") for unit in places[name][1].units]
        found = _of_call([places[name][0] for name in blocks], model, units, inputs, options.hardware)
        if not alone and not is_alone():
            ranks = mesh_axes.ranks_of(units[0].mesh)
            meeting = Rendezvous(f"regional/{type(model).__qualname__}", ranks, again=True)
            found = AutoChoice(*json.loads(meeting.decide(json.dumps(found))))
        state.compiled.agreed = found
    return state.compiled.agreed


def _never_by_block(places: ShardedModules, kinds: Counter[BlockKind], options: Options, fullgraph: bool) -> str:
    """Return why every call of a model takes one graph, or an empty string; the same on each rank.

    With several meshes, ranks that share one may not share the other, and so could not agree.
    """
    units = [unit for _, state in places.values() for unit in state.units]
    reasons = {
        f"{', '.join(options.one_graph_only)} was set, which is of one graph": bool(options.one_graph_only),
        "fullgraph=True": fullgraph,
        f"fewer than {MIN_BLOCKS} units below the root are alike": max(kinds.values(), default=0) < MIN_BLOCKS,
        "torch before 2.13 has no limit of graphs for a function": not HAS_LIMIT,
        "its units are on several meshes": len({unit.plan.group for unit in units}) > 1,
        "tensor parallelism": any(member.tensor_parallel for unit in units for member in unit.members),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _of_call(
    blocks: Sequence[nn.Module], model: nn.Module, units: Sequence[Unit], inputs: object, hardware: str | None
) -> AutoChoice:
    """Choose for the units of a block by hooks, configuration, hardware and tokens, which ranks may not share.

    Blocks that get a cache of keys and values, and those with hooks inside, would need a graph each.
    """
    numbers = measured.numbers_of(units, hardware)
    if any(getattr(getattr(each, "config", None), "use_cache", False) for each in model.modules()):
        return AutoChoice(False, "config.use_cache")
    if any(map(hooks_inside, blocks)):
        return AutoChoice(False, "a block has hooks inside")
    if describes(numbers, "cpu"):
        return AutoChoice(False, "on a CPU it is faster")
    if not (tokens := _tokens(inputs)):
        return AutoChoice(False, "the arguments do not tell how many tokens there are")
    share = transfers_per_compute((unit.plan for unit in units), tokens, numbers)
    counted = f"for {tokens:,} tokens on {numbers.name}"
    return AutoChoice(
        share <= MAX_SHARE, f"the launches of a block take {share:.2f} of its compute {counted} (limit {MAX_SHARE})"
    )


def _tokens(inputs: object) -> int:
    """Count the tokens of a call: of ids [batch, tokens], or embeddings [batch, tokens, width]; 0 if neither."""
    tensors = [each for each in tree_leaves(inputs) if isinstance(each, Tensor) and not each.is_nested]
    of_ids = (each.numel() for each in tensors if each.dim() <= 2 and each.dtype in _IDS)
    of_embeddings = (each.shape[0] * each.shape[1] for each in tensors if each.dim() == 3 and each.is_floating_point())
    return int(max((*of_ids, *of_embeddings), default=0))


def blocks_of(places: ShardedModules) -> dict[str, BlockKind]:
    """Return the outermost modules that are alike another one, and those beside them that hold none of these."""
    kinds = {name: _kind(module, state) for name, (module, state) in places.items() if name and state.units}
    count = Counter(kinds.values())
    repeated = {name for name, kind in kinds.items() if count[kind] > 1}
    found: dict[str, BlockKind] = {}
    for name, kind in kinds.items():
        if not any(name.startswith(f"{outer}.") for outer in found) and (
            name in repeated or not any(inner.startswith(f"{name}.") for inner in repeated)
        ):
            found[name] = kind
    return found


def _kind(module: nn.Module, state: ModuleState) -> BlockKind:
    """What two blocks have in common that may share a graph."""
    return type(module), tuple(unit.plan.sharing_key for unit in state.units)


def hooks_inside(block: nn.Module) -> tuple[Any, ...]:
    """Return the hooks of the modules in a block: Dynamo traces them, but does not guard that there are none."""
    parts = ((name, part) for name, part in block.named_modules() if name)
    return tuple(
        (name, i, hook) for name, part in parts for i, kind in enumerate(_HOOKS(part)) for hook in kind.values()
    )
