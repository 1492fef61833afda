"""Units whose collectives an object of the user's does: passes and the verifier keep their launches whole."""

from __future__ import annotations

import dataclasses

import pytest

from fxshard.errors import InvariantError
from fxshard.ir.plan import BY, FramePlan
from fxshard.passes._base import GraphKind, GraphPass
from fxshard.passes.bucket_collectives import BucketCollectives
from fxshard.passes.coalesce_collectives import CoalesceCollectives
from fxshard.passes.insert_collectives import InsertCollectives
from tests.graphs import SPLIT, assert_changes_nothing, assert_golden, text
from tests.mutation.cases import Case
from tests.objects import by_object
from tests.schedules import DEAR_COPIES

WHOLE: dict[str, GraphPass] = {
    "merge": BucketCollectives(size=1.0),
    "split": BucketCollectives(size=6e-5),
    "auto": BucketCollectives(size="auto"),
    "coalesce": CoalesceCollectives(),
}


@pytest.mark.parametrize("kind", SPLIT)
def test_a_launch_says_which_object_does_it(kind: GraphKind) -> None:
    gm, _ = by_object().at(kind, after=InsertCollectives)
    assert_golden(text(gm), f"objects_{kind}")


@pytest.mark.parametrize("kind", SPLIT)
@pytest.mark.parametrize("name", WHOLE)
def test_launches_stay_as_they_are(name: str, kind: GraphKind) -> None:
    gm, ctx = by_object().at(kind, after=InsertCollectives)
    assert_changes_nothing(WHOLE[name], gm, dataclasses.replace(ctx, hardware=DEAR_COPIES))


def without_objects(plan: FramePlan) -> FramePlan:
    """A plan of which passes cannot see that an object does it."""
    units = {
        key: dataclasses.replace(
            unit, gather_group=unit.gather_group.replace(BY, "+"), reduce_group=unit.reduce_group.replace(BY, "+")
        )
        for key, unit in plan.units.items()
    }
    return dataclasses.replace(plan, units=units)


@pytest.mark.parametrize("kind", SPLIT)
@pytest.mark.parametrize("name", ["merge", "split", "coalesce"])
def test_a_launch_that_is_not_whole_is_caught(name: str, kind: GraphKind) -> None:
    case = Case(model="by_object", world_size=2, dialect="eager", kind=kind)
    gm, ctx = case.traced.at(kind, after=InsertCollectives)
    hidden = dataclasses.replace(ctx, plan=without_objects(ctx.plan), hardware=DEAR_COPIES)
    assert WHOLE[name].apply(gm, hidden)
    with pytest.raises(InvariantError, match="objects_are_given_whole_units"):
        case.verify(gm.graph)
