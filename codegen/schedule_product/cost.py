"""How long the kernel of a matrix product takes, by estimate."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import ceil, prod

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.expr import Apply, Expr, walk
from fusepass.codegen.ir.ops import CHEAP
from fusepass.codegen.ir.product import Arithmetic, Product
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.machine import Rates
from fusepass.codegen.schedule_product.tiles import Tiling
from fusepass.codegen.schedule_product.vectors import are_vectors

_ALONE = 0.8  # of the blocks that a multiprocessor can hold, it needs for its rate
_STREAMS = 0.6  # of the multiprocessors must copy to reach the memory's rate
_COSTLY, _PHASE = 12, 8  # instructions of an operation that is not cheap, and of taking and reducing a value
_IN_STRIPS = 1.5  # times as long, where sums are laid out strip by strip and nobody multiplies meanwhile: measured
_LAST = 4e-6  # seconds of a block that stays before its first product and behind its last one: measured
_NARROW_STORE = 13  # instructions that a result of 16 bits costs besides where a thread stores it alone: measured
_HIDDEN = 0.5  # of what follows sums, where another block, or group of warps, multiplies meanwhile
# Of its rate a tile reaches that takes each place of a run by itself, which has no neighbour in its row.
_TORN_RUNS = 0.5
# Seconds that a multiprocessor is kept from multiplying while a warp copies less than whole accesses, measured: 2 to 6 ns.
_NARROW = 3e-9
_WAIT = 2e-6  # seconds in which a block gets its first numbers and its results leave


class Estimate:
    """How long the kernel of a product takes in tiles of one kind or another."""

    def __init__(self, kernel: Kernel, program: Program, facts: DeviceFacts) -> None:
        assert isinstance(kernel.anchor, Product)
        self._kernel, self._product, self._facts = kernel, kernel.anchor, facts
        written = {store.buffer for store in kernel.stores}  # partial results, of which there are few, decide nothing
        self._narrow_stores = sum(program.buffer(store.buffer).dtype.is_half for store in kernel.stores)
        self._moving = sum(program.buffer(name).nbytes for name in kernel.reads | written) / facts.bandwidth

    def seconds(self, tiling: Tiling, blocks: int, beside: int, narrow: float) -> float:
        """Seconds: the multiprocessor with most blocks, or memory if that takes longer.

        A block of few panels has nothing to multiply while they come, or while its results leave: that others do, as many as stand `beside`
        each other. Of a panel, `narrow` copies are less than whole accesses, those not counted that other blocks hide.
        """
        product, facts, panels = self._product, self._facts, tiling.panels(self._product)
        one = 2 * tiling.rows * tiling.columns * tiling.depth(product)
        each = max(ceil(blocks / facts.multiprocessors), _ALONE * tiling.resident)
        share = tiling.share * (_TORN_RUNS if product.runs and not tiling.runs else 1)
        computing = each * one / (_rate(facts.machine.rates, tiling, product.arithmetic) * share)
        idle = max(_STREAMS * facts.multiprocessors / blocks, 1.0) if blocks else 1.0
        short, following = not (tiling.runs or tiling.teams) and panels < tiling.stages, 0.0
        if short or product.arithmetic is Arithmetic.HALVES:
            hidden = tiling.resident > 1 or tiling.iterations or tiling.teams > 1
            following = self._following * (_HIDDEN if hidden else _IN_STRIPS if tiling.teams else 1)
        copying = 0.0 if short else each * panels * narrow / 32 * _NARROW
        starting = tiling.staying(product.runs) * facts.multiprocessors / facts.bandwidth if product.runs else 0.0
        starting += _LAST if tiling.teams else 0.0
        working = starting + computing + copying + following
        if not short:
            return max(working, idle * self._moving)
        alone = _WAIT * blocks / facts.multiprocessors + working + self._moving
        return max(working, idle * self._moving, alone / beside)

    @cached_property
    def _following(self) -> float:
        """Seconds for what the kernel does behind its sums."""
        kernel, facts = self._kernel, self._facts
        phases = [[value for each in loop for value in each.values] for loop in kernel.reduction_loops]
        phases += [[store.value for store in kernel.stores]] if kernel.stores else []
        phases += [[kernel.partials.value]] if kernel.partials else []
        each = sum(_PHASE + _instructions(phase) for phase in phases)
        if self._narrow_stores and not are_vectors(kernel, 2):
            each += _NARROW_STORE * self._narrow_stores
        once = _instructions([store.value for store in kernel.row_stores])
        count = prod(kernel.matrix[1:]) * (each + once / kernel.col_count)
        return count / 32 / (facts.machine.rates.after_products * facts.multiprocessors)


def _rate(rates: Rates, tiling: Tiling, arithmetic: Arithmetic) -> float:
    """Floating-point operations of a multiprocessor in a second, with the best tile."""
    found = rates.group_products if tiling.groups else rates.warp_products
    match arithmetic:
        case Arithmetic.TF32_THREE:
            return found.tf32_three
        case Arithmetic.TF32:
            return found.tf32
        case Arithmetic.HALVES:
            return found.halves


def _instructions(roots: Sequence[Expr]) -> int:
    done = [node for node in walk(*roots) if isinstance(node, Apply)]
    return sum(1 if node.op in CHEAP else _COSTLY for node in done)
