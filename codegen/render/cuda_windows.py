"""Windows computed for all lanes of a vector at once, where what they load are vectors: pooling along the channels."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from math import prod

from fusepass.codegen.ir.expr import Expr, Masked, Window, children, walk
from fusepass.codegen.render.cuda_frame import Frame
from fusepass.codegen.render.cuda_loads import Ahead, declare_one, guarded_loads, load_one
from fusepass.codegen.render.printer import UNROLLED_WINDOW, Scope
from fusepass.codegen.render.spelling import C_TYPES, bare, block


def vector_windows(frame: Frame, step: Scope, lanes: Scope, roots: Sequence[Expr], known: Collection[Expr]) -> None:
    """Compute in `step` those windows below `roots` that load vectors, and make each lane's result known in `lanes`.

    What is below `known` values is not needed. A window under a mask, or with one inside, is left to the printer.
    """
    if frame.schedule.width == 1:
        return
    for node in list(_always(roots, known)):
        ahead = [
            Ahead(load, guard, True, True, frame.names.numbered(f"{frame.pointers[load.buffer]}_in"))
            for load, guards in guarded_loads(frame, [node.value])
            if len(guards) == 1 and (guard := next(iter(guards))) is not None and frame.is_wide(load.buffer, load.index)
        ]
        if ahead and not any(isinstance(below, Window) for below in walk(node.value)):
            lanes.bind(node, _window(frame, step, node, ahead))


def _always(roots: Sequence[Expr], known: Collection[Expr]) -> Iterator[Window]:
    """The outermost windows that `roots` always need."""
    seen = {id(node) for node in known}
    stack = list(reversed(roots))
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, Window):
            yield node
        else:
            stack.extend((node.other,) if isinstance(node, Masked) else reversed(children(node)))


def _window(frame: Frame, step: Scope, node: Window, ahead: Sequence[Ahead]) -> str:
    """The loops over a window's points; the C expression for a lane's result."""
    state = frame.names.numbered(node.op.value.lower())
    step.lines.append(f"fp::{node.op.value}<{C_TYPES[node.dtype]}> {state}[{frame.schedule.width}];")
    variables = [frame.names.numbered(axis.name) for axis in node.axes]
    scopes = [step]
    for axis, variable in zip(node.axes, variables, strict=True):
        scopes.append(scopes[-1].child())
        scopes[-1].define_axis(axis, variable)
    inner = scopes[-1]
    for each in ahead:
        inner.lines.append(declare_one(frame, each))
        load_one(frame, inner, each, each.name)
    lanes = inner.child()
    lanes.define_axis(frame.lane, frame.v)
    for each in ahead:
        lanes.bind(each.load, f"{each.name}[{frame.v}]")
    lanes.lines.append(f"{state}[{frame.v}].push({bare(lanes.value(node.value))});")
    inner.lines += frame.unrolled(frame.v, frame.schedule.width, lanes.lines)
    unroll = ["#pragma unroll"] if prod(axis.size for axis in node.axes) <= UNROLLED_WINDOW else []
    for number in reversed(range(len(node.axes))):
        axis, variable = node.axes[number], variables[number]
        head = f"for ({frame.index_type} {variable} = 0; {variable} < {axis.size}; ++{variable})"
        scopes[number].lines += [*unroll, *block(head, scopes[number + 1].lines)]
    return f"{state}[{frame.v}].part<0>()"
