"""Writes the body of one CUDA kernel: the walk its schedule chose, around the statements that the printer gives.

Every phase (a reduction loop, then the element stores) has the same form: load a few vectors, then compute on them. A thread
past the end loads what the last one loads, so that loads need no condition, and computes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusepass.codegen.ir.dataflow import Kept
from fusepass.codegen.ir.expr import Expr, Load, ReductionResult
from fusepass.codegen.ir.index import axis_index
from fusepass.codegen.ir.output_tiles import deep_windows
from fusepass.codegen.ir.program import Reduction, Store
from fusepass.codegen.render.cuda.output_tile.deep import DeepTiles
from fusepass.codegen.render.cuda.output_tile.lines import LineWindows
from fusepass.codegen.render.cuda.output_tile.planes import PlaneTiles
from fusepass.codegen.render.cuda.output_tile.results import ImageWindows
from fusepass.codegen.render.cuda.output_tile.windows import OutputTiles
from fusepass.codegen.render.cuda.rows.ends import Ends
from fusepass.codegen.render.cuda.rows.fetches import Fetches, prefetch_row
from fusepass.codegen.render.cuda.rows.over_rows import OverRows
from fusepass.codegen.render.cuda.transpose.across import read_in, write_out
from fusepass.codegen.render.cuda.transpose.tiles import SharedTranspose, exchanges
from fusepass.codegen.render.cuda.walk.accesses import (
    Ahead,
    by_turns,
    declare,
    in_turns,
    load_steps,
    load_turns,
    loads_ahead,
    write_store,
)
from fusepass.codegen.render.cuda.walk.frame import Around, Frame
from fusepass.codegen.render.cuda.walk.kept import KeptPlaces, RowValues, values_to_keep
from fusepass.codegen.render.cuda.walk.states import (
    State,
    declare_state,
    is_costly,
    merge,
    name_results,
    push,
)
from fusepass.codegen.render.cuda.walk.tile import Tile
from fusepass.codegen.render.cuda.walk.windows import vector_windows
from fusepass.codegen.render.numbers import free
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import Constant, bare, block, where, written
from fusepass.codegen.schedule.plan import Keep
from fusepass.codegen.schedule.plan_output_tile import LineTile
from fusepass.codegen.schedule.plan_rows import Columns
from fusepass.errors import RenderError


@dataclass(frozen=True)
class Phase:
    """A reduction loop, or the element stores."""

    roots: tuple[Expr, ...]
    states: tuple[State, ...]
    stores: tuple[Store, ...]
    known: tuple[Kept, ...]  # values kept by earlier phases
    made: tuple[Kept, ...]  # values that later phases need
    last: bool = False  # whether no other phase follows


def _output_tiles(frame: Frame) -> ImageWindows:
    if isinstance(frame.schedule, LineTile):
        return LineWindows(frame)
    if frame.arranged.through is not None:
        return PlaneTiles(frame)
    y, x = frame.arranged.image
    deep = deep_windows(frame.kernel, frame.program, (y, x))
    return DeepTiles(frame, deep) if deep else OutputTiles(frame)


class KernelWriter:
    """The lines of one kernel, phase after phase."""

    def __init__(self, frame: Frame) -> None:
        self.frame, self.schedule, self.top = frame, frame.schedule, frame.top
        self.width, self.u, self.v = frame.schedule.width, frame.u, frame.v
        self.kept, self.places = values_to_keep(frame), KeptPlaces(frame)
        self.stats = [node for node in frame.kernel.nodes if isinstance(node, ReductionResult)]
        self.rows = RowValues(frame, self.stats)
        self.ends = Ends(frame) if frame.ends_apart else None
        self.held: dict[int, Ahead] = {}  # loads that stay in registers
        self.pieces = frame.in_rows.pieces if frame.in_rows else None
        self.fetches = self.copies_of_kept() if frame.keep is Keep.FETCHED else None
        self.top.lines += self.fetches.first_row() if self.fetches is not None else []
        self.over_rows = OverRows(frame) if self.pieces else None
        self.before_rows = len(self.top.lines)
        if self.over_rows is not None:
            self.over_rows.begin_iteration()
        if self.fetches is not None:
            self.top.lines += self.fetches.row()
        self.output_tiles = _output_tiles(frame) if frame.output_tile is not None else None
        self.results = None if self.output_tiles is None else self.output_tiles.results
        self.found = None if self.output_tiles is None else self.output_tiles.found
        if frame.kernel.partials is not None and self.found is None and self.over_rows is None:
            raise RenderError(f"{frame.kernel.name} reduces over positions, which only patches and pieces of rows do")
        self.exchanged: tuple[SharedTranspose, ...] = exchanges(frame)
        self.arrived: list[str] = []  # what the loads of a phase are followed by
        self.overflow_flagged = ""  # whether a thread has met an overflow flag

    def write(self) -> list[str]:
        kernel = self.frame.kernel
        for number, reduction_loop in enumerate(kernel.reduction_loops):
            self._reduction_loop(number, reduction_loop)
        if kernel.row_stores:
            self.write_row_stores(kernel.row_stores)
        self.arrived = read_in(self.frame, self.exchanged)
        if self.output_tiles is not None:
            self.output_tiles.compute()
        if kernel.ends_per_element:
            self._element_stores(kernel.stores)
        if self.output_tiles is not None:
            self.output_tiles.close()
        write_out(self.frame, self.exchanged)
        self.places.check()
        stays = self.over_rows is not None or (bool(self.frame.row_loop) and not self.frame.team)
        if stays and len(kernel.reduction_loops) == 1 and self.schedule.lanes > 32:
            self.top.lines.append("__syncthreads();")  # the next row's states go where this one's are read
        lines, iteration = self.top.lines[: self.before_rows], self.top.lines[self.before_rows :]
        if self.over_rows is not None:
            lines = self.over_rows.around(lines, iteration)
        else:
            lines += block(self.frame.row_loop, iteration) if self.frame.row_loop else iteration
        return written(lines)

    def _say(self, text: str) -> None:
        if self.top.lines:
            self.top.lines.append("")
        self.top.lines.append(f"// {text}")

    # ---- phases

    def _reduction_loop(self, number: int, reduction_loop: Sequence[Reduction]) -> None:
        self._say(", ".join(f"{reduction.name}: {reduction.op.value}" for reduction in reduction_loop))
        states = tuple(declare_state(self.frame, reduction) for reduction in reduction_loop)
        self.rows.states |= {state.reduction.name: state for state in states}
        self._phase(number, [value for reduction in reduction_loop for value in reduction.values], states, ())
        last = number + 1 == len(self.frame.kernel.reduction_loops)
        sweep_0 = [value for reduction in self.frame.kernel.reduction_loops[0] for value in reduction.values]
        merge(self.frame, states, prefetch_row(self.frame, sweep_0) if self.frame.team and last else ())
        name_results(self.frame, states, self.stats)

    def _element_stores(self, stores: tuple[Store, ...]) -> None:
        if self.frame.kernel.reduction_loops:
            self._say("results")
        overflow_flag, roots = self.frame.kernel.overflow_flag, [store.value for store in stores]
        roots += self.frame.kernel.partials.values if self.frame.kernel.partials is not None else ()
        if overflow_flag is not None:
            self.overflow_flagged = self.frame.names.exact("alarmed")
            self.top.lines.append(f"bool {self.overflow_flagged} = false;")
            roots.append(overflow_flag.condition)
        self._phase(len(self.frame.kernel.reduction_loops), roots, (), stores)
        if overflow_flag is not None:
            self.top.lines.append(
                f"if ({self.overflow_flagged}) {self.frame.pointers[overflow_flag.buffer]}[0] = 1.0f;"
            )

    def _phase(self, number: int, roots: Sequence[Expr], states: tuple[State, ...], stores: tuple[Store, ...]) -> None:
        frame, tile = self.frame, self.frame.tile
        if frame.kernel.col_count == 0:
            return
        known = tuple(kept for kept in self.kept if kept.first < number)
        made = tuple(kept for kept in self.kept if kept.first == number)
        last = number == len(frame.kernel.reduction_loops) - (not frame.kernel.ends_per_element)
        phase = Phase(tuple(roots), states, stores, known, made, last)
        frame.printer.expect(roots)
        if frame.vector_rows:
            self.rows.compute(roots)
        for kept in made:
            self.places.declare(kept)
        if frame.keep is Keep.PACKED:
            self.top.lines += [f"fp::stay({self.places.name(kept)});" for kept in known]
        rest = replace(phase, known=(), made=())
        if number > 0 and frame.rest is not None:
            self._rest(rest, number, frame.rest)
        held = self._load_held(rest, frame.held) if frame.held is not None else []
        if number > 0 and frame.held is not None:
            self._held(rest, frame.held, held)
        if self.fetches is not None and number == 0:
            self.top.lines.append("fp::await_copies<0>();")
        if self.ends is not None and frame.hastens:
            self.ends.load(phase.roots, [kept.node for kept in phase.known])
        self._stretch(phase, tile)
        if self.ends is not None:
            with_places = [(each, self.places.name(each)) for each in (*phase.known, *phase.made)]
            self.ends.phase(phase.roots, phase.states, phase.stores, with_places, frozenset(map(id, phase.made)))
        if number == 0 and frame.held is not None:
            self._held(rest, frame.held, held)
        if number == 0 and frame.rest is not None:
            self._rest(rest, number, frame.rest)
        if self.fetches is not None and last:
            self.top.lines.append("fp::end_copies();")

    def _rest(self, phase: Phase, number: int, tile: Tile) -> None:
        """What does not stay on the chip: read again in every phase, each time from where the last one ended."""
        self.frame.again = number < len(self.frame.kernel.reduction_loops) and bool(self.frame.kernel.stores)
        self._stretch(phase, tile, down=number % 2 == 1)
        self.frame.again = False

    def _load_held(self, phase: Phase, tile: Tile) -> list[Ahead]:
        """What a thread needs for the vectors that it holds in registers; what it has is not loaded again."""
        frame, rows = self.frame, frozenset(self.frame.kernel.rows)
        assert frame.of_block is not None
        frame.unroll = frame.of_block.held
        ahead = [self.held.get(id(each.load), each) for each in loads_ahead(frame, phase.roots, ())]
        fresh = [each for each in ahead if id(each.load) not in self.held and not each.late]
        self.held |= {id(each.load): each for each in fresh if each.load.index.axes & rows}
        if fresh:
            load_steps(frame, self.top, tile, tile.start, fresh)
        frame.unroll = self.schedule.unroll
        return ahead

    def _held(self, phase: Phase, tile: Tile, ahead: Sequence[Ahead]) -> None:
        """`phase` for the vectors that a thread holds in registers."""
        assert self.frame.of_block is not None
        self.frame.unroll = self.frame.of_block.held
        steps = self.top.child()
        # Values that are computed would all take registers beside what they are computed from.
        computed = any(not isinstance(value, Load) for state in phase.states for value in state.reduction.values)
        write = self._steps if computed else self.all_steps
        write(steps, phase, tile, tile.start, ahead)
        self.top.lines += steps.lines
        self.frame.unroll = self.schedule.unroll

    def _stretch(self, phase: Phase, tile: Tile, *, down: bool = False) -> None:
        """The loop of `phase` over the vectors of `tile`, from the last to the first if `down`."""
        frame = self.frame
        if tile.count == tile.first:
            return
        start = frame.names.numbered("start") if tile.loop else tile.start
        steps = self.top.child()
        exchanged = [each.transposing.load for each in self.exchanged if each.transposing.load is not None]
        ahead = loads_ahead(frame, phase.roots, [*(kept.node for kept in phase.known), *exchanged])
        if self.over_rows is not None and self.pieces and self.pieces.early and phase.states and not phase.known:
            ahead = self.over_rows.brought(ahead, steps)
        ahead = in_turns(frame, phase.roots, ahead)
        early = [each for each in ahead if not each.late and not each.under_way]
        if frame.unroll > 1 and early:
            load_steps(frame, steps, tile, start, early)
        steps.lines += self.arrived
        self.arrived = []
        self.all_steps(steps, phase, tile, start, ahead)
        if tile.loop:
            advance = frame.unroll * tile.step
            span = f"{start} = {tile.start}; {start} < {free(tile.count)}; {start} += {advance}"
            if down:
                beyond = (tile.count - tile.first - 1) // advance * advance
                span = f"{start} = {tile.start} + {beyond}; {start} >= {tile.first}; {start} -= {advance}"
            self.top.lines += block(f"for ({frame.index_type} {span})", steps.lines)
        else:
            self.top.lines += steps.lines

    def all_steps(self, steps: Scope, phase: Phase, tile: Tile, start: str | Constant, ahead: Sequence[Ahead]) -> None:
        """The same, for as many as there are; where all are, what is costly is pushed at once."""
        if not (tile.tail and self.frame.unroll > 1 and any(map(is_costly, phase.states))):
            self._steps(steps, phase, tile, start, ahead)
            return
        whole, single = steps.child(), steps.child()
        self._steps(whole, phase, replace(tile, tail=False), start, ahead)
        self._steps(single, phase, tile, start, ahead)
        within = f"{start} + {(self.frame.unroll - 1) * tile.step} < {tile.end}"
        steps.lines += [*block(f"if ({within})", whole.lines), *block("else", single.lines)]

    def _steps(self, steps: Scope, phase: Phase, tile: Tile, start: str | Constant, ahead: Sequence[Ahead]) -> None:
        """The loop over steps, each with its vector loaded."""
        frame = self.frame
        number = frame.number(tile, start)
        ends = phase.stores or (self.over_rows is not None and not phase.states)
        guards = [frame.live] if ends and frame.live else []
        if tile.tail:
            there = frame.before_limit(tile, number)
            guards.append(f"({there})" if guards and " || " in there else there)
        step = steps.child()
        frame.define_step(step)
        if not tile.once:
            frame.define_position(step, tile, number)
        for turns in by_turns(ahead):
            first = turns[0]
            if (frame.unroll == 1 and not first.under_way) or first.late:
                step.lines.append(declare(frame, first))
                load_turns(frame, step, turns)
            elif not first.lanes:
                for each in turns:
                    step.bind(each.load, each.of_step(frame))
        around = Around([], [], [], [])
        step.lines += self.places.taken(phase.known, number)
        around.after_lanes.extend(self.places.left(phase.made, number))
        self._vector(step, phase, tile, ahead, around)
        if self.fetches is not None and phase.last and tile is frame.tile:
            step.lines += self.fetches.following(number)
        lines = where(step.lines, *guards)
        # What not all threads have comes first: loads are issued before a branch, but put off where the branch is far.
        in_order = any(state.in_order for state in phase.states)
        down = tile.tail and bool(phase.states) and frame.hastens and not in_order
        looped = frame.unrolled(self.u, frame.unroll, lines, down=down)
        steps.lines += [*around.before_steps, *looped, *around.after_steps]

    def _vector(self, step: Scope, phase: Phase, tile: Tile, ahead: Sequence[Ahead], around: Around) -> None:
        """The computation on one vector: what its lanes share, then the lanes, then what uses all of them."""
        lanes = step.child() if self.width > 1 else step
        mark = len(step.lines)
        self._bind(lanes, step, phase, ahead)
        if self.output_tiles is None:
            vector_windows(self.frame, step, lanes, phase.roots, [kept.node for kept in phase.known])
        for kept in phase.made:
            has_lanes = self.frame.has_lanes(kept.node)
            scope = lanes if has_lanes else step
            text = scope.value(kept.node)
            scope.lines.append(f"{self.places.element(kept)} = {bare(text)};")
            scope.bind(kept.node, self.places.element(kept))
        self._take(lanes, phase, tile, around)
        for store in phase.stores:
            if self.results is not None:
                self.results.write(store, lanes, around)
            else:
                write_store(self.frame, self.exchanged, store, lanes, step, around)
        if self.found is not None:
            self.found.collect(lanes)
        if self.over_rows is not None and not phase.states:
            self.over_rows.collect(lanes)
        if phase.stores and self.frame.kernel.overflow_flag is not None:
            lanes.lines.append(f"{self.overflow_flagged} |= {lanes.value(self.frame.kernel.overflow_flag.condition)};")
        before = [*self.places.staging(phase.made), *around.before_lanes]
        if self.width > 1:
            step.lines[mark:mark] = before
            step.lines += self.frame.unrolled(self.v, self.width, lanes.lines)
        else:
            step.lines[mark:mark] = before
        step.lines += around.after_lanes

    def _take(self, lanes: Scope, phase: Phase, tile: Tile, around: Around) -> None:
        """What a reduction loop does with the values of a vector."""
        for state in phase.states:
            push(self.frame, tile, lanes, state, around)

    def _bind(self, lanes: Scope, step: Scope, phase: Phase, ahead: Sequence[Ahead]) -> None:
        """Make known what earlier phases and loads left in registers."""
        if self.width > 1:
            lanes.define_axis(self.frame.lane, self.v)
        for each in ahead:
            if each.lanes:
                lanes.bind(each.load, f"{each.of_step(self.frame)}[{self.v}]")
        for whole, value in (each.whole for each in ahead if each.whole):
            lanes.bind(whole, lanes.value(value))
        for kept in phase.known:
            (lanes if self.frame.has_lanes(kept.node) else step).bind(kept.node, self.places.element(kept))
        for exchange in self.exchanged:
            if exchange.transposing.load is not None:
                lanes.bind(exchange.transposing.load, exchange.read(self.frame, step, lanes))
        if self.frame.vector_rows:
            self.rows.bind(lanes)
        if self.output_tiles is not None:
            self.output_tiles.bind(lanes)

    # ---- kept values

    def copies_of_kept(self) -> Fetches:
        """Those of a row's values, where what is kept is in its places before the first reduction loop."""
        self.kept = tuple(replace(kept, first=-1) for kept in self.kept)
        for kept in self.kept:
            self.places.declare(kept)
        loads = [(kept.node, self.places.name(kept)) for kept in self.kept if isinstance(kept.node, Load)]
        return Fetches(self.frame, loads)

    # ---- rows

    def write_row_stores(self, stores: Sequence[Store]) -> None:
        self._say("per row")
        frame = self.frame
        frame.printer.expect([store.value for store in stores])
        guards = [condition for condition in (frame.first_of_row, frame.live) if condition]
        step = self.top.child(conditional=bool(guards))
        around = Around([], [], [], [])
        lanes = step.child() if frame.vector_rows else step
        if frame.vector_rows:
            lanes.define_axis(frame.lane, self.v)
            self.rows.bind(lanes)
        span = self.schedule.span if isinstance(self.schedule, Columns) else 1
        inside = lanes.child(conditional=True) if span > 1 else lanes
        for store in stores:
            write_store(frame, self.exchanged, store, inside, step, around)
        if inside is not lanes:  # of the rows that are parts of one, the first
            assert frame.arranged.row is not None
            row = axis_index(frame.arranged.row) + (axis_index(frame.lane) if frame.vector_rows else 0)
            lanes.lines += block(f"if ({lanes.index(row % span)} == 0)", inside.lines)
        if frame.vector_rows:
            step.lines += [*around.before_lanes, *frame.unrolled(self.v, self.width, lanes.lines), *around.after_lanes]
        self.top.lines += where(step.lines, *guards)
