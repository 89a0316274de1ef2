"""What reduces over the positions of a generated convolution, or of windows, is reduced in their kernel, in pieces; a small kernel merges these.

Global average pooling, sums over everything, statistics of a normalisation: whatever reduces over all spatial axes, for each
channel or several, for each sample or all. A result that would only have been read to be reduced is not written. Of a matrix
product, rows are channels, columns positions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from math import prod

from fusepass.codegen.ir.convolution import Convolution
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Builder, Expr, Gather, Load, ReduceOp, ReductionResult, Window, walk
from fusepass.codegen.ir.index import Axis, Index, flat_index
from fusepass.codegen.ir.program import Kernel, Partials, Program, Reduction, Store
from fusepass.codegen.passes.alignment import Aligned, align
from fusepass.codegen.passes.fuse import drop_unused
from fusepass.codegen.passes.means import keeps_nan, sums_from_means
from fusepass.codegen.passes.rewrite import rewrite_kernel
from fusepass.codegen.passes.splitter import Splitter, forward

Pieces = Callable[[Program, Kernel], int | None]
"""In how many pieces a kernel with `Partials` reduces over positions; None where it cannot be."""


def reduce_positions(
    program: Program,
    builder: Builder,
    position: int,
    pieces: Pieces,
    *,
    least: int = 1,
    per_sample: bool = False,
    kept: int = 0,
    shared: Callable[[Program, Kernel], bool] = lambda program, kernel: False,
) -> Program | None:
    """`program` with reductions over positions moved into the convolution's kernel at `position`; None where there are none.

    It may also be a kernel with windows whose rows are a sample, a channel and positions. Chains that end per element move with them. There are
    `least` pieces or more, of one sample each if `per_sample`. Readers that need the values again, and keep rows of so many elements as `kept`,
    or whose rows are `shared` by blocks that do, read them once anyway: they stay as they are.
    """
    kernel = program.kernels[position]
    if not kernel.is_pointwise or kernel.cols:
        return None
    if prod(axis.size for axis in _positions(kernel)) == 1:
        return None
    written = frozenset[str]().union(*(other.writes for other in program.kernels)) - kernel.writes
    work = _Mover(
        program, builder, position, written, lambda reader: reader.col_count <= kept or shared(program, reader)
    )
    if not work.reducing:
        return None
    per_sample = per_sample or not isinstance(kernel.anchor, Convolution) or work.keeps_samples
    trial = work.moved(least, per_sample)
    count = pieces(trial, trial.kernels[position])
    return None if count is None else work.moved(count, per_sample)


class _Mover:
    """Moves work of later kernels into the convolution's at `position`, which reads nothing that is `written`. What `keeps` its rows reads them
    once."""

    def __init__(
        self,
        program: Program,
        builder: Builder,
        position: int,
        written: frozenset[str],
        keeps: Callable[[Kernel], bool],
    ) -> None:
        self.program, self.builder, self.position, self.written, self.keeps = program, builder, position, written, keeps
        self.anchored = program.kernels[position]
        self.value: Expr | None = None
        self.reducing: dict[int, Aligned] = {}
        self.joining: dict[int, Aligned] = {}
        for number, reader in enumerate(program.kernels):
            if number == position or reader.anchor is not None or not reader.reads & self.anchored.writes:
                continue
            if reader.is_pointwise:
                self._join(number, reader)
            elif not self._reduce(number, reader):
                self._reduce_by_mean(number, reader)

    # ---- what can move

    def _join(self, number: int, reader: Kernel) -> None:
        aligned = self._aligned(reader, [store.value for store in reader.stores])
        if aligned is not None and all(self._here(aligned, store.value) is not None for store in reader.stores):
            self.joining[number] = aligned

    def _reduce(self, number: int, reader: Kernel) -> bool:
        """Whether the first reduction loop of `reader` moves."""
        first = reader.reduction_loops[0]
        if self._rereads(reader) and self.keeps(reader):
            return False
        if any(each.op.arity != 1 or each.dtype is not DType.F32 for each in first):
            return False
        aligned = self._planes(reader)
        if aligned is None:
            return False
        wide = [self.builder.cast(each.values[0], each.dtype) for each in aligned.kernel.reduction_loops[0]]
        value, *others = [self._here(aligned, each) for each in wide]
        if value is None or any(each is not value for each in others):
            return False
        if self.value is not None and self.value is not value:
            return False
        self.value, self.reducing[number] = value, aligned
        return True

    def _rereads(self, reader: Kernel) -> bool:
        """Whether `reader` needs values behind its first reduction loop."""
        later = replace(reader, reduction_loops=reader.reduction_loops[1:])
        return bool(later.reads & self.anchored.writes)

    def _reduce_by_mean(self, number: int, reader: Kernel) -> None:
        """The same for sums of what a normalisation by the value's own moments gives.

        Not where the elements meet these sums again: eager's rounding of the statistics cancels in ``y - mean(y)``.
        """
        meet = any(
            other.reads & self.anchored.writes and (other is reader or other.reads & reader.writes)
            for other in self.program.kernels
            if other is not reader or reader.stores or len(reader.reduction_loops) > 1
        )
        aligned = self._planes(reader) if self.value is not None and not meet else None
        if aligned is None:
            return
        sample, channel = self.anchored.lines
        if not {*aligned.along[sample], *aligned.along[channel]} <= set(aligned.kernel.rows):
            return
        statistics = self._statistics()

        def is_statistic(node: Expr) -> bool:
            return isinstance(node, Load) and node.index.substitute(aligned.places) == statistics.get(node.buffer)

        made = sums_from_means(
            aligned.kernel, self.builder, lambda node: self._here(aligned, node) is self.value, is_statistic
        )
        if made is not None:
            self._reduce(number, made)

    def _statistics(self) -> dict[str, Index]:
        """Buffers that are NaN at a sample and channel where a value is not finite; their indices, by these axes."""
        found = {}
        for aligned in self.reducing.values():
            moments = {each.name for each in aligned.kernel.reduction_loops[0] if each.op is ReduceOp.MOMENTS}
            is_moment = functools.partial(_is_result, moments)
            for store in aligned.kernel.row_stores:
                if keeps_nan(store.value, is_moment):
                    found[store.buffer] = store.index.substitute(aligned.places)
        return found

    def _planes(self, reader: Kernel) -> Aligned | None:
        """`reader` beside the convolution's kernel, if its first reduction loop is over all positions."""
        aligned = self._aligned(reader, [value for each in reader.reduction_loops[0] for value in each.values])
        positions = _positions(self.anchored)
        if aligned is None or any(set(aligned.along[axis]) & set(aligned.kernel.rows) for axis in positions):
            return None
        return aligned

    def _here(self, aligned: Aligned, value: Expr) -> Expr | None:
        """`value` as the convolution's kernel computes it at its own point; None where it cannot."""
        written = {store.buffer: store for store in self.anchored.stores}

        def own(node: Expr) -> Expr | None:
            if isinstance(node, Load) and node.buffer in written and node.index == written[node.buffer].index:
                return self.builder.cast(written[node.buffer].value, node.dtype)
            return None

        found = self.builder.rewrite(self.builder.rewrite(value, aligned.places), leaf=own)
        for node in walk(found):
            if isinstance(node, Load):
                known = node.buffer not in self.written | self.anchored.writes or self._has(node)
            elif isinstance(node, ReductionResult):
                known = self.anchored.anchor is not None and node.reduction == self.anchored.anchor.name
            else:
                known = not isinstance(node, Window | Gather) or (self.anchored.anchor is None and self._has(node))
            if not known:
                return None
        return found

    def _has(self, node: Expr) -> bool:
        """Whether the convolution's kernel computes it already."""
        return any(node is each for each in self.anchored.nodes)

    def _aligned(self, reader: Kernel, roots: Sequence[Expr]) -> Aligned | None:
        """`reader` beside the convolution's kernel, by the first load of what that writes below `roots`."""
        written = {store.buffer: store for store in self.anchored.stores}
        loads = (node for node in walk(*roots) if isinstance(node, Load) and node.buffer in written)
        load = next(loads, None)
        return None if load is None else align(reader, self.builder, load.index, self.anchored, written[load.buffer])

    # ---- moving

    @property
    def keeps_samples(self) -> bool:
        """Whether a reduction keeps the samples apart."""
        sample, _ = self.anchored.lines
        return any(set(aligned.along[sample]) & set(aligned.kernel.rows) for aligned in self.reducing.values())

    def moved(self, count: int, per_sample: bool) -> Program:
        """The program with reductions over positions in `count` pieces, of each sample or of all."""
        work = Splitter(self.program, self.builder)
        sample, channel = self.anchored.lines
        piece = Axis("piece", count)
        rows = (*((sample,) if per_sample else ()), piece, channel)
        made: dict[tuple[object, ...], Reduction] = {}
        parts: dict[str, tuple[Expr, ...]] = {}
        stores: list[Store] = []
        for aligned in self.reducing.values():
            for each in aligned.kernel.reduction_loops[0]:
                assert self.value is not None
                twin = made.setdefault((each.op, each.dtype), replace(each, values=(self.value,)))
                if twin.name == each.name:
                    stores += work.keep(each, rows, None)
                    parts[each.name] = work.parts[each.name]
        for number, kernel in enumerate(self.program.kernels):
            if number == self.position:
                partials = Partials(piece, per_sample, tuple(made.values()), tuple(stores))
                work.kernels.append(self._joined(partials))
            elif number in self.reducing:
                aligned = self.reducing[number]
                of = {each.name: parts[made[each.op, each.dtype].name] for each in aligned.kernel.reduction_loops[0]}
                self._merge(work, aligned, of, piece, per_sample)
            elif number not in self.joining:
                work.kernels.append(kernel)
        return drop_unused(replace(self.program, buffers=tuple(work.buffers), kernels=tuple(work.kernels)))

    def _joined(self, partials: Partials) -> Kernel:
        """The convolution's kernel with all that moved there."""
        stores, origin = list(self.anchored.stores), list(self.anchored.origin)
        for aligned in self.joining.values():
            for store in aligned.kernel.stores:
                value = self._here(aligned, store.value)
                assert value is not None
                stores.append(Store(store.buffer, store.index.substitute(aligned.places), value))
        for aligned in (*self.joining.values(), *self.reducing.values()):
            origin += aligned.kernel.origin
        return replace(self.anchored, partials=partials, stores=tuple(stores), origin=tuple(dict.fromkeys(origin)))

    def _merge(
        self,
        work: Splitter,
        aligned: Aligned,
        parts: Mapping[str, tuple[Expr, ...]],
        piece: Axis,
        per_sample: bool,
    ) -> None:
        """What is left of a kernel whose first reduction loop moved: a kernel that merges, then the rest."""
        kernel, (sample, channel) = aligned.kernel, self.anchored.lines
        apart = (channel, sample) if per_sample else (channel,)
        own = [axis for dimension in apart for axis in aligned.along[dimension]]
        cols = (*(axis for axis in kernel.cols if axis in own), piece)
        where = {dimension: flat_index(aligned.along[dimension]) for dimension in apart}
        work.parts = {
            name: tuple(self.builder.rewrite(value, where) for value in values) for name, values in parts.items()
        }
        first, *rest = kernel.reduction_loops
        if not rest:
            work.merge_last(kernel, cols, {})
            return
        loads = work.merge_early(kernel, first, cols, {})
        later = replace(kernel, reduction_loops=tuple(rest))
        work.kernels.append(rewrite_kernel(later, self.builder, leaf=forward(loads)))


def _positions(kernel: Kernel) -> tuple[Axis, ...]:
    """The axes of a kernel with an anchor that reductions over positions go over."""
    return kernel.rows[kernel.rows.index(kernel.lines[1]) + 1 :]


def _is_result(names: Collection[str], node: Expr) -> bool:
    return isinstance(node, ReductionResult) and node.reduction in names
