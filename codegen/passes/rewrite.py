"""Rewriting whole kernels: axes replaced in every index, loads and stats replaced in every expression."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from fusepass.codegen.ir.expr import Builder, Expr, own_indices
from fusepass.codegen.ir.index import Axis, FloorDiv, Index, Mod
from fusepass.codegen.ir.program import Kernel, Store
from fusepass.codegen.ir.vectors import map_values

Leaf = Callable[[Expr], Expr | None]


def rewrite_kernel(
    kernel: Kernel, builder: Builder, axes: Mapping[Axis, Index] | None = None, leaf: Leaf = lambda _: None
) -> Kernel:
    """`kernel` with `axes` replaced everywhere and `leaf` applied to every node; its axis lists are left as they are."""
    moved = axes or {}
    return map_values(kernel, builder.rewriting(moved, leaf), lambda index: index.substitute(moved))


def stored_elsewhere(kernel: Kernel, old: str, new: str) -> Kernel:
    """`kernel` with `new` in place of the buffer `old` that it stores to."""

    def renamed(stores: Iterable[Store]) -> tuple[Store, ...]:
        return tuple(replace(store, buffer=new) if store.buffer == old else store for store in stores)

    partials = kernel.partials and replace(kernel.partials, stores=renamed(kernel.partials.stores))
    return replace(kernel, row_stores=renamed(kernel.row_stores), stores=renamed(kernel.stores), partials=partials)


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
