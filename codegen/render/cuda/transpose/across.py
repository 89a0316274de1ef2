"""How a block's threads load and store its tiles in shared memory: across, as one piece of memory, or row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fusepass.codegen.ir.index import Axis, Index, axis_index
from fusepass.codegen.ir.transpose import neighbours
from fusepass.codegen.render.cuda.transpose.tiles import SharedTranspose, define
from fusepass.codegen.render.cuda.walk.frame import Frame
from fusepass.codegen.render.numbers import free
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import C_TYPES, block, where
from fusepass.codegen.schedule.shape import ACCESS


class _Piece:
    """A tile as one piece of memory, in accesses that the threads take in turn; `rows` of its rows.

    Attributes:
        access: the C variable with an access's number in the loop over `steps`, and the element of the tile's row and column for a lane.
        start: the C expression of where the access begins in memory.
        left: that of how many elements are left from there on; empty where that is enough.
    """

    def __init__(self, frame: Frame, each: SharedTranspose, rows: int) -> None:
        self._frame, self._each = frame, each
        columns = each.across.size
        self._accesses, self._threads = rows * columns // each.piece, each.tile.threads
        self.steps = -(-self._accesses // self._threads)
        self.access = frame.names.exact(f"{each.name}_access")
        iteration = f" + {frame.u} * {self._threads}" if self.steps > 1 else ""
        self._number = f"const int {self.access} = int(threadIdx.x){iteration};"
        if self.steps == 1:
            frame.top.lines.append(self._number)
        first = frame.first_along
        begin = frame.constant(f"{each.name}_start", f"{first} * {free(columns)}")
        self.start = f"{begin} + {self.access} * {each.piece}"
        self._count = each.along.size * columns
        self._whole = self._count % each.piece == 0 and not frame.schedule.general
        leaves = frame.leaves_rows(each.along.size, rows)
        self.left = f"{free(self._count)} - ({self.start})" if leaves else ""

    def steps_of(self, lines: Sequence[str]) -> list[str]:
        """`lines` for each access of a thread."""
        u = self._frame.u
        guarded = where(lines, f"{self.access} < {self._accesses}" if self._accesses % self._threads else "")
        return self._frame.unrolled(u, self.steps, [self._number, *guarded]) if self.steps > 1 else list(guarded)

    def load(self, source: str) -> str:
        """The expression that loads an access; past the end, anything."""
        width = self._each.piece
        if self.left and not self._whole:
            return f"fp::load_first<{width}>({source} + ({self.start}), {self.left})"
        past = f"fp::least({self.start}, {free(self._count - width)})" if self.left else f"({self.start})"
        return f"fp::load_vector<{width}>({source} + {past})"

    def store(self, target: str, vector: str) -> list[str]:
        """The statement that stores an access, as far as there is one."""
        if self.left and not self._whole:
            return [f"fp::store_first({target} + ({self.start}), {vector}, {self.left});"]
        stored = f"fp::store_vector({target} + ({self.start}), {vector});"
        return where([stored], f"{self.start} < {free(self._count)}" if self.left else "")

    def elements(self, statement: Callable[[str], str]) -> list[str]:
        """The statement about the place in the tile of each of an access's elements."""
        frame, each, columns = self._frame, self._each, free(self._each.across.size)
        element = frame.names.exact(f"{each.name}_element")
        across, along = f"fp::mod({element}, {columns})", f"fp::div({element}, {columns})"
        first = f"const int {element} = {self.access} * {each.piece} + {frame.v};"
        return frame.unrolled(frame.v, each.piece, [first, statement(each.at(across, along))])


def read_piece(frame: Frame, each: SharedTranspose) -> list[str]:
    """Load a tile that is one piece of memory; the lines that write it to shared memory."""
    load, width = each.transposing.load, each.piece
    assert load is not None
    piece, loaded = _Piece(frame, each, each.tile.along), frame.names.exact(f"{each.name}_in")
    array, step = (f"[{piece.steps}]", f"[{frame.u}]") if piece.steps > 1 else ("", "")
    frame.top.lines.append(f"fp::Vec<{C_TYPES[load.dtype]}, {width}> {loaded}{array};")
    frame.top.lines += piece.steps_of([f"{loaded}{step} = {piece.load(frame.pointers[load.buffer])};"])
    return piece.steps_of(piece.elements(lambda place: f"{place} = {loaded}{step}[{frame.v}];"))


def write_piece(frame: Frame, each: SharedTranspose) -> None:
    """Store a tile that is one piece of memory, but for the rows that the next block has, too."""
    buffer, width = each.transposing.buffer, each.piece
    piece, vector = _Piece(frame, each, frame.own_rows), frame.names.exact(f"{each.name}_out")
    lines = [f"fp::Vec<{C_TYPES[frame.program.buffer(buffer).dtype]}, {width}> {vector};"]
    lines += piece.elements(lambda place: f"{vector}[{frame.v}] = {place};")
    frame.top.lines += piece.steps_of([*lines, *piece.store(frame.pointers[buffer], vector)])


@dataclass(frozen=True)
class _Stand:
    """Where a thread stands to load or store what crosses, in the loop over its steps.

    Attributes:
        along, vector: C expressions of the position along and the number of the vector across, from the tile's first.
        first: number of the tile's first vector, and a plus sign; empty for 0.
        steps: of the loop.
    """

    along: str
    vector: str
    first: str
    steps: int

    @classmethod
    def of(cls, frame: Frame, each: SharedTranspose) -> _Stand:
        """With the thread's place among the others defined."""
        tile, lines = each.tile, frame.top.lines
        across, along = tile.steps
        vector, line = frame.names.exact(f"{each.name}_lane"), frame.names.exact(f"{each.name}_line")
        lines.append(f"const int {vector} = threadIdx.x % {tile.lanes};")
        lines.append(f"const int {line} = threadIdx.x / {tile.lanes};")
        if across > 1:
            vector += f" + {tile.lanes} * {frame.u if along == 1 else f'({frame.u} % {across})'}"
        if along > 1:
            line += f" + {tile.lines} * {frame.u if across == 1 else f'({frame.u} / {across})'}"
        first = frame.first_across and f"{frame.first_across}{f' / {tile.width}' if tile.width > 1 else ''} + "
        return cls(line, vector, first, across * along)

    def slot(self, frame: Frame, each: SharedTranspose) -> str:
        """The element of the tile for one lane of the thread's vector."""
        width = each.tile.width
        across = self.vector if width == 1 else f"({self.vector}) * {width} + {frame.v}"
        along = f"({self.along})" if each.tile.vector > 1 and " " in self.along else self.along
        return each.at(f"({across})", along, f"({self.vector})")


def read_in(frame: Frame, exchanges: Sequence[SharedTranspose]) -> list[str]:
    """Load what crosses; the lines that write it to shared memory, when all else is loaded, and wait for the block."""
    written: list[str] = []
    for each in exchanges:
        if each.transposing.load is None:
            continue
        if each.piece:
            written += read_piece(frame, each)
            continue
        stand, width = _Stand.of(frame, each), each.tile.width
        loaded = frame.names.exact(f"{each.name}_in")
        array, step = (f"[{stand.steps}]", f"[{frame.u}]") if stand.steps > 1 else ("", "")
        vector = f"fp::Vec<{C_TYPES[each.transposing.load.dtype]}, {width}>"
        frame.top.lines.append(f"{vector} {loaded}{array}{' = {}' if each.guard else ''};")
        scope = frame.top.child()
        # A thread past the end loads what the last one loads.
        along = frame.along(stand.along)
        if frame.leaves_rows(each.along.size, each.tile.along):
            along = f"fp::least({along}, {free(each.along.size - 1)})"
        define(frame, scope, each.along, along, 1)
        across = _clamped(frame, f"{stand.first}{stand.vector}", each.across, each.tile.across, width)
        define(frame, scope, each.across, across, width)
        inside = scope.child(conditional=True) if each.guard else scope
        start = inside.operand(each.index.substitute({each.lane: Index()}))
        reuse = ", fp::Reuse::none" if each.transposing.buffer in frame.schedule.memory.once else ""
        pointer = frame.pointers[each.transposing.buffer]
        inside.lines.append(f"{loaded}{step} = fp::load_vector<{width}{reuse}>({pointer} + {start});")
        if each.guard:
            scope.lines += block(f"if ({scope.condition(each.guard)})", inside.lines)
        frame.top.lines += frame.unrolled(frame.u, stand.steps, scope.lines)
        lane = frame.v if width > 1 else "0"
        moved = frame.unrolled(frame.v, width, [f"{stand.slot(frame, each)} = {loaded}{step}[{lane}];"])
        written += frame.unrolled(frame.u, stand.steps, moved)
    return [*written, "__syncthreads();"] if written else []


def write_out(frame: Frame, exchanges: Sequence[SharedTranspose]) -> None:
    """Wait for the block; then store what crosses."""
    stores = [each for each in exchanges if each.transposing.store is not None]
    if stores:
        frame.top.lines.append("__syncthreads();")
    for each in stores:
        if each.realigned:
            _write_rows(frame, each)
            continue
        if each.piece:
            write_piece(frame, each)
            continue
        stand, width, buffer = _Stand.of(frame, each), each.tile.width, each.transposing.buffer
        scope = frame.top.child()
        along = define(frame, scope, each.along, frame.along(stand.along), 1)
        across = define(frame, scope, each.across, f"{stand.first}{stand.vector}", width)
        inside = scope.child(conditional=True)
        vector = frame.names.exact(f"{each.name}_out")
        inside.lines.append(f"fp::Vec<{C_TYPES[frame.program.buffer(buffer).dtype]}, {width}> {vector};")
        lane = frame.v if width > 1 else "0"
        inside.lines += frame.unrolled(frame.v, width, [f"{vector}[{lane}] = {stand.slot(frame, each)};"])
        start = inside.operand(each.index.substitute({each.lane: Index()}))
        reuse = "<fp::Reuse::none>" if buffer in frame.schedule.memory.once else ""
        inside.lines.append(f"fp::store_vector{reuse}({frame.pointers[buffer]} + {start}, {vector});")
        guards = []
        if frame.overlap:
            guards.append(f"{stand.along} < {frame.own_rows}")
        elif each.tile.lines * each.tile.steps[1] > each.tile.along:  # more threads than the tile has vectors
            guards.append(f"{stand.along} < {each.tile.along}")
        if frame.leaves_rows(each.along.size, each.tile.lines * each.tile.steps[1]):
            guards.append(f"{along} < {free(each.along.size)}")
        if frame.may_leave(each.across.size, each.tile.across):
            guards.append(f"{across} < {free(each.across.size)}")
        scope.lines += where(inside.lines, *guards)
        frame.top.lines += frame.unrolled(frame.u, stand.steps, scope.lines)


def _write_rows(frame: Frame, each: SharedTranspose) -> None:
    """Store a tile row by row: in whole accesses where the tile's part of a row is one piece, else by element."""
    tile, pointer, count = each.tile, frame.pointers[each.transposing.buffer], each.tile.along
    lanes = count * tile.nbytes // ACCESS
    lines = tile.threads // lanes
    steps = max(tile.across // lines, 1)
    lane, line = frame.names.exact(f"{pointer}_lane"), frame.names.exact(f"{pointer}_line")
    frame.top.lines.append(f"const int {lane} = threadIdx.x % {lanes};")
    frame.top.lines.append(f"const int {line} = threadIdx.x / {lanes};")
    here = f"{line} + {lines} * {frame.u}" if steps > 1 else line
    scope = frame.top.child()
    across = define(frame, scope, each.across, f"{frame.first_across} + {here}" if frame.first_across else here, 1)
    inside = scope.child(conditional=True)
    run = axis_index(each.along) % neighbours(each.index, each.along)

    def place(along: str, into: Scope) -> tuple[str, str]:
        """Where the element lies, and its place in what lies together in memory."""
        part = into.child()
        define(frame, part, each.along, along, 1)
        found = part.operand(each.index), part.index(run) if frame.overlap else ""
        into.lines += part.lines
        return found

    first = frame.first_along
    start, end = frame.names.exact(f"{pointer}_start"), frame.names.exact(f"{pointer}_end")
    at, before = place(first, inside)
    inside.lines.append(f"const {frame.index_type} {start} = {at};")
    last = f"{first} + {count - 1}"
    if frame.leaves_rows(each.along.size, count):
        last = f"fp::least({last}, {free(each.along.size - 1)})"
    inside.lines.append(f"const {frame.index_type} {end} = {place(last, inside)[0]};")
    single = inside.child(conditional=True)
    along = frame.names.exact(f"{pointer}_at")
    target, past = place(f"{first} + {along}", single)
    stored = [f"{pointer}[{target}] = {each.at(f'({here})', along)};"]
    row, piece = (
        f"&{each.name}[({here}) * {tile.pitch}], {each.iteration(f'({here})')}",
        f"{end} - {start} == {count - 1}",
    )
    whole = f"fp::store_row<{count}>({pointer} + {start}, {row}, {lane});"
    if frame.overlap:
        own, sector = frame.own_rows, frame.overlap
        begin = f"fp::least(unsigned({target}) % {sector}, unsigned({past}))"
        stored = block(f"if (unsigned({along}) - {begin} < {own})", stored)
        # No other block has the part of a sector that memory which lies together begins with.
        piece += f" && {before} != 0"
        whole = f"fp::store_sectors<{own}, {sector}>({pointer} + {start}, {row}, {lane}, unsigned({start}));"
    single.lines += stored
    fits = f"{first} + {along} < {free(each.along.size)}" if frame.leaves_rows(each.along.size, count) else ""
    guarded = where(single.lines, fits)
    inside.lines += block(f"if ({piece})", [whole])
    inside.lines += block("else", block(f"for (int {along} = {lane}; {along} < {count}; {along} += {lanes})", guarded))
    guards = [f"{here} < {tile.across}"] if lines > tile.across else []
    if frame.may_leave(each.across.size, tile.across):
        guards.append(f"{across} < {free(each.across.size)}")
    scope.lines += where(inside.lines, *guards)
    frame.top.lines += frame.unrolled(frame.u, steps, scope.lines)


def _clamped(frame: Frame, number: str, axis: Axis, tile: int, width: int = 1) -> str:
    return f"fp::least({number}, {free(axis.size // width - 1)})" if frame.may_leave(axis.size, tile) else number
