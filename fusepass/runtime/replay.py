"""A whole specialisation captured in a CUDA graph and replayed: one launch in place of many.

The first call runs as it would without a graph, which warms up libraries and allocator; the second one is captured.
Parameters and buffers are read and written where they lie, so their addresses are compared at each call, and a change
captures anew. Inputs are copied into memory of the graph, results out of it: what a caller holds is never overwritten.
All graphs of one stream share their memory. That is safe because nothing of it is read after the next replay, and a lock
keeps copies and replays of one stream together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx

from fusepass.errors import warn
from fusepass.patterns.effects import is_random

Tensors = tuple[torch.Tensor, ...]

_MOST_STREAMS = 4
_MOST_CAPTURES = 8


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
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on allocating: that disturbs a capture in the default mode.
        with (
            torch.cuda.device(self._device),
            torch.cuda.graph(graph, pool=pool.handle, capture_error_mode="thread_local"),
        ):
            results = tuple(run())
        return graph.replay, results


@dataclass(frozen=True)
class _Captured:
    """One capture: for states at these addresses, with inputs and results of its own."""

    addresses: tuple[int, ...]
    inputs: Tensors
    results: Tensors
    replay: Callable[[], None]
    pool: Pool


class Replay:
    """Calls `call` through a captured graph where it can, and plainly where it cannot.

    Args:
        call: takes states, then inputs; gives a tuple of tensors.
        states: how many of its arguments are the model's own tensors.
        written: positions of the arguments that it writes.
        graphs: the device's.
        name: what warnings call the model.
    """

    def __init__(
        self,
        call: Callable[..., Tensors],
        states: int,
        written: frozenset[int],
        graphs: Graphs,
        name: str,
    ) -> None:
        self._call = call
        self._states = states
        self._written = tuple(sorted(position - states for position in written if position >= states))
        self._graphs = graphs
        self._name = name
        self._lock = threading.Lock()
        self._captured: dict[int, _Captured | None] = {}  # by stream; None after the first call on it
        self._captures = 0
        self._reason: str | None = None

    def __call__(self, *arguments: torch.Tensor) -> Tensors:
        if self._reason is not None or self._graphs.capturing():
            return self._call(*arguments)
        stream = self._graphs.stream()
        captured = self._captured.get(stream)
        addresses = tuple([state.data_ptr() for state in arguments[: self._states]])
        if captured is None or captured.addresses != addresses:
            with self._lock:
                captured = self._prepared(stream, addresses, arguments)
        if captured is None:
            return self._call(*arguments)
        return self._replayed(captured, arguments[self._states :])

    @property
    def status(self) -> str:
        """What became of it, in words."""
        if self._reason is not None:
            return f"not used: {self._reason}"
        if not self._captures:
            return "captured at the second call"
        return f"replayed, {self._captures} captured"

    def _prepared(self, stream: int, addresses: tuple[int, ...], arguments: Tensors) -> _Captured | None:
        """The capture for a call on `stream`, made if need be; None for the first call on it, and where there is none."""
        captured = self._captured.get(stream)
        if captured is not None and captured.addresses == addresses:
            return captured
        if stream not in self._captured:
            if len(self._captured) >= _MOST_STREAMS:
                return None
            self._captured[stream] = None
            return None
        if self._captures >= _MOST_CAPTURES:
            self._give_up(f"the model's tensors changed their addresses {_MOST_CAPTURES} times")
            return None
        try:
            captured = self._captured[stream] = self._capture(addresses, arguments)
        except RuntimeError as error:
            self._give_up(next(iter(str(error).splitlines()), type(error).__name__))
            return None
        return captured

    def _give_up(self, reason: str) -> None:
        self._reason = reason
        self._captured.clear()
        warn(f"{self._name} runs without a CUDA graph: {reason}")

    def _capture(self, addresses: tuple[int, ...], arguments: Tensors) -> _Captured:
        states, given = arguments[: self._states], arguments[self._states :]
        with torch.inference_mode(False):  # copied into later, in whatever mode
            inputs = tuple(
                torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t) for t in given
            )
        pool = self._graphs.pool()
        with pool.lock:
            replay, results = self._graphs.capture(lambda: self._call(*states, *inputs), pool)
        unfit = _unfit((*states, *inputs), results)
        if unfit is not None:
            raise RuntimeError(unfit)
        self._captures += 1
        return _Captured(addresses, inputs, results, replay, pool)

    def _replayed(self, captured: _Captured, given: Tensors) -> Tensors:
        with captured.pool.lock:
            for inner, outer in zip(captured.inputs, given, strict=True):
                inner.copy_(outer)
            captured.replay()
            for position in self._written:
                given[position].copy_(captured.inputs[position])
            return tuple([_copy(result) for result in captured.results])


def obstacle(graph: fx.Graph, arguments: Sequence[torch.Tensor]) -> str | None:
    """Why a graph over these arguments is not captured at all; None where it may be."""
    values = [node.meta.get("val") for node in graph.nodes if node.op == "call_function" and not _is_constant(node)]
    devices = {tensor.device for tensor in (*arguments, *values) if isinstance(tensor, torch.Tensor)}
    if not any(device.type == "cuda" for device in devices):
        return "everything lies on the CPU"
    if len(devices) > 1:
        return "tensors lie on several devices"
    for node in graph.nodes:
        tags = getattr(node.target, "tags", ())
        if is_random(node.target):
            return f"{node.target.overloadpacket} draws random numbers"
        if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
            return f"{node.target.overloadpacket} waits for the device"
    if any(map(_overlaps, arguments)):
        return "an input or a tensor of the model overlaps itself"
    return None


def _is_constant(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.lift_fresh_copy.default


def _overlaps(tensor: torch.Tensor) -> bool:
    return bool(torch._debug_has_internal_overlap(tensor) == 1)  # 2 stands for "not known", which copies bear


def _unfit(arguments: Tensors, results: Tensors) -> str | None:
    """Why copies of the results would not do: memory that they share with arguments, each other, or themselves."""
    seen = {argument.untyped_storage().data_ptr() for argument in arguments if argument.numel()}
    for result in results:
        place = result.untyped_storage().data_ptr()
        if result.numel() and place in seen:
            return "a result shares memory with an input, a parameter or another result"
        if _overlaps(result):
            return "a result overlaps itself"
        seen.add(place)
    return None


def _copy(result: torch.Tensor) -> torch.Tensor:
    copied = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=result.device)
    return copied.copy_(result)
