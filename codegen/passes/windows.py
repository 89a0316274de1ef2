"""Windows over a convolution's result that do not overlap: its kernel pools what it computes, and computes nothing else.

Max and average pooling with a stride as large as the window, and without a border. A result that a window does not reach, at the end
of an odd size, is never computed. A reader that does more than map what was pooled reads it from a temporary. Where windows over a
transposed convolution are as large as its stride, what they pool is the phases of one position (`Convolution.pooled`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from fusepass.codegen.ir.convolution import Pooling
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import (
    Apply,
    Builder,
    Expr,
    Gather,
    Load,
    Masked,
    Op,
    ReduceOp,
    Window,
    children,
    descend,
    walk,
)
from fusepass.codegen.ir.index import Axis, Index, axis_index, contiguous_strides, linear
from fusepass.codegen.ir.program import Buffer, Kernel, Program, Reduction, Role, Store
from fusepass.codegen.passes.rewrite import rewrite_kernel

_MOST_POINTS = 32  # of a window; as many columns of a tile lie beside each other


@dataclass(frozen=True)
class _Place:
    """Where a window stands: axes along the dimensions of the result, and those inside of it, one for each spatial dimension."""

    dimensions: tuple[Axis, ...]
    inside: tuple[Axis, ...]


def pool_windows(program: Program, builder: Builder, result: Buffer) -> tuple[Program, Load] | None:
    """`program` with a first kernel for the windows over `result`, by rows (sample, channel, *windows), columns inside of them.

    It reads `result` by the load that is returned. None where nothing else reads `result` but one window, or where windows overlap.
    """
    reader = _only_reader(program, result)
    if reader is None:
        return None
    found = _window(reader, result)
    place = None if found is None else _place(reader, *found, result)
    if found is None or place is None:
        return None
    window, load = found
    points = prod(axis.size for axis in place.inside)
    if not (1 < points <= _MOST_POINTS and points & (points - 1) == 0):
        return None
    total = Reduction(f"{result.name}_window", window.op, (window.value,), window.dtype)
    pooled = builder.reduction_result(total.name, 0, window.dtype)
    buffers, rest = program.buffers, tuple(kernel for kernel in program.kernels if kernel is not reader)
    several = {axis for axis in place.dimensions if axis.size > 1}
    if reader.is_pointwise and {axis for axis in reader.rows if axis.size > 1} == several:
        made = rewrite_kernel(reader, builder, leaf=lambda node: pooled if node is window else None)
        kernel = replace(made, row_stores=made.stores, stores=())
        kernels = rest
    else:
        buffer, at, later = _reread(program, builder, reader, window, place, result)
        kernel = Kernel(f"{buffer.name}_kernel", (), (), (), (Store(buffer.name, at, pooled),), (), reader.origin)
        kernels = tuple(later if each is reader else each for each in program.kernels)
        buffers = (*buffers, buffer)
    kernel = replace(kernel, rows=place.dimensions, cols=place.inside, reduction_loops=((total,),))
    written = frozenset[str]().union(*(each.writes for each in program.kernels))
    if (kernel.reads - {result.name}) & written:
        return None
    return replace(program, kernels=(kernel, *kernels), buffers=buffers), load


def pool_phases(
    program: Program, builder: Builder, result: Buffer, stride: Sequence[int]
) -> tuple[Program, Buffer, Pooling] | None:
    """`program` with what windows as large as `stride` give of `result` in a buffer instead, which nothing writes.

    None where nothing else reads `result` but one such window, which may add a number for each channel before it takes the largest.
    """
    reader = _only_reader(program, result)
    found = None if reader is None else _window(reader, result)
    if reader is None or found is None or found[0].op is not ReduceOp.MAX:
        return None
    window, load = found
    place = _place(reader, window, load, result)
    if place is None or tuple(axis.size for axis in place.inside) != tuple(stride):
        return None
    bias = _bias(program, window.value, load, place.dimensions[1])
    if bias is None and window.value is not load:
        return None
    buffer, _, later = _reread(program, builder, reader, window, place, result)
    kernels = tuple(later if kernel is reader else kernel for kernel in program.kernels)
    buffers = (*(each for each in program.buffers if each is not result), replace(buffer, role=Role.ANCHOR))
    return replace(program, kernels=kernels, buffers=buffers), buffers[-1], Pooling(bias)


def _bias(program: Program, value: Expr, load: Load, channel: Axis) -> str | None:
    """The buffer of the numbers, one for each `channel`, whose sum with `load` is `value`."""
    if not isinstance(value, Apply) or value.op is not Op.ADD or load not in value.args:
        return None
    (other,) = [arg for arg in value.args if arg is not load] or [load]
    if not isinstance(other, Load) or other.index != axis_index(channel):
        return None
    buffer = program.buffer(other.buffer)
    fits = buffer.role is Role.INPUT and (buffer.dtype, buffer.shape, buffer.strides) == (
        DType.F32,
        (channel.size,),
        (1,),
    )
    return buffer.name if fits else None


def _only_reader(program: Program, result: Buffer) -> Kernel | None:
    """The kernel that alone reads `result`."""
    readers = [kernel for kernel in program.kernels if result.name in kernel.reads]
    alone = len(readers) == 1 and result.name not in program.outputs and readers[0].anchor is None
    return readers[0] if alone else None


def _reread(
    program: Program, builder: Builder, reader: Kernel, window: Window, place: _Place, result: Buffer
) -> tuple[Buffer, Index, Kernel]:
    """A temporary for what `window` gives, where that lies in it, and `reader` that reads it there."""
    shape = tuple(axis.size for axis in place.dimensions)
    name = program.unused_name(f"{result.name}_pooled")
    buffer = Buffer(name, window.dtype, shape, contiguous_strides(shape), Role.TEMP)
    at = linear([axis_index(axis) for axis in place.dimensions], buffer.strides)
    again = builder.load(name, at, window.dtype)
    return buffer, at, rewrite_kernel(reader, builder, leaf=lambda node: again if node is window else None)


def _window(reader: Kernel, result: Buffer) -> tuple[Window, Load] | None:
    """The one window through which `reader` reads `result`, and how."""
    outside = list(_outside_of_windows(reader))
    if any(isinstance(node, Load | Gather) and node.buffer == result.name for node in outside):
        return None
    windows = [node for node in outside if isinstance(node, Window)]
    if len(windows) != 1:
        return None
    (window,) = windows
    inside = list(walk(window.value))
    if window.dtype is not DType.F32 or any(isinstance(node, Masked | Gather | Window) for node in inside):
        return None
    loads = [node for node in inside if isinstance(node, Load) and node.buffer == result.name]
    return (window, loads[0]) if len(loads) == 1 else None


def _outside_of_windows(kernel: Kernel) -> Iterator[Expr]:
    """Every expression that is not inside of a window alone; windows themselves, too."""
    return descend(kernel.roots, lambda node: () if isinstance(node, Window) else children(node))


def _place(reader: Kernel, window: Window, load: Load, result: Buffer) -> _Place | None:
    """The axes of `window` if it takes each element of `result` once at most."""
    unused = [axis for axis in (*reader.rows, *reader.cols, *window.axes) if axis.size > 1]
    dimensions, inside = list[Axis](), list[Axis]()

    def take(stride: int, fits: int, number: int, what: str) -> Axis:
        found = next((axis for axis in unused if load.index.stride(axis) == stride and axis.size <= fits), None)
        if found is None:
            return Axis(f"{what}{number}", 1)
        unused.remove(found)
        return found

    for number, (size, stride) in enumerate(zip(result.shape, result.strides, strict=True)):
        if number < 2:
            dimensions.append(take(stride, size, number, "one"))
            continue
        point = next((axis for axis in window.axes if axis in unused and load.index.stride(axis) == stride), None)
        if point is None:
            point = Axis(f"point{number}", 1)
        else:
            unused.remove(point)
        inside.append(point)
        dimensions.append(take(stride * point.size, size // point.size, number, "one"))
    exact = linear(
        [*map(axis_index, dimensions), *map(axis_index, inside)],
        [
            *result.strides[:2],
            *(s * axis.size for s, axis in zip(result.strides[2:], inside, strict=True)),
            *result.strides[2:],
        ],
    )
    whole = all(axis.size == size for axis, size in zip(dimensions[:2], result.shape[:2], strict=True))
    outer = {axis for axis in unused if axis in window.axes}
    if not whole or outer or load.index != exact:
        return None
    own = {*dimensions, *inside}
    needed = {axis for node in walk(window.value) if isinstance(node, Load) for axis in node.index.axes}
    return _Place(tuple(dimensions), tuple(inside)) if needed <= own else None
