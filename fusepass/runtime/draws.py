"""The draws of a call from a CUDA generator: the device is told all of its states by one launch, not by one for each draw.

Between two draws operators of the library may draw, too, such as attention with dropout, and how far they move the generator on is their own
business. But they do the same in each call. So a call begins with the states that its draws will find if the generator moves on as in the call
before, and each draw asks the generator, which is the host's, whether it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeVar

import torch

from fusepass.codegen.lowering.dropout import (
    behind,
    default_generator,
    draw,
    foretold,
    note,
    noted,
    states_at,
    words_of,
)

_MOST_CHANGES = 8  # of how far the generator moves, before each draw tells the device itself


@dataclass
class Foreseen:
    """What the draws of a call will find.

    Attributes:
        generator: of the device.
        seed, offset: where it is when the call begins.
        begins: how far behind `offset` each draw should find it.
        states: seed and offset before each count, by draw.
        found: how far behind `offset` each draw has found it.
    """

    generator: Any
    seed: int
    offset: int
    begins: tuple[int, ...]
    states: list[list[torch.Tensor]]
    found: list[int] = field(default_factory=list)


Result = TypeVar("Result")
Begin = Callable[[], Foreseen | None]
Drawn = Callable[[Foreseen | None, int], list[torch.Tensor]]


def draws(counts: Sequence[Sequence[int]], device: torch.device) -> tuple[Begin, Drawn]:
    """What a call of a graph begins with, and what makes the states of that and of a draw's number, as `draw` does.

    Args:
        counts: of each draw, in order, how far it moves the generator on, one state after the other.
        device: whose generator it is.
    """
    totals = [sum(each) for each in counts]
    begins = tuple(accumulate(totals[:-1], initial=0))
    changes = 0

    def begin() -> Foreseen | None:
        generator = generator_of(device)
        if generator is None or changes > _MOST_CHANGES:
            return None
        expected, seed, offset = begins, generator.initial_seed(), generator.get_offset()
        starts = [tuple(accumulate(each[:-1], initial=at)) for each, at in zip(counts, expected, strict=True)]
        rest = iter(states_at(seed, offset, sum(starts, ()), device))
        return Foreseen(generator, seed, offset, expected, [[next(rest) for _ in each] for each in counts])

    def drawn(foreseen: Foreseen | None, number: int) -> list[torch.Tensor]:
        nonlocal begins, changes
        if foreseen is None:
            return draw(counts[number], device=device)
        generator, found = foreseen.generator, foreseen.found
        offset = generator.get_offset()
        found.append(offset - foreseen.offset)
        if len(found) == len(counts) and tuple(found) != foreseen.begins:
            begins, changes = tuple(found), changes + 1
        if found[-1] != foreseen.begins[number] or generator.initial_seed() != foreseen.seed:
            return draw(counts[number], device=device)
        generator.set_offset(offset + totals[number])
        note(offset, counts[number])
        return foreseen.states[number]

    return begin, drawn


@dataclass(frozen=True)
class Course:
    """How a launched call draws: generated kernels, and between them the library.

    Attributes:
        draws: of generated kernels, in order: how far behind its beginning the generator is then, and how far each state moves it on.
        total: how far the call moves it on.
    """

    draws: tuple[tuple[int, tuple[int, ...]], ...]
    total: int

    @property
    def starts(self) -> tuple[int, ...]:
        """How far behind the beginning the generator is at each state."""
        return tuple(start for at, counts in self.draws for start in accumulate(counts[:-1], initial=at))

    @property
    def gaps(self) -> dict[int, int]:
        """Where the library draws: behind how many draws of generated kernels, and how far behind the beginning that starts."""
        ends = [0, *(at + sum(counts) for at, counts in self.draws)]
        begins = [*(at for at, _ in self.draws), self.total]
        return {number: end for number, (end, begin) in enumerate(zip(ends, begins, strict=True)) if end < begin}


def watched(run: Callable[[], Result], device: torch.device) -> tuple[Result, Course | None]:
    """What a launched call gives, and how it draws; None while a CUDA graph is captured."""
    generator = generator_of(device)
    if generator is None:
        return run(), None
    begin = generator.get_offset()
    with noted() as notes:
        results = run()
    draws = tuple((offset - begin, tuple(counts)) for offset, counts in notes)
    return results, Course(draws, generator.get_offset() - begin)


class ReplayedDraws:
    """The draws of a graph that is captured and replayed: each begins where it would in a launched call.

    To generated kernels the device is told where the generator is. The library draws from a generator of its own wherever it draws between
    these, which is set before each replay; PyTorch lets captured operators read it on the device.

    Args:
        course: how a launched call draws.
        device: whose generator it is.
    """

    def __init__(self, course: Course, device: torch.device) -> None:
        self._total = course.total
        self._device = device
        self._first = torch.zeros(1, dtype=torch.complex128, device=device)
        self._behind = behind(course.starts, device) if course.starts else None
        self._own = {number: (start, default_generator(device).clone_state()) for number, start in course.gaps.items()}

    @property
    def generators(self) -> list[Any]:
        """Those that the capture has to know."""
        return [own for _, own in self._own.values()]

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Around the call that is captured."""
        states = iter(() if self._behind is None else (self._first.view(torch.int64) + self._behind).unbind())
        met = 0

        def go_on() -> None:
            if met in self._own:
                default.graphsafe_set_state(self._own[met][1])

        def tell(counts: Sequence[int]) -> list[torch.Tensor]:
            nonlocal met
            met += 1
            go_on()
            return [next(states) for _ in counts]

        default = default_generator(self._device)
        usual = default.graphsafe_get_state()
        try:
            go_on()
            with foretold(tell):
                yield
        finally:
            default.graphsafe_set_state(usual)

    def begin(self) -> None:
        """Before a replay: say where the generator is, and move that on."""
        generator = default_generator(self._device)
        seed, offset = generator.initial_seed(), generator.get_offset()
        if self._behind is not None:
            self._first.fill_(words_of(seed, offset))
        for start, own in self._own.values():
            if own.initial_seed() != seed:
                own.manual_seed(seed)
            own.set_offset(offset + start)
        generator.set_offset(offset + self._total)


def generator_of(device: torch.device) -> Any:
    """The generator of a CUDA device; None where the host does not know its state: while a CUDA graph is captured, or on another device."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    return default_generator(device)
