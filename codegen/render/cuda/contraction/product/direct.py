"""Writes what threads of a CUDA kernel with a matrix product do with their own sums: stored, and reduced, from where they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fusepass.codegen.ir.expr import Apply, Const, Expr, ReductionResult, walk
from fusepass.codegen.ir.index import Axis
from fusepass.codegen.ir.ops import CHEAP
from fusepass.codegen.ir.program import Role, Store
from fusepass.codegen.ir.vectors import is_vector, split_index
from fusepass.codegen.render.cuda.contraction.product.sums import SumsWriter
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import C_TYPES, bare, block

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
        along = outside.child()
        along.define_axis(self.rows, c.row)
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
            each = block(f"for (int {c.at} = 0; {c.at} < {groups}; ++{c.at})", inside)
            yield from self._two_rows([*along.lines, "#pragma unroll", *each])
            return
        # Written out once, for the first strip of sums, whose place the next ones take: all of them together are more instructions than
        # the cache for them holds.
        words = min(_STRIP_WORDS, groups // 4)
        each = block(f"for (int {c.at} = 0; {c.at} < {4 * words}; ++{c.at})", inside)
        rows = self._two_rows([*along.lines, "#pragma unroll", *each, *self.states.own_added(words)])
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
        test = along.child()
        test.define_axis(self.columns, self._column(number))
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
        here = along.child()
        here.define_axis(self.columns, self._column(number))
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
