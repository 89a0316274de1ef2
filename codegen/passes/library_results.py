"""Outputs in the memory of what the library made, where kernels read that for the last time: the region takes less memory, and moves fewer bytes."""

from __future__ import annotations

from dataclasses import replace

from fusepass.codegen.ir.expr import Apply, Builder, Expr, Load, Op
from fusepass.codegen.ir.program import (
    ANCHOR_TARGETS,
    VIEW_TARGET,
    Buffer,
    Kernel,
    LibraryCall,
    Program,
    Ref,
    Role,
    Store,
)
from fusepass.codegen.ir.updates import reads_in_place
from fusepass.codegen.passes.rewrite import stored_elsewhere


def keep_library_results(program: Program, builder: Builder) -> Program:
    """A library result that is an output as it is needs no copy, and another output may be written over it, element by element.

    Such an output is the library's buffer from then on, as a view where it has another shape.
    """
    for call in program.calls:
        if call.target in ANCHOR_TARGETS:
            program = _kept(program, program.buffer(call.result)) or program
    return program


def _kept(program: Program, made: Buffer) -> Program | None:
    alike = [
        each
        for each in map(program.buffer, program.outputs)
        if each.role is Role.OUTPUT
        and (each.dtype, each.numel) == (made.dtype, made.numel) == (made.dtype, made.extent)
    ]
    other = {output for output, _ in program.updates}.union(*(kernel.reads for kernel in program.kernels))
    alike = [each for each in alike if each.extent == each.numel and each.name not in other]
    copies = ((output, _without_copy(program, made, output)) for output in alike)
    over = ((output, _written_over(program, made, output)) for output in alike)
    found = next(((output, changed) for output, changed in (*copies, *over) if changed is not None), None)
    return None if found is None else _renamed(found[1], made, found[0])


def _without_copy(program: Program, made: Buffer, output: Buffer) -> Program | None:
    """`program` without the store of `output`, where that copies `made`; None where it does not, or is all there is."""
    stored = [store for kernel in program.kernels for store in kernel.stores if store.buffer == output.name]
    if len(stored) != 1 or not _is_copy(stored[0], made.name):
        return None
    kernels = (_without(kernel, stored[0]) for kernel in program.kernels)
    left = tuple(kernel for kernel in kernels if kernel.writes or kernel.checks)
    return replace(program, kernels=left) if left else None


def _is_copy(store: Store, source: str) -> bool:
    value: Expr = store.value
    if isinstance(value, Apply) and value.op is Op.CAST:
        (value,) = value.args
    return isinstance(value, Load) and value.buffer == source and value.index == store.index


def _without(kernel: Kernel, store: Store) -> Kernel:
    return replace(kernel, stores=tuple(each for each in kernel.stores if each is not store))


def _written_over(program: Program, made: Buffer, output: Buffer) -> Program | None:
    """`program`, where a kernel may write `output` over `made`; else None."""
    writers = [number for number, kernel in enumerate(program.kernels) if output.name in kernel.writes]
    if len(writers) != 1 or made.name in _read_by_calls(program) or made.name in program.outputs:
        return None
    kernel, behind = program.kernels[writers[0]], program.kernels[writers[0] + 1 :]
    if kernel.when is not None or kernel.rest or kernel.once or any(made.name in each.reads for each in behind):
        return None
    return program if made.name not in kernel.reads or reads_in_place(kernel, output.name, made.name) else None


def _renamed(program: Program, made: Buffer, output: Buffer) -> Program:
    """`program` with the library's result as its output."""
    kernels = tuple(stored_elsewhere(kernel, output.name, made.name) for kernel in program.kernels)
    outputs = tuple(made.name if name == output.name else name for name in program.outputs)
    buffers = tuple(each for each in program.buffers if each is not output)
    program = replace(program, kernels=kernels, outputs=outputs, buffers=buffers)
    if (made.shape, made.strides) == (output.shape, output.strides):
        return program
    first = replace(made, name=program.unused_name(f"{made.name}_whole"))
    view = LibraryCall(made.name, VIEW_TARGET, (Ref(first.name), output.shape, output.strides, 0))
    calls = (replace(call, result=first.name) if call.result == made.name else call for call in program.calls)
    seen = replace(made, shape=output.shape, strides=output.strides)
    buffers = tuple(each for old in buffers for each in ((first, seen) if old is made else (old,)))
    return replace(program, buffers=buffers, calls=(*calls, view))


def _read_by_calls(program: Program) -> frozenset[str]:
    return frozenset(value.buffer for call in program.calls for value in call.args if isinstance(value, Ref))
