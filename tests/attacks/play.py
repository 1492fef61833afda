"""Plays a script from its first action to its last, or to one that fxshard may refuse."""

from __future__ import annotations

import re

import torch

from fxshard import FxshardError
from tests.attacks.grammar import Action, Script
from tests.attacks.player import Player

MAY_REFUSE = {
    "stale_backward": "changed between forward and backward|changed in place",
    "write_in_forward": "changed in place",
    "functional_call": "was computed",
}
"""Action that fxshard may decline -> with which words."""

WAITS = "wait to be reduced|waited to be reduced|gradients of .* wait"
"""In which words it declines anything that would leave waiting gradients behind."""

DIVERGES = "launch different collectives|is at run|could not compile"
"""What ranks say of each other where Dynamo has given up on a frame of one of them, after a graph break."""


def play(script: Script, emulated: bool = False) -> str:
    """Play a script on this rank.

    Args:
        script: what to do.
        emulated: whether the other ranks are emulated.

    Returns:
        What went wrong, empty for nothing.
    """
    with torch._dynamo.config.patch(recompile_limit=1000):  # whatever changes is compiled anew
        return _play(script, emulated)


def _play(script: Script, emulated: bool) -> str:
    done: list[str] = []
    try:
        player = Player(script.setup, emulated=emulated)
        for actions in script.draws:
            player.begin()
            for action in actions:
                player.number += 1
                done.append(action.name)
                if not _is_done(player, action):
                    break
                player.compare()
            done.append("|")
    except AssertionError as error:
        return f"after {' '.join(done)}: {error}"
    except Exception as error:
        return f"after {' '.join(done)}: {type(error).__name__}: {error}"
    return ""


def _is_done(player: Player, action: Action) -> bool:
    """Do it; whether the draw goes on: it ends where fxshard refuses what it may refuse."""
    waited = player.waits
    try:
        getattr(player, action.name)(*action.args)
    except FxshardError as error:
        expected = [MAY_REFUSE.get(action.name), WAITS if waited else None, DIVERGES if player.breaks else None]
        if not any(words and re.search(words, str(error), re.DOTALL) for words in expected):
            raise AssertionError(f"{action} was refused: {type(error).__name__}: {error}") from error
        return False
    return True
