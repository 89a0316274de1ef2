"""Forward and backward of a training step, replayed as CUDA graphs: which memory a call takes, and when it is launched instead.

What forward saves for backward stays where its graph writes it. So a graph of forward has memory of its own, a slot, and is replayed only when
nobody refers to what it lent any more: autograd lets go of that behind backward, or when the results of a call are dropped. Until
then another forward takes another slot or is launched. Backward finds its slot by the addresses of what it is given. So nothing
depends on the order of calls: forwards may wait for their backward, which may run twice, elsewhere, or never.

Everything else that a caller gets, results and gradients, is copied to memory of PyTorch's allocator, for callers keep and change it, write to it in
place and read it on other streams. That takes two passes over the gradients. PyTorch's own CUDA graph trees share one pool among all graphs, for
which they have to know the order of calls, and hand out memory that the next step overwrites.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fusepass.compile.pipeline import CompiledGraph
from fusepass.errors import warn
from fusepass.runtime.draws import ReplayedDraws
from fusepass.runtime.replay import Graphs, Pool, settings
from fusepass.runtime.replay_trial import Pending, ReplayTrial, Taken
from fusepass.runtime.replayable import ON_CPU
from fusepass.training.calls import Call, Run
from fusepass.training.captured import Captured

_MOST_SLOTS = 32
_MOST_CAPTURES = 64  # of forwards of one size
_MOST_STREAMS = 4
_SHARE = 4  # where nobody asked, slots take at most one part in so many of the memory that is free

_WAITING = "what earlier calls saved for backward took all memory that is for it"
_HOOKS = "hooks get what forward saves"

_saved_tensors_hooks: Callable[[bool], object] = torch._C._autograd._top_saved_tensors_default_hooks


@dataclass(eq=False)
class Size:
    """What is known of a forward of one set of sizes.

    Attributes:
        needed: bytes that a slot for it takes, about.
        trial: finds out whether replaying pays; None where that is known or was asked for.
        reason: why it is launched from now on.
    """

    needed: int
    trial: ReplayTrial | None
    reason: str | None = None
    captures: int = 0
    streams: set[int] = field(default_factory=set)

    @property
    def settled(self) -> bool:
        return self.trial is None or self.reason is not None


@dataclass(eq=False)
class _Slot:
    """Memory for one forward at a time and the backward that follows.

    Attributes:
        size: whose forward.
        key: what it is for: a stream, the addresses of the model's tensors, settings.
        states: where the memory of these tensors begins.
        nbytes: what it takes of the device.
        backward: the graph of backward with whose it is and the settings that it is for; None before the first.
    """

    size: Size
    stream: int
    key: object
    pool: Pool
    forward: Captured
    states: frozenset[int]
    nbytes: int
    backward: tuple[object, Captured] | None = None


class Step:
    """What the graphs of forward and backward have in common that AOTAutograd made of one graph.

    Args:
        name: what warnings call it.
        asked: replay from the second call on; else once the first calls show that this is quicker.
    """

    graphs: Graphs  # of the device

    def __init__(self, name: str, *, asked: bool) -> None:
        self.name = name
        self.asked = asked
        self.lock = threading.RLock()  # from the choice of a slot until its memory is referred to
        self.sizes: list[Size] = []
        self.slots: list[_Slot] = []
        self.opened: tuple[Size, bool, Pending] | None = None  # the last forward of a trial, until backward follows
        self._launched: Counter[str] = Counter()
        self._unfit: dict[str, None] = {}
        self._captures = 0
        self._most: int | None = None  # bytes of all slots; None before the first

    @property
    def status(self) -> str:
        """What became of it, in words; empty on a CPU where nobody asked."""
        reasons = dict.fromkeys([*self._unfit, *(size.reason for size in self.sizes if size.reason is not None)])
        if not self.asked and ON_CPU in reasons:
            return ""
        words = [f"not used: {reason}" for reason in reasons]
        if self.slots:
            nbytes = sum(slot.nbytes for slot in self.slots)
            words = [f"replayed, {self._captures} captured, {nbytes >> 20} MiB", *words]
        elif not all(size.settled for size in self.sizes):
            words = ["being tried", *words]
        words += [f"launched {count} times, as {reason}" for reason, count in self._launched.items()]
        return f"training: {'; '.join(words) or 'captured at the second call'}"

    def refuse(self, reason: str) -> None:
        """Note why a graph is never captured."""
        self._unfit[reason] = None

    def launches(self, reason: str) -> None:
        """Count a call that is launched although others are replayed."""
        self._launched[reason] += 1

    def give_up(self, size: Size, reason: str) -> None:
        """Launch a forward, and what follows, from now on. Backward of earlier calls still has what these saved."""
        with self.lock:
            size.reason = reason
            self.slots = [slot for slot in self.slots if slot.size is not size]
        if self.asked:
            warn(f"{self.name} runs without a CUDA graph: {reason}")

    def slot(
        self, size: Size, static: Sequence[int], arguments: Sequence[Any], capture: Callable[[Pool], Captured]
    ) -> _Slot | None:
        """A slot that a forward with these `arguments` may take; None where it is to be launched."""
        stream = self.graphs.stream()
        key = stream, _addresses(arguments, static), settings()
        for number, slot in enumerate(self.slots):
            if slot.size is size and slot.key == key and slot.forward.free():
                if number < len(self.slots) - 1:  # those that were used least recently come first
                    self.slots.append(self.slots.pop(number))
                return slot
        if stream not in size.streams:  # libraries, kernels and allocator get ready
            if len(size.streams) < _MOST_STREAMS:
                size.streams.add(stream)
            else:
                self.launches(f"they were on more than {_MOST_STREAMS} streams")
            return None
        if size.captures >= _MOST_CAPTURES:
            self.give_up(size, f"{_MOST_CAPTURES} captures did not serve later calls: other tensors or sizes came")
            return None
        if not self._make_place(size.needed):
            if self.slots:
                self.launches(_WAITING)
            else:
                self.give_up(size, f"{size.needed >> 20} MiB are more than a quarter of the memory that is free")
            return None
        self.graphs.make_room(size.needed)
        pool = self.graphs.own_pool()
        size.captures += 1
        states = frozenset(arguments[position].untyped_storage().data_ptr() for position in static)
        captured, nbytes = self.captured(size, lambda: capture(pool))
        if captured is None:
            return None
        self.slots.append(_Slot(size, stream, key, pool, captured, states, nbytes))
        return self.slots[-1]

    def captured(self, size: Size, capture: Callable[[], Captured]) -> tuple[Captured | None, int]:
        """What `capture` gives, and the bytes that it takes; None where it fails, and nothing of this size is captured any more."""
        before = self.graphs.reserved()
        try:
            made = capture()
        except RuntimeError as error:
            self.give_up(size, next(iter(str(error).splitlines()), type(error).__name__))
            return None, 0
        self._captures += 1
        return made, max(self.graphs.reserved() - before, 0)

    def _make_place(self, needed: int) -> bool:
        """Whether one more slot is within the bounds, perhaps in the place of others that nobody refers to."""
        while not self._fits(needed):
            unused = next((slot for slot in self.slots if slot.forward.free()), None)
            if unused is None:
                return False
            self.slots.remove(unused)
        return True

    def _fits(self, needed: int) -> bool:
        if self._most is None:
            self._most = self.graphs.room() // _SHARE
        held = sum(slot.nbytes for slot in self.slots)
        return len(self.slots) < _MOST_SLOTS and (self.asked or held + needed <= self._most)


class ReplayedForward(Run):
    """The calls of a compiled forward.

    Args:
        compiled: made with ``emptying``, of constant shapes.
        step: what it shares with backward.
        size: what is known of it.
        static: positions of the arguments that lie in the same memory at each call, as parameters do.
        written: positions of those that it writes.
        visible: how many of its results, from the first on, are not for backward alone.
        draws: how far its kernels move the random generator on; empty where the library draws, None where nothing does.
        device: where it runs.
    """

    def __init__(
        self,
        compiled: CompiledGraph,
        step: Step,
        size: Size,
        static: Sequence[int],
        written: Sequence[int],
        visible: int,
        draws: Sequence[int] | None,
        device: torch.device,
    ) -> None:
        super().__init__(compiled)
        self._plain = compiled.call
        self._step, self._size = step, size
        self._static, self._written = tuple(static), tuple(written)
        self._visible = visible
        self._counts, self._device = draws, device

    def best(self) -> tuple[Call, bool]:
        if self._size.reason is not None:
            return super().best()
        return self._serve, self._size.settled

    def _serve(self, arguments: list[Any]) -> Any:
        step, size = self._step, self._size
        if size.reason is not None or step.graphs.capturing():
            return self._launch(arguments)
        trial = size.trial
        if trial is None:
            return self._replay(arguments)[0]
        if not trial.ready():
            return self._launch(arguments)
        replays = trial.replays()
        if trial.verdict is not None:
            size.trial = None
            if trial.verdict:
                step.give_up(size, trial.verdict)
            return self._serve(arguments)
        run = self._replay if replays else lambda given: (self._launch(given), False)
        (results, replayed), pending = step.graphs.timed(lambda: run(arguments))
        step.opened = (size, replays, pending) if replays == replayed else None
        return results

    def _launch(self, arguments: list[Any]) -> Any:
        return Run.best(self)[0](arguments)

    def _replay(self, arguments: list[Any]) -> tuple[Any, bool]:
        """The results, and whether they are a graph's."""
        step = self._step
        if _saved_tensors_hooks(False) is not None:
            step.launches(_HOOKS)
        elif (
            self._counts == () and step.graphs.stream()
        ):  # PyTorch keeps one generator state for all graphs of a device
            step.launches("the library draws random numbers, and the stream is not the default one")
        else:
            with step.lock:
                slot = step.slot(self._size, self._static, arguments, lambda pool: self._capture(arguments, pool))
                if slot is not None:
                    results = slot.forward.run(arguments)
                    if self._written:
                        torch._C._increment_version([arguments[position] for position in self._written])
                    arguments.clear()
                    return results, True
        return self._launch(arguments), False

    def _capture(self, arguments: Sequence[Any], pool: Pool) -> Captured:
        fixed, visible, graphs = self._static, self._visible, self._step.graphs
        if not self._counts:
            return Captured(self._plain, arguments, fixed, visible, graphs, pool, exact=True)
        draws = ReplayedDraws(self._counts, self._device)

        def drawing(given: list[Any]) -> Sequence[Any]:
            with draws.captured():
                results: Sequence[Any] = self._plain(given)
                return results

        return Captured(drawing, arguments, fixed, visible, graphs, pool, exact=True, before=draws.begin)


class ReplayedBackward(Run):
    """The calls of a compiled backward, made with ``emptying``, that shares `step` with its forward."""

    def __init__(self, compiled: CompiledGraph, step: Step) -> None:
        super().__init__(compiled)
        self._plain = compiled.call
        self._step = step
        self._warm = False
        self._key = object()

    def best(self) -> tuple[Call, bool]:
        if all(size.reason is not None for size in self._step.sizes):
            return super().best()
        return self._serve, all(size.settled for size in self._step.sizes)

    def _serve(self, arguments: list[Any]) -> Any:
        step = self._step
        opened, step.opened = step.opened, None
        if opened is None:
            return self._run(arguments)
        size, replayed, pending = opened
        results, after = step.graphs.timed(lambda: self._run(arguments))
        if size.trial is not None:
            size.trial.add(replayed, lambda: _sum((pending(), after())))
        return results

    def _run(self, arguments: list[Any]) -> Any:
        step = self._step
        if not self._warm or step.graphs.capturing():
            self._warm = True
        else:
            with step.lock:
                captured = self._captured(arguments)
                if captured is not None:
                    results = captured.run(arguments)
                    arguments.clear()
                    return results
        return Run.best(self)[0](arguments)

    def _captured(self, arguments: Sequence[Any]) -> Captured | None:
        """The graph for a call with these arguments; None where their forward was launched, or it is another stream's."""
        step, stream, key = self._step, self._step.graphs.stream(), (self._key, settings())
        for slot in step.slots:
            if slot.stream != stream:
                continue
            if slot.backward is not None:
                captured = slot.backward[1]
                if slot.backward[0] == key and captured.addresses == _addresses(arguments, captured.fixed):
                    return captured
            elif any(map(slot.forward.lends, arguments)):
                return self._capture(slot, key, arguments)
        return None

    def _capture(self, slot: _Slot, key: object, arguments: Sequence[Any]) -> Captured | None:
        fixed = [number for number, each in enumerate(arguments) if _stays(slot, each)]

        def capture() -> Captured:
            return Captured(self._plain, arguments, fixed, sys.maxsize, self._step.graphs, slot.pool, exact=False)

        captured, nbytes = self._step.captured(slot.size, capture)
        if captured is not None:
            slot.backward = key, captured
            slot.nbytes += nbytes
        return captured


def _stays(slot: _Slot, argument: torch.Tensor) -> bool:
    """Whether an argument of backward lies in a slot, or in the model's memory that it is for."""
    return slot.forward.lends(argument) or argument.untyped_storage().data_ptr() in slot.states


def _addresses(arguments: Sequence[Any], places: Iterable[int]) -> list[int]:
    return [arguments[place].data_ptr() for place in places]


def _sum(both: Iterable[Taken | None]) -> Taken | None:
    """What forward and backward took; None as long as the device works on one."""
    taken = [each for each in both if each is not None]
    return Taken(sum(each.host for each in taken), sum(each.device for each in taken)) if len(taken) == 2 else None
