"""What threads of a CUDA kernel with a matrix product do with their own sums, from where they are: stored, and reduced; what other ways have in common with that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fusepass.codegen.ir.expr import Apply, Const, Expr, Gather, Load, ReductionResult, Window, children, walk
from fusepass.codegen.ir.index import Axis
from fusepass.codegen.ir.ops import CHEAP, Op
from fusepass.codegen.ir.product import Arithmetic, Product
from fusepass.codegen.ir.program import Kernel, Program, Role, Store
from fusepass.codegen.ir.transpose import near_step
from fusepass.codegen.ir.vectors import is_vector, split_index
from fusepass.codegen.render.cuda.partials import RowStates
from fusepass.codegen.render.printer import Printer, Scope
from fusepass.codegen.render.spelling import C_TYPES, bare, block, loop, where
from fusepass.codegen.schedule_product import ProductSchedule

_TOGETHER = 2, 4, 8  # rows that a warp may take together


class SumsWriter:
    """Knows a kernel's sums, and the rows that a thread has some of.

    Attributes:
        sum: of a point.
        stat: the same, rescaled where that is done with all sums of a thread at once.
        states: what is reduced over the columns; None where nothing is.
    """

    def __init__(self, kernel: Kernel, program: Program, plan: ProductSchedule, printer: Printer) -> None:
        assert isinstance(kernel.anchor, Product)
        self.kernel, self.product, self.program, self.plan = kernel, kernel.anchor, program, plan
        self.pointers, self.printer, self.index_type = printer.pointers, printer, printer.index_type
        self.c = printer.names.locals
        self.pieces, self.batches, self.rows, self.columns = kernel.rows
        self.sum = next(node for node in kernel.nodes if isinstance(node, ReductionResult))
        self.stat = self._rescaled() if self._is_plain else self.sum
        self.states = RowStates(kernel, plan, printer, self._index) if kernel.partials else None

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

    def _of_row(self, node: Expr) -> bool:
        needs = self.printer.dataflow.needs(node)
        inside = () if self.product.apart else self.kernel.cols
        return self.sum not in needs and not needs & {self.columns, *inside}

    @property
    def _reads_rows(self) -> bool:
        """Whether nothing is read but what the rows have in common."""
        return all(self._of_row(node) for node in self.kernel.nodes if isinstance(node, Load | Gather | Window))

    def rescaled(self) -> Iterable[str]:
        """Multiplies a thread's sums, which are those of two rows, with factors that are 1 as a rule."""
        c = self.c
        if self.stat is self.sum:
            return
        factor = children(self.stat)[1]
        outside = self._outside()
        along = outside.child()
        places = self._row_axes(along)
        self.printer.expect([factor])
        rescale = f"fp::rescale({c.sums}[0], {c.down}, {bare(along.value(factor))});"
        yield from outside.lines
        yield from self._two_rows([*places, *along.lines, rescale])

    def _row_axes(self, along: Scope) -> list[str]:
        """Defines what a row of the product stands for, by lines before those of `along`."""
        c = self.c
        apart, several = self.product.apart, self.kernel.col_count
        if not (apart and self.kernel.cols):
            along.define_axis(self.rows, c.row)
            return []
        along.define_axis(self.rows, c.phase)
        along.define_axis(self.kernel.cols[0], c.channel)
        phase = f"{c.row} / {several * apart} * {apart} + {c.row} % {apart}"
        return [
            f"const {self.index_type} {c.phase} = {phase};",
            f"const {self.index_type} {c.channel} = {c.row} / {apart} % {several};",
        ]

    def _outside(self) -> Scope:
        c = self.c
        piece, batch = (c.piece if self.pieces.size > 1 else "0"), (c.batch if self.batches.size > 1 else "0")
        return Scope(self.printer, at={self.pieces: piece, self.batches: batch})

    def over_laid_out(
        self, body: list[str], at: tuple[str, str], steps: tuple[str, int], at_once: int, along: Scope, exists: str
    ) -> Iterable[str]:
        """`body` for each ``row`` and ``column`` that a warp has laid out, `at` (down, across) of its tile, in `steps` along both: a statement, a number.

        `along` has the lines of a column; it has points only where `exists` says so.
        """
        c, tiling = self.c, self.plan.tiling
        (down, across), (high, _), (rows, columns) = at, tiling.warp_tile, steps
        row = self._index(f"{c.first_row} + {c.Tile}::warp_row() + {down}")
        body = [
            f"#pragma unroll {at_once}",
            *block(
                f"for (int {c.down} = 0; {c.down} < {high}; {rows})",
                [f"const {self.index_type} {c.row} = {row};", *body],
            ),
        ]
        inside = [*along.lines, *where(body, exists)]
        if self.columns.size % tiling.columns:
            inside = block(f"if ({c.column} < {self.columns.size})", inside)
        column = self._index(f"{c.first_column} + {c.Tile}::warp_column() + {c.across} + {across}")
        yield "#pragma unroll 1"
        yield from block(
            f"for (int {c.across} = 0; {c.across} < {tiling.laid_out}; {c.across} += {columns})",
            [f"const {self.index_type} {c.column} = {column};", *inside],
        )

    def _two_rows(self, inside: list[str]) -> Iterable[str]:
        """`inside` for both rows of a thread."""
        c = self.c
        rows = self.kernel.matrix[2]
        if rows % self.plan.tiling.rows:
            inside = block(f"if ({c.row} < {rows})", inside)
        row = self._index(f"{c.first_row} + {c.Tile}::warp_row() + {c.lane} / 4 + {c.down} * 8")
        yield from loop(c.down, 2, [f"const {self.index_type} {c.row} = {row};", *inside])

    def _rows_between(self) -> int:
        """How many rows lie between two neighbours of one row, that row included, where all stores have them so; else 1."""
        steps = {
            tuple(near_step(store.index, axis) for axis in (self.rows, self.columns)) for store in self.kernel.stores
        }
        found = next((int(apart) for beside, apart in steps if beside == 1 and apart in _TOGETHER), 1)
        return found if len(steps) == 1 and self.plan.tiling.warp_tile[0] % found == 0 else 1

    def _index(self, text: str) -> str:
        return text if self.plan.wide else f"int({text})"


_LEAST_BYTES = 4  # of an element, from which 8 neighbours are a whole sector
_MOST_STORED = 16  # of `_work` for what is stored of a sum, as all of a thread's are written out
_MOST_REDUCED = 40  # for what is reduced of one, where columns need no conditions
_COSTLY = 12  # nodes that are as much work as an operation that is not cheap
_STRIP_WORDS = 2  # of 32 columns each, that are reduced together


class Direct(SumsWriter):
    """Writes the lines behind a kernel's sums where threads store those that they have."""

    @property
    def serves(self) -> bool:
        """Whether threads store the sums that they have: 8 columns of 8 rows at once, which are whole sectors of float32.

        All sums of a thread are written out then, so that is for little to be done with what is stored.
        """
        if not self._is_plain or self.kernel.cols or self._rows_between() > 1:
            return False
        # Else rows of the result begin anywhere in a sector.
        if self.product.runs and self.kernel.within and not self._takes_all:
            return False
        if any(self.program.buffer(store.buffer).dtype.nbytes < _LEAST_BYTES for store in self.kernel.stores):
            return False
        if _work([store.value for store in self.kernel.stores]) > _MOST_STORED:
            return False
        most = _MOST_REDUCED if self._takes_all else _MOST_STORED
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
            if self.program.buffer(store.buffer).role is not Role.TEMP or not apart or strides.get(self.columns, 1) > 1:
                return False
        return True

    def write(self) -> Iterable[str]:
        """What the kernel's stores make of a thread's sums, two neighbours of a row after another; see `multiply_group`."""
        c = self.c
        outside = self._outside()
        along = outside.child({self.rows: c.row})
        self.printer.expect(self.kernel.roots)
        whole = self._takes_all or not self.kernel.within
        if self.columns.size % 2 == 0 and whole:
            inside, needs_next = self._two_elements(along)
        else:
            (first, _), (second, needs_next) = (self._one_element(along, number) for number in range(2))
            inside = [*first, *second]
        strip = f"{c.across} + " if self.states else ""
        columns = self._index(f"{c.first_column} + {c.Tile}::warp_column() + {strip}{c.at} * 8 + {c.lane} % 4 * 2")
        begin = [f"const {self.index_type} {c.column} = {columns};"]
        begin += [f"const {self.index_type} {c.next} = {c.column} + 1;"] if needs_next else []
        inside, groups = [*begin, *inside], self.plan.tiling.n
        yield from outside.lines
        if self.states is None:
            yield from self._two_rows([*along.lines, *loop(c.at, groups, inside)])
            return
        # Written out once, for the first strip of sums, whose place the next ones take: all of them together are more instructions than
        # the cache for them holds.
        words = min(_STRIP_WORDS, groups // 4)
        each = loop(c.at, 4 * words, inside)
        rows = self._two_rows([*along.lines, *each, *self.states.own_added(words)])
        yield from self.states.own_begun()
        yield "#pragma unroll 1"
        lines = [*self.states.own_columns(words), *rows, f"fp::next_strip<{4 * words}>({c.sums}[0]);"]
        yield from block(f"for (int {c.across} = 0; {c.across} < {8 * groups}; {c.across} += {32 * words})", lines)
        yield from self.states.own_ended()

    def _reduced(self, here: Scope, number: int) -> list[str]:
        """The value to be reduced takes the place of the neighbour's sum."""
        if self.kernel.partials is None:
            return []
        return [f"{self._own_sum(number)} = {bare(here.value(self.kernel.partials.value))};"]

    def _own_sum(self, number: int) -> str:
        c = self.c
        return f"{c.sums}[0][{c.at}][{c.down} * 2 + {number}]"

    def _column(self, number: int) -> str:
        """Of one of the neighbours."""
        return self.c.next if number else self.c.column

    def _two_elements(self, along: Scope) -> tuple[list[str], bool]:
        """The lines for both neighbours, of which there are both or none, with a store of both at once where it can be; whether they need
        the second one's column."""
        (one, first, last), (other, second, at_last) = (self._element(along, n, both=True) for n in range(2))
        stores = []
        for store, here, there in zip(self.kernel.stores, first, second, strict=True):
            target = self.pointers[store.buffer]
            if self._is_pair(store):
                kind = f"fp::Vec<{C_TYPES[self.program.buffer(store.buffer).dtype]}, 2>"
                values = f"{kind}{{{{{here[1]}, {there[1]}}}}}"
                stores.append(f"*reinterpret_cast<{kind}*>({target} + ({here[0]})) = {values};")
            else:
                stores += [f"{target}[{at}] = {value};" for at, value in (here, there)]
        exist = f"if ({self.c.column} < {self.columns.size})" if self.columns.size % self.plan.tiling.columns else ""
        if exist and self._reads_rows:  # a branch would keep the elements of the unrolled loop apart
            lines = [*one.lines, *other.lines, *(block(exist, stores) if stores else []), *last, *at_last]
        else:
            lines = [*one.lines, *other.lines, *stores, *last, *at_last]
            lines = block(exist, lines) if exist else lines
        return lines, other.reads(self.columns)

    def _is_pair(self, store: Store) -> bool:
        """Whether two neighbours are stored at once."""
        lane = Axis("lane", 2)
        return is_vector(split_index(store.index, self.columns, lane), self.columns, lane)

    def _one_element(self, along: Scope, number: int) -> tuple[list[str], bool]:
        """The lines for one of the neighbours, if it is there, and whether they need its column."""
        test = along.child({self.columns: self._column(number)})
        partial = bool(self.columns.size % self.plan.tiling.columns)
        conditions = [f"{self._column(number)} < {self.columns.size}"] if partial else []
        conditions += [test.condition(self.kernel.within)] if self.kernel.within else []
        here, stored, last = self._element(along, number)
        lines = here.lines
        for store, (at, value) in zip(self.kernel.stores, stored, strict=True):
            lines.append(f"{self.pointers[store.buffer]}[{at}] = {value};")
        lines = [*test.lines, *block(f"if ({' && '.join(conditions) or 'true'})", [*lines, *last])]
        return lines, partial or test.reads(self.columns) or here.reads(self.columns)

    def _element(
        self, along: Scope, number: int, *, both: bool = False
    ) -> tuple[Scope, list[tuple[str, str]], list[str]]:
        """The scope that computes one of the neighbours; index and value of each store; what comes behind the stores. The second of two that
        are stored at once has no index."""
        here = along.child({self.columns: self._column(number)})
        here.bind(self.stat, self._own_sum(number), spare=3)
        stored = []
        for store in self.kernel.stores:
            value = here.converted(store.value, self.program.buffer(store.buffer).dtype)
            stored.append(("" if both and number and self._is_pair(store) else here.index(store.index), value))
        last = self._reduced(here, number)
        return here, stored, last


def _work(roots: Sequence[Expr]) -> int:
    """Nodes below `roots`, those that are costly counted as several."""
    done = [node for node in walk(*roots) if not isinstance(node, Const | ReductionResult)]
    return sum(_COSTLY if isinstance(node, Apply) and node.op not in CHEAP else 1 for node in done)
