"""Writes the body of a CUDA kernel whose anchor is a matrix product; `codegen.schedule_product` says how it is laid out."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import astuple
from math import ceil, prod

from fusepass.codegen.ir.digits import few_digits
from fusepass.codegen.ir.product import Arithmetic, Border, Filling, Nested, Operand, Product, parts_of
from fusepass.codegen.ir.program import Kernel, Role
from fusepass.codegen.ir.wanted import wanted
from fusepass.codegen.render.cuda.contraction.product.direct import Direct
from fusepass.codegen.render.cuda.contraction.product.epilogue import Epilogue
from fusepass.codegen.render.cuda.family import Boxes
from fusepass.codegen.render.printer import Printer
from fusepass.codegen.render.spelling import C_TYPES, block
from fusepass.codegen.render.unit import Place
from fusepass.codegen.schedule_product import GROUP, ProductSchedule
from fusepass.codegen.schedule_product.tiles import BOX, Access

_ARITHMETIC = {Arithmetic.TF32_THREE: "tf32_three", Arithmetic.TF32: "tf32", Arithmetic.HALVES: "halves"}
_ALIGNMENT = {False: 16, True: 1024}  # bytes, of shared memory: what a group multiplies lies in patterns of 1024 bytes


def _border(axis: Border) -> str:
    rows, terms = (axis.rows, axis.below, axis.step), (axis.terms, axis.deeper, axis.apart)
    return f"fp::Border<{', '.join(map(str, (axis.size, axis.before, *rows, *terms)))}>"


def boxes_of(kernel: Kernel, plan: ProductSchedule) -> tuple[Boxes, ...]:
    """The operands of a product as the copy engine reads them, where it does; see `TeamMultiplier`."""
    product, tiling, (_, batch, rows, columns) = kernel.anchor, plan.tiling, kernel.matrix
    if not tiling.teams:
        return ()
    assert isinstance(product, Product)
    found = []
    for name, operand, access, count, high in (
        ("left", product.left, plan.left, rows, tiling.rows),
        ("right", product.right, plan.right, columns, tiling.columns),
    ):
        assert isinstance(operand.row, int)
        assert isinstance(operand.inner, int)
        near, far, stride = (
            (product.inner, count, operand.row) if access.inner_first else (count, product.inner, operand.inner)
        )
        matrices = batch if operand.batch else 1
        whole = ceil(near / access.vector) * access.vector  # for a stride that leads nowhere: it must be legal
        strides = (stride if far > 1 else whole, operand.batch if matrices > 1 else whole)
        box = (BOX, high if access.inner_first else BOX)
        found.append(Boxes(name, operand.buffer, operand.offset, (near, far, matrices), strides, box))
    return tuple(found)


class ProductWriter:
    """The lines; `c` has the C names of the kernel's own variables."""

    def __init__(self, kernel: Kernel, plan: ProductSchedule, place: Place) -> None:
        assert isinstance(kernel.anchor, Product)
        self.kernel, self.product, self.plan = kernel, kernel.anchor, plan
        self.program, self.pointers = place.program, place.pointers
        self.index_type = "int64_t" if plan.wide else "int"
        self.printer = Printer(place.names, place.pointers, self.index_type, branches=False)
        self.printer.few = few_digits(kernel, place.program)
        self.batches, self.wanted, self.c = kernel.rows[1], wanted(kernel), place.names.locals
        # What `Direct` and `Epilogue` take, which write what becomes of sums.
        self._of_sums = kernel, place.program, plan, self.printer

    def lines(self) -> Iterable[str]:
        """Of the body."""
        c = self.c
        yield f"extern __shared__ __align__({_ALIGNMENT[self.plan.tiling.groups]}) unsigned char {c.pool}[];"
        _, _, rows, columns = self.kernel.matrix
        yield f"using {c.Left} = {self._operand(self.product.left, self.plan.left, rows)};"
        right = self._operand(self.product.right, self.plan.right, columns)
        yield f"using {c.Right} = {self._in_runs(right)};"
        if self.product.fills and self.product.filling:
            yield f"using {c.Source} = {self._source(self.product.filling)};"
        yield f"using {c.Tile} = {self._multiplier()};"
        yield ""
        if self.plan.tiling.iterations:
            yield from self._by_iterations()
            return
        if self.plan.tiling.teams:
            yield from self._by_teams()
            return
        yield from self._places("blockIdx.x")
        yield from self._starts(moved=True)
        yield ""
        tiling = self.plan.tiling
        yield f"float {c.sums}[{tiling.m}][{tiling.n}][4] = {{}};"
        where = f"{c.left}, {c.right}, {c.first_row}, {c.first_column}, {c.first}, {c.last}"
        direct, run = Direct(*self._of_sums), f"{c.Tile}::run({c.sums}, {c.pool}, {where})"
        if direct.serves:
            yield f"{self._if_wanted()}{run};"
            yield f"const int {c.lane} = threadIdx.x % 32;"
            yield from direct.rescaled()
            yield from direct.write()
            return
        epilogue = Epilogue(*self._of_sums)
        if self.wanted:
            yield f"bool {c.sound} = true;"
            yield f"{self._if_wanted()}{c.sound} = {run};"
        else:
            yield f"const bool {c.sound} = {run};"
        yield f"const int {c.lane} = threadIdx.x % 32;"
        yield from epilogue.rescaled()
        yield from epilogue.early()
        yield f"float* const {c.room} = reinterpret_cast<float*>({c.pool}) + threadIdx.x / 32 * {tiling.room};"
        yield f"{c.Tile}::lay_out({c.room}, {c.sound}, {c.sums}, {where});"
        yield from () if self.kernel.cols else ("__syncwarp();", "")
        yield from epilogue.laid_out()

    def _if_wanted(self) -> str:
        """The head of what is done for tiles of which some point is wanted, where not all are."""
        return f"if ({self._is_wanted()}) " if self.wanted else ""

    def _is_wanted(self) -> str:
        """The condition that some point of the tile is wanted, where not all are."""
        c = self.c
        if self.wanted is None:
            return ""
        index, most = self.wanted.index, list[str]()
        for axis, size, first in zip(
            self.kernel.rows[2:], ("rows", "columns"), (c.first_row, c.first_column), strict=True
        ):
            factor = index.stride(axis) or 0
            furthest = f"({first} + {c.Tile}::{size} - 1)" if factor > 0 else first
            most += [f"{'+' if factor > 0 else '-'} {abs(factor)} * {furthest}"] if factor else []
        return f"{self.index_type}({index.constant}) {' '.join(most)} >= {self.wanted.least}"

    def _by_iterations(self) -> Iterable[str]:
        """The same for blocks that stay, whose groups of warps take one tile after another."""
        c = self.c
        _, long = self.plan.tiles
        yield from self._starts(moved=False)
        yield f"const int64_t {c.first_row} = {c.Tile}::first_row();"
        if self.product.fills and self.product.filling:
            yield f"{c.Tile} {c.tile}({c.pool}, {c.left});"
            yield from self._filled(self.product.filling)
        else:
            yield f"{c.Tile} {c.tile}({c.pool}, {c.left}, {c.right});"
        several = self.batches.size > 1
        lines = [f"const int {c.batch} = {c.number} / {long};"] if several else []
        lines.append(f"const int {c.along} = {c.number}{f' % {long}' if several else ''};")
        lines += self._taken([f"const int64_t {c.first_column} = int64_t({c.along}) * {c.Tile}::columns;"])
        yield "#pragma unroll 1"
        yield from block(
            f"for (int {c.number} = {c.tile}.first(); {c.number} < {c.tile}.end(); {c.number} += {c.Tile}::next())",
            lines,
        )

    def _by_teams(self) -> Iterable[str]:
        """The same for blocks that stay, in which a thread copies, and teams of others take tiles by turns."""
        c = self.c
        count = self.plan.batches * prod(self.plan.tiles)
        head = f"for (int {c.number} = blockIdx.x; {c.number} < {count}; {c.number} += gridDim.x)"
        places, end = [*self._places(c.number)], c.last
        if self.wanted:
            places, end = [*places, f"const int64_t {c.end} = {self._is_wanted()} ? {c.last} : {c.first};"], c.end
        operands = ", ".join((c.left, c.right, *self._matrices()))
        copied = f"{c.tile}.copy({operands}, {c.first_row}, {c.first_column}, {c.first}, {end});"
        copying = ["#pragma unroll 1", *block(head, [*places, copied])]
        yield f"{c.Tile} {c.tile}({c.pool});"
        yield from block(
            f"if ({c.tile}.copies())",
            [f"{c.tile}.leave_registers();", *copying, "return;"],
        )
        yield f"{c.tile}.take_registers();"
        yield "#pragma unroll 1"
        yield from block(head, [*places, f"if (!{c.tile}.takes({c.first}, {end})) continue;", *self._taken()])

    def _taken(self, place: Iterable[str] = ()) -> list[str]:
        """The sums of a tile that blocks take which stay, and what becomes of them; where these are stored directly, behind lines that say the `place`."""
        c, direct = self.c, Direct(*self._of_sums)
        lines = [
            f"float {c.sums}[1][{self.plan.tiling.n}][4];",
            f"{c.tile}.run({c.sums});",
            f"const int {c.lane} = threadIdx.x % 32;",
            *direct.rescaled(),
        ]
        if direct.serves:
            return [*lines, *place, *direct.write()]
        epilogue = Epilogue(*self._of_sums)
        return [*lines, *epilogue.early(), f"float* const {c.room} = {c.tile}.room();", *epilogue.in_strips()]

    def _matrices(self) -> Iterable[str]:
        """Which matrix of each operand the tile is of."""
        for operand in (self.product.left, self.product.right):
            yield self.c.batch if operand.batch and self.batches.size > 1 else "0"

    def _source(self, filling: Filling) -> str:
        """What the right operand is made of, as a type."""
        image = ", ".join(map(str, itertools.chain(*filling.image)))
        aligned = self.plan.aligned or self.program.buffer(filling.source).role is not Role.INPUT
        strides = f"{filling.sample}, {filling.channel}, {str(aligned).lower()}"
        return f"fp::Filling<fp::BorderedImage<{image}>, {strides}>"

    def _filled(self, filling: Filling) -> Iterable[str]:
        """Some of the threads make the right operand, and nothing else."""
        c = self.c
        given = ", ".join(self.pointers[name] for name in (filling.source, *filling.factors, filling.overflow_flag))
        yield from block(f"if ({c.tile}.fills())", [f"{c.tile}.fill({c.Source}{{{given}}});", "return;"])
        yield f"{c.tile}.take_registers();"

    def _operand(self, operand: Operand, access: Access, rows: int) -> str:
        sizes, strides = (rows, self.product.inner), (operand.row, operand.inner)
        how = f"{str(access.inner_first).lower()}, {access.vector}"
        kind = "Operand"
        if any(isinstance(stride, Nested) for stride in strides) or operand.border:
            kind, parts = "NestedOperand", map(parts_of, strides, sizes)
            steps = [", ".join(map(str, itertools.chain(*each))) for each in parts]
            numbers = [*map(str, sizes), *(f"fp::Nested<{self.index_type}, {each}>" for each in steps)]
        else:
            numbers = [*map(str, (*sizes, *strides))]
        found = f"fp::{kind}<{C_TYPES[self.product.dtype]}, {self.index_type}, {', '.join(numbers)}, {how}>"
        borders = [border for border in operand.border if border.is_met]
        return f"fp::BorderedOperand<{', '.join([found, *map(_border, borders)])}>" if borders else found

    def _in_runs(self, operand: str) -> str:
        """The right operand as what its tile takes of it."""
        runs = self.product.runs
        if runs is None or not self.plan.tiling.runs:
            return operand
        outer = ", ".join(map(str, itertools.chain(*(runs.outer or ((1, 0),)))))
        numbers = f"{runs.planes}, {runs.plane}, {runs.taps}, {runs.apart}"
        return f"fp::RunOperand<{operand}, {numbers}, fp::Nested<{self.index_type}, {outer}>>"

    def _multiplier(self) -> str:
        c = self.c
        tiling = self.plan.tiling
        if tiling.iterations:
            assert self.product.runs is not None
            chain = astuple(self.product.runs.chain(tiling.columns)) if tiling.chained else ()
            tiles = ", ".join(map(str, (*self.plan.tiles, self.batches.size, self.product.right.batch, *chain)))
            shape = f"{tiling.n}, {tiling.iterations}, {tiling.stages}, {tiling.strip}"
            shape += f", {c.Source}" if self.product.fills else ""
            return f"fp::TurnMultiplier<{c.Left}, {c.Right}, fp::TurnTiles<{tiles}>, {shape}>"
        if tiling.teams:
            numbers = tiling.teams, tiling.warp_rows // 4, tiling.n, tiling.stages, tiling.strip
            return f"fp::TeamMultiplier<{c.Left}, {c.Right}, {', '.join(map(str, numbers))}>"
        if tiling.runs and self.product.runs:
            slots = tiling.slots(self.product.runs)
            warps = f"{tiling.warp_rows}, {tiling.warp_columns}"
            return f"fp::RunMultiplier<{c.Left}, {c.Right}, {warps}, {tiling.n}, {tiling.stages}, {slots}>"
        kind, turned = ("GroupMultiplier", (str(tiling.turned).lower(),)) if tiling.groups else ("Multiplier", ())
        numbers = (*turned, tiling.warp_rows, tiling.warp_columns, tiling.m, tiling.n, tiling.stages)
        arithmetic = f"fp::Arithmetic::{_ARITHMETIC[self.product.arithmetic]}"
        return f"fp::{kind}<{arithmetic}, {c.Left}, {c.Right}, {', '.join(map(str, numbers))}>"

    def _places(self, number: str) -> Iterable[str]:
        """Which tile of which matrix tile `number` of all is, and which terms of the sums."""
        c = self.c
        plan, product = self.plan, self.product
        high, long = plan.tiles
        count = high * long
        yield f"const fp::TilePlace<{high}, {long}, {GROUP}> {c.place}({number} % {count});"
        yield f"const int64_t {c.first_row} = {c.place}.row * {c.Tile}::rows, {c.first_column} = {c.place}.column * {c.Tile}::columns;"
        batches = self.batches.size
        if batches > 1:
            yield f"const int {c.batch} = {number} / {count} % {batches};"
        if product.pieces > 1:
            yield f"const int {c.piece} = {number} / {count * batches};"
            yield f"const int64_t {c.first} = int64_t({c.piece}) * {product.length};"
            yield f"const int64_t {c.last} = {c.first} + {product.length} < {product.inner} ? {c.first} + {product.length} : {product.inner};"
        else:
            yield f"const int64_t {c.first} = 0, {c.last} = {product.inner};"

    def _starts(self, *, moved: bool) -> Iterable[str]:
        """Where the operands begin, those of the block's matrix where `moved`."""
        c = self.c
        product, batches = self.product, self.batches
        for name, operand in ((c.left, product.left), (c.right, product.right)):
            if product.fills and operand is product.right:
                continue
            start = f" + {operand.offset}" if operand.offset else ""
            batch = f" + int64_t({c.batch}) * {operand.batch}" if moved and operand.batch and batches.size > 1 else ""
            yield f"const {C_TYPES[product.dtype]}* const {name} = {self.pointers[operand.buffer]}{start}{batch};"

    def _index(self, text: str) -> str:
        return text if self.plan.wide else f"int({text})"
