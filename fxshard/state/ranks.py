"""The ranks that hold a state together: what must be the same on all, and how they raise together what one found."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fxshard.errors import CheckpointError, ConfigError, FxshardError, RankMismatchError
from fxshard.runtime import mesh_axes
from fxshard.runtime.parameters import local_of
from fxshard.runtime.raw import checksum
from fxshard.sharding.sharded_module import plain_module

T = TypeVar("T")

_MOST = 5  # differences that a message lists
_NOTHING = ""  # the fact of a rank that has no state of a parameter


@dataclass(frozen=True)
class _Claim:
    """What a rank says of one part of its state."""

    text: str  # equal texts mean the same
    ranks: tuple[int, ...]  # those that must say the same; others have something else by this name
    may_lack: bool  # whether this rank has no rows of it anyway, and may have nothing


@dataclass(frozen=True)
class _Failure:
    """An error as it travels between ranks."""

    kind: type[FxshardError]
    text: str

    @classmethod
    def of(cls, error: BaseException, otherwise: type[FxshardError]) -> _Failure:
        if isinstance(error, ConfigError | CheckpointError | RankMismatchError):
            return cls(type(error), str(error))
        if isinstance(error, CheckpointException):
            causes = [cause for cause, _ in error.failures.values()]
            return cls(CheckpointError, "; ".join(dict.fromkeys(f"{type(e).__name__}: {e}" for e in causes)))
        return cls(otherwise, f"{type(error).__name__}: {error}")


@dataclass(frozen=True)
class Ranks:
    """The ranks that hold a model's state together, or this process alone without a process group."""

    group: dist.ProcessGroup | None  # of the mesh that contains all others, or of all ranks
    device: torch.device  # where its collectives work

    @classmethod
    def of(cls, model: object) -> Ranks:
        """Return the ranks that share the parameters of `model`; all ranks for what is no model, or not sharded."""
        meshes = list(_meshes(plain_module(model).parameters())) if isinstance(model, nn.Module) else []
        device = torch.empty(0, device=meshes[0].device_type).device if meshes else torch.device("cpu")
        ranks = {id(mesh): set(mesh_axes.ranks_of(mesh)) for mesh in meshes}
        for mesh in meshes:
            if mesh.ndim == 1 and all(other <= ranks[id(mesh)] for other in ranks.values()):
                return cls(mesh.get_group(), device)
        members = sorted(set().union(*ranks.values()))
        if members and len(members) < dist.get_world_size():
            raise ConfigError(
                f"the model is sharded over ranks {members} of {dist.get_world_size()} by meshes of which none is 1-D "
                "and has them all, so there is no process group in which they could agree. Shard the root over such a "
                "mesh, or the replicas over all ranks."
            )
        return cls(dist.group.WORLD if dist.is_initialized() else None, device)

    @property
    def members(self) -> list[int]:
        """Their global ranks."""
        return [0] if self.group is None else dist.get_process_group_ranks(self.group)

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.members)

    @property
    def rank(self) -> int:
        """This one's place among them."""
        return 0 if self.group is None else dist.get_rank(self.group)

    def recipient(self, recipient_rank: int | None) -> int | None:
        """Return the global rank of the one at this place, `None` for all; raise `ConfigError` if there is none."""
        if recipient_rank is None:
            return None
        if not isinstance(recipient_rank, int) or not 0 <= recipient_rank < self.size:
            raise ConfigError(
                f"recipient_rank must be None or one of the {self.size} ranks that share the model, counted from "
                f"0, got {recipient_rank!r}."
            )
        return self.members[recipient_rank]

    def exchange(self, value: T) -> list[T]:
        """Return every rank's value, in the order of the group; pickled, so for small ones."""
        if self.group is None or self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def compare(
        self,
        call: str,
        facts: Mapping[str, str],
        sharing: Mapping[str, Tensor] | None = None,
        kind: type[FxshardError] = ConfigError,
    ) -> list[list[str]]:
        """Compare `facts`, name -> text, among the ranks; return for each rank what it lacks, if any differ.

        `sharing` maps name -> the parameter whose ranks must have the same; all ranks must have the rest. `call` names
        the public function in the error of `kind`, which is raised on every rank.
        """
        digest = hashlib.sha256(repr(list(facts.items())).encode(errors="replace")).digest()
        if len(set(self.exchange(digest))) == 1:
            return []
        everyone = dict(zip(self.members, self.exchange(self._claims(facts, sharing or {})), strict=True))
        if differences := list(_differing_claims(everyone)):
            more = f" (and {len(differences) - _MOST} more)" if len(differences) > _MOST else ""
            raise kind(
                f"{call}: the ranks do not hold the same state. {'; '.join(differences[:_MOST])}{more}. Every rank "
                "must build the same model and optimizer, take the same steps and pass the same arguments."
            )
        return [_lacking(rank, everyone) for rank in everyone]

    def _claims(self, facts: Mapping[str, str], sharing: Mapping[str, Tensor]) -> dict[str, _Claim]:
        everyone = tuple(self.members)
        return {
            name: _Claim(text, ranks_of(sharing[name]), has_no_rows(sharing[name]))
            if name in sharing
            else _Claim(text, everyone, may_lack=False)
            for name, text in facts.items()
        }

    def together(self, work: Callable[[], T], call: str = "") -> T:
        """Do `work`, which has no collectives, on every rank; if it fails on some, raise on all what they found.

        With `call`, the public function, what is no `FxshardError` becomes a `ConfigError`, else a `CheckpointError`.
        """
        value, failure, cause = None, None, None
        try:
            value = work()
        except (Exception, CheckpointException) as error:
            failure, cause = _Failure.of(error, ConfigError if call else CheckpointError), error
        failures = self.exchange(failure)
        found: dict[_Failure, list[int]] = {}
        for rank, each in enumerate(failures):
            if each is not None:
                found.setdefault(each, []).append(rank)
        if not found:
            return cast(T, value)
        first, at = next(iter(found.items()))
        is_everywhere = len(at) == self.size
        text = first.text if is_everywhere else " ".join(f"{_named(at)}: {each.text}" for each, at in found.items())
        raise first.kind(f"{call}: {text}" if call else text) from cause


def _meshes(parameters: Iterable[Tensor]) -> Iterable[DeviceMesh]:
    return {id(p.device_mesh): p.device_mesh for p in parameters if isinstance(p, DTensor)}.values()


def _differing_claims(everyone: Mapping[int, Mapping[str, _Claim]]) -> Iterable[str]:
    names = dict.fromkeys(name for claims in everyone.values() for name in claims)
    for name in names:
        for sharing in dict.fromkeys(claims[name].ranks for claims in everyone.values() if name in claims):
            texts: dict[str, list[int]] = {}
            for rank in sharing:
                claim = everyone[rank].get(name) if rank in everyone else None
                if claim is None or not (claim.may_lack and claim.text == _NOTHING):
                    texts.setdefault(claim.text if claim is not None else _NOTHING, []).append(rank)
            if len(texts) > 1:
                sides = ", ".join(f"{text or 'nothing'} on {_named(ranks)}" for text, ranks in texts.items())
                yield f"{name}: {sides}"


def _lacking(rank: int, everyone: Mapping[int, Mapping[str, _Claim]]) -> list[str]:
    return [
        name
        for name, claim in everyone[rank].items()
        if claim.text == _NOTHING and any(everyone[other][name].text != _NOTHING for other in claim.ranks)
    ]


def _named(ranks: Sequence[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"


def ranks_of(parameter: Tensor) -> tuple[int, ...]:
    """Return the ranks that share a parameter, none for one that is not shared."""
    if not isinstance(parameter, DTensor):
        return ()
    return tuple(mesh_axes.ranks_of(parameter.device_mesh))


def is_sharded(tensor: DTensor) -> bool:
    """Return whether each rank of the last mesh axis has rows of it, and those of an axis before it the same.

    Or as many columns, along another dimension.
    """
    *outer, last = tensor.placements
    if type(last) is not Shard or (last.dim and tensor.shape[last.dim] % mesh_axes.num_shards(tensor.device_mesh)):
        return False
    return len(outer) <= 1 and all(type(p) is Replicate for p in outer)


def has_no_rows(parameter: Tensor) -> bool:
    """Return whether other ranks have all rows of a parameter."""
    return isinstance(parameter, DTensor) and is_sharded(parameter) and not local_of(parameter).numel()


def _is_slice(mesh: DeviceMesh, of: DeviceMesh) -> bool:
    """Return whether `mesh` is `of`, or this rank's slice of some of its axes."""
    names, axes, coordinate = mesh.mesh_dim_names, of.mesh_dim_names, of.get_coordinate()
    if set(mesh_axes.ranks_of(mesh)) == set(mesh_axes.ranks_of(of)) or coordinate is None:
        return True
    if names is None or axes is None:
        return False
    index = tuple(slice(None) if name in names else i for name, i in zip(axes, coordinate, strict=True))
    return mesh_axes.ranks_of(mesh) == of.mesh[index].flatten().tolist()


def require_one_set(model: nn.Module) -> None:
    """Refuse parameters on several sets of ranks: torch's index would hold the rows of one. Slices of a mesh may be."""
    found: dict[tuple[int, ...], str] = {}
    meshes: dict[tuple[int, ...], DeviceMesh] = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and (members := ranks_of(parameter)):
            found.setdefault(members, name)
            meshes.setdefault(members, parameter.device_mesh)
    widest = meshes[max(meshes, key=len)] if meshes else None
    if widest is not None and not all(_is_slice(mesh, widest) for mesh in meshes.values()):
        listed = ", ".join(f"{name} on {list(members)}" for members, name in found.items())
        raise ConfigError(
            f"a checkpoint holds one model on one set of ranks, but parameters are sharded over several: {listed}. "
            "Save the parts one by one, each on its own ranks and to a path of its own."
        )


def require_equal_slices(model: nn.Module, ranks: Ranks) -> None:
    """Raise on every rank if slices of a mesh have other values of a parameter: a checkpoint holds it once."""
    sharded = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}
    most = max((len(ranks_of(p)) for p in sharded.values()), default=0)
    own = {
        name: (p.device_mesh.get_coordinate(), checksum([local_of(p)]))
        for name, p in sharded.items()
        if len(ranks_of(p)) < most
    }
    everyone = ranks.exchange(own) if most else []
    found = [
        name
        for name in own
        if len({(str(place), value) for place, value in (each[name] for each in everyone)})
        > len({str(each[name][0]) for each in everyone})
    ]
    if found:
        raise ConfigError(
            f"a checkpoint holds one value of each parameter, but ranks have others of {', '.join(found)}. Make "
            "experts DTensors on the axis over which they are spread (distribute_tensor) before fully_shard, or save "
            "the parts one by one."
        )
