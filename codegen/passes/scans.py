"""What is made of a scan's results, element by element, is made where the results are found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusepass.codegen.ir.expr import Builder, Expr, Load
from fusepass.codegen.ir.index import Axis, Index, from_the_end
from fusepass.codegen.ir.program import Kernel, Program, Store
from fusepass.codegen.passes.alignment import align
from fusepass.codegen.passes.fuse import drop_unused
from fusepass.codegen.passes.rewrite import rewrite_kernel


def fuse_scans(program: Program, builder: Builder) -> Program:
    """Each kernel that scans with the kernels that read its results, if these are pointwise and read each element once."""
    kernels = list(program.kernels)
    for scan in program.kernels:
        readers = [kernel for kernel in kernels if kernel.reads & scan.writes]
        fused = _fused(scan, readers, builder) if scan.scans and readers else None
        if fused is None:
            continue
        # In the last reader's place, where all that they read is written: nothing before it may need what they write.
        between = kernels[kernels.index(readers[0]) : kernels.index(readers[-1])]
        if not any(kernel.reads & fused.writes for kernel in between):
            kernels[kernels.index(readers[-1])] = fused
            kernels = [kernel for kernel in kernels if kernel is not scan and kernel not in readers]
    return drop_unused(replace(program, kernels=tuple(kernels)))


def _fused(scan: Kernel, readers: Sequence[Kernel], builder: Builder) -> Kernel | None:
    stores: list[Store] = []
    for reader in readers:
        made = _forwarded(scan, reader, builder)
        if made is None:
            return None
        stores += made
    origin = (scan.origin, *(reader.origin for reader in readers))
    fused = replace(scan, stores=tuple(stores), origin=tuple(dict.fromkeys(name for names in origin for name in names)))
    return None if (scan.writes | fused.writes) & fused.reads else fused


def _forwarded(scan: Kernel, reader: Kernel, builder: Builder) -> tuple[Store, ...] | None:
    """What `reader` stores, made of what `scan` has at hand."""
    places = {load.index for load in reader.loads() if load.buffer in scan.writes}
    if not reader.is_pointwise or reader.anchor is not None or len(places) != 1:
        return None
    (place,) = places
    if any(store.index != scan.stores[0].index for store in scan.stores):
        return None
    forwards = _forwards(reader, place)
    reader = rewrite_kernel(reader, builder, forwards)
    points = replace(scan, rows=(*scan.rows, *scan.cols), cols=())
    aligned = align(reader, builder, place.substitute(forwards), points, scan.stores[0])
    if aligned is None:
        return None
    found = {(store.buffer, store.index): store.value for store in scan.stores}

    def leaf(node: Expr) -> Expr | None:
        value = found.get((node.buffer, node.index)) if isinstance(node, Load) else None
        return builder.cast(value, node.dtype) if value is not None else None

    return rewrite_kernel(aligned.kernel, builder, aligned.places, leaf).stores


def _forwards(reader: Kernel, read: Index) -> dict[Axis, Index]:
    """Turns the axes of `reader` round along which it goes backwards through what it reads."""
    backwards = (axis for axis in reader.rows if (read.stride(axis) or 0) < 0)
    return {axis: from_the_end(axis) for axis in backwards}
