"""Outputs that may have the memory of what is read: where nothing reads what is overwritten any more, and nothing is done again."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from fusepass.codegen.ir.expr import Gather, Load, Window, walk
from fusepass.codegen.ir.outline import Outline
from fusepass.codegen.ir.program import Buffer, Kernel, Program, Ref, Role
from fusepass.codegen.ir.transpose import near_step

LEAST_BYTES = 1 << 16
"""Of an output that is worth another buffer's memory: small ones are allocated ahead of the call (`fusepass.runtime.fast_path`)."""


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
    return tuple(pair for pair in program.updates if _lie_alike(program, *pair) and _is_last(program, *pair))


def recycled(program: Program) -> tuple[tuple[str, str], ...]:
    """Outputs that may take the memory of what is `dying` in this program; each with that buffer.

    An output needs memory of the same size and type, and the kernel that writes it is as `written_over` says.
    """
    if isinstance(program, Outline):
        return program.recycled
    read = frozenset[str]().union(*(kernel.reads for kernel in program.kernels)) - {*program.outputs}
    free = [program.buffer(name) for name in program.dying if name in read]
    if not free or any(kernel.checks for kernel in program.kernels):
        return ()
    pairs: dict[str, str] = {}
    for output in map(program.buffer, program.outputs):
        if output.role is Role.OUTPUT and output.name not in dict(program.updates) and output.nbytes >= LEAST_BYTES:
            writer = next(kernel for kernel in program.kernels if output.name in kernel.writes)
            fitting = (
                each
                for each in free
                if _fits(output, each)
                and _is_last(program, output.name, each.name)
                and (each.name not in writer.reads or _runs_along_memory(writer))
            )
            if (found := next(fitting, None)) is not None:
                free.remove(found)
                pairs[output.name] = found.name
    return tuple(pairs.items())


def read_in_place(program: Program) -> frozenset[str]:
    """The buffers that may be the same memory in the kernel that reads one element by element and writes the other."""
    pairs = (*written_over(program), *recycled(program))
    return frozenset(
        name
        for kernel in program.kernels
        for pair in pairs
        for name in pair
        if {*pair} <= kernel.buffers and _is_in_place(kernel, *pair)
    )


def outlined(program: Program) -> Outline:
    """`program` without its kernels."""
    return Outline(
        program.name, program.buffers, program.inputs, program.outputs, program.calls, (), written_over(program),
        passed=tuple(each.name for each in program.arguments), recycled=recycled(program),
    )  # fmt: skip


def _lie_alike(program: Program, output: str, updated: str) -> bool:
    lie = [(buffer.dtype, buffer.shape, buffer.strides) for buffer in map(program.buffer, (output, updated))]
    return lie[0] == lie[1]


def _fits(output: Buffer, other: Buffer) -> bool:
    """Whether the memory of `other` is that of `output`, whatever their shapes: neither has gaps or elements that share memory."""
    dense = all(buffer.extent == buffer.numel for buffer in (output, other))
    return dense and (output.dtype, output.numel) == (other.dtype, other.numel)


def _is_last(program: Program, output: str, updated: str) -> bool:
    in_calls = {value.buffer for call in program.calls for value in call.args if isinstance(value, Ref)}
    writers = [number for number, kernel in enumerate(program.kernels) if output in kernel.writes]
    if updated in in_calls or len(writers) != 1:
        return False
    (last,) = writers
    kernel, behind = program.kernels[last], program.kernels[last + 1 :]
    if kernel.when is not None or kernel.rest or any(updated in each.reads or each.team is not None for each in behind):
        return False
    stored_once = any(store.buffer == output for store in kernel.once)
    reads = (replace(kernel, once=()) if stored_once else kernel).reads
    return updated not in reads or _is_in_place(kernel, output, updated)


def _is_in_place(kernel: Kernel, output: str, updated: str) -> bool:
    """Whether all that `kernel` reads of `updated` is the element that it writes to `output`, behind all else that it writes for each element."""
    if kernel.anchor is not None or kernel.partials is not None or not kernel.stores:
        return False
    *_, store = kernel.stores
    nodes = (*kernel.nodes, *walk(*(each.value for each in kernel.once)))
    if any(isinstance(node, Window) for node in nodes):  # of which neighbouring blocks compute the same elements
        return False
    read = [node for node in nodes if isinstance(node, Load | Gather) and node.buffer == updated]
    return store.buffer == output and all(isinstance(node, Load) and node.index == store.index for node in read)


def _runs_along_memory(kernel: Kernel) -> bool:
    """Whether an axis, of the columns if there are any, has neighbouring points in neighbouring memory wherever it is stored or read.

    Else blocks may compute the same elements, to store whole sectors, where nothing is written over what it is made of.
    """
    *_, store = kernel.stores
    along = next((axis for axis in kernel.cols or kernel.rows if near_step(store.index, axis) == 1), None)
    places = [*(each.index for each in kernel.stores), *(each.index for each in kernel.loads())]
    return along is not None and all(near_step(place, along) in (1, inf) for place in places)
