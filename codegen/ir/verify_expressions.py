"""The rules that expressions and stores obey: what they read is there, in its type, and in range."""

from __future__ import annotations

from collections.abc import Iterator

from fusepass.codegen.ir.expr import (
    Apply,
    Expr,
    Gather,
    Load,
    Masked,
    Op,
    Prefix,
    ReductionResult,
    Window,
    children,
    descend,
    own_indices,
    walk,
)
from fusepass.codegen.ir.index import Axis, Index
from fusepass.codegen.ir.program import Buffer, Program, Store


def store_faults(
    program: Program, store: Store, axes: frozenset[Axis], known: dict[str, int], *, everywhere: bool = True
) -> Iterator[str]:
    """What is wrong with a store. `everywhere` says that it happens at each point of `axes`, so that its indices must be in range there."""
    buffer = find_buffer(program, store.buffer)
    if buffer is None:
        yield f"store to unknown buffer {store.buffer}"
        return
    if store.value.dtype not in (buffer.dtype, buffer.dtype.compute):
        yield f"store of {store.value.dtype} to {buffer.dtype} {buffer.name}, which rounds nothing by itself but halves"
    if everywhere:
        yield from _index_faults(store.index, axes, buffer, f"store to {buffer.name}")
    yield from expr_faults(program, store.value, axes, known, everywhere=everywhere)


def expr_faults(
    program: Program, root: Expr, axes: frozenset[Axis], known: dict[str, int], *, everywhere: bool = True
) -> Iterator[str]:
    """What is wrong with `root`, an expression over `axes` that may use as many parts of each result as `known` says, of negative numbers
    at its column."""
    nodes = list(walk(root))
    inner = axes | {axis for node in nodes if isinstance(node, Window) for axis in node.axes}
    unguarded = _unguarded(root) if everywhere else set()
    for node in nodes:
        for index in own_indices(node):
            if not index.axes <= inner:
                yield f"index {index} uses an axis out of scope"
        match node:
            case Load(buffer=name, index=index, dtype=dtype):
                buffer = find_buffer(program, name)
                if buffer is None:
                    yield f"load from unknown buffer {name}"
                elif buffer.dtype is not dtype:
                    yield f"load of {buffer.dtype} {name} as {dtype}"
                elif id(node) in unguarded:
                    yield from _index_faults(index, inner, buffer, f"load from {name}")
            case Gather(buffer=name):
                yield from _gather_faults(find_buffer(program, name), node, id(node) in unguarded, inner)
            case ReductionResult(reduction=name, part=part, dtype=dtype):
                if known.get(name, 0) <= 0:
                    yield f"result of {name} used before its sweep ends"
                elif part >= known[name]:
                    yield f"{name} has no part {part}"
            case Prefix(reduction=name, part=part):
                if known.get(name, 0) >= 0:
                    yield f"{name} used at a column, where it has no result"
                elif part >= -known[name]:
                    yield f"{name} has no part {part}"
            case Apply(op=Op.WHERE, args=args, dtype=dtype):
                if args[1].dtype is not dtype or args[2].dtype is not dtype:
                    yield "where() with unequal branch types"
            case Window(op=op):
                if op.parts != 1 or op.arity != 1:
                    yield f"window with {op.value}"
            case _:
                pass


def _gather_faults(buffer: Buffer | None, node: Gather, unguarded: bool, axes: frozenset[Axis]) -> Iterator[str]:
    if buffer is None or buffer.dtype is not node.dtype:
        yield f"gather of {node.dtype} from {node.buffer}, which is unknown or of another type"
        return
    if any(not place.value.dtype.is_int for place in node.places):
        yield f"gather from {node.buffer} at a place that is no integer"
    if unguarded and not any(axis.size == 0 for axis in axes) and node.index.axes <= axes:
        ends = [place.stride * (place.size - 1) for place in node.places]
        low, high = node.index.bounds
        low, high = low + sum(min(end, 0) for end in ends), high + sum(max(end, 0) for end in ends)
        if low < 0 or high >= max(buffer.extent, 1):
            yield f"gather from {node.buffer} spans {low}..{high} of {buffer.extent} elements"


def _unguarded(root: Expr) -> set[int]:
    """The nodes below `root` that are reached on some way without a mask."""
    nodes = descend([root], lambda node: (node.other,) if isinstance(node, Masked) else children(node))
    return set(map(id, nodes))


def _index_faults(index: Index, axes: frozenset[Axis], buffer: Buffer, what: str) -> Iterator[str]:
    if not index.axes <= axes:
        yield f"{what}: index {index} uses an axis out of scope"
        return
    if any(axis.size == 0 for axis in axes):
        return  # never evaluated
    low, high = index.bounds
    if low < 0 or high >= max(buffer.extent, 1):
        low, high = index.tight_bounds
    if low < 0 or high >= max(buffer.extent, 1):
        yield f"{what}: index {index} spans {low}..{high} of {buffer.extent} elements"


def find_buffer(program: Program, name: str) -> Buffer | None:
    """The buffer of that name, if there is one."""
    return next((buffer for buffer in program.buffers if buffer.name == name), None)
