"""Which headers a program's CUDA source includes, in an order in which each comes behind those that it needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusepass.codegen.ir.program import Kernel
from fusepass.codegen.render.cuda.families import all_headers, headers
from fusepass.codegen.render.cuda.family import Family, Plan

ALWAYS = ("fp_index.h", "fp_launch.cuh", "fp_merge.cuh", "fp_vector.cuh")
INDIRECT = (
    "fp_cast.h",
    "fp_common.h",
    "fp_functions.h",
    "fp_half.h",
    "fp_libm.h",
    "fp_random.h",
    "fp_scalar.h",
    "fp_states.h",
)
"""Headers that others include."""
_REPLAYS = ("fp_replay.cuh",)


ALL = tuple(dict.fromkeys([*ALWAYS, *all_headers(), *_REPLAYS]))
"""Every header that a source may include, in such an order."""


def headers_of(launches: Sequence[tuple[Family[Any], Kernel, Plan]], *, replays: bool) -> tuple[str, ...]:
    """For kernels as they are laid on the device; `replays` says whether launches are recorded, to be repeated."""
    return tuple(dict.fromkeys([*ALWAYS, *headers(launches), *(_REPLAYS if replays else ())]))
