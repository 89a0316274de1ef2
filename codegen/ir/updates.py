"""Outputs that may be written over inputs: where nothing reads what is overwritten any more, and nothing is done again."""

from __future__ import annotations

from dataclasses import replace

from fusepass.codegen.ir.expr import Gather, Load, Window, walk
from fusepass.codegen.ir.outline import Outline
from fusepass.codegen.ir.program import Kernel, Program, Ref


def written_over(program: Program) -> tuple[tuple[str, str], ...]:
    """Those of ``program.updates`` whose output may have the memory of its input.

    The one kernel that writes the output comes behind all that read the input. It may itself read what it stores `once` in this very place, and
    each element where it writes it, once all reductions of the row have read it. And it comes behind all that may fail, for which the caller runs
    the original operators on inputs as they were: kernels with teams, which may not fit the device, and none reports a place outside of its buffer.
    """
    if isinstance(program, Outline):
        return program.updates
    if any(kernel.checks for kernel in program.kernels):
        return ()
    return tuple(pair for pair in program.updates if _is_last(program, *pair))


def read_in_place(program: Program) -> frozenset[str]:
    """The buffers that may be the same memory in the kernel that reads one element by element and writes the other."""
    pairs = written_over(program)
    return frozenset(
        name
        for kernel in program.kernels
        for pair in pairs
        for name in pair
        if {*pair} <= kernel.buffers and reads_in_place(kernel, *pair)
    )


def outlined(program: Program) -> Outline:
    """`program` without its kernels."""
    return Outline(
        program.name, program.buffers, program.inputs, program.outputs, program.calls, (), written_over(program),
        passed=tuple(each.name for each in program.arguments),
    )  # fmt: skip


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
    reads = (replace(kernel, once=()) if stored_once else kernel).reads
    return updated not in reads or reads_in_place(kernel, output, updated)


def reads_in_place(kernel: Kernel, output: str, updated: str) -> bool:
    """Whether all that `kernel` reads of `updated` is the element that it writes to `output`, which is all that it writes for each element."""
    if kernel.anchor is not None or kernel.partials is not None or len(kernel.stores) != 1:
        return False
    (store,) = kernel.stores
    nodes = (*kernel.nodes, *walk(*(each.value for each in kernel.once)))
    if any(isinstance(node, Window) for node in nodes):  # of which neighbouring blocks compute the same elements
        return False
    read = [node for node in nodes if isinstance(node, Load | Gather) and node.buffer == updated]
    return store.buffer == output and all(isinstance(node, Load) and node.index == store.index for node in read)
