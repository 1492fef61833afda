"""What to say where graphs were captured for one kind of device, and their costs are estimates for another.

[Note: the device of the capture]
Torch chooses some kernels by the device of the tensors: on a CPU attention becomes one for CPUs or, with dropout, the
products and the softmax that it is made of. `explain` captures for where the model is; one on meta, for this machine's
accelerator. Where there is none that is the CPU: torch without CUDA cannot tell which attention CUDA would choose.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import fx

from fxshard.hardware import HardwareSpec, describes

_CHOSEN_BY_DEVICE = re.compile(r"\b_scaled_dot_product_|cudnn|mkldnn|_for_cpu")


def kernels(graph: fx.Graph) -> list[str]:
    """The ops of a graph that are kernels of its device, each once: `aten._scaled_dot_product_flash_attention`."""
    ops = (str(getattr(node.target, "overloadpacket", "")) for node in graph.nodes)
    return list(dict.fromkeys(op for op in ops if _CHOSEN_BY_DEVICE.search(op)))


def remark(device: str, hardware: HardwareSpec, graphs: Iterable[fx.Graph]) -> str:
    """That graphs were captured for another device than their costs are for; nothing if they were not."""
    if describes(hardware, device):
        return ""
    named = ", ".join(dict.fromkeys(op for graph in graphs for op in kernels(graph)))
    return f"captured for {device}: {hardware.name} may run other kernels{named and f' than {named}'}"
