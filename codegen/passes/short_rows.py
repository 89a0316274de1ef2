"""Rows of few elements become windows.

Those shorter than an access that lie one after another in memory and are only reduced make a pointwise kernel: a thread then has several
neighbouring rows and loads them in whole accesses. With a row for each thread, a warp would load single elements some apart, and as many
fewer bytes at once.

Where another kernel reduces the results, as the nearest of several points does, that one computes them: they need not be stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from fusepass.codegen.ir.expr import Builder, Expr, Gather, ReductionResult, Window
from fusepass.codegen.ir.index import Axis, Index
from fusepass.codegen.ir.program import Kernel, Program, Role
from fusepass.codegen.passes.fuse import drop_unused, is_plain, with_stored
from fusepass.codegen.passes.rewrite import rewrite_kernel
from fusepass.codegen.passes.unify import unify

_FEW = 8  # elements of a row that are computed again rather than stored
_MANY = 64  # the same where rows are made of much less than there are rows
_AGAIN = 4  # points of a kernel that compute the same row, where several kernels compute it
_REPEATED = 4  # rows for each element that is read, at least, for that


def windows_of_short_rows(program: Program, builder: Builder, access: int) -> Program:
    """Make every kernel that only reduces rows of fewer bytes than an `access` has pointwise, or of few elements that lie apart."""

    def is_short(kernel: Kernel) -> bool:
        return _is_short(kernel, access) or (access > 0 and _lies_apart(program, kernel, access))

    kernels = (_pointwise(kernel, builder) if is_short(kernel) else kernel for kernel in program.kernels)
    return replace(program, kernels=tuple(kernels))


def windows_of_reductions(program: Program, builder: Builder, longest: int, access: int) -> Program:
    """Make the rows of every kernel that only reduces few elements windows of the one kernel that reads the results, if that reduces them,
    once or in rows of at most `longest` elements, which stay on the chip; along memory alone where there is no widest `access`."""
    for producer in program.kernels:
        few = _only_reduces(producer) and _is_few(program, producer, access)
        if few and len(_readers(program, producer)) == 1:
            told = _in_readers(program, producer, builder, longest, access, 1)
            if told is not None:
                return windows_of_reductions(told, builder, longest, access)
    return program


def windows_of_readers(program: Program, builder: Builder, longest: int, access: int) -> Program:
    """The same for results that several kernels reduce, as the gradients of a least distance do, where they are made of much less than there
    are rows: all compute them again. Nothing changes where there is no `access`."""
    for producer in program.kernels:
        few = access > 0 and producer.col_count <= _FEW and _only_reduces(producer) and _meets_much(program, producer)
        if few and len(_readers(program, producer)) > 1:
            told = _in_readers(program, producer, builder, longest, access, _AGAIN)
            if told is not None:
                return windows_of_readers(told, builder, longest, access)
    return program


def _readers(program: Program, producer: Kernel) -> list[Kernel]:
    return [kernel for kernel in program.kernels if kernel.reads & producer.writes]


def _in_readers(
    program: Program, producer: Kernel, builder: Builder, longest: int, access: int, most: int
) -> Program | None:
    """`program` with the rows of `producer` as windows of all kernels that read them, each at most so often at a time; None where these do
    not reduce them, or somebody else needs them."""
    if any(program.buffer(name).role is not Role.TEMP for name in producer.writes):
        return None
    rest = program.kernels[program.kernels.index(producer) + 1 :]
    fused: dict[int, Kernel] = {}
    for reader in _readers(program, producer):
        once = len(reader.reduction_loops) == 1 and not reader.stores
        between = rest[: rest.index(reader)]
        if not (once or reader.col_count <= longest) or any(kernel.writes & producer.reads for kernel in between):
            return None
        told = _inside(producer, reader, builder, most)
        if told is None or (not access and any(_is_across(load.index, told) for load in told.loads())):
            return None
        fused[id(reader)] = told
    kernels = (fused.get(id(kernel), kernel) for kernel in program.kernels if kernel is not producer)
    return drop_unused(replace(program, kernels=tuple(kernels)))


def _inside(producer: Kernel, reader: Kernel, builder: Builder, most: int) -> Kernel | None:
    """`reader` with the rows of `producer` as windows; None where it reads one of them elsewhere, or at more than so many points."""
    if not reader.reduction_loops or reader.scans or not is_plain(reader):
        return None
    windows = _pointwise(producer, builder)
    # Without columns, for which the reader's axes beside the points would be taken.
    rows = replace(windows, row_stores=windows.stores, stores=())
    unified = unify(rows, reader, producer.writes, builder, beside=most > 1)
    if unified is None:
        return None
    producer, reader = unified.producer, unified.consumer
    points, own = {axis for axis in producer.rows if axis.size > 1}, {*reader.rows, *reader.cols}
    if not reader.cols or not points <= own or prod(axis.size for axis in own - points) > most:
        return None  # rows of one element, or points of others
    told = with_stored(reader, producer.row_stores, builder)
    return told and replace(told, origin=tuple(dict.fromkeys((*producer.origin, *reader.origin))))


def _is_across(index: Index, kernel: Kernel) -> bool:
    """Whether the rows of `kernel` are nearer to each other at `index` than their elements are."""

    def least(axes: Sequence[Axis]) -> int:
        return min((step for axis in axes if (step := index.stride(axis))), default=0)

    return 0 < least(kernel.rows) < least(kernel.cols)


def _only_reduces(kernel: Kernel) -> bool:
    """Whether a kernel does nothing but reduce each row once, by operations that a window knows."""
    if not is_plain(kernel) or len(kernel.reduction_loops) != 1 or kernel.stores or kernel.scans:
        return False
    simple = all(each.op.arity == each.op.parts == 1 and not each.running for each in kernel.reductions)
    return simple and kernel.col_count > 1 and not any(isinstance(node, Gather | Window) for node in kernel.nodes)


def _is_few(program: Program, kernel: Kernel, access: int) -> bool:
    """Whether a row has so few elements that who needs its result had better reduce it."""
    return kernel.col_count <= _FEW or (access > 0 and kernel.col_count <= _MANY and _meets_much(program, kernel))


def _meets_much(program: Program, kernel: Kernel) -> bool:
    """Whether rows are made of much less than there are rows: each with each of two small tensors, say."""
    sizes = [program.buffer(load.buffer).numel for load in kernel.loads()]
    return bool(sizes) and all(_REPEATED * size < kernel.row_count for size in sizes)


def _is_short(kernel: Kernel, access: int) -> bool:
    if not _only_reduces(kernel) or len(kernel.cols) != 1 or not kernel.rows:
        return False
    (col,), row = kernel.cols, kernel.rows[-1]
    along = [load for load in kernel.loads() if load.index.stride(col) == 1 and load.index.stride(row) == col.size]
    return bool(along) and all(col.size * load.dtype.nbytes < access for load in along)


def _lies_apart(program: Program, kernel: Kernel, access: int) -> bool:
    """Whether rows of few elements are made of less than there are rows, or lie so that neither they nor their neighbours have an access
    together: parts of warps would load single elements."""
    if not _only_reduces(kernel) or len(kernel.cols) != 1 or not _is_few(program, kernel, access):
        return False
    (col,) = kernel.cols
    if _meets_much(program, kernel):
        return True
    sizes = {load: program.buffer(load.buffer).numel for load in kernel.loads()}
    if not sizes:
        return False
    largest = max(sizes, key=sizes.__getitem__)
    near = [axis.size for axis in kernel.rows if largest.index.stride(axis) == 1]
    return largest.index.stride(col) != 1 and bool(near) and near[0] * largest.dtype.nbytes < access


def _pointwise(kernel: Kernel, builder: Builder) -> Kernel:
    found = {
        each.name: builder.window(each.op, kernel.cols, builder.cast(each.values[0], each.dtype))
        for each in kernel.reductions
    }

    def leaf(node: Expr) -> Expr | None:
        return found[node.reduction] if isinstance(node, ReductionResult) else None

    ends = rewrite_kernel(replace(kernel, reduction_loops=()), builder, leaf=leaf)
    return replace(ends, cols=(), row_stores=(), stores=ends.row_stores)
