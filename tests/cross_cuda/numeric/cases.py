"""What is computed: small models on two or four ranks."""

from __future__ import annotations

import dataclasses

from tests.cross_cuda import layouts
from tests.cross_cuda.cases import DEAR_TENSORS, FSDP2, SIDE_STREAMS
from tests.cross_cuda.training import FP32, Broken, Case

_SMALL = Case(dim=64, world_size=2, options=(FSDP2,))
_FOUR = dataclasses.replace(_SMALL, world_size=4, num_layers=1, options=SIDE_STREAMS)


def _small(case: Case = _SMALL, **changes: object) -> Case:
    return dataclasses.replace(case, **changes)  # type: ignore[arg-type] # of any field


NCCL = _small(policy=FP32)
SIDE_COPIES = _small(num_layers=1, options=(*SIDE_STREAMS, DEAR_TENSORS))
OFFLOADED_SIDE = _small(SIDE_COPIES, offloads=True)

CORE = {
    "nccl, fp32": NCCL,
    "side, one tensor per launch": SIDE_COPIES,
    "offloaded, side, one tensor per launch": OFFLOADED_SIDE,
}
"""What CI computes, and puts faults into."""

GRAPHED = {"cudagraphs": _small(options=(FSDP2, ("cudagraphs", True)))}

MORE = {
    **GRAPHED,
    "cudagraphs, accumulating": _small(options=(FSDP2, ("cudagraphs", True)), microbatches=2),
    "cudagraphs, each microbatch reduced": _small(
        options=(FSDP2, ("cudagraphs", True)), microbatches=2, reduces_each=True
    ),
    "defaults": _small(options=()),
    "prefetch 0": _small(options=(FSDP2, ("prefetch", 0)), num_layers=3),
    "prefetch 2": _small(options=(*SIDE_STREAMS, ("prefetch", 2)), num_layers=3),
    "prefetch 4": _small(options=(FSDP2, ("prefetch", 4)), num_layers=4, policy=FP32),
    "buckets merged": _small(options=(*SIDE_STREAMS, ("bucket", 64)), num_layers=3),
    "buckets split": _small(options=(*SIDE_STREAMS, ("bucket", 0.02))),
    "one block after the other": _small(options=(FSDP2, ("regions", "off")), num_layers=3),
    "regional": _small(options=(*SIDE_STREAMS, ("regional", True)), num_layers=3),
    "accumulating": _small(options=SIDE_STREAMS, microbatches=2),
    "accumulating, defaults, fp32": _small(options=(), microbatches=3, policy=FP32),
    "accumulating, resident": _small(options=(*SIDE_STREAMS, ("resident_gib", 4.0)), microbatches=2),
    "two graphs in flight": _small(options=SIDE_STREAMS, microbatches=3, in_flight=2),
    "offloaded": _small(offloads=True),
    "offloaded, accumulating": _small(offloads=True, microbatches=2, options=SIDE_STREAMS),
    "graph breaks": _small(model=Broken),
    "graph breaks, fp32": _small(model=Broken, policy=FP32, options=SIDE_STREAMS),
    "graph breaks, resident": _small(model=Broken, options=(FSDP2, ("resident_gib", 4.0)), microbatches=2),
    "overlap_step": _small(model=Broken, overlaps_step=True),
    "overlap_step, side, accumulating": _small(overlaps_step=True, options=SIDE_STREAMS, microbatches=2),
    "hybrid": _small(_FOUR, replicas=2),
    "hybrid, fp32, accumulating": _small(_FOUR, replicas=2, microbatches=2, policy=FP32, options=(FSDP2,)),
    "hybrid, offloaded": _small(_FOUR, replicas=2, offloads=True),
    "hybrid, hook": _small(_FOUR, replicas=2, layout=layouts.hooked),
    "reductions on their own": _small(layout=layouts.two_groups, options=SIDE_STREAMS),
    "reductions on their own, fp32": _small(layout=layouts.two_groups, policy=FP32, microbatches=2),
    "fp8": _small(_FOUR, world_size=2, layout=layouts.encoded),
    "unused parameters": _small(_FOUR, world_size=2, layout=layouts.unused, model=layouts.Sparing),
    "tensor parallel": _small(_FOUR, layout=layouts.tensor_parallel),
    "experts": _small(_FOUR, layout=layouts.expert_parallel, model=layouts.MixingGPT),
}

APART = {
    "uneven rows": _small(world_size=3, num_layers=1, options=SIDE_STREAMS),
    "uneven rows, fp32, accumulating": _small(world_size=3, num_layers=1, policy=FP32, microbatches=2),
    "subgroups": _small(_FOUR, layout=layouts.subgroups),
    "tensor parallel, exchanging": _small(_FOUR, layout=layouts.tensor_parallel, model=layouts.ExchangingGPT),
}
"""What is compiled for each rank, for its code differs by rank."""


def on_the_cpu(case: Case) -> Case:
    """Return the same training on fxshard's CPU path, whose graphs run node by node."""
    kept = (option for option in case.options if option != ("cudagraphs", True))
    return dataclasses.replace(case, device="cpu", options=(*kept, ("lower", "eager")))
