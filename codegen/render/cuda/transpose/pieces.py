"""Tiles in shared memory that are one piece of memory, of few columns: they come and go in whole accesses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fusepass.codegen.render.cuda.transpose.tiles import SharedTranspose
from fusepass.codegen.render.cuda.walk.frame import Frame
from fusepass.codegen.render.numbers import free
from fusepass.codegen.render.spelling import C_TYPES, block


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
        guarded = block(f"if ({self.access} < {self._accesses})", lines) if self._accesses % self._threads else lines
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
        return block(f"if ({self.start} < {free(self._count)})", [stored]) if self.left else [stored]

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
