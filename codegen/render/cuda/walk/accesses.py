"""Loads that a CUDA kernel issues before it computes, so that many are in flight at once, and stores: whole vectors, single elements, or into a tile."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from fusepass.codegen.ir.concatenation import Concatenation, alike, concatenations
from fusepass.codegen.ir.expr import Expr, Load, walk
from fusepass.codegen.ir.guards import Guard, guarded_loads
from fusepass.codegen.ir.index import axis_index
from fusepass.codegen.ir.program import Store
from fusepass.codegen.ir.transpose import neighbours
from fusepass.codegen.render.cuda.transpose.tiles import SharedTranspose
from fusepass.codegen.render.cuda.walk.frame import Around, Frame, Number
from fusepass.codegen.render.cuda.walk.tile import Tile
from fusepass.codegen.render.numbers import free
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import C_TYPES, Constant, block, braces
from fusepass.codegen.schedule.plan import Keep
from fusepass.codegen.schedule.plan_flat import Pointwise
from fusepass.codegen.schedule.plan_output_tile import OutputTile


@dataclass(frozen=True)
class Ahead:
    """A load issued before the computation.

    Attributes:
        guard: what must hold for it, the same for all lanes of a vector.
        wide: whether it is one access for all lanes.
        lanes: whether the lanes of a vector have different elements.
        name: the C variable that receives it.
        same: whether all steps of a thread load the same.
        under_way: whether it was issued in the step before.
        stays: whether all rows need it, so that the cache should have it.
        late: whether a step issues it for itself: those of all steps would take the registers that hold the row.
        turn: its number among loads into one variable, of which a thread needs one.
        whole: what that variable is whichever was loaded, and as which value of this load, if it is a concatenation as it is.
    """

    load: Load
    guard: Guard
    wide: bool
    lanes: bool
    name: str
    same: bool = False
    under_way: bool = False
    stays: bool = False
    late: bool = False
    turn: int = 0
    whole: tuple[Expr, Expr] | None = None

    def of_step(self, frame: Frame) -> str:
        """The C text of what step `u` loaded."""
        return self.name if self.same or self.late or frame.unroll == 1 else f"{self.name}[{frame.u}]"


def loads_ahead(frame: Frame, roots: Sequence[Expr], known: Collection[Expr]) -> list[Ahead]:
    """The loads below `roots` that can be issued ahead; what is below `known` values is not needed."""
    if frame.unroll == 1 and frame.schedule.width == 1:
        return []
    found = (_issue(frame, load, guard) for load, guard in needed(frame, roots, known))
    return [ahead for ahead in found if ahead is not None]


def needed(frame: Frame, roots: Sequence[Expr], known: Collection[Expr] = ()) -> Iterator[tuple[Load, Guard]]:
    """Each load outside of windows with what must hold for it, where that is one condition that lanes do not differ in."""
    for load, guard in guarded_loads(roots, known):
        if guard is not None and all(frame.lane not in bound.index.axes for bound in guard):
            yield load, guard


def _issue(frame: Frame, load: Load, guard: Guard) -> Ahead | None:
    arranged = frame.arranged
    axis = arranged.axis if isinstance(frame.schedule, Pointwise | OutputTile) else arranged.col
    lanes = frame.has_lanes(load)
    if frame.unroll == 1 and not lanes:
        return None
    if not any(axis in index.axes for index in (load.index, *(bound.index for bound in guard))):
        return None  # the same for a whole row: printed before the loop
    name = frame.names.numbered(f"{frame.pointers[load.buffer]}_in")
    same = not guard and _same_for_all_steps(frame, load)
    wide = frame.is_wide(load.buffer, load.index)
    return Ahead(load, guard, wide, lanes, name, same, late=_late(frame, load, wide))


def _late(frame: Frame, load: Load, wide: bool) -> bool:
    """Whether what rows share waits until its step, as the caches have it: single elements of it, or what would take the registers of a row
    that is packed to fit."""
    elements = frame.kernel.row_count * frame.kernel.col_count
    shared = frame.program.buffer(load.buffer).numel < elements // 4
    return shared and (frame.keep is Keep.PACKED or (frame.start is not None and not wide))


def _ends_buffer(frame: Frame, load: Load) -> bool:
    """Whether a vector of a row that begins anywhere may have elements behind the end of its buffer."""
    last = frame.first_lane(load.index).bounds[1] + 2 * frame.schedule.width  # the last vector may begin behind its row
    return frame.schedule.general or last > frame.program.buffer(load.buffer).extent


def _same_for_all_steps(frame: Frame, load: Load) -> bool:
    """Whether a thread that takes the same place of several samples loads the same for each of them."""
    plan, axis = frame.schedule, frame.arranged.axis
    if not isinstance(plan, Pointwise) or not plan.apart or axis is None:
        return False
    further = load.index.substitute({axis: axis_index(axis) + plan.apart * plan.width})
    return further == load.index


def declare(frame: Frame, each: Ahead) -> str:
    """The declaration of what receives a load, for all steps."""
    several = frame.unroll > 1 and not each.same and not each.late
    return declare_one(frame, each, f"[{frame.unroll}]" if several else "")


def declare_one(frame: Frame, each: Ahead, array: str = "") -> str:
    """The declaration of what receives one load, or as many as `array` says."""
    element = C_TYPES[each.load.dtype]
    kind = f"fp::Vec<{element}, {frame.schedule.width}>" if each.lanes else element
    return f"{kind} {each.name}{array}{' = {}' if each.guard else ''};"


def load_steps(frame: Frame, scope: Scope, tile: Tile, start: str | Constant, ahead: Sequence[Ahead]) -> None:
    """Declare and load for all steps; a step past the end loads what the last vector has."""
    scope.lines += [declare(frame, each) for each in ahead if not each.turn]
    first = [each for each in ahead if each.same]
    if first:
        lines = _loads(
            frame, scope, tile, f"fp::least({start}, {tile.last})" if tile.tail else Number(start, ""), first
        )
        scope.lines += braces(lines)
    fill_steps(frame, scope, tile, start, [each for each in ahead if not each.same])


def fill_steps(frame: Frame, scope: Scope, tile: Tile, start: str | Constant, ahead: Sequence[Ahead]) -> None:
    """Load for all steps into what is declared."""
    number: str | Number = frame.number(tile, start)
    if tile.tail and not tile.once:
        number = frame.clamped(tile, number)
    scope.lines += frame.unrolled(frame.u, frame.unroll, _loads(frame, scope, tile, number, ahead))


def _loads(frame: Frame, scope: Scope, tile: Tile, number: str | Number, ahead: Sequence[Ahead]) -> list[str]:
    """The loads of vector `number`, with names of their own below `scope`."""
    inner = scope.child()
    frame.define_step(inner)
    if not tile.once:
        frame.define_position(inner, tile, number)
    for turns in by_turns(ahead):
        load_turns(frame, inner, turns)
    return inner.lines


def by_turns(ahead: Sequence[Ahead]) -> Iterator[list[Ahead]]:
    """`ahead`, those together that are loaded into one variable."""
    return (list(turns) for _, turns in groupby(ahead, key=lambda each: each.name))


def load_turns(frame: Frame, scope: Scope, turns: Sequence[Ahead]) -> None:
    """Load what a step needs of those that take turns."""
    if len(turns) == 1:
        load_one(frame, scope, turns[0], turns[0].of_step(frame))
        return
    inside = [scope.child(conditional=True) for _ in turns]
    for each, own in zip(turns, inside, strict=True):
        _load(frame, own, each, each.of_step(frame))
    conditions = [scope.condition(each.guard) for each in turns]
    for each, own, condition in zip(turns, inside, conditions, strict=True):
        scope.lines += block(f"{'else ' if each.turn else ''}if ({condition})", own.lines)


def load_one(frame: Frame, scope: Scope, each: Ahead, target: str) -> None:
    """Load into `target` where the guard holds."""
    inside = scope.child(conditional=True) if each.guard else scope
    _load(frame, inside, each, target)
    if each.guard:
        scope.lines += block(f"if ({scope.condition(each.guard)})", inside.lines)


def _load(frame: Frame, inside: Scope, each: Ahead, target: str) -> None:
    """Load into `target` whatever the guard says."""
    pointer, index = frame.pointers[each.load.buffer], each.load.index
    once = each.load.buffer in frame.schedule.memory.once and not frame.again
    if each.wide:
        reuse = ", fp::Reuse::much" if each.stays else ", fp::Reuse::none" if once else ""
        arguments = f"{frame.schedule.width}{reuse}"
        start = inside.operand(frame.first_lane(index))
        call = f"fp::load_vector<{arguments}>({pointer} + {start})"
        if isinstance(frame.schedule, Pointwise) and frame.schedule.ragged:
            call = f"fp::load_first<{frame.schedule.width}>({pointer} + {start}, {frame.left(inside)})"
        if frame.overhangs and _ends_buffer(frame, each.load):
            extent = free(frame.program.buffer(each.load.buffer).extent)
            left, before = f"{extent} - {start}", frame.before_end()
            left = f"{before} ? {frame.schedule.width} : {left}" if before else left
            call = f"fp::load_first<{arguments}>({pointer} + {start}, {left})"
        inside.lines.append(f"{target} = {call};")
    elif each.lanes and (found := frame.picked(each.load.buffer, index)) is not None:
        lanes, whole = inside.child(), frame.names.numbered(f"{each.name}_of")
        start = inside.operand(found.start)
        inside.lines.append(f"const auto {whole} = fp::load_vector<{found.count}>({pointer} + {start});")
        lanes.define_axis(frame.lane, frame.v)
        lanes.lines.append(f"{target}[{frame.v}] = {whole}[{lanes.index(found.place)}];")
        inside.lines += frame.unrolled(frame.v, frame.schedule.width, lanes.lines)
    elif each.lanes:
        lanes = inside.child({frame.lane: frame.v})
        source = f"{pointer}[{lanes.index(index)}]"
        if frame.overhangs:
            known = "" if frame.within() == "false" else f"({frame.within()}) || "
            condition = f"{known}fp::is_inside({frame.v}, {frame.inside(inside)})"
            source = f"fp::load_if({condition}, {pointer} + {lanes.operand(index)})"
        lanes.lines.append(f"{target}[{frame.v}] = {source};")
        inside.lines += frame.unrolled(frame.v, frame.schedule.width, lanes.lines)
    elif once:
        inside.lines.append(f"{target} = fp::load<fp::Reuse::none>({pointer} + {inside.operand(index)});")
    else:
        inside.lines.append(f"{target} = {pointer}[{inside.index(index)}];")


_REGISTERS = 255  # of a thread, at most
_WORD = 4  # bytes of one
_CHOICES = 6
"""Pieces of a concatenation whose loads are written out for several steps, each under its own condition. LLVM does not see that one excludes the
others: with 7 pieces and two steps it looks for something for half a second, with 8 for 6, with 9 for minutes."""


def in_turns(frame: Frame, roots: Sequence[Expr], ahead: Sequence[Ahead]) -> list[Ahead]:
    """`ahead`, with one variable for the pieces of each concatenation below `roots` that take more registers than a thread has, or are too many for a compiler."""
    ahead = list(ahead)
    if _are_few(frame, ahead, sum(each.guard != () for each in ahead)):
        return ahead
    for found in concatenations(roots):
        pieces = _loads_of_pieces(found, ahead)
        own = [each for loads in pieces for each in loads]
        if _are_few(frame, own, len(pieces)):
            continue
        together = _turns(pieces)
        first, *others = (value for _, value in found.pieces)
        one_each = [len(turns) for turns in together] == [len(own)] == [len(found.pieces)]
        same = one_each and all(alike(first, value) for value in others)
        for turns in together:
            there, taken = ahead.index(turns[0]), {id(each) for each in turns}
            before, after = (
                [each for each in part if id(each) not in taken] for part in (ahead[:there], ahead[there:])
            )
            shared = [replace(each, name=turns[0].name, turn=turn) for turn, each in enumerate(turns)]
            shared[0] = replace(shared[0], whole=(found.whole, first) if same else None)
            ahead = [*before, *shared, *after]
    return ahead


def _are_few(frame: Frame, ahead: Sequence[Ahead], pieces: int) -> bool:
    """Whether `ahead`, of at most so many pieces, may have a variable each."""
    return _registers(frame, ahead) <= _REGISTERS and (frame.unroll == 1 or pieces <= _CHOICES)


def _loads_of_pieces(found: Concatenation, ahead: Sequence[Ahead]) -> list[list[Ahead]]:
    """The loads of each piece that are its alone, of pieces that have some."""
    bounds = {id(load): bound for bound, value in found.pieces for load in walk(value) if isinstance(load, Load)}
    own: dict[Guard, list[Ahead]] = defaultdict(list)
    for each in ahead:
        free_to_share = not (each.turn or each.whole or each.late or each.under_way)
        if free_to_share and each.guard and each.guard == (bounds.get(id(each.load)),):
            own[each.guard].append(each)
    return [*own.values()]


def _turns(pieces: Sequence[Sequence[Ahead]]) -> list[list[Ahead]]:
    """Loads of one kind, at most one of each piece, several of them together."""
    turns: dict[object, list[Ahead]] = defaultdict(list)
    for loads in pieces:
        count: Counter[object] = Counter()
        for each in loads:
            kind = each.load.dtype, each.lanes
            turns[kind, count[kind]].append(each)
            count[kind] += 1
    return [group for group in turns.values() if len(group) > 1]


def _registers(frame: Frame, ahead: Sequence[Ahead]) -> int:
    """Of a thread that has all of `ahead` that it may do without."""
    elements = [(frame.schedule.width if each.lanes else 1) * each.load.dtype.nbytes for each in ahead if each.guard]
    return frame.unroll * sum(-(-nbytes // _WORD) for nbytes in elements)


def write_store(
    frame: Frame, exchanged: Sequence[SharedTranspose], store: Store, lanes: Scope, step: Scope, around: Around
) -> None:
    """Add `store` of the vector at hand to the scope of its `lanes`, or to what comes `around` them; `step` is the vector's scope."""
    buffer = frame.program.buffer(store.buffer)
    pointer, element = frame.pointers[store.buffer], C_TYPES[buffer.dtype]
    value = lanes.converted(store.value, buffer.dtype)
    exchange = next((each for each in exchanged if each.transposing.store is store), None)
    if exchange is not None:
        exchange.write(frame, lanes, value, around)
        return
    own = _own(frame, store, step)
    if not frame.is_wide(store.buffer, store.index):
        index = lanes.index(store.index)
        if frame.overhangs and store not in frame.kernel.row_stores:
            lanes.lines += block(
                f"if (fp::is_inside({frame.v}, {frame.inside(lanes)}))", [f"{pointer}[{index}] = {value};"]
            )
            return
        line = f"fp::store_if({own}, {pointer} + ({index}), fp::Vec<{element}, 1>{{{{{value}}}}});" if own else ""
        lanes.lines.append(line or f"{pointer}[{index}] = {value};")
        return
    result = frame.names.numbered(f"{pointer}_out")
    around.before_lanes.append(f"fp::Vec<{element}, {frame.schedule.width}> {result};")
    lanes.lines.append(f"{result}[{frame.v}] = {value};")
    reuse = "<fp::Reuse::none>" if store.buffer in frame.schedule.memory.once else ""
    start = step.operand(frame.first_lane(store.index))
    call = f"fp::store_vector{reuse}({pointer} + {start}, {result});"
    if isinstance(frame.schedule, Pointwise) and frame.schedule.ragged:
        call = f"fp::store_first({pointer} + {start}, {result}, {frame.left(step)});"
    if frame.overhangs:
        call = f"fp::store_inside{reuse}({pointer} + {start}, {result}, {frame.within()}, {frame.inside(step)});"
    if own:
        call = f"fp::store_if({own}, {pointer} + {start}, {result});"
    around.after_lanes.append(call)


def _own(frame: Frame, store: Store, step: Scope) -> str:
    """The condition that the sector in which a store begins is the block's, where blocks overlap; else empty.

    A sector is the block's that has its first row as one of its own. It computes the others, too, as far as they follow in memory. Of output tiles
    that overlap, the same holds of results that may differ.
    """
    row = frame.arranged.row
    if frame.output_tile is not None:
        return frame.own_in_tile() if frame.apart else ""
    if not frame.overlap or row is None or store in frame.kernel.row_stores:
        return ""
    first = frame.first_lane(store.index)
    run = step.index(axis_index(row) % neighbours(first, row))
    past = f"fp::least(unsigned({step.index(first)}) % {frame.overlap}, unsigned({run}))"
    return f"{frame.own_row} - {past} < {frame.own_rows}"
