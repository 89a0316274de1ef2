"""Cuts a kernel where an axis passes from one piece of a concatenation to the next: within a piece nothing is asked of each element."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from fusepass.codegen.ir.expr import Builder, Expr, Masked
from fusepass.codegen.ir.index import Axis, axis_index
from fusepass.codegen.ir.program import Kernel
from fusepass.codegen.ir.vectors import map_values


def cut(kernel: Kernel, axis: Axis, *, least: int, most: int) -> list[tuple[Axis, Kernel]]:
    """`kernel` for each piece of `axis`, with an axis in its place, of its name, that runs over the piece alone; in their order.

    Args:
        kernel: its axis lists stay as they are.
        axis: one of them.
        least: elements that pieces have on average.
        most: pieces. Where either is not so, or nothing asks where `axis` stands, nothing is cut, and nothing is given.
    """
    edges = sorted({0, axis.size, *_edges(kernel, axis)})
    if not 2 <= len(edges) - 1 <= min(most, axis.size // least):
        return []
    builder = Builder()
    pieces = []
    for low, high in pairwise(edges):
        piece = Axis(axis.name, high - low)
        moved = {axis: axis_index(piece) + low}
        value = builder.rewriting(moved, _never)
        pieces.append((piece, map_values(kernel, value, lambda index, moved=moved: index.substitute(moved))))  # type: ignore[misc]
    return pieces


def _edges(kernel: Kernel, axis: Axis) -> Iterator[int]:
    """Where bounds on `axis` alone begin or end, inside of it."""
    for node in kernel.nodes:
        for bound in node.mask if isinstance(node, Masked) else ():
            if bound.index.terms == ((axis, 1),):
                places = (bound.low - bound.index.constant, bound.high - bound.index.constant)
                yield from (place for place in places if 0 < place < axis.size)


def _never(node: Expr) -> Expr | None:
    """What a choice gives whose bounds never hold; None for all else."""
    if not isinstance(node, Masked):
        return None
    for bound in node.mask:
        low, high = bound.index.bounds
        if high < bound.low or low >= bound.high:
            return node.other
    return None
