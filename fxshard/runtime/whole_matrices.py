"""Optimizers that need whole matrices, on sharded parameters: `fxshard.whole_matrices`.

[Note: whole matrices]
Each matrix has an *owner*, one of the ranks that hold its rows (`matrix_owners.py`). A step has four parts: an
all_to_all brings gradients and rows to owners, the owner runs the user's optimizer on whole tensors, an all_to_all
brings the new rows back. For that the optimizer is copied, with the owner's parameters and state: the user's object
keeps its groups, which schedulers write, and nothing is to be put back where a step fails. torch's optimizers step in
rounds, so that what the next round needs travels meanwhile; others step once, with all.

State stays with the owner. Where someone reads it (`state_dict()`, and so every checkpoint), it becomes DTensors like
those of any sharded optimizer, and the next step takes it back: a checkpoint does not show who owned what. Meanwhile
`state` has an `AwayState` of each parameter; if that was removed, so is what owners hold.
Where the optimizer raises on one rank, the exchanges of the step still take place. Others hear of it in their next run.
"""

from __future__ import annotations

import collections
import functools
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from operator import is_
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fxshard import torch_private
from fxshard.errors import ConfigError
from fxshard.hardware import HardwareSpec
from fxshard.ir.launches import Launch, on_group
from fxshard.runtime import matrix_exchange, rank_check
from fxshard.runtime.matrix_exchange import AwayState, RowExchange, State
from fxshard.runtime.matrix_explanation import MatrixExplanation
from fxshard.runtime.matrix_owners import Matrix, Team, assign_owners, cutting_axes, share_out
from fxshard.runtime.overlapped_step import BY_PARAMETER, without_hooks
from fxshard.runtime.parameters import adopt_attributes, local_of
from fxshard.runtime.rank_check import Agreement
from fxshard.runtime.rank_group import REFUSED
from fxshard.runtime.step_hooks import step_hooks

ROUNDS = 8
"""How many rounds a step has where buckets alone would make fewer. What the first one brings, and the last one sends
back, is not hidden."""


class OwnerPlan(NamedTuple):
    """Who updates what, of the parameters that an optimizer has now."""

    parameters: list[Tensor]  # all, in the order of the groups
    matrices: list[Matrix]  # the costliest first
    of: dict[Tensor, list[Matrix]]  # those of each parameter, by rows


@dataclass(eq=False)
class StepRound:
    """Matrices that are updated together, and what is on its way for them."""

    matrices: Sequence[Matrix] = ()
    states: Mapping[Tensor, State] = field(default_factory=dict)  # of their parameters, that owners are to get
    wholes: dict[Matrix, nn.Parameter] = field(default_factory=dict)  # those that this rank owns
    under_way: list[RowExchange] = field(default_factory=list)

    def finish(self) -> None:
        """Wait for what is on its way."""
        for exchange in self.under_way:
            exchange.finish()
        self.under_way.clear()


class WholeMatrices(Optimizer):
    """An optimizer whose steps see whole matrices, with the groups of another one; see [Note: whole matrices]."""

    _step_supports_amp_scaling = False  # what torch's GradScaler asks: it is to unscale gradients itself

    def __init__(
        self,
        optimizer: Optimizer,
        elementwise: Callable[[dict[str, Any]], bool] | None = None,
        rows: Callable[[nn.Parameter], Sequence[int] | None] | None = None,
        bucket_mib: float | None = None,
        over_replicas: bool | None = None,
    ) -> None:
        self._given = optimizer
        if away := [state for state in optimizer.state.values() if isinstance(state, AwayState)]:
            away[0].refuse()
        optimizer.register_step_pre_hook(functools.partial(_refuse_step_of, weakref.ref(optimizer)))
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        self._hooks = _hooks_of(optimizer)
        self.__dict__ |= {name: vars(optimizer)[name] for name in self._hooks}
        self._elementwise, self._rows = elementwise or (lambda group: False), rows or (lambda parameter: None)
        self._steps_in_rounds = type(optimizer) in BY_PARAMETER or bucket_mib is not None
        self._bucket_bytes = (32 if bucket_mib is None else bucket_mib) * 2**20  # of whole parameters per rank
        self._over_replicas, self._hardware = over_replicas, cast(HardwareSpec | None, None)
        self._plan = OwnerPlan([], [], {})
        self._held: dict[Matrix, State] = {}  # of those that this rank owns
        self._is_away = False  # whether any rank holds state that `state` does not have
        self._agreements: dict[tuple[str, ...], Agreement] = {}
        if optimizer in step_hooks().overlapped:
            step_hooks().overlapped.add(self)

    @property
    def given(self) -> Optimizer:
        """The optimizer that was given."""
        return self._given

    def matrices_on(self, hardware: HardwareSpec) -> list[Matrix]:
        """Return all matrices, with the owners that they have on some hardware."""
        self._hardware = hardware
        return self._current_plan().matrices

    def __getattr__(self, name: str) -> Any:
        if name == "_given":
            raise AttributeError(name)
        return getattr(self._given, name)

    def __getstate__(self) -> Any:
        """Refuse copies and pickles, which would be without the optimizer and what owners hold."""
        raise ConfigError(f"{type(self._given).__name__} cannot be copied or pickled: owners hold its state.")

    def explain(self) -> MatrixExplanation:
        """Say who updates what, at what cost, and how much travels in a step; print it. All ranks call it."""
        plan = self._current_plan()
        title = f"{type(self._given).__name__}: {len(plan.of)} of {len(plan.parameters)} parameters whole"
        return MatrixExplanation.of(title, by_team(plan.matrices))

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Step as the optimizer would step unsharded parameters; all ranks call it, with what its own `step` takes."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        with torch.no_grad():
            _step_eagerly(self, options)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a sharded optimizer: tensors are DTensors; collective after a step."""
        self.shard_state()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a sharded optimizer, of this class or another one."""
        super().load_state_dict(state_dict)
        self._held.clear()
        self._is_away = False
        self._given.param_groups, self._given.state = self.param_groups, self.state

    @torch.no_grad()
    def shard_state(self) -> None:
        """Move what owners hold into `state`, cut over the ranks; collective after a step."""
        if self._is_away:
            kept = [matrix for matrix in self._plan.matrices if matrix.parameter in self.state]  # by the user
            for team, matrices in by_team(kept).items():
                for parameter, state in matrix_exchange.shard_states(team, matrices, self._held).items():
                    self.state[parameter] = state
            self._held.clear()
            self._is_away = False
        self.state.update({key: {} for key, state in self.state.items() if isinstance(state, AwayState)})

    def _step(self, options: Mapping[str, Any]) -> None:
        plan, failure = self._current_plan(), cast(Exception | None, None)
        todo = [matrix for matrix in plan.matrices if matrix.parameter.grad is not None]
        for name, parameter in {matrix.name: matrix.parameter for matrix in todo}.items():
            _lay_gradient(parameter, name)
        with ExitStack() as agreed:
            for team, matrices in by_team(todo).items():
                agreed.enter_context(self._agreed(team, matrices))
            rounds = self._rounds(todo) or [StepRound()]
            self._send_in(rounds[0])
            for before, this, following in zip([None, *rounds], rounds, [*rounds[1:], None], strict=False):
                if following is not None:
                    self._send_in(following)
                this.finish()
                try:
                    if failure is None:
                        self._update(this, options, with_others=before is None)
                except Exception as error:  # raised below, when the others have got what they wait for
                    failure = error
                if before is not None:
                    before.finish()
                self._send_back(this)
            rounds[-1].finish()
        if failure is not None:
            names = {team.group.group_name for team in by_team(todo)}
            rank_check.report_failure(names, f"its optimizer failed: {failure}", REFUSED)
            raise failure

    def _current_plan(self) -> OwnerPlan:
        """Return who updates what; made anew, from rows, when the parameters are others than before."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        known = self._plan.parameters
        if len(parameters) == len(known) and all(map(is_, parameters, known)):
            return self._plan
        self.shard_state()
        team_of = functools.cache(Team)
        by_team: dict[Team, list[tuple[Any, ...]]] = {}
        places = {id(parameter): place for place, parameter in enumerate(parameters)}
        names = step_hooks().names()
        for group in self.param_groups:
            for parameter in () if self._elementwise(group) else group["params"]:
                if isinstance(parameter, DTensor) and (axes := cutting_axes(parameter)):
                    name, place = names.get(id(parameter)), places[id(parameter)]
                    found = parameter, name or f"number {place}", place, self._rows(cast(Any, parameter))
                    by_team.setdefault(team_of(parameter.device_mesh, axes), []).append(found)
        plans = [share_out(team, found, self._over_replicas, self._hardware) for team, found in by_team.items()]
        of = {parameter: found for plan in plans for parameter, found in plan.items()}
        ordered = sorted(of, key=lambda parameter: places[id(parameter)])
        matrices = assign_owners(matrix for parameter in ordered for matrix in of[parameter])
        self._plan = OwnerPlan(parameters, matrices, {parameter: of[parameter] for parameter in ordered})
        return self._plan

    def _agreed(self, team: Team, matrices: Sequence[Matrix]) -> Any:
        """Around a step: the ranks of a team must update the same matrices, in one order, with the same settings."""
        by_place, on = {matrix.place: matrix for matrix in matrices}, team.group.group_name
        texts = [
            f"all_to_all of the gradient {tuple(matrix.parameter.shape)} of the parameter {matrix.name},{on_group(on)}"
            for _, matrix in sorted(by_place.items())
        ]
        launches = [Launch(on, text, "outside of graphs", "all_to_all", "whole matrices") for text in texts]
        groups = ({name: _value_text(group.get(name)) for name in self.defaults} for group in self.param_groups)
        values = "; ".join(", ".join(f"{name}={text}" for name, text in group.items() if text) for group in groups)
        return self._agreements.setdefault(tuple(texts), Agreement("matrices")).before(launches, values=values)

    def _rounds(self, todo: Sequence[Matrix]) -> list[StepRound]:
        """Return the rounds of a step. State that lies in `state` goes to owners."""
        self._held = {matrix: state for matrix, state in self._held.items() if matrix.parameter in self.state}
        owned = dict.fromkeys(matrix.parameter for matrix in todo)
        states: dict[Tensor, State] = {parameter: state for parameter in owned if (state := self.state.get(parameter))}
        self.state.update({parameter: AwayState() for parameter in owned})
        self._is_away |= bool(owned)
        return [StepRound(matrices, states) for matrices in self.rounds_of(todo)]

    def rounds_of(self, todo: Sequence[Matrix]) -> list[list[Matrix]]:
        """Return which matrices are updated together: of one team a bucket of each owner, so that all work, or all."""
        if not self._steps_in_rounds:
            return [list(todo)] * bool(todo)
        rounds = dict[Any, list[Matrix]]()
        for team, matrices in by_team(todo).items():
            numbers, sizes = collections.Counter[int](), collections.Counter[int]()
            whole = collections.Counter[int]()
            for matrix in matrices:
                whole[matrix.owner] += matrix.nbytes
            most = min(self._bucket_bytes, max(whole.values()) / ROUNDS)
            for matrix in matrices:
                sizes[matrix.owner] += matrix.nbytes
                if sizes[matrix.owner] > most and sizes[matrix.owner] > matrix.nbytes:
                    numbers[matrix.owner] += 1
                    sizes[matrix.owner] = matrix.nbytes
                rounds.setdefault((team, numbers[matrix.owner]), []).append(matrix)
        return list(rounds.values())

    def _send_in(self, this: StepRound) -> None:
        """Launch what brings gradients, parameters and state to owners."""
        for team, matrices in by_team(this.matrices).items():
            travellers = []
            for matrix in matrices:
                rows, grad = local_of(matrix.parameter), local_of(cast(Tensor, matrix.parameter.grad))
                if matrix.parameter in this.states:
                    brought, filled = matrix_exchange.bring(matrix, this.states[matrix.parameter])
                    travellers += brought
                    if filled is not None:
                        self._held[matrix] = filled
                if matrix.is_owned:
                    take = matrix.split.in_local if matrix.stays else lambda like, m=matrix: like.new_empty(m.shape)
                    this.wholes[matrix] = _as_parameter(matrix, take(rows), take(grad))
                if not matrix.stays:
                    seen = this.wholes.get(matrix)
                    travellers.append(matrix.traveller(grad, None if seen is None else seen.grad))
                    travellers.append(matrix.traveller(rows, seen))
            this.under_way.append(RowExchange(team, travellers, inward=True))

    def _update(self, this: StepRound, options: Mapping[str, Any], *, with_others: bool) -> None:
        """Let the optimizer step the matrices of a round that this rank owns, and what is not whole with the first."""
        own, whole = {whole: matrix for matrix, whole in this.wholes.items()}, self._plan.of
        groups = [{**group, "params": []} for group in self.param_groups]
        for group, seen in zip(self.param_groups, groups, strict=True):
            for parameter in group["params"]:
                if parameter in whole:
                    seen["params"] += [this.wholes[each] for each in whole[parameter] if each in this.wholes]
                elif with_others:
                    seen["params"].append(parameter)
        state = defaultdict[Any, Any](dict, {key: value for key, value in self.state.items() if key not in whole})
        state.update({parameter: self._held[matrix] for parameter, matrix in own.items() if matrix in self._held})
        given, copied = self._given, copy_of(self._given, groups, state)
        try:
            with self._without_collectives(this):
                step_without_hooks(copied, **options)
        finally:
            for group, seen in zip(self.param_groups, groups, strict=True):
                group.update({name: value for name, value in seen.items() if name != "params"})
            self._held.update({matrix: state[parameter] for parameter, matrix in own.items() if parameter in state})
            self.state.update({key: value for key, value in state.items() if key not in own})
            kept = {"param_groups", "state", *self._hooks}
            vars(given).update({name: value for name, value in vars(copied).items() if name not in kept})

    @contextmanager
    def _without_collectives(self, this: StepRound) -> Iterator[None]:
        """Around the optimizer's own step: one that exchanges matrices itself would mix those of several owners."""
        found = {(dist.group.WORLD or each.team.group, local_of(each.parameter).device) for each in this.matrices}
        known = found | {(each.team.group, local_of(each.parameter).device) for each in this.matrices}
        before = [torch_private.num_collectives(*each) for each in known]
        yield
        if before != [torch_private.num_collectives(*each) for each in known]:
            raise ConfigError(
                f"whole_matrices: the step of {type(self._given).__name__} launches collectives itself, which "
                "mixes matrices of several owners. Drop its results, and give its variant for one device."
            )

    def _send_back(self, this: StepRound) -> None:
        """Launch what brings updated rows back to the ranks that hold them."""
        for team, matrices in by_team(this.matrices).items():
            moved = [each for each in matrices if not each.stays]
            for each in matrices:
                if each.stays and each in this.wholes:
                    rows, whole = each.split.in_local(local_of(each.parameter)), this.wholes[each]
                    if rows.data_ptr() != whole.data_ptr():  # the optimizer has assigned `parameter.data`
                        rows.copy_(whole.view(each.shape))
            travellers = [each.traveller(local_of(each.parameter), this.wholes.get(each)) for each in moved]
            this.under_way.append(RowExchange(team, travellers, inward=False))
        this.wholes.clear()


def copy_of(given: Optimizer, groups: list[dict[str, Any]], state: Any) -> Optimizer:
    """Return a copy of an optimizer with other parameters and state, and without hooks."""
    hooks = {name: OrderedDict[int, Any]() for name in _hooks_of(given)}
    copied: Optimizer = object.__new__(type(given))
    copied.__dict__ = {**vars(given), **hooks, "param_groups": groups, "state": state}
    return copied


def step_without_hooks(optimizer: Optimizer, **options: Any) -> None:
    """Step as the class does, without torch's hooks around it."""
    (without_hooks(type(optimizer).step) or type(optimizer).step)(optimizer, **options)


def _hooks_of(optimizer: Optimizer) -> list[str]:
    return [name for name in vars(optimizer) if name.startswith("_optimizer_")]


# A whole train step may be compiled: then Dynamo is on, and must leave this alone.
_step_eagerly = torch.compiler.disable(WholeMatrices._step)


def _refuse_step_of(given: weakref.ref[Optimizer], stepping: Optimizer, *_: object) -> None:
    """Refuse steps of the optimizer that was given; a hook, which it shares with ours."""
    if stepping is given():
        raise ConfigError(f"{type(stepping).__name__} was given to whole_matrices. Step what that has returned.")


def by_team(matrices: Sequence[Matrix]) -> dict[Team, list[Matrix]]:
    """Return the matrices of each team; teams in the order of their first parameters, the same on all ranks."""
    found: dict[Team, list[Matrix]] = {}
    for matrix in matrices:
        found.setdefault(matrix.team, []).append(matrix)
    return dict(sorted(found.items(), key=lambda item: min(matrix.place for matrix in item[1])))


def _value_text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_value_text, value))})"
    if isinstance(value, Tensor):  # on an accelerator it is not read: that would wait for all that runs
        value = value.item() if value.dim() == 0 and value.device.type == "cpu" else None
    return f"{value:.6g}" if isinstance(value, float) else str(value) if isinstance(value, int | str) else ""


def _lay_gradient(parameter: DTensor, name: str) -> None:
    """Cut a gradient as its parameter is cut, where the user has given another one."""
    grad = parameter.grad
    if not isinstance(grad, DTensor):
        raise ConfigError(f"whole_matrices: the gradient of the parameter {name} is no DTensor. Assign one.")
    if grad.placements != parameter.placements:
        parameter.grad = grad.redistribute(placements=parameter.placements)


def _as_parameter(matrix: Matrix, whole: Tensor, grad: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(whole.view(matrix.seen_shape), requires_grad=matrix.parameter.requires_grad)
    adopt_attributes(parameter, matrix.parameter.__dict__)
    if grad.dtype != whole.dtype:
        parameter.grad_dtype = grad.dtype
    parameter.grad = grad.view(matrix.seen_shape)
    return parameter
