"""How a kernel is laid on a GPU: a frozen value (see `plan`) from a pure function of kernel, buffers and device facts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.ir.transpose import columns_of, rows_together, with_columns
from fusepass.codegen.schedule.alternatives import alternatives
from fusepass.codegen.schedule.columns import outer
from fusepass.codegen.schedule.cost import Costs
from fusepass.codegen.schedule.deep import deep, has_deep_windows
from fusepass.codegen.schedule.flat import pointwise, transposing
from fusepass.codegen.schedule.line_windows import along_lines
from fusepass.codegen.schedule.multi_row import strips
from fusepass.codegen.schedule.output_tile import output_tiles
from fusepass.codegen.schedule.plan import Keep, Memory, Ranked, Schedule
from fusepass.codegen.schedule.plan_rows import Rows
from fusepass.codegen.schedule.planes import planes
from fusepass.codegen.schedule.row_pieces import in_row_pieces
from fusepass.codegen.schedule.rows import inner, prefers_rows
from fusepass.codegen.schedule.scan import scan
from fusepass.codegen.schedule.shape import Shape, shape_of
from fusepass.codegen.schedule.team import team
from fusepass.errors import ScheduleError

_MAX_BLOCKS = 2**31 - 1
_MAX_INT = 2**31 - 2**21  # room for the points past the end that a last block counts


@dataclass(frozen=True)
class Choice:
    """What a rule says of a kernel.

    Attributes:
        shape: the kernel as it looks at it.
        plan: what it chooses.
        together: `rows_together`, where tiles are exchanged.
        others: what it found besides.
    """

    shape: Shape
    plan: Schedule
    together: int = 0
    others: Sequence[Schedule] = ()


@dataclass(frozen=True)
class Rule:
    """How kernels of one kind are laid out.

    Attributes:
        name: unique.
        takes: whether a kernel is of that kind, if no rule before says so.
        choose: lays it out; the last argument says whether input buffers start at a multiple of 16 bytes.
    """

    name: str
    takes: Callable[[Kernel, Program], bool]
    choose: Callable[[Kernel, Program, DeviceFacts, bool], Choice]

    def plan(self, kernel: Kernel, program: Program, facts: DeviceFacts, *, aligned: bool = True) -> Schedule:
        """What it chooses.

        Raises `ScheduleError` where the kernel has more points than one launch can count.
        """
        found = self.choose(kernel, program, facts, aligned)
        return _finished(found.shape, found.plan)

    def ranking(
        self, kernel: Kernel, program: Program, facts: DeviceFacts, *, aligned: bool = True
    ) -> tuple[Ranked[Schedule], ...]:
        """What it chooses, then the alternatives by the seconds that they take by the cost model.

        Raises `ScheduleError` where the kernel has more points than one launch can count.
        """
        choice = self.choose(kernel, program, facts, aligned)
        shape, first = choice.shape, _finished(choice.shape, choice.plan)
        others = (
            _finished(shape, each) for each in (*alternatives(shape, choice.plan, choice.together), *choice.others)
        )
        costs = Costs(shape)
        found = [Ranked(each, costs.seconds(each)) for each in dict.fromkeys(others) if each != first]
        return Ranked(first, costs.seconds(first)), *sorted(found, key=lambda each: each.seconds)

    def estimate(self, kernel: Kernel, program: Program, facts: DeviceFacts) -> float:
        """Seconds that what it chooses takes by the cost model.

        Raises `ScheduleError` where the kernel has more points than one launch can count.
        """
        found = self.choose(kernel, program, facts, True)
        return Costs(found.shape).seconds(_finished(found.shape, found.plan))


def schedule(kernel: Kernel, program: Program, facts: DeviceFacts, *, aligned: bool = True, rank: int = 0) -> Schedule:
    """A schedule for `kernel` of `program` on a CUDA device: the one that its rule chooses, or another one of `ranking`.

    `aligned` says that input buffers start at a multiple of 16 bytes; all others always do. Of a `rank` that the kernel does
    not have the rule's one is meant.
    Raises `ScheduleError` where the kernel has more points than one launch can count.
    """
    if rank:
        ranked = ranking(kernel, program, facts, aligned=aligned)
        return ranked[rank if rank < len(ranked) else 0].plan
    return _rule_of(kernel, program).plan(kernel, program, facts, aligned=aligned)


def ranking(
    kernel: Kernel, program: Program, facts: DeviceFacts, *, aligned: bool = True
) -> tuple[Ranked[Schedule], ...]:
    """The schedules that `kernel` may have: its rule's one, then the others by the seconds that they take by the cost model.

    Raises `ScheduleError` where the kernel has more points than one launch can count.
    """
    return _rule_of(kernel, program).ranking(kernel, program, facts, aligned=aligned)


def _rule_of(kernel: Kernel, program: Program) -> Rule:
    return next(rule for rule in RULES if rule.takes(kernel, program))


def _row_pieces(kernel: Kernel, program: Program, facts: DeviceFacts, aligned: bool) -> Choice:
    assert kernel.partials is not None
    shape = shape_of(kernel, program, facts, aligned=aligned)
    return Choice(shape, in_row_pieces(shape, kernel.partials))


def _image_pieces(kernel: Kernel, program: Program, facts: DeviceFacts, aligned: bool) -> Choice:
    """What is reduced over positions is so in output tiles, of which an image has as many as pieces were planned."""
    assert kernel.partials is not None
    pieces = kernel.partials.pieces.size
    shape = shape_of(kernel, program, facts, aligned=aligned)
    # Tiles of inputs that begin anywhere may be larger.
    found = output_tiles(shape, pieces=pieces) or output_tiles(shape, pieces=pieces, least=1)
    if not found:
        raise ScheduleError(f"{kernel.name} was made for {pieces} pieces, and has others here")
    plan, *others = [each for each, _ in found]
    return Choice(shape, plan, others=others)


def _is_transposed(kernel: Kernel, program: Program) -> bool:
    return kernel.is_pointwise and kernel.row_count > 0 and bool(columns_of(kernel, program))


def _transposed(kernel: Kernel, program: Program, facts: DeviceFacts, aligned: bool) -> Choice:
    columns = columns_of(kernel, program)
    tall = with_columns(kernel, program, columns)
    shape, together = Shape(tall, program, facts, aligned), rows_together(tall, program)
    return Choice(shape, transposing(shape, columns, together), together)


def _scan(kernel: Kernel, program: Program, facts: DeviceFacts, aligned: bool) -> Choice:
    return Choice(*scan(kernel, program, facts, aligned=aligned))


def _deep_windows(kernel: Kernel, program: Program, facts: DeviceFacts, aligned: bool) -> Choice:
    shape = shape_of(kernel, program, facts, aligned=aligned)
    tiled = deep(kernel, program, facts, aligned=aligned) or planes(kernel, program, facts, aligned=aligned)
    return Choice(shape, tiled or pointwise(shape))


def _pointwise(kernel: Kernel, program: Program, facts: DeviceFacts, aligned: bool) -> Choice:
    """In output tiles if there are windows that overlap."""
    shape = shape_of(kernel, program, facts, aligned=aligned)
    along = along_lines(shape)
    found: list[Schedule] = [*([along] if along else []), *(each for each, _ in output_tiles(shape))]
    plan, *others = found or [pointwise(shape)]
    return Choice(shape, plan, others=others)


def _strips(kernel: Kernel, program: Program, facts: DeviceFacts, aligned: bool) -> Choice:
    assert kernel.team is not None
    shape = shape_of(kernel, program, facts, aligned=aligned)
    side_by_side = strips(shape, kernel.team)
    if side_by_side is not None:
        return Choice(shape, side_by_side)
    alone = replace(kernel, team=None)  # operands begin anywhere
    return _rule_of(alone, program).choose(alone, program, facts, aligned)


def _team(kernel: Kernel, program: Program, facts: DeviceFacts, aligned: bool) -> Choice:
    assert kernel.team is not None
    shape = shape_of(kernel, program, facts, aligned=aligned)
    return Choice(shape, team(shape, kernel.team))


def _rows(kernel: Kernel, program: Program, facts: DeviceFacts, aligned: bool) -> Choice:
    """Along the rows or along the columns."""
    shape = shape_of(kernel, program, facts, aligned=aligned)
    return Choice(shape, outer(shape) if prefers_rows(shape) else inner(shape))


SCAN = Rule("scan", lambda kernel, program: bool(kernel.scans), _scan)
STRIPS = Rule("strips", lambda kernel, program: kernel.team is not None and kernel.team.strip > 1, _strips)
TEAM = Rule("team", lambda kernel, program: kernel.team is not None, _team)

RULES = (
    Rule("pieces of images", lambda kernel, program: bool(kernel.partials) and kernel.is_pointwise, _image_pieces),
    Rule("pieces of rows", lambda kernel, program: bool(kernel.partials), _row_pieces),
    Rule("transposed", _is_transposed, _transposed),
    SCAN,
    Rule("deep windows", lambda kernel, program: kernel.is_pointwise and has_deep_windows(kernel), _deep_windows),
    Rule("pointwise", lambda kernel, program: kernel.is_pointwise, _pointwise),
    STRIPS,
    TEAM,
    Rule("rows", lambda kernel, program: True, _rows),
)
"""Of memory-bound kernels; the first one that takes a kernel lays it out."""


def _finished(shape: Shape, plan: Schedule) -> Schedule:
    kernel, program, facts = shape.whole, shape.program, shape.facts
    if plan.blocks > _MAX_BLOCKS:
        raise ScheduleError(f"{kernel.name} needs {plan.blocks} blocks; a launch has at most {_MAX_BLOCKS}")
    backwards = kernel.team is None and _runs_backwards(kernel, program, facts)
    wide = _needs_wide_index(kernel, program)
    return replace(plan, memory=Memory(shape.aligned, wide, _used_once(shape, plan), backwards))


def _needs_wide_index(kernel: Kernel, program: Program) -> bool:
    extents = (program.buffer(name).extent for name in kernel.reads | kernel.writes)
    return max((kernel.row_count * max(kernel.col_count, 1), *extents)) >= _MAX_INT


def _large(names: Iterable[str], program: Program, facts: DeviceFacts) -> frozenset[str]:
    return frozenset(name for name in names if program.buffer(name).nbytes >= facts.l2_bytes // 2)


def _used_once(shape: Shape, chosen: Schedule) -> frozenset[str]:
    """Large buffers that this kernel touches once and that no later kernel reads."""
    program, kernel = shape.program, shape.kernel
    if not isinstance(chosen, Rows) or chosen.exchanges:
        return frozenset()
    order = [other.name for other in program.kernels]
    later = program.kernels[order.index(kernel.name) + 1 :]
    read_later = frozenset[str]().union(*(other.reads for other in later))
    loads, large = list(kernel.loads()), _large(kernel.reads | kernel.writes, program, shape.facts)
    # Of what is read and written once, loads and stores with eviction hints are slower than without, but where a row
    # is read again, or a block has a multiprocessor to itself; or where one buffer is reduced to little.
    if chosen.keep.in_registers:
        alone = large <= kernel.reads - read_later and sum(load.buffer in large for load in loads) == 1
        return large if alone and kernel.team is None else frozenset()
    if chosen.keep is Keep.FETCHED and kernel.team is None:
        return frozenset()
    if chosen.buffer and not chosen.buffer.waiting:
        return frozenset()
    again = {access.buffer for access in shape.accesses if access.window}
    again |= {load.buffer for load in loads if sum(other.buffer == load.buffer for other in loads) > 1}
    if chosen.keep is Keep.NOTHING and not shape.single:
        again |= kernel.reads
    if kernel.team is not None:  # other rows meet what does not depend on the row
        again |= {load.buffer for load in loads if not load.index.axes & frozenset(kernel.rows)}
    return large - read_later - again


def _runs_backwards(kernel: Kernel, program: Program, facts: DeviceFacts) -> bool:
    """Every other kernel of those that go over the same large buffer."""
    backwards = False
    touched: frozenset[str] = frozenset()
    for other in program.kernels:
        large = _large(other.reads | other.writes, program, facts)
        if large:  # a small kernel between two large ones leaves the cache as it is
            backwards = bool(touched & large) and not backwards
            touched = touched | large if touched & large else large
        if other.name == kernel.name:
            return bool(large) and backwards
    return False
