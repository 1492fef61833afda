"""What Dynamo captured: which inputs are flats, what is not sharded; and compiling without a trace."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from types import CodeType, FunctionType
from typing import Any, Final, NoReturn, TypeVar, cast

import torch
from torch import Tensor, fx, nn
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo import config as dynamo_config
from torch._dynamo import pgo
from torch._dynamo.convert_frame import Tracker, input_codes, output_codes
from torch._dynamo.eval_frame import OptimizedModule, cached_backends, set_code_exec_strategy
from torch._dynamo.exc import BackendCompilerFailed, SkipFrame, TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.types import FrameAction, FrameExecStrategy
from torch._dynamo.utils import CleanupManager, counters
from torch.distributed.tensor import DTensor

from fxshard import torch_private
from fxshard.errors import UnsupportedGraph
from fxshard.live_objects import instances_of, referrers_of
from fxshard.runtime.flat_shard import Home, home_of
from fxshard.runtime.parameters import TRACED
from fxshard.sharding.sharded_module import ParameterOwner, plain_module

Error = TypeVar("Error", bound=Exception)

REGIONAL_OF_A_FUNCTION: Final = (
    "regional=True is for a model, but a function that calls one was given to torch.compile, which would be one graph. "
    "Compile the model: torch.compile(model, ...) or model.compile(...)."
)


def refuse_compiled_autograd() -> None:
    """Raise if compiled autograd is on: it inlines the backward before our passes have seen it."""
    if dynamo_config.compiled_autograd:
        raise UnsupportedGraph(
            "compiled autograd (torch._dynamo.config.compiled_autograd) is not supported with backend='fxshard': it "
            "inlines backward graphs before fxshard's passes run. Switch it off."
        )


def flats_of(example_inputs: Sequence[Any]) -> dict[int, Home]:
    """Map graph input index -> where the flat belongs, for the inputs that are flats."""
    homes = ((i, home_of(value)) for i, value in enumerate(example_inputs) if isinstance(value, Tensor))
    return {i: home for i, home in homes if home is not None}


def unsharded_parameters(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> dict[str, nn.Parameter]:
    """Map name in the user's code -> trainable parameter that enters the graph as it is, and is no DTensor."""
    found = parameters_of(gm, example_inputs)
    return {name: p for name, p in found.items() if p.requires_grad and not isinstance(p, DTensor)}


def parameters_of(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> dict[str, nn.Parameter]:
    """Map name in the user's code -> parameter that enters the graph as it is."""
    given = zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True)
    return {source_name(node): p for node, p in given if isinstance(p, nn.Parameter) and home_of(p) is None}


def source_name(placeholder: fx.Node) -> str:
    """Return where Dynamo found a graph input, as Python source; the node's name if Dynamo does not say."""
    source = getattr(placeholder, "_dynamo_source", None)
    return placeholder.name if source is None else readable(_name(source))


def readable(name: str) -> str:
    """Turn `L['self']._modules['blocks']._modules['0']._parameters['weight']` into `self.blocks.0.weight`."""
    expression = name.removeprefix("L").removeprefix("G")
    words = re.sub(r"(?:\._modules|\._parameters)?\['([^']+)'\]", r".\1", expression).strip(".")
    return re.sub(rf"(?:\.__dict__)?\.{TRACED}", "", words)


def refuse_replaced_parameters() -> None:
    """Raise if the code that Dynamo traces replaces sharded parameters: the graph would read the shards."""
    output = InstructionTranslator.current_tx().output
    modified = filter(output.side_effects.is_modified, output.side_effects.id_to_variable.values())
    sources = [source for variable in modified if (source := getattr(variable, "source", None)) is not None]
    registries = [source for source in sources if getattr(source, "member", "") == "_parameters"]
    found = [_name(source.base) for source in registries if isinstance(_value_of(source.base), ParameterOwner)]
    if found:
        raise UnsupportedGraph(
            f"the compiled code replaces parameters of sharded modules: {', '.join(map(readable, found))} "
            "(torch.func.functional_call?). Replace them outside of the compiled function."
        )


def roots_of(gm: fx.GraphModule) -> list[nn.Module]:
    """Return the outermost modules through which the user's code reached the parameters of a graph, each once.

    Each graph input knows the expression that led to it (`L['self']._modules['0']...`); its shortest prefix that is a
    module is the root. A compiled closure has no `self`, so the frame's locals alone would not do.
    """
    roots: dict[int, nn.Module] = {}
    for node in gm.graph.nodes:
        source = getattr(node, "_dynamo_source", None) if node.op == "placeholder" else None
        for prefix in reversed(list(_bases(source))):
            value = _value_of(prefix)
            if isinstance(value, nn.Module):
                root = plain_module(value)
                roots.setdefault(id(root), root)
                break
    return [r for r in roots.values() if not any(r is not o and r in list(o.modules()) for o in roots.values())]


def arguments_of(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[Tensor]:
    """Return the tensors that the traced call was given, in the order in which the graph has them."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    return [
        value
        for node, value in zip(placeholders, example_inputs, strict=True)
        if isinstance(value, Tensor) and _is_argument(list(_bases(getattr(node, "_dynamo_source", None))))
    ]


def _is_argument(sources: list[Any]) -> bool:
    is_input = bool(sources) and getattr(sources[-1], "is_input", False)
    return is_input and not any(isinstance(_value_of(source), nn.Module) for source in sources)


def uncast_arguments(gm: fx.GraphModule, dtype: torch.dtype, casting: set[str]) -> list[str]:
    """Name the floating-point tensors of other dtypes that the traced call of a model was given, as `x: float32`.

    What only modules of these FQNs (`casting`) read is left out: their calls cast it.
    """
    found = []
    for node in gm.graph.find_nodes(op="placeholder"):
        value, sources = node.meta["example_value"], list(_bases(getattr(node, "_dynamo_source", None)))
        if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != dtype:
            if not all(casting & _modules_around(user) for user in node.users) and _is_argument(sources):
                found.append(f"{source_name(node)}: {str(value.dtype).removeprefix('torch.')}")
    return found


def _modules_around(node: fx.Node) -> set[str]:
    stack = node.meta.get("nn_module_stack") or {}
    return {readable(path).removeprefix("self.") for path, _ in stack.values()}


def _value_of(source: Any) -> Any:
    """Return the value in the frame that Dynamo traces which it knows by this source; `None` if there is none."""
    root_frame = InstructionTranslator.current_tx().output.root_tx
    try:
        return source.get_value({"L": root_frame.f_locals, "G": root_frame.f_globals}, {}, {})
    except (NameError, SyntaxError, LookupError, AttributeError, TypeError, NotImplementedError):
        return None


def _bases(source: Any) -> Iterator[Any]:
    while source is not None:
        yield source
        source = getattr(source, "base", None)


def _name(source: Any) -> str:
    name = source.name
    return str(name() if callable(name) else name)


def restart(reason: str) -> NoReturn:
    """Have Dynamo forget this capture and trace the frame again, within the same call."""
    InstructionTranslator.current_tx().output.root_tx.speculation_log.clear()
    raise TensorifyScalarRestartAnalysis(restart_reason=reason)


def leave(reason: str) -> NoReturn:
    """Have Dynamo forget this capture, and run the frame as it is; its code is skipped from now on: `allow_again`."""
    raise SkipFrame(reason)


def allow_again() -> Callable[[], None]:
    """Return what lets Dynamo capture the code of this frame again, in another model of the class, once it was left."""
    code = InstructionTranslator.current_tx().output.root_tx.f_code
    return lambda: set_code_exec_strategy(code, FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT))


def compiled_model(root: nn.Module) -> nn.Module | None:
    """Return what was given the backend for `root`: itself by `root.compile()`, or the wrapper of `torch.compile`.

    `None` where that is a function which calls it.
    """
    wrappers = [each for each in instances_of(OptimizedModule) if each._orig_mod is root]
    return next((each for each in (root, *wrappers) if is_compiled_by_us(each)), None)


def compiled_around(part: nn.Module) -> nn.Module | None:
    """Return a live module that was given to `torch.compile` and contains `part` without being it."""
    for wrapper in instances_of(OptimizedModule):
        if wrapper._orig_mod is not part and any(m is part for m in wrapper._orig_mod.modules()):
            return wrapper._orig_mod
    return None


def is_compiled_by_us(module: nn.Module) -> bool:
    """Return whether `torch.compile(module)` or `module.compile()` was given the backend "fxshard"."""
    return any(getattr(each.backend, "compiler_name", None) == "fxshard" for each in torch_private.backends_of(module))


def refresh_compiled(root: nn.Module) -> None:
    """Let `torch.compile`'s wrappers of `root` call the class that it has now; they bound the old one's `__call__`."""
    for wrapper in instances_of(OptimizedModule):
        if wrapper._orig_mod is root:
            wrapper._initialize()


def as_raised_by_backend(error: Error) -> Error:
    """Return the same error in a class that Dynamo passes on as it is.

    Users catch `ConfigError`, but Dynamo wraps what a backend raises in BackendCompilerFailed, except its own
    exceptions. The result is both.
    """
    cls = type(error)
    body = {"__module__": cls.__module__, "__init__": lambda self: None, "first_useful_frame": None}
    both: Any = type(cls.__name__, (cls, BackendCompilerFailed), body)
    raised = both.__new__(both)
    raised.args = error.args
    raised.inner_exception = error
    return cast(Error, raised.with_traceback(error.__traceback__))


def register_backend(backend: Callable[..., Any], name: str) -> None:
    """Make `torch.compile(backend=name)` find `backend` when the package is imported but not installed."""
    if name not in entry_points(group="torch_dynamo_backends").names:
        torch._dynamo.register_backend(backend, name=name)


@contextmanager
def untouched_dynamo() -> Iterator[None]:
    """Have Dynamo forget, at the end, everything that it compiled inside.

    [Note: Dynamo's caches]
    Dynamo keeps what it compiles with code objects, which all instances of a class share. Compiling a copy of a model
    adds entries that the model's own calls would search and count against the recompile limit, and no entry can be
    removed by itself. So functions that Dynamo knows already run with a copy of their code meanwhile, and code that it
    came to know is reset afterwards, flags included. Sizes noted for automatic dynamic shapes (by file and line, not by
    code object), backends, counters and the lists of code that Dynamo has seen are put back, and what Dynamo put among
    the globals of the model's modules (compiled graphs, functions that resume after a graph break) is removed. Limit: a
    function that is defined anew in every call shares the code of its earlier definitions; if Dynamo knows that,
    entries are added to it.
    """
    known = {id(code): code for code in [*_alive(input_codes), *_alive(output_codes)]}
    borrowed = [(function, function.__code__) for function in _functions_of(known)]
    sizes, counts = copy.deepcopy(dict(pgo.get_code_state())), copy.deepcopy(dict(counters))
    backends = {*cached_backends}
    for function, code in borrowed:
        function.__code__ = code.replace()
    try:
        yield
    finally:
        for function, code in borrowed:
            function.__code__ = code
        for code in _alive(input_codes):
            if id(code) not in known:
                reset_code(code)
        for code in _alive(output_codes):
            if id(code) not in known and code in CleanupManager.instance:
                CleanupManager.instance._remove_id(id(code))
        for tracker in (input_codes, output_codes):  # else the next one inside would look for its functions
            tracker.seen[:] = [each for each in tracker.seen if (seen := each()) is not None and id(seen) in known]
            tracker.seen_ids.intersection_update(known)
        for current, saved in ((pgo.get_code_state(), sizes), (counters, counts)):
            current.clear()
            current.update(cast(Any, saved))
        for key in cached_backends.keys() - backends:
            del cached_backends[key]


def _alive(codes: Tracker) -> list[CodeType]:
    return [code for reference in codes.seen if (code := reference()) is not None]


def _functions_of(codes: dict[int, CodeType]) -> list[FunctionType]:
    owners = referrers_of(*codes.values()) if codes else []
    return [owner for owner in owners if type(owner) is FunctionType and id(owner.__code__) in codes]
