"""What the lane compiles and runs: each mode, variant and dtype, and the GPUs it is compiled for."""

from __future__ import annotations

import dataclasses

from fxshard.hardware import BUILTIN
from tests.cross_cuda import layouts
from tests.cross_cuda.gpus import A100, B200
from tests.cross_cuda.training import FP32, Broken, Case

FSDP2 = ("schedule", "fsdp2")
"""One launch per unit, so that there are several in a small model."""

DEAR_TENSORS = ("hardware", dataclasses.replace(BUILTIN["h100"], gather_tensor_overhead=1.0).to_json())
"""One tensor per launch, so that parameters are copied out of it."""

NCCL = Case(options=(FSDP2, ("regions", "off")), num_layers=3)
SIDE = Case(options=(FSDP2, ("streams", "side")), num_layers=3, microbatches=2)
SIDE_COPIES = Case(options=(FSDP2, ("streams", "side"), DEAR_TENSORS), microbatches=2)
CUDAGRAPHS = Case(options=(FSDP2, ("cudagraphs", True)))
HYBRID = Case(options=(FSDP2,), replicas=2, num_layers=3)
BROKEN = Case(model=Broken, options=(FSDP2, ("resident_gib", 4.0)), microbatches=2, overlaps_step=True)

OFFLOADED = Case(options=(FSDP2,), num_layers=3, offloads=True)

SIDE_STREAMS = (FSDP2, ("streams", "side"))
OFFLOADED_SIDE = Case(options=(*SIDE_STREAMS, DEAR_TENSORS), offloads=True, microbatches=2)

TENSOR_PARALLEL = Case(layout=layouts.tensor_parallel, options=SIDE_STREAMS)
EXCHANGING = dataclasses.replace(TENSOR_PARALLEL, model=layouts.ExchangingGPT)
EXPERTS = Case(model=layouts.MixingGPT, layout=layouts.expert_parallel, options=SIDE_STREAMS)
SUBGROUPS = Case(layout=layouts.subgroups, options=SIDE_STREAMS)
FP8 = Case(layout=layouts.encoded, options=SIDE_STREAMS)
UNUSED = Case(model=layouts.Sparing, layout=layouts.unused, options=SIDE_STREAMS)
HOOKED = Case(layout=layouts.hooked, options=SIDE_STREAMS, replicas=2)

LAYOUTS = {
    "tensor parallel, exchanging": EXCHANGING,
    "experts on a mesh of their own": EXPERTS,
    "subgroups": SUBGROUPS,
    "fp8": FP8,
    "unused parameters": UNUSED,
    "hybrid, hook": HOOKED,
}

QUICK = {
    "nccl": NCCL,
    "side": SIDE,
    "side, one tensor per launch": SIDE_COPIES,
    "cudagraphs": CUDAGRAPHS,
    "hybrid": HYBRID,
    "graph breaks, resident": BROKEN,
    "offloaded": OFFLOADED,
    "offloaded, side, one tensor per launch": OFFLOADED_SIDE,
    **LAYOUTS,
}
"""What CI compiles, for sm_90."""

MORE = {
    "defaults": Case(),
    "defaults, accumulating": Case(microbatches=2, overlaps_step=True),
    "nccl, regions": Case(options=(FSDP2,), num_layers=3, microbatches=2),
    "hybrid, side, accumulating": Case(options=(FSDP2, ("streams", "side")), replicas=2, microbatches=2),
    "offloaded, side, fp32": dataclasses.replace(OFFLOADED_SIDE, policy=FP32),
    "offloaded, hybrid": Case(options=(FSDP2,), offloads=True, replicas=2),
    "offloaded, nothing overlaps": Case(options=(FSDP2, ("streams", "off")), offloads=True),
    "nccl, fp32": Case(options=(FSDP2,), policy=FP32),
    "side, fp32": Case(options=(FSDP2, ("streams", "side")), policy=FP32),
    "side, graph breaks": Case(model=Broken, options=(FSDP2, ("streams", "side")), num_layers=3, overlaps_step=True),
    "cudagraphs, accumulating": Case(options=(FSDP2, ("cudagraphs", True)), microbatches=2),
    "nccl, dim 2048": Case(options=(FSDP2,), dim=2048, batch=4),
}

OTHER_MODES = {"nccl": (FSDP2,), "off": (FSDP2, ("streams", "off")), "cudagraphs": (FSDP2, ("cudagraphs", True))}
MORE |= {"tensor parallel": TENSOR_PARALLEL} | {
    f"{layout}, {mode}": dataclasses.replace(case, options=options)
    for layout, case in LAYOUTS.items()
    for mode, options in OTHER_MODES.items()
}

OTHER_GPUS = (A100, B200)
