"""What the parts of a CUDA kernel's writer share, and the lines that find a thread's place.

A *lane of the vector* (``v``) is an element of a vector; a *step* (``u``) is one of the vectors, or columns, that a
thread handles at a time.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from fusepass.codegen.ir.dataflow import Dataflow
from fusepass.codegen.ir.digits import few_digits
from fusepass.codegen.ir.expr import Builder, Expr, Load, Stat
from fusepass.codegen.ir.index import Axis, Index, axis_index
from fusepass.codegen.ir.program import Program, Role
from fusepass.codegen.ir.vectors import begins_with, is_vector, start_of
from fusepass.codegen.render.cuda_place import PatchPlace, patch_place
from fusepass.codegen.render.cuda_tile import Arranged, Tile
from fusepass.codegen.render.numbers import free
from fusepass.codegen.render.printer import Printer, Scope
from fusepass.codegen.render.spelling import Identifiers, block
from fusepass.codegen.schedule.plan import Schedule, Walk

_CONSTANT = re.compile(r"\s*const (?:int|int64_t|bool) (\w+) = ")


class Frame:
    """What the parts of a kernel's writer share."""

    def __init__(
        self, arranged: Arranged, program: Program, schedule: Schedule, pointers: dict[str, str], names: Identifiers
    ) -> None:
        self.arranged, self.kernel, self.lane = arranged, arranged.kernel, arranged.lane
        self.program, self.schedule, self.pointers, self.names = program, schedule, pointers, names
        self.index_type = "int64_t" if schedule.wide else "int"
        self.dataflow = Dataflow()
        self.builder = (
            Builder()
        )  # of values that are written out differently; they live as long as what is known of them
        self.printer = Printer(names, pointers, self.index_type, general=schedule.general, branches=False)
        self.printer.coordinates = arranged.coordinates
        self.printer.few = few_digits(arranged.kernel, program)
        if arranged.kernel.sweeps and arranged.col is not None:
            inside = {arranged.lane} if schedule.walk is Walk.INNER else set()
            self.printer.along = frozenset({arranged.col} | inside)
        self.printer.window_vector = self._window_vector
        self.top = Scope(self.printer)
        self.u, self.v = names.exact("u"), names.exact("v")
        self.live = ""  # the condition that a thread stands on a row of its own, where that can fail
        # Of a block that exchanges a tile: its first points with a plus sign (along) or without (across), none for 0;
        # and a thread's vector along and point across.
        self.first_along = self.first_across = ""
        self.place = "", ""
        self.first_of_row = ""  # the condition that a thread is the first of those on a row, where there are more
        self.own_row = ""  # which of its block's rows a thread's first one is, where blocks overlap
        self.team = ""  # of a block in a team
        self.member = ""  # which block of its cluster one is
        # Of a block that goes from row to row: the row at hand, the head of the loop, the first row, and how far the next one is.
        self.row = self.row_loop = self.first_row = self.row_step = ""
        self.turn = ""  # with a ring, the row at hand, or less than 0 before the first one
        self.patch: PatchPlace | None = None
        # Of a block's part of a row, after what it keeps in shared memory: what it holds in registers, and what is left.
        self.held: Tile | None = None
        self.rest: Tile | None = None
        self.unroll = schedule.unroll  # steps at a time, in the stretch at hand
        self.again = False  # whether what is loaded now will be loaded again soon
        self.tile = self._coordinates()

    @property
    def vector_rows(self) -> bool:
        """Whether a thread has several rows, each with its own results."""
        return self.schedule.walk in (Walk.OUTER, Walk.CROSSING) and self.schedule.width > 1

    def has_lanes(self, node: Expr) -> bool:
        """Whether the lanes of a vector have different values of `node`."""
        needs = self.dataflow.needs(node)
        if self.schedule.width == 1:
            return False
        return self.lane in needs or (self.vector_rows and any(isinstance(need, Stat) for need in needs))

    def is_wide(self, buffer: str, index: Index) -> bool:
        """Whether the lanes of a vector are one aligned access."""
        axis = self.arranged.axis
        if self.schedule.width == 1 or axis is None or not self.is_aligned(buffer):
            return False
        if self.schedule.start is not None:
            start = start_of(self.first_lane(index), axis)
            return (
                start is not None
                and index.stride(self.lane) == 1
                and begins_with(start, self.schedule.start, self.schedule.width)
            )
        return is_vector(index, axis, self.lane)

    def first_lane(self, index: Index) -> Index:
        """The index of a vector's first element."""
        return index.substitute({self.lane: Index()})

    def left(self, scope: Scope) -> str:
        """How many elements there are from a vector's first one on, where the last vector may have fewer."""
        assert self.arranged.row is not None
        return scope.index(Index(self.kernel.row_count) - axis_index(self.arranged.row))

    def inside(self, scope: Scope) -> str:
        """Where a vector begins in its row, and how many elements that has, as arguments; rows begin anywhere."""
        assert self.arranged.col is not None
        return f"{scope.index(axis_index(self.arranged.col))}, {free(self.kernel.col_count)}"

    def within(self, scope: Scope | None = None) -> str:
        """The condition, known where steps are unrolled, that all elements of the vectors of a step are their row's; else it is asked
        for the vector at hand in `scope`, if there is one."""
        if self.tile.loop or self.schedule.general:
            return "false" if scope is None else f"fp::is_whole<{self.schedule.width}>(false, {self.inside(scope)})"
        before = self.before_end()
        return f"{self.u} > 0 && {before}" if before else "false"

    def before_end(self) -> str:
        """The condition, known where steps are unrolled, that no vector of a step ends behind its row; empty where none is so."""
        plan = self.schedule
        others = (plan.cluster - 1) * plan.part  # vectors that are not the last block's
        last = plan.vectors(self.kernel.col_count) - 2 - others - plan.lanes  # the last two may end behind the row
        return (
            ""
            if self.tile.loop or plan.general or plan.unroll == 1 or last < 0
            else f"{self.u} * {plan.lanes} <= {free(last)}"
        )

    def is_aligned(self, buffer: str) -> bool:
        """Whether `buffer` starts at a multiple of 16 bytes."""
        return self.schedule.aligned or self.program.buffer(buffer).role is not Role.INPUT

    def _window_vector(self, load: Load, axis: Axis) -> str | None:
        """The call that loads all points along a window's axis, where they are one aligned access."""
        nbytes = axis.size * load.dtype.nbytes
        if axis.size < 2 or nbytes not in (4, 8, 16) or not self.is_aligned(load.buffer):
            return None
        return f"fp::load_vector<{axis.size}>" if is_vector(load.index, axis, axis) else None

    def unrolled(self, variable: str, count: int, lines: Sequence[str]) -> list[str]:
        """A loop that the compiler unrolls; the plain lines where it has one turn."""
        if count == 1:
            return list(lines)
        return ["#pragma unroll", *block(f"for (int {variable} = 0; {variable} < {count}; ++{variable})", lines)]

    # ---- the thread's place

    def _coordinates(self) -> Tile:
        number = f"{self.index_type}(blockIdx.x)"
        if self.schedule.backwards:
            number = f"{self.index_type}(gridDim.x - 1 - blockIdx.x)"
        match self.schedule.walk:
            case Walk.POINTWISE:
                return self._pointwise(number)
            case Walk.INNER:
                return self._inner(number)
            case Walk.OUTER:
                return self._outer(number)
            case Walk.CROSSING:
                return self._crossing(number)
            case Walk.PATCH:
                return self._patch(number)

    def may_leave(self, count: int, step: int) -> bool:
        """Whether steps of so many may go past the end of `count` points; for some sizes, where these come at run time."""
        return count % step != 0 or (self.schedule.general and step > 1)

    def _constant(self, name: str, value: str) -> str:
        found = self.names.exact(name)
        self.top.lines.append(f"const {self.index_type} {found} = {value};")
        return found

    def _pointwise(self, number: str) -> Tile:
        plan, row = self.schedule, self.arranged.row
        count = -(-self.kernel.row_count // plan.width)
        if plan.apart:
            thread = self._constant("thread", f"{number} * {plan.threads} + {self.index_type}(threadIdx.x)")
            group = f"fp::div({thread}, {plan.apart}) * {self.index_type}({plan.unroll * plan.apart})"
            start = self._constant("first", f"{group} + fp::mod({thread}, {plan.apart})")
            tail = self.may_leave(count // plan.unroll, plan.threads)
            return Tile(row, self.names.exact("i"), start, plan.apart, count, plan.width, False, tail, False)
        per_block = plan.unroll * plan.threads
        start = self._constant("first", f"{number} * {per_block} + {self.index_type}(threadIdx.x)")
        tail = self.may_leave(count, per_block)
        return Tile(row, self.names.exact("i"), start, plan.threads, count, plan.width, False, tail, False)

    def _inner(self, number: str) -> Tile:
        plan, lane, here = self.schedule, "0", number
        if plan.members > 1:
            return self._member()
        if plan.cluster > 1:
            return self._in_cluster(number)
        if plan.fetches:
            self._loop_over_rows(f"{self.index_type}(blockIdx.x)", f"{self.index_type}(gridDim.x)")
        if plan.lanes > 1:
            # A remainder tells the compiler how many threads there are: conditions go where it sees that they hold.
            ends = self.may_leave(plan.vectors(self.kernel.col_count), plan.unroll * plan.lanes)
            lane = self._constant("lane", f"threadIdx.x % {plan.lanes}" if plan.groups > 1 or ends else "threadIdx.x")
            self.first_of_row = f"{lane} == 0"
        if plan.groups > 1:
            within = f"threadIdx.x / {plan.lanes}" if plan.lanes > 1 else "threadIdx.x"
            here = f"{number} * {plan.groups} + {self.index_type}({within})"
        if plan.exchanges:
            self.first_across = self._constant("first_row", f"{number} * {plan.groups}")
            self.place = lane, self._constant("group", within)
        if not plan.fetches:
            self._define_row(here, plan.groups, 1)
        return self._tile(lane, plan.lanes, plan.vectors(self.kernel.col_count), plan.width)

    def _in_cluster(self, number: str) -> Tile:
        """A block of a cluster: a part of one row."""
        plan, vectors = self.schedule, self.schedule.vectors(self.kernel.col_count)
        self.top.lines.append("fp::enter_cluster();")
        self.member = self._constant("member", f"{self.index_type}(blockIdx.x) % {plan.cluster}")
        lane = self._constant("lane", f"threadIdx.x % {plan.lanes}")
        self.first_of_row = f"{lane} == 0 && {self.member} == 0"
        base = self._constant("first", f"{self.member} * {plan.part}")
        even = plan.part * plan.cluster == vectors
        limit = (
            "" if even else self._constant("count", f"fp::least({self.index_type}({plan.part}), {vectors} - {base})")
        )
        self._define_row(f"{number} / {plan.cluster}", 1, 1)
        tail = not even or plan.part % (plan.unroll * plan.lanes) != 0
        axis, variable = self.arranged.col, self.names.exact("col")
        once = not tail and plan.unroll == 1
        tile = Tile(axis, variable, lane, plan.lanes, plan.part, plan.width, False, tail, once, base=base, limit=limit)
        if once:
            self.define_position(self.top, tile, lane)
        return tile

    def _loop_over_rows(self, first: str, step: str) -> None:
        """A block goes from row to row."""
        row = self.row = self.names.exact("row")
        self.first_row, self.row_step = first, step
        self.row_loop = f"for ({self.index_type} {row} = {first}; {row} < {self.kernel.row_count}; {row} += {step})"
        if self.arranged.row is not None:
            self.top.define_axis(self.arranged.row, row)

    def _loop_over_turns(self) -> None:
        """A block goes from row to row, and takes some turns before the first one, in which the ring fills."""
        plan, row = self.schedule, self.names.exact("row")
        turn = self.turn = self.names.exact("turn")
        self.row, self.row_step = row, f"{self.team}.count"
        first = f"{self.team}.number - {-(-plan.ring // plan.turns)} * {self.team}.count"
        head = f"{self.index_type} {turn} = {first}; {turn} < {self.kernel.row_count}; {turn} += {self.row_step}"
        self.row_loop = f"for ({head})"
        self.first_of_row += f" && {turn} >= 0"
        assert self.arranged.row is not None
        self.top.define_axis(self.arranged.row, row)

    def _member(self) -> Tile:
        """A block of a team: a part of one row after another."""
        plan, team = self.schedule, self.kernel.team
        assert team is not None
        vectors, part = -(-self.kernel.col_count // plan.width), plan.part
        self.team = self.names.exact("team")
        kind = f"fp::Team<{team.members}, {team.teams}>"
        self.top.lines.append(f"{kind} {self.team}({self.pointers[team.exchange]});")
        lane = self._constant("lane", f"threadIdx.x % {plan.lanes}")
        self.first_of_row = f"{lane} == 0 && {self.team}.member == 0"
        base = self._constant("first", f"{self.index_type}({self.team}.member) * {part}")
        even = part * plan.members == vectors
        limit = "" if even else self._constant("count", f"fp::least({self.index_type}({part}), {vectors} - {base})")
        if plan.ring:
            self._loop_over_turns()
        else:
            self._loop_over_rows(f"{self.team}.number", f"{self.team}.count")
        whole = Tile(self.arranged.col, self.names.exact("col"), lane, plan.lanes, part, plan.width, True, True, False)
        whole = replace(whole, base=base, limit=limit)
        if plan.held:
            self.held = self._stretch(whole, plan.kept, plan.kept + plan.held * plan.lanes, plan.held)
            if not limit and plan.on_chip == part:
                self.held = replace(self.held, limit=free(part), tail=plan.on_chip < self.held.count)
        if plan.on_chip < part:
            self.rest = self._stretch(whole, plan.on_chip, part, plan.unroll)
        if plan.kept < part and limit:
            limit = self._constant("kept_count", f"fp::least({limit}, {plan.kept})")
        return self._stretch(replace(whole, limit=limit), 0, plan.kept, plan.unroll)

    def _stretch(self, whole: Tile, first: int, end: int, unroll: int) -> Tile:
        """The vectors from `first` to `end` of a member's part, so many at a time."""
        covered, count = unroll * whole.step, end - first
        tail = bool(whole.limit) or count % covered != 0
        start = f"{whole.start} + {first}" if first else whole.start
        return replace(whole, start=start, count=end, loop=covered < count, tail=tail, first=first)

    def _outer(self, number: str) -> Tile:
        plan, group = self.schedule, "0"
        lane = self._constant("lane", f"threadIdx.x % {plan.lanes}" if plan.groups > 1 else "threadIdx.x")
        if plan.groups > 1:
            thread = "threadIdx.x"
            if self.may_leave(self.kernel.col_count, plan.unroll * plan.groups):
                thread = f"threadIdx.x % {plan.threads}"
            group = self._constant("group", f"{thread} / {plan.lanes}")
            self.first_of_row = f"{group} == 0"
        rows = plan.lanes * plan.width
        here = f"{number} * {plan.lanes} + {lane}"
        if plan.overlap:
            own = f"{lane} < {plan.own_rows // plan.width}"
            self.first_of_row = f"{self.first_of_row} && {own}" if self.first_of_row else own
            self.own_row = f"unsigned({lane if plan.width == 1 else f'{lane} * {plan.width}'})"
            here = f"{number} * {plan.own_rows // plan.width} + {lane}"
        if plan.exchanges:
            self.first_along = f"{self._constant('first_row', f'{number} * {rows}')} + "
            self.place = lane, group
        self._define_row(here if plan.width == 1 else f"({here}) * {plan.width}", rows, plan.width)
        return self._tile(group, plan.groups, self.kernel.col_count, 1)

    def _crossing(self, number: str) -> Tile:
        plan = self.schedule
        rows, cols = plan.tile
        if self.kernel.col_count > cols:
            number, column = self._tile_of(number, rows, -(-self.kernel.col_count // cols))
            self.first_across = self._constant("first_col", f"{column} * {cols}")
        first = self._constant("first_row", f"{number} * {rows}")
        lane = self._constant("lane", f"threadIdx.x % {plan.lanes}")
        group = self._constant("group", f"threadIdx.x / {plan.lanes}")
        self.first_along, self.place = f"{first} + ", (lane, group)
        self._define_row(f"{first} + {lane if plan.width == 1 else f'{lane} * {plan.width}'}", rows, plan.width)
        start = self._constant("start", f"{self.first_across} + {group}") if self.first_across else group
        return self._tile(start, plan.groups, self.kernel.col_count, 1)

    def _patch(self, number: str) -> Tile:
        self.patch = patch_place(self.arranged, self.schedule, self.top, number, self._constant)
        return Tile(None, self.names.exact("i"), "0", 1, 1, 1, False, False, True)

    def define_step(self, scope: Scope) -> None:
        """Define the row of the image in `scope`, for step `u`; of other walks, nothing."""
        if self.patch is not None:
            y = self.arranged.image[0]
            row = self.names.numbered(y.name)
            here = f"{self.patch.top_row} + {self.u}" if self.schedule.unroll > 1 else self.patch.top_row
            scope.lines.append(f"const {self.index_type} {row} = {here};")
            scope.define_axis(y, row)

    def _tile_of(self, number: str, rows: int, columns: int) -> tuple[str, str]:
        """Which of the tiles along the rows, and along the `columns`, has block `number`: panel by panel of rows."""
        panel, tiles = self.schedule.panel, -(-self.kernel.row_count // rows)
        if panel == 1:
            tile = self._constant("tile", number)
            return f"fp::div({tile}, {free(columns)})", f"fp::mod({tile}, {free(columns)})"
        tile, within = self._constant("tile", number), free(panel)
        if panel < tiles:
            first = self._constant("first_tile", f"fp::div({tile}, {free(panel * columns)}) * {within}")
            tile = self._constant("place_in_panel", f"fp::mod({tile}, {free(panel * columns)})")
            return f"({first} + fp::mod({tile}, {within}))", f"fp::div({tile}, {within})"
        return f"fp::mod({tile}, {within})", f"fp::div({tile}, {within})"

    def _define_row(self, here: str, per_block: int, width: int) -> None:
        """Define the row axis; threads past the last row stand on it, but are not `live`."""
        axis, count = self.arranged.row, self.kernel.row_count
        if self.schedule.overlap or self.may_leave(count, per_block):
            here = self._constant("place", here)
            self.live = self.names.exact("live")
            self.top.lines.append(f"const bool {self.live} = {here} < {free(count)};")
            here = f"{self.live} ? {here} : {free(count - width)}"
        if axis is not None:
            self.top.define_axis(axis, self._constant("row", here))

    def _tile(self, start: str, step: int, count: int, scale: int) -> Tile:
        unroll, axis = self.schedule.unroll, self.arranged.col
        covered = unroll * step
        # A block whose tile has a place of its own among the columns does not go on to the next.
        loop = covered < count and self.schedule.walk is not Walk.CROSSING
        tail = self.may_leave(count, covered) and (unroll > 1 or not loop)
        once = not loop and not tail and unroll == 1
        if once and self.schedule.start is not None and self.schedule.fetches:
            once, loop = False, True  # the position is another one in each row
        tile = Tile(axis, self.names.exact("col"), start, step, count, scale, loop, tail, once)
        if once:
            self.define_position(self.top, tile, start)
        return tile

    # ---- positions on a tile

    def number(self, tile: Tile, start: str) -> str:
        """The number of the vector or column that a thread works on in step `u`."""
        parts = [start] if start != "0" else []
        if self.unroll > 1:
            parts.append(self.u if tile.step == 1 else f"{self.u} * {tile.step}")
        return " + ".join(parts) or "0"

    def define_position(self, scope: Scope, tile: Tile, number: str) -> None:
        """Define the tile's axis in `scope`, for vector or column `number`."""
        text = number = f"{tile.base} + {number}" if tile.base else number
        if tile.scale > 1 and number != "0":
            sums = " + " in number and not number.startswith("fp::")
            text = f"({number}) * {tile.scale}" if sums else f"{number} * {tile.scale}"
        if self.schedule.start is not None:
            text = f"{text} - {scope.operand(self.schedule.start % tile.scale)}"
        if text not in ("0", self.u):
            scope.lines.append(f"const {self.index_type} {tile.variable} = {text};")
            text = tile.variable
        if tile.axis is not None:
            scope.define_axis(tile.axis, text)


def without_unused(lines: Sequence[str]) -> list[str]:
    """`lines` without constants that nothing reads, such as the position along an axis that no index needs."""
    counts = Counter(word for line in lines for word in re.findall(r"\w+", line.split("//")[0]))
    kept = [line for line in lines if not ((found := _CONSTANT.match(line)) and counts[found[1]] == 1)]
    return kept if len(kept) == len(lines) else without_unused(kept)
