"""Writes the body of a CUDA kernel whose anchor is a matrix product; `codegen.schedule_product` says how it is laid out."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from string import Template

from fusepass.codegen.ir.expr import Apply, Const, Op, Stat, walk
from fusepass.codegen.ir.index import Axis
from fusepass.codegen.ir.product import Arithmetic, Nested, Operand, Product, parts_of
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.ir.vectors import is_vector, split_index
from fusepass.codegen.render.printer import Printer, Scope
from fusepass.codegen.render.spelling import C_TYPES, Identifiers, bare, block
from fusepass.codegen.schedule_product import GROUP, ProductSchedule
from fusepass.codegen.schedule_product.tiles import Access

_ARITHMETIC = {Arithmetic.TF32_THREE: "tf32_three", Arithmetic.TF32: "tf32", Arithmetic.HALVES: "halves"}
_ALIGNMENT = {False: 16, True: 1024}  # bytes, of shared memory: what a group multiplies lies in patterns of 1024 bytes
_NEIGHBOURS = "$column", "$next"
_DIRECT_BYTES = 4  # of an element, from which 8 neighbours are a whole sector
_MOST_DIRECT = 16  # nodes of what is done with a sum
_CHEAP = frozenset(
    {Op.ADD, Op.SUB, Op.MUL, Op.NEG, Op.ABS, Op.MAXIMUM, Op.MINIMUM, Op.FMAX, Op.FMIN, Op.WHERE, Op.CAST}
    | {Op.EQ, Op.NE, Op.LT, Op.LE, Op.GT, Op.GE, Op.AND, Op.OR, Op.NOT}
)
_ROWS_AT_ONCE = 8  # of results: what the epilogue loads for them is on its way together
_LOCALS = (
    "pool", "Left", "Right", "Tile", "place", "piece", "batch", "first_row", "first_column", "first", "last",
    "left", "right", "sums", "sound", "room", "lane", "across", "column", "next", "down", "row", "sum",
)  # fmt: skip


def product_body(
    kernel: Kernel, program: Program, plan: ProductSchedule, pointers: dict[str, str], names: Identifiers
) -> tuple[str, ...]:
    """The lines of the body of `kernel`; `pointers` names its buffers, `names` knows the identifiers that are taken."""
    local = {word: names.exact(word) for word in _LOCALS}
    writer = _Writer(kernel, program, plan, pointers, names)
    return tuple(Template(line).substitute(local) for line in writer.lines())


class _Writer:
    """Its lines have a $word for each local name."""

    def __init__(
        self, kernel: Kernel, program: Program, plan: ProductSchedule, pointers: dict[str, str], names: Identifiers
    ) -> None:
        assert isinstance(kernel.anchor, Product)
        self.kernel, self.product, self.program, self.plan, self.pointers = (
            kernel,
            kernel.anchor,
            program,
            plan,
            pointers,
        )
        self.index_type = "int64_t" if plan.wide else "int"
        self.printer = Printer(names, pointers, self.index_type)
        self.pieces, self.batches, self.rows, self.columns = kernel.rows

    def lines(self) -> Iterable[str]:
        yield f"extern __shared__ __align__({_ALIGNMENT[self.plan.tiling.groups]}) unsigned char $pool[];"
        yield f"using $Left = {self._operand(self.product.left, self.plan.left, self.rows)};"
        yield f"using $Right = {self._operand(self.product.right, self.plan.right, self.columns)};"
        yield f"using $Tile = {self._multiplier()};"
        yield ""
        yield from self._places()
        yield ""
        tiling = self.plan.tiling
        yield f"float $sums[{tiling.m}][{tiling.n}][4] = {{}};"
        where = "$left, $right, $first_row, $first_column, $first, $last"
        if self._stores_directly():
            yield f"$Tile::run($sums, $pool, {where});"
            yield "const int $lane = threadIdx.x % 32;"
            yield from self._direct_epilogue()
            return
        yield f"const bool $sound = $Tile::run($sums, $pool, {where});"
        yield f"float* const $room = reinterpret_cast<float*>($pool) + threadIdx.x / 32 * {tiling.room};"
        yield f"$Tile::lay_out($room, $sound, $sums, {where});"
        yield "__syncwarp();"
        yield ""
        yield from self._epilogue()

    def _operand(self, operand: Operand, access: Access, rows: Axis) -> str:
        sizes, strides = (rows.size, self.product.inner), (operand.row, operand.inner)
        how = f"{str(access.inner_first).lower()}, {access.vector}"
        kind = "Operand"
        if any(isinstance(stride, Nested) for stride in strides):
            kind, parts = "NestedOperand", map(parts_of, strides, sizes)
            steps = [", ".join(map(str, itertools.chain(*each))) for each in parts]
            numbers = [*map(str, sizes), *(f"fp::Nested<{self.index_type}, {each}>" for each in steps)]
        else:
            numbers = [*map(str, (*sizes, *strides))]
        return f"fp::{kind}<{C_TYPES[self.product.dtype]}, {self.index_type}, {', '.join(numbers)}, {how}>"

    def _multiplier(self) -> str:
        tiling = self.plan.tiling
        kind, turned = ("GroupMultiplier", (str(tiling.turned).lower(),)) if tiling.groups else ("Multiplier", ())
        numbers = (*turned, tiling.warp_rows, tiling.warp_columns, tiling.m, tiling.n, tiling.stages)
        arithmetic = f"fp::Arithmetic::{_ARITHMETIC[self.product.arithmetic]}"
        return f"fp::{kind}<{arithmetic}, $Left, $Right, {', '.join(map(str, numbers))}>"

    def _places(self) -> Iterable[str]:
        """Which tile of which matrix is the block's, and which terms of the sums."""
        plan, product = self.plan, self.product
        high, long = plan.tiles
        count = high * long
        yield f"const fp::TilePlace<{high}, {long}, {GROUP}> $place(blockIdx.x % {count});"
        yield "const int64_t $first_row = $place.row * $Tile::rows, $first_column = $place.column * $Tile::columns;"
        batches = self.batches.size
        if batches > 1:
            yield f"const int $batch = blockIdx.x / {count} % {batches};"
        if product.pieces > 1:
            yield f"const int $piece = blockIdx.x / {count * batches};"
            yield f"const int64_t $first = int64_t($piece) * {product.length};"
            yield f"const int64_t $last = $first + {product.length} < {product.inner} ? $first + {product.length} : {product.inner};"
        else:
            yield f"const int64_t $first = 0, $last = {product.inner};"
        for name, operand in (("$left", product.left), ("$right", product.right)):
            moved = f" + int64_t($batch) * {operand.batch}" if operand.batch and batches > 1 else ""
            yield f"const {C_TYPES[product.dtype]}* const {name} = {self.pointers[operand.buffer]}{moved};"

    def _epilogue(self) -> Iterable[str]:
        """What the kernel's stores make of the sums: a warp takes 32 neighbours of a row, row by row."""
        tiling = self.plan.tiling
        outside = Scope(self.printer)
        outside.define_axis(self.pieces, "$piece" if self.pieces.size > 1 else "0")
        outside.define_axis(self.batches, "$batch" if self.batches.size > 1 else "0")
        # Loads that do not depend on the column or the row may leave the conditions on them.
        along = outside.child()
        along.define_axis(self.columns, "$column")
        here = along.child()
        here.define_axis(self.rows, "$row")
        self.printer.expect(self.kernel.roots)
        for node in walk(*self.kernel.roots):
            if isinstance(node, Stat):
                here.bind(node, "$sum")
        for store in self.kernel.stores:
            buffer = self.program.buffer(store.buffer)
            value = bare(here.value(store.value))
            if store.value.dtype is not buffer.dtype:
                value = f"fp::cast<{C_TYPES[buffer.dtype]}>({value})"
            here.lines.append(f"{self.pointers[store.buffer]}[{here.index(store.index)}] = {value};")
        body = [f"const float $sum = $room[$down * {tiling.room_pitch} + $across + $lane];", *here.lines]
        if self.kernel.within:
            test = along.child()
            test.define_axis(self.rows, "$row")
            condition = test.condition(self.kernel.within)
            body = [*test.lines, *block(f"if ({condition})", body)]
        if self.rows.size % tiling.rows:
            body = block(f"if ($row < {self.rows.size})", body)
        rows = [f"const {self.index_type} $row = {self._index('$first_row + $Tile::warp_row() + $down')};", *body]
        high, long = tiling.warp_tile
        loop = [
            f"#pragma unroll {_ROWS_AT_ONCE}",
            *block(f"for (int $down = 0; $down < {high}; ++$down)", rows),
        ]
        inside = [*along.lines, *loop]
        if self.columns.size % tiling.columns:
            inside = block(f"if ($column < {self.columns.size})", inside)
        at = self._index("$first_column + $Tile::warp_column() + $across + $lane")
        yield "const int $lane = threadIdx.x % 32;"
        yield from outside.lines
        yield "#pragma unroll 1"
        head = f"for (int $across = 0; $across < {long}; $across += 32)"
        yield from block(head, [f"const {self.index_type} $column = {at};", *inside])

    def _stores_directly(self) -> bool:
        """Whether threads store the sums that they have: 8 columns of 8 rows at once, which are whole sectors of float32.

        All sums of a thread are written out then, so that is for little to be done with each.
        """
        tiling = self.plan.tiling
        if not tiling.groups or tiling.turned or tiling.m > 1 or self.product.arithmetic is not Arithmetic.HALVES:
            return False
        if any(self.program.buffer(store.buffer).dtype.nbytes < _DIRECT_BYTES for store in self.kernel.stores):
            return False
        done = [node for node in walk(*self.kernel.roots) if not isinstance(node, Const | Stat)]
        cheap = all(not isinstance(node, Apply) or node.op in _CHEAP for node in done)
        return cheap and len(done) <= _MOST_DIRECT

    def _direct_epilogue(self) -> Iterable[str]:
        """What the kernel's stores make of a thread's sums, two neighbours of a row after another; see `multiply_group`."""
        outside = Scope(self.printer)
        outside.define_axis(self.pieces, "$piece" if self.pieces.size > 1 else "0")
        outside.define_axis(self.batches, "$batch" if self.batches.size > 1 else "0")
        along = outside.child()
        along.define_axis(self.rows, "$row")
        self.printer.expect(self.kernel.roots)
        both = self._two_elements(along) if self.columns.size % 2 == 0 and not self.kernel.within else None
        inside = both or [line for number in range(2) for line in self._one_element(along, number)]
        columns = self._index("$first_column + $Tile::warp_column() + $across * 8 + $lane % 4 * 2")
        inside = [f"const {self.index_type} $column = {columns}, $next = $column + 1;", *inside]
        head = f"for (int $across = 0; $across < {self.plan.tiling.n}; ++$across)"
        inside = [*along.lines, "#pragma unroll", *block(head, inside)]
        if self.rows.size % self.plan.tiling.rows:
            inside = block(f"if ($row < {self.rows.size})", inside)
        row = self._index("$first_row + $Tile::warp_row() + $lane / 4 + $down * 8")
        yield from outside.lines
        yield "#pragma unroll"
        yield from block("for (int $down = 0; $down < 2; ++$down)", [f"const {self.index_type} $row = {row};", *inside])

    def _two_elements(self, along: Scope) -> list[str]:
        """The lines for both neighbours, of which there are both or none; a store of both at once where it can be."""
        (lines, first), (more, second) = (self._element(along, number) for number in range(2))
        lines = [*lines, *more]
        for store, here, there in zip(self.kernel.stores, first, second, strict=True):
            target = self.pointers[store.buffer]
            lane = Axis("lane", 2)
            if is_vector(split_index(store.index, self.columns, lane), self.columns, lane):
                kind = f"fp::Vec<{C_TYPES[self.program.buffer(store.buffer).dtype]}, 2>"
                values = f"{kind}{{{{{here[1]}, {there[1]}}}}}"
                lines.append(f"*reinterpret_cast<{kind}*>({target} + ({here[0]})) = {values};")
            else:
                lines += [f"{target}[{at}] = {value};" for at, value in (here, there)]
        return (
            block(f"if ($column < {self.columns.size})", lines)
            if self.columns.size % self.plan.tiling.columns
            else lines
        )

    def _one_element(self, along: Scope, number: int) -> list[str]:
        """The lines for one of the neighbours, if it is there."""
        test = along.child()
        test.define_axis(self.columns, _NEIGHBOURS[number])
        conditions = (
            [f"{_NEIGHBOURS[number]} < {self.columns.size}"] if self.columns.size % self.plan.tiling.columns else []
        )
        conditions += [test.condition(self.kernel.within)] if self.kernel.within else []
        lines, stored = self._element(along, number)
        for store, (at, value) in zip(self.kernel.stores, stored, strict=True):
            lines.append(f"{self.pointers[store.buffer]}[{at}] = {value};")
        return [*test.lines, *block(f"if ({' && '.join(conditions) or 'true'})", lines)]

    def _element(self, along: Scope, number: int) -> tuple[list[str], list[tuple[str, str]]]:
        """Lines that compute one of the neighbours; index and value of each store."""
        here = along.child()
        here.define_axis(self.columns, _NEIGHBOURS[number])
        for node in walk(*self.kernel.roots):
            if isinstance(node, Stat):
                here.bind(node, f"$sums[0][$across][$down * 2 + {number}]")
        stored = []
        for store in self.kernel.stores:
            buffer = self.program.buffer(store.buffer)
            value = bare(here.value(store.value))
            if store.value.dtype is not buffer.dtype:
                value = f"fp::cast<{C_TYPES[buffer.dtype]}>({value})"
            stored.append((here.index(store.index), value))
        return here.lines, stored

    def _index(self, text: str) -> str:
        return text if self.plan.wide else f"int({text})"
