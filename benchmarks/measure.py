"""Timing that can be trusted: interleaved runs, fresh inputs, a cold L2 cache; kernel counts, host time."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

WARM_UPS = 3


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call over `runs` runs: the median, and the 10th and 90th percentile."""

    median: float
    low: float
    high: float
    runs: int

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        """The summary of at least one sample."""
        ordered = sorted(samples)
        tenth = len(ordered) // 10
        return cls(statistics.median(ordered), ordered[tenth], ordered[-1 - tenth], len(ordered))


def interleaved(
    calls: Mapping[str, Callable[[], object]],
    refresh: Callable[[], object],
    device: torch.device,
    seconds: float,
) -> dict[str, Timing]:
    """Times all calls, round after round, until `seconds` are over; between 5 and 100 rounds.

    `refresh` draws new inputs before each round. Interleaving lets clocks and heat touch all calls alike; each round has an order
    of its own, as what ran before, torch.compile most of all, leaves the processor's caches to the next.
    """
    clock = _cuda_ms if device.type == "cuda" else _cpu_ms
    flush = flusher(device)
    for call in calls.values():
        for _ in range(WARM_UPS):
            call()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    order = random.Random(0)
    end = time.perf_counter() + seconds
    for done in range(100):
        if done >= 5 and time.perf_counter() > end:
            break
        refresh()
        for name, call in order.sample(list(calls.items()), len(calls)):
            flush()
            samples[name].append(clock(call))
    return {name: Timing.of(values) for name, values in samples.items()}


def kernel_count(call: Callable[[], object], device: torch.device) -> int | None:
    """Kernels that one call launches, copies and fills by the driver not counted; None on a CPU."""
    if device.type != "cuda":
        return None
    for _ in range(2):  # the first profile of a process can miss kernels
        with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize(device)
    return sum(
        event.device_type == DeviceType.CUDA
        and not event.is_user_annotation
        and not event.name.startswith(("Memcpy", "Memset"))
        for event in profile.events()
    )


def host_us(call: Callable[[], object], device: torch.device, calls: int = 200) -> float:
    """Median microseconds until a call returns; on CUDA without waiting for the device.

    That is the time of Python and the launches only where the kernels are tiny: a full queue blocks.
    """
    samples = []
    for index in range(calls):
        if index % 20 == 0:
            _synchronize(device)
        start = time.perf_counter_ns()
        call()
        samples.append((time.perf_counter_ns() - start) / 1e3)
    _synchronize(device)
    return statistics.median(samples)


def poison(device: torch.device, nbytes: int) -> None:
    """Fills what the allocator hands out next with NaN, so that an unwritten output cannot look right."""
    # The small ones first: glibc gives back to the system what is freed at the end of its heap.
    sizes = sorted([nbytes, *(size for size in (1 << 22, 1 << 18, 1 << 12, 1 << 9) for _ in range(4))])
    blocks = [torch.full((max(size, 4) // 4,), float("nan"), device=device) for size in sizes]
    _synchronize(device)
    del blocks


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def flusher(device: torch.device) -> Callable[[], object]:
    """Writes a buffer of twice the L2 cache; does nothing on a CPU."""
    if device.type != "cuda":
        return lambda: None
    size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
    buffer = torch.empty(size, dtype=torch.int8, device=device)
    return buffer.zero_


def _cuda_ms(call: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def _cpu_ms(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)
