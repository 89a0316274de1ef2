"""A region's launcher without Python: what it passes, what it leaves to Python, and the memory that it has ready."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from tests.support.launchers import Runtime, launch_of


def test_a_launcher_passes_pointers_numbers_and_the_stream() -> None:
    seen: list[tuple[int | None, ...]] = []
    launcher, x, y = launch_of(0, seen), torch.rand(4), torch.rand(4)
    result = launcher(x, y)
    ((first, output, workspace, second, numbers, stream),) = seen
    assert (first, second) == (y.data_ptr(), x.data_ptr())
    assert output == result.data_ptr()
    assert workspace is not None
    assert workspace % 64 == 32
    assert (numbers, stream) == (99, 73)
    assert (launcher.__name__, launcher.__module__) == ("name", "module")
    assert type(launch_of(0, seen, single=False)(x, y)) is tuple


def test_what_is_unusual_is_launched_by_python() -> None:
    seen: list[tuple[int | None, ...]] = []
    x, y = torch.rand(5), torch.rand(5)
    assert launch_of(0, seen)(x, y[1:])[0] == "plain"
    assert launch_of(0, seen, current=lambda: 1)(x, y)[0] == "plain"
    assert launch_of(0, seen)(x)[0] == "plain"
    assert not seen
    failed, (status, arguments) = launch_of(720, seen)(x, y)
    assert (failed, status) == ("failed", 720)
    assert arguments[0] is x
    assert arguments[1] is y
    for wrong in [{"stream": lambda _: 1 / 0}, {"current": lambda: 1 / 0}]:
        with pytest.raises(ZeroDivisionError):
            launch_of(0, seen, **wrong)(x, y)
    with pytest.raises(RuntimeError):
        launch_of(0, seen, outputs=((2,),))(x, y)
    with pytest.raises(TypeError):
        launch_of(0, seen)(x, "y")


AHEAD = 4
X, Y = torch.rand(4), torch.rand(4)


class Stored:
    """A launcher with memory that it has ready, and what it asks for.

    Attributes:
        made: bytes of the tensors that were allocated since `asked` was called.
        seen: what its entry got.
    """

    def __init__(self, **changes: Any) -> None:
        self.runtime, self.stream = Runtime(), 7
        self.made: list[int] = []
        self.seen: list[tuple[int | None, ...]] = []
        self.full = False
        options = {"empty": self._empty, "stream": lambda index: self.stream, "runtime": self.runtime.addresses}
        self.launch = launch_of(0, self.seen, **(options | changes))

    def _empty(self, *what: Any) -> torch.Tensor:
        if self.full:
            raise MemoryError("no memory is left")
        made: torch.Tensor = torch._C._dynamo.guards._empty_strided_cpu(*what)
        self.made.append(made.nbytes)
        return made

    def asked(self, calls: int = 1) -> tuple[int, int]:
        """How many results and workspaces so many calls ask for."""
        self.made.clear()
        for _ in range(calls):
            self.launch(X, Y)
        return self.made.count(8), self.made.count(64)

    @property
    def workspace(self) -> int | None:
        """Where that of the last call lay."""
        return self.seen[-1][2]


def test_results_are_made_several_in_a_row_and_the_workspace_stays() -> None:
    stored = Stored()
    assert stored.asked() == (1, 1)  # which stream is the usual one is not known yet
    assert stored.asked() == (1 + AHEAD, 1)
    assert stored.asked(AHEAD - 1) == (0, 0)
    assert stored.asked() == (AHEAD, 0)
    assert stored.asked(10 * AHEAD) == (10 * AHEAD, 0)
    assert len({pointers[2] for pointers in stored.seen[1:]}) == 1
    results = [stored.launch(X, Y) for _ in range(3 * AHEAD)]
    assert len({result.data_ptr() for result in results}) == len(results)
    assert [pointers[1] for pointers in stored.seen[-len(results) :]] == [result.data_ptr() for result in results]


def test_autograd_is_told_what_was_written_behind_the_launch() -> None:
    told: list[tuple[torch.Tensor, ...]] = []
    seen: list[tuple[int | None, ...]] = []
    launcher = launch_of(0, seen, told=lambda written: told.append((*written, len(seen))), written=(1, 0))
    launcher(X, Y)
    ((second, first, launched),) = told
    assert (second is Y, first is X, launched) == (True, True, 1)
    launch_of(7, seen, told=told.append, written=(1,))(X, Y)
    assert len(told) == 1  # where nothing was launched, who does it instead writes
    assert type(launch_of(0, seen, told=told.append)(X, Y)) is torch.Tensor
    assert len(told) == 1
    with pytest.raises(ZeroDivisionError):
        launch_of(0, seen, told=lambda written: 1 / 0, written=(0,))(X, Y)


@pytest.mark.parametrize("small", [(True, False), (False, True), (False, False)])
def test_what_is_large_is_asked_for_at_each_call(small: tuple[bool, bool]) -> None:
    stored = Stored(small=small)
    stored.asked(2 * AHEAD)
    assert stored.asked(AHEAD) == (AHEAD, 0 if small[1] else AHEAD)


def test_a_stream_that_is_captured_gets_memory_of_its_own() -> None:
    stored = Stored()
    stored.asked(2)
    kept = stored.workspace
    stored.runtime.captured = True
    assert stored.asked(3) == (3, 3)
    assert stored.workspace != kept
    stored.runtime.captured, stored.runtime.error = False, 906
    assert stored.asked(2) == (2, 2)
    assert stored.runtime.forgotten == 2
    stored.runtime.error = 0
    assert stored.asked() == (0, 0)
    assert stored.workspace == kept


def test_without_the_functions_of_cuda_nothing_is_ready() -> None:
    runtime = Runtime().addresses
    for addresses in [(0, 0), (runtime[0], 0), (0, runtime[1])]:
        stored = Stored(runtime=addresses)
        stored.asked(2)
        assert stored.asked(2) == (2, 2)


def test_memory_serves_the_stream_on_which_it_was_asked_for() -> None:
    stored = Stored()
    stored.asked(2)
    kept = stored.workspace
    for _ in range(3):  # another stream now and then changes nothing
        stored.stream = 8
        assert stored.asked() == (1, 1)
        assert stored.workspace != kept
        stored.stream = 7
        assert stored.asked() == (0, 0)
    stored.stream = 8
    assert stored.asked() == (1, 1)
    assert stored.asked() == (1 + AHEAD, 1)  # twice in a row: it is the one to be ready for
    assert stored.asked() == (0, 0)


def test_a_workspace_serves_one_call_at_a_time() -> None:
    inner: list[int | None] = []

    def again() -> None:
        if len(stored.seen) == 3:  # as another thread would, while the first one launches
            stored.launch(X, Y)
            inner.append(stored.workspace)

    stored = Stored(entered=again)
    stored.asked(2)
    kept = stored.workspace
    stored.asked()
    assert inner
    assert inner[0] != kept
    stored.asked()
    assert stored.workspace == kept


def test_no_memory_for_later_calls_is_no_fault_of_this_one() -> None:
    stored = Stored(entered=lambda: setattr(stored, "full", True))
    stored.stream = 0  # the one that is usual from the start
    assert stored.launch(X, Y).shape == (2,)
    with pytest.raises(MemoryError):
        stored.launch(X, Y)
    stored.full = False
    assert stored.launch(X, Y).shape == (2,)


def test_a_launcher_keeps_nothing_of_a_call_and_leaves_nothing_behind() -> None:
    stored = Stored()
    for _ in range(2 * AHEAD):
        alive = weakref.ref(stored.launch(X, Y))
        assert alive() is None
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(100):
        stored.launch(X, Y)
        stored.seen.clear()
        stored.made.clear()
    assert len(gc.get_objects()) <= before + 10
    results: list[weakref.ref[torch.Tensor]] = []

    def noted(*what: Any) -> torch.Tensor:
        made: torch.Tensor = torch._C._dynamo.guards._empty_strided_cpu(*what)
        results.append(weakref.ref(made))
        return made

    launcher = launch_of(0, [], empty=noted, stream=lambda index: 7, runtime=Runtime().addresses)
    launcher(X, Y)
    launcher(X, Y)
    assert sum(result() is not None for result in results) == AHEAD + 1
    del launcher
    assert not any(result() is not None for result in results)
