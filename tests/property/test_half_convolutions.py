"""Convolutions of float16 and bfloat16 of any geometry and formats as products of halves, beside PyTorch's, every thread run on the host."""

from __future__ import annotations

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.verify import verify
from fusepass.codegen.render import render
from tests.support.convolutions import Case
from tests.support.emulate import emulate, needs_compiler
from tests.support.interpret import interpret
from tests.support.products import ONE
from tests.unit.test_half_convolutions import assert_right, halved, memory, operands


@st.composite
def cases(draw: st.DrawFn) -> Case:
    axes = draw(st.integers(1, 3))
    transposed = draw(st.booleans())

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(axes))

    kernel, stride, dilation = each(1, 4), each(1, 3), each(1, 2)
    if transposed:  # phases that have as many kernel positions
        kernel = tuple(s * k if s > 1 else k for s, k in zip(stride, kernel, strict=True))
        dilation = tuple(1 if s > 1 else d for s, d in zip(stride, dilation, strict=True))
    padding = tuple(draw(st.integers(0, 3)) for _ in range(axes))
    missing = tuple(draw(st.integers(0, s - 1)) for s in stride) if transposed else ()
    channels = draw(st.integers(1, 40) | st.sampled_from([8, 16, 24, 64]))
    source = (draw(st.integers(1, 3)), channels, *each(1, 9))
    if transposed:
        sizes = [
            (n - 1) * s - 2 * p + d * (k - 1) + 1 + m
            for n, s, p, d, k, m in zip(source[2:], stride, padding, dilation, kernel, missing, strict=True)
        ]
    else:
        sizes = [
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, s, p, d, k in zip(source[2:], stride, padding, dilation, kernel, strict=True)
        ]
    assume(min(sizes) > 0)
    return Case(
        source,
        draw(st.integers(1, 70)),
        kernel,
        stride,
        padding,
        dilation,
        transposed,
        missing,
        channels_last=draw(st.booleans()),
        result_last=draw(st.booleans()),
        dtype=draw(st.sampled_from([DType.F16, DType.BF16])),
    )


@settings(max_examples=40)
@given(case=cases())
def test_values(case: Case) -> None:
    program = halved(case)
    verify(program)
    if program.calls:  # nothing generated serves it
        return
    inputs = operands(case)
    assert_right(case, inputs, interpret(program, memory(case, inputs))["y"])


@needs_compiler
@settings(max_examples=8)
@given(case=cases())
def test_values_thread_by_thread(case: Case) -> None:
    program = halved(case)
    if not program.calls:
        inputs = operands(case)
        assert_right(case, inputs, emulate(program, render(program, ONE), memory(case, inputs))["y"])
