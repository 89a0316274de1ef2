"""Kernels with reductions in parts: pieces of rows and what merges them, what happens per element by itself."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Builder, Expr, Op, ReduceOp, ReductionResult, children, own_indices, walk
from fusepass.codegen.ir.index import Axis, Bound, axis_index, contiguous_strides, linear
from fusepass.codegen.ir.program import Buffer, Kernel, Program, Reduction, Role, Store
from fusepass.codegen.passes.axes import count
from fusepass.codegen.passes.rewrite import Leaf, rewrite_kernel

_SHORT = 16
"""Elements beside each other that neighbouring threads may as well store one by one."""

MERGE = {ReduceOp.MOMENTS: ReduceOp.MERGE_MOMENTS, ReduceOp.SOFTMAX: ReduceOp.MERGE_SOFTMAX}
"""What merges the results of pieces, where that is not the reduction itself."""


@dataclass(frozen=True)
class Cut:
    """How the rows of a kernel fall into pieces.

    Attributes:
        pieces: columns of `kernel` that tell pieces apart.
        kernel: the kernel with columns of which that can be said; without the last elements where there is a `rest`.
        axis: the column that has a rest: of the original kernel, whose other columns are those of `kernel`.
        start: its first point that lies in no piece.
        stores: what pieces of the first reduction loop store per element; `kernel` does not, and may load it behind that reduction loop.
    """

    pieces: tuple[Axis, ...]
    kernel: Kernel
    axis: Axis | None = None
    start: int = 0
    stores: tuple[Store, ...] = ()

    @property
    def piece(self) -> Kernel:
        """The kernel with pieces of its rows as rows."""
        rest = tuple(axis for axis in self.kernel.cols if axis not in self.pieces)
        return replace(self.kernel, rows=(*self.kernel.rows, *self.pieces), cols=rest, stores=self.stores)


class Splitter:
    """Makes the kernels that a kernel with reductions is split into.

    Attributes:
        buffers: of the program, with the temporaries that were added.
        kernels: the finished ones, in order.
        parts: for each reduction of the reduction loop at hand, what its merging reduction takes of a piece.
    """

    def __init__(self, program: Program, builder: Builder) -> None:
        self.buffers = list(program.buffers)
        self.kernels: list[Kernel] = []
        self.builder = builder
        self.parts: dict[str, tuple[Expr, ...]] = {}

    def split(self, kernel: Kernel, cut: Cut) -> None:
        """Partial and merging kernels per reduction loop; then, if anything happens per element, a pointwise kernel."""
        stats: dict[int, Expr] = {}
        for reduction_loop, partial in zip(kernel.reduction_loops, cut.kernel.reduction_loops, strict=True):
            self._partial(cut, partial, stats)
            pieces = self._with_rest(kernel, reduction_loop, cut)
            if reduction_loop is kernel.reduction_loops[-1]:
                self.merge_last(kernel, pieces, stats)
            else:
                stats |= self.merge_early(kernel, reduction_loop, pieces, stats)

    def separate(self, kernel: Kernel) -> None:
        """The reductions, then a pointwise kernel for what happens per element."""
        loads, stores = self.temporaries("row", row_scalars(kernel), kernel.rows)
        self.kernels.append(replace(kernel, row_stores=(*stores, *kernel.row_stores), stores=()))
        self._apply(kernel, loads)

    def store_along(self, kernel: Kernel, along: Axis | None) -> None:
        """`kernel` with the stores that have neighbours `along` that axis, or along a short one; then a kernel for the others."""
        others = {axis for axis in kernel.rows if axis.size > _SHORT and axis != along}
        across = [store for store in kernel.stores if any(store.index.stride(axis) == 1 for axis in others)]
        if along is None or not across:
            self.kernels.append(kernel)
            return
        kept = [store for store in kernel.stores if store not in across]
        dtypes = {buffer.name: buffer.dtype for buffer in self.buffers}
        copies: list[Store] = []
        for store in across:
            dtype = dtypes[store.buffer]
            same = (each for each in kept if each.value is store.value and dtypes[each.buffer] is dtype)
            source = next(same, None)
            if source is None:
                axes = (*(axis for axis in kernel.rows if axis != along), along)
                _, (source,) = self.temporaries("value", [self.builder.cast(store.value, dtype)], axes)
                kept.append(source)
                dtypes[source.buffer] = dtype
            copies.append(replace(store, value=self.builder.load(source.buffer, source.index, dtype)))
        copied = replace(kernel, name=f"{kernel.name}_across", stores=tuple(copies), row_stores=(), partials=None)
        self.kernels += [replace(kernel, stores=tuple(kept)), copied]

    def compute(self, kernel: Kernel, values: Sequence[Expr]) -> None:
        """A pointwise kernel for `values` that are reduced, then the reductions."""
        rows = (*kernel.rows, *kernel.cols)
        loads, stores = self.temporaries("value", values, rows)
        computed = replace(kernel, rows=rows, cols=(), reduction_loops=(), row_stores=(), stores=tuple(stores))
        self.kernels += [
            replace(computed, name=f"{kernel.name}_values"),
            rewrite_kernel(kernel, self.builder, leaf=forward(loads)),
        ]

    def merge_early(
        self, kernel: Kernel, reduction_loop: tuple[Reduction, ...], pieces: tuple[Axis, ...], stats: dict[int, Expr]
    ) -> dict[int, Expr]:
        """A kernel that merges the `parts` of a reduction loop that is not the last; what later reduction loops and stores use of it, as loads."""
        loads, stores = self.temporaries("stat", _stats_used(kernel, after=reduction_loop), kernel.rows)
        self._merge(kernel, reduction_loop, pieces, stores, stats)
        return loads

    def merge_last(self, kernel: Kernel, pieces: tuple[Axis, ...], stats: dict[int, Expr]) -> None:
        """A kernel that merges the `parts` of the last reduction loop and stores per row; a pointwise one for what happens per element."""
        loads, stores = self.temporaries("row", row_scalars(kernel), kernel.rows)
        self._merge(kernel, kernel.reduction_loops[-1], pieces, [*stores, *kernel.row_stores], stats)
        if kernel.stores:
            self._apply(kernel, loads)

    def _apply(self, kernel: Kernel, scalars: dict[int, Expr]) -> None:
        """What `kernel` does per element, its `scalars` per row loaded from temporaries."""
        rows = (*kernel.rows, *kernel.cols)
        apply = replace(kernel, name=f"{kernel.name}_apply", rows=rows, cols=(), reduction_loops=(), row_stores=())
        # One scalar may be part of another: the larger first, while it is still itself.
        for scalar, load in reversed(scalars.items()):
            apply = rewrite_kernel(apply, self.builder, leaf=forward({scalar: load}))
        self.kernels.append(apply)

    def _partial(self, cut: Cut, reduction_loop: tuple[Reduction, ...], stats: dict[int, Expr]) -> None:
        """Each piece's own result, to a temporary per part."""
        piece = cut.piece
        stores: list[Store] = []
        for reduction in reduction_loop:
            # How many values a piece has is known, but for pieces of pieces.
            known = reduction.op is not ReduceOp.MERGE_MOMENTS
            stores += self.keep(reduction, piece.rows, piece.col_count if known else None)
        partial = replace(
            piece, name=f"{piece.name}_{reduction_loop[0].name}_partial", reduction_loops=(reduction_loop,),
            row_stores=tuple(stores), stores=piece.stores if reduction_loop is piece.reduction_loops[0] else (),
        )  # fmt: skip
        self.kernels.append(rewrite_kernel(partial, self.builder, leaf=forward(stats)))

    def keep(self, reduction: Reduction, rows: tuple[Axis, ...], values: int | None) -> list[Store]:
        """Stores of a partial result of so many `values`, if that is known, to temporaries; `parts` has how to read them."""
        counted = reduction.op.kept > reduction.op.parts
        numbers = reduction.op.parts if values is not None else reduction.op.kept
        loads, stores = self.temporaries(
            f"{reduction.name}_part", [self._stat(reduction, part) for part in range(numbers)], rows
        )
        parts = tuple(loads.values())
        if counted:
            known = None if values is None else self.builder.const(values, reduction.dtype)
            parts = (known or parts[2], *parts[:2])
        self.parts[reduction.name] = parts
        return stores

    def _with_rest(self, kernel: Kernel, reduction_loop: tuple[Reduction, ...], cut: Cut) -> tuple[Axis, ...]:
        """The columns of the kernel that merges `reduction_loop`: the pieces, and the elements in none, each as a piece of its own."""
        if cut.axis is None:
            return cut.pieces
        *others, outer = cut.pieces
        inner = [axis for axis in kernel.cols if axis not in (*others, cut.axis)]
        left = (cut.axis.size - cut.start) * count(tuple(inner))
        both = Axis(f"{outer.name}_rest", outer.size + left)
        behind, where = axis_index(both) - outer.size, {}
        for axis in reversed(inner):
            behind, where[axis] = behind // axis.size, behind % axis.size
        where[cut.axis] = behind + cut.start
        in_piece = (Bound(axis_index(both), 0, outer.size),)
        in_none = (Bound(axis_index(both), outer.size, both.size),)
        for reduction in reduction_loop:
            values = [self.builder.rewrite(value, where) for value in as_piece(reduction, self.builder)]
            parts = [self.builder.rewrite(part, {outer: axis_index(both)}) for part in self.parts[reduction.name]]
            self.parts[reduction.name] = tuple(
                self.builder.masked(
                    in_piece, part, self.builder.masked(in_none, value, self.builder.const(0, value.dtype))
                )
                for part, value in zip(parts, values, strict=True)
            )
        return (*others, both)

    def _merge(
        self,
        kernel: Kernel,
        reduction_loop: tuple[Reduction, ...],
        pieces: tuple[Axis, ...],
        stores: list[Store],
        stats: dict[int, Expr],
    ) -> None:
        merged = tuple(
            replace(each, op=MERGE.get(each.op, each.op), values=self.parts[each.name]) for each in reduction_loop
        )
        merge = replace(
            kernel, name=f"{kernel.name}_{reduction_loop[0].name}_merge", cols=pieces, reduction_loops=(merged,),
            row_stores=tuple(stores), stores=(),
        )  # fmt: skip
        self.kernels.append(rewrite_kernel(merge, self.builder, leaf=forward(stats)))

    def _stat(self, reduction: Reduction, part: int) -> Expr:
        return self.builder.reduction_result(reduction.name, part, reduction.type_of(part))

    def temporaries(
        self, name: str, values: Sequence[Expr], axes: tuple[Axis, ...]
    ) -> tuple[dict[int, Expr], list[Store]]:
        """A temporary per value with one element per point of `axes`: how to read each (by node), how to write each."""
        sizes = tuple(axis.size for axis in axes)
        strides = contiguous_strides(sizes)
        where = linear([axis_index(axis) for axis in axes], strides)
        loads, stores = {}, []
        for value in values:
            buffer = Buffer(self._unused(name), value.dtype, sizes, strides, Role.TEMP)
            self.buffers.append(buffer)
            loads[id(value)] = self.builder.load(buffer.name, where, value.dtype)
            stores.append(Store(buffer.name, where, value))
        return loads, stores

    def _unused(self, name: str) -> str:
        taken = {buffer.name for buffer in self.buffers}
        names = (f"{name}_{number}" for number in itertools.count(len(self.buffers)))
        return next(unused for unused in names if unused not in taken)


def as_piece(reduction: Reduction, builder: Builder) -> tuple[Expr, ...]:
    """What a piece of one element would have found, as what merges pieces takes it."""
    match reduction.op:
        case ReduceOp.MOMENTS:
            (value,) = reduction.values
            return builder.const(1, value.dtype), value, builder.apply(Op.SUB, value, value)
        case ReduceOp.SOFTMAX:
            (value,) = reduction.values
            lowest, zero = builder.const(-math.inf, value.dtype), builder.const(0, value.dtype)
            shift = builder.apply(Op.WHERE, builder.apply(Op.EQ, value, lowest, dtype=DType.BOOL), zero, value)
            return value, builder.apply(Op.EXP, builder.apply(Op.SUB, value, shift))
        case _:
            return reduction.values


def forward(loads: dict[int, Expr]) -> Leaf:
    return lambda node: loads.get(id(node))


def _stats_used(kernel: Kernel, after: tuple[Reduction, ...]) -> list[Expr]:
    """The stats of reduction loop `after` that later reduction loops or stores use."""
    names = {reduction.name for reduction in after}
    later = kernel.reduction_loops[kernel.reduction_loops.index(after) + 1 :]
    roots = [value for reduction_loop in later for reduction in reduction_loop for value in reduction.values]
    roots += [store.value for store in (*kernel.row_stores, *kernel.stores)]
    return [node for node in walk(*roots) if isinstance(node, ReductionResult) and node.reduction in names]


def row_scalars(kernel: Kernel) -> list[Expr]:
    """Largest expressions of the element stores that depend on stats and row axes alone, and on at least one stat."""
    rows = set(kernel.rows)
    info: dict[int, tuple[bool, bool]] = {}
    nodes = list(walk(*(store.value for store in kernel.stores)))
    for node in nodes:
        axes: set[Axis] = {axis for index in own_indices(node) for axis in index.axes}
        below = [info[id(child)] for child in children(node)]
        info[id(node)] = (
            axes <= rows and all(flat for flat, _ in below),
            isinstance(node, ReductionResult) or any(has for _, has in below),
        )
    good = {id(node) for node in nodes if all(info[id(node)])}
    inner = {id(child) for node in nodes if id(node) in good for child in children(node)}
    used_elsewhere = {id(child) for node in nodes if id(node) not in good for child in children(node)}
    roots = {id(store.value) for store in kernel.stores}
    return [
        node for node in nodes
        if id(node) in good and (id(node) not in inner or id(node) in used_elsewhere or id(node) in roots)
    ]  # fmt: skip
