"""`apply_policies` against FSDP2 that is told the same by hand."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fxshard
from fxshard.errors import ConfigError
from fxshard.plan.policies import Policy
from fxshard.sharding.sharded_module import units_under
from tests.numerics.harness import Scenario, Tools, check_bitwise, world_mesh
from tests.numerics.microbatches import several
from tests.numerics.models import MLP
from tests.numerics.scenarios import REGRESSION
from tests.pairwise import slow
from tests.ranks import two_ranks

POLICIES = (
    Policy(reshard_after_forward=False),
    Policy(),
    Policy(checkpoints=True),
    Policy(reshard_after_forward=False, checkpoints=True),
    Policy(reshard_after_forward=False, resident=True),
)


def as_planned(policies: Sequence[Policy], model: nn.Module, tools: Tools) -> nn.Module:
    if tools.system.ours:
        with tempfile.TemporaryDirectory() as folder:  # each rank reads a file of its own
            file = Path(folder, "policies.json")
            file.write_text(json.dumps({f"blocks.{i}": policy.fields for i, policy in enumerate(policies)}))
            model = fxshard.apply_policies(model, file, mesh=world_mesh())
        settings = [unit.settings for unit in units_under(model)]
        expected = [False, True, True, False, True][-len(policies) :]
        assert [each.reshard_after_forward for each in settings] == [None, *expected]
        return tools.compile(model)
    for i, policy in enumerate(policies):
        if policy.checkpoints:
            model.set_submodule(f"blocks.{i}", checkpoint_wrapper(model.get_submodule(f"blocks.{i}")))
        # FSDP2 has no gradients while parameters are resident; in numbers they make no difference.
        tools.shard(
            model.get_submodule(f"blocks.{i}"), reshard_after_forward=policy.resident or policy.reshard_after_forward
        )
    tools.shard(model)
    return model


def scenario(policies: Sequence[Policy], **changes: Any) -> Scenario:
    """Train a block under each of the policies."""
    model, prepare = partial(MLP, num_blocks=len(policies)), partial(as_planned, policies)
    return replace(REGRESSION, model=model, prepare=prepare, **changes)


@pytest.mark.slow
@two_ranks
def test_trains_with_a_policy_for_each_block_as_fsdp2() -> None:
    check_bitwise(scenario(POLICIES))


@two_ranks
@pytest.mark.parametrize("policies", [POLICIES[2:], slow(POLICIES)])
def test_accumulates_with_a_policy_for_each_block_as_fsdp2(policies: Sequence[Policy]) -> None:
    check_bitwise(scenario(policies, backward=several))


def test_policies_of_other_blocks_and_files_without_any_are_refused(tmp_path: Path) -> None:
    model = MLP()
    with pytest.raises(
        ConfigError, match=r"the policies are not of the blocks of MLP: only one side has blocks.1, h.7"
    ):
        fxshard.apply_policies(model, {"blocks.0": Policy(), "h.7": Policy()})
    assert isinstance(model.blocks[0], nn.Module)
    assert not isinstance(model.blocks[0], fxshard.ShardedModule)
    file = tmp_path / "policies.json"
    for text in ("[]", "{", '{"blocks.0": {"keep": true}}'):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"has no policies of blocks: .* fxshard plan --write makes one"):
            fxshard.apply_policies(model, file)
