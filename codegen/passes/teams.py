"""Rows that are too large for one block, and not for several: a team of blocks shares each of them.

Which kernels are better so, and how large the teams are, is asked of the schedule, which knows what fits on the chip.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Builder
from fusepass.codegen.ir.program import Buffer, Kernel, Program, Role, Team
from fusepass.codegen.ir.team import exchange_offsets
from fusepass.codegen.passes.axes import order_and_merge
from fusepass.codegen.passes.split import is_mixed

TeamChoice = Callable[[Program, Kernel], tuple[int, int] | None]
StripChoice = Callable[[Program, Kernel], tuple[int, int, int] | None]


def form_teams(
    program: Program,
    builder: Builder,
    choose: TeamChoice,
    strips: StripChoice = lambda program, kernel: None,
) -> Program:
    """Give each kernel a `Team` where `choose` names (blocks of a team, teams at most), or `strips` these and the rows that a team takes at once.

    Both see the kernel with its axes in their final order.
    """
    buffers, kernels = list(program.buffers), []
    ordered = order_and_merge(program, builder) if any(map(_may_share, program.kernels)) else program
    for kernel, final in zip(program.kernels, ordered.kernels, strict=True):
        may = _may_share(kernel) and not is_mixed(program, kernel)
        size = (strips(ordered, final) or choose(ordered, final)) if may else None
        if size is not None:
            taken = {buffer.name for buffer in buffers}
            name = next(name for n in itertools.count(len(buffers)) if (name := f"exchange_{n}") not in taken)
            members, teams, *strip = size
            team = Team(members, teams, name, *strip)
            needed = exchange_offsets(kernel, team.members, team.teams, team.strip)[""]
            buffers.append(Buffer(name, DType.I32, (needed // DType.I32.nbytes,), (1,), Role.TEMP))
            kernel = replace(kernel, team=team)
        kernels.append(kernel)
    return replace(program, buffers=tuple(buffers), kernels=tuple(kernels))


def _may_share(kernel: Kernel) -> bool:
    plain = kernel.anchor is None and kernel.partials is None and not kernel.scans
    return bool(kernel.reduction_loops and kernel.stores and plain)
