"""Results of a generated convolution four neighbours at a time, where rows are whole numbers of these and nothing else goes along them."""

from __future__ import annotations

from collections.abc import Sequence

from fusepass.codegen.ir.convolution import ROWS
from fusepass.codegen.ir.expr import Expr, ReductionResult, walk
from fusepass.codegen.render.cuda_input import unrolled
from fusepass.codegen.render.cuda_positions import PositionWriter
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import C_TYPES, bare, block
from fusepass.codegen.schedule_convolution.tiles import dimensions


def store_neighbours(
    writer: PositionWriter,
    group: str,
    covered: int,
    pragma: str,
    width: int,
    ahead: Sequence[str] = (),
    known: Sequence[tuple[Expr, str]] = (),
) -> list[str]:
    """What is done with the 16 channels that lie in the warp's room, `width` neighbours at a time; the first 8 of its positions are the
    `group`-th ones. All threads of the warp do what comes `ahead` of a ``$row``; by default what is `known` there are the results.
    """
    on = writer.on
    lanes = 32 * on.pair // width  # of a row
    together = 32 // lanes  # rows
    first = f"$lane % {lanes} * {width}"
    row = f"$down * {together} + $lane / {lanes}" if together > 1 else "$down"
    places, inside = writer.position(group, f"({first})" if on.pair == 1 else f"({first}) / {on.pair}", "0")
    place = [f"const int $row = {row};", f"const int $channel = $first_channel + $m * {ROWS} + $row;"]
    room = f"$room[$row * {on.staged_pitch} + {first}]"
    stored = _row(writer, room, width, writer.sizes[1] != covered, known)
    if ahead:
        rows = [*place, *ahead, *block(f"if ({inside})", stored)]
        return [*places, *unrolled("$down", ROWS // together, rows, pragma)]
    return [*places, *block(f"if ({inside})", unrolled("$down", ROWS // together, [*place, *stored], pragma))]


def _row(writer: PositionWriter, room: str, width: int, some: bool, known: Sequence[tuple[Expr, str]]) -> list[str]:
    """The neighbours from the result in scope on, of ``$channel``, which may not exist where there are only `some`."""
    kernel, names = writer.kernel, ("$sample", "$channel", *writer.axes)
    each, where = Scope(writer.printer), Scope(writer.printer)
    for scope, last in ((each, "$near"), (where, names[-1])):
        for axis, text in zip(dimensions(kernel), (*names[:-1], last), strict=True):
            scope.define_axis(axis, text)
    values = [store.value for store in kernel.stores]
    for node, text in known or [(node, "$sum") for node in walk(*values) if isinstance(node, ReductionResult)]:
        each.bind(node, text)
    writer.printer.expect(values)
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
