"""Renders a program as one C++ translation unit for the CPU: its kernels and a plain C entry that calls them."""

from __future__ import annotations

from collections.abc import Collection

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.index import Axis
from fusepass.codegen.ir.program import Buffer, Kernel, Program
from fusepass.codegen.ir.updates import read_in_place
from fusepass.codegen.render.cpu.kernel import kernel_body
from fusepass.codegen.render.cpu.loops import FAULT, memory_type
from fusepass.codegen.render.numbers import Slot, slot, unpacked, with_slot
from fusepass.codegen.render.spelling import Identifiers
from fusepass.codegen.render.unit import KernelText, LibraryText, Place, descriptions, passed, stored_once, title
from fusepass.codegen.schedule.overrides import NO_OVERRIDES, ScheduleOverrides
from fusepass.codegen.schedule_cpu import CpuSchedule, cpu_schedule
from fusepass.codegen.source import Source

INCLUDED = ("fp_half.h", "fp_index.h", "fp_lanes.h", "fp_rows.h")
INDIRECT = ("fp_cast.h", "fp_common.h", "fp_functions.h", "fp_libm.h", "fp_random.h", "fp_scalar.h", "fp_states.h")


def render_cpu(
    program: Program, facts: DeviceFacts, *, general: bool = False, overrides: ScheduleOverrides = NO_OVERRIDES
) -> Source:
    """`program` as C++ source for a CPU with `facts.cores` cores; with its marks, and as general as it can be, if `general`."""
    names = Identifiers()
    entry = names.exact(f"run_{program.name}")
    names.exact(FAULT)
    pointers = {buffer.name: names.exact(buffer.name) for buffer in program.arguments}
    checks = any(kernel.checks for kernel in program.kernels)
    kernels, calls, used = [], [], frozenset[str]()
    shared = read_in_place(program)
    for number, kernel in enumerate(program.kernels):
        if kernel.row_count == 0:
            continue
        touched = [buffer for buffer in program.arguments if buffer.name in kernel.reads | kernel.writes]
        used |= {buffer.name for buffer in touched}
        plan = cpu_schedule(kernel, program, facts, general=general, rank=overrides.rank_of(number))
        name = names.exact(kernel.name)
        report = ((f"int* {FAULT}",), [f"&{FAULT}"]) if kernel.checks else ((), [])
        parameters = [*(_parameter(buffer, kernel, pointers[buffer.name], shared) for buffer in touched), *report[0]]
        parameters[-1] += slot(Slot.PARAMETERS, name, "int64_t" if plan.wide else "int")
        once = stored_once(kernel, program, pointers, names)
        body = (*once, *kernel_body(kernel, plan, Place(program, pointers, names.copy())))
        kernels.append(KernelText(name, _kernel_comment(kernel, name, plan), tuple(parameters), body))
        arguments = [f"static_cast<{memory_type(b.dtype)}*>({pointers[b.name]})" for b in touched] + report[1]
        calls += [f"{name}(", *passed(arguments, name)]
    headers = (*INCLUDED, *(["fp_scan.h"] if any(kernel.scans for kernel in program.kernels) else []))
    library = LibraryText(
        title=title(program),
        comment=descriptions(program),
        headers=headers,
        kernels=tuple(kernels),
        entry=entry,
        parameters=with_slot(
            [f"void* {pointers[b.name]}" if b.name in used else "void*" for b in program.arguments], Slot.ENTRY
        ),
        body=unpacked([f"int {FAULT} = 0;", *calls] if checks else calls),
        status=FAULT if checks else "0",
    )
    return library.source(program.name + overrides.suffix, facts, INDIRECT, marked=general)


def describe_cpu(kernel: Kernel, plan: CpuSchedule) -> str:
    """One line about a kernel's loops for reports."""
    rows = _sizes(kernel.rows)
    domain = f"{rows} elements" if kernel.is_pointwise else f"{rows} rows of {_sizes(kernel.cols)} columns"
    return f"{domain}: {plan}"


def _kernel_comment(kernel: Kernel, name: str, plan: CpuSchedule) -> tuple[str, ...]:
    what = f"{name}: {', '.join(kernel.origin) or 'no operator'}"
    return (what,) if plan.general else (what, describe_cpu(kernel, plan))


def _parameter(buffer: Buffer, kernel: Kernel, pointer: str, shared: Collection[str]) -> str:
    constant = "" if buffer.name in kernel.writes else "const "
    restrict = "" if buffer.name in shared else " __restrict"
    return f"{constant}{memory_type(buffer.dtype)}*{restrict} {pointer}"


def _sizes(axes: tuple[Axis, ...]) -> str:
    return " x ".join(str(axis.size) for axis in axes) or "1"
