"""What a training script may do to a sharded model between and inside its steps, as data that hypothesis draws.

A `Script` is a `Setup` and some draws: lists of actions that are played one after the other on what was set up, which
is put back in between. (To compile takes a hundred times as long as to play.) Every value is plain, so that a failing
script can be printed, sent to the ranks and kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How the models are built, sharded and compiled."""

    models: int = 1  # a chain of one or two, each with an optimizer of its own
    blocks: int = 2  # of each model
    tied: bool = False  # whether the first and the last block share their weight
    twice: bool = False  # whether every block is called twice
    # "", or what cuts each block between two uses of a weight that it reads once: "no_grad", "graph break"
    cut: str = ""
    grad_dtype: str = ""  # of all parameters, "" for their own
    checkpoint: str = ""  # "", "all" or "save products": activation checkpointing around each block
    units: str = "blocks"  # "blocks" and the root, the "root" alone, or "one line"
    compiled: str = "whole"  # "whole", "regional" by the option, "blocks" one by one by the script, or "no"
    reshard: bool | None = None  # `reshard_after_forward`
    options: dict[str, object] = field(default_factory=dict)  # of the backend
    optimizer: tuple[str, str] = ("SGD", "foreach")  # the class and the form of its step


@dataclass(frozen=True, kw_only=True)
class Action:
    """One thing that a script does."""

    name: str  # of the method of `tests.attacks.player.Player` that does it
    args: tuple[object, ...] = ()  # its arguments

    def __repr__(self) -> str:
        return f"Action(name={self.name!r}, args={self.args!r})"


@dataclass(frozen=True, kw_only=True)
class Script:
    """A setup and what is done with it."""

    setup: Setup
    draws: list[list[Action]]


WRITES = ("mul_", "copy_", "to_local", "load_state_dict", "set_state_dict", "full_state_dict", "data", "foreach")
"""Writes outside of forward. The last two leave no trace that torch counts, so scripts call `reshard()` after them."""

STALE_WRITES = (*WRITES[:-2], "attribute", "step", "step of the other")
"""Writes between a forward and its backward."""

WRITES_IN_FORWARD = ("row", "data", "view", "foreach", "detach", "out", "mul_")

_ROWS = st.sampled_from([(2, 2), (2, 2), (2, 2), (1, 3)])  # by rank; other ones than before are compiled anew
_INDEX = st.integers(0, 1)


def _action(name: str, *args: st.SearchStrategy[object]) -> st.SearchStrategy[Action]:
    return st.tuples(*args).map(lambda drawn: Action(name=name, args=drawn))


_STEP = _action("step", _INDEX)
_TRAIN = _action("backward", _ROWS, st.sampled_from(["plain", "plain", "reads the head", "two losses", "penalty"]))
_ACTIONS = st.one_of(
    _TRAIN,
    _TRAIN,
    _action("accumulate", _ROWS),
    _STEP,
    _STEP,
    _action("zero_grad", st.booleans()),
    _action("freeze", _INDEX, _INDEX, st.booleans()),
    _action("write", _INDEX, st.sampled_from(WRITES)),
    _action("stale_backward", _ROWS, st.sampled_from(STALE_WRITES)),
    _action("write_in_forward", _INDEX, st.sampled_from(WRITES_IN_FORWARD), st.booleans()),
    _action("evaluate", _ROWS, st.sampled_from(["no_grad", "inference_mode", "grad"])),
    _action("functional_call", _ROWS, st.sampled_from(["computed", "leaves"])),
    _action("read", _INDEX, _INDEX),
    _action("clip", _INDEX),
    _action("fail_in_forward", _ROWS),
    _action("fail_in_backward", _ROWS, st.booleans()),
    _action("hook", _INDEX, _INDEX),
    _action("swap_weights", _INDEX),
    _action("keep_unsharded", st.booleans()),
    _action("set_reshard", st.booleans()),
    _action("input_gradient", _ROWS),
    _action("save_and_load", _INDEX),
)

_OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "prefetch": st.sampled_from(["off", 1, 2, "auto"]),
        "bucket": st.sampled_from(["unit", "auto"]),
        "reduce_scatter_max_input_buffers": st.sampled_from([1, 3]),
        "resident_gib": st.sampled_from([0, 1]),
    },
)
_OPTIMIZERS = st.sampled_from([("SGD", "foreach"), ("SGD", "one by one"), ("AdamW", "foreach"), ("AdamW", "fused")])


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    """Any way of building and compiling."""
    units = draw(st.sampled_from(["blocks", "blocks", "root", "one line"]))
    forms = {"blocks": ["whole", "regional", "blocks", "no"], "root": ["whole"], "one line": ["whole", "regional"]}
    compiled = draw(st.sampled_from(forms[units]))
    optimizer = draw(_OPTIMIZERS)
    return Setup(
        models=draw(st.sampled_from([1, 1, 2])),
        blocks=draw(st.integers(2, 3)),
        tied=draw(st.booleans()) if units == "root" else False,
        twice=draw(st.sampled_from([False, False, False, True])),
        cut=draw(st.sampled_from(["", "", "no_grad", "no_grad" if units == "one line" else "graph break"])),
        grad_dtype=draw(st.sampled_from(["", "", "float32"])) if optimizer[0] == "SGD" else "",
        checkpoint=draw(st.sampled_from(["", "", "all", "save products"])),
        units=units,
        compiled=compiled,
        reshard=draw(st.sampled_from([None, True, False])),
        options=draw(_OPTIONS),
        optimizer=optimizer,
    )


def scripts(draws: int, max_actions: int = 7) -> st.SearchStrategy[Script]:
    """Any setup, and for each of the draws up to so many actions, of which the first one trains."""
    draw = st.tuples(_TRAIN, st.lists(_ACTIONS, min_size=2, max_size=max_actions)).map(lambda it: [it[0], *it[1]])
    return st.builds(Script, setup=setups(), draws=st.lists(draw, min_size=draws, max_size=draws))
