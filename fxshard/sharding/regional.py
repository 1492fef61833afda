"""Compile a model block by block: each block is a compiled function, and what is around them runs as it is.

[Note: regional compilation]
`torch.compile(model, backend="fxshard", options={"regional": True})`. Blocks whose code and layout are alike share one
graph, so what is traced and compiled does not grow with the number of blocks. torch's recipe ("regional compilation")
has the user call `block.compile()` for each; here that happens when the model is called. The model's own frames run
with Dynamo off: a frame that calls blocks in a loop cannot be compiled, and each of the small ones beside it (a norm, a
rotary table) would gather the root's parameters once more.

The option is read from the compiled call that is under way (`torch.compile(model)`), or from what `model.compile()` was
given. The one-line form shards in the middle of the first trace, which is of the whole model: Dynamo then leaves that
frame, and breaks its graph at blocks that it meets in frames inside. The model was not sharded when
that call began, so no scope is open: until the next call, parameters are read as after a forward, [Note: after a
forward] in `runtime/eager.py`.

[Note: one graph or blocks]
With "auto", the default, a model is compiled block by block if that costs its steps next to nothing: it is not on a
CPU, has at least `MIN_BLOCKS` blocks that are alike, no option asks for one graph, and the launches of such a block
take at most `MAX_SHARE` of its compute, so that each graph hides its own. Measured: docs/adr/0019-repeated-blocks.md.
The first call chooses, by its tokens on the rank that comes first, and all ranks keep to it. A call that does not tell
its tokens leaves one graph.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, cast

import torch
import torch.compiler.config
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fxshard import torch_private
from fxshard.cost import measured
from fxshard.cost.blocks import transfers_per_compute
from fxshard.errors import ConfigError
from fxshard.hardware import describes
from fxshard.options import Options, parse
from fxshard.ranks.rendezvous import Rendezvous, is_alone
from fxshard.runtime import mesh_axes, uncompiled_warning
from fxshard.torch_private import CompiledWith

if TYPE_CHECKING:
    from fxshard.runtime.unit import Unit
    from fxshard.sharding.sharded_module import ModuleState

MIN_BLOCKS: Final = 8
"""Blocks that are alike from which on one graph takes much longer to compile."""

MAX_SHARE: Final = 0.25
"""How much of a block's compute its launches may take, so that it is compiled by itself."""

HAS_LIMIT: Final = "recompile_limit" in inspect.signature(torch.compile).parameters
"""Whether a function may have a limit of graphs of its own: from torch 2.13 on. Else "auto" leaves one graph."""

_log = logging.getLogger(__name__)

_HOOKS = attrgetter("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

ShardedModules = Mapping[str, "tuple[nn.Module, ModuleState]"]
"""The sharded modules of a model by their names in it, outer ones first; its own is \"\"."""


@dataclass(eq=False)
class CompiledCalls:
    """How the modules of one `fully_shard` call are compiled."""

    options_from: object = None  # the compiled call, or Dynamo's callback, of which the options were read last
    # id of a module -> what runs in place of its call
    runs: dict[int, Callable[..., Any]] = field(default_factory=dict)
    blocks: set[int] = field(default_factory=set)  # ids of those that are functions of their own
    has_blocks: bool = False  # whether there are any; a trace may read this, where ids would be guarded
    chosen: bool | None = None  # of a model: whether "auto" is block by block, once it was chosen


def compile_as_wanted(places: ShardedModules, callback: Any, inputs: object) -> None:
    """Compile a model block by block, or as a whole again, as the call wants that is about to run under `callback`.

    `inputs` are its arguments.
    """
    for _, state in places.values():
        for unit in state.units:
            if unit.plan.reshard_after_forward:  # a first call of the one-line form had begun it
                unit.step.after_forward.end()
    _compile_as(places, _ours(places[""][0], callback), inputs)


def begin_in_first_call(places: ShardedModules, compiled: nn.Module, inputs: object, then: Callable[[], None]) -> bool:
    """Compile the blocks of a model that its first call has sharded; `then` is called before a block runs."""
    if not _compile_as(places, _ours(compiled), inputs):
        return False
    places[""][1].compiled.options_from = compiled
    for module, state in places.values():
        for unit in state.units:
            unit.step.after_forward.begin()
        if id(module) in state.compiled.blocks:
            state.compiled.runs[id(module)] = _preceded(then, state.compiled.runs[id(module)])
    in_blocks = {
        id(part)
        for module, state in places.values()
        if id(module) in state.compiled.blocks
        for part in module.modules()
    }
    for module in places[""][0].modules():
        if id(module) not in in_blocks:
            module.__dict__[uncompiled_warning.SEEN] = True  # that it runs as it is needs no warning
    return True


def _preceded(by: Callable[[], None], run: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        by()
        return run(*args, **kwargs)

    return cast("Callable[..., Any]", torch.compiler.disable(call))


def _compile_as(places: ShardedModules, compiled_with: CompiledWith | None, inputs: object) -> bool:
    """Compile block by block or not, as the options of a backend say, and return which."""
    if compiled_with is None:
        return False
    backend, fullgraph = compiled_with
    given = backend.kwargs.get("options") or {}
    by_block = given.get("regional", "auto")
    if by_block == "auto":
        with contextlib.suppress(ConfigError):  # the backend raises it
            by_block = not fullgraph and _chosen(places, parse(given), inputs)
    if by_block is True:
        given = {**given, "regional": False}
        return compile_blocks(places, backend.compiler_fn, options=given, dynamic=backend.dynamic, fullgraph=fullgraph)
    forget_blocks(places)
    return False


def _chosen(places: ShardedModules, options: Options, inputs: object) -> bool:
    """Choose for all ranks, in the first call, and keep to it; see [Note: one graph or blocks]."""
    model, state = places[""]
    units = _units_of_alike(places)
    if options.wants_one_graph or not units:
        return False
    if state.compiled.chosen is None:
        found = str(_is_hidden(units, inputs, options.hardware))
        if not is_alone():
            ranks = mesh_axes.ranks_of(units[0].mesh)
            found = Rendezvous(f"regional/{type(model).__qualname__}", ranks, again=True).decide(found)
        state.compiled.chosen = found == str(True)
        if state.compiled.chosen:
            _log.info("fxshard: %s is compiled block by block; regional=False makes one graph.", type(model).__name__)
    return state.compiled.chosen


def prefers_blocks(places: ShardedModules, options: Options, inputs: object) -> bool:
    """Return what a rank alone chooses for "auto"; `inputs` are the arguments of the call."""
    units = _units_of_alike(places)
    return bool(units) and not options.wants_one_graph and _is_hidden(units, inputs, options.hardware)


def _is_hidden(units: Sequence[Unit], inputs: object, hardware: str | None) -> bool:
    numbers = measured.numbers_of(units, hardware)
    return (
        not describes(numbers, "cpu")
        and transfers_per_compute((unit.plan for unit in units), _tokens(inputs), numbers) <= MAX_SHARE
    )


def _units_of_alike(places: ShardedModules) -> list[Unit]:
    """Return the units in one of the blocks that are alike; none where "auto" leaves one graph.

    That is so for few blocks, and for several meshes: ranks that share one may not share the other, and so could not
    agree. Blocks that get a cache of keys and values, and those with hooks inside, would need a graph each.
    """
    kinds = {name: _kind(*places[name]) for name in _blocks_of(places)}
    count = Counter(kinds.values())
    most = max(kinds, key=lambda name: count[kinds[name]], default="")
    if not HAS_LIMIT or not most or count[kinds[most]] < MIN_BLOCKS:
        return []
    units = [unit for _, state in places.values() for unit in state.units]
    meshes = {unit.plan.group for unit in units}
    if len(meshes) > 1 or any(member.tensor_parallel for unit in units for member in unit.members):
        return []
    caches = any(getattr(getattr(each, "config", None), "use_cache", False) for each in places[""][0].modules())
    if caches or any(_hooks_inside(places[name][0]) for name in kinds):
        return []
    inside = [name for name in places if name == most or name.startswith(f"{most}.")]
    return [unit for name in inside for unit in places[name][1].units]


def _tokens(inputs: object) -> int:
    """Count the tokens of a call: of ids [batch, tokens], else of embeddings [batch, tokens, width]; 0 if neither."""
    tensors = [each for each in tree_leaves(inputs) if isinstance(each, Tensor) and each.dtype != torch.bool]
    ids = [each.numel() for each in tensors if not each.is_floating_point() and each.dim() <= 2]
    embedded = [each.numel() // each.shape[-1] for each in tensors if each.is_floating_point() and each.dim() == 3]
    return int(max(ids or embedded, default=0))


@dataclass(frozen=True)
class _WithHooks:
    """A backend for blocks with these hooks inside; Dynamo shares graphs among equal backends."""

    backend: Callable[..., Any]
    hooks: tuple[Any, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.backend(*args, **kwargs)


def compile_blocks(places: ShardedModules, backend: Callable[..., Any], **kwargs: Any) -> bool:
    """Have each block run as a compiled function, and the model around them as it is; return whether there are any."""
    forget_blocks(places)
    blocks = [places[name] for name in _blocks_of(places)]
    if not blocks:
        _log.warning(
            "fxshard: regional=True compiles units by themselves, and %s has none beside its root: it is compiled as a "
            "whole. Call fully_shard on its blocks.",
            type(places[""][0]).__name__,
        )
        return False
    hooks = [_hooks_inside(module) for module, _ in blocks]
    for (module, state), inside in zip(blocks, hooks, strict=True):
        call, own = torch_private.uncompiled_call(module), _WithHooks(backend, inside) if inside else backend
        state.compiled.runs[id(module)] = cast(Any, torch.compile)(
            call, backend=own, **kwargs, **_recompile_limit(len(blocks))
        )
        state.compiled.blocks.add(id(module))
        state.compiled.has_blocks = True
    model, state = places[""]
    state.compiled.runs[id(model)] = torch.compiler.disable(torch_private.uncompiled_call(model))
    return True


def _recompile_limit(num_blocks: int) -> dict[str, int]:
    """Allow Dynamo `recompile_limit` graphs for each block: blocks share a code object, but each may read other values.

    Hugging Face's do with a cache of keys and values: each reads its own number.
    """
    return {"recompile_limit": num_blocks * torch.compiler.config.recompile_limit} if HAS_LIMIT else {}


def forget_blocks(places: ShardedModules) -> None:
    """Let all modules run uncompiled."""
    for _, state in places.values():
        state.compiled.runs.clear()
        state.compiled.blocks.clear()
        state.compiled.has_blocks = False
    for module in places[""][0].modules():
        module.__dict__.pop(uncompiled_warning.SEEN, None)


def _ours(model: nn.Module, callback: Any = None) -> CompiledWith | None:
    """Return the backend "fxshard" with the options that a model was compiled with; `None` if it is another one."""
    backends = torch_private.backends_of(model, callback)
    return next((each for each in backends if getattr(each.backend, "compiler_name", None) == "fxshard"), None)


def _blocks_of(places: ShardedModules) -> list[str]:
    """Return the outermost modules that are alike another one, and those beside them that hold none of these."""
    kinds = {name: _kind(module, state) for name, (module, state) in places.items() if name and state.units}
    count = Counter(kinds.values())
    repeated = {name for name, kind in kinds.items() if count[kind] > 1}
    found: list[str] = []
    for name in kinds:
        if not any(name.startswith(f"{outer}.") for outer in found) and (
            name in repeated or not any(inner.startswith(f"{name}.") for inner in repeated)
        ):
            found.append(name)
    return found


def _kind(module: nn.Module, state: ModuleState) -> tuple[type[nn.Module], tuple[str, ...]]:
    """What two blocks have in common that may share a graph."""
    return type(module), tuple(unit.plan.sharing_key for unit in state.units)


def _hooks_inside(block: nn.Module) -> tuple[Any, ...]:
    """Return the hooks of the modules in a block: Dynamo traces them, but does not guard that there are none."""
    parts = ((name, part) for name, part in block.named_modules() if name)
    return tuple(
        (name, i, hook) for name, part in parts for i, kind in enumerate(_HOOKS(part)) for hook in kind.values()
    )
