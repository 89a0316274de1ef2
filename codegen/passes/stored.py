"""When a kernel may read what another one stores in place of computing it: where what is stored is the value, to the bit.

A half that is stored is no such thing for a float32 result: what is loaded has lost the digits that the value has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Apply, Expr, Op
from fusepass.codegen.ir.fitting import fits
from fusepass.codegen.ir.program import Program, Role


def readable(program: Program, value: Expr, dtype: DType, written: Collection[str]) -> Iterator[Expr]:
    """The nodes at the top of `value` that a load of it from a buffer of `dtype` may stand for, in kernels that write the buffers `written`.

    A half whose rounding is left to the store is read where nothing but halves is made of it: wider numbers may be made of an equal
    expression that eager does not round.
    """
    if not (
        _holds(dtype, value) or (dtype.is_half and value.dtype is dtype.compute and _only_halves(program, written))
    ):
        return
    yield value
    while isinstance(value, Apply) and value.op is Op.CAST and value.dtype.is_float and value.args[0].dtype.is_float:
        (source,) = value.args
        if not (source.dtype.nbytes < value.dtype.nbytes or fits(source, value.dtype)):
            return
        yield (value := source)


def _holds(dtype: DType, value: Expr) -> bool:
    return value.dtype is dtype or (dtype.is_half and value.dtype.is_float and fits(value, dtype))


def _only_halves(program: Program, written: Collection[str]) -> bool:
    """Whether every output that is made of the buffers `written`, or is one of them, is of 16-bit floating-point numbers."""
    made, size = set(written), -1
    while len(made) > size:
        size = len(made)
        made |= {name for kernel in program.kernels if kernel.reads & made for name in kernel.writes}
    return all(program.buffer(name).dtype.is_half for name in made if program.buffer(name).role is Role.OUTPUT)
