"""What a schedule needs to know of a device: plain numbers, so that kernels are made without one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Protocol

from fusepass.codegen.machine import ARCHITECTURES, COPY_SHARE, Machine, capability_of, machine_of
from fusepass.codegen.source import Target

WARP = 32
"""Threads that go together."""

RESERVED = 1 << 10
"""Bytes of shared memory that a device takes of each block."""

_CPU_CORE_BANDWIDTH = 1.0e10
_CPU_L2_BYTES = 1 << 20


class CudaProperties(Protocol):
    """The part of `torch.cuda.get_device_properties` that is used here."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    max_threads_per_multi_processor: int
    regs_per_multiprocessor: int
    shared_memory_per_block_optin: int
    L2_cache_size: int
    memory_clock_rate: int
    memory_bus_width: int


@dataclass(frozen=True)
class DeviceFacts:
    """A device as schedules see it.

    Attributes:
        target: the language kernels for it are written in.
        name: as the vendor calls it.
        arch: ``"sm_90"`` and so on; of a CPU ``"native"`` for the one at hand, or a level such as ``"x86-64-v3"``.
        multiprocessors: streaming multiprocessors; the cores on a CPU.
        l2_bytes: second-level cache, of the whole device on CUDA and of one core on a CPU.
        shared_bytes_per_block: most shared memory one block may ask for; 0 on a CPU.
        registers: 32-bit registers of one multiprocessor; 0 on a CPU.
        max_threads: threads resident on one multiprocessor; 1 on a CPU.
        bandwidth: estimated bytes per second of a copy, reads and writes both counted.
        cores: CPU cores this process may use; 0 on CUDA.
    """

    target: Target
    name: str
    arch: str
    multiprocessors: int
    l2_bytes: int
    shared_bytes_per_block: int
    registers: int
    max_threads: int
    bandwidth: float
    cores: int

    @property
    def capability(self) -> int:
        """A CUDA device's compute capability times ten; 0 where there is none."""
        return capability_of(self.arch) if self.target is Target.CUDA else 0

    @property
    def machine(self) -> Machine:
        """What a CUDA device's architecture has."""
        return machine_of(self.capability)

    @property
    def copies(self) -> bool:
        """Whether copies to shared memory go on while threads compute."""
        return self.machine.copies

    @property
    def tensor_cores(self) -> bool:
        """Whether tensor cores multiply float32 as TF32, and 16-bit numbers."""
        return self.machine.tensor_cores

    @property
    def warp_groups(self) -> bool:
        """Whether four warps multiply together, by instructions that read shared memory."""
        return self.machine.warp_groups

    @classmethod
    def cpu(cls, cores: int | None = None, arch: str = "native") -> DeviceFacts:
        """A CPU with `cores` cores, by default those this process may use.

        Everything else is a fixed estimate, so that the same cores give the same code on every machine.
        """
        cores = len(os.sched_getaffinity(0)) if cores is None else cores
        return cls(
            target=Target.CPU,
            name="CPU",
            arch=arch,
            multiprocessors=cores,
            l2_bytes=_CPU_L2_BYTES,
            shared_bytes_per_block=0,
            registers=0,
            max_threads=1,
            bandwidth=cores * _CPU_CORE_BANDWIDTH,
            cores=cores,
        )

    @classmethod
    def h200(cls) -> DeviceFacts:
        """An NVIDIA H200, described: for compiling and testing where there is none."""
        return cls.described("sm_90")

    @classmethod
    def described(cls, arch: str) -> DeviceFacts:
        """The device of an architecture in `ARCHITECTURES`."""
        machine = ARCHITECTURES[arch]
        return cls(
            target=Target.CUDA,
            name=machine.name,
            arch=arch,
            multiprocessors=machine.multiprocessors,
            l2_bytes=machine.l2_bytes,
            shared_bytes_per_block=machine.shared_bytes_per_block,
            registers=machine.registers,
            max_threads=machine.max_threads,
            bandwidth=machine.bandwidth,
            cores=0,
        )

    @classmethod
    def cuda(cls, properties: CudaProperties) -> DeviceFacts:
        """A CUDA device by what its driver says of it.

        The bandwidth is the share of the memory's pin rate (two transfers in each clock) that a copy reaches.
        """
        pin_rate = 2 * properties.memory_clock_rate * 1e3 * properties.memory_bus_width / 8
        return cls(
            target=Target.CUDA,
            name=properties.name,
            arch=f"sm_{properties.major}{properties.minor}",
            multiprocessors=properties.multi_processor_count,
            l2_bytes=properties.L2_cache_size,
            shared_bytes_per_block=properties.shared_memory_per_block_optin,
            registers=properties.regs_per_multiprocessor,
            max_threads=properties.max_threads_per_multi_processor,
            bandwidth=COPY_SHARE * pin_rate,
            cores=0,
        )
