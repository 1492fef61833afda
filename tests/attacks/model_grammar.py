"""Small models, how they are sharded and how they train, as data that hypothesis draws.

A `Case` prints as the code that makes it, without what is as usual, so that a failing one can be kept as a test.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from hypothesis import strategies as st


class _Short:
    """Prints the fields that are not as usual."""

    def __repr__(self) -> str:
        shown = []
        for each in dataclasses.fields(self):  # type: ignore[arg-type]
            usual = each.default if each.default_factory is dataclasses.MISSING else each.default_factory()
            if (value := getattr(self, each.name)) != usual:
                shown.append(f"{each.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, kw_only=True, repr=False)
class Part(_Short):
    """A residual block of a model."""

    layers: tuple[str, ...] = ("linear",)  # names in `tests.attacks.drawn_model.LAYERS`
    # "own", "parent's", "nested" (its first layer is one, too), "first layer" alone, "with the next" part
    unit: str = "own"
    frozen: str = ""  # "", "all", "biases" or "first layer"
    bfloat16: bool = False  # whether its parameters are; the input is cast, and the output back
    twice: bool = False  # whether it is called twice
    checkpoint: bool = False  # whether activations are computed again in backward
    skipped: bool = False  # whether the second step does not call it
    reshard: bool | None = None  # `reshard_after_forward`


@dataclass(frozen=True, kw_only=True, repr=False)
class Case(_Short):
    """A model, and what is done with it."""

    parts: tuple[Part, ...] = (Part(),)  # in the order in which they run
    ends: str = ""  # "" (input and output are activations), "own" or "tied" weights of an embedding and a head
    unit_of_ends: str = "root's"  # "root's", "one" for both, or "two"
    ties: tuple[tuple[int, int], ...] = ()  # numbers of parts whose first layers, linear ones, share their weight
    ignored: bool = False  # whether a vector of the root is left out of its unit
    mesh: tuple[int, ...] = (2,)  # (shards,) or (replicas, shards)
    split: int = 1  # how many ranks hold a linear layer together, by tensor parallelism
    policy: str = ""  # a name in `tests.attacks.training.POLICIES`
    compiled: str = "whole"  # "whole", "parts" one by one, or "no"
    options: dict[str, object] = field(default_factory=dict)  # of the backend
    forward_prefetch: str = ""  # of each unit: "" nothing said, "next", "next two", "last" or "none"
    backward_prefetch: str = ""  # the same
    # of each step its microbatches, names in `tests.attacks.training.MICROBATCHES`
    steps: tuple[tuple[str, ...], ...] = (("sync",), ("sync",))
    evaluates: bool = False  # in the second step, between forward and backward
    thaws: bool = False  # before the last step, what was frozen
    clips: bool = False  # the norm of the gradients

    def unit_of(self, part: int) -> str:
        """Return a name of the unit that has the first layer of a part."""
        if self.parts[part].unit in ("nested", "first layer"):
            return f"{part}, first layer"
        if part > 0 and self.parts[part - 1].unit == "with the next":
            return self.unit_of_whole(part - 1)
        return self.unit_of_whole(part)

    def unit_of_whole(self, part: int) -> str:
        """Return a name of the unit that a part makes, or is in."""
        return "root" if self.parts[part].unit in ("parent's", "first layer") else f"{part}"

    @property
    def ties_units(self) -> bool:
        """Whether one parameter would be in two units, which is refused."""
        return (self.ends == "tied" and self.unit_of_ends == "two") or any(
            self.unit_of(a) != self.unit_of(b) for a, b in self.ties
        )

    @property
    def adds_up(self) -> bool:
        """Whether several gradients of one parameter are added up."""
        uses = any(part.twice for part in self.parts) or bool(self.ties) or self.ends == "tied"
        return uses or any(len(step) > 1 for step in self.steps)

    @property
    def adds_in_another_order(self) -> bool:
        """Whether three or more gradients of one parameter are added up, and not from left to right.

        Those of several uses come in the order of a graph, not of autograd. What is reduced before others wait is added
        to their sum.
        """
        uses = any(part.twice for part in self.parts) or bool(self.ties) or self.ends == "tied"
        return uses or any(len(step) > 2 and step[0] not in ("no sync", "in no_sync") for step in self.steps)

    @property
    def rounds_otherwise(self) -> bool:
        """Whether FSDP2 rounds sums of gradients at other places: it adds up what it reduces in the reduce dtype."""
        several = any(part.twice for part in self.parts) or bool(self.ties) or self.ends == "tied"
        averaged_apart = len(self.mesh) > 1 and any("no all_reduce" in step for step in self.steps)
        return averaged_apart or (several and self.compiled != "whole")


_RARELY = st.sampled_from([False, False, False, True])
_SHARDED_BY_FSDP2 = st.sampled_from(["linear", "norm", "odd", "conv", "attention"])
_LAYERS = st.one_of(_SHARDED_BY_FSDP2, st.just("scale"))
_SYNC, _NO_SYNC, _APART = "sync", "no sync", "no all_reduce"
_PLAIN = ((_SYNC,), (_SYNC,))
_STEPS = st.sampled_from(  # each new kind of microbatch compiles a backward more
    [
        *[_PLAIN] * 9,
        ((_SYNC, _SYNC), (_SYNC,)),
        ((_NO_SYNC, _SYNC), (_SYNC,)),
        ((_NO_SYNC, _NO_SYNC, _SYNC), (_NO_SYNC, _SYNC)),
        ((_SYNC, _NO_SYNC, _SYNC), (_SYNC,)),
        (("in no_sync", _SYNC), (_SYNC,)),
        (("root does not sync", _SYNC), (_SYNC,)),
        (("first does not sync", _NO_SYNC, _SYNC), (_SYNC,)),
        ((_APART, _SYNC), (_APART, _APART, _SYNC)),
        ((_NO_SYNC, _APART, _SYNC), (_SYNC,)),
        ((_APART, _NO_SYNC, _SYNC), (_SYNC,)),
    ]
)
_OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "schedule": st.sampled_from(["auto", "fsdp2"]),
        "prefetch": st.sampled_from(["off", 1, 2, "auto"]),
        "bucket": st.sampled_from(["unit", "auto", 0.0001, 1]),
        "resident_gib": st.sampled_from([0, 1]),
        "reduce_scatter_max_input_buffers": st.sampled_from([1, 3]),
        "regions": st.sampled_from(["auto", "off"]),
        "hardware": st.sampled_from(["h100", "cpu"]),
    },
)
_LISTS = st.sampled_from(["", "", "", "next", "next two", "last", "none"])


@st.composite
def parts(draw: st.DrawFn, plain: bool) -> Part:
    """Any part; with parameters of one dtype if `plain`."""
    return Part(
        layers=tuple(draw(st.lists(_SHARDED_BY_FSDP2 if plain else _LAYERS, min_size=1, max_size=2, unique=True))),
        unit=draw(st.sampled_from(["own", "own", "own", "parent's", "nested", "first layer", "with the next"])),
        frozen=draw(st.sampled_from(["", "", "", "", "all", "biases", "first layer"])),
        bfloat16=not plain and draw(_RARELY),
        twice=draw(_RARELY),
        checkpoint=draw(_RARELY),
        skipped=draw(_RARELY) and draw(st.booleans()),
        reshard=draw(st.sampled_from([None, None, True, False])),
    )


@st.composite
def cases(draw: st.DrawFn, meshes: tuple[tuple[int, ...], ...], ignoring: bool = True, splitting: int = 1) -> Case:
    """Any case on one of these meshes; what is ignored would train on each real rank for itself.

    With `splitting` so many ranks may hold linear layers together, on a mesh with that many fewer shards.
    """
    policy = draw(st.sampled_from(["", "", "", "bf16", "sums in fp32", "sums in bf16", "fp16"]))
    alike = draw(_RARELY)
    drawn = [draw(parts(plain=bool(policy)))] * draw(st.integers(2, 3)) if alike else []
    drawn = drawn or draw(st.lists(parts(plain=bool(policy)), min_size=1, max_size=2))
    if drawn[-1].unit == "with the next":
        drawn[-1] = dataclasses.replace(drawn[-1], unit="own")
    drawn = _one_list_each(drawn)
    linear = [i for i, part in enumerate(drawn) if part.layers[0] == "linear" and not part.bfloat16]
    ties = draw(st.sampled_from([(), ((linear[0], linear[1]),)])) if len(linear) > 1 else ()
    ends = draw(st.sampled_from(["", "", "own", "tied"]))
    mesh = draw(st.sampled_from(meshes))
    split = draw(st.sampled_from([1, splitting])) if mesh[-1] % splitting == 0 else 1
    if split > 1:  # tying weights that are split is up to who splits them
        ties, ends = (), ends.replace("tied", "own")
    return Case(
        parts=tuple(drawn),
        ends=ends,
        unit_of_ends=draw(st.sampled_from(["root's", "root's", "one", "two"])) if ends else "root's",
        ties=ties,
        ignored=draw(_RARELY) and not policy and ignoring,
        mesh=(*mesh[:-1], mesh[-1] // split),
        split=split,
        policy=policy,
        compiled=draw(st.sampled_from(["whole", "whole", "whole", "parts", "no"])),
        options=draw(_OPTIONS),
        forward_prefetch=draw(_LISTS),
        backward_prefetch=draw(_LISTS),
        steps=draw(_STEPS),
        evaluates=draw(_RARELY),
        thaws=draw(_RARELY) and not policy,  # torch's FSDP2 fails
        clips=draw(_RARELY) and split == 1,  # torch stacks no norms of two meshes
    )


def _one_list_each(drawn: list[Part]) -> list[Part]:
    """Let no part be in two lists that make one unit each, and none that follows one have a unit of its own."""
    found: list[Part] = []
    for part in drawn:
        if found and found[-1].unit == "with the next":
            part = dataclasses.replace(part, unit="parent's", reshard=found[-1].reshard)
        found.append(part)
    return found
