"""What translation units of CUDA and of C++ have alike: what is said of a program, how its kernels are passed pointers, what they store once."""

from __future__ import annotations

from collections.abc import Sequence

from fusepass.codegen.ir.program import Buffer, Kernel, Program
from fusepass.codegen.render.numbers import Slot, free, slot
from fusepass.codegen.render.printer import Printer, Scope
from fusepass.codegen.render.spelling import Identifiers, block, braces


def title(program: Program) -> str:
    """The program as a function of its inputs."""
    return f"{program.name}({', '.join(program.inputs)}) -> ({', '.join(program.outputs)})"


def descriptions(program: Program) -> tuple[str, ...]:
    """A line for each buffer that it is given."""
    return tuple(map(_description, program.arguments))


def _description(buffer: Buffer) -> str:
    shape = "x".join(map(free, buffer.shape)) or "scalar"
    strides = ", ".join(map(free, buffer.strides))
    return f"  {buffer.role.value} {buffer.name}: {buffer.dtype} {shape}, strides ({strides})"


def passed(arguments: Sequence[str], kernel: str) -> list[str]:
    """The lines of a call of `kernel` that pass it `arguments`, and sizes that come at run time."""
    return [*(f"    {each}," for each in arguments[:-1]), f"    {arguments[-1]}{slot(Slot.ARGUMENTS, kernel)});"]


def stored_once(
    kernel: Kernel, program: Program, pointers: dict[str, str], names: Identifiers, condition: str = ""
) -> list[str]:
    """The block that stores numbers which depend on no axis, to stand before all else; under a `condition` that one thread alone meets, unless there is one alone."""
    if not kernel.once:
        return []
    scope = Scope(Printer(names.copy(), pointers))
    scope.printer.expect([store.value for store in kernel.once])
    for store in kernel.once:
        scope.lines.append(scope.stored(store, program.buffer(store.buffer).dtype))
    return block(f"if ({condition})", scope.lines) if condition else braces(scope.lines)
