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
from typing import Any

import torch

from fusepass.codegen.lowering.dropout import behind, draw, foretold, states_at, words_of

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
        return foreseen.states[number]

    return begin, drawn


class ReplayedDraws:
    """The draws of a graph that is captured and replayed: they begin where the host says the generator is.

    Args:
        counts: how far each state moves the generator on, in order.
        device: whose generator it is.
    """

    def __init__(self, counts: Sequence[int], device: torch.device) -> None:
        self._total = sum(counts)
        self._device = device
        self._first = torch.zeros(1, dtype=torch.complex128, device=device)
        self._behind = behind(tuple(accumulate(counts[:-1], initial=0)), device)

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Around the call that is captured."""
        with foretold((self._first.view(torch.int64) + self._behind).unbind()):
            yield

    def begin(self) -> None:
        """Before a replay: tell the device where the generator is, and move that on."""
        generator = generator_of(self._device)
        offset = generator.get_offset()
        self._first.fill_(words_of(generator.initial_seed(), offset))
        generator.set_offset(offset + self._total)


def generator_of(device: torch.device) -> Any:
    """The generator of a CUDA device; None where the host does not know its state: while a CUDA graph is captured, or on another device."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
