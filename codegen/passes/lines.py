"""Lines of results that are interpolated from the same lines of an input: a point of the kernel computes several of them.

What an element of such a line is made of is found from its position by some arithmetic, its neighbours along two axes or three, and sums of
these times weights. Elements below each other have the same neighbours along the line; and where places are exact, what the input's lines
come to there is the same for several lines of results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import gcd

from fusepass.codegen.ir.expr import (
    Apply,
    Builder,
    Gather,
    Load,
    Op,
    Window,
    indices_in,
    walk,
)
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.passes.axes import each_place, split_axis
from fusepass.codegen.passes.fuse import is_plain

Fills = Callable[[int], bool]
"""Whether so many threads keep a device busy."""

_MOST_LINES = 10  # of a thread; an even number of them, as places repeat after two, four or eight where they are exact
_MOST_RESULTS = 32  # of a thread: lines times the elements of a vector
_MOST_LOOKUPS = 64  # for one element of each line: they are written out


def lines_together(program: Program, builder: Builder, access: int, fills: Fills) -> Program:
    """`program` with several lines for each point of kernels that interpolate, where such points fill the device; a thread stores at most
    `access` bytes of a line. Nothing changes where that is 0."""
    if not access:
        return program
    return replace(program, kernels=tuple(_together(program, each, builder, access, fills) for each in program.kernels))


def _together(program: Program, kernel: Kernel, builder: Builder, access: int, fills: Fills) -> Kernel:
    if not _enlarges_lines(program, kernel):
        return kernel
    *_, line, along = kernel.rows
    widest = gcd(along.size, access // program.buffer(kernel.stores[0].buffer).dtype.nbytes)
    best, fewest = kernel, float(_lookups(kernel))
    for count in range(2, min(_MOST_LINES, _MOST_RESULTS // widest, line.size - 1) + 1, 2):
        if line.size % count == 0 and fills(kernel.row_count // (count * widest)):
            made = _with_lines(kernel, builder, count)
            lookups = _lookups(made)
            if lookups <= _MOST_LOOKUPS and lookups / count <= fewest:
                best, fewest = made, lookups / count
    return best


def _enlarges_lines(program: Program, kernel: Kernel) -> bool:
    """Whether `kernel` stores elements of lines, one for each of its points, and looks up fewer at places computed from the line's position."""
    if not kernel.is_pointwise or not is_plain(kernel) or len(kernel.rows) < 2:
        return False
    drawn = any(isinstance(node, Apply) and node.op is Op.UNIFORM for node in kernel.nodes)
    if drawn or len(kernel.stores) != 1 or any(isinstance(node, Window) for node in kernel.nodes):
        return False
    *_, line, along = kernel.rows
    (store,) = kernel.stores
    gathers = [node for node in kernel.nodes if isinstance(node, Gather)]
    places = [place.value for node in gathers for place in node.places]
    moving = any(line in index.axes for place in places for index in indices_in(place))
    computed = not any(isinstance(node, Load | Gather) for node in walk(*places))
    fewer = all(program.buffer(node.buffer).extent < kernel.row_count for node in gathers)
    return moving and computed and fewer and store.index.stride(along) == 1


def _lookups(kernel: Kernel) -> int:
    return sum(isinstance(node, Gather) for node in kernel.nodes)


def _with_lines(kernel: Kernel, builder: Builder, count: int) -> Kernel:
    """`kernel` with `count` lines for each of its points."""
    lines = split_axis(kernel, builder, kernel.rows[-2], count)
    return each_place(lines, builder, lines.rows[-2])
