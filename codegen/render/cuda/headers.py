"""Which headers a program's CUDA source includes, in an order in which each comes behind those that it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fusepass.codegen.ir.convolution import Convolution, ScaledWeights
from fusepass.codegen.ir.product import Product
from fusepass.codegen.ir.program import Kernel
from fusepass.codegen.schedule.plan import Keep, Schedule
from fusepass.codegen.schedule.plan_output_tile import OutputTile
from fusepass.codegen.schedule.plan_rows import Rows
from fusepass.codegen.schedule_convolution import ConvolutionSchedule
from fusepass.codegen.schedule_convolution.sparse import SparseSchedule
from fusepass.codegen.schedule_product import ProductSchedule
from fusepass.codegen.schedule_product.tiles import Tiling

Plan = Schedule | ConvolutionSchedule | ProductSchedule

_ALWAYS = ("fp_index.h", "fp_launch.cuh", "fp_merge.cuh", "fp_vector.cuh")
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


def _convolution(test: Callable[[Convolution], bool]) -> Callable[[Kernel, Plan], bool]:
    return lambda kernel, plan: isinstance(kernel.anchor, Convolution) and test(kernel.anchor)


def _tiled(test: Callable[[Tiling], bool]) -> Callable[[Kernel, Plan], bool]:
    return lambda kernel, plan: isinstance(plan, ProductSchedule) and test(plan.tiling)


def _in_rows(test: Callable[[Rows], bool]) -> Callable[[Kernel, Plan], bool]:
    return lambda kernel, plan: isinstance(plan, Rows) and test(plan)


_NEEDS: tuple[tuple[Callable[[Kernel, Plan], bool], tuple[str, ...]], ...] = (
    (lambda kernel, plan: kernel.anchor is not None, ("fp_instructions.cuh", "fp_product.cuh")),
    (_convolution(lambda anchor: anchor.warps > 1), ("fp_wgmma.cuh", "fp_group.cuh")),
    (_convolution(lambda anchor: anchor.halves is not None), ("fp_wgmma_places.cuh", "fp_places.cuh")),
    (_convolution(lambda anchor: isinstance(anchor.halves, ScaledWeights)), ("fp_scaled.cuh",)),
    (_convolution(lambda anchor: anchor.held), ("fp_scaled.cuh", "fp_held.cuh")),
    (
        lambda kernel, plan: isinstance(plan, SparseSchedule),
        ("fp_wgmma.cuh", "fp_wgmma_sparse.cuh", "fp_sparse.cuh"),
    ),
    (_convolution(lambda anchor: anchor.column > 1), ("fp_partials.cuh",)),
    (lambda kernel, plan: kernel.partials is not None and kernel.anchor is not None, ("fp_partials.cuh",)),
    (lambda kernel, plan: isinstance(kernel.anchor, Product), ("fp_matmul.cuh",)),
    (_tiled(lambda tiling: tiling.groups), ("fp_wgmma.cuh", "fp_wgmma_rows.cuh", "fp_matmul_group.cuh")),
    (_tiled(lambda tiling: tiling.runs), ("fp_matmul_runs.cuh",)),
    (_tiled(lambda tiling: tiling.iterations > 0), ("fp_barriers.cuh", "fp_matmul_fill.cuh", "fp_matmul_turns.cuh")),
    (lambda kernel, plan: isinstance(plan, OutputTile), ("fp_instructions.cuh", "fp_windows.cuh")),
    (lambda kernel, plan: kernel.scans, ("fp_scan.cuh",)),
    (lambda kernel, plan: kernel.team is not None, ("fp_instructions.cuh", "fp_team.cuh")),
    (lambda kernel, plan: kernel.team is not None and kernel.team.strip > 1, ("fp_strips.cuh",)),
    (_in_rows(lambda plan: plan.cluster is not None), ("fp_cluster.cuh",)),
    (_in_rows(lambda plan: plan.keep is Keep.FETCHED), ("fp_instructions.cuh", "fp_team.cuh")),
    (_in_rows(lambda plan: plan.staged is not None), ("fp_barriers.cuh",)),
)


ALL = tuple(dict.fromkeys([*_ALWAYS, *(name for _, names in _NEEDS for name in names), *_REPLAYS]))
"""Every header that a source may include, in such an order."""


def headers_of(launches: Sequence[tuple[Kernel, Plan]], *, replays: bool) -> tuple[str, ...]:
    """For kernels as they are laid on the device; `replays` says whether launches are recorded, to be repeated."""
    found = [*_ALWAYS]
    for needs, headers in _NEEDS:
        found += headers if any(needs(kernel, plan) for kernel, plan in launches) else ()
    found += _REPLAYS if replays else ()
    return tuple(dict.fromkeys(found))
