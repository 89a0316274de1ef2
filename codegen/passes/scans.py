"""What is made of a scan's result, element by element, is made where the result is found."""

from __future__ import annotations

from dataclasses import replace

from fusepass.codegen.ir.expr import Builder, Expr, Load
from fusepass.codegen.ir.index import Axis, Index, from_the_end
from fusepass.codegen.ir.program import Kernel, Program, Store
from fusepass.codegen.passes.alignment import align
from fusepass.codegen.passes.fuse import drop_unused
from fusepass.codegen.passes.rewrite import rewrite_kernel


def fuse_scans(program: Program, builder: Builder) -> Program:
    """Each kernel that scans with the pointwise kernel that reads its result, if that is the only one and reads each element once."""
    kernels = list(program.kernels)
    for scan in program.kernels:
        readers = [kernel for kernel in kernels if kernel.reads & scan.writes]
        fused = _fused(scan, readers[0], builder) if scan.scans and len(readers) == 1 else None
        if fused is not None:  # in the reader's place, where all that it reads is written
            kernels = [fused if kernel is readers[0] else kernel for kernel in kernels if kernel is not scan]
    return drop_unused(replace(program, kernels=tuple(kernels)))


def _fused(scan: Kernel, reader: Kernel, builder: Builder) -> Kernel | None:
    loads = [load for load in reader.loads() if load.buffer in scan.writes]
    if not reader.is_pointwise or reader.anchor is not None or len(loads) != 1 or len(scan.stores) != 1:
        return None
    store, (load,) = scan.stores[0], loads
    forwards = _forwards(reader, load.index)
    reader, read = rewrite_kernel(reader, builder, forwards), load.index.substitute(forwards)
    points = replace(scan, rows=(*scan.rows, *scan.cols), cols=())
    aligned = align(reader, builder, read, points, store)
    if aligned is None:
        return None
    stores = rewrite_kernel(
        aligned.kernel, builder, aligned.places, lambda node: _forwarded(node, store, builder)
    ).stores
    fused = replace(scan, stores=stores, origin=tuple(dict.fromkeys((*scan.origin, *reader.origin))))
    return None if store.buffer in fused.reads else fused


def _forwards(reader: Kernel, read: Index) -> dict[Axis, Index]:
    """Turns the axes of `reader` round along which it goes backwards through what it reads."""
    backwards = (axis for axis in reader.rows if (read.stride(axis) or 0) < 0)
    return {axis: from_the_end(axis) for axis in backwards}


def _forwarded(node: Expr, store: Store, builder: Builder) -> Expr | None:
    """What the load of a stored result becomes where that is at hand."""
    if isinstance(node, Load) and node.buffer == store.buffer and node.index == store.index:
        return builder.cast(store.value, node.dtype)
    return None
