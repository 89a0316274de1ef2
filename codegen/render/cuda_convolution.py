"""Writes the body of a CUDA kernel whose anchor is a convolution; `codegen.schedule_convolution` says how it is laid out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from fusepass.codegen.ir.convolution import Convolution
from fusepass.codegen.ir.expr import Stat, walk
from fusepass.codegen.ir.index import contiguous_strides
from fusepass.codegen.ir.program import Buffer, Kernel, Program
from fusepass.codegen.render.printer import Printer, Scope
from fusepass.codegen.render.spelling import C_TYPES, Identifiers, bare, block
from fusepass.codegen.schedule_convolution import (
    COLUMNS,
    SLICE,
    STAGED,
    WARPS,
    ConvolutionSchedule,
    first_steps,
    padded_taps,
)

_AXES = ("$z", "$y", "$x")
_UNROLL = "#pragma unroll"


@dataclass(frozen=True)
class ConvolutionText:
    """A kernel's constant tables, which stand before it, and the lines of its body."""

    tables: tuple[str, ...]
    body: tuple[str, ...]


def convolution_text(
    kernel: Kernel, program: Program, plan: ConvolutionSchedule, pointers: dict[str, str], names: Identifiers
) -> ConvolutionText:
    """The text of `kernel`; `pointers` names its buffers, `names` knows the identifiers that are taken."""
    assert kernel.anchor is not None
    return _Writer(kernel, kernel.anchor, program, plan, pointers, names).write()


class _Writer:
    def __init__(
        self,
        kernel: Kernel,
        anchor: Convolution,
        program: Program,
        plan: ConvolutionSchedule,
        pointers: dict[str, str],
        names: Identifiers,
    ) -> None:
        self.kernel, self.anchor, self.program, self.plan, self.pointers = kernel, anchor, program, plan, pointers
        self.source, self.weight = program.buffer(anchor.source), program.buffer(anchor.weight)
        self.axes = _AXES[-len(plan.tile) :]
        self.index_type = "int64_t" if plan.wide else "int"
        self.printer = Printer(names, pointers, self.index_type)
        self.taps_name, self.weights_name, self.steps_name, self.counts_name = (
            names.exact(f"{kernel.name}_{what}") for what in ("taps", "weights_from", "first_step", "tap_count")
        )
        self.locals: dict[str, str] = {}  # C names of what the text below calls $word
        self.names = names

    def write(self) -> ConvolutionText:
        body = [*self._shared(), "", *self._fetch_weights(), ""]
        inner = [
            *self._tile_place(),
            "__syncthreads();",
            *self._fetch_tile(),
            "__syncthreads();",
            "",
            *self._multiply(),
        ]
        blocks = self.plan.channel_blocks
        head = f"for (int $number = {_quotient('int(blockIdx.x)', blocks)}; $number < {self._tiles()}; "
        body += block(f"{head}$number += {self.plan.blocks // blocks})", inner)
        return ConvolutionText(tuple(self._tables()), tuple(map(self._named, body)))

    def _named(self, line: str) -> str:
        """`line` with a C name for each $word, one that no buffer has."""

        def name(word: re.Match[str]) -> str:
            if word[1] not in self.locals:
                self.locals[word[1]] = self.names.exact(word[1])
            return self.locals[word[1]]

        return re.sub(r"\$(\w+)", name, line)

    # ---- tables

    def _tables(self) -> Iterable[str]:
        places = padded_taps(self.plan, self.source.shape[1])
        inside = contiguous_strides(self.plan.extent)
        taps, weights = [], []
        across = 0 if self.anchor.transposed else 1  # the weight's dimension of input channels
        for channel, phase, number in places:
            if phase is None:
                taps.append(0)  # any place will do: its weight is zero
                weights.append(-1)
                continue
            tap = phase.taps[number]
            from_origin = [offset - first for offset, first in zip(tap.offset, self.plan.origin, strict=True)]
            taps.append(channel * self.plan.pitch + _dot(from_origin, inside))
            weights.append(channel * self.weight.strides[across] + _dot(tap.place, self.weight.strides[2:]))
        yield f"// For each tap of {self.anchor.name}, in slices of {SLICE}: its place in a tile of the input."
        yield from _table(self.taps_name, taps)
        yield "// Its place among the weights of an output channel; -1 where a slice is filled up."
        yield from _table(self.weights_name, weights)
        if len(self.plan.phases) > 1:
            yield "// The first slice of each phase, and the end of the last; the taps of each phase."
            yield from _table(self.steps_name, first_steps(self.plan.steps))
            yield from _table(self.counts_name, self._counts())

    def _counts(self) -> list[int]:
        return [len(phase.taps) * self.source.shape[1] for phase in self.plan.phases]

    # ---- what a block fetches

    def _shared(self) -> Iterable[str]:
        steps, plan = sum(self.plan.steps), self.plan
        after_weights = 4 * steps * plan.rows * 128
        yield "extern __shared__ __align__(16) unsigned char $pool[];"
        yield "float* const $weights = reinterpret_cast<float*>($pool);"
        yield f"int* const $taps = reinterpret_cast<int*>($pool + {after_weights});"
        after_taps = after_weights + 4 * SLICE * steps
        yield f"float* const $tile = reinterpret_cast<float*>($pool + {after_taps + 4 * WARPS * STAGED});"
        yield "const int $lane = threadIdx.x % 32;"
        yield "const int $warp = threadIdx.x / 32;"
        yield f"float* const $room = reinterpret_cast<float*>($pool + {after_taps}) + $warp * {STAGED};"
        yield "// where the columns of this warp begin in the tile, 8 positions each"
        yield f"int $groups[{COLUMNS}];"
        yield from _unrolled("$n", COLUMNS, [f"$groups[$n] = {self._group_place('$n')};"])
        first = f"int(blockIdx.x) % {plan.channel_blocks} * {16 * plan.rows}" if plan.channel_blocks > 1 else "0"
        yield f"const int $first_channel = {first};"

    def _fetch_weights(self) -> Iterable[str]:
        """Weights in the order in which the threads of a warp take them."""
        plan, steps = self.plan, sum(self.plan.steps)
        channels, along = self.kernel.rows[1].size, self.weight.strides[1 if self.anchor.transposed else 0]
        yield "// weights and taps, as the threads of a warp take them"
        yield from block(
            f"for (int $i = threadIdx.x; $i < {steps * plan.rows * 128}; $i += {plan.threads})",
            [
                "const int $thread = $i / 4 % 32;",
                f"const int $channel = $first_channel + $i / 128 % {plan.rows} * 16 + $thread / 4 + $i % 2 * 8;",
                f"const int $from = {self.weights_name}[$i / {128 * plan.rows} * 8 + $thread % 4 + $i / 2 % 2 * 4];",
                f"const bool $real = $from >= 0 && $channel < {channels};",
                f"$weights[$i] = $real ? {self.pointers[self.weight.name]}[$from + $channel * {along}] : 0.0f;",
            ],
        )
        yield f"for (int $i = threadIdx.x; $i < {steps * SLICE}; $i += {plan.threads}) $taps[$i] = {self.taps_name}[$i];"

    def _tiles(self) -> int:
        return self.source.shape[0] * prod(self.plan.tiles)

    def _tile_place(self) -> Iterable[str]:
        rest = "$number"
        for axis, count in reversed(list(zip(self.axes, self.plan.tiles, strict=True))):
            yield f"const int $tile_{axis[1:]} = {_remainder(rest, count)};"
            rest = _quotient(rest, count)
        yield f"const {self.index_type} $sample = {rest};"

    def _fetch_tile(self) -> Iterable[str]:
        """The input below the tile for all channels; zeros where there is none."""
        plan, shape, strides = self.plan, self.source.shape, self.source.strides
        elements, rest = prod(plan.extent), "$i"
        lines, conditions, index = [], [], [f"$sample * {strides[0]}"]
        for number in reversed(range(len(self.axes))):
            axis, extent, size = self.axes[number], plan.extent[number], shape[2 + number]
            step, first = plan.tile[number] * self.anchor.step[number], plan.origin[number]
            here = _remainder(rest, extent) if number else rest
            lines.append(f"const {self.index_type} {axis} = $tile_{axis[1:]} * {step} + {here}{_plus(first)};")
            conditions.append(f"{axis} >= 0 && {axis} < {size}")
            index.append(f"{axis} * {strides[2 + number]}")
            rest = _quotient(rest, extent)
        source = f"{self.pointers[self.source.name]}[$from + {self.index_type}($channel) * {strides[1]}]"
        fetch = f"$tile[$channel * {plan.pitch} + $i] = $inside ? {source} : 0.0f;"
        lines += [
            f"const bool $inside = {' && '.join(conditions)};",
            f"const {self.index_type} $from = {' + '.join(index)};",
            _UNROLL,
            *block(f"for (int $channel = 0; $channel < {shape[1]}; ++$channel)", [fetch]),
        ]
        yield "// the input below this tile"
        yield from block(f"for (int $i = threadIdx.x; $i < {elements}; $i += {plan.threads})", lines)

    # ---- products

    def _multiply(self) -> Iterable[str]:
        plan = self.plan
        several = len(plan.phases) > 1
        first = f"{self.steps_name}[$phase]" if several else "0"
        last = f"{self.steps_name}[$phase + 1]" if several else str(plan.steps[0])
        along = f"$lane / 4 * {self.anchor.step[-1]}"
        slice_lines = [
            f"float $a[{plan.rows}][4], $b[{COLUMNS}][2];",
            f"fp::load_weights($a, $weights + $step * {plan.rows * 128} + $lane * 4);",
            f"const float* const $near = $mine + $taps[$step * {SLICE} + $lane % 4];",
            f"const float* const $far = $mine + $taps[$step * {SLICE} + $lane % 4 + 4];",
            *_unrolled(
                "$n",
                COLUMNS,
                ["$b[$n][0] = $near[$groups[$n]];", "$b[$n][1] = $far[$groups[$n]];"],
            ),
            "fp::multiply_slice($sums, $a, $b);",
        ]
        count = f"{self.counts_name}[$phase]" if several else str(self._counts()[0])
        plain = (
            f"fp::plain_sums($sums, $weights + ({first}) * {plan.rows * 128}, $taps + ({first}) * {SLICE}, {count}, "
        )
        lines = [
            f"float $sums[{plan.rows}][{COLUMNS}][4] = {{}};",
            f"const float* const $mine = $tile + {along};",
            *block(f"for (int $step = {first}; $step < {last}; ++$step)", slice_lines),
            f"if (!fp::all_finite($sums)) {plain}$tile, $groups, {self.anchor.step[-1]});",
            *self._epilogue(),
        ]
        if several:
            yield "#pragma unroll 1"
            yield from block(f"for (int $phase = 0; $phase < {len(plan.phases)}; ++$phase)", lines)
        else:
            yield from lines

    def _group_coordinates(self, group: str) -> list[str]:
        """Where a group of 8 positions lies in the tile, per axis and in positions."""
        shape = (*self.plan.tile[:-1], self.plan.tile[-1] // 8)
        found, rest = [], group
        for number in reversed(range(len(shape))):
            here = _remainder(rest, shape[number]) if number else rest
            found.append(f"{here} * 8" if number == len(shape) - 1 and here != "0" else here)
            rest = _quotient(rest, shape[number])
        return found[::-1]

    def _group_place(self, column: str) -> str:
        """Where the first position of a warp's column lies in the tile of the input."""
        inside = contiguous_strides(self.plan.extent)
        coordinates = self._group_coordinates(f"($warp * {COLUMNS} + {column})")
        parts = [
            f"{at} * {stride * step}"
            for at, stride, step in zip(coordinates, inside, self.anchor.step, strict=True)
            if at != "0"
        ]
        return " + ".join(parts) or "0"

    # ---- results

    def _epilogue(self) -> Iterable[str]:
        """What the kernel's stores make of the sums: each thread takes one position, channel by channel."""
        sizes = [axis.size for axis in self.kernel.rows]
        coordinates = self._group_coordinates(f"($warp * {COLUMNS} + $lane / 8)")
        coordinates[-1] = "$lane % 8" if coordinates[-1] == "0" else f"{coordinates[-1]} + $lane % 8"
        starts, conditions = self._phase_starts(), []
        for number, axis in enumerate(self.axes):
            position = f"($tile_{axis[1:]} * {self.plan.tile[number]} + {coordinates[number]})"
            spread = self.anchor.spread[number]
            at = position if spread == 1 else f"{position} * {spread} + {starts[number]}"
            yield f"const {self.index_type} {axis} = {bare(at)};"
            conditions.append(f"{axis} < {sizes[2 + number]}")
        yield f"const bool $real = {' && '.join(conditions)};"
        row = [
            "const int $channel = $first_channel + $m * 16 + $row;",
            "const float $sum = $room[$row * fp::staged_pitch + $lane];",
            *self._stores(),
        ]
        if sizes[1] % 16:
            row[1:] = block(f"if ($channel < {sizes[1]})", row[1:])
        rows = [
            "__syncwarp();",
            "fp::stage($room, $sums[$m]);",
            "__syncwarp();",
            *block("if ($real)", _unrolled("$row", 16, row)),
        ]
        yield from _unrolled("$m", self.plan.rows, rows)

    def _phase_starts(self) -> list[str]:
        """The first result element of a phase, per axis."""
        starts, rest = [], "$phase"
        sizes = [axis.size for axis in self.kernel.rows[2:]]
        for spread, size in reversed(list(zip(self.anchor.spread, sizes, strict=True))):
            starts.append(_remainder(rest, min(spread, size)) if len(self.plan.phases) > 1 else "0")
            rest = _quotient(rest, min(spread, size))
        return starts[::-1]

    def _stores(self) -> list[str]:
        scope = Scope(self.printer)
        for axis, text in zip(self.kernel.rows, ("$sample", "$channel", *self.axes), strict=True):
            scope.define_axis(axis, text)
        for node in walk(*self.kernel.roots):
            if isinstance(node, Stat):
                scope.bind(node, "$sum")
        self.printer.expect(self.kernel.roots)
        for store in self.kernel.stores:
            buffer: Buffer = self.program.buffer(store.buffer)
            value = bare(scope.value(store.value))
            if store.value.dtype is not buffer.dtype:
                value = f"fp::cast<{C_TYPES[buffer.dtype]}>({value})"
            scope.lines.append(f"{self.pointers[store.buffer]}[{scope.index(store.index)}] = {value};")
        return scope.lines


def _dot(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _plus(number: int) -> str:
    return f" {'-' if number < 0 else '+'} {abs(number)}" if number else ""


def _quotient(text: str, divisor: int) -> str:
    """``text / divisor`` for a number that is never negative."""
    return text if divisor == 1 else f"{text} / {divisor}"


def _remainder(text: str, divisor: int) -> str:
    return "0" if divisor == 1 else f"{text} % {divisor}"


def _unrolled(variable: str, count: int, lines: Sequence[str]) -> list[str]:
    return [_UNROLL, *block(f"for (int {variable} = 0; {variable} < {count}; ++{variable})", lines)]


def _table(name: str, numbers: Sequence[int], per_line: int = 16) -> Iterable[str]:
    rows = [", ".join(map(str, numbers[i : i + per_line])) for i in range(0, len(numbers), per_line)]
    yield f"__constant__ int {name}[{len(numbers)}] = {{"
    yield from (f"    {row}," for row in rows)
    yield "};"
