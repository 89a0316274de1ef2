"""Symbolic tensors: a shape, an element type and a function from coordinates to the scalar expression there.

Views compose coordinate functions, pointwise operators compose expressions; nothing is materialised until a reduction or an
output asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from fusepass.codegen.ir.anchor_format import AnchorFormat
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Apply, Builder, Const, Expr, Masked, Op, ReduceOp, walk
from fusepass.codegen.ir.fitting import fits
from fusepass.codegen.ir.index import Axis, Index, axis_index, contiguous_strides, delinearize, linear
from fusepass.codegen.ir.program import Buffer, Kernel, LibraryCall, Reduction, Role, Store

Coordinates = tuple[Index, ...]

DTYPES: dict[torch.dtype, DType] = {
    torch.bool: DType.BOOL,
    torch.uint8: DType.U8,
    torch.int8: DType.I8,
    torch.int16: DType.I16,
    torch.int32: DType.I32,
    torch.int64: DType.I64,
    torch.float16: DType.F16,
    torch.bfloat16: DType.BF16,
    torch.float32: DType.F32,
    torch.float64: DType.F64,
}
TORCH = {ours: theirs for theirs, ours in DTYPES.items()}


class Unsupported(Exception):
    """Raised inside lowering for what the kernel IR cannot express; `lower` turns it into a refusal."""


def dtype_of(torch_dtype: torch.dtype) -> DType:
    """The IR's name of `torch_dtype`; raises `Unsupported` for complex, quantised and 8-bit float types."""
    found = DTYPES.get(torch_dtype)
    if found is None:
        raise Unsupported(f"element type {torch_dtype} has no generated code")
    return found


_LOADED = 2  # nodes of what is loaded, and maybe widened

WORK_OF_A_BYTE = 14
"""Instructions of a GPU's threads in the time in which its memory takes and gives a byte."""


@dataclass(frozen=True, eq=False)
class Tensor:
    """A value in lowering. `at(coordinates)` gives an expression of type ``dtype.compute``."""

    shape: tuple[int, ...]
    dtype: DType
    at: Callable[[Coordinates], Expr]
    windowed: bool = False  # reads its operand through a window, so that reading it twice costs twice

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def element(self) -> Expr:
        """That at an axis for each dimension: how one of the tensor's elements is made."""
        return self.at(points(self.shape))


@dataclass
class Context:
    """What lowering one region accumulates."""

    builder: Builder = field(default_factory=Builder)
    buffers: list[Buffer] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    calls: list[LibraryCall] = field(default_factory=list)
    stored: dict[Tensor, str] = field(default_factory=dict)  # tensors that lie in memory, and where
    anchor_format: AnchorFormat = AnchorFormat.CALLER
    tf32: bool = False  # whether the library rounds the operands of a float32 convolution
    cuda: bool = False  # whether the region runs on a GPU
    wide: bool = False  # whether variances are kept in double
    _made: int = 0  # axes of `axes`
    _kept: dict[Tensor, Tensor] = field(default_factory=dict)

    def axes(self, shape: Sequence[int]) -> tuple[Axis, ...]:
        """An axis for each dimension, equal to no other one: what is read at it is to be found again, and replaced."""
        first = self._made
        self._made += len(shape)
        return tuple(Axis(f"at{number}", size) for number, size in enumerate(shape, first))

    def tensor(
        self, shape: Sequence[int], dtype: DType, at: Callable[[Coordinates], Expr], *, windowed: bool = False
    ) -> Tensor:
        """A tensor whose coordinate function is remembered, so shared values are built once."""
        known: dict[Coordinates, Expr] = {}

        def remembered(coordinates: Coordinates) -> Expr:
            found = known.get(coordinates)
            if found is None:
                found = known[coordinates] = at(coordinates)
            return found

        return Tensor(tuple(shape), dtype, remembered, windowed)

    def add_buffer(self, name: str, dtype: DType, shape: Sequence[int], strides: Sequence[int], role: Role) -> Buffer:
        taken = {buffer.name for buffer in self.buffers}
        unique, number = name, 1
        while unique in taken:
            number += 1
            unique = f"{name}_{number}"
        buffer = Buffer(unique, dtype, tuple(shape), tuple(strides), role)
        self.buffers.append(buffer)
        return buffer

    def read(self, buffer: Buffer) -> Tensor:
        """The tensor stored in `buffer`; halves are widened as they are read."""

        def at(coordinates: Coordinates) -> Expr:
            element = self.builder.load(buffer.name, linear(coordinates, buffer.strides), buffer.dtype)
            return self.builder.cast(element, buffer.dtype.compute)

        return self.tensor(buffer.shape, buffer.dtype, at)

    def constant(self, value: float | int | bool, shape: Sequence[int], dtype: DType, *, exact: bool = False) -> Tensor:
        """A tensor with one value; `exact` keeps digits that a half has not, as products with a number do."""
        if dtype.compute is not dtype and not exact:
            value = torch.tensor(value, dtype=TORCH[dtype]).item()  # as PyTorch rounds it, before a comparison say
        node = self.builder.const(value, dtype.compute)
        return self.tensor(shape, dtype, lambda _: node)

    def cast(self, tensor: Tensor, dtype: DType) -> Tensor:
        if tensor.dtype is dtype:
            return tensor
        return self.tensor(
            tensor.shape, dtype, lambda c: self.builder.cast(tensor.at(c), dtype.compute), windowed=tensor.windowed
        )

    def rounded(self, tensor: Tensor) -> Tensor:
        """`tensor`, a half in its compute type, with the values that memory would hold; what has none but these stays as it is."""
        builder, dtype = self.builder, tensor.dtype

        def at(c: Coordinates) -> Expr:
            value = tensor.at(c)
            return value if fits(value, dtype) else builder.cast(builder.cast(value, dtype), dtype.compute)

        return self.tensor(tensor.shape, dtype, at, windowed=tensor.windowed)

    def pointwise(self, op: Op, operands: Sequence[Tensor], dtype: DType) -> Tensor:
        """`op` element by element over the broadcast shape; operands are already of the type `op` computes in."""
        shape = broadcast_shape([operand.shape for operand in operands])

        def at(coordinates: Coordinates) -> Expr:
            args = [operand.at(broadcast(coordinates, operand.shape)) for operand in operands]
            return self.builder.apply(op, *args, dtype=dtype.compute)

        return self.tensor(shape, dtype, at, windowed=any(operand.windowed for operand in operands))

    def reshape(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        if tuple(shape) == tensor.shape:
            return tensor
        strides = contiguous_strides(shape)

        def at(coordinates: Coordinates) -> Expr:
            return tensor.at(delinearize(linear(coordinates, strides), tensor.shape))

        return self.tensor(shape, tensor.dtype, at, windowed=tensor.windowed)

    def materialize(self, tensor: Tensor, name: str, origin: str) -> Tensor:
        """`tensor` computed once into a temporary of its own."""
        buffer = self.add_buffer(name, tensor.dtype, tensor.shape, contiguous_strides(tensor.shape), Role.TEMP)
        self.store(tensor, buffer, origin)
        return self.read(buffer)

    def keep(self, tensor: Tensor, name: str, origin: str) -> None:
        """`materialize` it, unless it is loaded as it is, for who asks for what is `kept`."""
        if tensor not in self._kept and sum(1 for _ in walk(tensor.element)) > _LOADED:
            self._kept[tensor] = self.materialize(tensor, name, origin)

    def kept(self, tensor: Tensor) -> Tensor:
        """`tensor` in a temporary, if there is one, or itself."""
        return self._kept.get(tensor, tensor)

    def store(self, tensor: Tensor, buffer: Buffer, origin: str) -> None:
        """A pointwise kernel that writes `tensor` to `buffer`."""
        axes, coordinates = domain(tensor.shape), points(tensor.shape)
        value = tensor.at(coordinates)
        moved = buffer.dtype.is_half and value.dtype is buffer.dtype.compute and self._as_loaded(value, buffer.dtype)
        store = Store(buffer.name, linear(coordinates, buffer.strides), moved or value)
        self.kernels.append(Kernel(f"{buffer.name}_kernel", axes, (), (), (), (store,), (origin,)))

    def _as_loaded(self, value: Expr, dtype: DType) -> Expr | None:
        """`value` as a half that is only moved, not widened and rounded, which keeps the bits of a NaN; None where it is computed."""
        builder = self.builder
        match value:
            case Apply(Op.CAST, (source,)) if source.dtype is dtype:
                return source
            case Const(number):
                return builder.const(number, dtype)
            case Masked(mask, inside, other):
                parts = [self._as_loaded(part, dtype) for part in (inside, other)]
                return None if None in parts else builder.masked(mask, *parts)  # type: ignore[arg-type]
            case Apply(Op.WHERE, (condition, *chosen)):
                parts = [self._as_loaded(part, dtype) for part in chosen]
                return None if None in parts else builder.apply(Op.WHERE, condition, *parts)  # type: ignore[arg-type]
            case _:
                return value if value.dtype is dtype else None

    def reduce(
        self, op: ReduceOp, operands: Sequence[Tensor], dims: Sequence[int], accumulate: DType, origin: str
    ) -> tuple[Tensor, ...]:
        """`op` over `dims` of the operands (all of one shape); one result per part, with `dims` kept at size 1.

        Part 1 of ARGMAX and ARGMIN is an int64 position; every other part has type `accumulate`.
        """
        shape = operands[0].shape
        axes = domain(shape)
        coordinates = tuple(axis_index(axis) for axis in axes)
        cols = tuple(axis for number, axis in enumerate(axes) if number in dims)
        rows = tuple(axis for number, axis in enumerate(axes) if number not in dims)
        kept = tuple(1 if number in dims else size for number, size in enumerate(shape))
        strides = contiguous_strides(kept)
        number = sum(len(kernel.reductions) for kernel in self.kernels)
        reduction = Reduction(f"r{number}", op, tuple(operand.at(coordinates) for operand in operands), accumulate)
        stores, results = [], []
        for part, dtype in enumerate(reduction.types):
            buffer = self.add_buffer(f"{origin.split('.')[0]}_{number}_{part}", dtype, kept, strides, Role.TEMP)
            where = linear([c if d not in dims else Index() for d, c in enumerate(coordinates)], strides)
            stores.append(Store(buffer.name, where, self.builder.reduction_result(reduction.name, part, dtype)))
            results.append(self.read(buffer))
        self.kernels.append(
            Kernel(f"{reduction.name}_kernel", rows, cols, ((reduction,),), tuple(stores), (), (origin,))
        )
        return tuple(results)

    def scan(
        self,
        op: ReduceOp,
        operands: Sequence[Tensor],
        dim: int,
        accumulate: DType,
        dtypes: Sequence[DType],
        origin: str,
        finish: Callable[..., tuple[Expr, ...]] = lambda *parts: parts,
    ) -> tuple[Tensor, ...]:
        """`op` over the elements of the operands (all of one shape) up to each one along `dim`: what `finish` makes of its parts, as `dtypes`."""
        shape = operands[0].shape
        axes, strides = domain(shape), contiguous_strides(shape)
        coordinates = tuple(axis_index(axis) for axis in axes)
        number = sum(len(kernel.reductions) for kernel in self.kernels)
        reduction = Reduction(
            f"r{number}", op, tuple(operand.at(coordinates) for operand in operands), accumulate, running=True
        )
        parts = [
            self.builder.prefix(reduction.name, part, coordinates[dim], dtype)
            for part, dtype in enumerate(reduction.types)
        ]
        buffers = [self.add_buffer(origin, dtype, shape, strides, Role.TEMP) for dtype in dtypes]
        stores = []
        for buffer, value in zip(buffers, finish(*parts), strict=True):
            wanted = buffer.dtype.compute
            value = value if value.dtype is wanted else self.builder.cast(value, wanted)
            stores.append(Store(buffer.name, linear(coordinates, strides), value))
        rows = tuple(axis for axis in axes if axis is not axes[dim])
        name = f"{reduction.name}_kernel"
        self.kernels.append(Kernel(name, rows, (axes[dim],), ((reduction,),), (), tuple(stores), (origin,)))
        return tuple(map(self.read, buffers))


def domain(shape: Sequence[int]) -> tuple[Axis, ...]:
    """One axis per dimension of `shape`; a scalar gets one axis of size 1."""
    return tuple(Axis(f"d{number}", size) for number, size in enumerate(shape)) or (Axis("d0", 1),)


def points(shape: Sequence[int]) -> Coordinates:
    """The coordinates, in a tensor of `shape`, of the points of its `domain`."""
    return tuple(map(axis_index, domain(shape)[: len(shape)]))


def broadcast_shape(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape that `shapes` broadcast to; PyTorch has checked that they do (its own function imports SymPy)."""
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(next((size for size in sizes if size != 1), 1) for sizes in zip(*padded, strict=True))


def broadcast(coordinates: Coordinates, shape: Sequence[int]) -> Coordinates:
    """The coordinates in an operand of `shape` of a point of the broadcast result."""
    skipped = len(coordinates) - len(shape)
    return tuple(Index() if size == 1 else index for index, size in zip(coordinates[skipped:], shape, strict=True))
