"""Writes the body of a CUDA kernel with a convolution of many channels; `codegen.schedule_convolution.multistage` says how it is laid out.

Copies are asynchronous. Each piece of work waits for its own copies, meets the other threads at one barrier, begins the copies of a
later piece, and multiplies. What these copies overwrite was last read before that barrier: a stage of weights one piece
ago, a chunk of the input as many pieces ago as `_least_pieces` in the schedule guarantees.
"""

from __future__ import annotations

from collections.abc import Iterable

from fusepass.codegen.render.cuda.contraction.convolution.definition import repair
from fusepass.codegen.render.cuda.contraction.convolution.multistage_copies import (
    FIELDS,
    LAST,
    LOADS,
    SWAPS,
    MultistageCopies,
)
from fusepass.codegen.render.cuda.contraction.convolution.positions import Sums
from fusepass.codegen.render.cuda.contraction.convolution.results import GROUP_SLICES
from fusepass.codegen.render.cuda.contraction.loop import Loop
from fusepass.codegen.render.cuda.family import Text
from fusepass.codegen.render.spelling import block, braces
from fusepass.codegen.schedule_convolution.multistage import SLICE_FLOATS
from fusepass.codegen.schedule_convolution.tiles import COLUMNS

_ONCE = "#pragma unroll 1"


class MultistageWriter(MultistageCopies):
    """Lines of such a kernel."""

    def write(self) -> Text:
        c = self.c
        plan, on = self.plan, self.on
        stride = plan.blocks // plan.channel_blocks
        group = [
            f"float {c.sums}[{on.pair}]{self._sums()} = {{}};",
            f"bool {c.last};",
            _ONCE,
            *block("do", self._piece(), f"}} while (!{c.last});"),
            *self._results(),
        ]
        if len(on.phases) > 1:
            head = f"for (int {c.phase} = 0; {c.phase} < {len(on.phases)}; {c.phase} += {on.pair})"
            group = [_ONCE, *block(head, group)]
        else:
            group = braces(group)
        if self.states:
            group += ["__syncthreads();", *self.states.end(self._from_row(c.first_row), self.end_channel)]
        body = [
            *self._places(),
            *(self.states.begin() if self.states else ()),
            "",
            *self._fetch_weights(),
            "",
            *self._fetch_input(),
            "",
            *self._fetch_piece(stride),
            "",
            f"for (int {c.n} = 0; {c.n} < {plan.stages - 1}; ++{c.n}) {c.fetch_piece}();",
            f"int {c.stage} = 0, {c.slot} = {plan.inputs - 1};",
            f"for (int {c.number} = {self._first_tile()}; {c.number} < {self.tile_count}; {c.number} += {stride}) {{",
            *("    " + line for line in (*self.tile_place(), f"int {c.piece} = 0;", *group)),
            "}",
        ]
        return Text(tables=tuple(self._tables()), body=tuple(body))

    # ---- products

    def _piece(self) -> list[str]:
        c = self.c
        plan = self.plan
        advance = [f"{c.slot} = {c.slot} + 1 < {plan.inputs} ? {c.slot} + 1 : 0;"]
        if self.settles:
            advance.append(f"{c.settle_input}({c.inputs} + {c.slot} * {plan.chunk_floats});")
        return [
            f"const int* const {c.what} = {self.pieces_name} + {c.piece}++ * {FIELDS};",
            f"fp::await_copies<{plan.stages - 2}>();",
            *block(f"if ({c.what}[3] & {LOADS})", advance),
            *(["fp::publish_to_products();"] if self.together else []),
            "__syncthreads();",
            f"{c.fetch_piece}();",
            *self._multiply(),
            f"{c.stage} = {c.stage} + 1 < {plan.stages} ? {c.stage} + 1 : 0;",
            f"{c.last} = {c.what}[3] & {LAST};",
        ]

    def _multiply(self) -> Iterable[str]:
        c = self.c
        plan, on, n = self.plan, self.on, Loop(c.n, COLUMNS)
        yield f"const float* const {c.mine} = {c.inputs} + {c.slot} * {plan.chunk_floats} + {c.lane} % 4 * {on.pitch} + {c.lane} / 4 * {self.anchor.step[-1]};"
        if self.on.pair > 1:
            yield f"if ({c.what}[3] & {SWAPS}) fp::exchange({c.sums}[0], {c.sums}[1]);  // the sums that grow are always the first"
        first = f"{self._high()} * {plan.rows * SLICE_FLOATS} + " if plan.high > 1 else ""
        if self.together:
            yield from self._multiply_together(f"{c.weights} + ({first}{c.stage} * {plan.piece_floats})")
            return
        yield f"const float* const {c.slices} = {c.weights} + {c.stage} * {plan.piece_floats} + {first}{c.lane} * 4;"
        from_memory = [
            f"{c.b}[{n}][0] = {c.near}[{c.groups}[{self.part}][{n}]];",
            f"{c.b}[{n}][1] = {c.near}[{c.groups}[{self.part}][{n}] + {4 * on.pitch}];",
        ]
        multiply = "fp::multiply_rounded" if self.rounds else "fp::multiply_exactly"
        part = [
            f"float {c.b}[{COLUMNS}][2];",
            *n.over(from_memory),
            f"{multiply}({c.sums}[0][{self.part}], {c.a}, {c.b});",
        ]
        one = [
            f"const float* const {c.a} = {c.slices} + {c.s} * {plan.block_rows * SLICE_FLOATS};",
            f"const float* const {c.near} = {c.mine} + {self.at_name}[{c.what}[0] + {c.s}];",
            *self.part.over(part),
        ]
        yield _ONCE
        yield from block(f"for (int {c.s} = 0; {c.s} < {c.what}[1]; ++{c.s})", one)

    def _multiply_together(self, weights: str) -> Iterable[str]:
        """The products of a piece whose weights begin at `weights`, by four warps together."""
        c = self.c
        plan, far, n = self.plan, 4 * self.on.pitch, Loop(c.n, COLUMNS)
        from_memory = [
            f"{c.a}[{self.part} * 2 + {n} / 2][{n} % 2] = {c.near}[{c.groups}[{self.part}][{n}]];",
            f"{c.a}[{self.part} * 2 + {n} / 2][{n} % 2 + 2] = {c.near}[{c.groups}[{self.part}][{n}] + {far}];",
        ]
        load = [
            f"const float* const {c.near} = {c.mine} + {self.at_name}[{c.what}[0] + {c.s}];",
            *self.part.over(n.over(from_memory)),
        ]
        yield from block(f"const auto {c.load} = [&](float (&{c.a})[{2 * plan.parts}][4], int {c.s})", load, "};")
        yield f"const uint64_t {c.high} = fp::tile_descriptor({weights}, 128, 256);"
        units = plan.units * SLICE_FLOATS // 4  # of 16 bytes, from slice to slice
        if self.rounds:
            yield f"fp::multiply_slices_rounded<{GROUP_SLICES}>({c.sums}[0], {c.what}[1], {c.high}, {units}, {c.load});"
            return
        low = f"{c.high} + {plan.block_rows * SLICE_FLOATS // 4}"
        yield f"fp::multiply_slices_exactly<{GROUP_SLICES}>({c.sums}[0], {c.what}[1], {c.high}, {low}, {units}, {c.load});"

    # ---- results

    def _results(self) -> Iterable[str]:
        c = self.c
        plan, on = self.plan, self.on
        repaired: tuple[str, ...] = ()
        if not self.rounds:
            each = [self.phase] if self.together else [self.phase, self.part]
            yield from self.finite(
                f"{c.sums}[{self.phase}]" if self.together else f"{c.sums}[{self.phase}][{self.part}]", each
            )
            repaired = tuple(repair(self))
        done = (
            f"{c.sums}[1 - {self.phase}]" if on.pair > 1 else f"{c.sums}[{self.phase}]"
        )  # the second phase of a pair comes last
        staging = f"fp::stage<{on.pair}, {on.staged_pitch}>({c.room}, {done}[{self.part}][{self.rows}], {self.phase});"
        if self.together:
            staging = f"fp::stage_group<{on.pair}, {on.staged_pitch}>({c.room}, {done}, {self.part} * 2, {self.rows}, {self.phase});"
        group = self._first_group(str(self.part))
        sums = Sums(staging, self.rows, plan.covered, group, repaired, "#pragma unroll 4", phase=self.phase)
        yield from self.part.over(list(self.epilogue(sums)))
