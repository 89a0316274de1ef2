"""What dropout keeps, as a function of where an element stands in the stream of a CUDA generator.

PyTorch's kernel for dropout gives each element a place in that stream, by a rule that only depends on how many elements there are and on the
device. So a draw, which moves the generator on, is apart from the numbers, which any kernel that meets an element can make:
``fusepass::draw`` does the first, ``fusepass::kept`` is the second.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Any

import torch

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Expr, Op
from fusepass.codegen.ir.index import Index, linear
from fusepass.codegen.ir.random import OF_A_CALL, place
from fusepass.codegen.lowering.registry import Call, lowers
from fusepass.codegen.lowering.tensor import Coordinates, Tensor

aten = torch.ops.aten

Tell = Callable[[Sequence[int]], list[torch.Tensor]]

_library = torch.library.Library("fusepass", "FRAGMENT")
_library.define("draw(int[] counts, *, Device device) -> Tensor[]", tags=(torch.Tag.nondeterministic_seeded,))
_library.define(
    "kept(Tensor state, int[] size, int[] stride, float p, ScalarType dtype, int threads, int width) -> Tensor"
)


def draw(counts: Sequence[int], *, device: torch.device) -> list[torch.Tensor]:
    """Move the generator of `device` on by so many numbers, one count after the other: its seed and offset before each, as int64 [2].

    While a CUDA graph is captured the host does not know them. Then they are what `foretold` says, where that is in force, or random
    numbers themselves, new ones at each replay.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        tell: Tell | None = getattr(_here, "tell", None)
        return list(torch.randint(1 << 62, (len(counts), 2), device=device)) if tell is None else tell(counts)
    generator = default_generator(device)
    seed, offset = generator.initial_seed(), generator.get_offset()
    generator.set_offset(offset + sum(counts))
    note(offset, counts)
    return states_at(seed, offset, tuple(accumulate(counts[:-1], initial=0)), device)


def default_generator(device: torch.device) -> Any:
    """That of a CUDA device."""
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


@contextmanager
def foretold(tell: Tell) -> Iterator[None]:
    """Let the draws of this thread that a CUDA graph captures find what `tell` gives for their counts."""
    _here.tell = tell
    try:
        yield
    finally:
        _here.tell = None


@contextmanager
def noted() -> Iterator[list[tuple[int, Sequence[int]]]]:
    """The offset at which each draw of this thread finds the generator, and its counts."""
    notes: list[tuple[int, Sequence[int]]] = []
    _here.notes = notes
    try:
        yield notes
    finally:
        _here.notes = None


def note(offset: int, counts: Sequence[int]) -> None:
    """Tell `noted` of a draw."""
    notes = getattr(_here, "notes", None)
    if notes is not None:
        notes.append((offset, counts))


_here = threading.local()


def states_at(seed: int, offset: int, starts: tuple[int, ...], device: torch.device) -> list[torch.Tensor]:
    """The states of a generator so far behind `offset`: seed and offset, as int64 [2]."""
    first = torch.full((1,), words_of(seed, offset), dtype=torch.complex128, device=device).view(torch.int64)
    states = [first] if starts == (0,) else list((first + _behind(starts, device)).unbind())
    for state, start in zip(states, starts, strict=True):
        state.words = seed, offset + start  # type: ignore[attr-defined]
    return states


def words_of(seed: int, offset: int) -> complex:
    """Both words as a number of 128 bits, which one launch fills memory with."""
    return complex(*struct.unpack("<dd", struct.pack("<QQ", seed, offset)))


def _draw(counts: Sequence[int], *, device: torch.device) -> list[torch.Tensor]:
    """`draw` as an operator, whose results must not share memory."""
    states = draw(counts, device=device)
    return [state.clone() for state in states] if len(states) > 1 else states


def behind(starts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """What is added to a seed and offset for the states so far behind it."""
    return torch.tensor([(0, start) for start in starts], device=device)


_behind = lru_cache(behind)


def kept(
    state: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    p: float,
    dtype: torch.dtype,
    threads: int,
    width: int,
) -> torch.Tensor:
    """Which elements of a dense tensor dropout keeps: a bool tensor with that size and stride.

    Args:
        state: seed and offset, as `draw` gives them.
        p: the probability of an element to be dropped.
        dtype: of the tensor.
        threads: of PyTorch's kernel, all together.
        width: elements that each of its threads takes at a time.
    """
    places = place(torch.arange(prod(size), device=state.device), threads, width)
    seed, offset = state.unbind()
    below = uniform(seed, offset, *places).double() < share_kept(p, dtype)
    return below.as_strided(size, stride)


def uniform(
    seed: torch.Tensor, offset: torch.Tensor, sequence: torch.Tensor, call: torch.Tensor, which: torch.Tensor
) -> torch.Tensor:
    """Random numbers in (0, 1] as float32, by their places in the stream of a generator."""
    count = (offset >> 2 & (1 << 62) - 1) + call
    seed, count, sequence, which = torch.broadcast_tensors(seed, count, sequence, which)
    words = philox([count & _WORD, count >> 32, sequence, sequence * 0], [seed & _WORD, seed >> 32 & _WORD])
    return torch.stack(words).gather(0, which[None])[0].float() * 2.0**-32 + 2.0**-33


def kept_by_pytorch(
    state: torch.Tensor, size: Sequence[int], stride: Sequence[int], p: float, dtype: torch.dtype, *rule: int
) -> torch.Tensor:
    """`kept` by PyTorch's own kernel, for which the host waits for a state that it does not know; while a CUDA graph is captured, and on a CPU, by
    some 180 operators."""
    if not state.is_cuda or torch.cuda.is_current_stream_capturing():
        return kept(state, size, stride, p, dtype, *rule)
    generator = default_generator(state.device)
    if not hasattr(state, "words"):
        state.words = state.tolist()  # type: ignore[attr-defined]
    seed, offset = state.words  # type: ignore[attr-defined]
    before = generator.get_state()
    try:
        generator.manual_seed(seed)
        generator.set_offset(offset // OF_A_CALL * OF_A_CALL)
        ones = torch.empty_strided(size, stride, dtype=dtype, device=state.device).fill_(1)
        mask: torch.Tensor = aten.native_dropout.default(ones, p, True)[1]
        return mask
    finally:
        generator.set_state(before)


def _drawn(counts: Sequence[int], *, device: torch.device) -> list[torch.Tensor]:
    return [torch.empty(2, dtype=torch.int64, device=device) for _ in counts]


def _described(state: torch.Tensor, size: Sequence[int], stride: Sequence[int], *_: object) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=torch.bool, device=state.device)


_library.impl("draw", _draw, "CompositeExplicitAutograd")
_library.impl("kept", kept, "CompositeExplicitAutograd")
_library.impl("kept", _described, "Meta")
torch.library.register_fake("fusepass::draw", _drawn, lib=_library)


@lowers(torch.ops.fusepass.kept.default)
def _kept(
    call: Call, state: Tensor, size: Sequence[int], stride: Sequence[int], p: float, dtype: torch.dtype, *rule: int
) -> Tensor:
    builder = call.context.builder
    compared = DType.F64 if dtype is torch.float64 else DType.F32
    share = builder.const(share_kept(p, dtype), compared)
    threads_and_width = [builder.const(number, DType.I64) for number in rule]

    def at(c: Coordinates) -> Expr:
        words = [state.at((Index(number),)) for number in range(2)]
        element = builder.position(linear(c, stride))
        number = builder.apply(Op.RANDOM, *words, element, *threads_and_width, dtype=DType.F32)
        return builder.apply(Op.LT, builder.cast(number, compared), share, dtype=DType.BOOL)

    return call.context.tensor(size, DType.BOOL, at)


def share_kept(p: float, dtype: torch.dtype) -> float:
    """The probability of an element to be kept, as PyTorch's kernel has it: random numbers below it keep one."""
    share = 1.0 - p
    return share if dtype is torch.float64 else float(struct.unpack("f", struct.pack("f", share))[0])


_WORD = (1 << 32) - 1  # its bits


def philox(counter: list[torch.Tensor], key: list[torch.Tensor]) -> list[torch.Tensor]:
    """Philox 4x32 of 10 rounds (Salmon, Moraes, Dror and Shaw, 2011): four words, as int64, of four and two of them."""
    a, b, c, d = counter
    low, high = key
    for _ in range(10):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (second >> 32 & _WORD) ^ b ^ low, second & _WORD, (first >> 32 & _WORD) ^ d ^ high, first & _WORD
        low, high = low + 0x9E3779B9 & _WORD, high + 0xBB67AE85 & _WORD
    return [a, b, c, d]
