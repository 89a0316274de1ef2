"""Loads of pieces that take turns become one load.

Of a concatenation, an element lies in one piece. Where pieces are short, threads of a warp lie in different ones and go through the loads of
each, one after another. Two pieces of one length that load from one buffer a constant distance apart, as the halves of a rotary embedding
do, have one index for both: a remainder where it wraps around, and a quotient elsewhere::

    i < 64 ? x[i + 64] : x[i - 64]    is    x[(i + 64) % 128]
    i < 64 ? x[i]      : x[i + 64]    is    x[i + i / 64 * 64]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations

from fusepass.codegen.device import WARP
from fusepass.codegen.ir.expr import Builder, Expr, Load, inside_windows
from fusepass.codegen.ir.guards import Guard, either, guarded_loads
from fusepass.codegen.ir.index import Axis, Index, axis_index
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.passes.fuse import is_plain
from fusepass.codegen.passes.rewrite import rewrite_kernel


@dataclass(frozen=True)
class _Turn:
    """Two pieces along `axis`: `length` points from `start` on, and behind them at most as many."""

    axis: Axis
    start: int
    length: int

    def index(self, first: Index, distance: int) -> Index:
        """What is `first` in the first piece, and `distance` more than that in the second one."""
        place, step = axis_index(self.axis) - self.start, first.stride(self.axis)
        around = -distance // step if step else 0
        if step and around >= self.length and around * step == -distance:
            place += around - self.length
            return first - place * step + place % around * step
        return first + place // self.length * distance


@dataclass(frozen=True)
class _Joined:
    """Two loads, the second one `distance` elements behind the first, as one at `index`."""

    loads: tuple[Load, Load]
    distance: int
    index: Index


def join_loads(program: Program, builder: Builder, access: int) -> Program:
    """`program` with one load for two pieces that are shorter than what a warp loads at once, `access` bytes a thread; nothing changes
    where that is 0."""
    return replace(program, kernels=tuple(_with_joined(program, kernel, builder, access) for kernel in program.kernels))


def _with_joined(program: Program, kernel: Kernel, builder: Builder, access: int) -> Kernel:
    found = list(_joined(program, kernel, access)) if access and is_plain(kernel) else []
    if not found:
        return kernel
    nearest = min(found, key=lambda joined: abs(joined.distance))
    first, second = nearest.loads
    load = builder.load(first.buffer, nearest.index, first.dtype)

    def leaf(node: Expr) -> Expr | None:
        joined = isinstance(node, Load) and node.buffer == first.buffer and node.index in (first.index, second.index)
        return load if joined else None

    return _with_joined(program, rewrite_kernel(kernel, builder, leaf=leaf), builder, access)


def _joined(program: Program, kernel: Kernel, access: int) -> Iterator[_Joined]:
    near = {axes[-1] for axes in (kernel.rows, kernel.cols) if axes}
    windowed = inside_windows(kernel.nodes)
    guarded = [(load, guard) for load, guard in guarded_loads(kernel.roots) if guard and id(load) not in windowed]
    for (first, one), (second, other) in permutations(guarded, 2):
        iteration = _iteration(one, other) if first.buffer == second.buffer else None
        if iteration is None or iteration.axis not in near or iteration.length * first.dtype.nbytes >= WARP * access:
            continue
        distance = second.index - first.index
        index = iteration.index(first.index, distance.constant)
        low, high = index.tight_bounds
        everywhere = low >= 0 and high < program.buffer(first.buffer).extent
        if not distance.terms and (everywhere or either((one, other))):
            yield _Joined((first, second), distance.constant, index)


def _iteration(first: Guard, second: Guard) -> _Turn | None:
    """The pieces where the one and the other holds, and whatever both ask; None where these do not follow each other along an axis."""
    own, others = (
        [bound for bound in guard if bound not in beside] for guard, beside in ((first, second), (second, first))
    )
    if len(own) != 1 or len(others) != 1 or own[0].index != others[0].index or own[0].high != others[0].low:
        return None
    (one,), (other,) = own, others
    axis = one.index.terms[0][0] if len(one.index.terms) == 1 else None
    if not isinstance(axis, Axis) or one.index != axis_index(axis):
        return None
    start, middle, end = max(one.low, 0), one.high, min(other.high, axis.size)
    return _Turn(axis, start, middle - start) if 0 < end - middle <= middle - start else None
