"""What a region writes over its inputs, such as running statistics, comes last; and what is a single number is stored by another kernel, once."""

from __future__ import annotations

from dataclasses import replace

from fusepass.codegen.ir.copies import copy_kernel
from fusepass.codegen.ir.expr import Builder, Gather, Window
from fusepass.codegen.ir.index import Index
from fusepass.codegen.ir.program import Kernel, Program, Role
from fusepass.codegen.ir.updates import written_over
from fusepass.codegen.passes.rewrite import rewrite_kernel, stored_elsewhere


def write_last(program: Program, builder: Builder) -> Program:
    """Outputs that should be written over inputs, and that some kernel would write too early, by a copy as the last kernel.

    There is one such kernel, for outputs of one shape: for more of them another launch would take what the caller's own copies take.
    """
    ready = written_over(program)
    early = [program.buffer(output) for output, updated in program.updates if (output, updated) not in ready]
    early = [made for made in early if made.shape and not any(made.name in kernel.reads for kernel in program.kernels)]
    alike = [made for made in early if (made.shape, made.strides) == (early[0].shape, early[0].strides)]
    if not alike or any(kernel.checks for kernel in program.kernels):
        return program
    pairs = []
    for made in alike:
        new = replace(made, name=program.unused_name(f"{made.name}_new"), role=Role.TEMP)
        kernels = tuple(stored_elsewhere(kernel, made.name, new.name) for kernel in program.kernels)
        program = replace(program, buffers=(*program.buffers, new), kernels=kernels)
        pairs.append((new, made))
    copy = copy_kernel(f"{alike[0].name}_copy", pairs, builder, ("copy_",))
    return replace(program, kernels=(*program.kernels, copy))


def store_once(program: Program, builder: Builder) -> Program:
    """Kernels of one point as what the last of the others does once, where neither waits for the other: each launch takes a microsecond."""
    single = [kernel for kernel in program.kernels if _is_single(kernel)]
    last = next((kernel for kernel in reversed(program.kernels) if kernel not in single), None)
    free = [kernel for kernel in single if all(_are_independent(kernel, each) for each in program.kernels)]
    if last is None or not free or not _runs_once(last):
        return program
    stores = [store for kernel in free for store in _at_no_axis(kernel, builder).stores]
    origin = dict.fromkeys(name for kernel in (last, *free) for name in kernel.origin)
    told = replace(last, once=(*last.once, *stores), origin=tuple(origin))
    return replace(
        program, kernels=tuple(told if kernel is last else kernel for kernel in program.kernels if kernel not in free)
    )


def _at_no_axis(kernel: Kernel, builder: Builder) -> Kernel:
    return replace(rewrite_kernel(kernel, builder, {axis: Index() for axis in kernel.rows}), rows=())


def _is_single(kernel: Kernel) -> bool:
    """Whether it computes a number for each of its buffers, and nothing else."""
    plain = kernel.anchor is None and kernel.overflow_flag is None and kernel.when is None and not kernel.rest
    elsewhere = kernel.checks or any(isinstance(node, Gather | Window) for node in kernel.nodes)
    return plain and kernel.is_pointwise and kernel.row_count == 1 and kernel.partials is None and not elsewhere


def _are_independent(kernel: Kernel, other: Kernel) -> bool:
    return kernel is other or not (kernel.writes & (other.reads | other.writes) or kernel.reads & other.writes)


def _runs_once(kernel: Kernel) -> bool:
    """Whether it runs in each call, once."""
    return kernel.when is None and not kernel.rest and kernel.row_count > 0 and kernel.col_count > 0
