"""Tiles of a matrix product: how the warps of a block share one, and what its panels take of shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from fusepass.codegen.ir.product import PLACE, Arithmetic, Operand, Product, Runs

PANEL_BYTES = 128
BOX = PANEL_BYTES // 2
"""Numbers of 16 bits in a row of a panel."""
PLACE_BYTES = 2 * PLACE
_M, _N = 16, 8  # rows and columns of one instruction of a warp
WARP_ROWS = _M
"""Rows of a warp, where a tiling is plain."""
_SPARE = 8  # numbers between rows of a panel whose rows are neighbours, floats between rows of results
_BARRIER = 8  # bytes
_FACTOR = 4  # of a channel
_MOST_REGISTERS = 255
_SLICES = 4  # of a panel: where there is but one, those without a number are left out
_LEAST_CHAINED = 3  # runs of a tile
_EVERY = tuple(Arithmetic)


@dataclass(frozen=True)
class Access:
    """How an operand is copied: whether inner numbers are neighbours (else rows are), and how many go at once."""

    inner_first: bool
    vector: int


@dataclass(frozen=True)
class Tiling:
    """How the warps of a block share its tile.

    Attributes:
        warp_rows, warp_columns: warps along the rows and along the columns.
        m, n: tiles of 16 rows and of 8 columns of each warp.
        stages: panels in shared memory at a time.
        resident: blocks that a multiprocessor should hold.
        share: of the arithmetic's rate that it reaches: large tiles load less per product.
        groups: whether four warps along the rows multiply together (wgmma), which takes columns from shared memory.
        turned: whether that is done for the transpose: what is said of rows holds for columns, and the other way round.
        runs: whether columns that are neighbours in memory come once for all terms that read places beside each other.
        iterations: groups of four warps that take tiles of their own by turns, in blocks that stay; `stages` are runs then. 0: warps share a tile.
        teams: each has the `warp_rows`, and they take tiles by turns in blocks that stay, to which the copy engine brings panels. 0: threads
            copy what they multiply.
        chained: whether a block's tiles follow each other, so that what two of them read comes once; `stages` are segments then.
        strip: columns of a warp that are laid out at a time; all where 0.
        arithmetics: those it is made for.
    """

    warp_rows: int
    warp_columns: int
    m: int
    n: int
    stages: int
    resident: int
    share: float
    groups: bool = False
    turned: bool = False
    arithmetics: tuple[Arithmetic, ...] = _EVERY
    runs: bool = False
    iterations: int = 0
    teams: int = 0
    strip: int = 0
    chained: bool = False

    @property
    def rows(self) -> int:
        return self._longs * self.warp_columns if self.turned else self._highs * self.warp_rows

    @property
    def columns(self) -> int:
        return self._highs * self.warp_rows if self.turned else self._longs * self.warp_columns

    @property
    def warp_tile(self) -> tuple[int, int]:
        """Rows and columns of one warp."""
        return (self._longs, self._highs) if self.turned else (self._highs, self._longs)

    @property
    def laid_out(self) -> int:
        """Columns of a warp that are laid out at a time."""
        return self.strip or self.warp_tile[1]

    @property
    def is_plain(self) -> bool:
        """Whether warps have 16 rows each, one below the other, and all columns of the tile."""
        return self.groups and not self.turned and self.m == 1 and self.warp_columns == 1

    @property
    def warps_across(self) -> int:
        """Warps beside each other along a row."""
        return self.columns // self.warp_tile[1]

    @property
    def _highs(self) -> int:
        return self.m * _M

    @property
    def _longs(self) -> int:
        return self.n * _N

    @property
    def threads(self) -> int:
        """Threads that multiply."""
        return 32 * self.warp_rows * self.warp_columns * max(self.iterations, self.teams, 1)

    @property
    def room_pitch(self) -> int:
        """Floats from one row of a warp's results to the next, where they are laid out for the stores."""
        return self.laid_out + _SPARE

    @property
    def room(self) -> int:
        """Floats of a warp's results."""
        return self.warp_tile[0] * self.room_pitch

    def least_stages(self, runs: Runs | None) -> int:
        """A group's products run on while the next panel begins, which takes a stage more; so does the next segment of a chain."""
        if self.chained and runs:
            return runs.chain(self.columns).depth + 1
        return 3 if self.groups else 2

    def serves(self, product: Product, left: Access, right: Access) -> bool:
        """Whether it can multiply such operands: a group takes float32 columns from rows along the inner dimension alone."""
        arithmetic = product.arithmetic
        if arithmetic not in self.arithmetics or (self.runs and (product.runs is None or product.pieces > 1)):
            return False
        if self.iterations and product.runs and product.runs.are_parted:
            return False
        if self.chained and not _shares_segments(product.runs, self.columns):
            return False
        if product.fills and not self.chained:
            return False
        if self.teams and (product.runs or not all(map(_in_boxes, (product.left, product.right), (left, right)))):
            return False
        if self.iterations and (left != Access(inner_first=True, vector=PLACE) or product.left.batch):
            return False
        if not self.groups or arithmetic is Arithmetic.HALVES:
            return True
        if arithmetic is Arithmetic.TF32:
            return left.inner_first and right.inner_first
        return left.inner_first and not right.inner_first if self.turned else right.inner_first

    def stage(self, product: Product, left: Access, right: Access) -> int:
        """Bytes of shared memory of one stage: both panels, and low parts of one where a group multiplies these; of `runs`, the rows' panel."""
        if self.runs:
            return self.rows * PANEL_BYTES
        spare = 0 if self.groups and product.arithmetic is Arithmetic.HALVES else _SPARE
        found = sum(
            rows * PANEL_BYTES + (0 if access.inner_first else spare * PANEL_BYTES)
            for access, rows in ((left, self.rows), (right, self.columns))
        )
        if self.groups and product.arithmetic is Arithmetic.TF32_THREE:
            found += PANEL_BYTES * (self.rows if self.turned else self.columns)
        return found

    def slots(self, runs: Runs) -> int:
        """How many runs are in shared memory at a time: one is fetched with the first panel that needs it, `stages` panels or more behind
        the last one that needs the run whose place it takes.
        """
        if self.iterations:
            return self.stages
        depth = PANEL_BYTES // 2

        def are_free(slots: int) -> bool:
            last = [((run - slots + 1) * runs.terms - 1) // depth for run in range(slots, runs.count)]
            return all(each + self.stages <= run * runs.terms // depth for run, each in enumerate(last, slots))

        return next(slots for slots in range(1, runs.count + 1) if are_free(slots))

    def run_bytes(self, runs: Runs) -> int:
        """Bytes of shared memory of all `slots`."""
        more = runs.chain(self.columns).more if self.chained else 0
        return self.slots(runs) * runs.planes * (self.columns + (runs.taps - 1) * runs.apart + more) * PLACE_BYTES

    def staying(self, runs: Runs) -> int:
        """Bytes of the rows' numbers that stay in shared memory where groups take turns."""
        return self.rows * runs.count * runs.terms * 2 if self.iterations else 0

    def registers(self, arithmetic: Arithmetic) -> int:
        """Registers of a thread, roughly: its sums, and numbers on their way to them, of which products of parts have more."""
        sums = 4 * self.m * self.n
        if arithmetic is not Arithmetic.TF32_THREE:
            found = sums + sums // 2 + 64
        else:
            found = 3 * sums + 24 if self.groups else 2 * sums + 128
        return min(found, _MOST_REGISTERS)

    def panels(self, product: Product) -> int:
        """Panels that a tile goes through."""
        return ceil(_terms(product) * product.dtype.nbytes / PANEL_BYTES)

    def depth(self, product: Product) -> int:
        """Terms that are multiplied for each sum, zeros behind the last one among them."""
        panel, terms = PANEL_BYTES // product.dtype.nbytes, _terms(product)
        whole = panel if terms > panel else panel // _SLICES
        return ceil(terms / whole) * whole

    def held(self, product: Product) -> int:
        """Panels in shared memory at a time: no more than there are, unless those of the next tile come, too, and one that is split in advance
        where float32 columns are.
        """
        if self.teams:
            return self.stages
        ahead = self.groups and product.arithmetic is Arithmetic.TF32_THREE
        return min(self.stages, self.panels(product) + ahead)

    def shared(self, stage: int, product: Product) -> int:
        """Bytes of shared memory, `stage` for a panel of both operands: panels and runs, and results once these are done with; beside them
        where warps take turns. Where the product makes its right operand, factors of channels, too.
        """
        runs = product.runs
        rooms = 4 * self.threads // 32 * self.room
        if self.iterations and runs:
            factors = _FACTOR * PLACE * runs.planes if product.fills else 0
            barriers = _BARRIER * 2 * (self.stages + self.iterations)
            return self.staying(runs) + self.run_bytes(runs) + rooms + factors + barriers
        if self.teams:
            return self.stages * stage + rooms + _BARRIER * (2 * self.stages + self.teams)
        if self.runs and runs:
            return max(self.stages * stage + self.run_bytes(runs), rooms)
        return max(self.held(product) * stage, rooms)


def _terms(product: Product) -> int:
    """Terms of a sum, or of a piece of it."""
    return min(product.length, product.inner)


def _in_boxes(operand: Operand, access: Access) -> bool:
    """Whether the copy engine can bring panels of an operand: it takes matrices whose rows begin at multiples of 16 bytes."""
    apart = all(isinstance(stride, int) and stride > 0 for stride in (operand.row, operand.inner))
    return apart and not operand.border and access.vector == PLACE


def _shares_segments(runs: Runs | None, columns: int) -> bool:
    """Whether tiles of a chain share so much that chains were measured to be worth it."""
    return runs is not None and runs.count >= _LEAST_CHAINED and runs.chain(columns).depth > 1


_THREE = (Arithmetic.TF32_THREE,)
_ONE = (Arithmetic.TF32, Arithmetic.HALVES)
_HALVES = (Arithmetic.HALVES,)

TILINGS = (
    Tiling(2, 2, 4, 8, 3, 2, 1.0),  # 128 x 128
    Tiling(1, 4, 4, 4, 4, 2, 0.9),  # 64 x 128
    Tiling(2, 2, 2, 4, 4, 3, 0.8),  # 64 x 64
    Tiling(1, 4, 2, 4, 4, 2, 0.75),  # 32 x 128
    Tiling(4, 1, 2, 4, 4, 2, 0.75),  # 128 x 32
    Tiling(1, 4, 1, 4, 4, 3, 0.6),  # 16 x 128
    # Their shares are measured on an H200, but for those of 64 rows.
    Tiling(8, 1, 2, 16, 3, 1, 1.0, groups=True, arithmetics=_THREE),  # 256 x 128
    Tiling(8, 1, 1, 16, 4, 1, 0.85, groups=True, arithmetics=_THREE),  # 128 x 128
    Tiling(8, 1, 1, 8, 3, 2, 0.9, groups=True, arithmetics=_THREE),  # 128 x 64
    Tiling(4, 1, 1, 8, 3, 3, 0.8, groups=True, arithmetics=_THREE),  # 64 x 64
    Tiling(8, 1, 2, 16, 3, 1, 0.95, groups=True, turned=True, arithmetics=_THREE),  # 128 x 256
    Tiling(4, 2, 2, 8, 4, 1, 0.75, groups=True, turned=True, arithmetics=_THREE),  # 128 x 128
    Tiling(8, 1, 1, 32, 4, 1, 1.0, groups=True, arithmetics=_ONE),  # 128 x 256
    Tiling(16, 1, 1, 16, 4, 1, 0.95, groups=True, arithmetics=_ONE),  # 256 x 128
    Tiling(8, 1, 1, 16, 3, 2, 0.75, groups=True, arithmetics=_ONE),  # 128 x 128
    Tiling(4, 1, 1, 16, 4, 2, 0.6, groups=True, arithmetics=_ONE),  # 64 x 128
    Tiling(4, 1, 1, 16, 3, 3, 0.65, groups=True, arithmetics=_HALVES),  # 64 x 128
    Tiling(8, 1, 1, 8, 4, 2, 0.55, groups=True, arithmetics=_HALVES),  # 128 x 64
    Tiling(16, 1, 1, 8, 4, 1, 0.6, groups=True, arithmetics=_HALVES),  # 256 x 64
    Tiling(8, 1, 1, 32, 4, 1, 1.03, groups=True, arithmetics=_HALVES, teams=1, strip=32),  # 128 x 256
    Tiling(4, 1, 1, 32, 4, 1, 0.9, groups=True, arithmetics=_HALVES, teams=2, strip=64),  # 64 x 256
    Tiling(8, 1, 1, 16, 4, 1, 0.87, groups=True, arithmetics=_HALVES, teams=2, strip=64),  # 128 x 128
    Tiling(4, 1, 1, 16, 7, 1, 0.6, groups=True, arithmetics=_HALVES, teams=2, strip=64),  # 64 x 128
    Tiling(16, 1, 1, 16, 4, 1, 0.95, groups=True, arithmetics=_HALVES, runs=True),  # 256 x 128
    Tiling(8, 1, 1, 16, 4, 2, 1.0, groups=True, arithmetics=_HALVES, runs=True),  # 128 x 128
    Tiling(4, 2, 1, 16, 4, 2, 0.95, groups=True, arithmetics=_HALVES, runs=True),  # 64 x 256
    Tiling(4, 1, 1, 16, 4, 3, 0.9, groups=True, arithmetics=_HALVES, runs=True),  # 64 x 128
    Tiling(4, 1, 1, 32, 4, 1, 1.15, groups=True, arithmetics=_HALVES, runs=True, iterations=2, strip=64),  # 64 x 256
    Tiling(
        4, 1, 1, 32, 4, 1, 1.2, groups=True, arithmetics=_HALVES, runs=True, iterations=2, strip=32, chained=True
    ),  # 64 x 256
)
