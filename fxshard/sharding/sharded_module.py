"""What a sharded module is: its state, its calls and its methods; `sharding/swapped_class.py` makes its class."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fxshard import torch_private
from fxshard.errors import ConfigError
from fxshard.runtime import eager, process_groups
from fxshard.runtime.parameters import REFS, without_offset
from fxshard.runtime.prefetcher import UnshardHandle
from fxshard.runtime.unit import Unit
from fxshard.sharding import fsdp2_settings, initial_rows, regional, stale_holders
from fxshard.sharding.call_values import awaited, cast_inputs, cast_output
from fxshard.sharding.fixed_places import member_at, refuse_to_delete, refuse_to_displace
from fxshard.sharding.fsdp2_settings import GradientReductionHandle

STATE = "_fxshard_state"
"""Key in the `__dict__` of a module that was given to `fully_shard`."""


@dataclass(eq=False)
class ModuleState:
    """What `fully_shard` leaves on a module."""

    units: tuple[Unit, ...]  # made by that call; none, if all parameters were taken already
    mp_policy: MixedPrecisionPolicy
    nested: tuple[Unit, ...] = field(default=())  # those, and the units of all modules inside
    was_called: bool = False  # by itself, or a module around it was
    compiled: regional.CompiledCalls = field(default_factory=regional.CompiledCalls)

    def chosen(self, recurse: bool) -> tuple[Unit, ...]:
        """The units that a setting is for."""
        return self.nested if recurse else self.units


def state_of(module: nn.Module) -> ModuleState | None:
    """Return the state of a module that was given to `fully_shard`, else `None`."""
    return cast("ModuleState | None", module.__dict__.get(STATE))


def plain_module(module: nn.Module) -> nn.Module:
    """Return the module inside `torch.compile`'s wrapper, or the module itself."""
    return cast(nn.Module, module.__dict__["_modules"].get("_orig_mod", module))


def is_compiled(module: nn.Module) -> bool:
    """Return whether `torch.compile(module)` or `module.compile()` was applied."""
    return plain_module(module) is not module or module._compiled_call_impl is not None


def states_under(module: nn.Module) -> dict[str, tuple[nn.Module, ModuleState]]:
    """Return the modules under a module that were given to `fully_shard`, by name, each before what is inside."""
    return {name: (child, state) for name, child in module.named_modules() if (state := state_of(child))}


def units_under(module: nn.Module) -> tuple[Unit, ...]:
    """Return all units of `module` and the modules inside it, each once, in `named_modules` order."""
    found: dict[int, Unit] = {}
    for child in module.modules():
        state = state_of(child)
        found.update({id(unit): unit for unit in (state.units if state else ())})
    return tuple(found.values())


class ParameterOwner(nn.Module):
    """Mixed into the class of every module that owns a sharded parameter; see [Note: swapped classes]."""

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Refuse at once what could not stand in place of a shard; `module.weight = ...` comes through here."""
        if param is not None:
            if member := member_at(self, name):
                member.require_shard(param)
            refuse_to_displace(self, name)
        super().register_parameter(name, param)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Refuse the same: as a buffer `remove_parametrizations` registers what is frozen, or unsharded just now."""
        refuse_to_displace(self, name)
        super().register_buffer(name, tensor, persistent)

    def __delattr__(self, name: str) -> None:
        """Refuse at once to take away a shard: `register_parametrization` comes through here."""
        refuse_to_delete(self, name)
        super().__delattr__(name)

    def get_parameter(self, target: str) -> nn.Parameter:
        """Return the parameter itself, as torch's: also where `module.weight` is unsharded after a forward."""
        path, _, name = target.rpartition(".")
        owner = self.get_submodule(path)
        if not isinstance(owner._parameters.get(name), nn.Parameter):
            return super().get_parameter(target)  # which says why there is none
        return cast(nn.Parameter, owner._parameters[name])

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in () if keep_vars else self.__dict__.get(REFS, {}):
            if isinstance(found := destination.get(prefix + name), DTensor):
                destination[prefix + name] = without_offset(found)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuse: a copy would need its own flats."""
        raise ConfigError(
            f"deepcopy of {type(self).__name__}, which is sharded, is not supported. Build a second model, shard it "
            "and load this one's state_dict() into it."
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse: a pickle would hold one rank's rows only."""
        raise ConfigError(
            f"pickling {type(self).__name__}, which is sharded, is not supported. Save its state_dict() with "
            "torch.distributed.checkpoint.save instead."
        )


class ShardedModule(ParameterOwner):
    """A module that was given to `fully_shard`. Methods have FSDP2's names and meaning."""

    _fxshard_unit = True  # as passes see it, which know no modules

    @torch_private.run_this_frame_eagerly
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Cast inputs, run the module, cast outputs, as the mixed-precision policy says."""
        if torch.compiler.is_compiling():
            if self.__dict__[STATE].compiled.has_blocks:
                torch_private.break_graph()
            policy = self.__dict__[STATE].mp_policy
            args, kwargs = cast_inputs(policy, args, kwargs)
            return cast_output(policy, super().__call__(*args, **kwargs))
        state, args, kwargs = enter_call(self, args, kwargs, torch_private.eval_frame_callback())
        try:
            run = state.compiled.runs.get(id(self)) or super().__call__
            return end_call(state, run(*args, **kwargs))
        finally:
            leave_call(state)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ShardedModule:
        """Repack after `.to(...)`, `.to_empty(...)` and the like, where parameters became other tensors."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for unit in _state(self).nested:
            unit.reattach_if_possible()
        return self

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        raise ConfigError(
            f"DistributedDataParallel({type(self).__name__}): fxshard has sharded the module and reduces its "
            "gradients. Leave DistributedDataParallel out."
        )

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Change `reshard_after_forward` of this module's unit, and of all inside it unless `recurse` is False."""
        _set_bool(self, "reshard_after_forward", reshard_after_forward, recurse, "reshard_after_forward")

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Say whether backwards that run from now on reduce gradients; with `recurse` in all modules inside as well.

        Without, gradients are added up unsharded, in the reduce dtype, and `.grad` stays as it is. The first backward
        with it reduces what was added up. `fxshard.no_sync` does this for as long as a block runs.
        """
        _set_bool(self, "requires_gradient_sync", requires_gradient_sync, recurse, "sync", "averages")

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Say whether graphs that run from now on free the parameters; compiled code only.

        Without, the next forward gathers all of a unit at once, and its parameters stay unsharded until this is set to
        True again and a backward runs with gradient sync. Writes to them and steps of torch's optimizers free them as
        well. Some writes are not seen: to `.data` or `to_local()`, by `torch._foreach_*` (as averages of weights use),
        and a checkpoint loaded in place into `state_dict()`. After such a write call `reshard` on every sharded module.
        With `recurse` all this holds for the modules inside as well.
        """
        _set_bool(self, "reshard_after_backward", reshard_after_backward, recurse, "reshard_after_backward")

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Let reductions run on a process group of their own: one communicator carries one collective at a time.

        Without `enable` they are launched on the mesh's group, as gathers are. Making a group is collective: all ranks
        of the mesh must call this in the same way. The next forward compiles anew. With `recurse` this holds for the
        modules inside as well.
        """
        process_groups.separate(_state(self).chosen(recurse), enable)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Say whether a backward that ends from now on is the last one of its step.

        At the end of the last one what waits in units that it did not touch is reduced. Say False where one step has
        several backwards with gradient sync, as in a pipeline, to leave that to the last of them.
        """
        _require_bool("is_last_backward", is_last_backward)
        for unit in _state(self).nested:
            unit.model.settings = replace(unit.model.settings, is_last=is_last_backward)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Say whether the caller ends each step with `finalize_backward`; for the outermost module."""
        _require_bool("enabled", enabled)
        fsdp2_settings.set_ended_by_hand(_state(self).nested, enabled)

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce, after all backwards of a step, what still waits in units with gradient sync; on all ranks."""
        _require_bool("async_op", async_op)
        fsdp2_settings.end_step(_state(self).nested)
        return GradientReductionHandle() if async_op else None

    def reduce_waiting_gradients(self) -> None:
        """Reduce now what was added up without gradient sync, here and inside; all ranks call this alike."""
        for unit in _state(self).nested:
            unit.model.reduce([unit])

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Launch the gather of this module's parameters now, for the next call of the outermost module.

        Compiled code takes it over where it is the first gather of a graph that has run before; in the middle of a
        graph the passes have placed it. Call it after parameters were changed, and again after each change: a write to
        `.data` or `to_local()`, or by `torch._foreach_*`, does not make an earlier gather old.

        Returns:
            With `async_op` a handle whose `wait()` waits for it.
        """
        units = _state(self).units
        handle = UnshardHandle(
            [tensor for unit in units for tensor in unit.model.prefetcher.launch_for_next_call(unit)]
        )
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free what was gathered of this module's parameters for a graph that has not begun; a graph frees its own."""
        for unit in _state(self).units:
            unit.reshard()

    def reset_iter_state(self) -> None:
        """Forget what a step that was interrupted by an exception left behind: gathers, and gradients that wait."""
        _drop_waiting(self)
        for unit in _state(self).nested:
            unit.model.prefetcher.forget()  # first: it ends waits for what another rank never launched
            unit.reshard()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, those that wait to be reduced as well."""
        if not torch.compiler.is_compiling():
            _drop_waiting(self)
        super().zero_grad(set_to_none)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the current stream wait for `event` before the next gather.

        For an optimizer on a stream of its own. Record the event after the parameters were written; it holds for one
        forward. On the CPU, where nothing is queued, nothing happens.
        """
        if not isinstance(event, torch.Event):
            raise ConfigError(f"set_post_optim_event expects a torch.Event, got {type(event).__name__}.")
        for unit in _state(self).nested:
            unit.model.prefetcher.after = event

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this module's gradients by `factor`, and not by the number of ranks; the next forward compiles anew.

        As FSDP2's, but that fp32 and bf16 sums are divided after the reduction, where FSDP2 has NCCL do it before.
        """
        fsdp2_settings.set_divide_factor(_state(self).units, factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Do what `set_gradient_divide_factor` does: its name of before."""
        warnings.warn(
            "set_reduce_scatter_divide_factor is now set_gradient_divide_factor.", DeprecationWarning, stacklevel=2
        )
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Reduce this module's gradients by sums, and divide after; the next forward compiles anew."""
        _set_bool(self, "enable", enable, False, "sums_only")

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: torch.Stream | None = None) -> None:
        """Call `hook` with each reduced gradient of this module's unit, to be changed in place.

        After the reduce_scatter, and the all_reduce if the mesh has replicas; a hook may all_reduce over ranks that
        the mesh does not know. It runs outside of graphs, when backward hands the gradient over: so it overlaps with
        nothing of its graph. It gets one tensor per dtype of the unit, in that dtype, divided already.

        Args:
            hook: called in the same order on all ranks.
            stream: to run it on; not with replicas.
        """
        fsdp2_settings.set_all_reduce_hook(_state(self).units, hook, stream)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Say whether backwards average over replicas what they reduce; without replicas it sets nothing.

        Without, reduced gradients are added up, a shard each, and `.grad` stays as it is. The first backward with it
        averages what was added up; that all_reduce runs outside of the graph, and is not hidden.
        `set_requires_gradient_sync` and `no_sync` leave out both collectives, and keep whole gradients.
        """
        _set_bool(self, "requires_all_reduce", requires_all_reduce, recurse, "averages")

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Say whether to reduce zeros for parameters that a backward gives no gradient.

        For ranks that take other branches in a module: with it they reduce the same parameters, if each reads one of
        the module's. Backward then gathers all of the module, and no bucket or prefetch depends on what a graph costs.
        With `recurse` this holds for the modules inside as well; the next forward compiles anew.
        """
        _set_bool(self, "reduce_scatter_unused_params", reduce_scatter_unused_params, recurse, "reduces_unused")

    def set_custom_all_gather(self, comm: Any) -> None:
        """Let an object gather this module's parameters, as FSDP2's; the next forward compiles anew.

        It is called once for each gather and dtype of the unit, with buffers that its `allocate` has given, and must be
        of the same type on all ranks. Blocks that are to share a graph must have the same object. One of torch's own
        sets nothing: Inductor decides where buffers lie.
        """
        fsdp2_settings.set_comm(_state(self).units, "all_gather", comm)

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Let an object reduce this module's gradients: as `set_custom_all_gather`."""
        fsdp2_settings.set_comm(_state(self).units, "reduce_scatter", comm)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Refuse True: a graph owns what it gathers, and allocates it anew in each run."""
        _require_bool("keep", keep)
        fsdp2_settings.refuse_kept_storage(keep)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set nothing, and say so once: backward gathers what it reads, and nothing else."""
        _require_bool("unshard_in_backward", unshard_in_backward)
        fsdp2_settings.say_once("set_unshard_in_backward")

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Set nothing, and say so once: Inductor allocates the buffers of a graph."""
        _require_bool("enable", enable)
        fsdp2_settings.say_once("set_allocate_memory_from_process_group_for_comm")

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Set nothing, and say so once: Inductor allocates the buffers of a graph."""
        fsdp2_settings.say_once("set_symm_mem_for_comm")

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Set nothing, and say so once: it is the option of that name of `torch.compile`."""
        fsdp2_settings.say_once("set_reduce_scatter_max_input_buffers")

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module] | None) -> None:
        """Say which modules' parameters to gather ahead in forward; compiled code only.

        Right after the wait for this module's own gather those of `modules` are launched, in this order, unless they
        are in flight or gathered already. An empty list means what the option `prefetch` says, `None` nothing. After a
        change the next forward compiles anew. Blocks that are compiled one by one share a graph only if each lists the
        same as seen from it (the next one, say); else Dynamo may have to be allowed more graphs
        (`torch._dynamo.config.recompile_limit`).

        Raises:
            ConfigError: one of them is not sharded, or this module has no parameters of its own.
        """
        _set_prefetch(self, "forward", modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module] | None) -> None:
        """Do the same for backward, where a list stands in place of what `prefetch` says."""
        _set_prefetch(self, "backward", modules)


def _state(module: nn.Module) -> ModuleState:
    try:
        return cast(ModuleState, module.__dict__[STATE])
    except KeyError:  # torch.compile's wrapper holds on to the call of the class that the module had
        raise ConfigError(
            f"{type(module).__name__} was given back by fxshard.release(), and what torch.compile made of it before is "
            "called. Call the module that release() returned, or compile that anew."
        ) from None


def _set_bool(module: ShardedModule, argument: str, value: object, recurse: bool, *names: str) -> None:
    _require_bool(argument, value)
    for unit in _state(module).chosen(recurse):
        unit.set(**dict.fromkeys(names, value))


def _drop_waiting(module: ShardedModule) -> None:
    for unit in _state(module).nested:
        unit.model.drop([unit])


def _require_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be a bool, got {value!r}.")


def _set_prefetch(module: ShardedModule, direction: str, modules: Sequence[nn.Module] | None) -> None:
    setter = f"set_modules_to_{direction}_prefetch"
    state = _state(module)
    if not isinstance(modules, list | tuple | nn.ModuleList | None):
        raise ConfigError(f"{setter} expects a list of modules or None, got {type(modules).__name__}.")
    listed = [plain_module(each) if isinstance(each, nn.Module) else each for each in modules or ()]
    for each in listed:
        if not isinstance(each, ShardedModule):
            raise ConfigError(f"{setter} expects modules that fully_shard has sharded, got {type(each).__name__}.")
    if not state.units:
        raise ConfigError(
            f"{setter}: {type(module).__name__} has no parameters of its own to wait for: its submodules have them "
            "all. Call it on one of these."
        )
    units = tuple(unit for each in listed for unit in _state(each).units)
    wanted = units or (None if modules is None or listed else ())
    for unit in state.units:
        unit.set(**{f"{direction}_prefetch": wanted})


def _open_call(module: ShardedModule, args: Any, kwargs: Any, callback: Any = None) -> tuple[ModuleState, Any, Any]:
    """Open the scope of a call; the outermost one first makes sure that every parameter is a view of its flat."""
    state = _state(module)
    if not eager.inside_call():
        compiled_by, known = callback or module._compiled_call_impl, state.compiled
        if compiled_by is not None and compiled_by is not known.options_from and id(module) not in known.blocks:
            regional.compile_as_wanted(states_under(module), callback, (args, kwargs))
            known.options_from = compiled_by
        elif compiled_by is None and known.options_from is not None and torch_private.backward_id() is None:
            known.options_from = None  # as uncompiled as one graph is here; a recomputation is as its forward
            regional.forget_blocks(states_under(module))
        for unit in state.nested:
            unit.check()
        if state.nested:
            state.nested[0].model.require_whole_sums()
        if not state.was_called:
            for member in (member for unit in state.nested for member in unit.members):
                member.require_known_hooks()
            stale_holders.refuse(state.nested)
            with torch_private.without_modes():  # a policy of checkpointing counts ops
                initial_rows.warn_of_equal_rows(state.nested)
            for _, under in states_under(module).values():
                under.was_called = True  # and not as the outermost one of a recomputation
    args, kwargs = cast_inputs(state.mp_policy, *awaited(args, kwargs))
    eager.enter_call(state.units)
    return state, args, kwargs


def _end_forward(state: ModuleState, result: Any) -> Any:
    eager.forward_ended(state.nested)
    result = cast_output(state.mp_policy, result)
    if state.nested and torch.is_grad_enabled() and not eager.inside_call(2):
        state.nested[0].model.watch_backward(result)
    return result


def _close_call(state: ModuleState) -> None:
    """Close the scope of a call; the outermost one leaves no gather behind."""
    try:
        eager.leave_call()
    finally:
        if not eager.inside_call() and state.nested:
            state.nested[0].model.prefetcher.end()


# While a compiled function runs, Dynamo offers itself every Python frame that is called. These must run as they are.
enter_call = torch.compiler.disable(_open_call)
leave_call = torch.compiler.disable(_close_call)
end_call = torch.compiler.disable(_end_forward)
