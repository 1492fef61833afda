"""The state that a plain, unsharded optimizer would have, gathered from the ranks."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fxshard.errors import ConfigError
from fxshard.state.local_shards import gather_all, require_bucket
from fxshard.state.names import module_in
from fxshard.state.optimizer_state import (
    STATE,
    ParameterNames,
    ParameterState,
    assemble,
    described,
    facts_of,
    has_no_rows,
    names_of,
    split_state,
    state_fact,
    unknown_keys,
    without_rows,
)
from fxshard.state.ranks import Caught, Claim, Ranks, ranks_of

CALL = "full_optim_state_dict"


@torch.no_grad()
def gather_optimizer(
    model: nn.Module,
    optim: Optimizer,
    *,
    recipient_rank: int | None,
    cpu_offload: bool,
    keys: str,
    bucket_mib: float,
) -> dict[str, Any]:
    """What `fxshard.full_optim_state_dict` does."""
    ranks = Ranks.of(model)
    recipient: int | None = None
    names, facts = ParameterNames({}, {}, []), dict[str, str]()
    whole, states = dict[str, Any](), dict[int, ParameterState]()
    with Caught() as caught:
        require_bucket(bucket_mib)
        _require_keys(keys)
        recipient = ranks.recipient(recipient_rank)
        names = names_of(module_in(model), optim)
        whole, states = split_state(optim, names, to_cpu=cpu_offload)
        _require_other_names(whole[STATE], keys)
        arguments = f"recipient_rank={recipient_rank}, cpu_offload={cpu_offload}, bucket_mib={bucket_mib}"
        facts = {"arguments": arguments, **facts_of(optim, names, states, whole)}
    lacking = ranks.compare(CALL, caught, facts, functools.partial(_detailed, facts, names, ranks))
    if any(lacking):
        states = _completed(states, names, lacking, ranks)
    fulls = gather_all(
        [held for state in states.values() for held in state.held],
        recipient=recipient,
        cpu_offload=cpu_offload,
        bucket_mib=bucket_mib,
        title="optimizer state",
    )
    return {} if fulls is None else assemble(whole, states, fulls, names, keys)


def _require_keys(keys: object) -> None:
    if keys not in ("id", "fqn"):
        raise ConfigError(f'keys must be "id" or "fqn", got {keys!r}.')


def _require_other_names(others: Mapping[Any, Any], keys: str) -> None:
    if found := unknown_keys(others, int if keys == "id" else str):
        raise ConfigError(
            f"the optimizer has state of no parameter under {', '.join(map(repr, found))}, where a load would take it "
            f"for a parameter's, by {keys}. Use a key of another type, or the other value of keys."
        )


def _detailed(facts: Mapping[str, str], names: ParameterNames, ranks: Ranks) -> dict[str, Claim]:
    """The facts with the ranks that they are shared with."""
    by_fact = {state_fact(fqn): names.parameters[i] for i, fqn in names.fqns.items()}
    everyone = tuple(ranks.members)
    return {
        name: Claim(text=text, ranks=ranks_of(by_fact[name]), may_lack=has_no_rows(by_fact[name]))
        if name in by_fact
        else Claim(text=text, ranks=everyone)
        for name, text in facts.items()
    }


def _completed(
    states: Mapping[int, ParameterState],
    names: ParameterNames,
    lacking: Sequence[Sequence[str]],
    ranks: Ranks,
) -> dict[int, ParameterState]:
    """The states, with those that this rank lacks because it has no rows of the parameter, as others describe them."""
    wanted = dict.fromkeys(name for each in lacking for name in each)
    ids = {state_fact(fqn): i for i, fqn in names.fqns.items()}
    offered = {name: described(states[ids[name]]) for name in wanted if ids.get(name) in states}
    everyone = dict(zip(ranks.members, ranks.exchange(offered), strict=True))
    completed = dict(states)
    for name in lacking[ranks.rank]:
        parameter = names.parameters[ids[name]]
        donor = next(everyone[rank][name] for rank in ranks_of(parameter) if name in everyone[rank])
        completed[ids[name]] = without_rows(*donor, parameter)
    return dict(sorted(completed.items()))
