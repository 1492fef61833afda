"""Traces of the small model, each made once."""

import functools

import torch

from fxshard.plan.outline import OutlinedModel, outline
from fxshard.plan.plan import SCHEDULES
from fxshard.plan.run import PlannedSchedule
from tests.plan.models import Stack, build


def traced(layers: int, schedule: PlannedSchedule) -> OutlinedModel:
    """A stack of so many blocks on eight ranks."""
    return _traced(layers, next(name for name, each in SCHEDULES.items() if each is schedule))


@functools.cache
def _traced(layers: int, name: str) -> OutlinedModel:
    schedule = SCHEDULES[name]
    with torch.device("meta"):
        model = Stack(layers)
    options = {**schedule.options, "hardware": "h100-sxm"}
    return outline(model, build()[1], {}, world_size=8, options=options, saves_all=not schedule.fuses)
