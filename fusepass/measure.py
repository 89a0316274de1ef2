"""Timing on the device at hand: made-up inputs, a clock, several calls run in turn."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from typing import Any

import torch

# Random numbers that are drawn for a tensor; larger ones repeat them. A prime, so that rows do not repeat.
MOST_WHOLE = 8  # the largest whole number that is made up
_BLOCK = 65521
_OVERHEAD = 10  # rounds may take that many times the seconds of what is timed
_CACHES = 2  # flushing writes that many times the second-level cache

Clock = Callable[[Callable[[], object]], float]


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


def clock(device: torch.device) -> Clock:
    """A function that gives the seconds of one call.

    On CUDA they are taken with events, after a write of twice the L2 cache: inputs come from memory, as they do in a
    model whose tensors exceed the cache, and the launches are queued meanwhile. On a CPU caches are left as they are, and
    where torch uses one thread the time is that thread's own, which neighbours on the machine do not add to.
    """
    if device.type != "cuda":
        return _own_seconds if torch.get_num_threads() == 1 else _cpu_seconds
    size = _CACHES * torch.cuda.get_device_properties(device).L2_cache_size
    flush: Any = torch.empty(size, dtype=torch.int8, device=device).zero_

    def seconds(call: Callable[[], object]) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        flush()
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    return seconds


def _cpu_seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _own_seconds(call: Callable[[], object]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


def in_turn(
    calls: Mapping[str, Callable[[], object]],
    clock: Clock,
    seconds: float,
    *,
    least: int,
    most: int,
    settled: Callable[[Mapping[str, Sequence[float]]], bool] = lambda samples: False,
) -> dict[str, list[float]]:
    """Seconds of each call, run one after another in rounds, each round in another order.

    What ran before leaves its mark: on an H200 a kernel takes up to a tenth longer behind operators that touch other memory.
    The orders are the same each time.
    The rounds end after `seconds` of the calls (or ten times that in all), or when the samples are `settled`; `least` to
    `most` rounds are run in any case.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    order, spent, end = list(calls), 0.0, time.perf_counter() + _OVERHEAD * seconds
    orders = random.Random(0)
    for done in range(most):
        if done >= least and (spent > seconds or time.perf_counter() > end or settled(samples)):
            break
        for name in order:
            samples[name].append(clock(calls[name]))
            spent += samples[name][-1]
        orders.shuffle(order)
    return samples


def typical(samples: Sequence[float]) -> float:
    """The lower quartile: neighbours on the machine only ever add to a time, and the least of many may be a freak."""
    return sorted(samples)[len(samples) // 4]


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes that the elements of `tensor` would take one by one."""
    return prod(tensor.shape) * tensor.element_size()
