"""Where halves beside each other become floats, and floats halves: on a CPU that is done many at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Apply, Expr, Load, Op, largest
from fusepass.codegen.ir.index import Axis
from fusepass.codegen.ir.program import Kernel, Program, Store


def widened(node: Expr) -> Load | None:
    """The load of a half that `node` is as a float, if it is nothing else."""
    if not isinstance(node, Apply) or node.op is not Op.CAST or node.dtype is not DType.F32:
        return None
    (source,) = node.args
    return source if isinstance(source, Load) and source.dtype is DType.F16 else None


def narrowed(store: Store, program: Program) -> Expr | None:
    """The float that is rounded to the half that `store` writes, if one is."""
    if program.buffer(store.buffer).dtype is not DType.F16:
        return None
    value = store.value
    if isinstance(value, Apply) and value.op is Op.CAST and value.dtype is DType.F16:
        (value,) = value.args
    return value if value.dtype is DType.F32 else None


def widened_along(axis: Axis, roots: Sequence[Expr]) -> Iterator[tuple[Expr, Load]]:
    """The halves below `roots` that are neighbours along `axis` and read whatever holds, as floats."""

    def wanted(node: Expr) -> bool:
        load = widened(node)
        return load is not None and load.index.stride(axis) == 1

    for node in largest(roots, wanted):
        load = widened(node)
        assert load is not None
        yield node, load


def converts_along(axis: Axis, kernel: Kernel, program: Program) -> bool:
    """Whether a pointwise kernel reads or writes halves that are neighbours along `axis`."""
    if any(narrowed(store, program) and store.index.stride(axis) == 1 for store in kernel.stores):
        return True
    return next(widened_along(axis, [store.value for store in kernel.stores]), None) is not None
