"""What every reader of an anchor's result makes of it first is made by the anchor's kernel, and stored in its place.

A bias above all: the kernel adds it for what it reduces of the result, its readers for what they store.
"""

from __future__ import annotations

from dataclasses import replace

from fusepass.codegen.ir.expr import Apply, Builder, Const, Expr, Gather, Load, Window, children, walk
from fusepass.codegen.ir.ops import CHEAP
from fusepass.codegen.ir.program import Kernel, Program, Role, Store
from fusepass.codegen.passes.alignment import align
from fusepass.codegen.passes.rewrite import rewrite_kernel


def fuse_into_producer(program: Program, builder: Builder) -> Program:
    """`program`, whose first kernel has the dimensions of a result as rows, with as much in that as all readers of what it stores begin with.

    That is cheap operations on the result and on inputs that differ by channel alone.
    """
    kernel, *rest = program.kernels
    if len(kernel.stores) != 1 or kernel.cols or program.buffer(kernel.stores[0].buffer).role is not Role.TEMP:
        return program
    while (found := _longer(program, builder, kernel, rest)) is not None:
        kernel, rest = found
    return replace(program, kernels=(kernel, *rest))


def _longer(
    program: Program, builder: Builder, kernel: Kernel, rest: list[Kernel]
) -> tuple[Kernel, list[Kernel]] | None:
    """The kernels with one more operation in the first; None where readers begin with different ones."""
    store, made, value = kernel.stores[0], list[Kernel](), None
    for reader in rest:
        if store.buffer not in reader.reads:
            made.append(reader)
            continue
        first = _first(program, builder, kernel, store, reader)
        if first is None or (value is not None and first[0] is not value):
            return None
        value = first[0]
        made.append(first[1])
    if value is None:
        return None
    return replace(kernel, stores=(replace(store, value=value),)), made


def _first(
    program: Program, builder: Builder, kernel: Kernel, store: Store, reader: Kernel
) -> tuple[Expr, Kernel] | None:
    """The operation that `reader` begins with, at the point of `kernel`, and `reader` with its result as what is loaded."""
    if reader.anchor is not None or any(isinstance(node, Window | Gather) for node in reader.nodes):
        return None
    load = next(load for load in reader.loads() if load.buffer == store.buffer)
    aligned = align(reader, builder, load.index, kernel, store)
    if aligned is None:
        return None
    nodes = aligned.kernel.nodes
    loads = [node for node in nodes if isinstance(node, Load) and node.buffer == store.buffer]
    users = [node for node in nodes if any(child is loads[0] for child in children(node))]
    if len(loads) != 1 or len(users) != 1 or any(root is loads[0] for root in aligned.kernel.roots):
        return None
    (user,) = users
    if not isinstance(user, Apply) or user.op not in CHEAP or user.dtype is not loads[0].dtype:
        return None

    def own(node: Expr) -> Expr | None:
        return builder.cast(store.value, node.dtype) if isinstance(node, Load) and node.buffer == store.buffer else None

    others = [builder.rewrite(arg, aligned.places) for arg in user.args if arg is not loads[0]]
    if not all(_is_of_channel(program, kernel, node) for arg in others for node in walk(arg)):
        return None
    value = builder.rewrite(builder.rewrite(user, aligned.places), leaf=own)
    read = builder.load(store.buffer, loads[0].index, loads[0].dtype)
    return value, rewrite_kernel(aligned.kernel, builder, leaf=lambda node: read if node is user else None)


def _is_of_channel(program: Program, kernel: Kernel, node: Expr) -> bool:
    """Whether `node` is a number, or an element of an input that is known by the channel."""
    if isinstance(node, Load):
        return program.buffer(node.buffer).role is Role.INPUT and node.index.axes <= {kernel.lines[1]}
    return isinstance(node, Const | Apply)
