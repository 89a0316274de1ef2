"""Writes what a CUDA kernel with a matrix product does with its sums: as threads have them, or laid out in shared memory.

Lines have a $word for each local name; see `fusepass.codegen.render.cuda_product`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fusepass.codegen.ir.crossing import near_step
from fusepass.codegen.ir.expr import Apply, Const, Expr, Gather, Load, Stat, Window, children, walk
from fusepass.codegen.ir.index import Axis
from fusepass.codegen.ir.ops import CHEAP, Op
from fusepass.codegen.ir.product import Arithmetic, Product
from fusepass.codegen.ir.program import Kernel, Program, Role
from fusepass.codegen.ir.vectors import is_vector, split_index
from fusepass.codegen.render.cuda_lines import Lines
from fusepass.codegen.render.cuda_partials import RowStates
from fusepass.codegen.render.cuda_result_vectors import ResultVectors, neighbours_of, stored
from fusepass.codegen.render.printer import Printer, Scope
from fusepass.codegen.render.spelling import C_TYPES, bare, block
from fusepass.codegen.schedule_product import ProductSchedule

_NEIGHBOURS = "$column", "$next"
_TOGETHER = 2, 4, 8  # rows that a warp may take together
_DIRECT_BYTES = 4  # of an element, from which 8 neighbours are a whole sector
_MOST_DIRECT = 16  # of `_work` for what is stored of a sum, as all of a thread's are written out
_MOST_REDUCED = 40  # for what is reduced of one, where columns need no conditions
_COSTLY = 12  # nodes that are as much work as an operation that is not cheap
_STRIP_WORDS = 2  # of 32 columns each, that are reduced together
_ROWS_AT_ONCE = 16  # of results: what the epilogue loads for them is on its way together


class Epilogue:
    """Writes the lines behind a kernel's sums.

    Attributes:
        stat: the sum of a point, rescaled where that is done with all sums of a thread at once.
        ready: what `early` makes of it; the same where there is nothing that depends on the row alone.
    """

    def __init__(
        self, kernel: Kernel, program: Program, plan: ProductSchedule, pointers: dict[str, str], printer: Printer
    ) -> None:
        assert isinstance(kernel.anchor, Product)
        self.kernel, self.product, self.program, self.plan = kernel, kernel.anchor, program, plan
        self.pointers, self.printer, self.index_type = pointers, printer, printer.index_type
        self.pieces, self.batches, self.rows, self.columns = kernel.rows
        self.sum = next(node for node in kernel.nodes if isinstance(node, Stat))
        self.stat = self._rescaled() if self._is_plain else self.sum
        self.ready = self._ready() if self._is_plain else self.stat
        self.lines = Lines(kernel, program, plan, pointers, printer, self.ready) if kernel.cols else None
        self.states = RowStates(kernel, plan, pointers, printer, self._index) if kernel.partials else None

    @property
    def _is_plain(self) -> bool:
        """Whether a thread has its final sums in the order of `multiply_group`, for rows of the result."""
        tiling = self.plan.tiling
        return tiling.groups and not tiling.turned and tiling.m == 1 and self.product.arithmetic is Arithmetic.HALVES

    def _rescaled(self) -> Expr:
        users = [node for node in self.kernel.nodes if self.sum in children(node)]
        if len(users) != 1 or any(root is self.sum for root in self.kernel.roots):
            return self.sum
        (user,) = users
        rescales = isinstance(user, Apply) and user.op is Op.RESCALE and user.args[0] is self.sum
        return user if rescales and self._of_row(children(user)[1]) else self.sum

    def _ready(self) -> Expr:
        """What is computed of the sum, and of what depends on the row alone, before anything else."""
        users: dict[int, list[Expr]] = {}
        for node in self.kernel.nodes:
            for child in children(node):
                users.setdefault(id(child), []).append(node)
        roots = {id(root) for root in self.kernel.roots}
        found: Expr = self.stat
        while id(found) not in roots:
            (user, *others) = users[id(found)]
            if others or not isinstance(user, Apply) or user.op not in CHEAP or user.dtype is not self.stat.dtype:
                break
            if any(arg is not found and not self._of_row(arg) for arg in user.args):
                break
            found = user
        return found

    def _of_row(self, node: Expr) -> bool:
        needs = self.printer.dataflow.needs(node)
        inside = () if self.product.apart else self.kernel.cols
        return self.sum not in needs and not needs & {self.columns, *inside}

    def rescaled(self) -> Iterable[str]:
        """Multiplies a thread's sums, which are those of two rows, with factors that are 1 as a rule."""
        if self.stat is self.sum:
            return
        factor = children(self.stat)[1]
        outside = self._outside()
        along = outside.child()
        places = self._row_axes(along)
        self.printer.expect([factor])
        rescale = f"fp::rescale($sums[0], $down, {bare(along.value(factor))});"
        yield from outside.lines
        yield from self._two_rows([*places, *along.lines, rescale])

    def early(self) -> Iterable[str]:
        """Makes of a thread's sums, which are those of two rows, what can be made of them with what the rows have in common."""
        if self.ready is self.stat:
            return
        outside = self._outside()
        along = outside.child()
        places = self._row_axes(along)
        here = along.child()
        here.bind(self.stat, "$sum")
        self.printer.expect([self.ready])
        value = bare(here.value(self.ready))
        each = ["float& $sum = $sums[0][$across / 2][$down * 2 + $across % 2];", *here.lines, f"$sum = {value};"]
        head = f"for (int $across = 0; $across < {2 * self.plan.tiling.n}; ++$across)"
        inside = [*places, *along.lines, "#pragma unroll", *block(head, each)]
        yield from outside.lines
        yield from self._two_rows(inside)
        yield ""

    def _row_axes(self, along: Scope) -> list[str]:
        """Defines what a row of the product stands for, by lines before those of `along`."""
        apart, several = self.product.apart, self.kernel.col_count
        if not (apart and self.kernel.cols):
            along.define_axis(self.rows, "$row")
            return []
        along.define_axis(self.rows, "$phase")
        along.define_axis(self.kernel.cols[0], "$channel")
        phase = f"$row / {several * apart} * {apart} + $row % {apart}"
        return [
            f"const {self.index_type} $phase = {phase};",
            f"const {self.index_type} $channel = $row / {apart} % {several};",
        ]

    def _outside(self) -> Scope:
        outside = Scope(self.printer)
        outside.define_axis(self.pieces, "$piece" if self.pieces.size > 1 else "0")
        outside.define_axis(self.batches, "$batch" if self.batches.size > 1 else "0")
        return outside

    def _two_rows(self, inside: list[str]) -> Iterable[str]:
        """`inside` for both rows of a thread."""
        rows = self.kernel.matrix[2]
        if rows % self.plan.tiling.rows:
            inside = block(f"if ($row < {rows})", inside)
        row = self._index("$first_row + $Tile::warp_row() + $lane / 4 + $down * 8")
        yield "#pragma unroll"
        yield from block("for (int $down = 0; $down < 2; ++$down)", [f"const {self.index_type} $row = {row};", *inside])

    def laid_out(self) -> Iterable[str]:
        """What the kernel's stores make of the sums: a warp takes 32 neighbours of a row, row by row.

        Where rows lie between the neighbours of others in memory, it takes as many rows together, and fewer neighbours of each.
        """
        if self.lines:
            yield from self.lines.write()
            return
        together = self._rows_between()
        taken = neighbours_of(self.kernel, self.program, self.plan) if together == 1 else None
        if taken is not None:
            vectors = ResultVectors(self.kernel, self.program, self.plan, self.pointers, self.printer, taken)
            yield from vectors.write(self._outside(), self.ready)
        else:
            yield from self._one_by_one(together)
        if self.states:
            yield from self.states.added() if self.plan.tiling.strip else self.states.of_room()

    def _one_by_one(self, together: int) -> Iterable[str]:
        """The same with one result of a row in each thread, of `together` rows at a time."""
        tiling = self.plan.tiling
        down, across = ("$down", "$lane") if together == 1 else (f"($down + $lane % {together})", f"$lane / {together}")
        outside = self._outside()
        # Loads that do not depend on the column or the row may leave the conditions on them.
        along = outside.child()
        along.define_axis(self.columns, "$column")
        here = along.child()
        here.define_axis(self.rows, "$row")
        self.printer.expect(self.kernel.roots)
        here.bind(self.ready, "$sum")
        ahead, stores = (
            list[str](),
            list[str](),
        )  # what is computed where it need not exist, and what is done where it does
        for number, store in enumerate(self.kernel.stores):
            kind = C_TYPES[self.program.buffer(store.buffer).dtype]
            value = bare(here.value(store.value))
            if store.value.dtype is not self.program.buffer(store.buffer).dtype:
                value = f"fp::cast<{kind}>({value})"
            at = f"{self.pointers[store.buffer]}[{here.index(store.index)}]"
            if self._computes_everywhere:
                ahead, here.lines = [*ahead, *here.lines, f"const {kind} {stored(number)} = {value};"], []
                value = stored(number)
            stores.append(f"{at} = {value};")
        here.lines += stores
        place = f"$room[{down} * {tiling.room_pitch} + $across + {across}]"
        if self.kernel.partials is not None and self.kernel.partials.value is not self.ready:
            here.lines.append(f"{place} = {bare(here.value(self.kernel.partials.value))};")
        exists = along.condition(self.kernel.within) if self.kernel.whole_columns else ""
        body = [f"const float $sum = {place};", *here.lines] if here.lines else []
        if self.kernel.within and not exists:
            test = along.child()
            test.define_axis(self.rows, "$row")
            condition = test.condition(self.kernel.within)
            ahead = [body.pop(0), *ahead] if ahead else []
            body = [*ahead, *test.lines, *block(f"if ({condition})", body)]
        if self.rows.size % tiling.rows:
            body = block(f"if ($row < {self.rows.size})", body)
        rows = [f"const {self.index_type} $row = {self._index(f'$first_row + $Tile::warp_row() + {down}')};", *body]
        high, long = tiling.warp_tile[0], tiling.laid_out
        step = "++$down" if together == 1 else f"$down += {together}"
        loop = [
            f"#pragma unroll {_ROWS_AT_ONCE}",
            *block(f"for (int $down = 0; $down < {high}; {step})", rows),
        ]
        inside = [*along.lines, *(block(f"if ({exists})", loop) if exists else loop)]
        if self.columns.size % tiling.columns:
            inside = block(f"if ($column < {self.columns.size})", inside)
        at = self._index(f"$first_column + $Tile::warp_column() + $across + {across}")
        yield from outside.lines
        yield "#pragma unroll 1"
        head = f"for (int $across = 0; $across < {long}; $across += {32 // together})"
        if body:
            yield from block(head, [f"const {self.index_type} $column = {at};", *inside])

    def in_strips(self) -> Iterable[str]:
        """The same where a warp lays its sums out strip by strip."""
        strip = [
            "const int64_t $first_column = int64_t($along) * $Tile::columns + $strip;",
            "__syncwarp();",
            "$Tile::lay_out($room, $sums, $strip);",
            "__syncwarp();",
            *self.laid_out(),
        ]
        yield from self.states.begun() if self.states else ()
        yield "#pragma unroll 1"
        yield from block("for (int $strip = 0; $strip < $Tile::columns; $strip += $Tile::strip)", strip)
        yield from self.states.ended() if self.states else ()

    @property
    def _computes_everywhere(self) -> bool:
        """Whether it is computed for points that do not exist, too: of sums, and of what depends on the row alone.

        A branch would keep the elements of an unrolled loop apart.
        """
        if not self.kernel.within or self.kernel.whole_columns or self.kernel.partials is not None:
            return False
        return self._reads_rows

    def _rows_between(self) -> int:
        """How many rows lie between two neighbours of one row, that row included, where all stores have them so; else 1."""
        steps = {
            tuple(near_step(store.index, axis) for axis in (self.rows, self.columns)) for store in self.kernel.stores
        }
        found = next((int(apart) for beside, apart in steps if beside == 1 and apart in _TOGETHER), 1)
        return found if len(steps) == 1 and self.plan.tiling.warp_tile[0] % found == 0 else 1

    @property
    def is_direct(self) -> bool:
        """Whether threads store the sums that they have: 8 columns of 8 rows at once, which are whole sectors of float32.

        All sums of a thread are written out then, so that is for little to be done with what is stored.
        """
        if not self._is_plain or self.kernel.cols or self._rows_between() > 1:
            return False
        if (
            self.product.runs and self.kernel.within and not self._takes_all
        ):  # rows of the result begin anywhere in a sector
            return False
        if any(self.program.buffer(store.buffer).dtype.nbytes < _DIRECT_BYTES for store in self.kernel.stores):
            return False
        if _work([store.value for store in self.kernel.stores]) > _MOST_DIRECT:
            return False
        most = _MOST_REDUCED if self._takes_all else _MOST_DIRECT
        return self.kernel.partials is None or _work([self.kernel.partials.value]) <= most

    @property
    def _takes_all(self) -> bool:
        """Whether columns that do not exist may be computed and stored like others: they have places of their own in a temporary."""
        if not (self.kernel.whole_columns and self._reads_rows):
            return False
        row = self.columns.size
        least = {self.columns: 1, self.rows: row, self.batches: row * self.rows.size}
        for store in self.kernel.stores:
            strides = {axis: store.index.stride(axis) or 0 for axis in least if axis.size > 1}
            apart = all(stride >= least[axis] for axis, stride in strides.items())
            if self.program.buffer(store.buffer).role is not Role.TEMP or not apart or strides[self.columns] > 1:
                return False
        return True

    @property
    def _reads_rows(self) -> bool:
        """Whether nothing is read but what the rows have in common."""
        return all(self._of_row(node) for node in self.kernel.nodes if isinstance(node, Load | Gather | Window))

    def direct(self) -> Iterable[str]:
        """What the kernel's stores make of a thread's sums, two neighbours of a row after another; see `multiply_group`."""
        outside = self._outside()
        along = outside.child()
        along.define_axis(self.rows, "$row")
        self.printer.expect(self.kernel.roots)
        whole = self._takes_all or not self.kernel.within
        both = self._two_elements(along) if self.columns.size % 2 == 0 and whole else None
        inside = both or [line for number in range(2) for line in self._one_element(along, number)]
        columns = self._index("$first_column + $Tile::warp_column() + $at * 8 + $lane % 4 * 2")
        begin = [f"const {self.index_type} $column = {columns};"]
        begin += [f"const {self.index_type} $next = $column + 1;"] if any("$next" in line for line in inside) else []
        inside, groups = [*begin, *inside], self.plan.tiling.n
        yield from outside.lines
        if self.states is None:
            each = block(f"for (int $at = 0; $at < {groups}; ++$at)", inside)
            yield from self._two_rows([*along.lines, "#pragma unroll", *each])
            return
        words = min(_STRIP_WORDS, groups // 4)
        each = block(f"for (int $at = $across / 8; $at < $across / 8 + {4 * words}; ++$at)", inside)
        rows = self._two_rows([*along.lines, "#pragma unroll", *each, *self.states.own_added(words)])
        yield from self.states.own_begun()
        yield "#pragma unroll"
        strip = [*self.states.own_columns(words), *rows]
        yield from block(f"for (int $across = 0; $across < {8 * groups}; $across += {32 * words})", strip)
        yield from self.states.own_ended()

    def _reduced(self, here: Scope, number: int) -> list[str]:
        """The value to be reduced takes the place of the neighbour's sum."""
        if self.kernel.partials is None:
            return []
        return [f"{self._own_sum(number)} = {bare(here.value(self.kernel.partials.value))};"]

    def _own_sum(self, number: int) -> str:
        return f"$sums[0][$at][$down * 2 + {number}]"

    def _two_elements(self, along: Scope) -> list[str]:
        """The lines for both neighbours, of which there are both or none; a store of both at once where it can be."""
        (lines, first, last), (more, second, at_last) = (self._element(along, number) for number in range(2))
        stores = []
        for store, here, there in zip(self.kernel.stores, first, second, strict=True):
            target = self.pointers[store.buffer]
            lane = Axis("lane", 2)
            if is_vector(split_index(store.index, self.columns, lane), self.columns, lane):
                kind = f"fp::Vec<{C_TYPES[self.program.buffer(store.buffer).dtype]}, 2>"
                values = f"{kind}{{{{{here[1]}, {there[1]}}}}}"
                stores.append(f"*reinterpret_cast<{kind}*>({target} + ({here[0]})) = {values};")
            else:
                stores += [f"{target}[{at}] = {value};" for at, value in (here, there)]
        exist = f"if ($column < {self.columns.size})" if self.columns.size % self.plan.tiling.columns else ""
        if exist and self._reads_rows:  # a branch would keep the elements of the unrolled loop apart
            return [*lines, *more, *(block(exist, stores) if stores else []), *last, *at_last]
        all_lines = [*lines, *more, *stores, *last, *at_last]
        return block(exist, all_lines) if exist else all_lines

    def _one_element(self, along: Scope, number: int) -> list[str]:
        """The lines for one of the neighbours, if it is there."""
        test = along.child()
        test.define_axis(self.columns, _NEIGHBOURS[number])
        conditions = (
            [f"{_NEIGHBOURS[number]} < {self.columns.size}"] if self.columns.size % self.plan.tiling.columns else []
        )
        conditions += [test.condition(self.kernel.within)] if self.kernel.within else []
        lines, stored, last = self._element(along, number)
        for store, (at, value) in zip(self.kernel.stores, stored, strict=True):
            lines.append(f"{self.pointers[store.buffer]}[{at}] = {value};")
        return [*test.lines, *block(f"if ({' && '.join(conditions) or 'true'})", [*lines, *last])]

    def _element(self, along: Scope, number: int) -> tuple[list[str], list[tuple[str, str]], list[str]]:
        """Lines that compute one of the neighbours; index and value of each store; what comes behind the stores."""
        here = along.child()
        here.define_axis(self.columns, _NEIGHBOURS[number])
        here.bind(self.stat, self._own_sum(number))
        stored = []
        for store in self.kernel.stores:
            buffer = self.program.buffer(store.buffer)
            value = bare(here.value(store.value))
            if store.value.dtype is not buffer.dtype:
                value = f"fp::cast<{C_TYPES[buffer.dtype]}>({value})"
            stored.append((here.index(store.index), value))
        last = self._reduced(here, number)
        return here.lines, stored, last

    def _index(self, text: str) -> str:
        return text if self.plan.wide else f"int({text})"


def _work(roots: Sequence[Expr]) -> int:
    """Nodes below `roots`, those that are costly counted as several."""
    done = [node for node in walk(*roots) if not isinstance(node, Const | Stat)]
    return sum(_COSTLY if isinstance(node, Apply) and node.op not in CHEAP else 1 for node in done)
