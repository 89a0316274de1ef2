"""The lines of a CUDA kernel that find a thread's place."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.render.cuda.walk.frame import Frame, Number
from fusepass.codegen.render.cuda.walk.tile import Tile, arrange, output_tile_place
from fusepass.codegen.render.numbers import free
from fusepass.codegen.render.spelling import Constant, Identifiers
from fusepass.codegen.schedule.plan import CircularBuffer, Keep, Pieces, Schedule, TeamPart
from fusepass.codegen.schedule.plan_flat import Pointwise, Transposed
from fusepass.codegen.schedule.plan_output_tile import DeepTile, OutputTile
from fusepass.codegen.schedule.plan_rows import Columns, Rows
from fusepass.errors import RenderError


@dataclass(frozen=True)
class Grid:
    """The C texts of a block's number, and of how many blocks there are."""

    block: str
    blocks: str


LAUNCHED = Grid("blockIdx.x", "gridDim.x")


def framed(
    kernel: Kernel,
    program: Program,
    schedule: Schedule,
    pointers: dict[str, str],
    names: Identifiers,
    grid: Grid = LAUNCHED,
) -> Frame:
    """The frame of a kernel, which knows what its threads work on; `pointers` names its buffers, `names` knows the identifiers that are taken."""
    frame = Frame(arrange(kernel, program, schedule), program, schedule, pointers, names)
    frame.tile = Coordinates(frame, grid).tile()
    return frame


class Coordinates:
    """Writes them before all other lines of `frame`, and tells it what they define."""

    def __init__(self, frame: Frame, grid: Grid) -> None:
        self.grid = grid
        self.frame, self.kernel, self.schedule, self.arranged = frame, frame.kernel, frame.schedule, frame.arranged
        self.names, self.top, self.pointers, self.index_type = frame.names, frame.top, frame.pointers, frame.index_type

    def tile(self) -> Tile:
        """What the thread works on; the frame knows its row afterwards."""
        number = f"{self.index_type}({self.grid.block})"
        if self.schedule.memory.backwards:
            number = f"{self.index_type}({self.grid.blocks} - 1 - {self.grid.block})"
        match self.schedule:
            case Pointwise() as plan:
                return self._pointwise(plan, number)
            case Rows() as plan:
                return self._inner(plan, number)
            case Columns() as plan:
                return self._outer(plan, number)
            case Transposed() as plan:
                return self._transposing(plan, number)
            case OutputTile() as plan:
                return self._output_tile(plan, number)
        raise RenderError(f"nobody writes {type(self.schedule).__name__}")

    def _pointwise(self, plan: Pointwise, number: str) -> Tile:
        row = self.arranged.row
        count = -(-self.kernel.row_count // plan.width)
        if plan.apart:
            thread = self.frame.constant("thread", f"{number} * {plan.threads} + {self.index_type}(threadIdx.x)")
            group = f"fp::div({thread}, {plan.apart}) * {self.index_type}({plan.unroll * plan.apart})"
            start = self.frame.constant("first", f"{group} + fp::mod({thread}, {plan.apart})")
            tail = self.frame.may_leave(count // plan.unroll, plan.threads)
            return Tile(row, self.names.exact("i"), start, plan.apart, count, plan.width, False, tail, False)
        per_block = plan.unroll * plan.threads
        start = self.frame.constant("first", f"{number} * {per_block} + {self.index_type}(threadIdx.x)")
        tail = self.frame.may_leave(count, per_block)
        return Tile(row, self.names.exact("i"), start, plan.threads, count, plan.width, False, tail, False)

    def _inner(self, plan: Rows, number: str) -> Tile:
        lane, here = "0", number
        if plan.team:
            return self._member(plan, plan.team)
        if plan.keep is Keep.FETCHED:
            self._loop_over_rows(f"{self.index_type}({self.grid.block})", f"{self.index_type}({self.grid.blocks})")
        if plan.lanes > 1:
            # A remainder tells the compiler how many threads there are: conditions go where it sees that they hold.
            ends = (
                self.frame.may_leave(plan.vectors(self.kernel.col_count), plan.unroll * plan.lanes) or plan.ends_apart
            )
            lane = self.frame.constant(
                "lane", f"threadIdx.x % {plan.lanes}" if plan.groups > 1 or ends else "threadIdx.x"
            )
            self.frame.first_of_row = f"{lane} == 0"
        if plan.groups > 1:
            within = f"threadIdx.x / {plan.lanes}" if plan.lanes > 1 else "threadIdx.x"
            here = f"{number} * {plan.groups} + {self.index_type}({within})"
        if plan.pieces:
            self._piece(plan.pieces, number, within if plan.groups > 1 else "0")
        if plan.exchanges:
            self.frame.first_across = self.frame.constant("first_row", f"{number} * {plan.groups}")
            self.frame.place = lane, self.frame.constant("group", within)
        if plan.keep is not Keep.FETCHED and not plan.pieces:
            self._define_row(here, plan.groups, 1)
        limit = self._ends(plan, lane) if plan.ends_apart else ""
        return self._tile(lane, plan.lanes, plan.vectors(self.kernel.col_count), plan.width, limit)

    def _ends(self, plan: Rows, lane: str) -> str:
        """Define which of the elements at both ends of the row a thread has; the name of how many whole vectors are between them."""
        cols = self.kernel.col_count
        assert plan.start is not None
        if plan.lanes < plan.ends:
            raise RenderError(f"{self.kernel.name} has {plan.lanes} threads for the elements at the ends of a row")
        head = self.frame.head = self.frame.constant("head", self.top.operand(plan.start.index * -1 % plan.unit))
        count = self.frame.constant("whole", f"({free(cols)} - {head}) / {plan.width}")
        self.frame.end = self.frame.constant("end", f"{lane} < {head} ? {lane} : {lane} + {count} * {plan.width}")
        return count

    def _loop_over_rows(self, first: str, step: str) -> None:
        """A block goes from row to row."""
        row = self.frame.row = self.names.exact("row")
        self.frame.first_row, self.frame.row_step = first, step
        self.frame.row_loop = (
            f"for ({self.index_type} {row} = {first}; {row} < {self.kernel.row_count}; {row} += {step})"
        )
        if self.arranged.row is not None:
            self.top.define_axis(self.arranged.row, row)

    def _piece(self, pieces: Pieces, number: str, group: str) -> None:
        """Define which rows a block goes over, and which of those that it has at once a thread's is."""
        frame, kind = self.frame, self.index_type
        number = frame.constant("piece", number)
        frame.sample = frame.constant("first_of_sample", f"{number} / {pieces.count} * {pieces.over}")
        piece = frame.constant("piece_of_sample", f"{number} % {pieces.count}") if pieces.count > 1 else "0"
        begin, end = (
            frame.constant(name, f"{frame.sample} + fp::least({place} * {pieces.rows}, {kind}({pieces.over}))")
            for name, place in (("begin", piece), ("end", f"({piece} + 1)"))
        )
        frame.piece, frame.first_row, frame.end_of_piece = piece, begin, end
        if self.schedule.groups > 1:
            frame.group = frame.constant("group", group)

    def _loop_over_iterations(self, iterations: int, buffer: CircularBuffer, count: int) -> None:
        """A block goes from row to row, or strip to strip, and takes some iterations before the first one, in which the circular buffer fills."""
        row = self.names.exact("row")
        iteration = self.frame.iteration = self.names.exact("turn")
        self.frame.row, self.frame.row_step = row, f"{self.frame.team}.count"
        before = -(-buffer.places // iterations)  # rows
        first, step = f"{self.frame.team}.number - {before} * {self.frame.team}.count", self.frame.row_step
        self.frame.row_loop = (
            f"for ({self.index_type} {iteration} = {first}; {iteration} < {count}; {iteration} += {step})"
        )
        self.frame.first_of_row += f" && {iteration} >= 0"
        assert self.arranged.row is not None
        self.top.define_axis(self.arranged.row, row)

    def _member(self, plan: Rows, of_block: TeamPart) -> Tile:
        """A block of a team: a part of one row after another."""
        team = self.kernel.team
        assert team is not None
        vectors, part, on_chip = plan.vectors(self.kernel.col_count), of_block.part, of_block.on_chip(plan.lanes)
        kept, held = of_block.kept, of_block.held
        self.frame.team = self.names.exact("team")
        kind = f"fp::Team<{team.members}, {team.teams}>"
        self.top.lines.append(f"{kind} {self.frame.team}({self.pointers[team.exchange]});")
        lane = self.frame.constant("lane", f"threadIdx.x % {plan.lanes}")
        self.frame.first_of_row = f"{lane} == 0 && {self.frame.team}.member == 0"
        base = self.frame.constant("first", f"{self.index_type}({self.frame.team}.member) * {part}")
        even = part * of_block.members == vectors
        limit = (
            "" if even else self.frame.constant("count", f"fp::least({self.index_type}({part}), {vectors} - {base})")
        )
        if of_block.buffer:
            self._loop_over_iterations(plan.iterations, of_block.buffer, self.kernel.row_count)
        else:
            self._loop_over_rows(f"{self.frame.team}.number", f"{self.frame.team}.count")
        whole = Tile(self.arranged.col, self.names.exact("col"), lane, plan.lanes, part, plan.width, True, True, False)
        whole = replace(whole, base=base, limit=limit)
        if held:
            self.frame.held = self._stretch(whole, kept, kept + held * plan.lanes, held)
            if not limit and on_chip == part:
                self.frame.held = replace(self.frame.held, limit=free(part), tail=on_chip < self.frame.held.count)
        if on_chip < part:
            self.frame.rest = self._stretch(whole, on_chip, part, plan.unroll)
        if kept < part and limit:
            limit = self.frame.constant("kept_count", f"fp::least({limit}, {kept})")
        return self._stretch(replace(whole, limit=limit), 0, kept, plan.unroll)

    def _stretch(self, whole: Tile, first: int, end: int, unroll: int) -> Tile:
        """The vectors from `first` to `end` of a member's part, so many at a time."""
        covered, count = unroll * whole.step, end - first
        tail = bool(whole.limit) or count % covered != 0
        start = f"{whole.start} + {first}" if first else whole.start
        return replace(whole, start=start, count=end, loop=covered < count, tail=tail, first=first)

    def _outer(self, plan: Columns, number: str) -> Tile:
        group = "0"
        if plan.team:
            return self._strips(plan, plan.team)
        lane = self.frame.constant("lane", f"threadIdx.x % {plan.lanes}" if plan.groups > 1 else "threadIdx.x")
        if plan.groups > 1:
            thread = "threadIdx.x"
            if self.frame.may_leave(self.kernel.col_count, plan.unroll * plan.groups):
                thread = f"threadIdx.x % {plan.threads}"
            group = self.frame.constant("group", f"{thread} / {plan.lanes}")
            self.frame.first_of_row = f"{group} == 0"
        rows = plan.lanes * plan.width
        here = f"{number} * {plan.lanes} + {lane}"
        if plan.overlap:
            own = f"{lane} < {plan.own_rows // plan.width}"
            self.frame.first_of_row = f"{self.frame.first_of_row} && {own}" if self.frame.first_of_row else own
            self.frame.own_row = f"unsigned({lane if plan.width == 1 else f'{lane} * {plan.width}'})"
            here = f"{number} * {plan.own_rows // plan.width} + {lane}"
        if plan.exchanges:
            self.frame.first_along = self.frame.constant("first_row", f"{number} * {rows}")
            self.frame.place = lane, group
        self._define_row(here if plan.width == 1 else f"({here}) * {plan.width}", rows, plan.width)
        return self._tile(group, plan.groups, self.kernel.col_count, 1)

    def _strips(self, plan: Columns, of_block: TeamPart) -> Tile:
        """A block of a team that takes one strip of rows after another: a part of their columns."""
        team, part = self.kernel.team, of_block.part
        assert team is not None
        assert of_block.buffer is not None
        self.frame.team = self.names.exact("team")
        kind = f"fp::StripTeam<{team.members}, {team.teams}, {plan.strip}, {plan.threads}>"
        self.top.lines.append(f"{kind} {self.frame.team}({self.pointers[team.exchange]});")
        self.frame.lane_of_rows = self.frame.constant("lane", f"threadIdx.x % {plan.lanes}")
        group = self.frame.constant("group", f"threadIdx.x / {plan.lanes}")
        self.frame.first_of_row = f"{group} == 0 && {self.frame.team}.member == 0"
        base = self.frame.constant("first", f"{self.index_type}({self.frame.team}.member) * {part}")
        limit = self.frame.constant("count", f"fp::least({self.index_type}({part}), {self.kernel.col_count} - {base})")
        strips = -(-self.kernel.row_count // (plan.lanes * plan.width))
        self._loop_over_iterations(plan.iterations, of_block.buffer, strips)
        tile = Tile(self.arranged.col, self.names.exact("col"), group, plan.groups, part, 1, True, True, False)
        return replace(tile, base=base, limit=limit)

    def _transposing(self, plan: Transposed, number: str) -> Tile:
        rows, cols = plan.tile
        if self.kernel.col_count > cols:
            number, column = self._tile_of(number, plan.panel, plan.own_rows, -(-self.kernel.col_count // cols))
            self.frame.first_across = self.frame.constant("first_col", f"{column} * {cols}")
        first = self.frame.constant("first_row", f"{number} * {plan.own_rows}")
        lane = self.frame.constant("lane", f"threadIdx.x % {plan.lanes}")
        group = self.frame.read_constant("group", f"threadIdx.x / {plan.lanes}")
        along = lane if plan.width == 1 else f"{lane} * {plan.width}"
        self.frame.first_along, self.frame.place = first, (lane, group)
        if plan.overlap:
            self.frame.own_row = f"unsigned({along})"
        self._define_row(f"{first} + {along}", rows, plan.width)
        start = group
        if across := self.frame.first_across:
            start = self.frame.read_constant("start", lambda: f"{across} + {group}")
        return self._tile(start, plan.groups, self.kernel.col_count, 1)

    def _output_tile(self, plan: OutputTile, number: str) -> Tile:
        self.frame.output_tile = output_tile_place(
            self.arranged, plan, self.top, number, self.frame.constant, self.frame.read_constant
        )
        if isinstance(plan, DeepTile) and plan.parts > 1:
            self.frame.live = f"threadIdx.x < {plan.threads // plan.parts}"
        return Tile(None, self.names.exact("i"), "0", 1, 1, 1, False, False, True)

    def _tile_of(self, number: str, panel: int, rows: int, columns: int) -> tuple[str, str]:
        """Which of the tiles along the rows, and along the `columns`, has block `number`: panel by panel of rows."""
        tiles = -(-self.kernel.row_count // rows)
        if panel == 1:
            tile = self.frame.constant("tile", number)
            return f"fp::div({tile}, {free(columns)})", f"fp::mod({tile}, {free(columns)})"
        tile, within = self.frame.constant("tile", number), free(panel)
        if panel < tiles:
            first = self.frame.constant("first_tile", f"fp::div({tile}, {free(panel * columns)}) * {within}")
            tile = self.frame.constant("place_in_panel", f"fp::mod({tile}, {free(panel * columns)})")
            return f"({first} + fp::mod({tile}, {within}))", f"fp::div({tile}, {within})"
        return f"fp::mod({tile}, {within})", f"fp::div({tile}, {within})"

    def _define_row(self, here: str, per_block: int, width: int) -> None:
        """Define the row axis; threads past the last row stand on it, but are not `live`."""
        axis, count = self.arranged.row, self.kernel.row_count
        if self.frame.leaves_rows(count, per_block):
            here = self.frame.constant("place", here)
            self.frame.live = self.names.exact("live")
            self.top.lines.append(f"const bool {self.frame.live} = {here} < {free(count)};")
            here = f"{self.frame.live} ? {here} : {free(count - width)}"
        if axis is not None:
            self.top.define_axis(axis, self.frame.read_constant("row", here))

    def _tile(self, start: str | Constant, step: int, count: int, scale: int, limit: str = "") -> Tile:
        """The vectors or columns of a thread; `limit` as in `Tile`."""
        unroll, axis = self.schedule.unroll, self.arranged.col
        covered = unroll * step
        # A block whose tile has a place of its own among the columns does not go on to the next.
        loop = covered < count and not isinstance(self.schedule, Transposed)
        tail = bool(limit) or (self.frame.may_leave(count, covered) and (unroll > 1 or not loop))
        once = not loop and not tail and unroll == 1
        if once and self.frame.start is not None and self.frame.keep is Keep.FETCHED:
            once, loop = False, True  # the position is another one in each row
        tile = Tile(axis, self.names.exact("col"), start, step, count, scale, loop, tail, once, limit=limit)
        if once:
            self.frame.define_position(self.top, tile, Number(start, ""))
        return tile
