"""Kernels that walk the same rows become one: what one wrote per row, the other no longer reads from memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fusepass.codegen.ir.expr import Builder, Expr, Load, ReductionResult, Window, walk
from fusepass.codegen.ir.index import Axis
from fusepass.codegen.ir.program import Kernel, Program, Reduction, Role, Store
from fusepass.codegen.passes.axes import merge_rows, nearest, rename_axes
from fusepass.codegen.passes.rewrite import rewrite_kernel
from fusepass.codegen.passes.statistics import share_reductions
from fusepass.codegen.passes.unify import unify, unify_siblings


def fuse_rows(
    program: Program,
    builder: Builder,
    apart: Callable[[Program, Kernel], bool] = lambda program, kernel: False,
    scanned: Callable[[Program, Kernel], bool] = lambda program, kernel: False,
) -> Program:
    """Fuse each kernel into the latest earlier one whose row results it reads at its own row; not one that had better stay `apart` into others,
    and one that scans only where its rows may be `scanned` after other reduction loops."""

    def fits(producer: Kernel, consumer: Kernel) -> bool:
        if consumer.scans and not scanned(program, consumer):
            return False
        return not apart(program, consumer) or apart(program, producer)

    kernels = [rename_axes(kernel, builder, f"k{number}_") for number, kernel in enumerate(program.kernels)]
    position = 0
    while position < len(kernels):
        fused = fuse_into_producer(kernels, position, builder, fits)
        # A fused kernel may have become able to join a still earlier one: start again.
        kernels, position = (kernels, position + 1) if fused is None else (fused, 0)
    return drop_unused(replace(program, kernels=tuple(kernels)))


def fuse_into_producer(
    kernels: Sequence[Kernel],
    position: int,
    builder: Builder,
    fits: Callable[[Kernel, Kernel], bool] = lambda producer, consumer: not consumer.scans,
) -> list[Kernel] | None:
    """`kernels` with the one at `position` as part of the latest earlier one whose row results it reads at its own row and that it `fits`,
    if there is one."""
    consumer = kernels[position]
    for earlier in reversed(range(position)):
        producer = kernels[earlier]
        shared = producer.writes & consumer.reads
        if not shared or not producer.row_stores:
            continue
        between = kernels[earlier + 1 : position]
        sinks = not any(kernel.reads & producer.writes for kernel in between)
        if not sinks and any(kernel.writes & consumer.reads for kernel in between):
            continue
        fused = _fuse(producer, consumer, builder) if fits(producer, consumer) else None
        if fused is not None:
            place = [*between, fused] if sinks else [fused, *between]
            return [*kernels[:earlier], *place, *kernels[position + 1 :]]
    return None


def _fuse(producer: Kernel, consumer: Kernel, builder: Builder) -> Kernel | None:
    shared = producer.writes & consumer.reads
    if (producer.scans and consumer.reduction_loops) or any(store.buffer in shared for store in producer.stores):
        return None
    if not is_plain(producer) or not is_plain(consumer):
        return None
    unified = unify(producer, consumer, shared, builder)
    if unified is None:
        return None
    producer = unified.producer
    if producer.scans or consumer.scans:
        producer = replace(producer, cols=tuple(axis for axis in producer.cols if axis.size != 1))
        if len(producer.cols) > 1:
            return None  # what scans goes along one axis
    told = with_stored(unified.consumer, producer.row_stores, builder)
    if told is None:
        return None
    consumer = told
    origin = tuple(dict.fromkeys((*producer.origin, *consumer.origin)))
    if consumer.reduction_loops:
        if set(consumer.cols) != _several(producer.cols) or set(consumer.rows) != _several(producer.rows):
            return None
        return share_reductions(
            replace(
                producer,
                reduction_loops=(
                    (*producer.reduction_loops, *consumer.reduction_loops)
                    if consumer.scans
                    else _placed(producer, consumer.reduction_loops)
                ),
                row_stores=(*producer.row_stores, *consumer.row_stores),
                stores=(*producer.stores, *consumer.stores),
                origin=origin,
            ),
            builder,
        )
    walked = set(consumer.rows)
    if walked <= set(producer.rows):
        return replace(producer, row_stores=(*producer.row_stores, *consumer.stores), origin=origin)
    if walked != _several(producer.rows) | _several(producer.cols):
        return None
    return replace(producer, stores=(*producer.stores, *consumer.stores), origin=origin)


def with_stored(kernel: Kernel, stores: Sequence[Store], builder: Builder) -> Kernel | None:
    """`kernel` with the values of `stores` in place of its loads of them; None where some load is not at the reader's own row."""
    written = {store.buffer: store for store in stores}

    def forward(node: Expr) -> Expr | None:
        if isinstance(node, Load) and node.buffer in written and node.index == written[node.buffer].index:
            return builder.cast(written[node.buffer].value, node.dtype)
        return None

    told = rewrite_kernel(kernel, builder, leaf=forward)
    return None if told.reads & written.keys() else told


def is_plain(kernel: Kernel) -> bool:
    """Whether it computes from memory alone, in each run."""
    return kernel.anchor is None and kernel.partials is None and kernel.overflow_flag is None and kernel.when is None


def _several(axes: tuple[Axis, ...]) -> set[Axis]:
    return {axis for axis in axes if axis.size != 1}


def _placed(producer: Kernel, reduction_loops: tuple[tuple[Reduction, ...], ...]) -> tuple[tuple[Reduction, ...], ...]:
    """The producer's reduction loops with each of `reduction_loops` joined to the earliest one after everything it depends on."""
    placed = [list(reduction_loop) for reduction_loop in producer.reduction_loops]
    for reduction in (r for reduction_loop in reduction_loops for r in reduction_loop):
        needed = _stats_of(reduction)
        level = 1 + max(
            (n for n, reduction_loop in enumerate(placed) if any(r.name in needed for r in reduction_loop)), default=-1
        )
        if level == len(placed):
            placed.append([])
        placed[level].append(reduction)
    return tuple(map(tuple, placed))


def _stats_of(reduction: Reduction) -> set[str]:
    return {node.reduction for node in walk(*reduction.values) if isinstance(node, ReductionResult)}


def fuse_siblings(program: Program, builder: Builder) -> Program:
    """Fuse independent kernels that read the same memory over the same points: one read serves both."""
    kernels = list(program.kernels)
    position = 1
    while position < len(kernels):
        fused = _fuse_with_sibling(kernels, position, builder)
        kernels, position = (kernels, position + 1) if fused is None else (fused, 1)
    return replace(program, kernels=tuple(kernels))


def _fuse_with_sibling(kernels: list[Kernel], position: int, builder: Builder) -> list[Kernel] | None:
    second = kernels[position]
    for earlier in reversed(range(position)):
        first, between = kernels[earlier], kernels[earlier + 1 : position]
        if not _independent((first, *between, second)):
            continue
        fused = _join(first, second, builder)
        if fused is not None:
            return [*kernels[:earlier], fused, *between, *kernels[position + 1 :]]
    return None


def _join(first: Kernel, second: Kernel, builder: Builder) -> Kernel | None:
    if first.is_pointwise is not second.is_pointwise or first.scans or second.scans:
        return None
    unified = unify_siblings(first, second, builder)
    if unified is None:
        return None
    first, second = unified.producer, unified.consumer
    if set(second.rows) != _several(first.rows) or set(second.cols) != _several(first.cols):
        return None
    return share_reductions(
        replace(
            first,
            reduction_loops=_placed(first, second.reduction_loops) if second.reduction_loops else first.reduction_loops,
            row_stores=(*first.row_stores, *second.row_stores),
            stores=(*first.stores, *second.stores),
            origin=tuple(dict.fromkeys((*first.origin, *second.origin))),
        ),
        builder,
    )


@dataclass(frozen=True)
class ElementRules:
    """When what happens per element joins a kernel that reduces.

    Attributes:
        longest_row: elements of rows that stay on the chip for it, if nothing happened per element before.
        longest_column: the same of rows whose elements are not neighbours in memory; 0 for none.
        in_pieces: whether pieces of rows store what later kernels would compute again.
    """

    longest_row: int
    longest_column: int
    in_pieces: bool = True

    def longest(self, program: Program, kernel: Kernel) -> int:
        """How long the rows of a kernel may be that only reduces."""
        along = nearest(program, kernel)
        return self.longest_column if along in kernel.rows else self.longest_row


def fuse_elements(program: Program, builder: Builder, rules: ElementRules) -> Program:
    """Fuse what happens per element into the kernel that reduces what it reads, which has each element at hand behind its reductions.

    So a sum that is stored and normalised is made once.
    """
    for position, kernel in enumerate(program.kernels):
        for place, other in enumerate(program.kernels):
            first, last = sorted((position, place))
            if (
                not kernel.reduction_loops
                or not other.is_pointwise
                or not _independent(program.kernels[first : last + 1])
            ):
                continue
            fused = _with_elements(program, kernel, other, builder, rules)
            if fused is not None:
                kernels = [*program.kernels]
                kernels[first] = fused
                del kernels[last]
                return fuse_elements(replace(program, kernels=tuple(kernels)), builder, rules)
    return program


def meets_elements(program: Program, kernel: Kernel) -> bool:
    """Whether another kernel might join one that only reduces."""
    points = kernel.row_count * kernel.col_count
    return not kernel.stores and any(
        other.is_pointwise and other.row_count == points and other.reads & kernel.reads and not has_windows(other)
        for other in program.kernels
    )


def may_store(program: Program, kernel: Kernel, stores: Sequence[Store], rules: ElementRules) -> bool:
    """Whether a kernel that reduces had better make `stores` per element, at points of its own, too."""
    if not kernel.stores and kernel.col_count > rules.longest(program, kernel):
        return False
    along = nearest(program, kernel)
    # What crosses tiles crosses them in all stores.
    return along is not None and all(store.index.stride(along) == 1 for store in (*kernel.stores, *stores))


def has_windows(kernel: Kernel) -> bool:
    return any(isinstance(node, Window) for node in kernel.nodes)


def _independent(kernels: Sequence[Kernel]) -> bool:
    """Whether the last of `kernels` reads nothing that those before it write."""
    *before, last = kernels
    return not any(kernel.writes & last.reads for kernel in before)


def _with_elements(
    program: Program, kernel: Kernel, other: Kernel, builder: Builder, rules: ElementRules
) -> Kernel | None:
    """`kernel`, which reduces, with what the pointwise `other` stores; None where it reads nothing at the same points, or had better not."""
    for each in (kernel, other):
        if not is_plain(each) or each.scans or has_windows(each):
            return None
    # Pieces of rows begin anywhere on axes that are one in memory.
    unified = unify_siblings(kernel, merge_rows(other, builder), builder)
    if unified is None:
        return None
    kernel, other = unified.producer, unified.consumer
    if {*other.rows} != _several(kernel.rows) | _several(kernel.cols):
        return None
    if not may_store(program, kernel, other.stores, rules):
        return None
    origin = tuple(dict.fromkeys((*kernel.origin, *other.origin)))
    return replace(kernel, stores=(*kernel.stores, *other.stores), origin=origin)


def drop_unused(program: Program) -> Program:
    """Remove stores to temporaries that nobody reads, and the temporaries."""
    read = {name for kernel in program.kernels for name in kernel.reads}
    dead = {buffer.name for buffer in program.buffers if buffer.role is Role.TEMP and buffer.name not in read}
    kernels = (
        replace(kernel, row_stores=_alive(kernel.row_stores, dead), stores=_alive(kernel.stores, dead))
        for kernel in program.kernels
    )
    return replace(
        program,
        kernels=tuple(kernel for kernel in kernels if kernel.writes),
        buffers=tuple(buffer for buffer in program.buffers if buffer.name not in dead),
    )


def _alive(stores: tuple[Store, ...], dead: set[str]) -> tuple[Store, ...]:
    return tuple(store for store in stores if store.buffer not in dead)
