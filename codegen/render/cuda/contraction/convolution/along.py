"""Reductions along the last axis of a convolution's result, where a warp has laid whole rows out: 16 channels by 32 (or 64) neighbours.

Two threads share a row and reduce it in pieces of 32 neighbours. What follows from the row's results alone is computed by these two, and
handed to the threads that store its elements, several neighbours at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusepass.codegen.ir.along import reduced_along
from fusepass.codegen.ir.convolution import ROWS
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Expr, ReductionResult, largest, walk
from fusepass.codegen.render.cuda.contraction.convolution.tiles import TileWriter
from fusepass.codegen.render.cuda.contraction.convolution.vectors import store_neighbours
from fusepass.codegen.render.cuda.contraction.loops import Loop, ReductionLoops
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import bare, block, braces
from fusepass.codegen.schedule_convolution.tiles import dimensions
from fusepass.errors import ScheduleError

_SHARE = "fp::Share<1>"


class Along:
    """The lines of a kernel that have to do with its rows; the results of 16 channels lie in ``room``."""

    def __init__(self, writer: TileWriter, group: str, covered: int) -> None:
        """The first 8 of a warp's positions are the `group`-th ones of the tile; blocks work on `covered` channels.

        Raises:
            ScheduleError: the kernel has a form for which there are no such lines.
        """
        kernel = writer.kernel
        value = reduced_along(kernel, dimensions(kernel))
        if value is None:
            raise ScheduleError(f"{kernel.name} cannot reduce along the last axis")
        self.writer, self.kernel, self.group, self.value = writer, kernel, group, value
        self.covered, self.some = covered, covered != writer.sizes[1]  # whether channels may not exist
        self.reduction_loops = ReductionLoops(kernel, writer.program, writer.pointers, writer.printer, writer.names)

    def begin(self) -> list[str]:
        """``inside``: which results of a row exist."""
        c = self.writer.c
        writer, pair = self.writer, self.writer.on.pair
        places, inside = writer.position(self.group)
        if inside == "true":
            return [f"const unsigned {c.inside}[{pair}] = {{{', '.join(['0xffffffffu'] * pair)}}};"]
        votes = [*places, f"{c.inside}[{writer.half}] = __ballot_sync(0xffffffffu, {inside});"]
        lines = writer.half.over(votes)
        return [f"unsigned {c.inside}[{pair}];", *braces(lines)]

    def lines(self, pragma: str, width: int) -> list[str]:
        """What is done with the 16 channels ``m``; stores of elements take `width` of them at once."""
        c = self.writer.c
        (reduction_loop,), writer = self.kernel.reduction_loops, self.writer
        states = [self.reduction_loops.declared(reduction) for reduction in reduction_loop]
        last = writer.sizes[1] - 1
        own = f"{writer.first_channel} + {writer.rows} * {ROWS} + {_SHARE}::row()"
        channel = f"{c.own} < {last} ? {c.own} : {last}" if self.some else c.own
        nodes = self._frontier([store.value for store in self.kernel.stores])
        lines = [f"const int {c.own} = {own}, {c.channel} = {channel};", *states, *self._reduced()]
        lines += [*self._row_values(nodes), *self._row_stores()]
        if self.kernel.stores:
            handed = [(node, c.named(f"of_row_{number}")) for number, node in enumerate(nodes)]
            ahead = [
                f"const float {text} = fp::of_row({self._row_value(number)}, {c.row});"
                for number, (_, text) in enumerate(handed)
            ]
            known = [(self.value, c.sum), *handed]
            lines += ["__syncwarp();"] if self._moves else []
            lines += store_neighbours(writer, self.group, self.covered, pragma, width, ahead, known)
        return braces(lines)

    @property
    def _moves(self) -> bool:
        """Whether what is reduced takes the place of the results."""
        return not isinstance(self.value, ReductionResult)

    def _reduced(self) -> list[str]:
        """The states of a thread's row."""
        c = self.writer.c
        pitch, strip = self.writer.on.staged_pitch, Loop(c.strip, self.writer.on.pair)
        lines = [
            f"const unsigned {c.bits}[1] = {{{c.inside}[{strip}]}};",
            f"{_SHARE} {c.share}({c.room} + {strip} * 32, {pitch}, {c.bits});",
        ]
        if self._moves:
            scope = self._near(c.channel)
            scope.bind(self._result(self.value), c.sum, spare=1)
            self.writer.printer.expect([self.value])
            value = bare(scope.value(self.value))
            each = [
                f"const float {c.sum} = {c.share}.values[{c.i}];",
                *scope.lines,
                f"{c.share}.values[{c.i}] = {value};",
            ]
            lines += [*Loop(c.i, 16).over(each), f"{c.share}.leave({c.room} + {strip} * 32, {pitch});"]
        (reduction_loop,) = self.kernel.reduction_loops
        lines += [f"fp::add_row({self.reduction_loops.state(reduction)}, {c.share});" for reduction in reduction_loop]
        strips = strip.over(lines)
        return strips if self.writer.on.pair > 1 else braces(strips)

    def _near(self, channel: str) -> Scope:
        """A scope that knows the sample and the channel."""
        scope = Scope(self.writer.printer)
        for axis, text in zip(dimensions(self.kernel), (self.writer.c.sample, channel), strict=False):
            scope.define_axis(axis, text)
        return scope

    def _result(self, root: Expr) -> Expr:
        """The convolution's result below `root`."""
        assert self.kernel.anchor is not None
        name = self.kernel.anchor.name
        return next(node for node in walk(root) if isinstance(node, ReductionResult) and node.reduction == name)

    def _row_stores(self) -> list[str]:
        """What is stored once for a row, by the first of its threads."""
        c = self.writer.c
        if not self.kernel.row_stores:
            return []
        axes = dict(zip(self.kernel.rows, (c.sample, c.channel, *self.writer.axes[:-1]), strict=True))
        scope = self.reduction_loops.row_scope([store.value for store in self.kernel.row_stores], axes)
        for store in self.kernel.row_stores:
            scope.lines.append(self.reduction_loops.stored(scope, store))
        places, _ = self.writer.position(self.group, "0", "0")
        exists = f"{_SHARE}::is_first() && ({c.inside}[0] & 1)" + (
            f" && {c.own} < {self.writer.sizes[1]}" if self.some else ""
        )
        return block(f"if ({exists})", [*places, *scope.lines])

    def _row_values(self, nodes: Sequence[Expr]) -> list[str]:
        """What the threads of a row compute for those that store its elements."""
        scope = self.reduction_loops.row_scope(nodes, {})
        made = [
            f"const float {self._row_value(number)} = {bare(scope.value(node))};" for number, node in enumerate(nodes)
        ]
        return [*scope.lines, *made]

    def _row_value(self, number: int) -> str:
        return self.writer.c.named(f"row_value_{number}")

    def _frontier(self, roots: Sequence[Expr]) -> list[Expr]:
        """The largest numbers below `roots` that follow from the row's results alone."""
        (reduction_loop,) = self.kernel.reduction_loops
        names = {reduction.name for reduction in reduction_loop}
        needs = self.writer.printer.dataflow.needs

        def follows(node: Expr) -> bool:
            below = needs(node)
            known = bool(below) and all(isinstance(need, ReductionResult) and need.reduction in names for need in below)
            return node is self.value or (known and node.dtype is DType.F32)

        return [node for node in largest(roots, follows, guarded=True) if node is not self.value]
