"""Families of memory-bound kernels: one for each rule of `fusepass.codegen.schedule`, which lays them out; all are written as walks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.render.cuda.family import Family, Headers, Place, Text
from fusepass.codegen.render.cuda.rows.circular_buffer import CircularBufferWriter
from fusepass.codegen.render.cuda.rows.multi_row import MultiRowWriter
from fusepass.codegen.render.cuda.rows.scan import ScanWriter
from fusepass.codegen.render.cuda.walk.coordinates import LAUNCHED, Grid, framed
from fusepass.codegen.render.cuda.walk.kernel import KernelWriter
from fusepass.codegen.render.spelling import block
from fusepass.codegen.schedule import RULES, SCAN, STRIPS, TEAM, Rule
from fusepass.codegen.schedule.plan import Keep, Ranked, Schedule
from fusepass.codegen.schedule.plan_output_tile import OutputTile
from fusepass.codegen.schedule.plan_rows import Rows
from fusepass.codegen.schedule_general import generalised

Writer = Callable[[Schedule], type[KernelWriter]]


class Walk(Family[Schedule]):
    """Kernels that a rule takes; `writer` says by whom a plan is written."""

    headers: ClassVar[Headers] = (
        (lambda kernel, plan: isinstance(plan, OutputTile), ("fp_instructions.cuh", "fp_windows.cuh")),
        (lambda kernel, plan: kernel.scans, ("fp_scan.cuh",)),
        (lambda kernel, plan: kernel.team is not None, ("fp_instructions.cuh", "fp_team.cuh")),
        (lambda kernel, plan: kernel.team is not None and kernel.team.strip > 1, ("fp_strips.cuh",)),
        (
            lambda kernel, plan: isinstance(plan, Rows) and plan.keep is Keep.FETCHED,
            ("fp_instructions.cuh", "fp_team.cuh"),
        ),
    )

    def __init__(self, rule: Rule, writer: Writer) -> None:
        self.rule, self.writer, self.name = rule, writer, rule.name

    def takes(self, kernel: Kernel, program: Program) -> bool:
        return kernel.anchor is None and self.rule.takes(kernel, program)

    def plan(self, kernel: Kernel, program: Program, facts: DeviceFacts, *, aligned: bool = True) -> Schedule:
        return self.rule.plan(kernel, program, facts, aligned=aligned)

    def ranking(
        self, kernel: Kernel, program: Program, facts: DeviceFacts, *, aligned: bool = True
    ) -> Sequence[Ranked[Schedule]]:
        return self.rule.ranking(kernel, program, facts, aligned=aligned)

    def generalised(self, plan: Schedule, kernel: Kernel, *, coarse: bool) -> Schedule:
        return generalised(plan, kernel, coarse=coarse)

    def laid_out(self, kernel: Kernel, plan: Schedule) -> Kernel:
        """Without a team where each block has rows to itself."""
        return replace(kernel, team=None) if kernel.team is not None and plan.team is None else kernel

    def index_type(self, plan: Schedule) -> str:
        return "int64_t" if plan.memory.wide else "int"

    def describe(self, kernel: Kernel, plan: Schedule) -> str:
        shape = f"{kernel.row_count} rows" if kernel.reduction_loops else f"{kernel.row_count} elements"
        cols = f" x {kernel.col_count} columns" if kernel.reduction_loops else ""
        return f"{plan.walk}, {shape}{cols}: {plan}{self.pieces_in_words(kernel)}"

    def write(self, kernel: Kernel, plan: Schedule, place: Place) -> Text:
        grid = LAUNCHED if kernel.when is None else Grid(place.names.exact("number_of_block"), str(plan.blocks))
        frame = framed(kernel, place.program, plan, place.pointers, place.names, grid)
        body = self.writer(plan)(frame).write()
        if kernel.when is not None:
            body = _where_wanted(body, f"{place.pointers[kernel.when]}[0] == 0.0f", grid)
        return Text(tuple(body))


def _where_wanted(body: list[str], idle: str, grid: Grid) -> list[str]:
    """`body`, which is that of a block of `grid`, unless a kernel is `idle`: a few blocks, which do the work of all, find that out sooner."""
    first, step = LAUNCHED.block, LAUNCHED.blocks
    head = f"for (unsigned {grid.block} = {first}; {grid.block} < {grid.blocks}; {grid.block} += {step})"
    return [f"if ({idle}) return;", *block(head, [*body, "__syncthreads();"])]


def _of_strips(plan: Schedule) -> type[KernelWriter]:
    return MultiRowWriter if plan.buffer else KernelWriter


def _of_team(plan: Schedule) -> type[KernelWriter]:
    return CircularBufferWriter if plan.buffer else KernelWriter


_WRITERS: dict[str, Writer] = {SCAN.name: lambda plan: ScanWriter, STRIPS.name: _of_strips, TEAM.name: _of_team}

WALKS = tuple(Walk(rule, _WRITERS.get(rule.name, lambda plan: KernelWriter)) for rule in RULES)
"""In the order of the rules."""
