"""Renders a program as one CUDA translation unit: its kernels and a plain C entry that launches them in order."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.product import Product
from fusepass.codegen.ir.program import Buffer, Kernel, Program
from fusepass.codegen.ir.updates import read_in_place
from fusepass.codegen.render.cuda.contraction.convolution.multistage import multistage_text
from fusepass.codegen.render.cuda.contraction.convolution.register_stationary_pairs import PairsWriter
from fusepass.codegen.render.cuda.contraction.convolution.scaled import chunk_text
from fusepass.codegen.render.cuda.contraction.convolution.shared_stationary import shared_stationary_text
from fusepass.codegen.render.cuda.contraction.convolution.sparse import SparseWriter
from fusepass.codegen.render.cuda.contraction.product.kernel import product_body
from fusepass.codegen.render.cuda.headers import INDIRECT, Plan, headers_of
from fusepass.codegen.render.cuda.rows.circular_buffer import CircularBufferWriter
from fusepass.codegen.render.cuda.rows.multi_row import MultiRowWriter
from fusepass.codegen.render.cuda.rows.scan import ScanWriter
from fusepass.codegen.render.cuda.rows.together import TogetherWriter
from fusepass.codegen.render.cuda.walk.coordinates import LAUNCHED, Grid, framed
from fusepass.codegen.render.cuda.walk.kernel import KernelWriter
from fusepass.codegen.render.numbers import Slot, free, plain, slot, unpacked, with_slot
from fusepass.codegen.render.once import stored_once
from fusepass.codegen.render.spelling import C_TYPES, Identifiers, block, braces
from fusepass.codegen.render.template import fill
from fusepass.codegen.schedule import schedule
from fusepass.codegen.schedule.overrides import NO_OVERRIDES, ScheduleOverrides
from fusepass.codegen.schedule.plan import Schedule
from fusepass.codegen.schedule.plan_columns import Columns
from fusepass.codegen.schedule.plan_rows import Rows
from fusepass.codegen.schedule_convolution import ConvolutionSchedule, schedule_convolution
from fusepass.codegen.schedule_convolution.chunks import ChunkSchedule
from fusepass.codegen.schedule_convolution.register_stationary import PairsSchedule
from fusepass.codegen.schedule_convolution.shared_stationary import SharedStationarySchedule
from fusepass.codegen.schedule_convolution.sparse import SparseSchedule
from fusepass.codegen.schedule_general import Generality, generalised
from fusepass.codegen.schedule_product import ProductSchedule, schedule_product
from fusepass.codegen.source import Source, Target
from fusepass.errors import ScheduleError

_MOST_WAITING = 1 << 10  # blocks of a kernel that may have nothing to do


@dataclass(frozen=True)
class _KernelText:
    name: str
    tables: tuple[str, ...]
    comment: tuple[str, ...]
    bounds: str
    parameters: tuple[str, ...]
    body: tuple[str, ...]


@dataclass(frozen=True)
class _ReplayText:
    """What replays the launches: the function's name, that of the one that launches, those of what it declares, its pointers, how many
    launches with how many arguments."""

    name: str
    launcher: str
    replayed: str
    where: str
    pointers: tuple[str, ...]
    launches: int
    arguments: int


@dataclass(frozen=True)
class _LibraryText:
    title: str
    comment: tuple[str, ...]
    headers: tuple[str, ...]
    kernels: tuple[_KernelText, ...]
    entry: str
    parameters: tuple[str, ...]
    launches: tuple[str, ...]
    replay: _ReplayText | None


def render_cuda(
    program: Program,
    facts: DeviceFacts,
    *,
    aligned: bool = True,
    general: Generality = Generality.NONE,
    overrides: ScheduleOverrides = NO_OVERRIDES,
) -> Source:
    """`program` as CUDA source; with its marks, and as general as it can be, if `general`.

    `aligned` says that input buffers start at a multiple of 16 bytes at run time; the others always do.
    Raises `ScheduleError` where a kernel has more points than one launch can count.
    """
    names = Identifiers()
    entry = names.exact(f"run_{program.name}")
    pointers = {buffer.name: names.exact(buffer.name) for buffer in program.arguments}
    kernels, launches, plans = [], list[str](), list[Plan]()
    ranks = {kernel.name: overrides.rank_of(number) for number, kernel in enumerate(program.kernels)}
    launched = [kernel for kernel in program.kernels if not is_empty(kernel)]
    for number, kernel in enumerate(launched):
        plan = _plan(kernel, program, facts, aligned, general, ranks[kernel.name])
        if kernel.team is not None and isinstance(plan, Rows | Columns) and plan.team is None:  # each block for itself
            launched[number] = kernel = replace(kernel, team=None)
        plans.append(plan)
        name = names.exact(kernel.name)
        once = stored_once(kernel, program, pointers, names, "blockIdx.x == 0 && threadIdx.x == 0")
        alone = _kernel_text(kernel, name, program, plan, pointers, names.copy())
        kernels.append(replace(alone, body=(*once, *alone.body)))
        launches += _launch(kernel, name, program, plan, pointers, names.copy())
    zeroed = sum(kernel.team is not None for kernel in launched)
    replay = None
    if len(launched) + zeroed > 1 and not general:
        replay = _ReplayText(
            name=names.exact(f"replay_{program.name}"),
            launcher=names.exact("launch_all"),
            replayed=names.exact("replayed"),
            where=names.exact("where"),
            pointers=tuple(pointers.values()),
            launches=len(launched) + zeroed,
            arguments=zeroed + sum(len(_touched(kernel, program)) for kernel in launched),
        )
    headers = headers_of(list(zip(launched, plans, strict=True)), replays=replay is not None)
    library = _LibraryText(
        title=f"{program.name}({', '.join(program.inputs)}) -> ({', '.join(program.outputs)})",
        comment=_buffer_comments(program),
        headers=headers,
        kernels=tuple(kernels),
        entry=entry,
        parameters=with_slot([f"void* {pointers[buffer.name]}" for buffer in program.arguments], Slot.ENTRY),
        launches=unpacked(launches),
        replay=replay,
    )
    marked = fill("cuda/library.cu.j2", library=library)
    text = marked if general else plain(marked)
    included = tuple(sorted({*INDIRECT, *headers}))
    name = program.name + overrides.suffix
    return Source(name, entry, Target.CUDA, text, included, facts.arch, replay=replay.name if replay else None)


def _plan(
    kernel: Kernel, program: Program, facts: DeviceFacts, aligned: bool, general: Generality, rank: int = 0
) -> Plan:
    if kernel.anchor is None:
        plan = schedule(kernel, program, facts, aligned=aligned, rank=rank)
        return generalised(plan, kernel, coarse=general is Generality.COARSE) if general else plan
    fixed: Plan | None
    if isinstance(kernel.anchor, Product):
        fixed = schedule_product(kernel, program, facts, aligned=aligned)
    else:
        fixed = schedule_convolution(kernel, program, facts, aligned=aligned)
    if fixed is None:
        raise ScheduleError(f"{kernel.name} does not fit the shared memory of {facts.name}")
    return fixed


def is_empty(kernel: Kernel) -> bool:
    """Whether there is nothing to launch. A row without columns still has its row stores."""
    return kernel.row_count == 0 or (kernel.col_count == 0 and not kernel.row_stores)


def describe_cuda(
    program: Program, kernel: Kernel, facts: DeviceFacts, general: Generality = Generality.NONE, rank: int = 0
) -> str:
    """One line about a launch for reports."""
    if is_empty(kernel):
        return "nothing to run"
    return _summary(kernel, _plan(kernel, program, facts, True, general, rank))


def _summary(kernel: Kernel, plan: Plan) -> str:
    what = "rows reduced" if isinstance(plan, ProductSchedule) else "reduced over positions"
    pieces = f", {what} in {kernel.partials.pieces.size} pieces" if kernel.partials else ""
    if isinstance(plan, ProductSchedule):
        return f"matrix product, {kernel.row_count} elements: {plan}{pieces}"
    if isinstance(plan, ConvolutionSchedule):
        return f"convolution, {kernel.row_count} elements: {plan}{pieces}"
    shape = f"{kernel.row_count} rows" if kernel.reduction_loops else f"{kernel.row_count} elements"
    cols = f" x {kernel.col_count} columns" if kernel.reduction_loops else ""
    return f"{plan.walk}, {shape}{cols}: {plan}{pieces}"


def _kernel_text(
    kernel: Kernel,
    name: str,
    program: Program,
    plan: Plan,
    pointers: dict[str, str],
    names: Identifiers,
) -> _KernelText:
    axes = [", ".join(f"{axis.name}:{axis.size}" for axis in group) for group in (kernel.rows, kernel.cols)]
    comment = [f"{name}: {', '.join(kernel.origin) or 'no operator'}"]
    if not isinstance(plan, Schedule) or not plan.general:
        comment.append(f"rows [{axes[0]}], columns [{axes[1]}]" if kernel.cols else f"elements [{axes[0]}]")
        comment.append(_summary(kernel, plan))
    wide = isinstance(plan, Schedule) and plan.memory.wide
    parameters = _parameters(kernel, program, pointers)
    parameters = (*parameters[:-1], parameters[-1] + slot(Slot.PARAMETERS, name, "int64_t" if wide else "int"))
    if isinstance(plan, ProductSchedule):
        lines = product_body(kernel, program, plan, pointers, names)
        if kernel.when is not None:
            lines = (f"if ({pointers[kernel.when]}[0] == 0.0f) return;", *lines)
        return _KernelText(name, (), tuple(comment), f"{plan.threads}, {plan.resident}", parameters, lines)
    if isinstance(plan, ConvolutionSchedule):
        if isinstance(plan, ChunkSchedule):
            text = chunk_text(kernel, program, plan, pointers, names)
        elif isinstance(plan, PairsSchedule):
            text = PairsWriter(kernel, program, plan, pointers, names).write()
        elif isinstance(plan, SparseSchedule):
            text = SparseWriter(kernel, program, plan, pointers, names).write()
        elif isinstance(plan, SharedStationarySchedule):
            text = shared_stationary_text(kernel, program, plan, pointers, names)
        else:
            text = multistage_text(kernel, program, plan, pointers, names)
        return _KernelText(name, text.tables, tuple(comment), f"{plan.threads}, {plan.resident}", parameters, text.body)
    writer = ScanWriter if kernel.scans else KernelWriter
    if isinstance(plan, Columns) and plan.buffer:
        writer = MultiRowWriter
    elif isinstance(plan, Rows) and plan.buffer:
        writer = CircularBufferWriter if plan.buffer.together == 1 else TogetherWriter
    grid = LAUNCHED if kernel.when is None else Grid(names.exact("number_of_block"), str(plan.blocks))
    body = writer(framed(kernel, program, plan, pointers, names, grid)).write()
    if kernel.when is not None:
        body = _where_wanted(body, f"{pointers[kernel.when]}[0] == 0.0f", grid)
    bounds = f"{plan.threads}, {plan.resident}" if plan.resident else str(plan.threads)
    return _KernelText(name, (), tuple(comment), bounds, parameters, tuple(body))


def _where_wanted(body: list[str], idle: str, grid: Grid) -> list[str]:
    """`body`, which is that of a block of `grid`, unless a kernel is `idle`: a few blocks, which do the work of all, find that out sooner."""
    first, step = LAUNCHED.block, LAUNCHED.blocks
    head = f"for (unsigned {grid.block} = {first}; {grid.block} < {grid.blocks}; {grid.block} += {step})"
    return [f"if ({idle}) return;", *block(head, [*body, "__syncthreads();"])]


def _parameters(kernel: Kernel, program: Program, pointers: dict[str, str]) -> tuple[str, ...]:
    shared = read_in_place(program)
    return tuple(
        f"{_pointer_type(buffer, kernel)}{'' if buffer.name in shared else ' __restrict__'} {pointers[buffer.name]}"
        for buffer in _touched(kernel, program)
    )


def _touched(kernel: Kernel, program: Program) -> tuple[Buffer, ...]:
    return tuple(buffer for buffer in program.arguments if buffer.name in kernel.buffers)


def _pointer_type(buffer: Buffer, kernel: Kernel) -> str:
    return f"{'const ' if buffer.name in kernel.reads - kernel.writes else ''}{C_TYPES[buffer.dtype]}*"


def _launch(
    kernel: Kernel, name: str, program: Program, plan: Plan, pointers: dict[str, str], names: Identifiers
) -> list[str]:
    arguments = [
        f"    static_cast<{_pointer_type(buffer, kernel)}>({pointers[buffer.name]})"
        for buffer in _touched(kernel, program)
    ]
    passed = [*(f"{argument}," for argument in arguments[:-1]), f"{arguments[-1]}{slot(Slot.ARGUMENTS, name)});"]
    if kernel.team is not None:
        team = kernel.team
        shape = f"{team.members}, {team.teams}, {plan.threads}, {plan.shared_bytes}"
        exchange = f"{pointers[team.exchange]}, {program.buffer(team.exchange).nbytes}, stream,"
        error = names.exact("error")
        start = f"const int {error} = fp::launch_teams<{name}>({shape}, {exchange}"
        return braces([start, *passed, f"if ({error} != 0) return {error};"])
    blocks = free(plan.blocks) if kernel.when is None else min(plan.blocks, _MOST_WAITING)
    if isinstance(plan, Rows) and plan.cluster:
        shape = f"{plan.cluster.members}, {blocks}, {plan.threads}, {plan.shared_bytes}"
        return [f"fp::launch_clusters<{name}>({shape}, stream,", *passed]
    return [f"fp::launch<{name}>({blocks}, {plan.threads}, {free(plan.shared_bytes)}, stream,", *passed]


def _buffer_comments(program: Program) -> tuple[str, ...]:
    lines = []
    for buffer in program.arguments:
        shape = "x".join(map(free, buffer.shape)) or "scalar"
        strides = ", ".join(map(free, buffer.strides))
        lines.append(f"  {buffer.role.value} {buffer.name}: {buffer.dtype} {shape}, strides ({strides})")
    return tuple(lines)
