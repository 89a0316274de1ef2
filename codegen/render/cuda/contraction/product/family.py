"""The family of matrix products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.product import Product
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.render.cuda.contraction.product.kernel import ProductWriter, boxes_of
from fusepass.codegen.render.cuda.family import Boxes, Family, Headers, Place, Text
from fusepass.codegen.schedule.plan import Ranked
from fusepass.codegen.schedule_product import ProductSchedule, preferred, schedule_product, serves
from fusepass.codegen.schedule_product.tiles import Tiling


def _tiled(test: Callable[[Tiling], bool]) -> Callable[[Kernel, ProductSchedule], bool]:
    return lambda kernel, plan: test(plan.tiling)


class MatrixProduct(Family[ProductSchedule]):
    """Kernels whose anchor is a `Product`."""

    name = "matrix product"
    reduces = "rows reduced"
    headers: ClassVar[Headers] = (
        (lambda kernel, plan: True, ("fp_instructions.cuh", "fp_product.cuh")),
        (lambda kernel, plan: kernel.partials is not None, ("fp_partials.cuh",)),
        (lambda kernel, plan: True, ("fp_matmul.cuh",)),
        (_tiled(lambda tiling: tiling.groups), ("fp_wgmma.cuh", "fp_wgmma_rows.cuh", "fp_matmul_group.cuh")),
        (_tiled(lambda tiling: tiling.runs), ("fp_matmul_runs.cuh",)),
        (
            _tiled(lambda tiling: tiling.teams > 0),
            ("fp_tensor_map.cuh", "fp_barriers.cuh", "fp_cluster.cuh", "fp_matmul_teams.cuh"),
        ),
        (
            _tiled(lambda tiling: tiling.iterations > 0),
            ("fp_barriers.cuh", "fp_matmul_fill.cuh", "fp_matmul_turns.cuh"),
        ),
    )

    def takes(self, kernel: Kernel, program: Program) -> bool:
        return isinstance(kernel.anchor, Product)

    def plan(
        self, kernel: Kernel, program: Program, facts: DeviceFacts, *, aligned: bool = True
    ) -> ProductSchedule | None:
        return schedule_product(kernel, program, facts, aligned=aligned)

    def ranking(
        self, kernel: Kernel, program: Program, facts: DeviceFacts, *, aligned: bool = True
    ) -> Sequence[Ranked[ProductSchedule]]:
        """The plan, and the best one for pairs of blocks that share what they read, which only a measurement chooses."""
        plans = (schedule_product(kernel, program, facts, aligned=aligned, members=members) for members in (1, 2))
        return tuple(Ranked(plan, plan.seconds) for plan in plans if plan is not None)

    def seconds(self, kernel: Kernel, program: Program, facts: DeviceFacts, plan: ProductSchedule) -> float:
        return plan.seconds

    def serves(self, kernel: Kernel, program: Program, facts: DeviceFacts) -> bool:
        return serves(program, kernel, facts)

    def preferred(self, kernel: Kernel, program: Program, facts: DeviceFacts) -> bool:
        return preferred(program, kernel, facts)

    def boxes(self, kernel: Kernel, plan: ProductSchedule) -> tuple[Boxes, ...]:
        return boxes_of(kernel, plan)

    def cluster(self, plan: ProductSchedule) -> int:
        return plan.tiling.members

    def write(self, kernel: Kernel, plan: ProductSchedule, place: Place) -> Text:
        idle = () if kernel.when is None else (f"if ({place.pointers[kernel.when]}[0] == 0.0f) return;",)
        return Text((*idle, *ProductWriter(kernel, plan, place).lines()))


PRODUCT = MatrixProduct()
