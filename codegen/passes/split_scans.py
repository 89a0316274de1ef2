"""Running reductions of few long rows, in pieces: what each piece comes to, what lies before each, then every piece by itself.

Three kernels for one, the first and last of which read everything: Hillis and Steele's scan of blocks (1986), where a device keeps
more blocks busy than there are rows. Pieces are merged in a fixed order.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Builder, Expr, Op, Prefix, ReduceOp
from fusepass.codegen.ir.index import Axis, Bound, Index, axis_index, from_the_end
from fusepass.codegen.ir.program import Kernel, Program, Reduction
from fusepass.codegen.passes.rewrite import rewrite_kernel
from fusepass.codegen.passes.split import SplitPolicy, equal_parts
from fusepass.codegen.passes.splitter import Splitter

_JOIN = {ReduceOp.SUM: Op.ADD, ReduceOp.PROD: Op.MUL, ReduceOp.MAX: Op.MAXIMUM, ReduceOp.MIN: Op.MINIMUM}


def split_scans(program: Program, builder: Builder, policy: SplitPolicy) -> Program:
    """Apply `policy` to every kernel that scans."""
    work = Splitter(program, builder)
    for kernel in program.kernels:
        pieces = policy.pieces(program, kernel) if kernel.scans else 1
        if pieces < policy.least_of_scans or not _split(work, kernel, pieces):
            work.kernels.append(kernel)
    return replace(program, buffers=tuple(work.buffers), kernels=tuple(work.kernels))


def _split(work: Splitter, kernel: Kernel, pieces: int) -> bool:
    """Add `kernel` in about so many `pieces` a row to `work`; False where it is left as it is."""
    (reduction,), (axis,) = kernel.reductions, kernel.cols
    prefixes = [node for node in kernel.nodes if isinstance(node, Prefix)]
    own = all(node.index == axis_index(axis) for node in prefixes)
    if not own or kernel.row_stores or axis.size < 2 * pieces or reduction.op not in _JOIN:
        return False
    length = equal_parts(axis.size, pieces, least_left=2)
    if length == axis.size:
        return False
    outer, inner = Axis(f"{axis.name}o", axis.size // length), Axis(f"{axis.name}i", length)
    each = (*kernel.rows, outer)
    found, stores = work.temporaries("piece", [work.builder.stat(reduction.name, 0, reduction.dtype)], each)
    at = axis_index(outer) * length + axis_index(inner)
    # A sum of a piece may go either way: along memory.
    steps = [load.index.stride(axis) for load in kernel.loads()]
    along = from_the_end(inner) if steps and max(step or 0 for step in steps) < 0 else axis_index(inner)
    places = {axis: axis_index(outer) * length + along}
    values = tuple(work.builder.rewrite(value, places) for value in reduction.values)
    piece = replace(reduction, values=values, running=False)
    name = f"{kernel.name}_pieces"
    work.kernels.append(
        replace(kernel, name=name, rows=each, cols=(inner,), sweeps=((piece,),), row_stores=tuple(stores), stores=())
    )
    up_to = work.builder.prefix(reduction.name, axis_index(outer), reduction.dtype)
    before, stores = work.temporaries("before", [up_to], each)
    merged = replace(reduction, values=tuple(found.values()))
    work.kernels.append(
        replace(kernel, name=f"{kernel.name}_before", cols=(outer,), sweeps=((merged,),), stores=tuple(stores))
    )
    (before_next,) = before.values()
    work.kernels.append(_scanned(work.builder, kernel, outer, inner, at, before_next))
    rest = axis.size - outer.size * length
    if rest:
        behind = Axis(f"{axis.name}r", rest)
        start = axis_index(behind) + outer.size * length
        work.kernels.append(_scanned(work.builder, kernel, None, behind, start, before_next, outer))
    return True


def _scanned(
    builder: Builder,
    kernel: Kernel,
    outer: Axis | None,
    inner: Axis,
    at: Index,
    up_to: Expr,
    pieces: Axis | None = None,
) -> Kernel:
    """`kernel` for the columns `at`, an index of the axis `inner`: of each piece `outer`, or of what is left behind all `pieces`."""
    (reduction,), (axis,) = kernel.reductions, kernel.cols
    if outer is None:
        assert pieces is not None
        carried = builder.rewrite(up_to, {pieces: Index(pieces.size - 1)})
    else:
        last = builder.rewrite(up_to, {outer: axis_index(outer) - 1})
        carried = builder.masked((Bound(axis_index(outer), 1, outer.size),), last, _neutral(builder, reduction))

    def leaf(node: Expr) -> Expr | None:
        if not isinstance(node, Prefix):
            return None
        here = builder.prefix(node.reduction, axis_index(inner), node.dtype)
        return builder.apply(_JOIN[reduction.op], carried, here, dtype=node.dtype)

    rows = kernel.rows if outer is None else (*kernel.rows, outer)
    part = rewrite_kernel(replace(kernel, rows=rows, cols=(inner,)), builder, {axis: at}, leaf)
    return replace(part, name=f"{kernel.name}_{'rest' if outer is None else 'each'}", rest=outer is None)


def _neutral(builder: Builder, reduction: Reduction) -> Expr:
    """What joined with a number gives the number."""
    dtype: DType = reduction.dtype
    match reduction.op:
        case ReduceOp.MAX:
            return builder.const(-inf if dtype.is_float else dtype.limits[0], dtype)
        case ReduceOp.MIN:
            return builder.const(inf if dtype.is_float else dtype.limits[1], dtype)
        case ReduceOp.PROD:
            return builder.const(1, dtype)
        case _:
            return builder.const(0, dtype)
