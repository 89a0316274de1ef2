"""Reduction states of a CUDA kernel: declared, pushed to, merged among a row's threads, and their results named."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Apply, Const, Expr, Op, Position, ReduceOp, ReductionResult, children
from fusepass.codegen.ir.program import Reduction
from fusepass.codegen.ir.team import exchange_offsets
from fusepass.codegen.render.cuda.walk.frame import Around, Frame
from fusepass.codegen.render.cuda.walk.tile import Tile
from fusepass.codegen.render.printer import Scope, is_term
from fusepass.codegen.render.spelling import C_TYPES, bare, block, literal
from fusepass.codegen.schedule.plan_rows import Columns, Rows

_MANY = 24  # equal numbers are off by at most 3.9e-7 of their sum then, 4 units in the last place being 4.8e-7
_COSTLY_PUSH = (ReduceOp.MOMENTS, ReduceOp.SOFTMAX)  # a division or exponentials per push, of one value or many


@dataclass(frozen=True)
class State:
    """A reduction's state variable.

    Attributes:
        element: the state of the row at hand; `name` is an array where a thread may have several rows.
        slots: shared memory to merge through, where a row has threads of several warps.
        few: whether what it sums needs few digits.
        length: what its type is called before its name, where a thread adds up so many numbers that their roundings count.
        in_order: whether each thread meets the elements of its row in order, of which the state is to know the place of one.
    """

    reduction: Reduction
    name: str
    element: str
    slots: str
    few: bool = False
    length: str = ""
    in_order: bool = False

    @property
    def type(self) -> str:
        more = ", true" if self.few else ", int" if self.in_order else ""
        return f"fp::{self.length}{self.reduction.op.value}<{C_TYPES[self.reduction.dtype]}{more}>"


def declare_state(frame: Frame, reduction: Reduction) -> State:
    """A new state, which holds nothing yet."""
    plan, lines = frame.schedule, frame.top.lines
    name = frame.names.exact(f"{reduction.name}_state")
    array, element = "", name
    if isinstance(plan, Columns):
        array, element = f"[{plan.width}]", f"{name}[{frame.v if frame.vector_rows else 0}]"
    few, length = reduction.name in frame.printer.few.sums, _length(frame, reduction)
    slots, in_order = frame.names.exact(f"{name}_slots"), _is_in_order(frame, reduction)
    state = State(reduction, name, element, slots, few, length, in_order)
    room = 0
    if isinstance(plan, Columns) and plan.team:
        parts = plan.groups // max(32 // plan.lanes, 1)
        kind = f"fp::Side<fp::Merging<{state.type}>::Kept, {parts}, {plan.lanes * plan.width}>"
        lines += [f"__shared__ {kind} {state.slots};", f"{state.type} {name}{array};"]
        return state
    if isinstance(plan, Rows) and plan.lanes > 32:
        room = plan.lanes // 32
    elif isinstance(plan, Columns) and plan.groups > 1:
        room = plan.groups // max(32 // plan.lanes, 1) * plan.lanes * plan.width
    if room:
        lines.append(f"__shared__ fp::Slots<{state.type}, {room}> {state.slots};")
    lines.append(f"{state.type} {name}{array};")
    return state


def _length(frame: Frame, reduction: Reduction) -> str:
    """The sum for as many floats, or vectors of them, as a thread adds, if a plain one should have fewer; those of teams do not."""
    plan = frame.schedule
    if isinstance(plan, Columns) and plan.team:
        return "First" if reduction.op is ReduceOp.MOMENTS else ""
    if (reduction.op, reduction.dtype) != (ReduceOp.SUM, DType.F32) or frame.team:
        return ""
    threads = plan.groups if isinstance(plan, Columns) else plan.lanes * plan.width
    if plan.general or frame.kernel.col_count > 2 * _MANY * threads:
        return "Long"
    return "Paired" if frame.kernel.col_count > _MANY * threads else ""


def _is_in_order(frame: Frame, reduction: Reduction) -> bool:
    """Whether threads meet elements in the order in which `reduction` counts them, and 32 bits are enough for that."""
    plan, col = frame.schedule, frame.arranged.col
    backward = isinstance(plan, Rows) and (plan.backward or plan.run)
    apart = backward or plan.general or frame.of_block or frame.team or frame.rest or frame.held
    if apart or col is None or not reduction.op.finds_place:
        return False
    place = reduction.values[1]
    if not isinstance(place, Position):
        return False
    first, last = place.index.bounds
    return first == 0 and last < 1 << 31 and (place.index.stride(col) or 0) > 0


def is_costly(state: State) -> bool:
    """Whether pushing the values of all steps at once is much less work than one step after the other."""
    return state.reduction.op in _COSTLY_PUSH


def push(frame: Frame, tile: Tile, lanes: Scope, state: State, around: Around) -> None:
    """Push the values of one vector, or of all steps at once where a push is costly and no step is left out."""
    plan, reduction = frame.schedule, state.reduction
    if is_term(reduction.values[0]) and reduction.op is ReduceOp.SUM and not frame.overhangs:
        _push_term(frame, lanes, state, around)
        return
    values = [accumulated(lanes, reduction, value) for value in reduction.values]
    element = C_TYPES[reduction.dtype]
    steps = frame.unroll if not tile.tail and is_costly(state) else 1
    step = f"{frame.u} * {plan.width} + " if plan.width > 1 else frame.u
    if frame.overhangs:
        _push_inside(frame, lanes, state, values, around, steps)
    elif frame.vector_rows and steps > 1:
        pushed = frame.names.numbered("pushed")
        around.before_steps.append(f"{element} {pushed}[{plan.width}][{steps}];")
        lanes.lines.append(f"{pushed}[{frame.v}][{frame.u}] = {bare(values[0])};")
        many = [f"{state.element}.push_many({pushed}[{frame.v}]);"]
        around.after_steps.extend(frame.unrolled(frame.v, plan.width, many))
    elif not frame.vector_rows and steps > 1:
        pushed = frame.names.numbered("pushed")
        around.before_steps.append(f"{element} {pushed}[{steps * plan.width}];")
        place = step + (frame.v if plan.width > 1 else "")
        lanes.lines.append(f"{pushed}[{place}] = {bare(values[0])};")
        around.after_steps.append(f"{state.element}.push_many({pushed});")
    elif not frame.vector_rows and plan.width > 1 and len(values) == 1:
        pushed, halves = frame.names.numbered("pushed"), _halves(reduction)
        element = C_TYPES[halves.dtype] if halves else element
        around.before_lanes.append(f"{element} {pushed}[{plan.width}];")
        lanes.lines.append(f"{pushed}[{frame.v}] = {bare(lanes.value(halves) if halves else values[0])};")
        around.after_lanes.append(f"{state.element}.push_many({pushed});")
    else:
        lanes.lines.append(f"{state.element}.{_pushing(state)}({', '.join(map(bare, values))});")


def _push_term(frame: Frame, lanes: Scope, state: State, around: Around) -> None:
    """Push a product that is rounded with the sum: of the vector's first, where its elements are of one row."""
    (value,) = state.reduction.values
    if frame.vector_rows or frame.schedule.width == 1:
        lanes.lines.append(f"{state.element}.{lanes.pushed(value)};")
        return
    some, factors = frame.names.numbered("some"), ", ".join(bare(lanes.value(factor)) for factor in children(value))
    around.before_lanes.append(f"{C_TYPES[value.dtype]} {some} = {literal(Const(0.0, value.dtype))};")
    lanes.lines.append(f"{some} = fp::fma({factors}, {some});")
    around.after_lanes.append(f"{state.element}.push({some});")


def _pushing(state: State) -> str:
    return "push_behind" if state.in_order else "push"


def _halves(reduction: Reduction) -> Expr | None:
    """The numbers of 16 bits that the extreme of a vector may be found among before they become floats; None where there are none."""
    (value,) = reduction.values
    if reduction.op not in (ReduceOp.MAX, ReduceOp.MIN) or reduction.dtype is not DType.F32:
        return None
    while isinstance(value, Apply) and value.op is Op.CAST and value.dtype is DType.F32:
        (value,) = value.args
    return value if value.dtype in (DType.F16, DType.BF16) else None


def pushed_one(scope: Scope, state: State) -> str:
    """The statement that pushes what one element gives."""
    values = [bare(accumulated(scope, state.reduction, value)) for value in state.reduction.values]
    return f"{state.element}.push({', '.join(values)});"


def _push_inside(frame: Frame, lanes: Scope, state: State, values: Sequence[str], around: Around, steps: int) -> None:
    """Push those values of a vector that are its row's; of so many steps at once."""
    if len(values) > 1:
        pushed = f"{state.element}.{_pushing(state)}({', '.join(map(bare, values))});"
        lanes.lines += block(f"if (fp::is_inside({frame.v}, {frame.inside(lanes)}))", [pushed])
        return
    name, element = frame.names.numbered("pushed"), C_TYPES[state.reduction.dtype]
    if steps > 1:
        cols = frame.names.numbered("pushed_from")
        around.before_steps.append(f"{element} {name}[{steps}][{frame.schedule.width}];")
        around.before_steps.append(f"{frame.index_type} {cols}[{steps}];")
        lanes.lines.append(f"{name}[{frame.u}][{frame.v}] = {bare(values[0])};")
        around.after_lanes.append(f"{cols}[{frame.u}] = {frame.column(lanes)};")
        around.after_steps.append(f"fp::push_steps_inside({state.element}, {name}, {cols}, {frame.length});")
        return
    around.before_lanes.append(f"{element} {name}[{frame.schedule.width}];")
    lanes.lines.append(f"{name}[{frame.v}] = {bare(values[0])};")
    around.after_lanes.append(
        f"fp::push_inside({state.element}, {name}, {frame.within(lanes)}, {frame.inside(lanes)});"
    )


def accumulated(scope: Scope, reduction: Reduction, value: Expr) -> str:
    """A reduction's operand in the type it accumulates in; positions keep theirs."""
    text = scope.value(value)
    is_position = reduction.op.finds_place and value is reduction.values[1]
    wanted = DType.I64 if is_position else reduction.dtype
    return text if value.dtype is wanted else f"fp::cast<{C_TYPES[wanted]}>({bare(text)})"


def merge(frame: Frame, states: Sequence[State], meanwhile: Sequence[str] = ()) -> None:
    """Give every thread of a row the merged states; all reductions of a reduction loop share one barrier.

    `meanwhile` is what a team's blocks do before they wait for each other.
    """
    plan, lines = frame.schedule, frame.top.lines
    if frame.team:
        lines += [*left(frame, states), *meanwhile, *found(frame, states, [state.name for state in states])]
    elif isinstance(plan, Rows) and 1 < plan.lanes <= 32:
        lines += [f"fp::merge_lanes<{plan.lanes}>({state.name});" for state in states]
    elif isinstance(plan, Rows) and plan.lanes > 32:
        lines += [f"fp::leave_warp({state.slots}, {state.name});" for state in states]
        lines.append("__syncthreads();")
        lines += [f"fp::gather_warps({state.slots}, {state.name});" for state in states]
    elif isinstance(plan, Columns) and plan.groups > 1:
        shape = f"{plan.lanes}, {plan.groups}"
        lines += [f"fp::leave_group<{shape}>({state.slots}, {state.name});" for state in states]
        lines.append("__syncthreads();")
        lines += [f"fp::gather_groups<{shape}>({state.slots}, {state.name});" for state in states]


def left(frame: Frame, states: Sequence[State]) -> list[str]:
    """The warps of a block merge their states, and leave them for the team's blocks."""
    offsets = exchange_places(frame)
    lines = [f"fp::leave_warp({state.slots}, {state.name});" for state in states]
    lines.append("__syncthreads();")
    first = [f"fp::gather_warps({state.slots}, {state.name});" for state in states]
    first += [f"{frame.team}.leave<{offsets[state.reduction.name]}>({state.name});" for state in states]
    return [*lines, *block("if (threadIdx.x < 32)", first)]


def asked(frame: Frame, states: Sequence[State], names: Sequence[str]) -> list[str]:
    """Look for the states of the team's blocks, some time before they are needed; `names` are the variables for what is there."""
    offsets = exchange_places(frame)
    return [
        f"{name} = {frame.team}.ask<{offsets[state.reduction.name]}, {state.type}>();"
        for state, name in zip(states, names, strict=True)
    ]


def found(frame: Frame, states: Sequence[State], names: Sequence[str], asked: Sequence[str] = ()) -> list[str]:
    """All warps find the states of the team's blocks and merge them, into variables with these `names`; `asked` has what was there."""
    # A circular buffer's last iterations have nothing to reduce, so no barrier since the one before read what is written here. It comes before threads look
    # each for its own: nvcc 13 moves shuffles from behind a barrier before it, where these threads need not have met again.
    offsets, lines = exchange_places(frame), ["__syncthreads();"] if asked else []
    shared = [frame.names.exact(f"{state.name}_of_team") for state in states]
    for state, place, name, left in zip(states, shared, names, asked or ("",) * len(names), strict=True):
        lines.append(f"__shared__ fp::Slots<{state.type}, {frame.schedule.lanes // 32}> {place};")
        lines.append(f"{name} = {frame.team}.find<{offsets[state.reduction.name]}, {state.type}>({left});")
    lines += [f"fp::leave_warp({place}, {name});" for place, name in zip(shared, names, strict=True)]
    lines += [f"{frame.team}.next();", "__syncthreads();"]
    return [*lines, *(f"fp::gather_warps({place}, {name});" for place, name in zip(shared, names, strict=True))]


def exchange_places(frame: Frame) -> dict[str, int]:
    team = frame.kernel.team
    assert team is not None
    return exchange_offsets(frame.kernel, team.members, team.teams, team.strip)


def name_results(frame: Frame, states: Sequence[State], used: Iterable[ReductionResult]) -> None:
    """Name the results that are `used` later; where a thread has several rows they stay in the states."""
    if frame.vector_rows:
        return
    by_name = {state.reduction.name: state for state in states}
    for stat in used:
        state = by_name.get(stat.reduction)
        if state is None:
            continue
        suffix = f"_{stat.part}" if state.reduction.op.parts > 1 else ""
        name = frame.names.exact(f"{stat.reduction}{suffix}")
        frame.top.lines.append(f"const {C_TYPES[stat.dtype]} {name} = {state.element}.part<{stat.part}>();")
        frame.top.bind(stat, name)
