"""Reference interpreter of kernel programs on numpy arrays: the oracle for generated code and for IR passes.

Floating-point values are float64 from load to store, whatever their type in the program, so that the result is what
exact arithmetic would give, and so are temporaries of float32: two kernels that compute the same see no difference between it and what one of them
stored. Only casts to a narrower type round, and what an anchor rounds its operands to. Integers and booleans keep their types and wrap.

A buffer is its memory: a flat array of `Buffer.extent` elements. numpy has no bfloat16, so such buffers are uint16
arrays of bit patterns; `decode` and `encode` convert.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fusepass.codegen.ir.convolution import Convolution, Pooling, Precision
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import (
    Apply,
    Const,
    Expr,
    Gather,
    Load,
    Masked,
    Op,
    Position,
    Prefix,
    ReduceOp,
    ReductionResult,
    Window,
)
from fusepass.codegen.ir.index import Axis, Bound, FloorDiv, Index
from fusepass.codegen.ir.product import PLACE, Arithmetic, Filling, Operand, Product, Stride, parts_of
from fusepass.codegen.ir.program import Buffer, Kernel, Partials, Program, Role, Store
from fusepass.codegen.schedule_convolution.tiles import dimensions
from tests.support.numpy_ops import APPLY, REDUCE, RUNNING, Array, tf32

STORAGE: dict[DType, type[np.generic]] = {
    DType.BOOL: np.bool_,
    DType.U8: np.uint8,
    DType.I8: np.int8,
    DType.I16: np.int16,
    DType.I32: np.int32,
    DType.I64: np.int64,
    DType.F16: np.float16,
    DType.BF16: np.uint16,
    DType.F32: np.float32,
    DType.F64: np.float64,
}
_POISON = 0xA5


def interpret(program: Program, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Every output and temporary of `program` as memory after its kernels ran on `inputs`.

    `inputs` has the memory of each input and of each library call's result (calls are not run). What no kernel
    writes keeps `poisoned` memory. Raises AssertionError where an element is read out of range or written twice.
    """
    memory = {
        buffer.name: inputs[buffer.name].copy() if buffer.role in (Role.INPUT, Role.ANCHOR) else poisoned(buffer)
        for buffer in program.buffers
    }
    wide = [buffer.name for buffer in program.buffers if buffer.role is Role.TEMP and buffer.dtype is DType.F32]
    memory |= {name: memory[name].astype(np.float64) for name in wide}
    with np.errstate(all="ignore"):
        for kernel in program.kernels:
            _Run(program, kernel, memory).run()
        memory |= {name: memory[name].astype(np.float32) for name in wide}
    return {b.name: memory[b.name] for b in program.buffers if b.role is Role.TEMP or b.name in program.outputs}


def poisoned(buffer: Buffer) -> Array:
    """Memory for `buffer` in which everything unwritten shows."""
    raw = np.full(buffer.extent * buffer.dtype.nbytes, _POISON, np.uint8)
    return raw.view(STORAGE[buffer.dtype]) if buffer.dtype is not DType.BOOL else np.ones(buffer.extent, np.bool_)


def decode(memory: Array, dtype: DType) -> Array:
    """Stored elements as values: floats as float64, the rest unchanged."""
    if dtype is DType.BF16:
        memory = (memory.astype(np.uint32) << 16).view(np.float32)
    return memory.astype(np.float64) if dtype.is_float else memory


def encode(values: Array, dtype: DType) -> Array:
    """Values as stored elements, rounded to nearest even. Halves are rounded from float32, as kernels do."""
    if dtype is DType.BF16:
        rounded = torch.from_numpy(np.atleast_1d(values).astype(np.float32)).to(torch.bfloat16)
        bits: Array = rounded.view(torch.int16).numpy().view(np.uint16)
        return bits.reshape(values.shape)
    if dtype is DType.F16:
        return values.astype(np.float32).astype(np.float16)
    return _convert(values, dtype)


def _convert(values: Array, dtype: DType) -> Array:
    if dtype is DType.BOOL:
        return values != 0
    if dtype.is_int and values.dtype.kind == "f":
        values = values.astype(np.int64)
    return values.astype(STORAGE[dtype])


def _value(values: Array, dtype: DType) -> Array:
    """`values` as the interpreter holds a value of type `dtype`."""
    return values.astype(np.float64) if dtype.is_float else _convert(values, dtype)


def _reduced(op: ReduceOp, values: Array, real: Array) -> tuple[Array, ...]:
    """What `op` makes of those `values` along the last axis that are `real`."""
    if real.all():
        return REDUCE[op](values)
    lines = zip(values.reshape(-1, values.shape[-1]), real.reshape(-1, real.shape[-1]), strict=True)
    each = [REDUCE[op](line[there]) for line, there in lines]
    return tuple(np.array(part).reshape(values.shape[:-1]) for part in zip(*each, strict=True))


def _along(stride: Stride, at: Array, count: int) -> Array:
    """Where elements `at` of a dimension of `count` stand."""
    found = np.zeros_like(at)
    for size, step in reversed(parts_of(stride, count)[1:]):
        found, at = found + at % size * step, at // size
    return found + at * parts_of(stride, count)[0][1]


class _Run:
    """One kernel's execution. Values are arrays over (rows, cols), with size 1 along what they do not depend on."""

    def __init__(self, program: Program, kernel: Kernel, memory: dict[str, Array]) -> None:
        self.program = program
        self.kernel = kernel
        self.memory = memory
        self.shape = tuple(axis.size for axis in (*kernel.rows, *kernel.cols))
        self.axes = {axis: self._coordinate(i) for i, axis in enumerate((*kernel.rows, *kernel.cols))}
        self.stats: dict[tuple[str, int], Array] = {}
        self.running: dict[tuple[str, int], Array] = {}

    def run(self) -> None:
        if self.kernel.when is not None and not self.memory[self.kernel.when][0]:
            return
        if self.kernel.anchor is not None:
            anchor = self.kernel.anchor
            result = self._product(anchor) if isinstance(anchor, Product) else self._convolution(anchor)
            self.stats[anchor.name, 0] = result
        # Where there are no columns to visit, reductions still have results.
        for reduction_loop in self.kernel.reduction_loops:
            for reduction in reduction_loop:
                rows = tuple(axis.size for axis in self.kernel.rows)
                values = [
                    np.broadcast_to(_Evaluation(self, self.axes)(value), self.shape).reshape(
                        *rows, self.kernel.col_count
                    )
                    for value in reduction.values
                ]
                if reduction.running:
                    for part, found in enumerate(RUNNING[reduction.op](*values)):
                        self.running[reduction.name, part] = found.reshape(self.shape)
                    continue
                parts = REDUCE[reduction.op](*values)
                ones = (1,) * len(self.kernel.cols)
                for part, result in enumerate(parts):
                    self.stats[reduction.name, part] = result.reshape(*rows, *ones)
        if self.kernel.partials is not None:
            self._leave(self.kernel.partials)
        for store in self.kernel.once:
            self._store(store, (1,) * len(self.shape), bounds=())
        for store in self.kernel.row_stores:
            self._store(store, self.shape[: len(self.kernel.rows)] + (1,) * len(self.kernel.cols))
        for store in self.kernel.stores:
            self._store(store, self.shape)
        if self.kernel.overflow_flag is not None and np.any(
            _Evaluation(self, self.axes)(self.kernel.overflow_flag.condition)
        ):
            self.memory[self.kernel.overflow_flag.buffer][0] = 1

    def _leave_of_rows(self, partials: Partials) -> None:
        """The same of a kernel with reduction loops, whose last rows are positions."""
        kernel = self.kernel
        samples, over = kernel.rows[: -partials.over], kernel.rows[-partials.over :]
        sizes = [[axis.size for axis in axes] for axes in (samples, over, kernel.cols)]
        shape = (*sizes[0], partials.pieces.size, *sizes[2])
        places = (*samples, partials.pieces, *kernel.cols)
        axes = {axis: np.arange(axis.size).reshape(-1, *(1,) * (len(shape) - 1 - n)) for n, axis in enumerate(places)}
        for reduction in partials.reductions:
            value = np.broadcast_to(_Evaluation(self, self.axes)(reduction.values[0]), self.shape)
            value = np.moveaxis(value.reshape(*map(math.prod, sizes)), 1, -1)
            each = [REDUCE[reduction.op](piece) for piece in np.array_split(value, partials.pieces.size, axis=-1)]
            for number, part in enumerate(zip(*each, strict=True)):
                self.stats[reduction.name, number] = np.stack(part, axis=1).reshape(shape)
        for store in partials.stores:
            self._store(store, shape, axes, bounds=())

    def _leave(self, partials: Partials) -> None:
        """Partial results of some pieces of about equal size."""
        if self.kernel.reduction_loops:
            self._leave_of_rows(partials)
            return
        evaluate = _Evaluation(self, self.axes)
        evaluate.active = evaluate.holds(self.kernel.within)
        samples, channels = (axis.size for axis in self.kernel.lines)
        value, real = (
            np.broadcast_to(each, self.shape).reshape(samples, channels, -1)
            for each in (evaluate(partials.value), evaluate.active)
        )
        if not partials.per_sample:
            value = np.moveaxis(value, 1, 0).reshape(1, channels, -1)
            real = np.moveaxis(real, 1, 0).reshape(1, channels, -1)
        shape = (value.shape[0], channels, partials.pieces.size)
        at = [np.arange(size).reshape(-1, *(1,) * (2 - number)) for number, size in enumerate(shape)]
        axes = dict(zip((*self.kernel.lines, partials.pieces), at, strict=True))
        pieces = list(zip(*(np.array_split(each, shape[-1], axis=-1) for each in (value, real)), strict=True))
        for reduction in partials.reductions:
            each = [_reduced(reduction.op, *piece) for piece in pieces]
            for number, part in enumerate(zip(*each, strict=True)):
                self.stats[reduction.name, number] = np.stack(part, axis=-1)
        for store in partials.stores:
            self._store(store, shape, axes, bounds=())

    def _convolution(self, anchor: Convolution) -> Array:
        source, weight = self._tensor(anchor.source), self._tensor(anchor.weight)
        if anchor.precision is Precision.TF32:
            source, weight = (torch.from_numpy(tf32(each.numpy())) for each in (source, weight))
        geometry = [list(anchor.stride), list(anchor.padding), list(anchor.dilation)]
        missing = [0] * len(anchor.stride)
        if anchor.transposed:
            reach = [(size - 1) * d + 1 for size, d in zip(weight.shape[2:], anchor.dilation, strict=True)]
            plain = [
                (size - 1) * s - 2 * p + r
                for size, s, p, r in zip(source.shape[2:], anchor.stride, anchor.padding, reach, strict=True)
            ]
            spread = (1,) * len(anchor.stride) if anchor.pooled is None else anchor.stride
            sizes = [axis.size * s for axis, s in zip(dimensions(self.kernel)[2:], spread, strict=True)]
            missing = [max(wanted - size, 0) for wanted, size in zip(sizes, plain, strict=True)]
        result = torch.convolution(source, weight, None, *geometry, anchor.transposed, missing, anchor.groups)
        if anchor.pooled is not None:
            result = self._pooled(anchor.pooled, result[(..., *map(slice, sizes))], anchor.stride)
        found: Array = result.numpy()
        return np.moveaxis(found, anchor.column, -1) if self.kernel.cols else found

    def _pooled(self, pooled: Pooling, result: torch.Tensor, windows: tuple[int, ...]) -> torch.Tensor:
        if pooled.bias is not None:
            result = result + self._tensor(pooled.bias).reshape(-1, *(1,) * len(windows))
        for axis, size in enumerate(windows, 2):
            result = result.unflatten(axis, (-1, size)).amax(axis + 1)
        return result

    def _product(self, product: Product) -> Array:
        """The sums of each piece, in float64."""
        pieces, batch, rows, columns = self.kernel.matrix
        if product.fills and product.filling is not None:
            self._fill(product.right, product.filling)
        left = self._operand(product.left, batch, rows, product.inner)
        right = self._operand(product.right, batch, columns, product.inner)
        if product.arithmetic is Arithmetic.TF32:
            left, right = tf32(left), tf32(right)
        firsts = range(0, product.inner, product.length)
        steps = [slice(first, first + product.length) for first in firsts]
        assert len(steps) == pieces
        # A product of an infinity and zero is NaN in each term: no blocked product of a library gets in between.
        found = np.stack([np.einsum("brk,bck->brc", left[..., step], right[..., step]) for step in steps])
        if not product.apart or not self.kernel.cols:
            return found.reshape(self.shape)
        outer = rows // (product.apart * self.kernel.col_count)
        found = found.reshape(pieces, batch, outer, self.kernel.col_count, product.apart, columns)
        return np.moveaxis(found, 3, -1).reshape(self.shape)

    def _fill(self, operand: Operand, filling: Filling) -> None:
        """Packs what an operand is made of where it would be read from; products are rounded to float32 before they are to halves."""
        source = self._tensor(filling.source).numpy().astype(np.float32)
        samples, channels, *image = source.shape
        factors = [self.memory[name].astype(np.float32) for name in filling.factors]
        with np.errstate(over="ignore", invalid="ignore"):
            by = factors[0][:, None] * factors[1]
            by = by.reshape(samples, channels, *(1,) * len(image))
            halves = (source * np.where(np.isfinite(by), by, np.float32(0))).astype(np.float16)
        if np.isinf(halves).any() or (~np.isfinite(by) & (source != 0)).any():
            self.memory[filling.overflow_flag][0] = 1
        border = [(before, whole - size - before) for size, before, whole in filling.image]
        padded = np.pad(halves, [(0, 0), (0, 0), *border]).reshape(samples, channels // PLACE, PLACE, -1)
        packed = np.moveaxis(padded, 2, -1).ravel()
        self.memory[operand.buffer][: packed.size] = encode(packed, DType.F16)

    def _operand(self, operand: Operand, batch: int, rows: int, inner: int) -> Array:
        memory = decode(self.memory[operand.buffer], self.program.buffer(operand.buffer).dtype)
        if operand.border:
            return self._bordered(memory, operand, batch, rows, inner)
        steps = ((batch, operand.batch), *parts_of(operand.row, rows), *parts_of(operand.inner, inner))
        sizes, strides = zip(*((size, stride * memory.itemsize) for size, stride in steps), strict=True)
        return np.lib.stride_tricks.as_strided(memory[operand.offset :], sizes, strides).reshape(batch, rows, inner)

    def _bordered(self, memory: Array, operand: Operand, batch: int, rows: int, inner: int) -> Array:
        """An operand with zeros beyond the ends of axes."""
        sample, row, term = np.ogrid[:batch, :rows, :inner]
        at = (
            sample * operand.batch
            + _along(operand.row, row, rows)
            + _along(operand.inner, term, inner)
            + operand.offset
        )
        there = np.ones((1, 1, 1), np.bool_)
        for axis in operand.border:
            point, tap = row // axis.below % axis.rows, term // axis.deeper % axis.terms
            place = point * axis.step + tap * axis.apart - axis.before
            there = there & (place >= 0) & (place < axis.size)
        there = np.broadcast_to(there, at.shape)
        return np.where(there, memory[np.where(there, at, 0)], 0.0)

    def _tensor(self, name: str) -> torch.Tensor:
        buffer = self.program.buffer(name)
        memory = torch.from_numpy(decode(self.memory[name], buffer.dtype))
        return torch.as_strided(memory, buffer.shape, buffer.strides)

    def _coordinate(self, position: int) -> Array:
        shape = [1] * len(self.shape)
        shape[position] = self.shape[position]
        return np.arange(self.shape[position]).reshape(shape)

    def _store(
        self,
        store: Store,
        shape: tuple[int, ...],
        axes: Mapping[Axis, Array] | None = None,
        bounds: tuple[Bound, ...] | None = None,
    ) -> None:
        """Stores where `bounds` hold, or those of the kernel."""
        buffer = self.program.buffer(store.buffer)
        evaluate = _Evaluation(self, self.axes if axes is None else axes)
        evaluate.active = real = evaluate.holds(self.kernel.within if bounds is None else bounds)
        there = np.broadcast_to(real, shape).reshape(-1)
        index = np.broadcast_to(evaluate.index(store.index), shape).reshape(-1)[there]
        value = np.broadcast_to(evaluate(store.value), shape).reshape(-1)[there]
        assert index.size == np.unique(index).size, f"{self.kernel.name} writes an element of {store.buffer} twice"
        assert index.size == 0 or (index.min() >= 0 and index.max() < buffer.extent), f"{store.buffer}: out of range"
        memory = self.memory[store.buffer]
        memory[index] = value if memory.dtype == np.float64 else encode(value, buffer.dtype)


class _Evaluation:
    """Evaluates expressions for given coordinates; `active` is where the values are wanted."""

    def __init__(self, run: _Run, axes: Mapping[Axis, Array], active: Array | None = None) -> None:
        self.run = run
        self.axes = axes
        self.active = np.ones((1,) * len(run.shape), np.bool_) if active is None else active
        self.done: dict[int, Array] = {}

    def __call__(self, node: Expr) -> Array:
        if id(node) not in self.done:
            self.done[id(node)] = _value(self._compute(node), node.dtype)
        return self.done[id(node)]

    def _compute(self, node: Expr) -> Array:
        match node:
            case Const(value, dtype):
                return np.asarray(value, np.float64 if dtype.is_float else STORAGE[dtype])
            case Load(buffer, index, _):
                return self._load(buffer, index)
            case Gather():
                return self._gather(node)
            case Position(index, _):
                return self.index(index)
            case ReductionResult(reduction, part, _):
                return self.run.stats[reduction, part]
            case Prefix(reduction, part, _):
                return self.run.running[reduction, part]
            case Apply(Op.CAST, args, dtype):
                return decode(encode(self(args[0]), dtype), dtype)
            case Apply(op, args, _):
                return np.asarray(APPLY[op](*map(self, args)))
            case Masked(mask, value, other, _):
                holds = self.holds(mask)
                inner = _Evaluation(self.run, self.axes, self.active & holds)
                return np.where(holds, inner(value), self(other))
            case Window(op, axes, value, _):
                return self._window(op, axes, value)

    def index(self, index: Index) -> Array:
        total = np.asarray(index.constant)
        for atom, factor in index.terms:
            if isinstance(atom, Axis):
                part = self.axes[atom]
            else:
                inner = self.index(atom.index)
                part = inner // atom.divisor if isinstance(atom, FloorDiv) else inner % atom.divisor
            total = total + part * factor
        return total

    def _gather(self, node: Gather) -> Array:
        at = self.index(node.index)
        for place in node.places:
            value = self(place.value).astype(np.int64)
            wrong = self.active & ((value < 0) | (value >= place.size))
            if wrong.any() and 0 not in self.run.shape:
                assert place.checked, f"{self.run.kernel.name} computes a place outside {node.buffer}"
                raise IndexError(f"index out of range in {node.buffer}")
            at = at + np.where(wrong, 0, value) * place.stride
        return self._read(node.buffer, at)

    def _load(self, name: str, index: Index) -> Array:
        return self._read(name, self.index(index))

    def _read(self, name: str, at: Array) -> Array:
        memory, dtype = self.run.memory[name], self.run.program.buffer(name).dtype
        wrong = self.active & ((at < 0) | (at >= memory.size))
        assert not (wrong.any() and 0 not in self.run.shape), f"{self.run.kernel.name} reads {name} out of range"
        if memory.size == 0:
            return np.zeros(at.shape)
        return decode(memory[np.clip(at, 0, memory.size - 1)], dtype)

    def holds(self, mask: Any) -> Array:
        holds = np.asarray(True)
        for bound in mask:
            at = self.index(bound.index)
            holds = holds & (at >= bound.low) & (at < bound.high)
        return holds

    def _window(self, op: ReduceOp, axes: tuple[Axis, ...], value: Expr) -> Array:
        points = []
        for point in np.ndindex(*(axis.size for axis in axes)):
            here = dict(self.axes) | {axis: np.asarray(at) for axis, at in zip(axes, point, strict=True)}
            points.append(_Evaluation(self.run, here, self.active)(value))
        stacked = np.stack(np.broadcast_arrays(*points), axis=-1)
        (result,) = REDUCE[op](stacked)
        return result
