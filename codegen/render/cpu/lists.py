"""Renders a pointwise kernel as C++ that goes over a list: threads share pieces of its members."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.conversions import converts_along
from fusepass.codegen.ir.index import Axis
from fusepass.codegen.ir.program import Kernel, Program, Store
from fusepass.codegen.render.cpu.kernel import PointwiseWriter
from fusepass.codegen.render.cpu.library import INCLUDED, INDIRECT
from fusepass.codegen.render.cpu.loops import memory_type
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import Identifiers, block
from fusepass.codegen.render.unit import KernelText, LibraryText, Place, title_of_list
from fusepass.codegen.schedule_cpu import LEAST_PARALLEL, CpuSchedule, Walk
from fusepass.codegen.source import Source

_PIECE = 1 << 13  # elements that a thread takes at a time
_CONVERTED = 1 << 10  # at once, where halves become floats


def render_list(program: Program, sizes: Sequence[int], facts: DeviceFacts) -> Source:
    """`program`, a pointwise kernel over one axis, as C++ source for members of so many elements; see `Source.of_list`."""
    (kernel,) = program.kernels
    names = Identifiers()
    entry, name = names.exact(f"run_{program.name}"), names.exact(kernel.name)
    given, begin, end = names.exact("pointers"), names.exact("begin"), names.exact("end")
    count, first = names.exact("sizes"), names.exact("first")
    pieces = [0, *accumulate(-(-size // _PIECE) for size in sizes)]
    library = LibraryText(
        title=title_of_list(program, sizes),
        comment=(),
        headers=(*INCLUDED, "fp_list.h"),
        kernels=(
            KernelText(
                name,
                (f"{name}: {', '.join(kernel.origin)}", describe_list(program, sizes)),
                (f"void* const* {given}", f"const int64_t {begin}", f"const int64_t {end}"),
                tuple(_body(program, names.copy(), given, begin, end)),
            ),
        ),
        entry=entry,
        parameters=(f"void* const* {given}",),
        body=(
            f"static const int64_t {count}[] = {{{', '.join(map(str, sizes))}}};",
            f"static const int {first}[] = {{{', '.join(map(str, pieces))}}};",
            f"fp::for_pieces({given}, {len(program.arguments)}, {count}, {first}, {len(sizes)}, {_PIECE}, "
            f"{str(_is_shared(sizes)).lower()}, {name});",
        ),
    )
    return library.source(program.name, facts, INDIRECT, of_list=True)


def describe_list(program: Program, sizes: Sequence[int]) -> str:
    """One line about the loops for reports."""
    threads = "threads share them" if _is_shared(sizes) else "one thread"
    return f"list of {len(sizes)} members, {sum(sizes)} elements: pieces of {_PIECE}, {threads}"


def _is_shared(sizes: Sequence[int]) -> bool:
    return sum(sizes) > LEAST_PARALLEL


def _body(program: Program, names: Identifiers, given: str, begin: str, end: str) -> list[str]:
    (kernel,) = program.kernels
    (axis,) = kernel.rows
    pointers = {buffer.name: names.exact(buffer.name) for buffer in program.arguments}
    lines = []
    for column, buffer in enumerate(program.arguments):
        kind = memory_type(buffer.dtype)
        lines.append(f"{kind}* const {pointers[buffer.name]} = static_cast<{kind}*>({given}[{column}]);")
    chunk = _CONVERTED if converts_along(axis, kernel, program) else _PIECE
    schedule = CpuSchedule(Walk.POINTWISE, parallel=False, chunk=chunk)
    return [*lines, *_PieceWriter(kernel, schedule, Place(program, pointers, names), begin, end).lines()]


class _PieceWriter(PointwiseWriter):
    """From where a piece begins to where it ends, by chunks."""

    def __init__(self, kernel: Kernel, schedule: CpuSchedule, place: Place, begin: str, end: str) -> None:
        super().__init__(kernel, schedule, place)
        self._begin, self._end = begin, end

    def write(self, scope: Scope) -> None:
        self.printer.expect(store.value for store in self.kernel.stores)
        (axis,) = self.rows
        inner, variable = scope.child(), self.variables[axis]
        self.piece(inner)
        head = (
            f"for (int64_t {variable} = {self._begin}; {variable} < {self._end}; {variable} += {self.schedule.chunk})"
        )
        scope.lines += block(head, inner.lines)

    def store(self, scope: Scope, stores: Sequence[Store]) -> None:
        for load in self.kernel.loads():
            scope.value(load)  # before a result is written over it
        super().store(scope, stores)

    def tile_count(self, scope: Scope, axis: Axis, step: int, hint: str) -> str:
        name, variable = self.names.numbered(hint), self.variables[axis]
        scope.lines.append(f"const int64_t {name} = std::min<int64_t>({step}, {self._end} - {variable});")
        return name
