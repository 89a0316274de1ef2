"""What translation units of CUDA and of C++ have alike: what is said of a program, how its kernels are passed pointers, what they store once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.program import Buffer, Kernel, Program
from fusepass.codegen.render.numbers import Slot, free, plain, slot
from fusepass.codegen.render.printer import Printer, Scope
from fusepass.codegen.render.spelling import Identifiers, block, braces
from fusepass.codegen.render.template import fill
from fusepass.codegen.source import Source, Target

_SKELETONS = {Target.CPU: "cpu/library.cpp.j2", Target.CUDA: "cuda/library.cu.j2"}


@dataclass(frozen=True)
class Place:
    """What a kernel is written into.

    Attributes:
        program: has the kernel.
        pointers: the C names of its buffers.
        names: knows the identifiers that are taken.
    """

    program: Program
    pointers: dict[str, str]
    names: Identifiers


@dataclass(frozen=True)
class KernelText:
    """A kernel's function; on a GPU also its constant tables, and what its launch is bounded by."""

    name: str
    comment: tuple[str, ...]
    parameters: tuple[str, ...]
    body: tuple[str, ...]
    tables: tuple[str, ...] = ()
    bounds: str = ""


@dataclass(frozen=True)
class ReplayText:
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
class LibraryText:
    """A translation unit: its kernels, and its entry, whose body runs them; what that returns is for C++ to say."""

    title: str
    comment: tuple[str, ...]
    headers: tuple[str, ...]
    kernels: tuple[KernelText, ...]
    entry: str
    parameters: tuple[str, ...]
    body: tuple[str, ...]
    status: str = "0"
    replay: ReplayText | None = None

    def source(
        self, name: str, facts: DeviceFacts, indirect: Sequence[str], *, marked: bool = False, of_list: bool = False
    ) -> Source:
        """It as source, which includes `indirect` headers by way of others; with its marks if it is to be `marked`."""
        text = fill(_SKELETONS[facts.target], library=self)
        included = tuple(sorted({*self.headers, *indirect}))
        replay = self.replay.name if self.replay else None
        text = text if marked else plain(text)
        return Source(name, self.entry, facts.target, text, included, facts.arch, replay=replay, of_list=of_list)


def title(program: Program) -> str:
    """The program as a function of its inputs."""
    return f"{program.name}({', '.join(program.inputs)}) -> ({', '.join(program.outputs)})"


def title_of_list(program: Program, sizes: Sequence[int]) -> str:
    """The same of a list with members of so many elements."""
    arguments = f"({', '.join(program.inputs)}) -> ({', '.join(program.outputs)})"
    return f"{program.name}, for each of {len(sizes)} members {arguments}"


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
