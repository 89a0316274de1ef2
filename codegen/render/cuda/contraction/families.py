"""The families of contractions: convolutions, one family for each way of `fusepass.codegen.schedule_convolution` to lay them out, and matrix products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from fusepass.codegen import schedule_convolution, schedule_product
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.convolution import Convolution, ScaledWeights
from fusepass.codegen.ir.product import Product
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.render.cuda.contraction.convolution.chunk_tiles import PackedWriter, ScalingWriter
from fusepass.codegen.render.cuda.contraction.convolution.multistage import MultistageWriter
from fusepass.codegen.render.cuda.contraction.convolution.register_stationary import RegisterStationaryWriter
from fusepass.codegen.render.cuda.contraction.convolution.results import ConvolutionWriter
from fusepass.codegen.render.cuda.contraction.convolution.shared_stationary import SharedStationaryWriter
from fusepass.codegen.render.cuda.contraction.product.kernel import ProductWriter, boxes_of
from fusepass.codegen.render.cuda.family import Boxes, Family, Headers, Place, Text
from fusepass.codegen.schedule_convolution import (
    CHUNKS,
    MULTISTAGE,
    REGISTER_STATIONARY,
    SHARED_STATIONARY,
    ConvolutionSchedule,
    Way,
)
from fusepass.codegen.schedule_product import ProductSchedule
from fusepass.codegen.schedule_product.tiles import Tiling

Writer = Callable[[Any], Callable[[Kernel, Any, Place], ConvolutionWriter]]


def _anchored(test: Callable[[Convolution], bool]) -> Callable[[Kernel, ConvolutionSchedule], bool]:
    return lambda kernel, plan: isinstance(kernel.anchor, Convolution) and test(kernel.anchor)


class ConvolutionFamily(Family[ConvolutionSchedule]):
    """Convolutions that are laid out in one `way`; `writer` says by whom a plan is written."""

    headers: ClassVar[Headers] = (
        (lambda kernel, plan: True, ("fp_instructions.cuh", "fp_product.cuh")),
        (_anchored(lambda anchor: anchor.warps > 1), ("fp_wgmma.cuh", "fp_group.cuh")),
        (_anchored(lambda anchor: anchor.halves is not None), ("fp_wgmma_places.cuh", "fp_places.cuh")),
        (_anchored(lambda anchor: isinstance(anchor.halves, ScaledWeights)), ("fp_scaled.cuh",)),
        (_anchored(lambda anchor: anchor.held), ("fp_wgmma_sparse.cuh", "fp_held.cuh")),
        (_anchored(lambda anchor: anchor.column > 1), ("fp_partials.cuh",)),
        (lambda kernel, plan: kernel.partials is not None, ("fp_partials.cuh",)),
    )

    def __init__(self, way: Way, writer: Writer) -> None:
        self.way, self.writer, self.name = way, writer, f"convolution, {way.name}"

    def takes(self, kernel: Kernel, program: Program) -> bool:
        return isinstance(kernel.anchor, Convolution) and self.way.takes(kernel.anchor)

    def plan(
        self, kernel: Kernel, program: Program, facts: DeviceFacts, *, aligned: bool = True
    ) -> ConvolutionSchedule | None:
        return self.way.plan(kernel, program, facts, aligned=aligned)

    def serves(self, kernel: Kernel, program: Program, facts: DeviceFacts) -> bool:
        return schedule_convolution.serves(program, kernel, facts)

    def preferred(self, kernel: Kernel, program: Program, facts: DeviceFacts) -> bool:
        return schedule_convolution.preferred(program, kernel, facts)

    def describe(self, kernel: Kernel, plan: ConvolutionSchedule) -> str:
        return f"convolution, {kernel.row_count} elements: {plan}{self.pieces_in_words(kernel)}"

    def write(self, kernel: Kernel, plan: ConvolutionSchedule, place: Place) -> Text:
        return self.writer(plan)(kernel, plan, place).write()


CONVOLUTIONS = (
    ConvolutionFamily(REGISTER_STATIONARY, lambda plan: RegisterStationaryWriter),
    ConvolutionFamily(CHUNKS, lambda plan: ScalingWriter if plan.source else PackedWriter),
    ConvolutionFamily(SHARED_STATIONARY, lambda plan: SharedStationaryWriter),
    ConvolutionFamily(MULTISTAGE, lambda plan: MultistageWriter),
)
"""In the order of the ways."""


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
            ("fp_tensor_map.cuh", "fp_barriers.cuh", "fp_matmul_teams.cuh"),
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
        return schedule_product.schedule_product(kernel, program, facts, aligned=aligned)

    def seconds(self, kernel: Kernel, program: Program, facts: DeviceFacts, plan: ProductSchedule) -> float:
        return plan.seconds

    def serves(self, kernel: Kernel, program: Program, facts: DeviceFacts) -> bool:
        return schedule_product.serves(program, kernel, facts)

    def preferred(self, kernel: Kernel, program: Program, facts: DeviceFacts) -> bool:
        return schedule_product.preferred(program, kernel, facts)

    def boxes(self, kernel: Kernel, plan: ProductSchedule) -> tuple[Boxes, ...]:
        return boxes_of(kernel, plan)

    def write(self, kernel: Kernel, plan: ProductSchedule, place: Place) -> Text:
        idle = () if kernel.when is None else (f"if ({place.pointers[kernel.when]}[0] == 0.0f) return;",)
        return Text((*idle, *ProductWriter(kernel, plan, place).lines()))


PRODUCT = MatrixProduct()
