"""Renders a program as one CUDA translation unit: its kernels and a plain C entry that launches them in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.program import Buffer, Kernel, Program
from fusepass.codegen.ir.updates import read_in_place
from fusepass.codegen.render.cuda.families import INDIRECT, headers_of, laid
from fusepass.codegen.render.cuda.family import Boxes, Family, Plan
from fusepass.codegen.render.numbers import Slot, free, slot, unpacked, with_slot
from fusepass.codegen.render.spelling import C_TYPES, Identifiers, braces
from fusepass.codegen.render.unit import (
    KernelText,
    LibraryText,
    Place,
    ReplayText,
    descriptions,
    passed,
    stored_once,
    title,
)
from fusepass.codegen.schedule.overrides import NO_OVERRIDES, ScheduleOverrides
from fusepass.codegen.schedule_general import Generality
from fusepass.codegen.source import Source

_MOST_WAITING = 1 << 10  # blocks of a kernel that may have nothing to do


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
    kernels, launches, launched = [], list[str](), list[tuple[Family[Any], Kernel, Plan]]()
    for number, given in enumerate(program.kernels):
        if is_empty(given):
            continue
        family, plan = _laid(given, program, facts, aligned, general, overrides.rank_of(number))
        kernel = family.laid_out(given, plan)
        launched.append((family, kernel, plan))
        name = names.exact(kernel.name)
        once = stored_once(kernel, program, pointers, names, "blockIdx.x == 0 && threadIdx.x == 0")
        place = Place(program, pointers, names.copy())
        alone = _kernel_text(kernel, name, family, plan, place, described=not general)
        kernels.append(replace(alone, body=(*once, *alone.body)))
        boxes = family.boxes(kernel, plan)
        launches += _launch(kernel, name, program, plan, boxes, pointers, names.copy())
    zeroed = sum(kernel.team is not None for _, kernel, _ in launched)
    replay = None
    if len(launched) + zeroed > 1 and not general:
        replay = ReplayText(
            name=names.exact(f"replay_{program.name}"),
            launcher=names.exact("launch_all"),
            replayed=names.exact("replayed"),
            where=names.exact("where"),
            pointers=tuple(pointers.values()),
            launches=len(launched) + zeroed,
            arguments=zeroed + sum(len(_touched(kernel, program)) for _, kernel, _ in launched),
        )
    headers = headers_of(launched, replays=replay is not None)
    library = LibraryText(
        title=title(program),
        comment=descriptions(program),
        headers=headers,
        kernels=tuple(kernels),
        entry=entry,
        parameters=with_slot([f"void* {pointers[buffer.name]}" for buffer in program.arguments], Slot.ENTRY),
        body=unpacked(launches),
        replay=replay,
    )
    return library.source(program.name + overrides.suffix, facts, INDIRECT, marked=bool(general))


def _laid(
    kernel: Kernel, program: Program, facts: DeviceFacts, aligned: bool, general: Generality, rank: int
) -> tuple[Family[Any], Plan]:
    family, plan = laid(kernel, program, facts, aligned=aligned, rank=rank)
    return family, family.generalised(plan, kernel, coarse=general is Generality.COARSE) if general else plan


def is_empty(kernel: Kernel) -> bool:
    """Whether there is nothing to launch. A row without columns still has its row stores."""
    return kernel.row_count == 0 or (kernel.col_count == 0 and not kernel.row_stores)


def describe_cuda(
    program: Program, kernel: Kernel, facts: DeviceFacts, general: Generality = Generality.NONE, rank: int = 0
) -> str:
    """One line about a launch for reports."""
    if is_empty(kernel):
        return "nothing to run"
    family, plan = _laid(kernel, program, facts, True, general, rank)
    return family.describe(kernel, plan)


def _kernel_text(
    kernel: Kernel, name: str, family: Family[Any], plan: Plan, place: Place, *, described: bool
) -> KernelText:
    axes = [", ".join(f"{axis.name}:{axis.size}" for axis in group) for group in (kernel.rows, kernel.cols)]
    comment = [f"{name}: {', '.join(kernel.origin) or 'no operator'}"]
    if described:
        comment.append(f"rows [{axes[0]}], columns [{axes[1]}]" if kernel.cols else f"elements [{axes[0]}]")
        comment.append(family.describe(kernel, plan))
    described_boxes = (
        f"const __grid_constant__ fp::TensorMap {place.names.locals.named(each.name)}"
        for each in family.boxes(kernel, plan)
    )
    parameters = (*described_boxes, *_parameters(kernel, place.program, place.pointers))
    parameters = (*parameters[:-1], parameters[-1] + slot(Slot.PARAMETERS, name, family.index_type(plan)))
    text = family.write(kernel, plan, place)
    bounds = f"{plan.threads}, {plan.resident}" if plan.resident else str(plan.threads)
    return KernelText(name, tuple(comment), parameters, text.body, text.tables, bounds)


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
    kernel: Kernel,
    name: str,
    program: Program,
    plan: Plan,
    boxes: Sequence[Boxes],
    pointers: dict[str, str],
    names: Identifiers,
) -> list[str]:
    touched = _touched(kernel, program)
    arguments = [f"static_cast<{_pointer_type(buffer, kernel)}>({pointers[buffer.name]})" for buffer in touched]
    lines = passed(arguments, name)
    if kernel.team is not None:
        team = kernel.team
        shape = f"{team.members}, {team.teams}, {plan.threads}, {plan.shared_bytes}"
        exchange = f"{pointers[team.exchange]}, {program.buffer(team.exchange).nbytes}, stream,"
        error = names.exact("error")
        start = f"const int {error} = fp::launch_teams<{name}>({shape}, {exchange}"
        return braces([start, *lines, f"if ({error} != 0) return {error};"])
    blocks = free(plan.blocks) if kernel.when is None else min(plan.blocks, _MOST_WAITING)
    maps = [names.numbered(f"{each.name}_boxes") for each in boxes]
    lines = [*(f"    {name}," for name in maps), *lines]
    launched = [f"fp::launch<{name}>({blocks}, {plan.threads}, {free(plan.shared_bytes)}, stream,", *lines]
    if not boxes:
        return launched
    error, described = names.exact("error"), []
    for each, filled in zip(boxes, maps, strict=True):
        first = each.offset * program.buffer(each.buffer).dtype.nbytes
        base = f"static_cast<const char*>({pointers[each.buffer]}) + {first}" if first else pointers[each.buffer]
        numbers = ", ".join(f"{{{', '.join(map(str, part))}}}" for part in (each.sizes, each.strides, each.box))
        made = f"fp::describe({filled}, {base}, {numbers})"
        described.append(f"if (const int {error} = {made}; {error} != 0) return {error};")
    return braces([f"fp::TensorMap {', '.join(maps)};", *described, *launched])
