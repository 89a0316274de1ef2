"""Renders a pointwise kernel as one that goes over a list: each block does a piece of one member, which it finds by its number."""

from __future__ import annotations

from collections.abc import Sequence

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.expr import Load
from fusepass.codegen.ir.program import Buffer, Kernel, Program
from fusepass.codegen.render.cuda.families import ALWAYS, INDIRECT
from fusepass.codegen.render.printer import Printer, Scope
from fusepass.codegen.render.spelling import C_TYPES, Identifiers, block, either, loop, written
from fusepass.codegen.render.unit import KernelText, LibraryText, title_of_list
from fusepass.codegen.source import Source

_THREADS = 256
_STEPS = 4  # vectors of a thread
_ACCESS = 16  # bytes that a thread moves at once, of the widest elements
_MOST_LANES = 8


def render_list(program: Program, sizes: Sequence[int], facts: DeviceFacts) -> Source:
    """`program`, a pointwise kernel over one axis, as CUDA source for members of so many elements; see `Source.of_list`."""
    (kernel,) = program.kernels
    names = Identifiers()
    entry, name = names.exact(f"run_{program.name}"), names.exact(kernel.name)
    pointers, count, given = names.exact("pointers"), names.exact("sizes"), names.exact("list")
    writer = _Writer(program, kernel, names.copy(), given)
    columns = len(program.arguments)
    library = LibraryText(
        title=title_of_list(program, sizes),
        comment=(),
        headers=(*ALWAYS, "fp_list.cuh"),
        kernels=(
            KernelText(
                name,
                (f"{name}: {', '.join(kernel.origin)}", describe_list(program, sizes)),
                (f"const fp::List<{columns}> {given}",),
                tuple(writer.lines()),
                bounds=str(_THREADS),
            ),
        ),
        entry=entry,
        parameters=(f"void* const* {pointers}",),
        body=(
            f"static const int64_t {count}[] = {{{', '.join(map(str, sizes))}}};",
            f"fp::launch_list<{name}, {columns}>({pointers}, {count}, {len(sizes)}, {writer.piece}, {_THREADS}, stream);",
        ),
    )
    return library.source(program.name, facts, INDIRECT, of_list=True)


def describe_list(program: Program, sizes: Sequence[int]) -> str:
    """One line about the launch for reports."""
    lanes = _lanes(program)
    return f"list of {len(sizes)} members, {sum(sizes)} elements: {_THREADS} threads, vectors of {lanes}, {_STEPS} per thread"


def _lanes(program: Program) -> int:
    widest = max(buffer.dtype.nbytes for buffer in program.arguments if buffer.shape)
    return min(max(_ACCESS // widest, 1), _MOST_LANES)


class _Writer:
    """The body of the kernel. A thread has `_STEPS` vectors of neighbouring elements, or single ones where the member's memory begins elsewhere or
    the piece is its last."""

    def __init__(self, program: Program, kernel: Kernel, names: Identifiers, given: str) -> None:
        self.program, self.kernel, self.names, self.given = program, kernel, names, given
        self.pointers = {buffer.name: names.exact(buffer.name) for buffer in program.arguments}
        self.printer = Printer(names, self.pointers, "int")
        (self.axis,) = kernel.rows
        self.lanes = _lanes(program)
        self.piece = _THREADS * self.lanes * _STEPS
        self.top = Scope(self.printer)

    def lines(self) -> list[str]:
        local, lines = self.names.locals, self.top.lines
        lines.append(f"const int {local.member} = {self.given}.member(int(blockIdx.x));")
        first = f"int64_t(int(blockIdx.x) - {self.given}.first[{local.member}]) * {self.piece}"
        lines.append(f"const int64_t {local.first} = {first};")
        for column, buffer in enumerate(self.program.arguments):
            kind, shift = C_TYPES[buffer.dtype], f" + {local.first}" if buffer.shape else ""
            place = f"static_cast<{kind}*>({self.given}.pointers[{local.member}][{column}]){shift}"
            lines.append(f"{kind}* const {self.pointers[buffer.name]} = {place};")
        self.printer.expect(store.value for store in self.kernel.stores)
        vectors, elements = self._vectors(), self._elements()
        left = f"{self.given}.sizes[{local.member}] - {local.first}"
        lines.append(f"const int {local.count} = int({left} < {self.piece} ? {left} : {self.piece});")
        whole = f"{local.count} == {self.piece} && fp::aligned({', '.join(self.pointers[each.name] for each in self._tensors)})"
        lines += either(whole, vectors, elements)
        return written(lines)

    @property
    def _tensors(self) -> list[Buffer]:
        return [buffer for buffer in self.program.arguments if buffer.shape]

    def _vectors(self) -> list[str]:
        local, step = self.names.locals, self.top.child()
        lane = step.child({self.axis: f"({local.at} + {local.lane})"})
        for load in self.kernel.loads():
            if self.program.buffer(load.buffer).shape:
                name = self._vector(step, load)
                lane.bind(load, f"{name}[{local.lane}]")
        behind = []
        for store in self.kernel.stores:
            kind, name = self._kind(store.buffer), self.names.numbered(f"{self.pointers[store.buffer]}_out")
            step.lines.append(f"{kind} {name};")
            value = lane.converted(store.value, self.program.buffer(store.buffer).dtype)
            lane.lines.append(f"{name}[{local.lane}] = {value};")
            behind.append(f"fp::as_vector<{self.lanes}>({self.pointers[store.buffer]}[{local.at}]) = {name};")
        start, advance = f"int {local.at} = {self.lanes} * int(threadIdx.x)", self.lanes * _THREADS
        head = f"for ({start}; {local.at} < {self.piece}; {local.at} += {advance})"
        return ["#pragma unroll 1", *block(head, [*step.lines, *loop(local.lane, self.lanes, lane.lines), *behind])]

    def _vector(self, step: Scope, load: Load) -> str:
        name = self.names.numbered(f"{self.pointers[load.buffer]}_in")
        place = f"{self.pointers[load.buffer]}[{self.names.locals.at}]"
        step.lines.append(f"const {self._kind(load.buffer)} {name} = fp::as_vector<{self.lanes}>({place});")
        return name

    def _kind(self, buffer: str) -> str:
        return f"fp::Vec<{C_TYPES[self.program.buffer(buffer).dtype]}, {self.lanes}>"

    def _elements(self) -> list[str]:
        local, step = self.names.locals, self.top.child()
        step.define_axis(self.axis, local.at)
        for load in self.kernel.loads():
            step.value(load)  # before a result is written over it
        for store in self.kernel.stores:
            step.lines.append(step.stored(store, self.program.buffer(store.buffer).dtype))
        return block(
            f"for (int {local.at} = int(threadIdx.x); {local.at} < {local.count}; {local.at} += {_THREADS})", step.lines
        )
