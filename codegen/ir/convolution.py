"""A convolution inside a kernel: its geometry, and the positions that read the same taps.

A result element o of one axis of a convolution reads input ``o * stride - padding + k * dilation`` for each tap k. In a
transposed convolution element ``o = q * stride + r`` reads input ``q + (r + padding - k * dilation) / stride`` for each tap
where that is whole: the elements of one *phase* r read the same taps, and each phase is a dense convolution.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


class Precision(enum.Enum):
    """In what the products of float32 numbers are computed."""

    FLOAT32 = "float32"  # as exact as float32 arithmetic
    TF32 = "TF32"  # of operands rounded to 10 bits of mantissa, to nearest


@dataclass(frozen=True)
class Tap:
    """Kernel position `place` reads the input at ``position * step + offset``."""

    place: tuple[int, ...]
    offset: tuple[int, ...]


@dataclass(frozen=True)
class Phase:
    """The result's elements ``position * spread + start``, which read the same `taps`."""

    start: tuple[int, ...]
    taps: tuple[Tap, ...]


@dataclass(frozen=True)
class Convolution:
    """What a kernel computes before its stores: a convolution without bias of two buffers, for each element of its rows.

    The kernel's rows are (sample, channel, *spatial); its expressions have the result as ``Stat(name, 0)``.

    Attributes:
        name: what stats call it.
        source: buffer of shape (samples, in_channels, *spatial).
        weight: buffer of shape (out_channels, in_channels, *kernel); the first two exchanged where `transposed`.
        stride, padding, dilation: one number per spatial axis.
    """

    name: str
    source: str
    weight: str
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool

    @property
    def reads(self) -> tuple[str, ...]:
        """The buffers that it reads."""
        return self.source, self.weight

    @property
    def description(self) -> str:
        """It in words, for the text form of a program."""
        kind = "transposed convolution" if self.transposed else "convolution"
        geometry = f"stride {self.stride}, padding {self.padding}, dilation {self.dilation}"
        return f"{kind} of {self.source} by {self.weight}, {geometry}"

    @property
    def step(self) -> tuple[int, ...]:
        """Input elements from one position to the next."""
        return (1,) * len(self.stride) if self.transposed else self.stride

    @property
    def spread(self) -> tuple[int, ...]:
        """Result elements from one position to the next."""
        return self.stride if self.transposed else (1,) * len(self.stride)

    def phases(self, kernel: Sequence[int], result: Sequence[int]) -> tuple[Phase, ...]:
        """The phases of a result with spatial sizes `result`, for spatial kernel sizes `kernel`."""
        starts = itertools.product(*map(range, map(min, self.spread, result)))
        return tuple(Phase(start, tuple(self._taps(start, kernel))) for start in starts)

    def _taps(self, start: tuple[int, ...], kernel: Sequence[int]) -> Iterator[Tap]:
        for place in itertools.product(*map(range, kernel)):
            reach = [k * d for k, d in zip(place, self.dilation, strict=True)]
            if not self.transposed:
                yield Tap(place, tuple(r - p for r, p in zip(reach, self.padding, strict=True)))
                continue
            over = [r + p - k for r, p, k in zip(start, self.padding, reach, strict=True)]
            if all(o % s == 0 for o, s in zip(over, self.stride, strict=True)):
                yield Tap(place, tuple(o // s for o, s in zip(over, self.stride, strict=True)))
