"""Programs with a convolution as a product of scaled halves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from fusepass.codegen.ir.dtype import Precision
from fusepass.codegen.ir.expr import Builder
from fusepass.codegen.ir.program import Program
from fusepass.codegen.passes.anchors import generate_anchors
from tests.support.convolutions import Case, program_of

CASES: dict[str, Case] = {
    "2d": Case((2, 24, 9, 11), 20, (3, 3), (1, 1), (1, 1), (1, 1)),
    "2d, strided and dilated": Case((2, 20, 15, 17), 6, (3, 2), (2, 3), (2, 1), (2, 3)),
    "2d, odd channels, one by one": Case((3, 61, 5, 7), 70, (1, 1), (1, 1), (0, 0), (1, 1)),
    "2d, channels last": Case((2, 24, 6, 7), 33, (3, 3), (1, 1), (0, 1), (1, 1), channels_last=True),
    "2d, border that nothing reads": Case((1, 32, 8, 8), 8, (2, 2), (3, 3), (0, 0), (1, 1)),
    "2d, a border of whole vectors": Case((2, 24, 3, 64), 8, (3, 3), (1, 1), (1, 1), (1, 1)),
    "1d": Case((3, 32, 50), 7, (4,), (1,), (2,), (1,)),
    "3d": Case((1, 32, 4, 5, 6), 64, (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1)),
    "3d, strided": Case((2, 18, 5, 9, 8), 12, (2, 3, 1), (1, 2, 2), (0, 1, 0), (2, 1, 1)),
    "transposed": Case((2, 24, 6, 7), 9, (3, 5), (1, 1), (1, 1), (1, 1), True),
    "transposed, dilated": Case((1, 40, 6, 7), 8, (3, 2), (1, 1), (0, 1), (2, 3), True),
    "transposed, cut": Case((1, 40, 9, 8), 8, (2, 3), (1, 1), (2, 3), (1, 1), True),
    "transposed, by 2": Case((2, 24, 5, 6), 9, (4, 4), (2, 2), (1, 1), (1, 1), True),
    "transposed, by 2 and 3, odd": Case((2, 24, 5, 6), 9, (4, 3), (2, 3), (1, 0), (1, 1), True, (1, 2)),
    "transposed, by 1 and 2, dilated": Case((1, 32, 4, 5), 4, (2, 6), (1, 2), (0, 3), (2, 1), True, (0, 1)),
    "transposed 1d": Case((2, 24, 9), 33, (4,), (2,), (1,), (1,), True),
    "transposed 3d, by 2": Case((1, 32, 2, 3, 4), 16, (2, 4, 4), (2, 2, 2), (0, 1, 2), (1, 1, 1), True, (1, 0, 1)),
    "transposed 3d": Case((1, 32, 3, 4, 5), 16, (5, 3, 3), (1, 1, 1), (0, 1, 2), (1, 1, 1), True),
}


def halved(case: Case, *, chain: bool = True) -> Program:
    """The case with its convolution as a product of halves."""
    rounded = replace(case, precision=Precision.TF32, warps=4)
    program = program_of(rounded, chain=chain)
    return generate_anchors(program, Builder(), lambda program, kernel: True, warps=4, halves=True)


SAMPLES: dict[str, Callable[[], Program]] = {
    f"halves {name}": functools.partial(halved, case) for name, case in CASES.items()
}
