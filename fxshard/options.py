"""Options of the backend: frozen, validated, and the only place that reads environment variables."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from fxshard.errors import ConfigError, nearest

# Inductor flags that decide the order of collectives, and the first torch that surely has them; its own schedulers
# would undo ours.
KEEP_ORDER_FLAGS = {
    "reorder_for_peak_memory": "2.11",
    "reorder_for_compute_comm_overlap": "2.11",
    "reorder_for_locality": "2.11",
    "reorder_for_locality_in_training": "2.15",
    "aten_distributed_optimizations.enable_simple_overlap": "2.15",
}
CUDA_GRAPH_FLAGS = ("triton.cudagraphs", "triton.cudagraph_trees", "graph_partition")
OWNED_INDUCTOR_FLAGS = (
    *KEEP_ORDER_FLAGS,
    *CUDA_GRAPH_FLAGS,
    "custom_partitioner_fn",
    "post_grad_custom_post_pass",
)


_OF_ANY_GRAPH = frozenset(
    {"mesh", "reshard_after_forward", "param_dtype", "reduce_dtype", "offload", "separate_reduce_scatter_group"}
    | {"regional", "lower", "verify", "hardware", "inductor"}
)
"""Options that say the same of a graph of one block."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `torch.compile(..., backend="fxshard", options={...})` accepts.

    Attributes:
        mesh: of the one-line path, with one axis or (replicate, shard); `None` is all ranks. An error for a model that
            `fully_shard` sharded.
        reshard_after_forward: as in `fully_shard`, for the one-line path only.
        param_dtype: dtype of gathered parameters and compute, for the one-line path only.
        reduce_dtype: dtype of gradient reduction, for the one-line path only.
        offload: `{"params": 0.5}` keeps half of the parameters' bytes in the host's memory, by whole units, with their
            gradients and optimizer state, as `CPUOffloadPolicy` does; "pin_memory": False as there, "optimizer": True
            says what is so anyway. For the one-line path only; `fully_shard` takes an `offload_policy` for each unit.
        schedule: "auto" lets the cost model choose what a launch moves and when it starts; "fsdp2" makes FSDP2's
            launches, one by one: each unit's own, one unit ahead. `None` is "auto" where Inductor lowers, "fsdp2" where
            graphs are run node by node, to be FSDP2's to the bit.
        bucket: what one launch moves: "unit", "auto" (merge what is too small for the link, split what is too large),
            or MiB of the whole buffer that a launch is filled up to; `None` is what `schedule` says.
        bucket_peak_share: how many more unsharded bytes the merged launches of "auto" may hold than a launch for each
            unit: so many times the largest unit's, for parameters and for gradients. `math.inf` is no limit.
        prefetch: how many units ahead an all_gather is launched; 0 or "off": none; "auto": for each unit as many as the
            cost model needs to hide it, and without a memory budget the last unit of forward stays for backward, unless
            `reshard_after_forward` says otherwise; `None` is what `schedule` says. The modules' own prefetch lists win.
        reduce_scatter_max_input_buffers: reductions whose inputs may be alive at once.
        memory_budget_gib: what unsharded parameters may take at any time in a graph; gathers are merged and launched
            ahead only within it, and for another graph only where a list says so.
        resident_gib: what parameters of the whole model may take that stay unsharded from one microbatch to the next
            while gradients are not reduced (`no_sync`); those go first that save the most communication per byte.
        separate_reduce_scatter_group: reductions get a process group of their own, to be on the link beside gathers;
            for the one-line path only, see `ShardedModule.set_separate_reduce_scatter_group`.
        streams: "nccl" leaves collectives to the streams of their process group; "side" also puts casts and copies of
            parameters and gradients on streams of their own; "off" overlaps nothing, for debugging; "auto" is "nccl".
        lower: "inductor", or "eager" to run the transformed graphs node by node (no decompositions, bitwise FSDP2).
        regional: compile each unit by itself, those that are alike once for all of them, and run what is around them as
            it is: the first step does not grow with depth. With `False` the whole model is one graph. "auto" chooses at
            the first call ([Note: one graph or blocks] in `sharding/blocks.py`).
        regions: "auto" traces and lowers the code of blocks that are alike once, and calls it for each of them; "off"
            writes out every block, as `cudagraphs` does.
        cudagraphs: record each compiled graph as a CUDA graph and replay it; prefetch over a graph break and `unshard`
            then launch nothing for another graph.
        verify: check every invariant of `ir/verify/verifier.py` after every pass; "debug" also re-runs the graphs on
            fake tensors.
        passes: a function from the default `Pipeline` to the one to run; passes of your own get the same checks.
        hardware: what the cost model counts on: a device by name ("h100"), or the path of a JSON file (`hardware.py`);
            `None` is what the ranks measured where they were sharded (`cost/measured.py`), or, where they did not,
            "cpu" for a model on the CPU, else "h100". Decides estimates, buckets and copies; no results.
        inductor: config patches passed to Inductor as they are.
    """

    mesh: DeviceMesh | None = None
    reshard_after_forward: bool | int | None = None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    offload: Mapping[str, Any] | None = None
    schedule: str | None = None
    bucket: str | float | None = None
    bucket_peak_share: float = 1.0
    prefetch: int | str | None = None
    reduce_scatter_max_input_buffers: int = 2
    memory_budget_gib: float | None = None
    resident_gib: float = 0
    separate_reduce_scatter_group: bool = False
    streams: str = "auto"
    lower: str = "inductor"
    cudagraphs: bool = False
    regional: bool | str = "auto"
    regions: str = "auto"
    verify: bool | str = True
    # compile/cache.py hashes what it returns
    passes: Callable[[Any], Any] | None = dataclasses.field(default=None, repr=False)
    hardware: str | None = None
    inductor: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.lower not in ("inductor", "eager"):
            raise ConfigError(f'lower must be "inductor" or "eager", got {self.lower!r}.')
        if self.regions not in ("auto", "off"):
            raise ConfigError(f'regions must be "auto" or "off", got {self.regions!r}.')
        if self.verify not in (True, False, "debug"):
            raise ConfigError(f'verify must be True, False or "debug", got {self.verify!r}.')
        budget = self.memory_budget_gib
        is_number = isinstance(budget, int | float) and not isinstance(budget, bool)
        if budget is not None and not (is_number and 0 < budget < math.inf):
            raise ConfigError(f"memory_budget_gib must be a positive number or None, got {budget!r}.")
        resident = self.resident_gib
        is_number = isinstance(resident, int | float) and not isinstance(resident, bool)
        if not (is_number and 0 <= resident < math.inf):
            raise ConfigError(f"resident_gib must be a number of GiB, 0 for none, got {resident!r}.")
        if budget is not None and resident >= budget:
            raise ConfigError(
                f"resident_gib={resident} leaves nothing of memory_budget_gib={budget} for the parameters that a graph "
                "gathers. Lower the one or raise the other."
            )
        if self.passes is not None and not callable(self.passes):
            raise ConfigError(f"passes must be a function from Pipeline to Pipeline or None, got {self.passes!r}.")
        if not isinstance(self.hardware, str | None):
            raise ConfigError(f"hardware must be a name, the path of a JSON file or None, got {self.hardware!r}.")
        for name in ("param_dtype", "reduce_dtype"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
                raise ConfigError(f"{name} must be a floating-point torch.dtype or None, got {value!r}.")
        if self.mesh is not None and not isinstance(self.mesh, DeviceMesh):
            raise ConfigError(f"mesh must be a DeviceMesh or None, got {type(self.mesh).__name__}.")
        if not isinstance(self.regional, bool) and self.regional != "auto":
            raise ConfigError(f'regional must be True, False or "auto", got {self.regional!r}.')
        for name in ("separate_reduce_scatter_group", "cudagraphs"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        if not isinstance(self.inductor, Mapping):
            raise ConfigError(f"inductor must be a dict of Inductor config patches, got {self.inductor!r}.")
        self._require_consistent_flags()

    def _require_consistent_flags(self) -> None:
        if self.offload is not None:
            _require_offload(self.offload)
        reshard = self.reshard_after_forward
        if not isinstance(reshard, bool | int | None):
            raise ConfigError(f"reshard_after_forward must be True, False, None or a number of ranks, got {reshard!r}.")
        if self.schedule not in (None, "auto", "fsdp2"):
            raise ConfigError(f'schedule must be "auto", "fsdp2" or None, got {self.schedule!r}.')
        owned = sorted(set(self.inductor) & set(OWNED_INDUCTOR_FLAGS))
        if owned:
            raise ConfigError(
                f"inductor may not set {', '.join(owned)}: fxshard owns the order of collectives, and CUDA graphs are "
                "its option cudagraphs."
            )
        if self.cudagraphs and self.lower != "inductor":
            raise ConfigError('cudagraphs=True needs lower="inductor": nothing else records graphs.')
        if self.cudagraphs and self.resident_gib:
            raise ConfigError(
                "cudagraphs=True and resident_gib: each replay would copy the parameters that stay gathered. Leave one "
                "out."
            )
        if self.cudagraphs and self.streams == "side":
            raise ConfigError(
                'cudagraphs=True and streams="side": what a side stream reads is not freed until a recording ends. '
                "Leave one out."
            )

    @property
    def chosen_bucket(self) -> str | float:
        """What a launch moves, as `bucket` says, else `schedule`."""
        if self.bucket is not None:
            return self.bucket
        return "unit" if self._launches_as_fsdp2 else "auto"

    @property
    def chosen_prefetch(self) -> int | str:
        """How far ahead gathers are launched, as `prefetch` says, else `schedule`."""
        if self.prefetch is not None:
            return self.prefetch
        return 1 if self._launches_as_fsdp2 else "auto"

    @property
    def _launches_as_fsdp2(self) -> bool:
        return self.schedule == "fsdp2" or (self.schedule is None and self.lower == "eager")

    @property
    def one_graph_only(self) -> tuple[str, ...]:
        """Names of the set options that only a graph of the whole model has: a schedule, passes, a budget, ..."""
        names = (f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default)
        return tuple(name for name in names if name not in _OF_ANY_GRAPH)

    @property
    def one_line_only(self) -> tuple[str, ...]:
        """Names of the set options that only the one-line path reads."""
        names = ("mesh", "reshard_after_forward", "param_dtype", "reduce_dtype", "offload")
        given = tuple(name for name in names if getattr(self, name) is not None)
        return (*given, "separate_reduce_scatter_group") if self.separate_reduce_scatter_group else given


def parse(options: Mapping[str, Any] | None, mode: str | None = None) -> Options:
    """Turn the dict of `torch.compile` into `Options`; a ConfigError names what is unknown or out of range."""
    if mode not in (None, "default"):
        raise ConfigError(f"mode={mode!r} has no meaning for backend='fxshard'; pass options={{'inductor': {{...}}}}.")
    if not isinstance(options, Mapping | None):
        raise ConfigError(f"options must be a dict, got {options!r}.")
    given = dict(options or {})
    known = [field.name for field in dataclasses.fields(Options)]
    for name in given:
        if name not in known:
            raise ConfigError(_unknown(name, known))
    return Options(**given)


def _require_offload(given: object) -> None:
    if not isinstance(given, Mapping) or not given.keys() <= {"params", "optimizer", "pin_memory"}:
        raise ConfigError(f'offload must be a dict of "params", "optimizer" and "pin_memory", got {given!r}.')
    part = given.get("params")
    if part is None:
        raise ConfigError(
            f"offload={dict(given)!r} does not say which part of the parameters: an optimizer steps them where they "
            'are, so its state is on the host where they are, and nowhere else. Give "params": 1 for all, 0.5 for half.'
        )
    if isinstance(part, bool) or not isinstance(part, int | float) or not 0 <= part <= 1:
        raise ConfigError(f'offload: "params" must be a part from 0 to 1, got {part!r}.')
    if part and given.get("optimizer", True) is not True:
        raise ConfigError(
            'offload: "optimizer" can only be True: the state of offloaded parameters is on the host with them. Leave '
            "it out."
        )
    if not isinstance(given.get("pin_memory", True), bool):
        raise ConfigError(f'offload: "pin_memory" must be True or False, got {given["pin_memory"]!r}.')


def _unknown(name: object, known: list[str]) -> str:
    return f"unknown option {name!r}. Did you mean {nearest(name, known)!r}? Known options: {', '.join(sorted(known))}."


def launched_world_size() -> int:
    """Return the number of ranks that a launcher such as torchrun announced in the environment, 1 if none did."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@dataclass(frozen=True, kw_only=True)
class LauncherEnvironment:
    """What torchrun, or another launcher that sets its variables, told this process."""

    rank: int  # over all machines
    world_size: int
    local_rank: int  # on this machine, and so the number of its GPU
    is_one_machine: bool  # as far as is known
    host: str  # of the TCPStore where they meet
    port: int
    attempt: int = 0  # how often all of them were started before


def launched() -> LauncherEnvironment | None:
    """Return what the launcher told this process, `None` if there was none; a ConfigError if that is not whole."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    if missing := [name for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise ConfigError(
            f"RANK and WORLD_SIZE are set as torchrun sets them, but not {', '.join(missing)}. Start it with torchrun, "
            "or unset RANK."
        )
    world_size = _number("WORLD_SIZE")
    return LauncherEnvironment(
        rank=_number("RANK"),
        world_size=world_size,
        local_rank=_number("LOCAL_RANK"),
        is_one_machine=os.environ.get("LOCAL_WORLD_SIZE") == str(world_size),
        host=os.environ["MASTER_ADDR"],
        port=_number("MASTER_PORT"),
        attempt=_number("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def _number(name: str, default: str = "") -> int:
    text = os.environ.get(name, default)
    if not text.isdecimal():
        raise ConfigError(f"the environment variable {name} must be a whole number, got {text!r}.")
    return int(text)


def gloo_interfaces() -> list[str]:
    """Return the names of the network interfaces that gloo is told to use, none if it may choose."""
    return [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]


def ranks_per_machine() -> int | None:
    """Return how many ranks the launcher started on this machine, `None` if it did not say."""
    return _number("LOCAL_WORLD_SIZE") or None if "LOCAL_WORLD_SIZE" in os.environ else None


def compile_cache_dir() -> str | None:
    """Return the folder of torch's compile caches, `None` where that is torch's choice."""
    return os.environ.get("TORCHINDUCTOR_CACHE_DIR")


def measures_hardware() -> bool:
    """Return whether ranks may measure their link: FXSHARD_CALIBRATE is not 0."""
    given = os.environ.get("FXSHARD_CALIBRATE", "1")
    if given not in ("0", "1"):
        raise ConfigError(
            f"the environment variable FXSHARD_CALIBRATE must be 0 (count on fxshard's table) or 1, got {given!r}."
        )
    return given == "1"
