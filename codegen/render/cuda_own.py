"""What a thread makes of its own sums of a convolution, before they are laid out, if it is the same function of all positions' sums.

A thread has a fourth of the channels of four positions at a time, so that what depends on a channel is loaded and computed once for these
four. Values that are stored are laid out as sums would be, and copied. What reduces over positions stays in registers for all positions
that a warp goes over in a tile; then the eight threads that have the same channels merge what they found, each of some of these.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from fusepass.codegen.ir.convolution import ROWS
from fusepass.codegen.ir.expr import Expr, Stat
from fusepass.codegen.ir.program import Reduction
from fusepass.codegen.render.cuda_input import unrolled
from fusepass.codegen.render.cuda_partials import state_type
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import bare, block

if TYPE_CHECKING:
    from fusepass.codegen.render.cuda_convolution import Sums
    from fusepass.codegen.render.cuda_places import PlacesWriter


class OwnValues:
    """The lines of such a kernel; ``$word`` in them is a name of the kernel's writer."""

    def __init__(self, writer: PlacesWriter) -> None:
        self.writer, self.kernel = writer, writer.kernel
        self.count = ROWS * writer.plan.rows // 4  # channels of a thread
        partials = self.kernel.partials
        self.value: Expr = partials.value if partials is not None else self.kernel.stores[0].value
        self.reductions: tuple[Reduction, ...] = () if partials is None else partials.reductions

    def begin(self) -> Iterable[str]:
        """The states of reductions, for the positions of a tile."""
        for number, reduction in enumerate(self.reductions):
            yield f"fp::OwnStates<{state_type(reduction)}, {self.count}> {_own(number)};"

    def use(self, sums: Sums) -> Iterable[str]:
        """Reduces and stores what becomes of ``$sums``."""
        plain = any(store.value is not self.value for store in self.kernel.stores)
        if plain:
            yield from self._stored(replace(sums, repair=()))
        yield from self._values()
        if self.reductions:
            yield from self.writer.over_positions(sums, [])
            for whole, head in (("true", "if ($inside[0] == 0xffffffffu)"), ("false", "} else")):
                numbers = range(len(self.reductions))
                pushed = [f"fp::push_sums<{whole}>({_own(number)}, $sums[0], $inside[0]);" for number in numbers]
                yield from block(head, pushed)[: -1 if whole == "true" else None]
        if self.kernel.stores and not plain:
            staging = f"fp::stage_values<{self.writer.on.staged_pitch}>($room, $sums, $m);"
            yield from self._stored(replace(sums, staging=staging, repair=()))

    def end(self) -> Iterable[str]:
        """Adds what was found in a tile to the warp's states."""
        for number in range(len(self.reductions)):
            assert self.writer.states is not None
            yield f"fp::leave_sums({self.writer.states.of_turn(number)}, {_own(number)});"

    def _values(self) -> Iterable[str]:
        """Puts values in the place of sums."""
        factor, scaled = self.writer.factors()
        at = "$sums[0][$t / 2][$k / 4 * 8 + $k % 4 / 2 * 4 + $t % 2 * 2 + $k % 2]"
        shared = Scope(self.writer.printer)
        for axis, text in zip(self.kernel.rows, ("$sample", "$channel"), strict=False):
            shared.define_axis(axis, text)
        self.writer.printer.expect([self.value])
        each = shared.child()
        for node in self.kernel.nodes:
            if isinstance(node, Stat):
                each.bind(node, "$sum")
        value = bare(each.value(self.value))
        lines = [
            "const int $row = $k / 4 * 16 + $k % 4 / 2 * 8 + $lane % 4 * 2 + $k % 2, $channel = $first_channel + $row;",
            *factor,
            *shared.lines,
            *unrolled("$t", 4, [f"float $sum = {at};", f"$sum = {scaled};", *each.lines, f"{at} = {value};"]),
        ]
        sizes = self.writer.sizes
        if sizes[1] != self.writer.plan.covered:
            lines[1:] = block(f"if ($channel < {sizes[1]})", lines[1:])
        yield from unrolled("$k", self.count, lines)

    def _stored(self, sums: Sums) -> Iterable[str]:
        """Stores what `sums` lay out, as a kernel would whose results these are."""
        (stat,) = {node for node in self.kernel.nodes if isinstance(node, Stat)}
        stores = tuple(replace(store, value=stat) for store in self.kernel.stores)
        copying = copy.copy(self.writer)
        copying.kernel = replace(self.kernel, stores=stores, partials=None)
        copying.__dict__["states"] = None
        return copying.epilogue(sums)


def _own(number: int) -> str:
    return f"$own_{number}"
