"""The GPUs that code is compiled for: what Inductor and Triton ask about one."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace


@dataclass(frozen=True, kw_only=True)
class Gpu:
    name: str
    major: int
    minor: int
    num_sms: int
    memory_gib: int
    l2_mib: int
    shared_memory: int  # bytes that a block may opt in to

    @property
    def architecture(self) -> str:
        return f"sm_{self.major}{self.minor}"

    @property
    def properties(self) -> SimpleNamespace:
        return SimpleNamespace(
            name=self.name,
            major=self.major,
            minor=self.minor,
            multi_processor_count=self.num_sms,
            total_memory=self.memory_gib << 30,
            L2_cache_size=self.l2_mib << 20,
            shared_memory_per_block=49152,
            shared_memory_per_block_optin=self.shared_memory,
            regs_per_multiprocessor=65536,
            max_threads_per_multi_processor=2048,
            max_threads_per_block=1024,
            warp_size=32,
            gcnArchName="",
            is_integrated=0,
            uuid="0",
        )


A100 = Gpu(name="A100", major=8, minor=0, num_sms=108, memory_gib=80, l2_mib=40, shared_memory=166912)
H100 = Gpu(name="H100", major=9, minor=0, num_sms=132, memory_gib=80, l2_mib=50, shared_memory=232448)
B200 = Gpu(name="B200", major=10, minor=0, num_sms=148, memory_gib=180, l2_mib=126, shared_memory=232448)


@dataclass
class Present:
    """The GPU that the patches pretend is here."""

    gpu: Gpu = field(default=H100)


PRESENT = Present()
