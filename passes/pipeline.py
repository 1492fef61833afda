"""Which passes run on which graph, in which order, and why there."""

from __future__ import annotations

from dataclasses import dataclass, fields

from fxshard.errors import ConfigError, InvariantError
from fxshard.ir.variant import Variant
from fxshard.options import Options
from fxshard.passes import _manager
from fxshard.passes._base import GraphPass, Property
from fxshard.passes.accumulate_gradients import AccumulateGradients
from fxshard.passes.assign_streams import AssignStreams
from fxshard.passes.bind_markers import BindMarkers
from fxshard.passes.bucket_collectives import BucketCollectives
from fxshard.passes.call_regions import CallRegions
from fxshard.passes.cast_shards import CastShards
from fxshard.passes.chain_reductions import ChainReductions
from fxshard.passes.coalesce_collectives import CoalesceCollectives
from fxshard.passes.copy_biases import CopyBiases
from fxshard.passes.copy_in_gradients import CopyInGradients
from fxshard.passes.dedup_unshard import DedupUnshard
from fxshard.passes.defer_weight_gradients import DeferWeightGradients
from fxshard.passes.enforce_order import EnforceOrder
from fxshard.passes.fold_copies import FoldCopies
from fxshard.passes.fuse_grad_accumulation import FuseGradAccumulation
from fxshard.passes.hand_off_prefetch import HandOffPrefetch
from fxshard.passes.hand_off_reductions import HandOffReductions
from fxshard.passes.hoist_copies import HoistCopies
from fxshard.passes.hoist_prefetch import HoistPrefetch
from fxshard.passes.insert_collectives import InsertCollectives
from fxshard.passes.keep_last_unit import KeepLastUnit
from fxshard.passes.lower_streams import LowerStreams
from fxshard.passes.offload_shards import OffloadShards
from fxshard.passes.outline_regions import OutlineRegions
from fxshard.passes.pin_order import PinOrder
from fxshard.passes.read_resident import ReadResident
from fxshard.passes.reduce_unused import ReduceUnused
from fxshard.passes.refuse_writes import RefuseWrites
from fxshard.passes.reshard_policy import ReshardPolicy
from fxshard.passes.reshard_to_subgroup import ReshardToSubgroup
from fxshard.passes.sink_waits import SinkWaits
from fxshard.passes.tag_parameter_views import TagParameterViews


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The passes of each stage, in order. Change it with `dataclasses.replace`.

    Attributes:
        dynamo: on the graph as Dynamo captured it, before AOTAutograd.
        joint: on the joint forward-backward graph, before it is split.
        split: on the forward, the backward and the inference graph, each for itself.
        last: on the same graphs, after Inductor's own passes.
        codegen: on the same graphs, right before they become code: tags become ops. If the code comes from a cache,
            this stage and the last one ran when it went in, and run again only for who looks at the graphs.
    """

    dynamo: tuple[GraphPass, ...] = ()
    joint: tuple[GraphPass, ...]
    split: tuple[GraphPass, ...]
    last: tuple[GraphPass, ...] = ()
    codegen: tuple[GraphPass, ...] = ()

    def __post_init__(self) -> None:
        for stage in fields(self):
            passes = getattr(self, stage.name)
            wrong = [p for p in passes if not isinstance(p, GraphPass)] if isinstance(passes, tuple) else [passes]
            if wrong:
                raise ConfigError(
                    f"Pipeline.{stage.name} must be a tuple of GraphPass instances, got {wrong[0]!r} in it. Derive "
                    "passes from fxshard.GraphPass and give instances, not classes."
                )


DYNAMO: tuple[GraphPass, ...] = (RefuseWrites(), BindMarkers())  # a write is named as the user has it

JOINT: tuple[GraphPass, ...] = (
    DedupUnshard(),  # first: later passes count on one marker per parameter and call
    ReduceUnused(),  # after it, for it reads parameters once per call; before what decides how backward reads them
    ReshardToSubgroup(),  # before the tags: these are of the markers that backward may read
    ReshardPolicy(),  # before the split: the partitioner reads its tags
    TagParameterViews(),  # last: of what the split then finds
)


def default(
    *,
    bucket: str | float = "unit",
    bucket_peak_share: float = 1.0,
    prefetch: int | str = 1,
    reduce_scatter_max_input_buffers: int = 2,
    streams: str = "auto",
    lower: str = "inductor",
    cudagraphs: bool = False,
    regions: str = "auto",
) -> Pipeline:
    """Return the passes without a change by the user; arguments are options of passes, or of the backend.

    With `lower="eager"` sums are FSDP2's to the bit, and the order needs no pins. With `cudagraphs` code is recorded
    and replayed, so no launch may depend on what happened before.
    """
    compiled, guesses, auto = lower == "inductor", prefetch not in (0, "off"), prefetch == "auto"
    hands_off = not cudagraphs and streams != "off"
    keeping, deferring = ((KeepLastUnit(),), (DeferWeightGradients(),)) if auto else ((), ())
    ends = HandOffPrefetch(guess=guesses, hands_over=streams != "off")
    outlining = (OutlineRegions(bucket=bucket),) if (outlines := regions == "auto" and not cudagraphs) else ()
    calling = CallRegions(interpreted=not compiled, parts_last=auto)
    folding = (FoldCopies(),) if outlines else ()  # once launches are final
    return Pipeline(
        dynamo=(*DYNAMO, *keeping, *outlining),  # before AOTAutograd, which then sees each block once
        joint=JOINT,
        split=(
            *((calling,) if outlines else ()),  # first: what a call costs is then in the graph itself
            ReshardToSubgroup(),  # again: what forward has gathered it need not gather from a subgroup
            DedupUnshard(),  # again: it has left double reads, and a graph without backward has seen no joint stage
            OffloadShards(),  # before it: what is gathered and reduced is on the device
            InsertCollectives(),  # after the split: each graph gathers where it reads and reduces where it writes
            BucketCollectives(size=bucket, peak_share=bucket_peak_share, hands_off=hands_off),  # before tensors are cut
            CoalesceCollectives(fuses_copies=compiled, same_sums=not compiled, hands_off=hands_off),
            *deferring,  # before waits sink, behind it
            SinkWaits(max_buffers=reduce_scatter_max_input_buffers),
            HoistPrefetch(depth=0 if prefetch == "off" else prefetch),  # type: ignore[arg-type]  # the pass checks it
            *((HoistCopies(),) if guesses else ()),  # once gathers are where they are launched
            ChainReductions(),  # once everything is on the links that a reduction may wait for
            AssignStreams(mode=streams, fuses_copies=compiled),  # where a wait stands decides what streams may do
            *((HandOffReductions(),) if hands_off else ()),  # last: no wait moves any more
        ),
        last=(CastShards(), CopyInGradients(), *folding, PinOrder()) if compiled else (),  # fusion comes next
        codegen=_codegen(ends, compiled, cudagraphs),
    )


def _codegen(handing_off: HandOffPrefetch, compiled: bool, cudagraphs: bool) -> tuple[GraphPass, ...]:
    return (
        *(() if cudagraphs else (handing_off,)),
        LowerStreams(),  # after it: what is handed over knows its stream
        *((CopyBiases(), EnforceOrder()) if compiled else ()),  # last: it hides nodes in subgraphs
    )


def of_variant(passes: tuple[GraphPass, ...], which: Variant, lower: str) -> tuple[GraphPass, ...]:
    """Return the split stage of a variant: what makes it one comes right before what is read is copied and gathered."""
    at = next(
        i for i, step in enumerate(passes) if isinstance(step, OffloadShards) or Property.COLLECTIVES in step.ensures
    )
    fused = (FuseGradAccumulation(),) if lower == "inductor" else ()
    return (*passes[:at], AccumulateGradients(which=which), *fused, ReadResident(which=which), *passes[at:])


def in_step(passes: tuple[GraphPass, ...]) -> tuple[GraphPass, ...]:
    """Return the split stage for units of which other ranks run other graphs: without what weighs one graph's costs."""
    weighing = (BucketCollectives, ChainReductions, CoalesceCollectives, DeferWeightGradients)
    fixed = (HoistPrefetch() if step == HoistPrefetch(depth="auto") else step for step in passes)
    return tuple(step for step in fixed if not isinstance(step, weighing))


DEFAULT = default()

JOINT_GIVEN = (Property.MARKED,)
SPLIT_GIVEN = (Property.MARKED,)
LAST_GIVEN = (Property.COLLECTIVES, Property.SCHEDULED, Property.LOWERED)
CODEGEN_GIVEN = (Property.COLLECTIVES, Property.SCHEDULED)
_NEEDED = {"dynamo": Property.MARKED, "joint": Property.RESHARD_TAGGED, "split": Property.COLLECTIVES}


def codegen_given(options: Options) -> tuple[Property, ...]:
    """Return the properties before the codegen stage; the interpreter has no passes of Inductor's before it."""
    return LAST_GIVEN if options.lower == "inductor" else CODEGEN_GIVEN


def chosen(options: Options) -> Pipeline:
    """Return the pipeline that the options want; what the interpreter runs is to equal FSDP2 bit for bit."""
    pipeline = default(
        bucket=options.chosen_bucket,
        bucket_peak_share=options.bucket_peak_share,
        prefetch=options.chosen_prefetch,
        reduce_scatter_max_input_buffers=options.reduce_scatter_max_input_buffers,
        streams=options.streams,
        lower=options.lower,
        cudagraphs=options.cudagraphs,
        regions=options.regions,
    )
    if options.passes is None:
        return pipeline
    pipeline = options.passes(pipeline)
    if not isinstance(pipeline, Pipeline):
        raise ConfigError(
            f"options['passes'] must return a Pipeline, got {type(pipeline).__name__}. It is given the default one: "
            "return dataclasses.replace(pipeline, split=(*pipeline.split, MyPass()))."
        )
    given = {
        "dynamo": (),
        "joint": JOINT_GIVEN,
        "split": SPLIT_GIVEN,
        "last": LAST_GIVEN,
        "codegen": codegen_given(options),
    }
    for stage, properties in given.items():
        try:
            known = _manager.check_properties(getattr(pipeline, stage), properties)
        except InvariantError as error:
            raise ConfigError(
                f"options['passes'], stage {stage!r}: a property is missing. {str(error).splitlines()[0]}"
            ) from None
        if stage in _NEEDED and _NEEDED[stage] not in known:
            raise ConfigError(
                f"options['passes'], stage {stage!r}: nothing ensures {_NEEDED[stage].name} ({_NEEDED[stage].value}). "
                "Keep the pass that does, or put one with the same `ensures` in its place."
            )
    return pipeline
