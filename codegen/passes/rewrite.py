"""Rewriting whole kernels: axes replaced in every index, loads and stats replaced in every expression."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from fusepass.codegen.ir.expr import Builder, Expr, own_indices
from fusepass.codegen.ir.index import Axis, Bound, FloorDiv, Index, Mod
from fusepass.codegen.ir.program import Kernel, Partials, Reduction, Store

Leaf = Callable[[Expr], Expr | None]


def rewrite_kernel(
    kernel: Kernel, builder: Builder, axes: Mapping[Axis, Index] | None = None, leaf: Leaf = lambda _: None
) -> Kernel:
    """`kernel` with `axes` replaced everywhere and `leaf` applied to every node; its axis lists are left as they are."""
    axes = axes or {}

    def expr(value: Expr) -> Expr:
        return builder.rewrite(value, axes, leaf)

    def reduction(r: Reduction) -> Reduction:
        return replace(r, values=tuple(expr(value) for value in r.values))

    def store(s: Store) -> Store:
        return Store(s.buffer, s.index.substitute(axes), expr(s.value))

    def partials(p: Partials) -> Partials:
        return replace(p, reductions=tuple(map(reduction, p.reductions)), stores=tuple(map(store, p.stores)))

    return replace(
        kernel,
        sweeps=tuple(tuple(reduction(r) for r in sweep) for sweep in kernel.sweeps),
        row_stores=tuple(store(s) for s in kernel.row_stores),
        stores=tuple(store(s) for s in kernel.stores),
        partials=kernel.partials and partials(kernel.partials),
        within=tuple(Bound(bound.index.substitute(axes), bound.low, bound.high) for bound in kernel.within),
        alarm=kernel.alarm and replace(kernel.alarm, condition=expr(kernel.alarm.condition)),
    )


def indices(kernel: Kernel) -> Iterator[Index]:
    """Every index of the kernel: loads, positions, masks and stores."""
    for node in kernel.nodes:
        yield from own_indices(node)
    for store in (*kernel.row_stores, *kernel.stores):
        yield store.index


def divisions(index: Index) -> Iterator[FloorDiv | Mod]:
    """Every quotient and remainder inside `index`, innermost first."""
    for atom, _ in index.terms:
        if isinstance(atom, FloorDiv | Mod):
            yield from divisions(atom.index)
            yield atom
