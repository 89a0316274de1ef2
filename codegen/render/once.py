"""What a kernel stores once, beside what it does for rows and elements: numbers that depend on no axis."""

from __future__ import annotations

from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.render.printer import Printer, Scope
from fusepass.codegen.render.spelling import Identifiers, block, braces


def stored_once(
    kernel: Kernel, program: Program, pointers: dict[str, str], names: Identifiers, condition: str = ""
) -> list[str]:
    """The block that does so, to stand before all else; under a `condition` that one thread alone meets, unless there is one alone."""
    if not kernel.once:
        return []
    scope = Scope(Printer(names.copy(), pointers))
    scope.printer.expect([store.value for store in kernel.once])
    for store in kernel.once:
        value = scope.converted(store.value, program.buffer(store.buffer).dtype)
        scope.lines.append(f"{pointers[store.buffer]}[{scope.index(store.index)}] = {value};")
    return block(f"if ({condition})", scope.lines) if condition else braces(scope.lines)
