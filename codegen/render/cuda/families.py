"""The families of CUDA kernels that ship, which of them a kernel has, its plan, and the headers that its source includes.

Memory-bound kernels have one for each rule of `fusepass.codegen.schedule`, which lays them out; all are written as walks. Convolutions have one
for each way of `fusepass.codegen.schedule_convolution` to lay them out, and matrix products one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, ClassVar

from fusepass.codegen import schedule_convolution, schedule_product
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.convolution import Convolution, ScaledWeights
from fusepass.codegen.ir.product import Product
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.render.cuda.contraction.convolution.chunk_tiles import PackedWriter, ScalingWriter
from fusepass.codegen.render.cuda.contraction.convolution.multistage import MultistageWriter
from fusepass.codegen.render.cuda.contraction.convolution.register_stationary import RegisterStationaryWriter
from fusepass.codegen.render.cuda.contraction.convolution.results import ConvolutionWriter
from fusepass.codegen.render.cuda.contraction.convolution.shared_stationary import SharedStationaryWriter
from fusepass.codegen.render.cuda.contraction.product.kernel import ProductWriter, boxes_of
from fusepass.codegen.render.cuda.family import Boxes, Family, Headers, Plan, Text, registered
from fusepass.codegen.render.cuda.rows.circular_buffer import CircularBufferWriter
from fusepass.codegen.render.cuda.rows.multi_row import MultiRowWriter
from fusepass.codegen.render.cuda.rows.scan import ScanWriter
from fusepass.codegen.render.cuda.walk.coordinates import LAUNCHED, Grid, framed
from fusepass.codegen.render.cuda.walk.kernel import KernelWriter
from fusepass.codegen.render.spelling import block
from fusepass.codegen.render.unit import Place
from fusepass.codegen.schedule import RULES, SCAN, STRIPS, TEAM, Rule
from fusepass.codegen.schedule.plan import Keep, Ranked, Schedule
from fusepass.codegen.schedule.plan_output_tile import OutputTile
from fusepass.codegen.schedule.plan_rows import Rows
from fusepass.codegen.schedule_convolution import (
    CHUNKS,
    MULTISTAGE,
    REGISTER_STATIONARY,
    SHARED_STATIONARY,
    ConvolutionSchedule,
    Way,
)
from fusepass.codegen.schedule_general import generalised
from fusepass.codegen.schedule_product import ProductSchedule
from fusepass.codegen.schedule_product.tiles import Tiling
from fusepass.errors import ScheduleError

Writer = Callable[[Schedule], type[KernelWriter]]


class Walk(Family[Schedule]):
    """Kernels that a rule takes; `writer` says by whom a plan is written."""

    headers: ClassVar[Headers] = (
        (lambda kernel, plan: isinstance(plan, OutputTile), ("fp_instructions.cuh", "fp_windows.cuh")),
        (lambda kernel, plan: kernel.scans, ("fp_scan.cuh",)),
        (lambda kernel, plan: kernel.team is not None, ("fp_instructions.cuh", "fp_team.cuh")),
        (lambda kernel, plan: kernel.team is not None and kernel.team.strip > 1, ("fp_strips.cuh",)),
        (
            lambda kernel, plan: isinstance(plan, Rows) and plan.keep is Keep.FETCHED,
            ("fp_instructions.cuh", "fp_team.cuh"),
        ),
    )

    def __init__(self, rule: Rule, writer: Writer) -> None:
        self.rule, self.writer, self.name = rule, writer, rule.name

    def takes(self, kernel: Kernel, program: Program) -> bool:
        return kernel.anchor is None and self.rule.takes(kernel, program)

    def plan(self, kernel: Kernel, program: Program, facts: DeviceFacts, *, aligned: bool = True) -> Schedule:
        return self.rule.plan(kernel, program, facts, aligned=aligned)

    def ranking(
        self, kernel: Kernel, program: Program, facts: DeviceFacts, *, aligned: bool = True
    ) -> Sequence[Ranked[Schedule]]:
        return self.rule.ranking(kernel, program, facts, aligned=aligned)

    def estimate(self, kernel: Kernel, program: Program, facts: DeviceFacts) -> float:
        return self.rule.estimate(kernel, program, facts)

    def generalised(self, plan: Schedule, kernel: Kernel, *, coarse: bool) -> Schedule:
        return generalised(plan, kernel, coarse=coarse)

    def laid_out(self, kernel: Kernel, plan: Schedule) -> Kernel:
        """Without a team where each block has rows to itself."""
        return replace(kernel, team=None) if kernel.team is not None and plan.team is None else kernel

    def index_type(self, plan: Schedule) -> str:
        return "int64_t" if plan.memory.wide else "int"

    def describe(self, kernel: Kernel, plan: Schedule) -> str:
        shape = f"{kernel.row_count} rows" if kernel.reduction_loops else f"{kernel.row_count} elements"
        cols = f" x {kernel.col_count} columns" if kernel.reduction_loops else ""
        return f"{plan.walk}, {shape}{cols}: {plan}{self.pieces_in_words(kernel)}"

    def write(self, kernel: Kernel, plan: Schedule, place: Place) -> Text:
        grid = LAUNCHED if kernel.when is None else Grid(place.names.exact("number_of_block"), str(plan.blocks))
        frame = framed(kernel, place.program, plan, place.pointers, place.names, grid)
        body = self.writer(plan)(frame).write()
        if kernel.when is not None:
            body = _where_wanted(body, f"{place.pointers[kernel.when]}[0] == 0.0f", grid)
        return Text(tuple(body))


def _where_wanted(body: list[str], idle: str, grid: Grid) -> list[str]:
    """`body`, which is that of a block of `grid`, unless a kernel is `idle`: a few blocks, which do the work of all, find that out sooner."""
    first, step = LAUNCHED.block, LAUNCHED.blocks
    head = f"for (unsigned {grid.block} = {first}; {grid.block} < {grid.blocks}; {grid.block} += {step})"
    return [f"if ({idle}) return;", *block(head, [*body, "__syncthreads();"])]


def _of_strips(plan: Schedule) -> type[KernelWriter]:
    return MultiRowWriter if plan.buffer else KernelWriter


def _of_team(plan: Schedule) -> type[KernelWriter]:
    return CircularBufferWriter if plan.buffer else KernelWriter


_WRITERS: dict[str, Writer] = {SCAN.name: lambda plan: ScanWriter, STRIPS.name: _of_strips, TEAM.name: _of_team}

WALKS = tuple(Walk(rule, _WRITERS.get(rule.name, lambda plan: KernelWriter)) for rule in RULES)
"""In the order of the rules."""


ConvolutionWriters = Callable[[Any], Callable[[Kernel, Any, Place], ConvolutionWriter]]


def _anchored(test: Callable[[Convolution], bool]) -> Callable[[Kernel, ConvolutionSchedule], bool]:
    return lambda kernel, plan: isinstance(kernel.anchor, Convolution) and test(kernel.anchor)


class ConvolutionFamily(Family[ConvolutionSchedule]):
    """Convolutions that are laid out in one `way`; `writer` says by whom a plan is written."""

    headers: ClassVar[Headers] = (
        (lambda kernel, plan: True, ("fp_instructions.cuh", "fp_product.cuh")),
        (_anchored(lambda anchor: anchor.warps > 1), ("fp_wgmma.cuh", "fp_group.cuh")),
        (_anchored(lambda anchor: anchor.halves is not None), ("fp_wgmma_places.cuh", "fp_places.cuh")),
        (_anchored(lambda anchor: isinstance(anchor.halves, ScaledWeights)), ("fp_scaled.cuh",)),
        (_anchored(lambda anchor: anchor.held), ("fp_wgmma_sparse.cuh", "fp_held.cuh")),
        (_anchored(lambda anchor: anchor.column > 1), ("fp_partials.cuh",)),
        (lambda kernel, plan: kernel.partials is not None, ("fp_partials.cuh",)),
    )

    def __init__(self, way: Way, writer: ConvolutionWriters) -> None:
        self.way, self.writer, self.name = way, writer, f"convolution, {way.name}"

    def takes(self, kernel: Kernel, program: Program) -> bool:
        return isinstance(kernel.anchor, Convolution) and self.way.takes(kernel.anchor)

    def plan(
        self, kernel: Kernel, program: Program, facts: DeviceFacts, *, aligned: bool = True
    ) -> ConvolutionSchedule | None:
        return self.way.plan(kernel, program, facts, aligned=aligned)

    def serves(self, kernel: Kernel, program: Program, facts: DeviceFacts) -> bool:
        return schedule_convolution.serves(program, kernel, facts)

    def preferred(self, kernel: Kernel, program: Program, facts: DeviceFacts) -> bool:
        return schedule_convolution.preferred(program, kernel, facts)

    def describe(self, kernel: Kernel, plan: ConvolutionSchedule) -> str:
        return f"convolution, {kernel.row_count} elements: {plan}{self.pieces_in_words(kernel)}"

    def write(self, kernel: Kernel, plan: ConvolutionSchedule, place: Place) -> Text:
        return self.writer(plan)(kernel, plan, place).write()


CONVOLUTIONS = (
    ConvolutionFamily(REGISTER_STATIONARY, lambda plan: RegisterStationaryWriter),
    ConvolutionFamily(CHUNKS, lambda plan: ScalingWriter if plan.source else PackedWriter),
    ConvolutionFamily(SHARED_STATIONARY, lambda plan: SharedStationaryWriter),
    ConvolutionFamily(MULTISTAGE, lambda plan: MultistageWriter),
)
"""In the order of the ways."""


def _tiled(test: Callable[[Tiling], bool]) -> Callable[[Kernel, ProductSchedule], bool]:
    return lambda kernel, plan: test(plan.tiling)


class MatrixProduct(Family[ProductSchedule]):
    """Kernels whose anchor is a `Product`."""

    name = "matrix product"
    reduces = "rows reduced"
    headers: ClassVar[Headers] = (
        (lambda kernel, plan: True, ("fp_instructions.cuh", "fp_product.cuh")),
        (lambda kernel, plan: kernel.partials is not None, ("fp_partials.cuh",)),
        (lambda kernel, plan: True, ("fp_matmul.cuh",)),
        (_tiled(lambda tiling: tiling.groups), ("fp_wgmma.cuh", "fp_wgmma_rows.cuh", "fp_matmul_group.cuh")),
        (_tiled(lambda tiling: tiling.runs), ("fp_matmul_runs.cuh",)),
        (
            _tiled(lambda tiling: tiling.teams > 0),
            ("fp_tensor_map.cuh", "fp_barriers.cuh", "fp_matmul_teams.cuh"),
        ),
        (
            _tiled(lambda tiling: tiling.iterations > 0),
            ("fp_barriers.cuh", "fp_matmul_fill.cuh", "fp_matmul_turns.cuh"),
        ),
    )

    def takes(self, kernel: Kernel, program: Program) -> bool:
        return isinstance(kernel.anchor, Product)

    def plan(
        self, kernel: Kernel, program: Program, facts: DeviceFacts, *, aligned: bool = True
    ) -> ProductSchedule | None:
        return schedule_product.schedule_product(kernel, program, facts, aligned=aligned)

    def seconds(self, kernel: Kernel, program: Program, facts: DeviceFacts, plan: ProductSchedule) -> float:
        return plan.seconds

    def serves(self, kernel: Kernel, program: Program, facts: DeviceFacts) -> bool:
        return schedule_product.serves(program, kernel, facts)

    def preferred(self, kernel: Kernel, program: Program, facts: DeviceFacts) -> bool:
        return schedule_product.preferred(program, kernel, facts)

    def boxes(self, kernel: Kernel, plan: ProductSchedule) -> tuple[Boxes, ...]:
        return boxes_of(kernel, plan)

    def write(self, kernel: Kernel, plan: ProductSchedule, place: Place) -> Text:
        idle = () if kernel.when is None else (f"if ({place.pointers[kernel.when]}[0] == 0.0f) return;",)
        return Text((*idle, *ProductWriter(kernel, plan, place).lines()))


PRODUCT = MatrixProduct()


SHIPPED: tuple[Family[Any], ...] = (*CONVOLUTIONS, PRODUCT, *WALKS)
"""The first one that takes a kernel has it."""


@dataclass(frozen=True)
class Laid:
    """A kernel on a device: its family and plan, and the seconds that it takes by the family's estimate."""

    family: Family[Any]
    plan: Plan
    seconds: float


def taking(kernel: Kernel, program: Program) -> list[Family[Any]]:
    """The families that take `kernel`: the shipped one, then registered ones."""
    shipped = next(family for family in SHIPPED if family.takes(kernel, program))
    return [shipped, *(family for family in registered() if family.takes(kernel, program))]


def laid(
    kernel: Kernel, program: Program, facts: DeviceFacts, *, aligned: bool = True, rank: int = 0
) -> tuple[Family[Any], Plan]:
    """The family and the plan of `kernel`: the first, or another one, of its `ranking`. Of a `rank` that it does not have the first is meant.

    Raises `ScheduleError` where no plan fits the device.
    """
    families = taking(kernel, program)
    if len(families) == 1 and not rank:  # nothing to compare
        plan = families[0].plan(kernel, program, facts, aligned=aligned)
        found = [] if plan is None else [(families[0], plan)]
    else:
        found = [(each.family, each.plan) for each in ranking(kernel, program, facts, aligned=aligned)]
    if not found:
        raise ScheduleError(f"{kernel.name} does not fit the shared memory of {facts.name}")
    return found[rank if rank < len(found) else 0]


def ranking(kernel: Kernel, program: Program, facts: DeviceFacts, *, aligned: bool = True) -> Sequence[Laid]:
    """All that `kernel` may be laid out by: the first plan of the family that expects to take least time, then all others by their seconds."""
    rankings = [
        [Laid(family, each.plan, each.seconds) for each in family.ranking(kernel, program, facts, aligned=aligned)]
        for family in taking(kernel, program)
    ]
    if len(rankings) == 1:
        return rankings[0]
    first = min((each[0] for each in rankings if each), key=_seconds, default=None)
    others = [each for each in chain(*rankings) if each is not first]
    return [*([first] if first else []), *sorted(others, key=_seconds)]


def _seconds(each: Laid) -> float:
    return each.seconds


def serves(program: Program, kernel: Kernel, facts: DeviceFacts, *, preferred: bool = False) -> bool:
    """Whether a family can do what the library would do for `kernel`; with `preferred`, whether it should, without a measurement.

    Without an anchor, that is plain arithmetic, which any can do.
    """
    if kernel.anchor is None:
        return not preferred
    asked = [family.preferred if preferred else family.serves for family in taking(kernel, program)]
    return any(each(kernel, program, facts) for each in asked)


ALWAYS = ("fp_index.h", "fp_launch.cuh", "fp_merge.cuh", "fp_vector.cuh")
INDIRECT = (
    "fp_cast.h",
    "fp_common.h",
    "fp_functions.h",
    "fp_half.h",
    "fp_libm.h",
    "fp_random.h",
    "fp_scalar.h",
    "fp_states.h",
)
"""Headers that others include."""
_REPLAYS = ("fp_replay.cuh",)

_OF_FAMILIES = (name for family in SHIPPED for _, names in family.headers for name in names)
HEADERS = tuple(dict.fromkeys([*ALWAYS, *_OF_FAMILIES, *_REPLAYS]))
"""Every header that a source of families that ship may include, each behind those that it needs."""


def headers_of(launches: Sequence[tuple[Family[Any], Kernel, Plan]], *, replays: bool) -> tuple[str, ...]:
    """For kernels as they are laid on the device, in such an order; `replays` says whether launches are recorded, to be repeated."""
    return tuple(dict.fromkeys([*ALWAYS, *_needed(launches), *(_REPLAYS if replays else ())]))


def _needed(launches: Sequence[tuple[Family[Any], Kernel, Plan]]) -> Iterator[str]:
    """What kernels include of their families, some of them several times."""
    for needs in dict.fromkeys(family.headers for family in (*SHIPPED, *registered())):
        among = [(kernel, plan) for family, kernel, plan in launches if family.headers is needs]
        for needed, names in needs:
            yield from names if any(needed(kernel, plan) for kernel, plan in among) else ()
