"""What a block copies to shared memory turn by turn, while threads compute with what came before."""

from __future__ import annotations

import abc
from dataclasses import dataclass

from fusepass.codegen.ir.expr import Load
from fusepass.codegen.ir.output_tiles import TileWindow
from fusepass.codegen.ir.staged_windows import ASYNCHRONOUS
from fusepass.codegen.render.cuda.output_tile.staged import StagedTile, StagedWindows, begin_copy
from fusepass.codegen.render.cuda.walk.frame import Frame
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import C_TYPES, bare, loop, where


@dataclass(frozen=True)
class TileSequence(abc.ABC):
    """Tiles of a window that come one after another.

    Attributes:
        places: for which there is room; a tile takes the one that the oldest had.
        parts: of a block, each of which has a tile in each turn.
        together: iterations for which copies are begun before those for the first of them are laid down.
    """

    frame: Frame
    tiles: StagedWindows
    window: TileWindow
    places: int
    parts: int = 1
    together: int = 1

    @abc.abstractmethod
    def moved(self, scope: Scope, step: str, load: Load) -> tuple[str, str]:
        """How far `load` reads in turn `step` from where it reads in the first one, and the condition that something is there."""


class Copies:
    """What threads copy; where each comes from is found once, before all iterations: -1 for what is zero.

    What is too small to be copied asynchronously waits in registers while threads compute.
    """

    def __init__(self, frame: Frame, total: int, names: tuple[str, str]) -> None:
        self.frame, self.total, self.threads = frame, total, frame.schedule.threads
        self.count = -(-total // self.threads)
        self.k = frame.names.numbered("k")
        self.origin, self.waiting = (frame.names.numbered(name) for name in names)

    @property
    def mine(self) -> str:
        """The number of the `k`-th of what a thread copies."""
        return f"threadIdx.x + {self.k} * {self.threads}" if self.count > 1 else "threadIdx.x"

    def where_there(self, lines: list[str]) -> list[str]:
        """`lines` for each that a thread copies."""
        there = f"{self.mine} < {self.total}" if self.total % self.threads else ""
        return loop(self.k, self.count, where(lines, there))


class TileCopies(Copies):
    """The tiles of the input; what is not there becomes `other`, or a zero."""

    def __init__(self, of: TileSequence, tile: StagedTile, other: str = "") -> None:
        self.of, self.tile, self._other, self._each = of, tile, other, of.frame.image_plan.planes * tile.shape.vectors
        super().__init__(of.frame, of.parts * self._each, ("origin", "waiting"))
        self._bytes = tile.shape.vector * tile.below.load.dtype.nbytes

    def prepare(self) -> None:
        """Declare where vectors come from."""
        frame, tile, window = self.frame, self.tile, self.of.window
        thread, vector, inside = (frame.names.numbered(word) for word in ("t", "vector", "inside"))
        place = f"{thread} % {self._each}" if self.of.parts > 1 else thread
        if tile.shape.run:
            scope, start = self.of.tiles.spot_in_run(window, tile, vector)
            condition = "true"
        else:
            scope, start, condition = self.of.tiles.spot(window, tile, vector)
        there = [] if condition == "true" else [f"({condition})"]
        there += [f"{thread} < {self.total}"] if self.total % self.threads else []
        if self.of.parts > 1:
            part = f"{frame.index_type}({thread} / {self._each})"
            start = f"{part} * {tile.below.load.index.stride(window.deep[0])} + {start}"
        lines = [f"const int {thread} = {self.mine};", f"const int {vector} = {place};", *scope.lines]
        lines.append(f"const bool {inside} = {' && '.join(there) or 'true'};")
        start = f"{bare(start)} + {self._before}" if self._before else bare(start)
        lines.append(f"{self.origin}[{self.k}] = {inside} ? {start} : -1;")
        frame.top.lines.append(f"{frame.index_type} {self.origin}[{self.count}];")
        frame.top.lines += loop(self.k, self.count, lines)
        if self._waits:
            element, count = C_TYPES[tile.below.load.dtype], self.of.together * self.count
            frame.top.lines.append(f"{element} {self.waiting}[{count}];")

    @property
    def _before(self) -> int:
        """Elements before the input's first one where a tile that is not there may begin, which others of its iterations are counted from."""
        return self.of.tiles.before(self.of.window, self.tile)

    @property
    def _waits(self) -> bool:
        return self._bytes < ASYNCHRONOUS

    def begin(self, step: str, which: int = 0) -> list[str]:
        """Begin the copies for turn `step`; `which` of those that are begun together."""
        frame, load, shape = self.frame, self.tile.below.load, self.tile.shape
        scope = frame.top.child()
        moved, around = self.of.moved(scope, step, load)
        exists, real = f"{self.origin}[{self.k}] >= 0", str(self._bytes)
        if around != "true":
            there = frame.names.numbered("there")
            scope.lines.append(f"const bool {there} = {around};")
            exists = f"{there} && {exists}"
        inside, from_, lines = frame.names.numbered("inside"), frame.names.numbered("from"), []
        start = f"{self.origin}[{self.k}] + {moved}"
        if shape.run:  # by the aligned vectors that cover what is needed
            extent = frame.program.buffer(load.buffer).extent
            vector = f"({self.mine}) % {shape.vectors}"
            start = f"({start}) / {shape.vector} * {shape.vector} + {vector} * {shape.vector}"
            start = f"{start} - {self._before}" if self._before else start
            lines.append(f"const {frame.index_type} {from_} = {start};")
            exists = f"{exists} && {from_} >= 0 && {from_} < {extent}"
            start = from_
            if extent % shape.vector:
                real = f"int(fp::least({extent} - {from_}, {shape.vector})) * {load.dtype.nbytes}"
        elif self._before:
            start = f"{start} - {self._before}"
        source = f"{frame.pointers[load.buffer]} + ({inside} ? {start} : 0)"
        if self._waits:
            copy = f"{self._waiting(which)} = {inside} ? *({source}) : {self._other or f'{C_TYPES[load.dtype]}(0.0f)'};"
        else:
            to = f"&{self._place(step)}"
            copy = begin_copy(self.tile, to, source, inside, f"{inside} ? {real} : 0", self._other)
        return [*scope.lines, *self.where_there([*lines, f"const bool {inside} = {exists};", copy])]

    def end(self, step: str, which: int = 0) -> list[str]:
        """Lay down what waits for turn `step`."""
        line = f"{self._place(step)} = {self._waiting(which)};"
        return self.where_there([line]) if self._waits else []

    def _waiting(self, which: int) -> str:
        place = f"{which * self.count} + {self.k}" if which else self.k
        return f"{self.waiting}[{place}]"

    def _place(self, step: str) -> str:
        vector = self.tile.shape.vector
        stage = f"({step}) % {self.of.places} * {self.total * vector}"
        return f"{self.tile.name}[{stage} + ({self.mine}) * {vector}]"
