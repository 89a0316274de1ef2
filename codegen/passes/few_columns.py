"""Matrix products of few columns as sums along rows: of many rows that are read once, and hardly multiplied.

Tensor cores take tiles of 64 columns or more, and rows that begin anywhere come to them number by number. Sums take whole accesses of rows,
which come from memory at its rate, and all columns' numbers from the first-level cache. Several rows are one of the kernel, so
that these serve all of them.
"""

from __future__ import annotations

from dataclasses import replace

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Builder, Expr, Gather, Op, ReduceOp, ReductionResult, Window
from fusepass.codegen.ir.index import Axis, Index, axis_index
from fusepass.codegen.ir.product import Operand, Product
from fusepass.codegen.ir.program import Kernel, Reduction, Store

MOST_COLUMNS = 16
_MOST_SUMS = 40  # of a thread
_ROWS = (4, 2, 1)


def sums_of_rows(kernel: Kernel, builder: Builder) -> Kernel | None:
    """`kernel`, pointwise on a product, as one that reduces; None where the product has many columns, or rows that are not neighbours."""
    product = kernel.anchor
    assert isinstance(product, Product)
    pieces, batch, rows, columns = kernel.rows
    plain = not any(isinstance(node, Gather | Window) for node in kernel.nodes)
    if pieces.size * batch.size > 1 or columns.size > MOST_COLUMNS or product.left.inner != 1 or not plain:
        return None
    together = next(each for each in _ROWS if rows.size % each == 0 and each * columns.size <= _MOST_SUMS)
    row, term = Axis("m", rows.size // together), Axis("k", product.inner)
    sums, stores = [], []
    for i in range(together):
        place = axis_index(row) * together + i
        for n in range(columns.size):
            name = f"{product.name}_{i}_{n}"
            terms = (
                _element(builder, product, *side, axis_index(term))
                for side in ((product.left, place), (product.right, Index(n)))
            )
            sums.append(Reduction(name, ReduceOp.SUM, (builder.apply(Op.TERM, *terms),), DType.F32))
            at = {pieces: Index(), batch: Index(), rows: place, columns: Index(n)}
            stores += [_store_at(builder, store, at, product.name, name) for store in kernel.stores]
    return replace(
        kernel,
        rows=(row,),
        cols=(term,),
        reduction_loops=(tuple(sums),),
        row_stores=tuple(stores),
        stores=(),
        anchor=None,
    )


def _element(builder: Builder, product: Product, operand: Operand, row: Index, term: Index) -> Expr:
    load = builder.load(operand.buffer, operand.place(Index(), row, term), product.dtype)
    return builder.cast(load, DType.F32)


def _store_at(builder: Builder, store: Store, at: dict[Axis, Index], product: str, name: str) -> Store:
    """`store` where the axes are `at` these places, of the sum of that `name`."""

    def leaf(node: Expr) -> Expr | None:
        return (
            builder.reduction_result(name, 0, DType.F32)
            if isinstance(node, ReductionResult) and node.reduction == product
            else None
        )

    return Store(store.buffer, store.index.substitute(at), builder.rewrite(store.value, at, leaf))
