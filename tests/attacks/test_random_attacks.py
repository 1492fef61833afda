"""Random scripts: what fxshard computes is what unsharded training computes, or it says no before anything is wrong."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

from fxshard.testing import emulated_link
from tests.attacks.grammar import Script, scripts
from tests.attacks.play import play
from tests.attacks.player import RANKS
from tests.ranks import shared_pool

BY_CHANCE = "FXSHARD_ATTACKS" in os.environ

DRAWS = int(os.environ.get("FXSHARD_ATTACKS", "100"))
"""Draws among emulated ranks, in this process; a fifth as many among real ones."""

EACH = 25
"""Draws that are played on one setup: to compile it takes fifteen times as long as to play one."""


def drawn(number: int) -> settings:
    """Return settings for so many draws; the same ones at each run, unless the number was asked for."""
    return settings(
        max_examples=number,
        derandomize=not BY_CHANCE,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate, Phase.shrink] if BY_CHANCE else [Phase.explicit, Phase.generate],
    )


def attack_emulated(script: Script) -> str:
    """Play among emulated ranks."""
    torch._dynamo.reset()
    with emulated_link(RANKS):
        return play(script, emulated=True)


def require_nothing(found: set[str], script: Script) -> None:
    assert not found - {""}, "\n".join([*sorted(found), repr(script)])


@pytest.mark.slow
@pytest.mark.timeout(0)
@drawn(DRAWS // EACH)
@given(scripts(EACH))
def test_a_random_script_trains_as_unsharded_or_is_refused(script: Script) -> None:
    require_nothing({attack_emulated(script)}, script)


@pytest.mark.slow
@pytest.mark.multi_rank
@pytest.mark.timeout(0)
@drawn(max(1, DRAWS // 50))
@given(scripts(EACH))
def test_a_random_script_among_real_ranks_trains_as_unsharded_or_is_refused(script: Script) -> None:
    require_nothing(set(shared_pool().run(play, timeout=900, script=script)), script)
