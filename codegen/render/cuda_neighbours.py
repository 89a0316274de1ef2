"""Results of a generated convolution four neighbours at a time, where rows are whole numbers of these and nothing else goes along them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusepass.codegen.ir.convolution import ROWS
from fusepass.codegen.ir.expr import Stat
from fusepass.codegen.render.cuda_input import unrolled
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import C_TYPES, bare, block

if TYPE_CHECKING:
    from fusepass.codegen.render.cuda_convolution import ConvolutionWriter


def store_neighbours(writer: ConvolutionWriter, group: str, covered: int, pragma: str, width: int) -> list[str]:
    """What is done with the 16 channels that lie in the warp's room, `width` neighbours at a time; the first 8 of its positions are the
    `group`-th ones.
    """
    on = writer.on
    lanes = 32 * on.pair // width  # of a row
    together = 32 // lanes  # rows
    first = f"$lane % {lanes} * {width}"
    row = f"$down * {together} + $lane / {lanes}" if together > 1 else "$down"
    places, inside = writer.position(group, f"({first})" if on.pair == 1 else f"({first}) / {on.pair}", "0")
    lines = [
        f"const int $row = {row};",
        f"const int $channel = $first_channel + $m * {ROWS} + $row;",
        *_row(writer, f"$room[$row * {on.staged_pitch} + {first}]", width, writer.sizes[1] != covered),
    ]
    return [*places, *block(f"if ({inside})", unrolled("$down", ROWS // together, lines, pragma))]


def _row(writer: ConvolutionWriter, room: str, width: int, some: bool) -> list[str]:
    """The neighbours from the result in scope on, of ``$channel``, which may not exist where there are only `some`."""
    kernel, names = writer.kernel, ("$sample", "$channel", *writer.axes)
    each, where = Scope(writer.printer), Scope(writer.printer)
    for scope, last in ((each, "$near"), (where, names[-1])):
        for axis, text in zip(kernel.rows, (*names[:-1], last), strict=True):
            scope.define_axis(axis, text)
    for node in kernel.nodes:
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
        end.append(f"fp::store_vector({writer.pointers[store.buffer]} + ({where.index(store.index)}), {found});")
    place = (
        [f"const {writer.index_type} $near = {names[-1]} + $e;"] if any("$near" in line for line in each.lines) else []
    )
    own = [*place, "const float $sum = $numbers[$e];", *each.lines]
    lines = [
        f"const auto $numbers = fp::as_vector<{width}>({room});",
        *begin,
        *unrolled("$e", width, own),
        *where.lines,
        *end,
    ]
    return block(f"if ($channel < {writer.sizes[1]})", lines) if some else lines
