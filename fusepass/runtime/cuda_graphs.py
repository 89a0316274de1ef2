"""What a CUDA device offers for capturing and replaying graphs, the memory that these have, and the settings that one was captured under."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar
from weakref import WeakValueDictionary

import torch

from fusepass.garbage import collector_paused
from fusepass.runtime.replay_trial import Pending, Taken

Tensors = tuple[torch.Tensor, ...]
Result = TypeVar("Result")

_MODE = "thread_local"
"""Other threads may go on allocating: that disturbs a capture in the default mode."""


class Graphs(Protocol):
    """What a device offers for capturing and replaying."""

    def capturing(self) -> bool:
        """Whether the current stream is being captured by somebody."""

    def stream(self) -> int:
        """What identifies the current stream."""

    def capture(
        self, run: Callable[[], Tensors], pool: Pool, generators: Sequence[Any] = ()
    ) -> tuple[Callable[[], None], Tensors]:
        """Record `run`, which draws from these generators and the default one, without executing it: a function that executes it, and the
        results that it writes each time."""

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


@dataclass(eq=False)
class Pool:
    """Memory that graphs share.

    Attributes:
        handle: what PyTorch's allocator knows it by.
        keeper: a graph of it: the allocator gives the memory up with the last one, and then refuses the handle.
        lock: held from copying inputs to copying results.
    """

    handle: Any
    keeper: object = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class CudaGraphs:
    """`Graphs` of a CUDA device."""

    _pools: ClassVar[WeakValueDictionary[tuple[int, int], Pool]] = WeakValueDictionary()
    """By device and stream, for the whole process, while graphs have them."""
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
            pool = self._pools.get(key)
            if pool is None:
                pool = self._pools[key] = self.own_pool()
            return pool

    def own_pool(self) -> Pool:
        handle = torch.cuda.graph_pool_handle()
        with torch.cuda.device(self._device), collector_paused(), torch.cuda.stream(torch.cuda.Stream()):
            return Pool(handle, _capture_little(handle))

    def capture(
        self, run: Callable[[], Tensors], pool: Pool, generators: Sequence[Any] = ()
    ) -> tuple[Callable[[], None], Tensors]:
        # As `torch.cuda.graph`, which also waits for the device and empties the allocator, in the middle of a user's calls.
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        with torch.cuda.device(self._device), collector_paused():  # a graph that is freed would end the capture
            around = torch.cuda.Stream()
            around.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(around):
                # Workspaces of cuBLAS stay, by stream, whatever becomes of the pool that they were taken from: so none is older or younger than the graph.
                torch._C._cuda_clearCublasWorkspaces()
                try:
                    graph.capture_begin(pool=pool.handle, capture_error_mode=_MODE)
                    results = tuple(run())
                    graph.capture_end()
                except BaseException:
                    _abandon(graph, pool)
                    raise
                finally:
                    torch._C._cuda_clearCublasWorkspaces()
        return graph.replay, results

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


def _abandon(graph: torch.cuda.CUDAGraph, pool: Pool) -> None:
    """Leave the stream, the allocator and the random numbers as if `graph` had never been begun."""
    with suppress(RuntimeError):
        graph.capture_end()
        return
    with suppress(RuntimeError):  # it may have ended for the allocator
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool.handle)
    _capture_little()  # or PyTorch's generator takes itself for captured from now on, and refuses to draw


def _capture_little(pool: Any = None) -> torch.cuda.CUDAGraph:
    """A graph that needs no memory of `pool`, captured on the current stream."""
    number = torch.zeros((), device="cuda")
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode=_MODE)
    number.zero_()  # PyTorch warns of graphs without kernels
    graph.capture_end()
    return graph


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
