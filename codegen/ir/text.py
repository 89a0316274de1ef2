"""The deterministic text form of a program: golden files, dumps and cache keys are made of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
    ReductionResult,
    Window,
    walk,
)
from fusepass.codegen.ir.index import Axis
from fusepass.codegen.ir.program import Buffer, Kernel, LibraryCall, Partials, Program, Reduction, Ref, Store


def program_text(program: Program) -> str:
    """`program` as text; equal programs give equal text."""
    return "\n".join(_program_lines(program)) + "\n"


def _program_lines(program: Program) -> Iterator[str]:
    yield f"program {program.name}({', '.join(program.inputs)}) -> ({', '.join(program.outputs)})"
    for buffer in program.buffers:
        yield "  " + _buffer_text(buffer)
    for output, updated in program.updates:
        yield f"  {output} may be written over {updated}"
    for call in program.calls:
        yield "  " + _call_text(call)
    for kernel in program.kernels:
        yield from ("  " + line for line in _kernel_lines(kernel))


def _buffer_text(buffer: Buffer) -> str:
    shape = "x".join(map(str, buffer.shape)) or "scalar"
    strides = ",".join(map(str, buffer.strides))
    return f"{buffer.role.value} {buffer.name}: {buffer.dtype}[{shape}] strides ({strides})"


def _call_text(call: LibraryCall) -> str:
    args = [_argument(value) for value in call.args]
    args += [f"{name}={_argument(value)}" for name, value in call.kwargs]
    item = "" if call.item is None else f"[{call.item}]"
    return f"{call.result} = {call.target}({', '.join(args)}){item}{', TF32 allowed' if call.tf32 else ''}"


def _argument(value: object) -> str:
    if isinstance(value, Ref):
        return value.buffer
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_argument, value)) + ")"
    return repr(value)


def _axes(axes: Sequence[Axis]) -> str:
    return ", ".join(f"{axis.name}:{axis.size}" for axis in axes)


def _kernel_lines(kernel: Kernel) -> Iterator[str]:
    yield f"kernel {kernel.name} rows[{_axes(kernel.rows)}] cols[{_axes(kernel.cols)}]  # {', '.join(kernel.origin)}"
    if kernel.anchor is not None:
        yield f"  {kernel.anchor.name}: {kernel.anchor.description}"
    if kernel.within:
        yield f"  where {' and '.join(map(str, kernel.within))}"
    if kernel.team is not None:
        strips = f", {kernel.team.strip} at a time" if kernel.team.strip > 1 else ""
        shared = f"{kernel.team.teams} x {kernel.team.members} blocks through {kernel.team.exchange}"
        yield f"  rows shared by {shared}{strips}"
    if kernel.when is not None:
        yield f"  when {kernel.when}[0] is not zero"
    if kernel.rest:
        yield "  writes what is left"
    names = _Names()
    for number, reduction_loop in enumerate(kernel.reduction_loops):
        yield f"  sweep {number}"
        for reduction in reduction_loop:
            yield from _reduction_lines(reduction, names)
    if kernel.partials is not None:
        yield from _partial_lines(kernel.partials, names)
    for title, stores in (("once", kernel.once), ("per row", kernel.row_stores), ("per element", kernel.stores)):
        if stores:
            yield f"  {title}"
            yield from ("    " + line for line in _store_lines(stores, names))
    if kernel.overflow_flag is not None:
        yield "  alarm"
        yield from ("    " + line for line in names.define([kernel.overflow_flag.condition]))
        yield f"    {kernel.overflow_flag.buffer}[0] = 1 if {names[kernel.overflow_flag.condition]}"


def _partial_lines(partials: Partials, names: _Names) -> Iterator[str]:
    of = "each sample" if partials.per_sample else "all samples"
    where = f"column, over the rows' last {partials.over}," if partials.over else "channel, over"
    yield f"  per {where} {_axes([partials.pieces])} pieces of {of}"
    for reduction in partials.reductions:
        yield from _reduction_lines(reduction, names)
    yield from ("    " + line for line in _store_lines(partials.stores, names))


def _reduction_lines(reduction: Reduction, names: _Names) -> Iterator[str]:
    yield from ("    " + line for line in names.define(reduction.values))
    values = ", ".join(names[value] for value in reduction.values)
    running = "running " if reduction.running else ""
    yield f"    {reduction.name}: {reduction.dtype} = {running}{reduction.op.value}({values})"


def _store_lines(stores: Sequence[Store], names: _Names) -> Iterator[str]:
    for store in stores:
        yield from names.define((store.value,))
        yield f"{store.buffer}[{store.index}] = {names[store.value]}"


class _Names:
    """Numbers expression nodes in the order they are first met."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}

    def __getitem__(self, node: Expr) -> str:
        return self._names[id(node)]

    def define(self, roots: Sequence[Expr]) -> Iterator[str]:
        for node in walk(*roots):
            if id(node) in self._names:
                continue
            if isinstance(node, Const | ReductionResult | Prefix):
                self._names[id(node)] = self._right(node)
                continue
            self._names[id(node)] = f"%{sum(name.startswith('%') for name in self._names.values())}"
            yield f"{self[node]}: {node.dtype} = {self._right(node)}"

    def _right(self, node: Expr) -> str:
        match node:
            case Load(buffer, index, _):
                return f"{buffer}[{index}]"
            case Gather(buffer, index, places, _):
                moved = "".join(
                    f" + {place.stride}*{self[place.value]}{f'<{place.size}' if place.checked else ''}"
                    for place in places
                )
                return f"{buffer}[{index}{moved}]"
            case Const(value, dtype):
                return f"{value!r}:{dtype}"
            case Apply(op, args, dtype):
                call = f"{op.value}({', '.join(self[arg] for arg in args)})"
                return f"{call} to {dtype}" if op is Op.CAST else call
            case Position(index, _):
                return f"position({index})"
            case Masked(mask, value, other, _):
                return f"{self[value]} if {' and '.join(map(str, mask))} else {self[other]}"
            case Window(op, axes, value, _):
                return f"window {op.value} over [{_axes(axes)}] of {self[value]}"
            case ReductionResult(reduction, part, _):
                return f"{reduction}.{part}"
            case Prefix(reduction, part, index, _):
                return f"{reduction}.{part}[{index}]"
