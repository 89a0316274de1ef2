"""What `tests.compile_cuda` leaves out of sources: kernels that it compiled under other names, and nothing else."""

from __future__ import annotations

import pytest

from tests.compile_cuda import without_repeats

TEXT = """
#include "fp_index.h"

namespace {

// one
__global__ void __launch_bounds__(64) gelu_0(
    const float* __restrict__ x,
    float* __restrict__ out0)
{
    out0[threadIdx.x] = fp::tanh(x[threadIdx.x]) * 2.0f;
}

}  // namespace

extern "C" int run_gelu(void* x, void* out0, void* stream)
{
    fp::launch<gelu_0>(12, 64, 16, stream, static_cast<const float*>(x), static_cast<float*>(out0));
    return static_cast<int>(cudaGetLastError());
}
"""


def test_a_kernel_is_compiled_under_one_name() -> None:
    seen: set[tuple[str, ...]] = set()
    assert without_repeats(TEXT, "sm_90", seen) == TEXT
    other = (
        TEXT.replace("gelu", "tanh_of_rows")
        .replace("x,", "input_1,")
        .replace("x[", "input_1[")
        .replace("// one", "// two")
    )
    left = without_repeats(other, "sm_90", seen)
    assert "fp::tanh" not in left
    assert left.partition("extern")[2] == other.partition("extern")[2]
    assert "float* __restrict__ out0)\n{\n}\n" in left


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("2.0f", "3.0f"),
        ("fp::tanh", "fp::sin"),
        ("const float* __restrict__ x,", "const double* __restrict__ x,"),
        ("bounds__(64)", "bounds__(32)"),
        ("12, 64, 16", "12, 64, 32"),
        ("namespace {", "namespace {\n__constant__ int places[2] = {0, 1};"),
        ("= fp", "+= fp"),
    ],
)
def test_what_differs_in_more_is_compiled(old: str, new: str) -> None:
    seen: set[tuple[str, ...]] = set()
    without_repeats(TEXT, "sm_90", seen)
    changed = TEXT.replace(old, new)
    assert changed != TEXT
    assert without_repeats(changed, "sm_90", seen) == changed
    assert without_repeats(TEXT, "sm_80", seen) == TEXT
