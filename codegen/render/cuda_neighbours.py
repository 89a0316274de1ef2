"""Writes the results of a convolution's kernel as vectors: a thread takes neighbours of a row out of shared memory, and stores them at once."""

from __future__ import annotations

from collections.abc import Iterable

from fusepass.codegen.ir.convolution import ROWS
from fusepass.codegen.ir.expr import Stat, walk
from fusepass.codegen.render.cuda_convolution import ConvolutionWriter, Sums
from fusepass.codegen.render.cuda_input import unrolled
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import C_TYPES, bare, block


def store_neighbours(writer: ConvolutionWriter, sums: Sums, width: int) -> Iterable[str]:
    """What `ConvolutionWriter.epilogue` gives, `width` neighbours at a time."""
    on = writer.on
    lanes = 32 * on.pair // width  # of a row
    together = 32 // lanes  # rows
    column, row = (f"$lane % {lanes}", f"$step * {together} + $lane / {lanes}") if together > 1 else ("$lane", "$step")
    places, inside = writer.position(sums.group, f"{column} * {width}", "$first_x", "0")
    lines = [
        f"const int $row = {row};",
        f"const int $channel = $first_channel + $m * {ROWS} + $row;",
        *_row(writer, f"$room + $row * {on.staged_pitch} + {column} * {width}", width, writer.sizes[1] != sums.covered),
    ]
    staged = ["__syncwarp();", *sums.laid_out(on.pair), "__syncwarp();"]
    if sums.repair:
        here = writer.over_positions(sums, [line.replace("$place", writer.staged_place) for line in sums.repair])
        staged += block("if ($broken)", [*here, "__syncwarp();"])
    stored = block(f"if ({inside})", unrolled("$step", ROWS // together, lines, sums.unroll))
    yield from unrolled("$m", sums.rows, [*staged, *places, *stored])


def _row(writer: ConvolutionWriter, room: str, width: int, some: bool) -> list[str]:
    """The neighbours from ``$first_x`` on, of ``$channel``, which may not exist where there are only `some`."""
    kernel, names = writer.kernel, ("$sample", "$channel", *writer.axes)
    each, where = Scope(writer.printer), Scope(writer.printer)
    for scope, last in ((each, names[-1]), (where, "$first_x")):
        for axis, text in zip(kernel.rows, (*names[:-1], last), strict=True):
            scope.define_axis(axis, text)
    for node in walk(*kernel.roots):
        if isinstance(node, Stat):
            each.bind(node, "$sum")
    writer.printer.expect(kernel.roots)
    begin, end = [], []
    for number, store in enumerate(kernel.stores):
        dtype = writer.program.buffer(store.buffer).dtype
        kind, found = f"fp::Vec<{C_TYPES[dtype]}, {width}>", f"$found_{number}"
        value = bare(each.value(store.value))
        value = value if store.value.dtype is dtype else f"fp::cast<{C_TYPES[dtype]}>({value})"
        begin.append(f"{kind} {found};")
        each.lines.append(f"{found}[$e] = {value};")
        target = f"{writer.pointers[store.buffer]} + ({where.index(store.index)})"
        end.append(f"*reinterpret_cast<{kind}*>({target}) = {found};")
    own = [f"const {writer.index_type} $x = $first_x + $e;", "const float $sum = $numbers[$e];", *each.lines]
    lines = [
        f"const auto $numbers = *reinterpret_cast<const fp::Vec<float, {width}>*>({room});",
        *begin,
        *unrolled("$e", width, own),
        *where.lines,
        *end,
    ]
    return block(f"if ($channel < {writer.sizes[1]})", lines) if some else lines
