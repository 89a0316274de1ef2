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
from fusepass.codegen.passes.splitter import MERGE, Splitter

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
    if len(kernel.reduction_loops) > 1:
        return False
    (reduction,), (axis,) = kernel.reductions, kernel.cols
    prefixes = [node for node in kernel.nodes if isinstance(node, Prefix)]
    own = all(node.index == axis_index(axis) for node in prefixes)
    if not own or kernel.row_stores or axis.size < 2 * pieces:
        return False
    length = equal_parts(axis.size, pieces, least_left=2)
    if length == axis.size:
        return False
    outer, inner = Axis(f"{axis.name}o", axis.size // length), Axis(f"{axis.name}i", length)
    each = (*kernel.rows, outer)
    types = tuple(enumerate(reduction.types))
    parts = [work.builder.reduction_result(reduction.name, part, dtype) for part, dtype in types]
    found, stores = work.temporaries("piece", parts, each)
    at = axis_index(outer) * length + axis_index(inner)
    # A sum of a piece may go either way: along memory.
    steps = [load.index.stride(axis) for load in kernel.loads()]
    along = from_the_end(inner) if steps and max(step or 0 for step in steps) < 0 else axis_index(inner)
    places = {axis: axis_index(outer) * length + along}
    values = tuple(work.builder.rewrite(value, places) for value in reduction.values)
    piece = replace(reduction, values=values, running=False)
    name = f"{kernel.name}_pieces"
    work.kernels.append(
        replace(
            kernel,
            name=name,
            rows=each,
            cols=(inner,),
            reduction_loops=((piece,),),
            row_stores=tuple(stores),
            stores=(),
        )
    )
    up_to = [work.builder.prefix(reduction.name, part, axis_index(outer), dtype) for part, dtype in types]
    before, stores = work.temporaries("before", up_to, each)
    merged = replace(reduction, op=MERGE.get(reduction.op, reduction.op), values=tuple(found.values()))
    work.kernels.append(
        replace(kernel, name=f"{kernel.name}_before", cols=(outer,), reduction_loops=((merged,),), stores=tuple(stores))
    )
    work.kernels.append(_scanned(work.builder, kernel, outer, inner, at, tuple(before.values())))
    rest = axis.size - outer.size * length
    if rest:
        behind = Axis(f"{axis.name}r", rest)
        start = axis_index(behind) + outer.size * length
        work.kernels.append(_scanned(work.builder, kernel, None, behind, start, tuple(before.values()), outer))
    return True


def _scanned(
    builder: Builder,
    kernel: Kernel,
    outer: Axis | None,
    inner: Axis,
    at: Index,
    up_to: tuple[Expr, ...],
    pieces: Axis | None = None,
) -> Kernel:
    """`kernel` for the columns `at`, an index of the axis `inner`: of each piece `outer`, or of what is left behind all `pieces`.

    `up_to` is what each piece and all before it come to.
    """
    (reduction,), (axis,) = kernel.reductions, kernel.cols
    if outer is None:
        assert pieces is not None
        carried = tuple(builder.rewrite(part, {pieces: Index(pieces.size - 1)}) for part in up_to)
    else:
        before = (builder.rewrite(part, {outer: axis_index(outer) - 1}) for part in up_to)
        behind = (Bound(axis_index(outer), 1, outer.size),)
        nothing = _neutral(builder, reduction)
        carried = tuple(builder.masked(behind, part, none) for part, none in zip(before, nothing, strict=True))
    here = tuple(builder.prefix(reduction.name, n, axis_index(inner), part.dtype) for n, part in enumerate(up_to))
    joined = _joined(builder, reduction.op, carried, here)

    def leaf(node: Expr) -> Expr | None:
        return joined[node.part] if isinstance(node, Prefix) else None

    rows = kernel.rows if outer is None else (*kernel.rows, outer)
    part = rewrite_kernel(replace(kernel, rows=rows, cols=(inner,)), builder, {axis: at}, leaf)
    return replace(part, name=f"{kernel.name}_{'rest' if outer is None else 'each'}", rest=outer is None)


def _joined(builder: Builder, op: ReduceOp, first: tuple[Expr, ...], second: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """The parts of what `first` and then `second` come to."""
    dtype = first[0].dtype
    if op in _JOIN:
        return (builder.apply(_JOIN[op], *first, *second, dtype=dtype),)
    if op.finds_place:
        reaches = builder.apply(Op.LE if op is ReduceOp.LAST_ARGMIN else Op.GE, second[0], first[0], dtype=DType.BOOL)
        if dtype.is_float:
            nan = builder.apply(Op.ISNAN, second[0], dtype=DType.BOOL)
            reaches = builder.apply(Op.OR, reaches, nan, dtype=DType.BOOL)
        return tuple(
            builder.apply(Op.WHERE, reaches, there, before, dtype=there.dtype)
            for before, there in zip(first, second, strict=True)
        )
    top = builder.apply(Op.MAXIMUM, first[0], second[0], dtype=dtype)
    least = builder.const(-inf, dtype)
    only_least = builder.apply(Op.EQ, top, least, dtype=DType.BOOL)
    shift = builder.apply(Op.WHERE, only_least, builder.const(0, dtype), top, dtype=dtype)
    totals = []
    for value, total in (first, second):
        difference = builder.apply(Op.SUB, value, shift, dtype=dtype)
        factor = builder.apply(Op.EXP, difference, dtype=dtype)
        totals.append(builder.apply(Op.MUL, total, factor, dtype=dtype))
    return top, builder.apply(Op.ADD, *totals, dtype=dtype)


def _neutral(builder: Builder, reduction: Reduction) -> tuple[Expr, ...]:
    """What joined with others gives these."""
    dtype: DType = reduction.dtype
    least, greatest = (-inf, inf) if dtype.is_float else dtype.limits
    match reduction.op:
        case ReduceOp.MAX:
            numbers: tuple[float, ...] = (least,)
        case ReduceOp.MIN:
            numbers = (greatest,)
        case ReduceOp.PROD:
            numbers = (1,)
        case ReduceOp.SUM:
            numbers = (0,)
        case ReduceOp.SOFTMAX:
            numbers = (least, 0)
        case ReduceOp.LAST_ARGMAX:
            return builder.const(least, dtype), builder.const(-1, DType.I64)
        case ReduceOp.LAST_ARGMIN:
            return builder.const(greatest, dtype), builder.const(-1, DType.I64)
        case _:
            raise AssertionError(f"{reduction.op.value} does not run")
    return tuple(builder.const(number, dtype) for number in numbers)
