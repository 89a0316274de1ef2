"""Results of a block that takes one tile of rows after another, moved back to where sectors of memory begin.

Where rows that lie together begin anywhere, a tile of them begins and ends within a sector of each column, at another place in each. So a
thread stores, of each column, not the row that it has reduced but one that is up to a sector before it, so that a warp's rows begin with a
sector. What was reduced of the rows of a sector before the tile, the block has from the tile before; their elements are loaded again, which
the caches have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusepass.codegen.ir.digits import FewDigits
from fusepass.codegen.ir.expr import Expr, Stat, walk
from fusepass.codegen.ir.index import Axis, axis_index
from fusepass.codegen.ir.program import Store
from fusepass.codegen.render.cuda_frame import Frame
from fusepass.codegen.render.numbers import free
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import C_TYPES, block


class Strips:
    """The lines around the results of a tile, and what they are made of."""

    def __init__(self, frame: Frame, stores: Sequence[Store]) -> None:
        row = frame.arranged.row
        assert row is not None
        assert frame.strip is not None
        self.frame, self.strip = frame, frame.strip
        length = frame.schedule.strip
        strip, first, moved = (Axis(f"{row.name} {name}", length) for name in ("strip", "first", "moved"))
        self._strip, self._first, self._moved = replace(strip, size=row.size // length), first, moved
        before = axis_index(self._strip) * length
        self._place = stores[0].index.substitute({row: before + axis_index(first)})
        self._axes = {row: before + axis_index(moved)}
        used = (node for node in walk(*(store.value for store in stores)) if isinstance(node, Stat))
        names = frame.names
        self._arrays = [(stat, names.exact(f"{stat.reduction}_{stat.part}_of_rows")) for stat in dict.fromkeys(used)]
        self._back, self._there, self._row = (names.exact(name) for name in ("back", "place_there", "row_there"))
        self._from = names.exact("own_from")
        self.stores = tuple(
            replace(store, index=store.index.substitute(self._axes), value=self._rewritten(store.value))
            for store in stores
        )
        few = frame.printer.few
        nodes = (node for store in stores for node in walk(store.value) if id(node) in few.nodes)
        frame.printer.few = FewDigits(few.nodes | {id(self._rewritten(node)) for node in nodes}, few.sums)

    def before(self) -> list[str]:
        """What the block has reduced becomes known to all of its threads."""
        frame, plan = self.frame, self.frame.schedule
        lane, group = frame.place
        rows = plan.lanes + plan.overlap
        lines = [f"__shared__ {C_TYPES[stat.dtype]} {array}[{rows}];" for stat, array in self._arrays]
        own = [f"{array}[{plan.overlap} + {lane}] = {frame.top.value(stat)};" for stat, array in self._arrays]
        lines += block(f"if ({group} == 0)", own) if own else []
        lines += [
            "__syncthreads();",
            f"const {frame.index_type} {self._from} = {self.strip.first} > 0 ? {self.strip.first} : -{plan.overlap};",
        ]
        frame.top.define_axis(self._strip, self.strip.number)
        frame.top.define_axis(self._first, self.strip.first)
        frame.shift = self._shift
        frame.own_row = f"fp::is_inside(0, {self._there}, {free(plan.strip)}) && {self._there} - {lane} % {plan.overlap} >= {self._from}"
        return lines

    def after(self) -> list[str]:
        """The last rows of the tile are those before the next one."""
        frame, plan = self.frame, self.frame.schedule
        frame.shift = None
        lane, group = frame.place
        kept = plan.lanes - plan.overlap
        lines = [f"{array}[{lane} - {kept}] = {frame.top.value(stat)};" for stat, array in self._arrays]
        return ["__syncthreads();", *(block(f"if ({group} == 0 && {lane} >= {kept})", lines) if lines else [])]

    def _shift(self, scope: Scope) -> None:
        """Define the row of a thread's result of the column at hand in `scope`, and what was found of it."""
        frame, plan = self.frame, self.frame.schedule
        lane, _ = frame.place
        kind = f"const {frame.index_type}"
        scope.lines += [
            f"{kind} {self._back} = unsigned({scope.index(self._place)}) % {plan.overlap};",
            f"{kind} {self._there} = {self.strip.tile} + {lane} - {self._back};",
            f"{kind} {self._row} = {self._there} < 0 ? 0 : fp::least({self._there}, {free(plan.strip - 1)});",
        ]
        scope.define_axis(self._moved, self._row)
        for stat, array in self._arrays:
            scope.bind(self._stat(stat), f"{array}[{plan.overlap} + {lane} - {self._back}]")

    def _rewritten(self, value: Expr) -> Expr:
        return self.frame.builder.rewrite(
            value, self._axes, leaf=lambda node: self._stat(node) if isinstance(node, Stat) else None
        )

    def _stat(self, stat: Stat) -> Expr:
        """What was found of the row of a result."""
        return self.frame.builder.stat(f"{stat.reduction} of the row there", stat.part, stat.dtype)
