"""Reductions over positions of what a thread makes of its own sums of a convolution: neither laid out nor exchanged before a tile ends.

A thread has a fourth of the channels of four positions at a time. What it finds of each channel stays in registers for all positions that
its warp goes over in a tile; then the eight threads that have the same channels merge what they found, each of some of these.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from fusepass.codegen.ir.convolution import ROWS
from fusepass.codegen.ir.expr import Stat
from fusepass.codegen.render.cuda_input import unrolled
from fusepass.codegen.render.cuda_partials import state_type
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import bare, block

if TYPE_CHECKING:
    from fusepass.codegen.render.cuda_places import PlacesWriter


class OwnStates:
    """The lines of such a kernel that reduce; ``$word`` in them is a name of the kernel's writer."""

    def __init__(self, writer: PlacesWriter) -> None:
        assert writer.states is not None
        self.states, self.plan, self.sizes = writer.states, writer.plan, writer.sizes
        self.reductions = writer.states.partials.reductions
        self.count = ROWS * writer.plan.rows // 4  # channels of a thread

    def begin(self) -> Iterable[str]:
        """The states, for the positions of a tile."""
        for number, reduction in enumerate(self.reductions):
            yield f"fp::OwnStates<{state_type(reduction)}, {self.count}> {_own(number)};"

    def add(self, writer: PlacesWriter) -> Iterable[str]:
        """Adds what becomes of ``$sums``, where ``$inside`` has a bit."""
        factor, scaled = writer.factors()
        at = "$sums[0][$t / 2][$k / 4 * 8 + $k % 4 / 2 * 4 + $t % 2 * 2 + $k % 2]"
        shared, each = self._value(writer)
        lines = [
            "const int $row = $k / 4 * 16 + $k % 4 / 2 * 8 + $lane % 4 * 2 + $k % 2, $channel = $first_channel + $row;",
            *factor,
            *shared,
            *unrolled("$t", 4, [f"float $sum = {at};", f"$sum = {scaled};", *each[:-1], f"{at} = {each[-1]};"]),
        ]
        if self.sizes[1] != self.plan.covered:
            lines[1:] = block(f"if ($channel < {self.sizes[1]})", lines[1:])
        yield from unrolled("$k", self.count, lines)
        for whole, head in (("true", "if ($inside[0] == 0xffffffffu)"), ("false", "} else")):
            pushed = [
                f"fp::push_sums<{whole}>({_own(number)}, $sums[0], $inside[0]);"
                for number in range(len(self.reductions))
            ]
            yield from block(head, pushed)[: -1 if whole == "true" else None]

    def end(self) -> Iterable[str]:
        """Adds what was found in a tile to the warp's states."""
        for number in range(len(self.reductions)):
            yield f"fp::leave_sums({self.states.of_turn(number)}, {_own(number)});"

    def _value(self, writer: PlacesWriter) -> tuple[list[str], list[str]]:
        """Lines for a channel, and for a position: the last is the value of ``$sum``."""
        kernel, printer = writer.kernel, writer.printer
        assert kernel.partials is not None
        shared = Scope(printer)
        for axis, text in zip(kernel.rows, ("$sample", "$channel"), strict=False):
            shared.define_axis(axis, text)
        printer.expect([kernel.partials.value])
        each = shared.child()
        for node in kernel.nodes:
            if isinstance(node, Stat):
                each.bind(node, "$sum")
        value = bare(each.value(kernel.partials.value))
        return shared.lines, [*each.lines, value]


def _own(number: int) -> str:
    return f"$own_{number}"
