"""What becomes of results that a warp of a generated convolution has laid out, 16 channels by 32 (or 64) neighbours, beside storing them one by one.

Several neighbours at a time: two where all stores have them side by side, four where rows are whole numbers of these. A thread that takes some
of a row reads and stores them at once, and loads what they share, a bias or a factor, once. Where channels lie last, it takes neighbouring channels
of a position.

Along the last axis (`Along`), where a warp has whole rows: two threads share a row and reduce it in pieces of 32 neighbours. What follows from the
row's results alone is computed by these two, and handed to the threads that store its elements, several neighbours at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusepass.codegen.ir.along import reduced_along
from fusepass.codegen.ir.convolution import ROWS
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Expr, ReductionResult, largest, walk
from fusepass.codegen.ir.index import Axis
from fusepass.codegen.ir.vectors import is_vector, split_index
from fusepass.codegen.render.cuda.contraction.convolution.tiles import Sums, TileWriter
from fusepass.codegen.render.cuda.contraction.loops import Loop, ReductionLoops
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import C_TYPES, bare, block, braces
from fusepass.codegen.schedule_convolution.tiles import dimensions
from fusepass.errors import ScheduleError

_LANE = Axis("lane", 2)
_STORED = 16  # bytes
_SHARE = "fp::Share<1>"


def takes_pairs(writer: TileWriter) -> bool:
    """Whether a thread may take two neighbours: they are results both or none, and stored side by side.

    Where nothing is stored, the second need not be a result: who reduces them knows which are.
    """
    kernel, last = writer.kernel, writer.kernel.rows[-1]
    if writer.on.pair not in (1, 2) or writer.anchor.spread[-1] > writer.on.pair:
        return False
    if kernel.partials is not None and not kernel.stores:
        return last not in writer.printer.dataflow.needs(kernel.partials.value)
    side_by_side = (is_vector(split_index(store.index, last, _LANE), last, _LANE) for store in kernel.stores)
    return writer.sizes[-1] % 2 == 0 and all(side_by_side)


def pairs(writer: TileWriter, sums: Sums) -> list[str]:
    """What is done with the channels that lie in the warp's room."""
    c = writer.c
    at_once = 2 // writer.on.pair  # rows of the room
    first = f"{c.lane} * 2" if at_once == 1 else f"{c.lane} % 16 * 2"
    places, inside = writer.position(sums.group, c.lane if at_once == 1 else f"({first})", "0")
    down = Loop(c.down, sums.height // at_once)
    two, beside = _both(writer, f"{c.room}[{c.row} * {writer.on.staged_pitch} + {first}]")
    row = str(down) if at_once == 1 else f"{down} * 2 + {c.lane} / 16"
    lines = [
        f"const int {c.row} = {row};",
        f"const int {c.channel} = {writer.first_channel} + {writer.rows} * {ROWS} + {c.row};",
        *writer.of_result(two),
    ]
    return [*places, *beside, *block(f"if ({inside})", down.over(lines, sums.unroll))]


def pairs_of_warps(writer: TileWriter, sums: Sums, together: int) -> list[str]:
    """The same for four warps that multiply `together`, whose positions lie side by side in ``shared``: each has some of the channels there,
    so that all neighbours of one are stored one after another. The `Sums.group` is that of the first warp.
    """
    c = writer.c
    pitch, at = shared_pitch(together), c.along
    half, down = Loop(c.half, together // 2), Loop(c.down, ROWS // together)
    places, inside = writer.position(sums.group, at, "0")
    two, beside = _both(writer, f"{c.shared}[{c.row} * {pitch} + {at}]")
    along = [f"const int {at} = {half} * 64 + {c.lane} * 2;", *places, *beside, *block(f"if ({inside})", two)]
    lines = [
        f"const int {c.row} = {down} * {together} + {c.warp} % {together};",
        f"const int {c.channel} = {writer.first_channel} + {writer.rows} * {ROWS} + {c.row};",
        *writer.of_result(half.over(along)),
    ]
    return sums.rows.over(["fp::meet_group();", sums.staging, "fp::meet_group();", *down.over(lines)])


def shared_pitch(together: int) -> int:
    """Floats from a channel to the next one where so many warps lay theirs out side by side; rows that a warp writes at once lie in
    different banks.
    """
    return 32 * together + 4


def _both(writer: TileWriter, at: str) -> tuple[list[str], list[str]]:
    """The lines for two neighbours, whose sums lie at `at`, and the definition of the second one's position, if they need it."""
    c = writer.c
    kernel, printer = writer.kernel, writer.printer
    shared = Scope(printer, at=dict(zip(kernel.rows, (c.sample, c.channel, *writer.axes[:-1]), strict=False)))
    printer.expect(kernel.roots)
    one, other = (_one(writer, shared, number) for number in range(2))
    first, second = (_values(writer, scope) for scope in (one, other))
    places = [one.index(store.index) for store in kernel.stores]
    lines = [f"const fp::Vec<float, 2> {c.two} = fp::as_vector<2>({at});", *shared.lines, *one.lines, *other.lines]
    for store, index, here, there in zip(kernel.stores, places, first, second, strict=False):
        kind = f"fp::Vec<{C_TYPES[writer.program.buffer(store.buffer).dtype]}, 2>"
        lines.append(f"fp::store_vector({writer.pointers[store.buffer]} + ({index}), {kind}{{{{{here}, {there}}}}});")
    if kernel.partials is not None:
        lines.append(f"fp::as_vector<2>({at}) = fp::Vec<float, 2>{{{{{first[-1]}, {second[-1]}}}}};")
    beside = f"const {writer.index_type} {c.beside} = {writer.axes[-1]} + 1;"
    return lines, [beside] if other.reads(kernel.rows[-1]) else []


def _one(writer: TileWriter, shared: Scope, number: int) -> Scope:
    """A scope that knows the position and the sum of one of the two."""
    c, kernel, here = writer.c, writer.kernel, shared.child()
    here.define_axis(kernel.rows[-1], c.beside if number else writer.axes[-1])
    for node in kernel.nodes:
        if isinstance(node, ReductionResult):
            here.bind(node, f"{c.two}[{number}]", spare=1)
    return here


def _values(writer: TileWriter, here: Scope) -> list[str]:
    """What is stored of the one that `here` knows, and what is reduced of it."""
    types = [writer.program.buffer(store.buffer).dtype for store in writer.kernel.stores]
    made = [here.converted(store.value, dtype) for store, dtype in zip(writer.kernel.stores, types, strict=True)]
    partials = writer.kernel.partials
    return made if partials is None else [*made, bare(here.value(partials.value))]


def store_neighbours(
    writer: TileWriter,
    sums: Sums,
    width: int,
    ahead: Sequence[str] = (),
    known: Sequence[tuple[Expr, str]] = (),
) -> list[str]:
    """What is done with the 16 channels that lie in the warp's room, `width` neighbours at a time. All threads of the warp do what comes
    `ahead` of a ``row``; by default what is `known` there are the results.
    """
    c = writer.c
    on = writer.on
    lanes = 32 * on.pair // width  # of a row
    together = 32 // lanes  # rows
    down = Loop(c.down, ROWS // together)
    first = f"{c.lane} % {lanes} * {width}"
    row = f"{down} * {together} + {c.lane} / {lanes}" if together > 1 else str(down)
    places, inside = writer.position(sums.group, f"({first})" if on.pair == 1 else f"({first}) / {on.pair}", "0")
    place = [
        f"const int {c.row} = {row};",
        f"const int {c.channel} = {writer.first_channel} + {writer.rows} * {ROWS} + {c.row};",
    ]
    room = f"{c.room}[{c.row} * {on.staged_pitch} + {first}]"
    numbers = f"const auto {c.numbers} = fp::as_vector<{width}>({room});"
    element = Loop(c.e, width)
    stored = [numbers, *_vector(writer, element, f"{c.numbers}[{element}]", known)]
    stored = writer.of_result(stored)
    if ahead:
        rows = [*place, *ahead, *block(f"if ({inside})", stored)]
        return [*places, *down.over(rows, sums.unroll)]
    return [*places, *block(f"if ({inside})", down.over([*place, *stored], sums.unroll))]


def channels_together(writer: TileWriter) -> int:
    """How many channels of a position a thread stores at once: 16 bytes of them where all stores have channels last, else 1."""
    kernel, channel = writer.kernel, dimensions(writer.kernel)[1]
    if kernel.partials is not None or writer.on.pace:
        return 1
    width = _STORED // max(writer.program.buffer(store.buffer).dtype.nbytes for store in kernel.stores)
    lane = Axis("lane", width)
    side_by_side = (is_vector(split_index(store.index, channel, lane), channel, lane) for store in kernel.stores)
    return width if writer.outs % width == 0 and all(side_by_side) else 1


def store_channels(writer: TileWriter, sums: Sums, width: int) -> list[str]:
    """What is done with the `Sums.height` channels that lie in the warp's room, `width` of a position at a time."""
    c, on = writer.c, writer.on
    across = sums.height // width  # threads of a position
    at_once = 32 // across  # positions
    down, at = Loop(c.down, 32 * on.pair // at_once), c.along
    column, start = (at, "0") if on.pair == 1 else (f"({at} / {on.pair})", f"{at} % {on.pair}")
    places, inside = writer.position(sums.group, column, start)
    element = Loop(c.e, width)
    number = f"{c.room}[({c.row} + {element}) * {on.staged_pitch} + {at}]"
    stored = writer.of_result(_vector(writer, element, number, along=1))
    lines = [f"const int {at} = {down} * {at_once} + {c.lane} / {across};", *places, *block(f"if ({inside})", stored)]
    return [
        f"const int {c.row} = {c.lane} % {across} * {width};",
        f"const int {c.channel} = {writer.first_channel} + {writer.rows} * {ROWS} + {c.row};",
        *down.over(lines, sums.unroll),
    ]


def _vector(
    writer: TileWriter, element: Loop, number: str, known: Sequence[tuple[Expr, str]] = (), along: int = -1
) -> list[str]:
    """Stores the results from the one in scope on, of which `number` is the sum of an `element`: neighbours `along` a dimension."""
    c = writer.c
    kernel, axes = writer.kernel, dimensions(writer.kernel)
    names = [c.sample, c.channel, *writer.axes]
    first, names[along] = names[along], c.near
    each, where = Scope(writer.printer), Scope(writer.printer)
    for axis, text in zip(axes, names, strict=True):
        each.define_axis(axis, text)
        where.define_axis(axis, first if axis is axes[along] else text)
    values = [store.value for store in kernel.stores]
    for node, text in known or [(node, c.sum) for node in walk(*values) if isinstance(node, ReductionResult)]:
        each.bind(node, text, spare=1)
    writer.printer.expect(values)
    begin, end = [], []
    for place, store in enumerate(kernel.stores):
        dtype = writer.program.buffer(store.buffer).dtype
        kind, found = f"fp::Vec<{C_TYPES[dtype]}, {element.count}>", c.named(f"found_{place}")
        value = each.converted(store.value, dtype)
        begin.append(f"{kind} {found};")
        each.lines.append(f"{found}[{element}] = {value};")
        end.append(f"fp::store_vector({writer.pointers[store.buffer]} + ({where.index(store.index)}), {found});")
    whole = writer.index_type if along < 0 else "int"
    near = [f"const {whole} {c.near} = {first} + {element};"] if each.reads(axes[along]) else []
    own = [*near, f"const float {c.sum} = {number};", *each.lines]
    return [*begin, *element.over(own), *where.lines, *end]


class Along:
    """The lines of a kernel that have to do with its rows; the results of 16 channels lie in ``room``."""

    def __init__(self, writer: TileWriter, sums: Sums) -> None:
        """Raises `ScheduleError` where the kernel has a form for which there are no such lines."""
        kernel = writer.kernel
        value = reduced_along(kernel, dimensions(kernel))
        if value is None:
            raise ScheduleError(f"{kernel.name} cannot reduce along the last axis")
        self.writer, self.kernel, self.sums, self.value = writer, kernel, sums, value
        self.reduction_loops = ReductionLoops(kernel, writer.program, writer.printer)

    def begin(self) -> list[str]:
        """``inside``: which results of a row exist."""
        c = self.writer.c
        writer, pair = self.writer, self.writer.on.pair
        places, inside = writer.position(self.sums.group)
        if inside == "true":
            return [f"const unsigned {c.inside}[{pair}] = {{{', '.join(['0xffffffffu'] * pair)}}};"]
        votes = [*places, f"{c.inside}[{writer.half}] = __ballot_sync(0xffffffffu, {inside});"]
        lines = writer.half.over(votes)
        return [f"unsigned {c.inside}[{pair}];", *braces(lines)]

    def lines(self, width: int) -> list[str]:
        """What is done with the 16 channels ``m``; stores of elements take `width` of them at once."""
        c = self.writer.c
        (reduction_loop,), writer = self.kernel.reduction_loops, self.writer
        states = [self.reduction_loops.declared(reduction) for reduction in reduction_loop]
        last = writer.sizes[1] - 1
        own = f"{writer.first_channel} + {writer.rows} * {ROWS} + {_SHARE}::row()"
        channel = f"{c.own} < {last} ? {c.own} : {last}" if writer.fills_up else c.own
        nodes = self._frontier([store.value for store in self.kernel.stores])
        lines = [f"const int {c.own} = {own}, {c.channel} = {channel};", *states, *self._reduced()]
        lines += [*self._row_values(nodes), *self._row_stores()]
        if self.kernel.stores:
            handed = [(node, c.named(f"of_row_{number}")) for number, node in enumerate(nodes)]
            ahead = [
                f"const float {text} = fp::of_row({self._row_value(number)}, {c.row});"
                for number, (_, text) in enumerate(handed)
            ]
            known = [(self.value, c.sum), *handed]
            lines += ["__syncwarp();"] if self._moves else []
            lines += store_neighbours(writer, self.sums, width, ahead, known)
        return braces(lines)

    @property
    def _moves(self) -> bool:
        """Whether what is reduced takes the place of the results."""
        return not isinstance(self.value, ReductionResult)

    def _reduced(self) -> list[str]:
        """The states of a thread's row."""
        c = self.writer.c
        pitch, strip = self.writer.on.staged_pitch, Loop(c.strip, self.writer.on.pair)
        lines = [
            f"const unsigned {c.bits}[1] = {{{c.inside}[{strip}]}};",
            f"{_SHARE} {c.share}({c.room} + {strip} * 32, {pitch}, {c.bits});",
        ]
        if self._moves:
            scope = self._near(c.channel)
            scope.bind(self._result(self.value), c.sum, spare=1)
            self.writer.printer.expect([self.value])
            value = bare(scope.value(self.value))
            each = [
                f"const float {c.sum} = {c.share}.values[{c.i}];",
                *scope.lines,
                f"{c.share}.values[{c.i}] = {value};",
            ]
            lines += [*Loop(c.i, 16).over(each), f"{c.share}.leave({c.room} + {strip} * 32, {pitch});"]
        (reduction_loop,) = self.kernel.reduction_loops
        lines += [f"fp::add_row({self.reduction_loops.state(reduction)}, {c.share});" for reduction in reduction_loop]
        strips = strip.over(lines)
        return strips if self.writer.on.pair > 1 else braces(strips)

    def _near(self, channel: str) -> Scope:
        """A scope that knows the sample and the channel."""
        at = dict(zip(dimensions(self.kernel), (self.writer.c.sample, channel), strict=False))
        return Scope(self.writer.printer, at=at)

    def _result(self, root: Expr) -> Expr:
        """The convolution's result below `root`."""
        assert self.kernel.anchor is not None
        name = self.kernel.anchor.name
        return next(node for node in walk(root) if isinstance(node, ReductionResult) and node.reduction == name)

    def _row_stores(self) -> list[str]:
        """What is stored once for a row, by the first of its threads."""
        c = self.writer.c
        if not self.kernel.row_stores:
            return []
        axes = dict(zip(self.kernel.rows, (c.sample, c.channel, *self.writer.axes[:-1]), strict=True))
        scope = self.reduction_loops.row_scope([store.value for store in self.kernel.row_stores], axes)
        for store in self.kernel.row_stores:
            scope.lines.append(self.reduction_loops.stored(scope, store))
        places, _ = self.writer.position(self.sums.group, "0", "0")
        exists = f"{_SHARE}::is_first() && ({c.inside}[0] & 1)" + (
            f" && {c.own} < {self.writer.sizes[1]}" if self.writer.fills_up else ""
        )
        return block(f"if ({exists})", [*places, *scope.lines])

    def _row_values(self, nodes: Sequence[Expr]) -> list[str]:
        """What the threads of a row compute for those that store its elements."""
        scope = self.reduction_loops.row_scope(nodes, {})
        made = [
            f"const float {self._row_value(number)} = {bare(scope.value(node))};" for number, node in enumerate(nodes)
        ]
        return [*scope.lines, *made]

    def _row_value(self, number: int) -> str:
        return self.writer.c.named(f"row_value_{number}")

    def _frontier(self, roots: Sequence[Expr]) -> list[Expr]:
        """The largest numbers below `roots` that follow from the row's results alone."""
        (reduction_loop,) = self.kernel.reduction_loops
        names = {reduction.name for reduction in reduction_loop}
        needs = self.writer.printer.dataflow.needs

        def follows(node: Expr) -> bool:
            below = needs(node)
            known = bool(below) and all(isinstance(need, ReductionResult) and need.reduction in names for need in below)
            return node is self.value or (known and node.dtype is DType.F32)

        return [node for node in largest(roots, follows, guarded=True) if node is not self.value]
