"""Matrix products of any shape, strides and type, every thread run on the host, against the interpreter."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusepass.codegen.ir.verify import verify
from fusepass.codegen.render import render
from fusepass.codegen.schedule_product import schedule_product
from fusepass.codegen.schedule_product.tiles import TILINGS
from tests.support.emulate import emulate, needs_compiler
from tests.support.interpret import interpret
from tests.support.products import BF16, F16, F32, ONE, Case, generated
from tests.unit.test_render_cuda import assert_close, inputs_of


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size = st.integers(1, 40) | st.sampled_from([64, 72, 128, 130])
    dtype = draw(st.sampled_from([F32, F32, F16, BF16]))
    inner = draw(st.integers(1, 150))
    return Case(
        rows=draw(size),
        columns=draw(size),
        inner=inner,
        batch=draw(st.none() | st.integers(1, 3)),
        left_down=draw(st.booleans()),
        right_across=draw(st.booleans()),
        spare=draw(st.sampled_from([0, 0, 1, 4, 8])),
        dtype=dtype,
        tf32=dtype is F32 and draw(st.booleans()),
        shared_right=draw(st.booleans()),
        length=64 if inner > 64 and draw(st.booleans()) else None,
    )


@needs_compiler
@settings(max_examples=12)
@given(case=cases(), first=st.integers(0, len(TILINGS) - 1), aligned=st.booleans())
def test_values(case: Case, first: int, aligned: bool) -> None:
    """With the first tile from `first` on that serves."""
    program = generated(case)
    verify(program)
    inputs = inputs_of(program)
    with pytest.MonkeyPatch.context() as output_tile:
        for tiling in (*TILINGS[first:], *TILINGS):
            output_tile.setattr("fusepass.codegen.schedule_product.TILINGS", (tiling,))
            if schedule_product(program.kernels[0], program, ONE, aligned=aligned) is not None:
                break
        source = render(program, ONE, aligned=aligned)
    assert_close(program, emulate(program, source, inputs, shift=0 if aligned else 1), interpret(program, inputs))
