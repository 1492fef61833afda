"""What `fxshard.whole_matrices` does with the parameters of an optimizer, as a table."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist

from fxshard.runtime.matrix_owners import Matrix


@dataclass
class OwnerShare:
    """What one rank updates, of the matrices that this rank has a part of."""

    matrices: list[str] = field(default_factory=list)  # name and shape of each
    cost: int = 0  # of them in Newton-Schulz; only its ratio to others has a meaning
    bytes_back: int = 0  # per step: rows that go back to other ranks; twice as much comes, with gradients


@dataclass(frozen=True)
class MatrixExplanation:
    """Who updates which matrices, what that costs, and what travels in a step in which all have gradients."""

    title: str  # how many parameters are whole
    owners: dict[int, OwnerShare]  # by rank

    @classmethod
    def of(cls, title: str, matrices: list[Matrix]) -> MatrixExplanation:
        """Sum up what each rank owns; gradients count in the dtype of their parameters."""
        groups = {matrix.team.group: dist.get_process_group_ranks(matrix.team.group) for matrix in matrices}
        owners = {rank: OwnerShare() for rank in sorted({rank for ranks in groups.values() for rank in ranks})}
        for matrix in sorted(matrices, key=lambda matrix: (matrix.place, matrix.split.rows)):
            share = owners[groups[matrix.team.group][matrix.owner]]
            share.matrices.append(f"{matrix.name} {list(matrix.seen_shape)}")
            share.cost += matrix.cost
            share.bytes_back += matrix.nbytes - matrix.nbytes_of(matrix.owner)
        return cls(title, owners)

    def __str__(self) -> str:
        """One line per rank."""
        from rich.console import Console
        from rich.table import Table

        table = Table("rank", "cost/mean", "KiB in", "KiB back", "owns", title=self.title)
        mean = sum(share.cost for share in self.owners.values()) / max(len(self.owners), 1)
        for rank, share in self.owners.items():
            back, cost = share.bytes_back / 2**10, share.cost / (mean or 1)
            table.add_row(str(rank), f"{cost:.2f}", f"{2 * back:.1f}", f"{back:.1f}", "\n".join(share.matrices))
        console = Console(width=100)
        with console.capture() as captured:
            console.print(table)
        return captured.get()
