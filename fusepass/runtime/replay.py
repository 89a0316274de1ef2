"""A whole specialisation captured in a CUDA graph and replayed: one launch in place of many.

The first call runs as it would without a graph, which warms up libraries and allocator; the second one is captured, or, where
nobody asked for it, one of the next, if that pays (`replay_trial`). Parameters and buffers are read and written where they lie,
so their addresses are compared at each call, and a change captures anew; so does one of the settings by which PyTorch chooses
kernels. Inputs are copied into memory of the graph, results out of it: what a caller holds is never overwritten. An input that
is written, and lies where it did in the call before, such as a cache, is not copied but treated as a parameter.
All graphs of one stream share their memory. That is safe because nothing of it is read after the next replay, and a lock
keeps copies and replays of one stream together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fusepass.errors import warn
from fusepass.runtime.cuda_graphs import Graphs, Pool, Tensors, settings
from fusepass.runtime.replay_trial import ReplayTrial
from fusepass.runtime.replayable import overlaps

_MOST_STREAMS = 4
_MOST_CAPTURES = 8


@dataclass(frozen=True)
class _Captured:
    """One capture, with inputs and results of its own.

    Attributes:
        key: what it is for: addresses of states and of fixed inputs, and settings.
        fixed: positions of inputs that are read and written where they lie.
        inputs: memory for them; None for fixed ones.
    """

    key: object
    fixed: tuple[int, ...]
    inputs: tuple[torch.Tensor | None, ...]
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
        trial: finds out whether replaying pays; None where it was asked for.
        launch: as `call`, for the trial: how calls are served if they are not replayed.
    """

    def __init__(
        self,
        call: Callable[..., Tensors],
        states: int,
        written: frozenset[int],
        graphs: Graphs,
        name: str,
        trial: ReplayTrial | None = None,
        launch: Callable[..., Tensors] | None = None,
    ) -> None:
        self._call = call
        self._launch = launch or call
        self._states = states
        self._written = tuple(sorted(written))
        self._graphs = graphs
        self._name = name
        self._trial = trial
        self._asked = trial is None
        self._lock = threading.Lock()
        self._captured: dict[int, _Captured | None] = {}  # by stream; None after the first call on it
        self._captures = 0
        self._lay: dict[int, int] = {}  # where written inputs lay in the last call without a capture
        self._reason: str | None = None

    def __call__(self, *arguments: torch.Tensor) -> Tensors:
        if self._reason is not None or self._graphs.capturing():
            return self._call(*arguments)
        if self._trial is not None:
            return self._tried(self._trial, arguments)
        return self._replayed(arguments)

    @property
    def settled(self) -> bool:
        """Whether it is known that calls are replayed, or that they are not."""
        return self._reason is not None or self._trial is None

    @property
    def used(self) -> bool:
        """Whether calls are replayed, for all that is known."""
        return self._reason is None

    @property
    def status(self) -> str:
        """What became of it, in words."""
        if self._reason is not None:
            return f"not used: {self._reason}"
        if self._trial is not None:
            return "being tried"
        if not self._captures:
            return "captured at the second call"
        return f"replayed, {self._captures} captured"

    def _tried(self, trial: ReplayTrial, arguments: Tensors) -> Tensors:
        if not trial.ready():
            return self._call(*arguments)
        replays = trial.replays()
        if trial.verdict is not None:
            if trial.verdict:
                self._give_up(trial.verdict)
            self._trial = None
            return self(*arguments)
        run = self._replayed if replays else lambda given: self._launch(*given)
        results, pending = self._graphs.timed(lambda: run(arguments))
        trial.add(replays, pending)
        return results

    def _replayed(self, arguments: Tensors) -> Tensors:
        stream = self._graphs.stream()
        captured = self._captured.get(stream)
        if captured is None or captured.key != self._key(captured.fixed, arguments):
            with self._lock:
                captured = self._prepared(stream, arguments)
        if captured is None:
            return self._call(*arguments)
        return self._run(captured, arguments)

    def _key(self, fixed: tuple[int, ...], arguments: Tensors) -> object:
        """What a capture is for."""
        read = [state.data_ptr() for state in arguments[: self._states]]
        return read, [arguments[position].data_ptr() for position in fixed], settings()

    def _prepared(self, stream: int, arguments: Tensors) -> _Captured | None:
        """The capture for a call on `stream`, made if need be; None for the first call on it, and where there is none."""
        captured = self._captured.get(stream)
        if captured is not None and captured.key == self._key(captured.fixed, arguments):
            return captured
        inputs = {position: arguments[position].data_ptr() for position in self._written if position >= self._states}
        if stream not in self._captured:
            if len(self._captured) < _MOST_STREAMS:
                self._captured[stream], self._lay = None, inputs
            return None
        if self._captures >= _MOST_CAPTURES:
            self._give_up(f"the model's tensors changed their addresses {_MOST_CAPTURES} times")
            return None
        fixed = tuple(position for position, address in inputs.items() if self._lay.get(position) == address)
        self._lay = {}
        try:
            captured = self._captured[stream] = self._capture(fixed, arguments)
        except RuntimeError as error:
            self._give_up(next(iter(str(error).splitlines()), type(error).__name__))
            return None
        return captured

    def _give_up(self, reason: str) -> None:
        self._reason = reason
        self._captured.clear()
        if self._asked:
            warn(f"{self._name} runs without a CUDA graph: {reason}")

    def _capture(self, fixed: tuple[int, ...], arguments: Tensors) -> _Captured:
        key = self._key(fixed, arguments)
        read = list(arguments)
        inputs: list[torch.Tensor | None] = []
        for position, given in enumerate(arguments[self._states :], self._states):
            inputs.append(None if position in fixed else _like(given))
            read[position] = inputs[-1] if inputs[-1] is not None else given
        pool = self._graphs.pool()
        with pool.lock:
            replay, results = self._graphs.capture(lambda: self._call(*read), pool)
        unfit = _unfit(tuple(read), results)
        if unfit is not None:
            raise RuntimeError(unfit)
        self._captures += 1
        return _Captured(key, fixed, tuple(inputs), results, replay, pool)

    def _run(self, captured: _Captured, arguments: Tensors) -> Tensors:
        given = arguments[self._states :]
        with captured.pool.lock:
            for inner, outer in zip(captured.inputs, given, strict=True):
                if inner is not None:
                    inner.copy_(outer)
            captured.replay()
            for position in self._written:
                inner = captured.inputs[position - self._states] if position >= self._states else None
                if inner is None:
                    torch._C._increment_version([arguments[position]])
                else:
                    arguments[position].copy_(inner)
            return tuple([_copy(result) for result in captured.results])


def _unfit(arguments: Tensors, results: Tensors) -> str | None:
    """Why copies of the results would not do: memory that they share with arguments, each other, or themselves."""
    seen = {argument.untyped_storage().data_ptr() for argument in arguments if argument.numel()}
    for result in results:
        place = result.untyped_storage().data_ptr()
        if result.numel() and place in seen:
            return "a result shares memory with an input, a parameter or another result"
        if overlaps(result):
            return "a result overlaps itself"
        seen.add(place)
    return None


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """Memory for copies of `tensor` in whatever mode, with its values."""
    with torch.inference_mode(False):
        return _copy(tensor)


def _copy(result: torch.Tensor) -> torch.Tensor:
    copied = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=result.device)
    return copied.copy_(result)
