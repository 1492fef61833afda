"""What Inductor's scheduler has moved ahead of a launch: told by the graph's nodes of which its kernels are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx
from torch._inductor.scheduler import BaseSchedulerNode, ExternKernelSchedulerNode
from torch._inductor.virtualized import V

from fxshard.ir import collectives


def moved_ahead_of_launches(nodes: Sequence[BaseSchedulerNode], graph: fx.Graph) -> list[str]:
    """Say which generated kernels run before a launch though all of their nodes stand behind it in the graph.

    A kernel that was fused of an early and a late node runs where the early one stands, and rightly so; then what it
    reads may run there, too.
    """
    place = {node: i for i, node in enumerate(graph.nodes)}
    problems, since = list[str](), list[tuple[int, BaseSchedulerNode]]()
    for scheduled in nodes:
        places = [max(found) for part in scheduled.get_nodes() if (found := _places(part, place))]
        if not places:
            continue
        if not isinstance(scheduled, ExternKernelSchedulerNode):
            since.append((min(places), scheduled))
        elif getattr(scheduled.node, "op_overload", None) in collectives.LAUNCHES:
            needed: set[str] = set()
            for at, earlier in reversed(since):
                if at <= places[0] or not needed.isdisjoint(earlier.get_operation_names()):
                    needed |= set(earlier.ancestors)
                else:
                    late, launch = _name_at(graph, at), _name_at(graph, places[0])
                    problems.append(f"{late} stands behind {launch} in the graph, and runs before it")
    return problems


def _places(part: BaseSchedulerNode, place: dict[fx.Node, int]) -> list[int]:
    """Return where the nodes stand of which a kernel's part is made."""
    node: Any = part.node
    return [place[origin] for origin in (node.get_origins() if node is not None else ()) if origin in place]


def _name_at(graph: fx.Graph, place: int) -> str:
    return str(list(graph.nodes)[place].name)


class OrderCheck:
    """Looks at each schedule of Inductor's; given as its configuration `_post_fusion_custom_pass`."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.num_launches = 0

    def __call__(self, nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        """Look, and change nothing."""
        graph: Any = V.graph
        kernels = [node.node for node in nodes if isinstance(node, ExternKernelSchedulerNode)]
        self.num_launches += sum(getattr(kernel, "op_overload", None) in collectives.LAUNCHES for kernel in kernels)
        self.problems += moved_ahead_of_launches(nodes, graph.module.graph)
        return nodes
