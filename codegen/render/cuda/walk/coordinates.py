"""The lines of a CUDA kernel that find a thread's place."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.render.cuda.output_tile.place import output_tile_place
from fusepass.codegen.render.cuda.walk.frame import Frame, Number, Turned
from fusepass.codegen.render.cuda.walk.tile import Tile, arrange
from fusepass.codegen.render.numbers import free
from fusepass.codegen.render.spelling import Constant, Identifiers
from fusepass.codegen.schedule.plan import Schedule, Walk
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
        if self.schedule.backwards:
            number = f"{self.index_type}({self.grid.blocks} - 1 - {self.grid.block})"
        match self.schedule.walk:
            case Walk.POINTWISE:
                return self._pointwise(number)
            case Walk.INNER:
                return self._inner(number)
            case Walk.OUTER:
                return self._outer(number)
            case Walk.TRANSPOSE:
                return self._transposing(number)
            case Walk.OUTPUT_TILE:
                return self._output_tile(number)

    def _pointwise(self, number: str) -> Tile:
        plan, row = self.schedule, self.arranged.row
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

    def _inner(self, number: str) -> Tile:
        plan, lane, here = self.schedule, "0", number
        if plan.members > 1:
            return self._member()
        if plan.cluster > 1:
            return self._in_cluster(number)
        if plan.fetches:
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
            self._piece(number, within if plan.groups > 1 else "0")
        if plan.exchanges:
            self.frame.first_across = self.frame.constant("first_row", f"{number} * {plan.groups}")
            self.frame.place = lane, self.frame.constant("group", within)
        if not plan.fetches and not plan.pieces:
            self._define_row(here, plan.groups, 1)
        limit = self._ends(lane) if plan.ends_apart else ""
        return self._tile(lane, plan.lanes, plan.vectors(self.kernel.col_count), plan.width, limit)

    def _ends(self, lane: str) -> str:
        """Define which of the elements at both ends of the row a thread has; the name of how many whole vectors are between them."""
        plan, cols = self.schedule, self.kernel.col_count
        assert plan.start is not None
        if plan.lanes < plan.ends:
            raise RenderError(f"{self.kernel.name} has {plan.lanes} threads for the elements at the ends of a row")
        head = self.frame.head = self.frame.constant("head", self.top.operand(plan.start * -1 % plan.unit))
        count = self.frame.constant("whole", f"({free(cols)} - {head}) / {plan.width}")
        self.frame.end = self.frame.constant("end", f"{lane} < {head} ? {lane} : {lane} + {count} * {plan.width}")
        return count

    def _in_cluster(self, number: str) -> Tile:
        """A block of a cluster: a part of one row."""
        plan, vectors = self.schedule, self.schedule.vectors(self.kernel.col_count)
        self.top.lines.append("fp::enter_cluster();")
        self.frame.member = self.frame.constant("member", f"{self.index_type}({self.grid.block}) % {plan.cluster}")
        lane = self.frame.constant("lane", f"threadIdx.x % {plan.lanes}")
        self.frame.first_of_row = f"{lane} == 0 && {self.frame.member} == 0"
        base = self.frame.constant("first", f"{self.frame.member} * {plan.part}")
        even = plan.part * plan.cluster == vectors and not plan.ends_apart
        self._define_row(f"{number} / {plan.cluster}", 1, 1)
        all_of_row = self._ends(lane) if plan.ends_apart else str(vectors)
        limit = (
            ""
            if even
            else self.frame.constant("count", f"fp::least({self.index_type}({plan.part}), {all_of_row} - {base})")
        )
        tail = not even or plan.part % (plan.unroll * plan.lanes) != 0
        axis, variable = self.arranged.col, self.names.exact("col")
        once = not tail and plan.unroll == 1
        tile = Tile(axis, variable, lane, plan.lanes, plan.part, plan.width, False, tail, once, base=base, limit=limit)
        if once:
            self.frame.define_position(self.top, tile, lane)
        return tile

    def _loop_over_rows(self, first: str, step: str) -> None:
        """A block goes from row to row."""
        row = self.frame.row = self.names.exact("row")
        self.frame.first_row, self.frame.row_step = first, step
        self.frame.row_loop = (
            f"for ({self.index_type} {row} = {first}; {row} < {self.kernel.row_count}; {row} += {step})"
        )
        if self.arranged.row is not None:
            self.top.define_axis(self.arranged.row, row)

    def _piece(self, number: str, group: str) -> None:
        """Define which rows a block goes over, and which of those that it has at once a thread's is."""
        plan, frame, kind = self.schedule, self.frame, self.index_type
        number = frame.constant("piece", number)
        frame.sample = frame.constant("first_of_sample", f"{number} / {plan.pieces} * {plan.over}")
        piece = frame.constant("piece_of_sample", f"{number} % {plan.pieces}") if plan.pieces > 1 else "0"
        begin, end = (
            frame.constant(name, f"{frame.sample} + fp::least({place} * {plan.rows_of_piece}, {kind}({plan.over}))")
            for name, place in (("begin", piece), ("end", f"({piece} + 1)"))
        )
        frame.piece, frame.first_row, frame.end_of_piece = piece, begin, end
        if plan.groups > 1:
            frame.group = frame.constant("group", group)

    def _loop_over_iterations(self, count: int) -> None:
        """A block goes from row to row, or strip to strip, and takes some iterations before the first one, in which the circular buffer fills."""
        plan, row = self.schedule, self.names.exact("row")
        iteration = self.frame.iteration = self.names.exact("turn")
        self.frame.row, self.frame.row_step = row, f"{self.frame.team}.count"
        before = -(-plan.circular_buffer // (plan.iterations * plan.together)) * plan.together  # rows
        step = self.frame.row_step
        self.frame.first_iteration, there = iteration, f" && {iteration} >= 0"
        if plan.together > 1:
            self.frame.first_iteration = self.names.exact("first_turn")
            step, there = f"{plan.together} * {step}", f"{there} && {iteration} < {count}"
        counter, first = self.frame.first_iteration, f"{self.frame.team}.number - {before} * {self.frame.team}.count"
        self.frame.row_loop = f"for ({self.index_type} {counter} = {first}; {counter} < {count}; {counter} += {step})"
        self.frame.first_of_row += there
        assert self.arranged.row is not None
        self.top.define_axis(self.arranged.row, row)

    def _member(self) -> Tile:
        """A block of a team: a part of one row after another."""
        plan, team = self.schedule, self.kernel.team
        assert team is not None
        vectors, part = plan.vectors(self.kernel.col_count), plan.part
        self.frame.team = self.names.exact("team")
        share = plan.threads // 32 // plan.together * 32  # threads that look for what was left of a row
        together = f", {plan.together}, {share}" if plan.together > 1 else ""
        kind = f"fp::Team<{team.members}, {team.teams}{together}>"
        self.top.lines.append(f"{kind} {self.frame.team}({self.pointers[team.exchange]});")
        lane = self.frame.constant("lane", f"threadIdx.x % {plan.lanes}")
        self.frame.first_of_row = f"{lane} == 0 && {self.frame.team}.member == 0"
        base = self.frame.constant("first", f"{self.index_type}({self.frame.team}.member) * {part}")
        even = part * plan.members == vectors
        limit = (
            "" if even else self.frame.constant("count", f"fp::least({self.index_type}({part}), {vectors} - {base})")
        )
        if plan.circular_buffer:
            self._loop_over_iterations(self.kernel.row_count)
        else:
            self._loop_over_rows(f"{self.frame.team}.number", f"{self.frame.team}.count")
        whole = Tile(self.arranged.col, self.names.exact("col"), lane, plan.lanes, part, plan.width, True, True, False)
        whole = replace(whole, base=base, limit=limit)
        if plan.held:
            self.frame.held = self._stretch(whole, plan.kept, plan.kept + plan.held * plan.lanes, plan.held)
            if not limit and plan.on_chip == part:
                self.frame.held = replace(self.frame.held, limit=free(part), tail=plan.on_chip < self.frame.held.count)
        if plan.on_chip < part:
            self.frame.rest = self._stretch(whole, plan.on_chip, part, plan.unroll)
        if plan.kept < part and limit:
            limit = self.frame.constant("kept_count", f"fp::least({limit}, {plan.kept})")
        return self._stretch(replace(whole, limit=limit), 0, plan.kept, plan.unroll)

    def _stretch(self, whole: Tile, first: int, end: int, unroll: int) -> Tile:
        """The vectors from `first` to `end` of a member's part, so many at a time."""
        covered, count = unroll * whole.step, end - first
        tail = bool(whole.limit) or count % covered != 0
        start = f"{whole.start} + {first}" if first else whole.start
        return replace(whole, start=start, count=end, loop=covered < count, tail=tail, first=first)

    def _outer(self, number: str) -> Tile:
        plan, group = self.schedule, "0"
        if plan.members > 1:
            return self._strips()
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

    def _strips(self) -> Tile:
        """A block of a team that takes one strip of rows after another: a part of their columns."""
        plan, team = self.schedule, self.kernel.team
        assert team is not None
        self.frame.team = self.names.exact("team")
        kind = f"fp::StripTeam<{team.members}, {team.teams}, {plan.strip}, {plan.threads}>"
        self.top.lines.append(f"{kind} {self.frame.team}({self.pointers[team.exchange]});")
        self.frame.lane_of_rows = self.frame.constant("lane", f"threadIdx.x % {plan.lanes}")
        group = self.frame.constant("group", f"threadIdx.x / {plan.lanes}")
        self.frame.first_of_row = f"{group} == 0 && {self.frame.team}.member == 0"
        base = self.frame.constant("first", f"{self.index_type}({self.frame.team}.member) * {plan.part}")
        limit = self.frame.constant(
            "count", f"fp::least({self.index_type}({plan.part}), {self.kernel.col_count} - {base})"
        )
        self._loop_over_iterations(-(-self.kernel.row_count // (plan.lanes * plan.width)))
        tile = Tile(self.arranged.col, self.names.exact("col"), group, plan.groups, plan.part, 1, True, True, False)
        return replace(tile, base=base, limit=limit)

    def _transposing(self, number: str) -> Tile:
        plan = self.schedule
        rows, cols = plan.tile
        if self.kernel.col_count > cols:
            number, column = self._tile_of(number, plan.own_rows, -(-self.kernel.col_count // cols))
            self.frame.first_across = self.frame.constant("first_col", f"{column} * {cols}")
        first = self.frame.constant("first_row", f"{number} * {plan.own_rows}")
        lane = self.frame.constant("lane", f"threadIdx.x % {plan.lanes}")
        group = self.frame.read_constant("group", f"threadIdx.x / {plan.lanes}")
        along = lane if plan.width == 1 else f"{lane} * {plan.width}"
        if plan.turned:
            turned = self.frame.turned = Turned(lane, *map(self.names.exact, ("turned", "row", "live")))
            along = lane = turned.place
        self.frame.first_along, self.frame.place = first, (lane, group)
        if plan.overlap:
            self.frame.own_row = f"unsigned({along})"
        if not plan.turned:
            self._define_row(f"{first} + {along}", rows, plan.width)
        start = group
        if across := self.frame.first_across:
            start = self.frame.read_constant("start", lambda: f"{across} + {group}")
        return self._tile(start, plan.groups, self.kernel.col_count, 1)

    def _output_tile(self, number: str) -> Tile:
        self.frame.output_tile = output_tile_place(
            self.arranged, self.schedule, self.top, number, self.frame.constant, self.frame.read_constant
        )
        if self.schedule.parts > 1:
            self.frame.live = f"threadIdx.x < {self.schedule.threads // self.schedule.parts}"
        return Tile(None, self.names.exact("i"), "0", 1, 1, 1, False, False, True)

    def _tile_of(self, number: str, rows: int, columns: int) -> tuple[str, str]:
        """Which of the tiles along the rows, and along the `columns`, has block `number`: panel by panel of rows."""
        panel, tiles = self.schedule.panel, -(-self.kernel.row_count // rows)
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
        loop = covered < count and self.schedule.walk is not Walk.TRANSPOSE
        tail = bool(limit) or (self.frame.may_leave(count, covered) and (unroll > 1 or not loop))
        once = not loop and not tail and unroll == 1
        if once and self.schedule.start is not None and self.schedule.fetches:
            once, loop = False, True  # the position is another one in each row
        tile = Tile(axis, self.names.exact("col"), start, step, count, scale, loop, tail, once, limit=limit)
        if once:
            self.frame.define_position(self.top, tile, Number(start, ""))
        return tile
