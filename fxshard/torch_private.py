"""What torch tells only in private: fake modes, Dynamo's state, whether a backward runs, its stores and groups.

Private names of torch stand here, in `compile/` and in `testing/`; `tests/test_architecture.py` looks for others.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from datetime import timedelta
from types import CodeType
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._C._distributed_c10d import (
    _register_process_group,
    _register_work,
    _resolve_process_group,
    _unregister_process_group,
)
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._C._dynamo.guards import GlobalStateGuard
from torch._C._functorch import peek_interpreter_stack
from torch._dynamo import eval_frame, trace_rules
from torch._dynamo.convert_frame import ConvertFrameAssert, input_codes, output_codes
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.external_utils import get_nonrecursive_disable_wrapper
from torch._dynamo.utils import counters, get_compilation_metrics
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor.fx_passes.control_dependencies import control_deps, preserve_node_ordering
from torch._inductor.runtime.cache_dir_utils import default_cache_dir as default_cache_dir
from torch._logging import trace_structured
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
)
from torch.autograd import Variable, profiler
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper as checkpoint_wrapper
from torch.distributed.distributed_c10d import _get_default_store, _hash_ranks_to_str, _world
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.utils import _apply_to_tensors
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.node import _get_qualified_name
from torch.optim import optimizer as optim_module
from torch.utils._ordered_set import OrderedSet
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
    is_traceable_wrapper_subclass,
)
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

FakeMode = FakeTensorMode
"""While it is on, tensors have shapes, strides, dtypes and devices, but no data."""

apply_to_tensors = _apply_to_tensors  # of (function, values): in all containers that FSDP2 looks into
mode_of = detect_fake_mode
"""The fake mode of some tensors, or of the compilation that runs."""

will_run = torch._C._will_engine_execute_node
"""Whether the running backward comes to a node: not in `autograd.grad` of something before it."""

backward_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether the running backward was called with `retain_graph=True`."""

copying_to = FakeCopyMode
"""`with copying_to(mode): copy.deepcopy(value)` copies tensors to fake ones."""

is_wrapper = is_traceable_wrapper_subclass
"""Whether a tensor is made of other tensors, as a DTensor is."""

DispatchMode = TorchDispatchMode
"""Base of a context manager that sees every op which runs in it."""

without_modes = _disable_current_modes
"""`with without_modes():` no dispatch mode sees what runs inside: as Dynamo compiles."""

eval_frame_callback = get_eval_frame_callback
"""Dynamo's state on this thread: a function (compiling), None (off), False (only run what is compiled)."""

is_never_compiled = trace_rules.check
"""Whether Dynamo never compiles some code for itself: torch's own, Python's."""

ENTRY_OF_DYNAMO = eval_frame.__file__
"""The file of the frame in which torch.compile begins."""

CALLS_WHAT_IS_DISABLED = get_nonrecursive_disable_wrapper(lambda: None).__code__
"""The code that runs a function which `torch.compiler.disable(recursive=False)` was given."""

compilation_metrics = get_compilation_metrics
"""What Dynamo noted of its last compilations: the code, and why it failed or began anew."""

NO_VALUE = (DataDependentOutputException, DynamicOutputShapeException)
"""Raised where code asks a fake tensor for what only data knows; `error.func` is the op."""

REDUCES_IN_STORAGE_DTYPE = hasattr(FSDPParam, "unsharded_grad_dtype")
"""Whether `reduce_dtype=None` means the parameter's dtype, as in FSDP2 from torch 2.15 on, or the gradient's."""

default_store = _get_default_store
"""The store at which the ranks of the default process group met."""

register_work, register_group = _register_work, cast("Callable[[str, Any], None]", _register_process_group)
"""Who waits for a tensor waits for its work; graphs find a group by its name, as long as somebody holds it."""

CONTROL_DEPS = control_deps
"""The op of Inductor that runs a node after others: `control_deps(others, subgraph of the node, *its inputs)`."""

PINS_ALL = torch.__version__ >= "2.12"
"""Whether `control_deps` takes every op; that of torch 2.11 takes none without a result."""

CONVOLUTION_TAKES_VIEWS = torch.__version__ >= "2.12"
"""Whether Inductor lowers a convolution whose bias is a view, which has no layout of its own to freeze."""

CALLERS_INPUTS = ("primals_", "tangents_")
"""How AOTAutograd's names of backward's inputs begin that are not what forward saved: parameters, inputs, gradients."""

_POLICIES = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)

Function = TypeVar("Function", bound=Any)
Result = TypeVar("Result")


def is_of_torch(node: fx.Node) -> bool:
    """Return whether what a node calls is torch's or Python's own, so that its name says what it computes."""
    if node.op != "call_function" or isinstance(node.target, OpOverload | OpOverloadPacket | HigherOrderOperator):
        return True
    name = target_text(node)
    return name.partition(".")[0] in ("torch", "_operator", "math") or hasattr(builtins, name)


SET_GRAD_ENABLED, EXIT_AUTOCAST = torch._C._set_grad_enabled, torch.amp.autocast_mode._exit_autocast
LOG_USAGE = torch._C._log_api_usage_once
"""What Dynamo's graphs call to change torch's state, and without effect."""

CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
"""What Dynamo makes of `torch.utils.checkpoint`: `tag_activation_checkpoint(function, *inputs)`."""


def is_plain_and_static(tensor: Tensor) -> bool:
    """Return whether a tensor is made of no others and has a shape of numbers."""
    sizes = (*tensor.shape, *tensor.stride(), tensor.storage_offset()) if tensor.layout is torch.strided else (None,)
    return not is_wrapper(tensor) and all(type(size) is int for size in sizes)


def target_text(node: fx.Node) -> str:
    """Return the name of what a node calls, the same in every process."""
    return node.target if isinstance(node.target, str) else _get_qualified_name(node.target)


def global_state() -> str:
    """Return what decides a trace besides the code: grad mode, autocast, kernels for attention and so on, as text."""
    attention = [getattr(torch.backends.cuda, f"{kind}_sdp_enabled")() for kind in ("flash", "mem_efficient", "math")]
    return f"{GlobalStateGuard().__getstate__()} {attention} {torch.backends.cuda.cudnn_sdp_enabled()}"


def is_fake(tensor: Tensor) -> bool:
    """Return whether `tensor` has no data behind it."""
    return isinstance(tensor, FakeTensor)


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode | None:
    """Return the fake mode that `graph` was traced in, `None` for a graph without tensors."""
    for node in graph.nodes:
        value = node.meta.get("val")
        for leaf in value if isinstance(value, list | tuple) else (value,):
            if isinstance(leaf, FakeTensor):
                return leaf.fake_mode
    return None


def sizes_when_traced(shape_env: Any) -> Mapping[Any, int]:
    """Return the values that symbols stood for when a graph was traced; to read them adds no guard."""
    known: Mapping[Any, int] = shape_env.backed_var_to_val
    return known


@contextmanager
def beside_a_trace(tensor: Tensor) -> Iterator[None]:
    """Run ops on fake tensors in the mode of one; the trace that made it ignores the sizes that they make up."""
    mode = cast(FakeTensor, tensor).fake_mode
    with mode, mode.shape_env.ignore_fresh_unbacked_symbols() if mode.shape_env is not None else nullcontext():
        yield


@contextmanager
def tracing_in(mode: FakeTensorMode | None) -> Iterator[None]:
    """Compile something in this fake mode, apart from any compilation that runs."""
    with tracing(TracingContext(mode)):
        yield


def run_after(graph: fx.Graph, before: Mapping[fx.Node, Sequence[fx.Node]]) -> None:
    """Put each node into a `control_deps` behind the ones that it is mapped to; its name and metadata stay."""
    preserve_node_ordering(graph, {node: OrderedSet(others) for node, others in before.items() if others})


def inside(node: fx.Node) -> tuple[fx.Node, dict[fx.Node, fx.Node]]:
    """Return the node in a `control_deps`, and which node of the graph stands for each of its inputs."""
    _, subgraph, *inputs = node.args
    owner = node.graph.owning_module
    assert isinstance(subgraph, fx.Node)
    assert owner is not None
    graph = cast(fx.GraphModule, owner.get_submodule(str(subgraph.target))).graph
    inner = graph.output_node().args[0]
    assert isinstance(inner, fx.Node)
    return inner, dict(zip(graph.find_nodes(op="placeholder"), cast("list[fx.Node]", inputs), strict=True))


def input_index(placeholder: fx.Node) -> int | None:
    """Return which input of the captured graph a placeholder of AOTAutograd's is, `None` for what AOTAutograd added."""
    index = getattr(placeholder.meta.get("desc"), "idx", None)
    return index if isinstance(index, int) else None


def disagreements(graph: fx.Graph) -> Iterator[tuple[fx.Node, str, str]]:
    """Find nodes whose value is recorded otherwise than running them gives: yield the node and both."""
    mode = fake_mode_of(graph)
    if mode is None:
        return
    for node in graph.nodes:
        inputs = [source.meta.get("val") for source in node.all_input_nodes]
        if not isinstance(node.target, torch._ops.OpOverload) or any(value is None for value in inputs):
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
        try:
            with mode, torch.no_grad():
                found = _looks(node.target(*args, **kwargs))
        except (RuntimeError, TypeError, ValueError, IndexError, AssertionError) as error:
            found = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        recorded = _looks(node.meta.get("val"))
        if found != recorded:
            yield node, recorded, found


def _looks(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, list | tuple):
        return f"({', '.join(_looks(item) for item in value)})"
    return type(value).__name__


def run_this_frame_eagerly(function: Function) -> Function:
    """Decorate a function that Dynamo may inline but must never compile for itself; it is offered what that calls."""
    skip_code(function.__code__)
    return function


def break_graph() -> None:
    """Have Dynamo end its graph here, where it traces the call."""
    torch._dynamo.graph_break()


def uncompiled_call(module: torch.nn.Module) -> Callable[..., Any]:
    """Return a module's call, hooks included, without what `module.compile()` was given."""
    return module._call_impl


class CompiledWith(NamedTuple):
    """What compiles the calls of a module: Dynamo's innermost wrapper, and whether a graph break is an error."""

    backend: Any  # with the user's `compiler_name` and `kwargs`, if it is a backend
    fullgraph: bool


def backends_of(module: torch.nn.Module, callback: Any = None) -> list[CompiledWith]:
    """Find what `torch.compile` or `compile()` left in a module, after `callback`, Dynamo's on this thread."""
    if isinstance(module, eval_frame.OptimizedModule):
        found = [getattr(module.dynamo_ctx, "callback", None)]
    else:
        closure = getattr(module._compiled_call_impl, "__closure__", None) or ()
        found = [cell.cell_contents for cell in closure if hasattr(cell, "cell_contents")]
    return [_innermost(each) for each in (callback, *found)]


def _innermost(callback: Any, fullgraph: bool = False) -> CompiledWith:
    while (inner := getattr(callback, "_torchdynamo_orig_backend", None)) is not None:
        callback, fullgraph = inner, fullgraph or isinstance(callback, ConvertFrameAssert)
    return CompiledWith(callback, fullgraph)


def was_given_to_dynamo(code: CodeType) -> bool:
    """Return whether Dynamo has looked at this code of the user's."""
    return code in input_codes


def was_made_by_dynamo(code: CodeType) -> bool:
    """Return whether Dynamo has made this code: what remains of a frame, or goes on after a graph break."""
    return code in output_codes


def backward_id() -> int | None:
    """Return the identity of the backward that this thread is running, `None` outside of one."""
    return None if (task := torch._C._current_graph_task_id()) == -1 else task


def compilations() -> int:
    """Return how often AOTAutograd has traced a graph, which runs backwards of its own."""
    return counters["aot_autograd"]["total"]


def compiled_nodes(result: Tensor) -> Iterator[Any]:
    """Return the backwards of AOTAutograd's graphs behind a tensor with a `grad_fn`, the nearest on each way back."""
    waiting, seen = [result.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "CompiledFunctionBackward":
            yield node
        else:
            waiting.extend(before for before, _ in node.next_functions)


def is_computed_again() -> bool:
    """Return whether backward may compute again what autograd saves now: checkpointing's hooks do so."""
    return _top_saved_tensors_default_hooks(True) is not None


def policy_is_on() -> bool:
    """Return whether a policy of selective activation checkpointing sees the ops that this thread runs."""
    return any(isinstance(mode, _POLICIES) for mode in _get_current_dispatch_mode_stack())


@contextmanager
def unseen_by_policies() -> Iterator[None]:
    """Hide ops from policies of selective checkpointing, which count ops: recomputation must show them the same."""
    if not policy_is_on():
        yield
        return
    modes = _get_current_dispatch_mode_stack()
    others = [mode for mode in modes if not isinstance(mode, _POLICIES)]
    _exchange_modes(modes, others)
    try:
        yield
    finally:
        _exchange_modes(others, modes)


def _exchange_modes(present: Sequence[TorchDispatchMode], modes: Sequence[TorchDispatchMode]) -> None:
    for _ in present:
        _pop_mode()
    for mode in modes:
        _push_mode(mode)


@contextmanager
def outside_transforms(are_left: bool) -> Iterator[None]:
    """Run code outside of all `torch.func` transforms and FX traces: what it makes is constant to them."""
    with ExitStack() as stack:
        if are_left and peek_interpreter_stack() is not None:
            stack.enter_context(temporarily_clear_interpreter_stack())
        if are_left and get_proxy_mode() is not None:
            stack.enter_context(_disable_current_modes())
        yield


def as_in_forward(choose: Callable[[], Result]) -> Result:
    """Choose between graphs of different ops; recomputation under a policy takes over what its forward chose."""
    modes: list[Any] = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, _POLICIES)]
    chosen: list[Result] = modes[-1].storage.setdefault(as_in_forward, []) if modes else []
    if modes and isinstance(modes[-1], _CachedTorchDispatchMode) and chosen:
        return chosen.pop(0)
    chosen.append(choose())
    return chosen[-1]


def profiler_runs() -> bool:
    """Return whether a torch profiler records now, on whatever thread."""
    return profiler._is_profiler_enabled


def run_unrecorded(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op that the profiler has recorded already, when a `DispatchMode` got it."""
    torch.autograd._enable_record_function(False)
    try:
        return op(*args, **kwargs)
    finally:
        torch.autograd._enable_record_function(True)


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Hand a text to torch's structured trace (`TORCH_TRACE`, read by `tlparse`); made only if someone traces."""
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text)


@contextmanager
def named_groups(sizes: Mapping[str, int]) -> Iterator[None]:
    """Let torch find groups of ranks that do not exist by name: Inductor looks up the size of each group in a graph."""
    make: Any = dist.ProcessGroup  # its stubs want a store, which only a group that talks needs
    groups = {name: make(0, size) for name, size in sizes.items() if not _is_group(name)}  # torch holds them weakly
    for name, group in groups.items():
        _register_process_group(cast(Any, name), group)
    try:
        yield
    finally:
        for name in groups:
            _unregister_process_group(cast(Any, name))


def holds(condition: Tensor, message: str) -> bool:
    """Return whether a one-element condition holds; on a GPU, whose stream fails if it does not, always."""
    if condition.is_cuda:
        torch._assert_async(condition, message)
    return condition.is_cuda or bool(condition)


def process_group_of(name: str) -> dist.ProcessGroup:
    """Return the process group that graphs call `name`."""
    return _resolve_process_group(cast(Any, name))


def gloo_of_one_thread(given: Any, interfaces: Sequence[str]) -> Any:
    """Return torch's gloo, made of what `Backend.register_backend(extended_api=True)` hands over, with one thread."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    named = [gloo.create_device(interface=name) for name in interfaces]
    options._devices, options._threads = named or [gloo.create_default_device()], 1
    options._timeout = given.timeout
    options.global_ranks_in_group, options.group_name = given.global_ranks_in_group, given.group_id
    return gloo(given.store, given.group_rank, given.group_size, options)


def num_groups() -> int:
    """Return the number after which this rank names the next `new_group(use_local_synchronization=True)`."""
    counts_calls = "group_count" in _hash_ranks_to_str.__code__.co_names  # torch 2.15; before, the groups that it has
    return _world.group_count if counts_calls else len(_world.pg_names)


def backend_for(group: dist.ProcessGroup, device_type: str) -> Any:
    """Return what does a group's collectives of tensors on such a device."""
    return cast(Any, group)._get_backend(torch.device(device_type))


def step_hooks_of(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """Return what torch calls before and after each step of an optimizer: its own hooks, and those of all of them."""
    own: Any = optimizer
    everybody = (optim_module._global_optimizer_pre_hooks, optim_module._global_optimizer_post_hooks)
    registered = (*everybody, own._optimizer_step_pre_hooks, own._optimizer_step_post_hooks)
    return [hook for each in registered for hook in each.values()]


def timeout_of(group: dist.ProcessGroup, device_type: str) -> timedelta | None:
    """Return after which a collective of the group fails; `None` where it has no such thing, as a group in Python."""
    with suppress(RuntimeError):
        return getattr(getattr(backend_for(group, device_type), "options", None), "_timeout", None)
    return None


def num_collectives(group: dist.ProcessGroup, device: torch.device) -> int:
    """Return how many collectives of such a device this rank has launched on the group; 0 where nobody counts."""
    with suppress(RuntimeError):
        return int(backend_for(group, device.type)._get_sequence_number_for_group())
    return 0


def when_backward_ends(call: Callable[[], None]) -> None:
    """Call something when the backward that runs now is done."""
    cast(Any, Variable._execution_engine).queue_callback(call)


def _is_group(name: str) -> bool:
    with suppress(RuntimeError):
        return bool(_resolve_process_group(cast(Any, name)))
    return False


def storage_id(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage, a DTensor's of its part: equal for views, also for fake tensors."""
    return cast(int, getattr(tensor, "_local_tensor", tensor).untyped_storage()._cdata)


def storage_users(tensor: Tensor) -> int:
    """Return how many objects hold a tensor's storage: more than before, if somebody has a new view of it."""
    return torch._C._storage_Use_Count(storage_id(tensor))
