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
    assert isinstance(kernel.anchor, Convolution)
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
        blocks = self.plan.channel_blocks
        stride = self.plan.blocks // blocks
        double = self.plan.buffers == 2
        ahead = [
            *block(f"if ($number + {stride} < {self._tiles()})", [f"$fetch($number + {stride}, $next);"]),
            "fp::end_copies();",
            "fp::await_copies<1>();",
        ]
        now = ["$fetch($number, $tile);", "fp::end_copies();"]
        exchange = ["float* const $done = $tile;", "$tile = $next;", "$next = $done;"]
        loop = [
            *(ahead if double else [*now, "fp::await_copies<0>();"]),
            "__syncthreads();",
            *self._tile_place(),
            *self._multiply(),
            "__syncthreads();",
            *(exchange if double else []),
        ]
        body = [
            *self._shared(),
            "",
            *self._fetch_weights(),
            "",
            *self._fetch_tile(),
            "",
            f"int $number = {_quotient('int(blockIdx.x)', blocks)};",
            *(now if double else []),
            *block(f"for (; $number < {self._tiles()}; $number += {stride})", loop),
        ]
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
        staged = 16 * plan.staged_pitch
        yield f"float* $tile = reinterpret_cast<float*>($pool + {after_taps + 4 * WARPS * staged});"
        if plan.buffers == 2:
            yield f"float* $next = $tile + {self.source.shape[1] * plan.pitch};"
        yield "const int $lane = threadIdx.x % 32;"
        yield "const int $warp = threadIdx.x / 32;"
        yield f"float* const $room = reinterpret_cast<float*>($pool + {after_taps}) + $warp * {staged};"
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
        """How the input below a tile is fetched, for all channels."""
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
        source = f"{self.pointers[self.source.name]} + ($real ? $from + {self.index_type}($channel) * {strides[1]} : 0)"
        copy = f"fp::begin_copy($to + ($channel * {plan.pitch} + $i), {source}, $real);"
        lines += [
            f"const bool $real = {' && '.join(conditions)};",
            f"const {self.index_type} $from = {' + '.join(index)};",
            _UNROLL,
            *block(f"for (int $channel = 0; $channel < {shape[1]}; ++$channel)", [copy]),
        ]
        loop = block(f"for (int $i = threadIdx.x; $i < {elements}; $i += {plan.threads})", lines)
        yield "// begins to fetch the input below a tile, zeros where there is none"
        yield from block("const auto $fetch = [&](int $number, float* $to)", [*self._tile_place(), *loop])[:-1]
        yield "};"

    # ---- products

    def _multiply(self) -> Iterable[str]:
        plan = self.plan
        lines = [
            f"float $sums[{plan.pair}][{plan.rows}][{COLUMNS}][4] = {{}};",
            f"const float* const $mine = $tile + $lane / 4 * {self.anchor.step[-1]};",
            *_unrolled("$p", plan.pair, self._sum_up()),
            *self._epilogue(),
        ]
        if len(plan.phases) > 1:
            yield "#pragma unroll 1"
            yield from block(f"for (int $phase = 0; $phase < {len(plan.phases)}; $phase += {plan.pair})", lines)
        else:
            yield from lines

    def _sum_up(self) -> list[str]:
        """The products of one phase."""
        plan = self.plan
        first, last, count = "0", str(plan.steps[0]), str(self._counts()[0])
        lines = []
        if len(plan.phases) > 1:
            first, last, count = "$first", f"{self.steps_name}[$phase + $p + 1]", f"{self.counts_name}[$phase + $p]"
            lines.append(f"const int $first = {self.steps_name}[$phase + $p];")
        from_memory = ["$b[$n][0] = $near[$groups[$n]];", "$b[$n][1] = $far[$groups[$n]];"]
        one = [
            f"float $a[{plan.rows}][4], $b[{COLUMNS}][2];",
            f"fp::load_weights($a, $weights + $step * {plan.rows * 128} + $lane * 4);",
            f"const float* const $near = $mine + $taps[$step * {SLICE} + $lane % 4];",
            f"const float* const $far = $mine + $taps[$step * {SLICE} + $lane % 4 + 4];",
            *_unrolled("$n", COLUMNS, from_memory),
            "fp::multiply_slice($sums[$p], $a, $b);",
        ]
        begin = f"$weights + {first} * {plan.rows * 128}, $taps + {first} * {SLICE}"
        plain = f"fp::plain_sums($sums[$p], {begin}, {count}, $tile, $groups, {self.anchor.step[-1]});"
        lines += block(f"for (int $step = {first}; $step < {last}; ++$step)", one)
        return [*lines, f"if (!fp::all_finite($sums[$p])) {plain}"]

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
        """What the kernel's stores make of the sums: a thread takes neighbouring results, channel by channel."""
        plan, sizes = self.plan, [axis.size for axis in self.kernel.rows]
        column = "$lane" if plan.pair == 1 else f"($half * 32 + $lane) / {plan.pair}"
        coordinates = self._group_coordinates(f"($warp * {COLUMNS} + {column} / 8)")
        inner = f"{column} % 8"
        coordinates[-1] = inner if coordinates[-1] == "0" else f"{coordinates[-1]} + {inner}"
        starts, conditions, lines = self._phase_starts(), [], []
        for number, axis in enumerate(self.axes):
            position = f"($tile_{axis[1:]} * {plan.tile[number]} + {coordinates[number]})"
            spread = self.anchor.spread[number]
            at = position if spread == 1 else f"{position} * {spread} + {starts[number]}"
            lines.append(f"const {self.index_type} {axis} = {bare(at)};")
            conditions.append(f"{axis} < {sizes[2 + number]}")
        place = "$lane" if plan.pair == 1 else "$half * 32 + $lane"
        row = [
            "const int $channel = $first_channel + $m * 16 + $row;",
            f"const float $sum = $room[$row * {plan.staged_pitch} + {place}];",
            *self._stores(),
        ]
        if sizes[1] % 16:
            row[1:] = block(f"if ($channel < {sizes[1]})", row[1:])
        lines += block(f"if ({' && '.join(conditions)})", _unrolled("$row", 16, row))
        staging = [f"fp::stage<{plan.pair}, {plan.staged_pitch}>($room, $sums[$p][$m], $p);"]
        rows = [
            "__syncwarp();",
            *_unrolled("$p", plan.pair, staging),
            "__syncwarp();",
            *_unrolled("$half", plan.pair, lines),
        ]
        yield from _unrolled("$m", plan.rows, rows)

    def _phase_starts(self) -> list[str]:
        """The first result element of a phase, per axis."""
        starts, rest = [], "$phase"
        sizes = [axis.size for axis in self.kernel.rows[2:]]
        for spread, size in reversed(list(zip(self.anchor.spread, sizes, strict=True))):
            starts.append(_remainder(rest, min(spread, size)) if len(self.plan.phases) > 1 else "0")
            rest = _quotient(rest, min(spread, size))
        if self.plan.pair > 1:
            starts[0] = f"$lane % {self.plan.pair}"
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
    if count == 1:
        return [re.sub(re.escape(variable) + r"\b", "0", line) for line in lines]
    return [_UNROLL, *block(f"for (int {variable} = 0; {variable} < {count}; ++{variable})", lines)]


def _table(name: str, numbers: Sequence[int], per_line: int = 16) -> Iterable[str]:
    rows = [", ".join(map(str, numbers[i : i + per_line])) for i in range(0, len(numbers), per_line)]
    yield f"__constant__ int {name}[{len(numbers)}] = {{"
    yield from (f"    {row}," for row in rows)
    yield "};"
