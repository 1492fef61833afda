"""What `fxshard.whole_matrices` does with the parameters of an optimizer, as a table."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fxshard.runtime.matrix_owners import Matrix, MatrixTraffic, Team


@dataclass
class OwnerShare:
    """What one rank updates, of the matrices that this rank has a part of; bytes are of a step."""

    matrices: list[str] = field(default_factory=list)  # name and shape of each
    cost: int = 0  # of them in Newton-Schulz; only its ratio to others has a meaning
    bytes_in: int = 0  # gradients and rows that come to it from others
    bytes_back: int = 0  # updated rows that it sends to others
    received: int = 0  # all that this rank gets: `bytes_in`, and rows of others' matrices


@dataclass(frozen=True)
class MatrixExplanation:
    """Who updates which matrices, what that costs, and what travels in a step in which all have gradients."""

    title: str  # how many parameters are whole
    owners: dict[int, OwnerShare]  # by rank

    @classmethod
    def of(cls, title: str, by_team: Mapping[Team, Sequence[Matrix]]) -> MatrixExplanation:
        """Sum up what each rank owns; gradients count in the dtype of their parameters."""
        owners = {rank: OwnerShare() for rank in sorted({rank for team in by_team for rank in team.ranks})}
        for team, matrices in by_team.items():
            traffic = MatrixTraffic.of(team, matrices)
            for i, rank in enumerate(team.ranks):
                share = owners[rank]
                share.bytes_in += int(traffic.at_owners[i])
                share.bytes_back += int(traffic.from_owners[i])
                share.received += int(traffic.at_owners[i] + traffic.back[i])
        all_teams = itertools.chain.from_iterable(by_team.values())
        for matrix in sorted(all_teams, key=lambda matrix: (matrix.place, matrix.split.rows)):
            share = owners[matrix.team.ranks[matrix.owner]]
            share.matrices.append(f"{matrix.name} {list(matrix.seen_shape)}")
            share.cost += matrix.cost
        return cls(title, owners)

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        table = Table("rank", "cost/mean", "KiB in", "KiB back", "owns", title=self.title)
        mean = sum(share.cost for share in self.owners.values()) / max(len(self.owners), 1)
        for rank, share in self.owners.items():
            into, back, cost = share.bytes_in / 2**10, share.bytes_back / 2**10, share.cost / (mean or 1)
            table.add_row(str(rank), f"{cost:.2f}", f"{into:.1f}", f"{back:.1f}", "\n".join(share.matrices))
        console = Console(width=100)
        with console.capture() as captured:
            console.print(table)
        return captured.get()
