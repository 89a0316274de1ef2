"""Kernels and programs: the frozen values that lowering makes, passes rewrite and rendering prints.

A kernel's iteration domain is ``rows x cols``. A *row* is one point of `rows`; reductions run over `cols`, reduction loop by
reduction loop, a later reduction loop may use the results (`ReductionResult`) of earlier ones; `row_stores` happen once per row, `stores` once per
(row, col). A kernel that *scans* has a running reduction alone in its last reduction loop; its `stores` use what that is at their column, as a
`Prefix`. A kernel without `cols` is pointwise: only `stores`. A kernel may have an `anchor`, a convolution or a matrix
product whose result at a point its expressions use as a `ReductionResult`; `cols` are then the channels of the convolution or its last axis, rows
of the product or columns that are neighbours, or nothing. The rows of a kernel with reduction loops may be shared by `Team`s of blocks. A kernel may leave
`Partials` of what is reduced over positions: a pointwise one with an anchor or windows, or one with reduction loops, over its rows.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from fusepass.codegen.ir.convolution import Convolution
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Expr, Gather, Load, ReduceOp, may_divide_by_zero, walk
from fusepass.codegen.ir.index import Axis, Bound, Index
from fusepass.codegen.ir.product import Product

_PRODUCTS = ("convolution", "_convolution", "convolution_backward", "mm", "bmm", "addmm", "baddbmm")
ANCHOR_TARGETS = frozenset(f"aten.{name}.default" for name in _PRODUCTS)
"""Library calls that compute; the others make views for them, or convert a layout."""

CONVERSION_TARGET = "aten.clone.default"
"""The library call that only changes a layout, for an anchor that reads the copy; a generated kernel does the same."""

VIEW_TARGET = "aten.as_strided.default"
"""The library call by which the result of another one is seen with an output's shape."""

FEW_POINTS = 2**18
"""Points of a kernel up to which starting it takes longer than what it does."""

Anchor = Convolution | Product


class Role(enum.Enum):
    """Who owns a buffer's memory."""

    INPUT = "input"
    ANCHOR = "anchor"  # written by a library call of the same region before the kernels run
    OUTPUT = "output"
    TEMP = "temp"


@dataclass(frozen=True)
class Buffer:
    """A strided tensor in device memory. Strides are in elements; `shape` and `strides` have the same length."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    role: Role

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.nbytes

    @property
    def extent(self) -> int:
        """Elements from the first to one past the last that a coordinate can address."""
        if self.numel == 0:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))


@dataclass(frozen=True)
class Reduction:
    """`op` over the kernel's cols. `values` has `op.arity` expressions; `dtype` is what it accumulates in and gives.

    One that is `running` has a result at each column, over those up to it.
    """

    name: str
    op: ReduceOp
    values: tuple[Expr, ...]
    dtype: DType
    running: bool = False

    @property
    def types(self) -> tuple[DType, ...]:
        """Of the parts of its result."""
        return tuple(map(self.type_of, range(self.op.parts)))

    def type_of(self, part: int) -> DType:
        """The type of number `part` of a result, or of a partial one: `dtype`, but for positions."""
        return DType.I64 if self.op.gives_position(part) else self.dtype


@dataclass(frozen=True)
class Store:
    """`buffer[index] = value`, converted to the buffer's type."""

    buffer: str
    index: Index
    value: Expr


@dataclass(frozen=True)
class Team:
    """Blocks that share each row of a kernel, all resident at the same time.

    Attributes:
        members: blocks of a team; each has a slice of the columns.
        teams: how many there are at most; they take one row after another in turn.
        exchange: the temporary through which the members show each other their reduction states.
        strip: neighbouring rows that a team takes at once.
    """

    members: int
    teams: int
    exchange: str
    strip: int = 1


@dataclass(frozen=True)
class Partials:
    """What a kernel with an anchor, with windows or with reduction loops leaves of reductions over positions: a result for each piece and channel.

    A piece is a set of positions; the schedule says which. Together the pieces have each position once. Of a matrix product
    samples are the batch, channels the rows, positions the columns; those that are not `Kernel.within` bounds are in no piece. Where there are
    windows, a piece is what a block has of an image, which is one of a sample and a channel. Where there are reduction loops, positions are the points of
    the last rows, samples those of the others, channels the columns; values may use the results of all reduction loops.

    Attributes:
        pieces: their number, as an axis; of each sample where `per_sample`, else of all samples together.
        per_sample: whether the positions of a piece are those of one sample.
        reductions: over the positions of a piece; all of one and the same value, unless there are reduction loops.
        stores: of the results, which may have `ReduceOp.kept` parts; their indices depend on `pieces`, the channel and,
            where `per_sample`, the sample.
        over: how many of the last axes of the rows are reduced over, where there are reduction loops.
    """

    pieces: Axis
    per_sample: bool
    reductions: tuple[Reduction, ...]
    stores: tuple[Store, ...]
    over: int = 0

    @property
    def value(self) -> Expr:
        """What is reduced, where that is one value."""
        return self.reductions[0].values[0]

    @property
    def values(self) -> tuple[Expr, ...]:
        """Everything that is reduced."""
        return tuple(value for reduction in self.reductions for value in reduction.values)


@dataclass(frozen=True)
class OverflowFlag:
    """``buffer[0] = 1`` if `condition` holds at any element of a pointwise kernel; else the buffer stays as it is."""

    buffer: str
    condition: Expr


@dataclass(frozen=True)
class Kernel:
    """One launch over ``rows x cols``; see the module's text. With a product, points that are not `within` bounds do not exist.

    A kernel without an anchor may raise an `OverflowFlag`, and one without, or with a product, may run only `when` the first number of a buffer is
    not zero: what it then writes may have been written before. One that writes the `rest` writes what others have left of buffers. What it stores `once` depends
    on no axis, and on nothing that a kernel of the program writes.
    """

    name: str
    rows: tuple[Axis, ...]
    cols: tuple[Axis, ...]
    reduction_loops: tuple[tuple[Reduction, ...], ...]
    row_stores: tuple[Store, ...]
    stores: tuple[Store, ...]
    origin: tuple[str, ...] = ()
    anchor: Anchor | None = None
    team: Team | None = None
    partials: Partials | None = None
    within: tuple[Bound, ...] = ()
    overflow_flag: OverflowFlag | None = None
    when: str | None = None
    rest: bool = False
    once: tuple[Store, ...] = ()

    @property
    def row_count(self) -> int:
        return prod(axis.size for axis in self.rows)

    @property
    def matrix(self) -> tuple[int, int, int, int]:
        """(pieces, batch, rows, columns) of a kernel's product, of which its own columns are a part; see `Product.apart`."""
        assert isinstance(self.anchor, Product)
        pieces, batch, rows, columns = (axis.size for axis in self.rows)
        several = self.col_count
        return (
            (pieces, batch, rows * several, columns) if self.anchor.apart else (pieces, batch, rows, columns * several)
        )

    @property
    def whole_columns(self) -> bool:
        """Whether some points of a product do not exist, in all rows of a column at once."""
        return bool(self.within) and not any(self.rows[2] in bound.index.axes for bound in self.within)

    @property
    def lines(self) -> tuple[Axis, Axis]:
        """The sample and the channel of a kernel with `Partials`."""
        first = 1 if isinstance(self.anchor, Product) else 0
        return self.rows[first], self.rows[first + 1]

    @property
    def col_count(self) -> int:
        return prod(axis.size for axis in self.cols)

    @property
    def is_pointwise(self) -> bool:
        return not self.reduction_loops

    @property
    def ends_per_element(self) -> bool:
        """Whether anything happens per element behind its reduction loops."""
        return bool(self.stores) or self.partials is not None

    @property
    def reduces_over_rows(self) -> bool:
        """Whether it reduces over its rows beside along them."""
        return self.partials is not None and bool(self.reduction_loops)

    @property
    def scans(self) -> bool:
        """Whether it has a running reduction."""
        return any(reduction.running for reduction in self.reductions)

    @property
    def reductions(self) -> tuple[Reduction, ...]:
        return tuple(reduction for reduction_loop in self.reduction_loops for reduction in reduction_loop)

    @cached_property
    def roots(self) -> tuple[Expr, ...]:
        """Every expression that the kernel evaluates."""
        values = [value for reduction in self.reductions for value in reduction.values]
        values += self.partials.values if self.partials else ()
        values += [self.overflow_flag.condition] if self.overflow_flag else []
        return (*values, *(store.value for store in (*self.row_stores, *self.stores)))

    @cached_property
    def nodes(self) -> tuple[Expr, ...]:
        """Every distinct node of these expressions, operands first."""
        return tuple(walk(*self.roots))

    def loads(self) -> Iterator[Load]:
        """Every distinct load."""
        return (node for node in self.nodes if isinstance(node, Load))

    @cached_property
    def reads(self) -> frozenset[str]:
        others = (*(self.anchor.reads if self.anchor else ()), *([self.when] if self.when else []))
        nodes = (*self.nodes, *walk(*(store.value for store in self.once)))
        return frozenset((*others, *(node.buffer for node in nodes if isinstance(node, Load | Gather))))

    @property
    def checks(self) -> bool:
        """Whether it may find a place outside of its buffer, or an integer to divide by that is zero, because they come from data."""
        gathers = (node for node in self.nodes if isinstance(node, Gather))
        outside = any(place.checked for gather in gathers for place in gather.places)
        return outside or any(map(may_divide_by_zero, self.nodes))

    @cached_property
    def writes(self) -> frozenset[str]:
        partial = self.partials.stores if self.partials else ()
        return frozenset(store.buffer for store in (*self.row_stores, *self.stores, *partial, *self.once))

    @property
    def overflow_flags(self) -> frozenset[str]:
        """The buffers in which it may raise an overflow flag."""
        filling = self.anchor.filling if isinstance(self.anchor, Product) and self.anchor.fills else None
        return frozenset(each.overflow_flag for each in (filling,) if each) | {
            each.buffer for each in (self.overflow_flag,) if each
        }

    @cached_property
    def buffers(self) -> frozenset[str]:
        """Every buffer that a launch needs."""
        return self.reads | self.writes | self.overflow_flags | ({self.team.exchange} if self.team else set())


@dataclass(frozen=True)
class Ref:
    """A buffer as an argument of a library call."""

    buffer: str


@dataclass(frozen=True)
class LibraryCall:
    """An ATen call that runs before the kernels, such as a convolution without its bias.

    `target` is the operator's qualified name (``aten.convolution.default``); `args` are numbers, tuples, None, text or `Ref`.
    `tf32` says that the library is known to round float32 operands to TF32, so that generated code may in its place; `item` which of
    several results is the one.
    """

    result: str
    target: str
    args: tuple[object, ...]
    kwargs: tuple[tuple[str, object], ...] = ()
    tf32: bool = False
    item: int | None = None


@dataclass(frozen=True)
class Program:
    """A region, lowered: library calls in order, then kernels in order, over named buffers.

    `inputs` and `outputs` name buffers in the order of the fused call's arguments and results. One kernel writes each output buffer; what a
    library call made may be an output as it is, or be written over by the last kernel that reads it. `updates` are pairs of an output and an
    input that the caller would have it written over.
    """

    name: str
    buffers: tuple[Buffer, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    calls: tuple[LibraryCall, ...]
    kernels: tuple[Kernel, ...]
    updates: tuple[tuple[str, str], ...] = ()
    _table: dict[str, Buffer] = field(init=False, repr=False, compare=False, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_table", {buffer.name: buffer for buffer in self.buffers})

    def buffer(self, name: str) -> Buffer:
        return self._table[name]

    def unused_name(self, wanted: str) -> str:
        """The name for one more buffer, with what it takes behind it to be no other's."""
        while wanted in self._table:
            wanted += "_"
        return wanted

    def unused_prefix(self, wanted: str) -> str:
        """What no buffer's name begins with: `wanted`, or that and a number."""
        found = (f"{wanted}{suffix}" for suffix in itertools.chain([""], itertools.count()))
        return next(each for each in found if not any(name.startswith(each) for name in self._table))

    def loaded(self, nodes: Iterable[Expr]) -> dict[str, int]:
        """Bytes of each buffer that the loads among `nodes` take: one for each of their points, and no more than it has."""
        points: dict[str, int] = {}
        for node in nodes:
            if isinstance(node, Load):
                points[node.buffer] = points.get(node.buffer, 0) + prod(axis.size for axis in node.index.axes)
        return {
            name: min(self.buffer(name).numel, most) * self.buffer(name).dtype.nbytes for name, most in points.items()
        }

    @cached_property
    def arguments(self) -> tuple[Buffer, ...]:
        """The buffers whose pointers the generated entry takes, in order: read inputs and anchors, outputs, temporaries."""
        used = frozenset[str]().union(*(kernel.buffers for kernel in self.kernels))
        return tuple(buffer for buffer in self.buffers if buffer.name in used)
