"""A convolution inside a kernel: its geometry, and the positions that read the same taps.

A result element o of one axis of a convolution reads input ``o * stride - padding + k * dilation`` for each tap k. In a
transposed convolution element ``o = q * stride + r`` reads input ``q + (r + padding - k * dilation) / stride`` for each tap
where that is whole: the elements of one *phase* r read the same taps, and each phase is a dense convolution.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, prod

from fusepass.codegen.ir.dtype import Precision

ROWS, DEPTH = 16, 8
"""Output and input channels of a slice of weights: what a tensor core takes of one kernel position at once."""

HALVES = 8
"""Halves of the widest copy: as many channels of a position lie together."""

MOST_REGISTER_STATIONARY = 112
"""Registers of a thread that weights may stay in."""

_LEAST_ACCESS = 8  # bytes that a thread loads at once
_MOST_CHANNELS = 8
_MOST_PADDED = 4 / 3  # channels with those that fill up chunks of halves, of those that are there
_MOST_REACHES = 2
_MOST_ROWS_HELD = 2  # times 16 output channels
_RUN = 4  # neighbouring taps, and runs of them, that a product without zeros takes
_MOST_RESULTS = 16  # for each position of the input
_MOST_POINTS = 64  # kernel positions along two axes
_MOST_SCATTERED = 16  # of transposed convolutions with a stride, whose phases have few taps each


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
class ScaledHalves:
    """The operands of a convolution as scaled halves (`passes.halves`), `Convolution.parts` of them for each number; or as they are, where
    they are halves.

    Attributes:
        source: buffer (samples, *spatial, *place); see `halves_of_place`.
        weight: buffer (out_channels, *kernel, *place).
        scales: buffers (samples, out_channels), with both of which a sum is multiplied to be a result; none where operands are not scaled.
    """

    source: str
    weight: str
    scales: tuple[str, ...]


@dataclass(frozen=True)
class ScaledWeights:
    """The weights of a convolution as scaled halves, where its kernel scales tiles of the input itself (`passes.packing`).

    Attributes:
        weight: as that of `ScaledHalves`.
        channels: buffer (in_channels,) of the exponents of input channels' scales.
        outs: buffer (out_channels,) of those of output channels.
        held: whether weights are in threads' registers; else both operands are in shared memory.
    """

    weight: str
    channels: str
    outs: str
    held: bool = False


@dataclass(frozen=True)
class Pooling:
    """The largest of a convolution's results at all phases of a position, which windows as large as the stride give.

    Attributes:
        bias: buffer (out_channels,), added to each result before; None where nothing is.
    """

    bias: str | None


@dataclass(frozen=True)
class Convolution:
    """What a kernel computes before its stores: a convolution without bias of two buffers, for each element of its rows.

    The kernel's rows are (sample, channel, *spatial); the one that it reduces over is its one column axis instead. Its
    expressions have the result as ``Stat(name, 0)``.

    Attributes:
        name: what stats call it.
        source: buffer of shape (samples, in_channels, *spatial).
        weight: buffer of shape (out_channels, in_channels / groups, *kernel), or (in_channels, out_channels / groups, *kernel) where
            `transposed`.
        stride, padding, dilation: one number per spatial axis.
        precision: of the products.
        warps: how many multiply together: 1, or 4 where the device has instructions for such groups (`DeviceFacts.warp_groups`).
        packed: buffer of `packed_shape` with the weights in slices, rounded as `precision` says; None where a kernel takes
            them as they are.
        halves: what is multiplied instead of `source` and `weight`, which say what is meant; None where nothing is.
        column: the dimension of the result that the kernel's column axis is, if it has one: 1, the channels, or the last.
        pooled: how the results of all phases become one, which then is the result of a position; None where each is one itself.
        groups: of neighbouring channels, each of which is a convolution of its own.
    """

    name: str
    source: str
    weight: str
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    precision: Precision = Precision.FLOAT32
    warps: int = 1
    packed: str | None = None
    halves: ScaledHalves | ScaledWeights | None = None
    column: int = 1
    pooled: Pooling | None = None
    groups: int = 1

    @property
    def reads(self) -> tuple[str, ...]:
        """The buffers that it reads."""
        halves: tuple[str, ...] = ()
        if isinstance(self.halves, ScaledWeights):
            halves = (self.halves.weight, self.halves.channels, self.halves.outs)
        elif self.halves is not None:
            halves = (self.halves.source, self.halves.weight, *self.halves.scales)
        bias = self.pooled.bias if self.pooled else None
        return (self.source, self.weight, *filter(None, [self.packed, bias]), *halves)

    @property
    def description(self) -> str:
        """It in words, for the text form of a program."""
        kind = "transposed convolution" if self.transposed else "convolution"
        geometry = f"stride {self.stride}, padding {self.padding}, dilation {self.dilation}"
        packed = f" packed as {self.packed}" if self.packed else ""
        halves = ""
        if self.halves is not None:
            source = f"{self.halves.source} " if isinstance(self.halves, ScaledHalves) else ""
            held = " in registers" if self.held else ""
            halves = f" of halves {source}by {self.halves.weight}{held}"
        bias = f" and {self.pooled.bias}" if self.pooled and self.pooled.bias else ""
        last = ", largest of all phases" if self.pooled else ""
        last += "" if self.column == 1 else f", columns along dimension {self.column}"
        last += "" if self.groups == 1 else f", {self.groups} groups"
        products = f"products{halves} in {self.precision.value}"
        return f"{kind} of {self.source} by {self.weight}{packed}{bias}, {geometry}, {products}{last}"

    @property
    def parts(self) -> int:
        """The numbers that tensor cores take for each weight: high and low part, or one; 0 where warps split it themselves."""
        return 0 if self.warps == 1 else 2 if self.precision is Precision.FLOAT32 else 1

    @property
    def held(self) -> bool:
        """Whether weights stay in registers; see `ScaledWeights`."""
        return isinstance(self.halves, ScaledWeights) and self.halves.held

    @property
    def step(self) -> tuple[int, ...]:
        """Input elements from one position to the next."""
        return (1,) * len(self.stride) if self.transposed else self.stride

    @property
    def spread(self) -> tuple[int, ...]:
        """Result elements from one position to the next."""
        return self.stride if self.transposed and self.pooled is None else (1,) * len(self.stride)

    def group_channels(self, weight: Sequence[int]) -> tuple[int, int]:
        """Output and input channels of a group, for a weight of that shape."""
        first, second, *_ = weight
        return (second, first // self.groups) if self.transposed else (first // self.groups, second)

    def packed_shape(self, weight: Sequence[int]) -> tuple[int, ...]:
        """The shape of a weight of that shape in slices: (sets of `ROWS` output channels, of `DEPTH` input channels, *kernel, and a slice).

        The sets of one group's output channels come after those of another. A slice is (8, 4, 2, 2): output channel ``a + 8 d`` and
        input channel ``b + 4 c`` of (a, b, c, d), so that a thread of a warp has its four side by side; see `multiply_tile` in
        ``fp_instructions.cuh``. With `parts` it is (parts, 2, 2, 8, 4): that part of output channel ``8 b + d`` and input channel
        ``4 c + e`` of (a, b, c, d, e), in blocks that groups of warps take from shared memory; see `tile_descriptor` in
        ``fp_wgmma.cuh``.
        """
        outs, ins = self.group_channels(weight)
        inside = (self.parts, 2, 2, ROWS // 2, DEPTH // 2) if self.parts else (ROWS // 2, DEPTH // 2, 2, 2)
        return (self.groups * ceil(outs / ROWS), ceil(ins / DEPTH), *weight[2:], *inside)

    def phases(self, kernel: Sequence[int], result: Sequence[int]) -> tuple[Phase, ...]:
        """The phases of a result with spatial sizes `result`, for spatial kernel sizes `kernel`."""
        counts = map(min, self.spread, result) if self.pooled is None else self.stride
        starts = itertools.product(*map(range, counts))
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


def has_few_results(results: int, kernel: Sequence[int], phases: Sequence[int]) -> bool:
    """Whether a convolution to so many channels may be plain arithmetic; `phases` are its strides where it is transposed, else 1.

    All of a position's results, and kernel positions along the last two axes, are written out.
    """
    few = results <= _MOST_CHANNELS and results * prod(phases) <= _MOST_RESULTS
    return few and prod(kernel[-2:]) <= _MOST_POINTS


def few_channels(channels: int, spread: Sequence[int]) -> bool:
    """Whether a convolution has so few input channels, of a group, that a block holds all of them with all their weights.

    Libraries lay convolutions out for many channels; see `Convolution.spread`.
    """
    return channels <= (_MOST_SCATTERED if max(spread) > 1 else _MOST_CHANNELS)


def few_halves(channels: int, step: Sequence[int]) -> bool:
    """Whether a convolution may multiply scaled halves that all lie in shared memory: few input channels, and neighbouring
    positions read neighbours; see `Convolution.step`.
    """
    return channels <= _MOST_SCATTERED and max(step) == 1


def holds_weights(anchor: Convolution, weight: Sequence[int]) -> bool:
    """Whether such a convolution, whose weight has that shape, may multiply halves with weights in registers, if nothing but what its results
    reduce to is stored: threads have those for the weights of 16 output channels, it has one phase, and taps are neighbours along the last axis.
    With more output channels, operands in shared memory take less time.
    """
    (outs, ins), kernel = anchor.group_channels(weight), weight[2:]
    if max(anchor.stride) > 1 or anchor.dilation[-1] > 1:
        return False
    counts = (ins, *kernel[:-1], ceil(kernel[-1] / _RUN))
    products = min(ceil(count / _RUN) * prod(counts) // count for count in counts)
    return outs <= ROWS * _MOST_ROWS_HELD and products * anchor.parts * 4 <= MOST_REGISTER_STATIONARY


def takes_single_positions(kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], groups: int) -> bool:
    """Whether a convolution, plain or transposed, has one group and takes each position by itself."""
    return max(kernel) == max(stride) == groups == 1 and not any(padding)


def is_plain_product(
    source: Sequence[int],
    kernel: Sequence[int],
    result: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    groups: int,
    transposed: bool,
) -> bool:
    """Whether a convolution is a product of its tensors: one group, and each position by itself, or the whole of an input or a result at
    once, as large as the kernel. Sizes are spatial ones.
    """
    if takes_single_positions(kernel, stride, padding, groups):
        return True
    one, all_ = (source, result) if transposed else (result, source)
    return groups == 1 == max(one) and not any(padding) and tuple(all_) == tuple(kernel)


def takes_output_tiles(anchor: Convolution, kernel: Sequence[int], step: int, nbytes: int) -> bool:
    """Whether the windows of a plain convolution lie side by side, without a border and in one group, and rows of each are as wide as
    accesses to memory should be at least: then they are rows of a matrix as they lie.

    Elements of the input have so many bytes, and neighbours along its last dimension are `step` elements apart.
    """
    side_by_side = tuple(kernel) == anchor.stride and not any(anchor.padding) and anchor.groups == 1
    dense = all(size == 1 or apart == 1 for size, apart in zip(kernel, anchor.dilation, strict=True))
    return not anchor.transposed and side_by_side and dense and step == 1 and kernel[-1] * nbytes % _LEAST_ACCESS == 0


def scales_tiles(kernel: Sequence[int]) -> bool:
    """Whether such a convolution of few channels makes halves of tiles of its input itself: its kernel reaches along two axes at most,
    or borders would be several times as large as tiles.
    """
    return sum(size > 1 for size in kernel) <= _MOST_REACHES


def tiled_halves(channels: int, step: Sequence[int]) -> bool:
    """Whether a convolution of many channels may do so, if a block has the room, instead of reading them chunk by chunk."""
    return fill_halves(channels) and max(step) == 1


def fill_halves(channels: int) -> bool:
    """Whether a convolution has input channels enough to be a product of halves that are read chunk by chunk, 8 channels of a position.

    With fewer, most of a tile of the input would be read once for each kernel position.
    """
    return channels > _MOST_SCATTERED and -(-channels // HALVES) * HALVES <= _MOST_PADDED * channels


def parts_apart(channels: int, parts: int) -> bool:
    """Whether both parts of numbers fill whole chunks of a place of `ScaledHalves`, or more than one."""
    return parts > 1 and channels > HALVES // parts


def halves_of_place(channels: int, parts: int) -> tuple[int, ...]:
    """The shape of the halves of one place of `ScaledHalves`: ([parts,] channels), these filled up to whole chunks in all."""
    multiple = HALVES // parts if channels <= HALVES // parts else HALVES
    filled = ceil(channels / multiple) * multiple
    return (parts, filled) if parts > 1 else (filled,)
