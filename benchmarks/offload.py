"""Step time against bytes kept on the device: `python -m benchmarks.offload small 1.075 0.5`.

Rank 0 of 8 on an emulated link of so many GB/s and 30 us, with an emulated link to the host of so many GB/s in each
direction. Copies of a model whose units are offloaded to 0, 50 and 100 % take steps in turn; prints of each where its
bytes are, what a step takes, and what the cost model says of both. Its numbers are those that the ranks have measured,
with the bandwidth to the host that was asked.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh

import fxshard
from benchmarks import models
from fxshard.compile.one_line.units import offloaded_of
from fxshard.cost import measured
from fxshard.options import Options
from fxshard.runtime import mesh_axes
from fxshard.sharding.sharded_module import units_under
from fxshard.testing import emulated_host, emulated_link
from fxshard.tools.bench.task import units_of

ROUNDS, WARM_UP = 24, 4
PARTS = (0.0, 0.5, 1.0)


class Trained:
    """A model of which a part is offloaded, and its steps."""

    def __init__(self, name: str, part: float, mesh: DeviceMesh, hardware: Path) -> None:
        torch.manual_seed(0)
        built: Any = getattr(models, name)()
        self.model, self.batch, self.loss = built
        modules = units_of(self.model)
        chosen = offloaded_of(modules, Options(offload={"params": part}))
        for module in modules:
            policy = fxshard.CPUOffloadPolicy() if module in chosen else fxshard.OffloadPolicy()
            fxshard.fully_shard(module, mesh=mesh, offload_policy=policy)
        if not hardware.exists():
            spec = measured.numbers_for([*mesh_axes.groups(mesh)], torch.device("cpu"))
            hardware.write_text(dataclasses.replace(spec, host_bandwidth=float(sys.argv[3]) * 1e9).to_json())
        options = {"hardware": str(hardware)}
        self.call = cast(Any, torch.compile)(self.model, backend="fxshard", options=options)
        self.optim: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def step(self) -> None:
        """Train one step."""
        begin = time.perf_counter()
        loss = self.loss(self.call(self.batch), self.batch)
        loss.backward()
        self.seconds.append(time.perf_counter() - begin)
        self.optim.step()
        self.optim.zero_grad()
        self.losses.append(float(loss.detach()))

    def bytes_on_host(self) -> int:
        """Of the shards that an optimizer steps on the host."""
        units = [unit for unit in units_under(self.model) if unit.settings.offload is not None]
        return sum(shard.flat.untyped_storage().nbytes() for unit in units for shard in unit.shards)

    def bytes_of_state(self) -> int:
        """Of the optimizer's state of these."""
        on_host = {id(m.parameter) for unit in units_under(self.model) if unit.settings.offload for m in unit.members}
        states = [state for parameter, state in self.optim.state.items() if id(parameter) in on_host]
        return sum(
            value.to_local().nbytes for state in states for value in state.values() if hasattr(value, "to_local")
        )

    def told(self, plain: Trained) -> dict[str, Any]:
        """What was measured, and what `explain` says."""
        said = fxshard.explanation_of(self.call)
        running = [frame.schedules(stage)[0] for frame in said.frames for stage in frame.scheduled]
        pairs = list(zip(self.seconds, plain.seconds, strict=True))[WARM_UP:]
        return {
            "step_ms": 1e3 * statistics.median(a for a, _ in pairs),
            "ratio": statistics.median(a / b for a, b in pairs),
            "explained_ms": 1e3 * sum(schedule.seconds for schedule in running),
            "explained_exposed_ms": 1e3 * sum(schedule.exposed_seconds for schedule in running),
            "host_mb": self.bytes_on_host() / 1e6,
            "explained_host_mb": said.host_bytes / 1e6,
            "explained_device_mb": said.device_bytes / 1e6,
            "host_state_mb": self.bytes_of_state() / 1e6,
            "offloaded": said.offloaded,
            "losses_equal": self.losses == plain.losses,
        }


def main(name: str, link_gb_per_s: float, host_gb_per_s: float) -> None:
    """Measure, and print JSON."""
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory() as folder,
        emulated_link(8, gigabytes_per_s=link_gb_per_s, latency_us=30) as link,
        emulated_host(gigabytes_per_s=host_gb_per_s, latency_us=10),
    ):
        all_of_them = [Trained(name, part, link.mesh, Path(folder) / "hardware.json") for part in PARTS]
        for _ in range(ROUNDS):
            for each in all_of_them:
                each.step()
        told = {f"{part:.0%}": each.told(all_of_them[0]) for part, each in zip(PARTS, all_of_them, strict=True)}
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]))
