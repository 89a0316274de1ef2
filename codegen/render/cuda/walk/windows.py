"""Windows computed for all lanes of a vector at once, where what they load are vectors: pooling along the channels, and windows over
neighbours, which share points."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from fusepass.codegen.ir.expr import Expr, Window, descend, evaluated, walk
from fusepass.codegen.ir.index import Axis
from fusepass.codegen.ir.neighbours import Points, Stretch, points, stretches
from fusepass.codegen.render.cuda.walk.accesses import Ahead, declare_one, load_one, needed
from fusepass.codegen.render.cuda.walk.frame import Frame
from fusepass.codegen.render.printer import Nest, Scope
from fusepass.codegen.render.spelling import C_TYPES, block, literal


def vector_windows(frame: Frame, step: Scope, lanes: Scope, roots: Sequence[Expr], known: Collection[Expr]) -> None:
    """Compute in `step` those windows below `roots` that load vectors, and make each lane's result known in `lanes`.

    What is below `known` values is not needed. A window under a mask, or with one inside, is left to the printer.
    """
    if frame.schedule.width == 1:
        return
    for node in list(_always(roots, known)):
        ahead = [
            Ahead(load, guard, True, True, frame.names.numbered(f"{frame.pointers[load.buffer]}_in"))
            for load, guard in needed(frame, [node.value])
            if frame.is_wide(load.buffer, load.index)
        ]
        if ahead and not any(isinstance(below, Window) for below in walk(node.value)):
            lanes.bind(node, _window(frame, step, node, ahead))
        elif not ahead and frame.arranged.axis is not None and (shared := _shared(frame, node, frame.arranged.axis)):
            lanes.bind(node, _neighbours(frame, step, node, *shared))


def _always(roots: Sequence[Expr], known: Collection[Expr]) -> Iterator[Window]:
    """The outermost windows that `roots` always need."""
    nodes = descend(roots, evaluated, but={id(node) for node in known})
    return (node for node in nodes if isinstance(node, Window))


def _window(frame: Frame, step: Scope, node: Window, ahead: Sequence[Ahead]) -> str:
    """The loops over a window's points; the C expression for a lane's result."""
    state = _declared(frame, step, node)
    nest = Nest(step, node.axes)
    inner = nest.inner
    for each in ahead:
        inner.lines.append(declare_one(frame, each))
        load_one(frame, inner, each, each.name)
    lanes = inner.child({frame.lane: frame.v})
    for each in ahead:
        lanes.bind(each.load, f"{each.name}[{frame.v}]")
    lanes.lines += lanes.pushing(node.value, f"{state}[{frame.v}]")
    inner.lines += frame.unrolled(frame.v, frame.schedule.width, lanes.lines)
    nest.close()
    return f"{state}[{frame.v}].part<0>()"


def _shared(frame: Frame, node: Window, axis: Axis) -> tuple[Points, list[Stretch]] | None:
    """The points of `node` and the accesses that load them; None where there is no access for several."""
    found = points(node, axis, frame.lane, frame.builder)
    every = stretches(found, axis, frame.schedule.width, frame.program)
    together = [each for each in every if frame.is_aligned(each.buffer)]
    return (found, together) if together else None


def _neighbours(frame: Frame, step: Scope, node: Window, found: Points, together: Sequence[Stretch]) -> str:
    """The loops over the points of a vector's windows but along the last axis, which is written out."""
    state = _declared(frame, step, node)
    nest = Nest(step, node.axes[:-1])
    inner = nest.inner
    for each in together:
        _load_stretch(frame, inner, each)
    for lanes in found:
        for number, value in enumerate(lanes):
            inner.lines += inner.pushing(value, f"{state}[{number}]")
    nest.close()
    return f"{state}[{frame.v}].part<0>()"


def _load_stretch(frame: Frame, scope: Scope, stretch: Stretch) -> None:
    pointer, element = frame.pointers[stretch.buffer], C_TYPES[stretch.dtype]
    name = frame.names.numbered(f"{pointer}_in")
    inside = scope.child(conditional=bool(stretch.mask))
    load = f"{name} = fp::load_vector<{stretch.size}>({pointer} + {inside.operand(stretch.first)});"
    if stretch.other is None:
        scope.lines += [*inside.lines, f"const auto {load}"]
    else:
        others = ", ".join([literal(stretch.other)] * stretch.size)
        scope.lines.append(f"fp::Vec<{element}, {stretch.size}> {name} = {{{{{others}}}}};")
        scope.lines += block(f"if ({scope.condition(stretch.mask)})", [*inside.lines, load])
    for number, value in stretch.elements:
        scope.bind(value, f"{name}[{number}]")


def _declared(frame: Frame, step: Scope, node: Window) -> str:
    """The name of the states of a window's lanes, declared."""
    state = frame.names.numbered(node.op.value.lower())
    step.lines.append(f"fp::{node.op.value}<{C_TYPES[node.dtype]}> {state}[{frame.schedule.width}];")
    return state
