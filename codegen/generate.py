"""From a lowered region to source: device-dependent pass options, the passes, rendering, and what reports say of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from fusepass.codegen import schedule_convolution, schedule_product
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.copies import copy_kernel
from fusepass.codegen.ir.expr import Builder, Gather
from fusepass.codegen.ir.product import Product
from fusepass.codegen.ir.program import (
    ANCHOR_TARGETS,
    CONVERSION_TARGET,
    Kernel,
    LibraryCall,
    Program,
    Ref,
    Role,
)
from fusepass.codegen.ir.text import program_text
from fusepass.codegen.passes.anchors import AnchorOptions, AnchorSource
from fusepass.codegen.passes.axes import order_and_merge
from fusepass.codegen.passes.pipeline import Known, PassOptions, run_passes
from fusepass.codegen.passes.split import SplitPolicy
from fusepass.codegen.render import describe, render
from fusepass.codegen.schedule.columns import stays
from fusepass.codegen.schedule.deep import has_deep_windows, serves_deep
from fusepass.codegen.schedule.multi_row import strip_team
from fusepass.codegen.schedule.output_tile_partials import (
    pieces_of_windows,
    seconds_with_windows,
    windows_overlap,
    windows_pay_twice,
)
from fusepass.codegen.schedule.overrides import NO_OVERRIDES, ScheduleOverrides
from fusepass.codegen.schedule.row_pieces import row_pieces
from fusepass.codegen.schedule.scan import rows_stay
from fusepass.codegen.schedule.shape import ACCESS, fills
from fusepass.codegen.schedule.team import team_size
from fusepass.codegen.schedule.weights import beginnings
from fusepass.codegen.schedule_general import Generality
from fusepass.codegen.source import Source, Target
from fusepass.config import current

TEAMS = "teams"
"""In `Config.disable`: no blocks share rows."""


@dataclass(frozen=True)
class KernelSummary:
    """What reports say of one kernel: its name, how it is laid on the device in words, and the bytes that it reads and writes."""

    name: str
    schedule: str
    read: int
    written: int


@dataclass(frozen=True)
class Recalled:
    """What an earlier process found of a program.

    Attributes:
        source: for operands aligned to 16 bytes.
        kernels: what reports say of them.
        program: generates the program once more.
    """

    source: Source
    kernels: tuple[KernelSummary, ...]
    program: Callable[[], Program]


@dataclass(frozen=True)
class Generated:
    """A region as source.

    Attributes:
        outline: the program after all passes; its kernels may be missing if it was `recalled`.
        facts: the device.
        overrides: how its kernels depart from what the rules say.
        general: the source that serves several sizes, where one does.
        generality: how far that is laid out for them.
        sizes: whether the source serves several sizes, in words; empty for the first ones.
        general_unaligned: gives the source for inputs that are aligned to nothing, where there is a `general` source.
        recalled: what is known from an earlier process, so that nothing is generated before it is asked for.
    """

    outline: Program
    facts: DeviceFacts
    overrides: ScheduleOverrides = NO_OVERRIDES
    general: Source | None = None
    generality: Generality = Generality.NONE
    sizes: str = ""
    general_unaligned: Callable[[Generated], Source] | None = field(default=None, compare=False, repr=False)
    recalled: Recalled | None = field(default=None, compare=False, repr=False)

    @cached_property
    def program(self) -> Program:
        """The program after all passes, with its kernels."""
        return self.outline if self.recalled is None else self.recalled.program()

    @cached_property
    def source(self) -> Source:
        """For operands aligned to 16 bytes, as PyTorch allocates them.

        Raises:
            ScheduleError, RenderError: a bug in the scheduler or the renderer.
        """
        if self.general is not None:
            return self.general
        return self.recalled.source if self.recalled else render(self.program, self.facts, overrides=self.overrides)

    @cached_property
    def kernels(self) -> tuple[KernelSummary, ...]:
        """What reports say of each kernel, in the order of launches."""
        if self.recalled is not None and self.general is None:
            return self.recalled.kernels
        level, chosen, program = self.generality, self.overrides, self.program
        return tuple(
            KernelSummary(kernel.name, describe(program, kernel, self.facts, level, chosen), *traffic(program, kernel))
            for kernel in program.kernels
        )

    @property
    def generates_anchor(self) -> bool:
        """Whether kernels compute the region's anchor, not the library."""
        return not any(call.target in ANCHOR_TARGETS for call in self.outline.calls)

    def unaligned(self) -> Source:
        """The source that assumes nothing about the alignment of inputs, with the schedules of the rules: no others are measured for it.

        Raises:
            BuildError: it serves several sizes, and too many such libraries were built already.
        """
        if self.general_unaligned is not None:
            return self.general_unaligned(self)
        return self.source if self.takes_unaligned else render(self.program, self.facts, aligned=False)

    @property
    def takes_unaligned(self) -> bool:
        """Whether its source, which C++ lets assume no alignment, serves any inputs."""
        return self.facts.target is Target.CPU and self.overrides == NO_OVERRIDES


def generate(
    program: Program,
    builder: Builder,
    facts: DeviceFacts,
    anchor: AnchorSource = AnchorSource.PREFERRED,
    overrides: ScheduleOverrides = NO_OVERRIDES,
    known: Known | None = None,
) -> Generated:
    """Run the passes for a device; what is rendered, is when it is asked for. `anchor` says who is to compute the region's anchor,
    `overrides` how kernels are to depart from the rules, `known` what was generated of the same program with another `anchor`.

    Raises:
        IRError: a bug in a pass.
    """
    config = current()
    stages: list[tuple[str, str]] = [("lowered", program_text(program))] if config.dump else []

    def observe(stage: str, result: Program) -> None:
        if config.dump:
            stages.append((stage, program_text(result)))

    options = pass_options(facts, anchor, overrides)
    known = known or Known()
    final = run_passes(program, builder, options, check=config.debug, observe=observe, known=known)
    generated = known.once("generated", final, lambda program: Generated(program, facts, overrides))
    if config.dump:
        _dump(config.dump / program.name, stages, generated.source)
    return generated


def pass_options(
    facts: DeviceFacts, anchor: AnchorSource = AnchorSource.PREFERRED, overrides: ScheduleOverrides = NO_OVERRIDES
) -> PassOptions:
    """What the passes are told about a device, and about who is to compute the region's anchor."""
    if facts.target is Target.CUDA:
        teams = current().allows(TEAMS) and overrides.teams
        workers = int(2 * facts.multiprocessors * overrides.pieces)
        # Two resident blocks on every multiprocessor; a piece is worth a block from some 16 KB on. Scattered stores of
        # 1 MB take about as long as a launch.
        policy = SplitPolicy(
            workers,
            least_piece=4096,
            lanes=32,
            column_workers=8 * workers,
            stays=lambda program, kernel: stays(program, _ordered(program, kernel), facts),
        )
        return PassOptions(
            policy,
            longest_cached_row=16384,
            longest_column=1024,
            access=ACCESS,
            separate_from=1 << 18,
            taps_from=1 << 20,
            fills=lambda program, kernel: schedule_product.fills(program, kernel, facts),
            anchors=_anchors(anchor, facts),
            pieces=lambda program, kernel: _pieces_on(program, kernel, facts),
            row_pieces=lambda program, kernel: row_pieces(program, kernel, facts) if overrides.over_rows else None,
            staged=lambda program, kernel: windows_overlap(program, kernel, facts),
            scanned=lambda program, kernel: rows_stay(_ordered(program, kernel), program, facts),
            seconds=lambda program, kernel: seconds_with_windows(program, kernel, facts),
            teams=lambda program, kernel: team_size(program, kernel, facts) if teams else None,
            strips=lambda program, kernel: strip_team(program, kernel, facts) if teams else None,
            beginnings=lambda program, kernel: beginnings(program, kernel, facts),
            busy=lambda threads: fills(threads, facts),
            product_length=lambda program, kernel: schedule_product.product_length(program, kernel, facts),
        )
    # Four pieces per core even out cores of unequal speed; a piece is worth a thread from some 64 KB on.
    workers = int(4 * facts.cores * overrides.pieces)
    policy = SplitPolicy(workers, least_piece=16384, lanes=64, least_of_scans=16)
    return PassOptions(policy, longest_cached_row=1 << 16, stores_columns=False, stores_pieces=False)


def _pieces_on(program: Program, kernel: Kernel, facts: DeviceFacts) -> int | None:
    """In how many pieces the kernel of an anchor, or one with windows, reduces over positions."""
    if kernel.anchor is None:
        return pieces_of_windows(program, kernel, facts)
    if isinstance(kernel.anchor, Product):
        return schedule_product.pieces_on(program, kernel, facts)
    return schedule_convolution.pieces_on(program, kernel, facts)


def _pays_twice(program: Program, first: Kernel, second: Kernel, facts: DeviceFacts) -> bool:
    """Whether two kernels that compute the same convolution take less time than one that stores its results."""
    pays = windows_pay_twice if first.anchor is None else schedule_convolution.pays_twice
    return pays(program, first, second, facts)


def _anchors(source: AnchorSource, facts: DeviceFacts) -> AnchorOptions | None:
    """Which anchors become kernels, and how; None where none do."""
    if source is AnchorSource.LIBRARY:
        return None
    from fusepass.codegen.render.cuda.families import serves  # with all writers, which nobody needs who generates C++

    def accepts(program: Program, kernel: Kernel) -> bool:
        if source is AnchorSource.ARITHMETIC and has_deep_windows(kernel):
            return serves_deep(_ordered(program, kernel), program, facts)
        return serves(program, kernel, facts, preferred=source is AnchorSource.PREFERRED)

    return AnchorOptions(
        accepts,
        source,
        warps=schedule_convolution.warps_together(facts),
        again=lambda program, first, second: _pays_twice(program, first, second, facts),
        product_seconds=lambda program, kernel: schedule_product.seconds_with_copies(program, kernel, facts),
    )


def _ordered(program: Program, kernel: Kernel) -> Kernel:
    """`kernel` with the axes that it will have in the end."""
    (ordered,) = order_and_merge(replace(program, kernels=(kernel,)), Builder()).kernels
    return ordered


def conversions(program: Program) -> Iterator[tuple[LibraryCall, Program, Builder]]:
    """The library calls of `program` that only change a layout, each with a program that does the same."""
    for call in program.calls:
        if call.target == CONVERSION_TARGET:
            builder = Builder()
            yield call, _conversion(program, call, builder), builder


def _conversion(program: Program, call: LibraryCall, builder: Builder) -> Program:
    (source,) = call.args
    assert isinstance(source, Ref)
    given = replace(program.buffer(source.buffer), role=Role.INPUT)
    made = replace(program.buffer(call.result), role=Role.OUTPUT)
    name = f"{program.name}_{made.name}"
    kernel = copy_kernel(name, [(given, made)], builder, ("clone",))
    return Program(name, (given, made), (given.name,), (made.name,), (), (kernel,))


def traffic(program: Program, kernel: Kernel) -> tuple[int, int]:
    """(bytes read, bytes written) by one kernel: of a buffer that it only loads from no more than it has points for."""
    loaded = program.loaded(kernel.nodes) if kernel.anchor is None else {}
    for node in kernel.nodes:
        if isinstance(node, Gather):
            loaded.pop(node.buffer, None)
    read = sum(loaded.get(name, program.buffer(name).nbytes) for name in kernel.reads)
    written = sum(program.buffer(name).nbytes for name in kernel.writes)
    return read, 0 if kernel.rest else written


def anchor_traffic(program: Program) -> int:
    """Bytes that the library's calls and conversions read and write; calls that only make a view move nothing."""
    calls = [call for call in program.calls if call.target in (*ANCHOR_TARGETS, CONVERSION_TARGET)]
    buffers = [program.buffer(ref.buffer) for call in calls for ref in call.args if isinstance(ref, Ref)]
    return sum(buffer.nbytes for buffer in (*buffers, *(program.buffer(call.result) for call in calls)))


def _dump(directory: Path, stages: list[tuple[str, str]], source: Source) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for number, (stage, text) in enumerate(stages):
        (directory / f"{number}_{stage}.ir").write_text(text)
    suffix = "cu" if source.target is Target.CUDA else "cpp"
    (directory / f"{source.name}.{suffix}").write_text(source.text)
