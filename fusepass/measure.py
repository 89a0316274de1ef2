"""Timing on the device at hand: made-up inputs, a clock, several calls run in turn."""

from __future__ import annotations

import os
import random
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

# Random numbers that are drawn for a tensor; larger ones repeat them. A prime, so that rows do not repeat.
MOST_WHOLE = 8  # the largest whole number that is made up
_BLOCK = 65521
_THREADS = Path("/proc/self/task")
_OVERHEAD = 10  # rounds may take that many times the seconds of what is timed
_CACHES = 2  # flushing writes that many times the second-level cache
_PATIENCE = 3  # times the seconds of what is timed that are spent on waiting for rounds that nothing interrupts
_HELD = 1.5  # times the seconds of its launches that a device is held up
_LONGEST = 2e-3  # seconds of launches that it is held up for: longer calls are long on the device as well, or hopeless
_CYCLES = 2e9  # of a device in a second, about
_LOST = 0.05  # of the seconds of what is timed, that its threads may wait for processors
_QUIET = 0.1  # seconds in which one interruption changes no time by more than a few percent; busy neighbours cause one in 3 ms


class Clock:
    """Gives the seconds of one call.

    Attributes:
        interruptions: how often, during all calls so far, threads of this process had to leave a processor to others; never where
            that adds nothing to the time.
    """

    interruptions = 0

    def __call__(self, call: Callable[[], object]) -> float:
        raise NotImplementedError

    def waited(self) -> float | None:
        """Seconds that threads of this process have waited for a processor that others had, so far; None where nothing tells."""
        return None


class Watch:
    """Tells of the calls that `clock` times from here on whether other work has changed their times."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._interruptions, self._waited = clock, clock.interruptions, clock.waited()

    def disturbed(self, seconds: float) -> bool:
        """Whether times of so many seconds in all may be wrong by more than a few percent."""
        waited = self._clock.waited()
        if waited is None or self._waited is None:
            return self._clock.interruptions - self._interruptions > seconds / _QUIET
        return waited - self._waited > _LOST * seconds


def made_up(like: Sequence[torch.Tensor], device: torch.device, *, signed: bool = False) -> list[torch.Tensor]:
    """Tensors of their own memory with the shapes, strides and types of `like`, which may be fake.

    Floating-point values lie between 0.25 and 1.25, where logarithms, roots and quotients are ordinary numbers; where they
    are `signed`, about half of them are negated, so that sums of many differ from each other. Whole numbers are from 1
    to `MOST_WHOLE`; truth values are mixed. The values are the same each time, and the random generators of torch are left alone.
    """
    generator = torch.Generator(device).manual_seed(0)
    return [_made_up(tensor, device, generator, signed=signed) for tensor in like]


def extent(tensor: torch.Tensor) -> int:
    """Elements of memory that `tensor` spans."""
    if 0 in tensor.shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _made_up(like: torch.Tensor, device: torch.device, generator: torch.Generator, *, signed: bool) -> torch.Tensor:
    count = extent(like)
    block = torch.rand(min(count, _BLOCK), generator=generator, device=device)
    if like.dtype is torch.bool:
        block = block < 0.5
    elif like.dtype.is_floating_point:
        block = (block + 0.25).to(like.dtype)
        if signed:
            block *= torch.randint(2, block.shape, generator=generator, device=device) * 2 - 1
    else:
        block = (block * MOST_WHOLE + 1).to(like.dtype)
    memory = torch.empty(-(-count // _BLOCK) * _BLOCK if count > _BLOCK else count, dtype=like.dtype, device=device)
    memory.view(-1, len(block) or 1).copy_(block)
    return memory.as_strided(like.shape, like.stride())


def free_bytes(device: torch.device) -> int:
    """Memory that could be had on `device`, about."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def as_compiled_code_runs(device: torch.device) -> Iterator[None]:
    """No gradients, no autocast, and `device` as the current one: how a specialisation calls its regions."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch._C._DisableAutocast())
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        yield


def clock(device: torch.device, *, launches: bool = True) -> Clock:
    """The clock for what runs on `device`.

    On CUDA times are taken with events, after a write of twice the L2 cache: inputs come from memory, as they do in a
    model whose tensors exceed the cache, and the launches are queued meanwhile. On a CPU caches are left as they are, and
    where torch uses one thread the time is that thread's own, which neighbours on the machine do not add to.

    Args:
        device: where it runs.
        launches: whether the device may be seen to wait for the host. If not, it is held up from a call's second run on until the host
            has launched the call, as it is where the host is ahead of it, and as good as where launches are replayed.
    """
    if device.type == "cuda":
        return _DeviceClock(device, launches=launches)
    return _ThreadClock() if torch.get_num_threads() == 1 else _WallClock()


class _ThreadClock(Clock):
    def __call__(self, call: Callable[[], object]) -> float:
        start = time.thread_time()
        call()
        return time.thread_time() - start


class _WallClock(Clock):
    def __call__(self, call: Callable[[], object]) -> float:
        before = _switches()
        start = time.perf_counter()
        call()
        seconds = time.perf_counter() - start
        self.interruptions += _switches() - before
        return seconds

    def waited(self) -> float | None:
        return _waited()


class _DeviceClock(Clock):
    """Interruptions count while the host launches and the device may wait for it: not where that is held up for longer than the launches took."""

    def __init__(self, device: torch.device, *, launches: bool) -> None:
        size = _CACHES * torch.cuda.get_device_properties(device).L2_cache_size
        self._flush: Any = torch.empty(size, dtype=torch.int8, device=device).zero_
        self._launches = launches
        self._host: dict[Callable[[], object], float] = {}  # the least seconds that launching each call took

    def __call__(self, call: Callable[[], object]) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before = _switches()
        self._flush()
        known = self._host.get(call)
        held = 0.0 if known is None or self._launches else _HELD * min(known, _LONGEST)
        if held:
            torch.cuda._sleep(int(held * _CYCLES))
        start.record()
        begun = time.perf_counter()
        call()
        launched = time.perf_counter() - begun
        end.record()
        self._host[call] = launched if known is None else min(known, launched)
        if launched > held:
            self.interruptions += _switches() - before
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def _switches() -> int:
    """Involuntary context switches of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _waited() -> float | None:
    """What the kernel counts of all threads; it says more than how often they had to wait, as some machines interrupt each of them a hundred times
    a second, for next to nothing."""
    try:
        return sum(int(each.read_text().split()[1]) for each in _THREADS.glob("*/schedstat")) / 1e9 or None
    except (OSError, ValueError, IndexError):  # no such file here, or a thread that has ended
        return None


@dataclass(frozen=True)
class Rounds:
    """Seconds of several calls, round by round.

    Attributes:
        samples: by name.
        disturbed: how many of the rounds were interrupted; 0 where enough were not, as the others are left out then.
    """

    samples: dict[str, list[float]]
    disturbed: int = 0


def in_turn(
    calls: Mapping[str, Callable[[], object]],
    clock: Clock,
    seconds: float,
    *,
    least: int,
    most: int,
    settled: Callable[[Mapping[str, Sequence[float]]], bool] = lambda samples: False,
) -> Rounds:
    """Seconds of each call, run one after another in rounds, each round in another order.

    What ran before leaves its mark: on an H200 a kernel takes up to a tenth longer behind operators that touch other memory.
    The orders are the same each time.
    The rounds end after `seconds` of the calls (or ten times that in all), or when the samples are `settled`; `least` to
    `most` rounds are run in any case. Rounds that are interrupted are repeated for up to three times `seconds`.
    """
    kept: list[dict[str, float]] = []
    interrupted: list[dict[str, float]] = []
    order, spent, end = list(calls), 0.0, time.perf_counter() + _OVERHEAD * seconds
    orders = random.Random(0)
    while len(kept) < most:
        over = spent > seconds or time.perf_counter() > end
        if len(kept) >= least and (over or settled(_by_name(calls, kept))):
            break
        if len(kept) + len(interrupted) >= least and (spent > _PATIENCE * seconds or time.perf_counter() > end):
            break
        watch = Watch(clock)
        taken = {name: clock(calls[name]) for name in order}
        (interrupted if watch.disturbed(sum(taken.values())) else kept).append(taken)
        spent += sum(taken.values())
        orders.shuffle(order)
    if len(kept) >= least:
        return Rounds(_by_name(calls, kept))
    return Rounds(_by_name(calls, kept + interrupted), len(interrupted))


def _by_name(names: Iterable[str], rounds: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    return {name: [taken[name] for taken in rounds] for name in names}


def typical(samples: Sequence[float]) -> float:
    """The lower quartile: neighbours on the machine only ever add to a time, and the least of many may be a freak."""
    return sorted(samples)[len(samples) // 4]


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes that the elements of `tensor` would take one by one."""
    return prod(tensor.shape) * tensor.element_size()
