"""Outputs that may be written over inputs: where nothing reads what is overwritten any more, and nothing is done again."""

from __future__ import annotations

from dataclasses import replace

from fusepass.codegen.ir.outline import Outline
from fusepass.codegen.ir.program import Program, Ref


def written_over(program: Program) -> tuple[tuple[str, str], ...]:
    """Those of ``program.updates`` whose output may have the memory of its input.

    The one kernel that writes the output comes behind all that read the input, but for what it stores `once` in this very place. And it comes
    behind all that may fail, for which the caller runs the original operators on inputs as they were: kernels with teams, which may not fit the
    device, and none reports a place outside of its buffer.
    """
    if isinstance(program, Outline):
        return program.updates
    if any(kernel.checks for kernel in program.kernels):
        return ()
    return tuple(pair for pair in program.updates if _is_last(program, *pair))


def _is_last(program: Program, output: str, updated: str) -> bool:
    lie = [(buffer.dtype, buffer.shape, buffer.strides) for buffer in map(program.buffer, (output, updated))]
    in_calls = {value.buffer for call in program.calls for value in call.args if isinstance(value, Ref)}
    writers = [number for number, kernel in enumerate(program.kernels) if output in kernel.writes]
    if lie[0] != lie[1] or updated in in_calls or len(writers) != 1:
        return False
    (last,) = writers
    kernel, behind = program.kernels[last], program.kernels[last + 1 :]
    if kernel.when is not None or kernel.rest or any(updated in each.reads or each.team is not None for each in behind):
        return False
    stored_once = any(store.buffer == output for store in kernel.once)
    return updated not in (replace(kernel, once=()) if stored_once else kernel).reads
