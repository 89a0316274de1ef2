"""One CUDA graph of a training step: arguments that it reads in place or as copies, and results in memory that later replays leave alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch

from fusepass.compile.segments import LARGE, Segments
from fusepass.runtime.cuda_graphs import Graphs, Pool
from fusepass.runtime.operators import reinterpret
from fusepass.runtime.replayable import overlaps

Call = Callable[[list[Any]], Sequence[Any]]

_uses: Callable[[int], int] = torch._C._storage_Use_Count


class Captured:
    """A call, captured for arguments of the same shapes.

    What is an argument, or a view of one, is that of each call's argument. Of the other results the first ones get memory of
    their own in each call. Those behind are lent: they lie where the graph writes them, and `free` tells whether
    anybody still refers to them. What is no tensor is the same in each call.

    Args:
        call: takes a list, which it empties; the body of `segments` where there are any, of which the others are launched at each call.
        arguments: those of the call at hand.
        fixed: positions of arguments that are read, and perhaps written, where they lie; others are copied to memory of the graph.
        copied: how many results, from the first on, get memory of their own.
        before: is called before each replay.
        generators: besides the default one, from which the call draws.
        exact: whether the caller would see that these do not share memory, or lie otherwise, as gradients' receivers do not.
        graphs, pool: the device's, and the memory to take.

    Attributes:
        fixed: as given.
        addresses: of the fixed arguments; a replay is right for these alone.

    Raises:
        RuntimeError: the device refused, the caller would see that a result is a copy, or an argument could not be one.
    """

    def __init__(
        self,
        call: Call,
        arguments: Sequence[Any],
        fixed: Sequence[int],
        copied: int,
        graphs: Graphs,
        pool: Pool,
        *,
        exact: bool,
        before: Callable[[], None] = lambda: None,
        generators: Sequence[Any] = (),
        segments: Segments | None = None,
    ) -> None:
        self._before, self._segments = before, segments
        self.fixed = tuple(fixed)
        self.addresses = [arguments[position].data_ptr() for position in fixed]
        read = list(arguments) if segments is None else segments.begin(arguments)[0]
        others = [position for position in range(len(read)) if position not in {*fixed}]
        if any(overlaps(read[position]) for position in others):
            raise RuntimeError("an argument that would be copied overlaps itself")
        for position in others:
            read[position] = _maker(read[position])().copy_(read[position])
        with pool.lock:
            self._replay, captured = graphs.capture(lambda: tuple(call(list(read))), pool, generators)
        results = [_alone(each) if isinstance(each, torch.Tensor) else each for each in captured]
        self._copied_in = [(places, [read[place] for place in places]) for places in _together(others, read)]
        self._results: list[Any] = [None if isinstance(each, torch.Tensor) else each for each in results]
        tensors = [number for number, each in enumerate(results) if isinstance(each, torch.Tensor)]
        self._views = _views(tensors, results, read)
        tensors = [number for number in tensors if number not in self._views]
        own = [number for number in tensors if number < copied]
        if exact and (any(overlaps(results[number]) for number in own) or _share([results[number] for number in own])):
            raise RuntimeError("a result shares memory with another result or overlaps itself")
        self._copied_out = [(places, [results[place] for place in places]) for places in _together(own, results)]
        self._made = [[_maker(each) for each in inner] for _, inner in self._copied_out]
        lent = [number for number in tensors if number >= copied]
        self._lent = [(number, partial(_alone, results[number])) for number in lent]
        self._memory = _Lent([results[number] for number in tensors], [results[number] for number in lent])

    def free(self) -> bool:
        """Whether nobody refers to what an earlier replay lent: then the next one may write over it."""
        return self._memory.free()

    def lends(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in memory that a replay lent."""
        return tensor.untyped_storage().data_ptr() in self._memory.addresses

    def run(self, arguments: Sequence[Any]) -> list[Any]:
        """The results for `arguments`, of which the fixed ones lie where they did."""
        if self._segments is None:
            return self._run(arguments)
        given, early = self._segments.begin(arguments)
        return self._segments.end(arguments, early, self._run(given))

    def _run(self, arguments: Sequence[Any]) -> list[Any]:
        for places, inner in self._copied_in:
            _copy(inner, [arguments[place] for place in places])
        self._before()
        self._replay()
        results = [*self._results]
        for number, (position, view) in self._views.items():
            results[number] = view(arguments[position])
        for number, lent in self._lent:
            results[number] = lent()
        for (places, inner), makers in zip(self._copied_out, self._made, strict=True):
            outer = [make() for make in makers]
            _copy(outer, inner)
            for place, each in zip(places, outer, strict=True):
                results[place] = each
        return results


class _Lent:
    """Memory that is lent, and how often it is referred to where nobody but the graph does.

    Args:
        held: all tensors that the graph holds, each one once.
        lent: those of them that are lent.
    """

    def __init__(self, held: Sequence[torch.Tensor], lent: Sequence[torch.Tensor]) -> None:
        references: dict[int, int] = {}
        for each in held:
            key = each.untyped_storage()._cdata
            references[key] = references.get(key, 0) + 1
        self._storages = list({each.untyped_storage()._cdata: each.untyped_storage() for each in lent}.values())
        probe = torch.empty(1)
        storage = probe.untyped_storage()
        beside = _uses(storage._cdata) - 1  # by the storage's own Python object
        self._counts = [(each._cdata, references[each._cdata] + beside) for each in self._storages]
        self.addresses = frozenset(each.data_ptr() for each in self._storages if each.nbytes())

    def free(self) -> bool:
        return all(_uses(storage) <= count for storage, count in self._counts)


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor in the same memory, which autograd knows nothing of: of a view it would keep what that is a view of."""
    return reinterpret(tensor, tuple(tensor.shape), tensor.stride(), 0)


def _maker(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """What makes memory for a copy of `tensor`: with its strides, unless elements of it share memory."""
    strides = torch.empty(tensor.shape, device="meta").stride() if overlaps(tensor) else tensor.stride()
    return partial(tensor.new_empty_strided, tuple(tensor.shape), strides)


def _together(places: Iterable[int], tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Places of tensors that one call copies: those of one type, unless they are large.

    PyTorch's kernel for lists took some 0.3 ms longer for the results of a step of GPT-2 on an H200.
    """

    def kind(place: int) -> tuple[str, int]:
        tensor = tensors[place]
        return str(tensor.dtype), place if tensor.nbytes >= LARGE else -1

    return [list(group) for _, group in groupby(sorted(places, key=kind), kind)]


def _copy(outer: list[torch.Tensor], inner: list[torch.Tensor]) -> None:
    if len(outer) == 1:
        outer[0].copy_(inner[0])
    else:
        torch._foreach_copy_(outer, inner)


_View = tuple[int, Callable[[torch.Tensor], torch.Tensor]]


def _views(numbers: Iterable[int], results: Sequence[Any], read: Sequence[torch.Tensor]) -> dict[int, _View]:
    """By its number, of which argument a result is a view, and how it is made of that."""
    where = {each.untyped_storage().data_ptr(): position for position, each in enumerate(read) if each.numel()}
    found: dict[int, _View] = {}
    for number in numbers:
        result = results[number]
        position = where.get(result.untyped_storage().data_ptr()) if result.numel() else None
        if position is not None:
            found[number] = position, _view(result, read[position])
    return found


def _view(result: torch.Tensor, argument: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """What makes of a tensor what `result` is of `argument`."""
    shape, strides = tuple(result.shape), result.stride()
    behind = result.storage_offset() - argument.storage_offset()
    same = (shape, strides, behind, result.dtype) == (tuple(argument.shape), argument.stride(), 0, argument.dtype)
    if same:
        return lambda given: given
    if result.dtype != argument.dtype:
        raise RuntimeError("a result is an argument's memory as another type")
    return lambda given: given.as_strided(shape, strides, given.storage_offset() + behind)


def _share(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether two of these share memory."""
    places = [each.untyped_storage().data_ptr() for each in tensors if each.numel()]
    return len(places) > len(set(places))
