"""Results of a generated convolution four neighbours at a time, where rows are whole numbers of these and nothing else goes along them."""

from __future__ import annotations

from collections.abc import Sequence

from fusepass.codegen.ir.convolution import ROWS
from fusepass.codegen.ir.expr import Expr, ReductionResult, walk
from fusepass.codegen.render.cuda.contraction.convolution.positions import PositionWriter
from fusepass.codegen.render.cuda.contraction.loop import Loop
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import C_TYPES, block
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
    `group`-th ones. All threads of the warp do what comes `ahead` of a ``row``; by default what is `known` there are the results.
    """
    c = writer.c
    on = writer.on
    lanes = 32 * on.pair // width  # of a row
    together = 32 // lanes  # rows
    down = Loop(c.down, ROWS // together)
    first = f"{c.lane} % {lanes} * {width}"
    row = f"{down} * {together} + {c.lane} / {lanes}" if together > 1 else str(down)
    places, inside = writer.position(group, f"({first})" if on.pair == 1 else f"({first}) / {on.pair}", "0")
    place = [
        f"const int {c.row} = {row};",
        f"const int {c.channel} = {writer.first_channel} + {writer.rows} * {ROWS} + {c.row};",
    ]
    room = f"{c.room}[{c.row} * {on.staged_pitch} + {first}]"
    stored = _row(writer, room, width, writer.sizes[1] != covered, known)
    if ahead:
        rows = [*place, *ahead, *block(f"if ({inside})", stored)]
        return [*places, *down.over(rows, pragma)]
    return [*places, *block(f"if ({inside})", down.over([*place, *stored], pragma))]


def _row(writer: PositionWriter, room: str, width: int, some: bool, known: Sequence[tuple[Expr, str]]) -> list[str]:
    """The neighbours from the result in scope on, of ``channel``, which may not exist where there are only `some`."""
    c = writer.c
    kernel, names = writer.kernel, (c.sample, c.channel, *writer.axes)
    each, where = Scope(writer.printer), Scope(writer.printer)
    for scope, last in ((each, c.near), (where, names[-1])):
        for axis, text in zip(dimensions(kernel), (*names[:-1], last), strict=True):
            scope.define_axis(axis, text)
    values = [store.value for store in kernel.stores]
    for node, text in known or [(node, c.sum) for node in walk(*values) if isinstance(node, ReductionResult)]:
        each.bind(node, text, spare=1)
    writer.printer.expect(values)
    element = Loop(c.e, width)
    begin, end = [], []
    for number, store in enumerate(kernel.stores):
        dtype = writer.program.buffer(store.buffer).dtype
        kind, found = f"fp::Vec<{C_TYPES[dtype]}, {width}>", c.named(f"found_{number}")
        value = each.converted(store.value, dtype)
        begin.append(f"{kind} {found};")
        each.lines.append(f"{found}[{element}] = {value};")
        end.append(f"fp::store_vector({writer.pointers[store.buffer]} + ({where.index(store.index)}), {found});")
    near = f"const {writer.index_type} {c.near} = {names[-1]} + {element};"
    place = [near] if each.reads(dimensions(kernel)[-1]) else []
    own = [*place, f"const float {c.sum} = {c.numbers}[{element}];", *each.lines]
    lines = [
        f"const auto {c.numbers} = fp::as_vector<{width}>({room});",
        *begin,
        *element.over(own),
        *where.lines,
        *end,
    ]
    return block(f"if ({c.channel} < {writer.sizes[1]})", lines) if some else lines
