"""The specialisations of one model, found by the shapes of a call's tensors; the least used ones are forgotten."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fusepass.dispatch.specialisation import Specialisation
from fusepass.runtime.fast_path import MISSED, door

_RECENT = 4
"""Specialisations that a call tries in Python before it looks at shapes: few, as each costs about a microsecond."""

_READY = 16
"""Those that it tries without Python before that: each that does not fit costs about a tenth of one."""

_MOST_ALIKE = 16
"""Specialisations for the same shapes: a model whose Python state changes at each call must not be traced for ever."""

_Shapes = tuple[torch.Size, ...]


class Table:
    """Threads may share one.

    Attributes:
        door: tries those of them that need no Python; gives `MISSED` where there are none.
        inside: the same for what runs within hooks.
        hooks: what must be empty for them to serve.
        version: of the attributes of the model that had these.
    """

    __slots__ = (
        "_by_shapes",
        "_left",
        "_lock",
        "_made",
        "_offered",
        "_ready",
        "_recording",
        "_turned_away",
        "door",
        "hooks",
        "inside",
        "version",
    )

    def __init__(self) -> None:
        self.version = -1
        self.hooks: Sequence[Mapping[int, Any]] = ()
        self.door: Callable[..., Any] = _no_door
        self.inside: Callable[..., Any] = _no_door
        self._made: Any = None
        self._offered: tuple[Any, ...] = ()
        self._recording: Any = None
        self._ready: tuple[Specialisation, ...] = ()  # those that served last, of which recent ones come first
        self._left: tuple[Any, ...] = ()
        self._by_shapes: dict[_Shapes, tuple[Specialisation, ...]] = {}  # the one used last at the end
        self._turned_away: dict[_Shapes, None] = {}  # the last ones, oldest first
        self._lock = threading.Lock()

    def follow(self, version: int, hooks: Sequence[Mapping[int, Any]]) -> None:
        """From now on these `hooks` must be empty: those of the model in a version of its attributes."""
        with self._lock:
            self.version = version
            if not all(map(operator.is_, hooks, self.hooks)) or len(hooks) != len(self.hooks):
                self.hooks, self.door, self._made, self._offered = hooks, _no_door, None, ()

    @property
    def recent(self) -> tuple[Specialisation, ...]:
        """Those that served the last calls, for a quick try."""
        return self._ready[:_RECENT]

    def __iter__(self) -> Iterator[Specialisation]:
        with self._lock:
            groups = list(self._by_shapes.values())
        return (made for group in groups for made in group)

    def candidates(self, tensors: Sequence[torch.Tensor]) -> tuple[Specialisation, ...]:
        """Those made for tensors of these shapes; whatever else they depend on may differ."""
        return self._by_shapes.get(_shapes(tensors), ())

    def used(self, made: Specialisation, tensors: Sequence[torch.Tensor]) -> None:
        """`made` serves a call with `tensors`."""
        with self._lock:
            key = _shapes(tensors)
            group = self._by_shapes.pop(key, None)
            if group is not None:
                self._by_shapes[key] = group
                self._remember((made, *(other for other in self._ready if other is not made)))

    def obstacle(self, tensors: Sequence[torch.Tensor], most: int) -> str | None:
        """Why no specialisation is made for a call with such tensors; None where one is.

        Where there are `most` already, shapes must come a second time to be worth forgetting others: a call that
        comes once is cheaper by the original than by tracing it.
        """
        with self._lock:
            key = _shapes(tensors)
            if len(self._by_shapes.get(key, ())) >= _MOST_ALIKE:
                return f"called with more than {_MOST_ALIKE} signatures of the same shapes"
            if self._count() < most or key in self._turned_away:
                self._turned_away.pop(key, None)
                return None
            self._turned_away[key] = None
            if len(self._turned_away) > most:
                del self._turned_away[next(iter(self._turned_away))]
            return f"called with more than {most} signatures, and with this one for the first time"

    def _count(self) -> int:
        return sum(map(len, self._by_shapes.values()))

    def add(self, made: Specialisation, tensors: Sequence[torch.Tensor], most: int) -> None:
        """Remember `made` for calls with such tensors, and of all no more than `most`."""
        with self._lock:
            key = _shapes(tensors)
            self._by_shapes[key] = (*self._by_shapes.pop(key, ()), made)[-most:]
            while self._count() > most:
                oldest = next(iter(self._by_shapes))
                self._by_shapes[oldest] = self._by_shapes[oldest][1:]
                if not self._by_shapes[oldest]:
                    del self._by_shapes[oldest]
            known = {id(each) for group in self._by_shapes.values() for each in group}
            self._remember(tuple(each for each in (made, *self._ready) if id(each) in known))

    def _remember(self, ready: tuple[Specialisation, ...]) -> None:
        self._ready = ready[:_READY]
        self._offer()

    def served(self, made: Specialisation) -> None:
        """`made`, one of the recent ones, has served a call."""
        if made.quick is not None and made.quick not in self._offered:
            with self._lock:
                self._offer()

    def record(self, recording: Any) -> None:
        """`recording` serves calls that record gradients (`fusepass.dispatch.originals`)."""
        with self._lock:
            self._recording = recording
            self._offer()

    def leave(self, call: Any) -> None:
        """`call`, without Python, runs the original where nothing better is known."""
        with self._lock:
            self._left = (call, *self._left)[:_RECENT]
            self._offer()

    def _offer(self) -> None:
        self._offered = (*(each.quick for each in self._ready if each.quick is not None), *self._left)
        if (self._offered or self._recording is not None) and self._made is None:
            self._made = door(self.hooks)
            self.inside = door(()) or _no_door
        if self._made is not None:
            self._made.offer(self._offered, self._recording)
            self.inside.offer(self._offered, self._recording)  # type: ignore[attr-defined]
            self.door = self._made


def _no_door(*_: Any) -> Any:
    return MISSED


def _shapes(tensors: Sequence[torch.Tensor]) -> _Shapes:
    return tuple(tensor.shape for tensor in tensors)
