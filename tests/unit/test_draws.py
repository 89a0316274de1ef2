"""Draws that a call foresees: each gets the state that the generator has when its turn comes, whatever moves it in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from fusepass.codegen.lowering.dropout import states_at
from fusepass.runtime import draws as module
from fusepass.runtime.draws import draws

CPU = torch.device("cpu")
COUNTS = [[4, 8], [12], [4, 4, 4]]


class Generator:
    """As PyTorch's of a CUDA device."""

    def __init__(self) -> None:
        self.seed, self.offset = 7, 40

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset

    def states(self, counts: Sequence[int]) -> list[list[int]]:
        """What draws, one by one, find."""
        found = []
        for count in counts:
            found.append([self.seed, self.offset])
            self.offset += count
        return found


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> Generator:
    """The one that draws are from."""
    made = Generator()
    monkeypatch.setattr(module, "generator_of", lambda device: made)
    return made


@pytest.fixture
def apart(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> list[Sequence[int]]:
    """The draws that tell the device of their states themselves."""
    found: list[Sequence[int]] = []

    def draw(counts: Sequence[int], *, device: torch.device) -> list[Tensor]:
        found.append(counts)
        return [torch.tensor(state) for state in generator.states(counts)]

    monkeypatch.setattr(module, "draw", draw)
    return found


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """What the device is told at the beginning of calls."""
    found: list[tuple[int, ...]] = []

    def told(seed: int, offset: int, starts: tuple[int, ...], device: torch.device) -> list[Tensor]:
        found.append(starts)
        return states_at(seed, offset, starts, device)

    monkeypatch.setattr(module, "states_at", told)
    return found


def _check(
    call: tuple[Callable[..., object], Callable[..., list[Tensor]]], generator: Generator, moves: list[int]
) -> None:
    """One call, in which something else moves the generator on by `moves` before each draw."""
    begin, drawn = call
    twin = Generator()
    twin.seed, twin.offset = generator.seed, generator.offset
    foreseen = begin()
    for number, (counts, move) in enumerate(zip(COUNTS, moves, strict=True)):
        generator.offset += move
        twin.offset += move
        assert [state.tolist() for state in drawn(foreseen, number)] == twin.states(counts)
        assert generator.offset == twin.offset


@pytest.mark.invariant(33)
def test_a_call_foresees_what_the_one_before_found(
    generator: Generator, apart: list[Sequence[int]], launches: list[tuple[int, ...]]
) -> None:
    call = draws(COUNTS, CPU)
    _check(call, generator, [0, 0, 0])
    assert not apart
    assert launches == [(0, 4, 12, 24, 28, 32)]
    _check(call, generator, [0, 100, 20])  # as nobody could foresee
    assert apart == COUNTS[1:]
    for _ in range(3):
        generator.seed += 1
        _check(call, generator, [0, 100, 20])
    assert apart == COUNTS[1:]
    assert launches[2:] == [(0, 4, 112, 144, 148, 152)] * 3


def test_a_generator_that_moves_as_it_likes_is_not_foreseen(
    generator: Generator, apart: list[Sequence[int]], launches: list[tuple[int, ...]]
) -> None:
    call = draws(COUNTS, CPU)
    for number in range(20):
        _check(call, generator, [0, 4 * number + 4, 0])
    assert len(launches) == module._MOST_CHANGES + 1
    assert apart[-3:] == COUNTS


def test_another_seed_meanwhile(generator: Generator, apart: list[Sequence[int]]) -> None:
    begin, drawn = draws(COUNTS, CPU)
    foreseen = begin()
    generator.seed = 11
    assert drawn(foreseen, 0)[1].tolist() == [11, 44]
    assert apart == COUNTS[:1]
