"""What writers of CUDA kernels with a convolution share: tiles of the input on their way in, results on their way out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from fusepass.codegen.ir.convolution import ROWS
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Expr, ReduceOp, Stat, walk
from fusepass.codegen.ir.index import contiguous_strides
from fusepass.codegen.ir.program import Buffer, Kernel, Program, Reduction, Store
from fusepass.codegen.render.cuda_partials import PositionStates
from fusepass.codegen.render.printer import Printer, Scope
from fusepass.codegen.render.spelling import C_TYPES, Identifiers, bare, block
from fusepass.codegen.schedule_convolution import ConvolutionSchedule
from fusepass.codegen.schedule_convolution.tiles import GROUP, anchor_of, dimensions

GROUP_SLICES = 2  # that a thread has on their way into the tensor core where four warps multiply together
AXES = ("$z", "$y", "$x")
UNROLL = "#pragma unroll"


@dataclass(frozen=True)
class ConvolutionText:
    """A kernel's constant tables, which stand before it, and the lines of its body."""

    tables: tuple[str, ...]
    body: tuple[str, ...]


@dataclass(frozen=True)
class Sums:
    """Where the writer of results finds them.

    Attributes:
        held: the array of a thread's sums of phase ``$p``, the tile of 16 positions ``$t`` and a place; where four warps
            multiply together.
        staging: the statement that lays the sums of phase ``$p`` and 16 channels, the ``$m``-th ones, out in ``$room``.
        rows: how many times 16 channels there are.
        covered: channels that all blocks together work on; those past the result's are not stored.
        group: the first of these groups in the tile.
        repair: lines before the results of a position are taken, of which ``$row`` says the channel.
        unroll: the pragma of the loop over channels.
    """

    held: str
    staging: str
    rows: int
    covered: int
    group: str
    repair: tuple[str, ...] = ()
    unroll: str = UNROLL


class ConvolutionWriter:
    """Lines of a kernel; ``$word`` in them stands for a C name that no buffer has."""

    def __init__(
        self,
        kernel: Kernel,
        program: Program,
        plan: ConvolutionSchedule,
        pointers: dict[str, str],
        names: Identifiers,
    ) -> None:
        self.kernel, self.anchor, self.program, self.pointers = kernel, anchor_of(kernel), program, pointers
        self.plan, self.on = plan, plan.on
        self.source, self.weight = program.buffer(self.anchor.source), program.buffer(self.anchor.weight)
        self.sizes = [axis.size for axis in dimensions(kernel)]
        self.axes = AXES[-len(self.on.tile) :]
        self.index_type = "int64_t" if self.on.wide else "int"
        self.printer = Printer(names, pointers, self.index_type)
        self.names = names
        self._locals: dict[str, str] = {}
        self.states: PositionStates | None = None
        if kernel.partials is not None:
            self.states = PositionStates(kernel, plan, self.tile_count, pointers, self.printer)

    def named(self, line: str) -> str:
        """`line` with a C name for each ``$word``."""

        def name(word: re.Match[str]) -> str:
            if word[1] not in self._locals:
                self._locals[word[1]] = self.names.exact(word[1])
            return self._locals[word[1]]

        return re.sub(r"\$(\w+)", name, line)

    # ---- tiles

    @property
    def tile_count(self) -> int:
        """Tiles of all samples."""
        return self.source.shape[0] * prod(self.on.tiles)

    def tile_place(self, number: str = "$number") -> Iterable[str]:
        """Which tile of which sample has this number."""
        rest = number
        for axis, count in reversed(list(zip(self.axes, self.on.tiles, strict=True))):
            yield f"const int $tile_{axis[1:]} = {remainder(rest, count)};"
            rest = quotient(rest, count)
        yield f"const {self.index_type} $sample = {rest};"

    def input_place(self, element: str) -> tuple[list[str], str, str]:
        """Where an element of a tile's input lies, or the first of as many as a copy brings: the lines that say so, the condition
        that it exists, its index in a channel.
        """
        shape, strides = self.source.shape, self.source.strides
        lines, conditions, index, rest = [], [], [f"$sample * {strides[0]}"], element
        for number in reversed(range(len(self.axes))):
            axis, extent, size = self.axes[number], self.on.extent[number], shape[2 + number]
            step, first = self.on.tile[number] * self.anchor.step[number], self.on.origin[number]
            each = self.on.vector if number == len(self.axes) - 1 else 1
            extent //= each
            here = remainder(rest, extent) if number else rest
            here = here if each == 1 or here == "0" else f"{here} * {each}"
            lines.append(f"const {self.index_type} {axis} = $tile_{axis[1:]} * {step} + {here}{plus(first)};")
            conditions.append(f"{axis} >= 0 && {axis} < {size}")
            index.append(f"{axis} * {strides[2 + number]}")
            rest = quotient(rest, extent)
        return lines, " && ".join(conditions), " + ".join(index)

    def copy_input(self, to: str, source: str, real: str) -> str:
        """Begins a copy of input elements to a place of the tile."""
        if self.on.vector == 1:
            return f"fp::begin_copy({to}, {source}, {real});"
        nbytes = 4 * self.on.vector
        return f"fp::begin_copy_bytes<{nbytes}>({to}, {source}, {real} ? {nbytes} : 0);"

    @property
    def copies(self) -> str:
        """The head of a loop over a thread's copies of one channel of a tile."""
        return f"for (int $i = threadIdx.x; $i < {self.on.elements // self.on.vector}; $i += {self.plan.threads})"

    def in_tile(self, channel: str) -> str:
        """Where the elements of copy ``$i`` lie in a tile, from its beginning."""
        return f"({channel} * {self.on.pitch} + $i{'' if self.on.vector == 1 else f' * {self.on.vector}'})"

    def round_in_tile(self, tile: str) -> str:
        """Rounds the elements of copy ``$i`` and ``$channel`` in place."""
        return f"fp::round_numbers<{self.on.vector}>({tile} + {self.in_tile('$channel')});"

    def from_origin(self, offset: Sequence[int]) -> int:
        """Where a tap lies in a channel of the tile, from the place of a position."""
        inside = contiguous_strides(self.on.extent)
        return dot(offset, inside) - dot(self.on.origin, inside)

    def group_coordinates(self, group: str) -> list[str]:
        """Where a group of 8 positions lies in the tile, per axis and in positions."""
        shape = (*self.on.tile[:-1], self.on.tile[-1] // GROUP)
        found, rest = [], group
        for number in reversed(range(len(shape))):
            here = remainder(rest, shape[number]) if number else rest
            found.append(f"{here} * {GROUP}" if number == len(shape) - 1 and here != "0" else here)
            rest = quotient(rest, shape[number])
        return found[::-1]

    def group_place(self, group: str) -> str:
        """Where the first position of a group lies in the tile of the input."""
        inside = contiguous_strides(self.on.extent)
        parts = [
            f"{at} * {stride * step}"
            for at, stride, step in zip(self.group_coordinates(group), inside, self.anchor.step, strict=True)
            if at != "0"
        ]
        return " + ".join(parts) or "0"

    # ---- sums

    def finite(self, sums: str, loops: Sequence[tuple[str, int]]) -> Iterable[str]:
        """``$broken``, for a warp: whether some of its sums in `sums`, which stands in `loops` of (variable, count), are not finite."""
        lines = [f"$broken = $broken || !fp::all_finite({sums});"]
        for variable, count in reversed(loops):
            lines = unrolled(variable, count, lines)
        yield "bool $broken = false;"
        yield from lines
        yield "$broken = __any_sync(0xffffffffu, $broken);"

    # ---- results

    def epilogue(self, sums: Sums) -> Iterable[str]:
        """What the kernel's expressions make of the sums: a thread takes neighbouring results, channel by channel."""
        if self.kernel.is_pointwise:
            staged = list(self.over_channels(sums, self._stores(), sums.unroll))
            if self.on.warps == 1 or self.states is not None:
                yield from staged
                return
            if sums.repair:
                yield from block("if ($broken)", staged)[:-1]
                yield "} else {"
                yield from block("", self._from_registers(sums))[1:]
                return
            yield from self._from_registers(sums)
            return
        yield from self.reductions(sums)

    def over_channels(self, sums: Sums, lines: Sequence[str], unroll: str, ahead: Sequence[str] = ()) -> Iterable[str]:
        """`lines` for each result, ``$sum``, at ``$channel`` and the spatial axes; `ahead` before each position's channels."""
        on = self.on
        place = "$lane" if on.pair == 1 else "$half * 32 + $lane"
        row = [
            f"const int $channel = $first_channel + $m * {ROWS} + $row;",
            f"const float $sum = $room[$row * {on.staged_pitch} + {place}];",
            *lines,
        ]
        if self.sizes[1] != sums.covered:
            row[1:] = block(f"if ($channel < {self.sizes[1]})", row[1:])
        taken, row = ([line.replace("$place", place) for line in text] for text in (sums.repair, row))
        staged = ["__syncwarp();", *unrolled("$p", on.pair, [sums.staging]), "__syncwarp();"]
        positions = self.over_positions(sums, [*taken, *ahead, *unrolled("$row", ROWS, row, unroll)])
        yield from unrolled("$m", sums.rows, [*staged, *positions, *(self.states.add() if self.states else ())])

    def _from_registers(self, sums: Sums) -> list[str]:
        """The stores of sums as a thread holds them: 8 neighbouring positions of a channel lie side by side in a warp."""
        body = [f"const float $sum = {sums.held}[$j * 4 + $u * 2 + $b];", *self._stores()]
        spread, inner = self.on.pair, "$lane / 4"
        places, inside = self._position(f"({sums.group} + $t * 2 + $u)", inner, "$p")
        element = [*places, *block(f"if ({inside})", body)]
        positions = unrolled("$t", 2, unrolled("$u", 2, unrolled("$p", spread, element)))
        channel = ["const int $channel = $first_channel + $j * 8 + $lane % 4 * 2 + $b;", *positions]
        if self.sizes[1] != sums.covered:
            channel[1:] = block(f"if ($channel < {self.sizes[1]})", positions)
        return unrolled("$j", 2 * sums.rows, unrolled("$b", 2, channel))

    def over_positions(self, sums: Sums, lines: Sequence[str]) -> list[str]:
        """`lines` for each position of a thread, where it is one of the result."""
        column = "$lane" if self.on.pair == 1 else f"($half * 32 + $lane) / {self.on.pair}"
        places, inside = self._position(f"({sums.group} + {column} / 8)", f"{column} % 8", f"$lane % {self.on.pair}")
        if self.states is None:
            return unrolled("$half", self.on.pair, [*places, *block(f"if ({inside})", lines)])
        places += [f"const bool $is_inside = {inside};", "$inside[$half] = __ballot_sync(0xffffffffu, $is_inside);"]
        taken = unrolled("$half", self.on.pair, [*places, *block("if ($is_inside)", lines)])
        return [f"unsigned $inside[{self.on.pair}];", *taken]

    # ---- reductions over channels

    def reductions(self, sums: Sums) -> Iterable[str]:
        """The kernel's sweeps over channels and its stores: a thread has all channels of its positions, one after another."""
        kernel = self.kernel
        self._states: dict[str, str] = {}
        for sweep in kernel.sweeps:
            for reduction in sweep:
                kind = f"fp::{reduction.op.value}<{C_TYPES[reduction.dtype]}>"
                self._states[reduction.name] = self.names.numbered(f"{reduction.name}_state")
                yield f"{kind} {self._states[reduction.name]}[{self.on.pair}];"
            yield from _apart(self._phase(sums, [value for each in sweep for value in each.values], sweep, ()))
        if kernel.row_stores:
            scope = self._row_scope([store.value for store in kernel.row_stores])
            for store in kernel.row_stores:
                scope.lines.append(self._store(scope, store))
            yield from _apart(self.over_positions(sums, scope.lines))
        if kernel.stores:
            yield from _apart(self._phase(sums, [store.value for store in kernel.stores], (), kernel.stores))

    def _phase(
        self, sums: Sums, roots: Sequence[Expr], sweep: Sequence[Reduction], stores: Sequence[Store]
    ) -> Iterable[str]:
        outer = self._row_scope(roots)
        inner = outer.child()
        inner.define_axis(self.kernel.cols[0], "$channel")
        for node in walk(*roots):
            if isinstance(node, Stat) and node.reduction == self.anchor.name:
                inner.bind(node, "$sum")
        for reduction in sweep:
            values = ", ".join(self._operand(inner, reduction, value) for value in reduction.values)
            inner.lines.append(f"{self._states[reduction.name]}[$half].push({values});")
        inner.lines += [self._store(inner, store) for store in stores]
        yield from self.over_channels(sums, inner.lines, sums.unroll, outer.lines)

    def _row_scope(self, roots: Sequence[Expr]) -> Scope:
        """What is the same for all channels of a position."""
        scope = Scope(self.printer)
        for axis, text in zip(self.kernel.rows, ("$sample", *self.axes), strict=True):
            scope.define_axis(axis, text)
        for node in walk(*roots):
            if isinstance(node, Stat) and node.reduction in self._states:
                scope.bind(node, f"{self._states[node.reduction]}[$half].part<{node.part}>()")
        self.printer.expect(roots)
        return scope

    def _operand(self, scope: Scope, reduction: Reduction, value: Expr) -> str:
        positional = reduction.op in (ReduceOp.ARGMAX, ReduceOp.ARGMIN) and value is reduction.values[1]
        text, wanted = bare(scope.value(value)), DType.I64 if positional else reduction.dtype
        return text if value.dtype is wanted else f"fp::cast<{C_TYPES[wanted]}>({text})"

    # ---- where results go

    def _position(self, group: str, inner: str, half: str) -> tuple[list[str], str]:
        """The coordinates of a result, and the condition that it exists.

        It is at place `inner` of `group`, and of a pair of phases it belongs to the one whose number is `half`.
        """
        on, sizes = self.on, self.sizes
        coordinates = self.group_coordinates(group)
        coordinates[-1] = inner if coordinates[-1] == "0" else f"{coordinates[-1]} + {inner}"
        starts, conditions, lines = self._phase_starts(half), [], []
        for number, axis in enumerate(self.axes):
            position = f"($tile_{axis[1:]} * {on.tile[number]} + {coordinates[number]})"
            spread = self.anchor.spread[number]
            at = position if spread == 1 else f"{position} * {spread} + {starts[number]}"
            lines.append(f"const {self.index_type} {axis} = {bare(at)};")
            conditions.append(f"{axis} < {sizes[2 + number]}")
        return lines, " && ".join(conditions)

    def _phase_starts(self, half: str) -> list[str]:
        """The first result element of a phase, per axis."""
        starts, rest = [], "$phase"
        for spread, size in reversed(list(zip(self.anchor.spread, self.sizes[2:], strict=True))):
            starts.append(remainder(rest, min(spread, size)) if len(self.on.phases) > 1 else "0")
            rest = quotient(rest, min(spread, size))
        if self.on.pair > 1:
            starts[0] = half
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
            scope.lines.append(self._store(scope, store))
        if self.kernel.partials is not None:
            value = bare(scope.value(self.kernel.partials.value))
            scope.lines.append(f"$room[$row * {self.on.staged_pitch} + $place] = {value};")
        return scope.lines

    def _store(self, scope: Scope, store: Store) -> str:
        buffer: Buffer = self.program.buffer(store.buffer)
        value = bare(scope.value(store.value))
        if store.value.dtype is not buffer.dtype:
            value = f"fp::cast<{C_TYPES[buffer.dtype]}>({value})"
        return f"{self.pointers[store.buffer]}[{scope.index(store.index)}] = {value};"


def _apart(lines: Iterable[str]) -> list[str]:
    """`lines` with names of their own."""
    return ["{", *block("", lines)[1:]]


def dot(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(x * y for x, y in zip(a, b, strict=True))


def plus(number: int) -> str:
    return f" {'-' if number < 0 else '+'} {abs(number)}" if number else ""


def quotient(text: str, divisor: int) -> str:
    """``text / divisor`` for a number that is never negative."""
    return text if divisor == 1 else f"{text} / {divisor}"


def remainder(text: str, divisor: int) -> str:
    return "0" if divisor == 1 else f"{text} % {divisor}"


def unrolled(variable: str, count: int, lines: Sequence[str], pragma: str = UNROLL) -> list[str]:
    """A loop over `lines` with a pragma; the lines for 0 where there is nothing more."""
    if count == 1:
        return [re.sub(re.escape(variable) + r"\b", "0", line) for line in lines]
    return [pragma, *block(f"for (int {variable} = 0; {variable} < {count}; ++{variable})", lines)]


def table(name: str, numbers: Sequence[int], per_line: int = 16) -> Iterable[str]:
    rows = [", ".join(map(str, numbers[i : i + per_line])) for i in range(0, len(numbers), per_line)]
    yield f"__constant__ int {name}[{len(numbers)}] = {{"
    yield from (f"    {row}," for row in rows)
    yield "};"
