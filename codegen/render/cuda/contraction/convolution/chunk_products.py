"""Writes the products of a CUDA kernel with a convolution by scaled halves: where their operands lie, and what adds them up."""

from __future__ import annotations

import abc
from math import ceil, prod

from fusepass.codegen.ir.convolution import few_halves
from fusepass.codegen.ir.dtype import DType, Precision
from fusepass.codegen.ir.index import contiguous_strides
from fusepass.codegen.render.cuda.contraction.convolution.persistent import PersistentWriter
from fusepass.codegen.render.cuda.contraction.convolution.tiles import coordinates
from fusepass.codegen.render.spelling import C_TYPES
from fusepass.codegen.schedule_convolution.chunks import BLOCK, LONGEST_CHAIN, ChunkSchedule

_CHAIN = 4  # products that are begun at once
_MOST_AT_ONCE = 64  # whose descriptors are written out


class ProductsWriter(PersistentWriter, abc.ABC):
    """Lines of such a kernel.

    Attributes:
        plan: its shape.
        places_name, steps_name: tables, of where products find their places, and of the first products of phases.
    """

    plan: ChunkSchedule
    places_name: str
    steps_name: str

    def block_place(self) -> str:
        """Where the places of ``block``, a block of positions, begin in a tile."""
        plan, on = self.plan, self.on
        row = on.tile[-1] // BLOCK
        if plan.neighbours:
            axes = [*zip(on.tile[:-1], contiguous_strides(on.extent)[:-1], strict=True), (row, BLOCK)]
        else:  # in a plane, they are equally far from each other
            axes = [(prod(on.tile[:-2]), prod(on.extent[-2:])), (row * prod(on.tile[-2:-1]), plan.run)]
        axes = [(size, stride) for size, stride in axes if size > 1]
        sizes, strides = zip(*axes, strict=True) if axes else ((), ())
        return " + ".join(map("{} * {}".format, coordinates(self.c.block, sizes), strides)) or "0"

    @property
    def chains(self) -> tuple[int, int]:
        """Products that may be added in the tensor core with any others, and those of which no more than `LONGEST_CHAIN` may in a row; of the largest phase."""
        crossed = max(map(self.plan.crossed, self.on.phases))
        limited = max(self.plan.slices) - crossed if self.anchor.precision is Precision.FLOAT32 else 0
        return max(self.plan.slices) - limited, limited

    @property
    def at_once(self) -> bool:
        """Whether the products of a chain are written out, those of few channels."""
        plan, exact = self.plan, self.anchor.precision is Precision.FLOAT32
        few = few_halves(plan.channels, self.anchor.step) and plan.slices[0] <= _MOST_AT_ONCE
        return few and len(self.on.phases) == 1 and plan.by_parts is exact

    def sum_up(self) -> list[str]:
        """The products of one phase."""
        c = self.c
        # Both bounds come from memory: of loops whose counts it knows, the compiler begins too many products at once.
        plan, (free, limited) = self.plan, self.chains
        phase = f"{c.phase} + {self.phase}" if len(self.on.phases) > 1 else str(self.phase)
        at, each = (f"({phase}) * 2", 2) if plan.by_parts else (phase, 1)
        bounds = [f"{self.steps_name}[{at}{f' + {number}' if number else ''}]" for number in range(each + 1)]
        chain = ceil(limited / ceil(limited / LONGEST_CHAIN)) if limited else _CHAIN
        half = C_TYPES[self.source.dtype if self.source.dtype.is_half else DType.F16]
        call = f"fp::add_places{('_by_parts' if plan.by_parts else '_exactly') if limited else ''}<{half}, {chain}>"
        if self.at_once:
            call, bounds = f"fp::sum_up_places<{half}, {chain}, {free}, {limited}>", []
        given = ", ".join((f"{c.sums}[{self.phase}]", self.places_name, *bounds, *self.descriptors()))
        return [f"{call}({given});"]

    def descriptors(self) -> tuple[str, str, str]:
        """Of inputs and weights, and how far the weights of a product are from those of the next one."""
        c = self.c
        plan = self.plan
        unit = plan.columns * 2
        weights = f"fp::tile_descriptor({c.weights}, 128, 256)"
        if plan.phase_blocks > 1:
            weights += f" - {c.first_product} * {unit}"
        if plan.iterations > 1:
            weights += f" + {c.turn} * {plan.iteration_bytes // 16}"
        return c.inputs, weights, str(unit)
