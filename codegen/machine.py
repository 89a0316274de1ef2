"""What each CUDA architecture has that code is generated for: limits, features and rates, in one place for all cost formulas."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class ProductRates:
    """Floating-point operations of a multiprocessor in a second, multiplying the best tiles.

    Attributes:
        tf32_three: float32 as three products of TF32.
        tf32: as one.
        halves: 16-bit numbers.
    """

    tf32_three: float
    tf32: float
    halves: float


@dataclass(frozen=True)
class Rates:
    """What a multiprocessor does in a second: measured on an H200, and taken for all architectures until another is.

    Attributes:
        lanes: threads of which it executes an instruction in a cycle.
        schedulers: warps of which it issues one.
        clock: cycles while memory decides.
        window_clock: cycles while threads reduce windows out of shared memory.
        product_clock: cycles while tensor cores multiply, which takes power.
        warp_products, group_products: of warps on their own (mma.sync), and of four together (wgmma): 1024 x 8192 x 8192 for
            float32, 4096 x 4096 x 4096 for the others.
        after_products: instructions of warps that it issues while it works on what follows sums.
        library_float32: floating-point operations of the library's float32 kernel: 1024 x 8192 x 8192 in 2.69 ms.
    """

    lanes: int = 128
    schedulers: int = 4
    clock: float = 1.8e9
    window_clock: float = 1.7e9
    product_clock: float = 1.5e9
    warp_products: ProductRates = ProductRates(tf32_three=58.7e12 / 132, tf32=155e12 / 132, halves=349e12 / 132)
    group_products: ProductRates = ProductRates(tf32_three=113e12 / 132, tf32=245e12 / 132, halves=663e12 / 132)
    after_products: float = 4.8e9
    library_float32: float = 51e12 / 132

    @property
    def issue(self) -> float:
        """Instructions of threads in a second."""
        return self.lanes * self.clock


@dataclass(frozen=True)
class Machine:
    """A CUDA architecture, with a device of it (tables of the CUDA C++ Programming Guide).

    Attributes:
        name: the device.
        multiprocessors: of the device.
        l2_bytes: its second-level cache.
        bandwidth: bytes per second of a copy: measured on the H200, else `COPY_SHARE` of the data sheet's.
        shared_bytes_per_block: most shared memory that a block may ask for.
        max_threads: resident on a multiprocessor.
        registers: of 32 bits, of a multiprocessor.
        copies: whether copies to shared memory go on while threads compute.
        tensor_cores: whether tensor cores multiply float32 as TF32, and 16-bit numbers.
        warp_groups: whether four warps multiply together, by instructions that read shared memory.
        rates: of a multiprocessor.
    """

    name: str
    multiprocessors: int
    l2_bytes: int
    bandwidth: float
    shared_bytes_per_block: int
    max_threads: int
    registers: int = 65536
    copies: bool = True
    tensor_cores: bool = True
    warp_groups: bool = False
    rates: Rates = Rates()


COPY_SHARE: Final = 0.87
"""Of the pin bandwidth reaches a copy kernel; measured on an H200: 4.27 of 4.92 TB/s."""

ARCHITECTURES: Final[Mapping[str, Machine]] = {
    "sm_80": Machine("NVIDIA A100", 108, 40 << 20, 1.35e12, 163 << 10, 2048),
    "sm_86": Machine("NVIDIA A40", 84, 6 << 20, 0.61e12, 99 << 10, 1536),
    "sm_89": Machine("NVIDIA L40S", 142, 96 << 20, 0.75e12, 99 << 10, 1536),
    "sm_90": Machine("NVIDIA H200", 132, 60 << 20, 4.27e12, 227 << 10, 2048, warp_groups=True),
    "sm_100": Machine("NVIDIA B200", 148, 126 << 20, 6.96e12, 227 << 10, 2048),
    "sm_120": Machine("NVIDIA GeForce RTX 5090", 170, 96 << 20, 1.56e12, 99 << 10, 1536),
}
"""Those that code is generated for, the oldest first."""

_OLDER = Machine("NVIDIA T4", 40, 4 << 20, 0.28e12, 64 << 10, 1024, copies=False, tensor_cores=False)


@functools.cache
def capability_of(arch: str) -> int:
    """The compute capability of an architecture such as ``"sm_90"``, times ten."""
    return int("".join(filter(str.isdigit, arch)))


@functools.cache
def machine_of(capability: int) -> Machine:
    """The newest known architecture that is no newer; what came before all of them has none of their features."""
    older = [machine for arch, machine in ARCHITECTURES.items() if capability_of(arch) <= capability]
    return older[-1] if older else _OLDER
