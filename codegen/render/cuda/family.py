"""What a family of CUDA kernels is: which kernels it takes, its plans and what they cost, and how it writes them; and who adds families.

A family that ships is listed in `fusepass.codegen.render.cuda.families`; each kernel has the first of them that takes it. One that is
registered here competes: its plans are ranked beside the shipped family's by estimated seconds. CONTRIBUTING.md walks through one.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.render.unit import Place as Place
from fusepass.codegen.schedule.plan import Ranked


class Plan(Protocol):
    """How a kernel is laid on a device: a frozen value, whose text says it for reports.

    Attributes:
        blocks: of the launch.
        threads: of a block.
        shared_bytes: dynamic shared memory of a block.
        resident: blocks that a multiprocessor must have room for; 0 for what comes.
    """

    @property
    def blocks(self) -> int: ...

    @property
    def threads(self) -> int: ...

    @property
    def shared_bytes(self) -> int: ...

    @property
    def resident(self) -> int: ...


P = TypeVar("P", bound=Plan)
Headers = tuple[tuple[Callable[[Kernel, Any], bool], tuple[str, ...]], ...]
"""For each test of a kernel and its plan, the headers of `templates/include` that one needs which passes it."""


@dataclass(frozen=True)
class Boxes:
    """A matrix that a kernel's blocks read in boxes by the copy engine: `fp::describe` in templates/include/fp_tensor_map.cuh.

    Attributes:
        name: of the kernel's parameter that describes it.
        buffer, offset: the buffer, and the matrix' first element in it.
        sizes: elements along three dimensions, the first of neighbours.
        strides: of the second and the third, in elements.
        box: elements of a box along the first two.
    """

    name: str
    buffer: str
    offset: int
    sizes: tuple[int, int, int]
    strides: tuple[int, int]
    box: tuple[int, int]


@dataclass(frozen=True)
class Text:
    """The lines of a kernel's body, and the constant tables that stand before the kernel."""

    body: tuple[str, ...]
    tables: tuple[str, ...] = ()


class Family(abc.ABC, Generic[P]):
    """Kernels that are laid out and written alike; without state.

    Attributes:
        name: in reports.
        headers: what its kernels include.
        reduces: what a kernel with `Partials` reduces, for reports.
    """

    name: str
    headers: ClassVar[Headers] = ()
    reduces: ClassVar[str] = "reduced over positions"

    @abc.abstractmethod
    def takes(self, kernel: Kernel, program: Program) -> bool:
        """Whether the family is for `kernel`, be there a plan for a device or not."""

    @abc.abstractmethod
    def plan(self, kernel: Kernel, program: Program, facts: DeviceFacts, *, aligned: bool = True) -> P | None:
        """Its plan for a kernel that it takes; None where none fits the device.

        `aligned` says that input buffers start at a multiple of 16 bytes; all others always do.
        """

    @abc.abstractmethod
    def write(self, kernel: Kernel, plan: P, place: Place) -> Text:
        """The kernel as CUDA, laid out by `plan`. What it stores `once` is written before that; what it runs `when`, the family looks at."""

    def seconds(self, kernel: Kernel, program: Program, facts: DeviceFacts, plan: P) -> float:
        """How long a launch takes, by estimate; infinity where the family has no estimate."""
        return inf

    def ranking(
        self, kernel: Kernel, program: Program, facts: DeviceFacts, *, aligned: bool = True
    ) -> Sequence[Ranked[P]]:
        """All its plans for a kernel that it takes: `plan`, then others that a measurement may prefer, the most promising ones first."""
        plan = self.plan(kernel, program, facts, aligned=aligned)
        return () if plan is None else (Ranked(plan, self.seconds(kernel, program, facts, plan)),)

    def estimate(self, kernel: Kernel, program: Program, facts: DeviceFacts) -> float:
        """How long a launch of its plan takes, by estimate; infinity where there is no plan, or no estimate."""
        plan = self.plan(kernel, program, facts)
        return inf if plan is None else self.seconds(kernel, program, facts, plan)

    def describe(self, kernel: Kernel, plan: P) -> str:
        """A launch in one line, for reports."""
        return f"{self.name}, {kernel.row_count} elements: {plan}{self.pieces_in_words(kernel)}"

    def pieces_in_words(self, kernel: Kernel) -> str:
        """In how many pieces `kernel` reduces, where it does."""
        return f", {self.reduces} in {kernel.partials.pieces.size} pieces" if kernel.partials else ""

    # ---- what passes ask before a kernel is what it will be

    def serves(self, kernel: Kernel, program: Program, facts: DeviceFacts) -> bool:
        """Whether it can do what the library would do for `kernel`, which it takes."""
        return self.plan(kernel, program, facts) is not None

    def preferred(self, kernel: Kernel, program: Program, facts: DeviceFacts) -> bool:
        """Whether it should, without a measurement."""
        return False

    # ---- what few families have

    def generalised(self, plan: P, kernel: Kernel, *, coarse: bool) -> P:
        """`plan`, which is for `kernel` alone, as one for other sizes, too; see `fusepass.codegen.schedule_general`."""
        return plan

    def laid_out(self, kernel: Kernel, plan: P) -> Kernel:
        """`kernel` as `plan` lays it out, where that is with less than passes prepared."""
        return kernel

    def index_type(self, plan: P) -> str:
        """Of sizes that come at run time."""
        return "int"

    def boxes(self, kernel: Kernel, plan: P) -> tuple[Boxes, ...]:
        """What its blocks read by the copy engine."""
        return ()


def register(family: Family[Any]) -> None:
    """Let `family` compete for the kernels that it takes.

    Raises:
        ValueError: another one of that name is registered.
    """
    if _registered.setdefault(family.name, family) is not family:
        raise ValueError(f"a family called {family.name!r} is registered already: unregister it first")


def unregister(name: str) -> None:
    """Remove the registered family called `name`.

    Raises:
        KeyError: there is none.
    """
    del _registered[name]


def registered() -> tuple[Family[Any], ...]:
    """The families that do not ship, oldest first."""
    return tuple(_registered.values())


_registered: dict[str, Family[Any]] = {}
