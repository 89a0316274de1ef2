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

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fusepass.errors import warn
from fusepass.runtime.cuda_graphs import Graphs, Pool, settings
from fusepass.runtime.replay_trial import Pending, ReplayTrial
from fusepass.runtime.replayable import ON_CPU
from fusepass.training.captured import Captured

_MOST_SLOTS = 32
_MOST_CAPTURES = 64  # of forwards of one size
_MOST_STREAMS = 4
_SHARE = 4  # where nobody asked, slots take at most one part in so many of the memory that is free

_WAITING = "what earlier calls saved for backward took all memory that is for it"


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
class Slot:
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

    Attributes:
        devices: where backward of a launched forward finds the state of a draw, by its argument; None until one ran.
    """

    graphs: Graphs  # of the device

    def __init__(self, name: str, *, asked: bool) -> None:
        self.name = name
        self.asked = asked
        self.lock = threading.RLock()  # from the choice of a slot until its memory is referred to
        self.sizes: list[Size] = []
        self.slots: list[Slot] = []
        self.opened: tuple[Size, bool, Pending] | None = None  # the last forward of a trial, until backward follows
        self._launched: Counter[str] = Counter()
        self._unfit: dict[str, None] = {}
        self.devices: dict[int, torch.device] | None = None
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
            words = [f"replayed, {self._captures} captured, {self._held >> 20} MiB", *words]
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
    ) -> Slot | None:
        """A slot that a forward with these `arguments` may take; None where it is to be launched."""
        stream = self.graphs.stream()
        key = stream, addresses(arguments, static), settings()
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
        if self._most is None:
            self._most = self.graphs.room() // _SHARE
        if size.needed > self._most and not self.asked:
            self.give_up(size, f"{size.needed >> 20} MiB are more than a quarter of the memory that is free")
            return None
        if not self._make_place(size.needed, self._most):
            self.launches(_WAITING)
            return None
        self.graphs.make_room(size.needed)
        pool = self.graphs.own_pool()
        size.captures += 1
        states = frozenset(arguments[position].untyped_storage().data_ptr() for position in static)
        captured, nbytes = self.captured(size, lambda: capture(pool))
        if captured is None:
            return None
        self.slots.append(Slot(size, stream, key, pool, captured, states, nbytes))
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

    def _make_place(self, needed: int, most: int) -> bool:
        """Whether one more slot is within the bounds, perhaps in the place of others that nobody refers to."""
        while len(self.slots) >= _MOST_SLOTS or (not self.asked and self._held + needed > most):
            unused = next((slot for slot in self.slots if slot.forward.free()), None)
            if unused is None:
                return False
            self.slots.remove(unused)
        return True

    @property
    def _held(self) -> int:
        return sum(slot.nbytes for slot in self.slots)


def addresses(arguments: Sequence[Any], places: Iterable[int]) -> list[int]:
    """Where the arguments in these places begin in memory."""
    return [arguments[place].data_ptr() for place in places]
