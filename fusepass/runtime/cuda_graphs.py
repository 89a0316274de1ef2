"""What a CUDA device offers for capturing and replaying graphs, the memory that these have, and the settings that one was captured under."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from fusepass.garbage import collector_paused
from fusepass.runtime.replay_trial import Pending, Taken

Tensors = tuple[torch.Tensor, ...]
Result = TypeVar("Result")


class Graphs(Protocol):
    """What a device offers for capturing and replaying."""

    def capturing(self) -> bool:
        """Whether the current stream is being captured by somebody."""

    def stream(self) -> int:
        """What identifies the current stream."""

    def capture(self, run: Callable[[], Tensors], pool: Pool) -> tuple[Callable[[], None], Tensors]:
        """Record `run` without executing it: a function that executes it, and the results that it writes each time."""

    def pool(self) -> Pool:
        """The memory of the current stream's graphs."""

    def own_pool(self) -> Pool:
        """Memory for graphs whose results are read after other graphs' replays."""

    def room(self) -> int:
        """Bytes of the device that are free, or that PyTorch keeps for later."""

    def make_room(self, nbytes: int) -> None:
        """Give back what PyTorch keeps for later, unless so much is free: nothing is given back while a graph is captured."""

    def reserved(self) -> int:
        """Bytes that PyTorch has of the device."""

    def timed(self, run: Callable[[], Result]) -> tuple[Result, Pending]:
        """What `run` gives, and what it took."""


@dataclass
class Pool:
    """Memory that the graphs of one stream share; `lock` is held from copying inputs to copying results."""

    handle: Any
    lock: threading.Lock = field(default_factory=threading.Lock)


class CudaGraphs:
    """`Graphs` of a CUDA device."""

    _pools: dict[tuple[int, int], Pool] = {}  # noqa: RUF012 - by device and stream, for the whole process
    _lock = threading.Lock()

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def stream(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def pool(self) -> Pool:
        key = torch.cuda.current_device() if self._device.index is None else self._device.index, self.stream()
        with self._lock:
            if key not in self._pools:
                self._pools[key] = Pool(torch.cuda.graph_pool_handle())
            return self._pools[key]

    def capture(self, run: Callable[[], Tensors], pool: Pool) -> tuple[Callable[[], None], Tensors]:
        # As `torch.cuda.graph`, which also waits for the device and empties the allocator, in the middle of a user's calls.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device), collector_paused():  # a graph that is freed would end the capture
            around = torch.cuda.Stream()
            around.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(around):
                # Workspaces of cuBLAS stay, by stream, whatever becomes of the pool that they were taken from: so none is older or younger than the graph.
                torch._C._cuda_clearCublasWorkspaces()
                # Other threads may go on allocating: that disturbs a capture in the default mode.
                graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
                try:
                    results = tuple(run())
                finally:
                    _end(graph, pool)
                    torch._C._cuda_clearCublasWorkspaces()
        return graph.replay, results

    def own_pool(self) -> Pool:
        return Pool(torch.cuda.graph_pool_handle())

    def room(self) -> int:
        kept = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return int(torch.cuda.mem_get_info(self._device)[0]) + kept

    def make_room(self, nbytes: int) -> None:
        if torch.cuda.mem_get_info(self._device)[0] < nbytes:
            torch.cuda.empty_cache()

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def timed(self, run: Callable[[], Result]) -> tuple[Result, Pending]:
        with torch.cuda.device(self._device):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            start = time.perf_counter()
            results = run()
            host = time.perf_counter() - start
            end.record()
        return results, lambda: Taken(host, begin.elapsed_time(end) * 1e-3) if end.query() else None


def _end(graph: torch.cuda.CUDAGraph, pool: Pool) -> None:
    """End a capture; one that failed leaves the allocator and the random numbers as if there had been none."""
    try:
        graph.capture_end()
    except RuntimeError:
        with suppress(RuntimeError):  # it may have ended for the allocator
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool.handle)
        _capture_something()
        raise


def _capture_something() -> None:
    """Capture something that succeeds: behind a failed capture PyTorch's generator takes itself for captured still, and refuses to draw."""
    number = torch.zeros((), device="cuda")
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    number.zero_()
    graph.capture_end()


def settings() -> tuple[object, ...]:
    """What PyTorch's operators choose their kernels by, and a replay would not see."""
    c = torch._C
    return (
        c._get_fp32_precision_getter("cuda", "matmul"),
        c._get_fp32_precision_getter("cuda", "conv"),
        c._get_cublas_allow_fp16_reduced_precision_reduction(),
        c._get_cublas_allow_bf16_reduced_precision_reduction(),
        c._get_cudnn_enabled(),
        c._get_cudnn_deterministic(),
        c._get_deterministic_algorithms(),
    )
