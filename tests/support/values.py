"""What the kernels of a program compute, beside what the program means."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.program import Program
from fusepass.codegen.ir.verify import verify
from fusepass.codegen.render import render
from tests.support.emulate import emulate
from tests.support.interpret import interpret


def check_values(program: Program, facts: DeviceFacts, inputs: Mapping[str, np.ndarray], tolerance: float) -> str:
    """Compares every output, up to `tolerance` of its largest finite number; the text of the kernels."""
    verify(program)
    source = render(program, facts)
    got, wanted = emulate(program, source, inputs), interpret(program, inputs)
    for name in program.outputs:
        finite = np.abs(wanted[name][np.isfinite(wanted[name])])
        bound = tolerance * finite.max(initial=0)
        np.testing.assert_allclose(got[name], wanted[name], rtol=tolerance, atol=bound, err_msg=name)
    return source.text
