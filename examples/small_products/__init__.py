"""A family of CUDA kernels in one folder, to copy from: products of 16-bit matrices in tiles so small that little work fills a device.

A block of four warps has 32 x 32 results. Operands come through shared memory, 32 terms at a time, by asynchronous copies two such steps ahead; each
warp multiplies 16 x 16 of them on tensor cores (mma.sync), and goes on with its sums in registers. CONTRIBUTING.md walks through this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import cast

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.expr import ReductionResult
from fusepass.codegen.ir.product import Arithmetic, Product
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.render.cuda.family import Family, Place, Text
from fusepass.codegen.render.printer import Printer, Scope
from fusepass.codegen.render.spelling import C_TYPES, block, loop
from fusepass.codegen.schedule_product import Access, access_of

TILE, TERMS, STAGES, VECTOR = 32, 32, 3, 8
PITCH = TERMS + VECTOR  # halves from one row of a stage to the next: eight rows of 16 bytes are in different banks


@dataclass(frozen=True)
class Plan:
    blocks: int
    steps: int
    threads: int = 128
    shared_bytes: int = 2 * STAGES * 2 * TILE * PITCH
    resident: int = 0

    def __str__(self) -> str:
        return f"{self.blocks} blocks, tiles of {TILE} x {TILE}, {self.steps} steps of {TERMS} terms"


class SmallProducts(Family[Plan]):
    name = "small product"
    headers = ((lambda kernel, plan: True, ("fp_instructions.cuh",)),)

    def takes(self, kernel: Kernel, program: Program) -> bool:
        """Whole sums of 16-bit operands, and a pointwise chain behind them."""
        others = kernel.cols, kernel.partials, kernel.within, kernel.when
        product = None if any(others) or not isinstance(kernel.anchor, Product) else kernel.anchor
        return product is not None and product.arithmetic is Arithmetic.HALVES and product.pieces == 1

    def plan(self, kernel: Kernel, program: Program, facts: DeviceFacts, *, aligned: bool = True) -> Plan | None:
        """Where all rows begin and end at a multiple of 16 bytes, and indices have 32 bits."""
        product, (_, batch, *sizes) = cast(Product, kernel.anchor), kernel.matrix
        for operand, size in zip((product.left, product.right), sizes, strict=True):
            wide = access_of(program, product, operand, batch, size, aligned) == Access(inner_first=True, vector=VECTOR)
            if not wide or operand.border or not isinstance(operand.row, int) or operand.inner != 1:
                return None
        small = product.inner % VECTOR == 0 and max(program.buffer(name).extent for name in kernel.buffers) < 2**30
        plan = Plan(batch * ceil(sizes[0] / TILE) * ceil(sizes[1] / TILE), ceil(product.inner / TERMS))
        return plan if small and facts.tensor_cores else None

    def seconds(self, kernel: Kernel, program: Program, facts: DeviceFacts, plan: Plan) -> float:
        """Of the multiprocessor with most blocks, or of memory if that takes longer."""
        rate = 0.3 * facts.machine.rates.warp_products.halves / (2 * TILE * TILE * TERMS)  # steps in a second
        moving = sum(program.buffer(name).nbytes for name in kernel.buffers) / facts.bandwidth
        return max(ceil(plan.blocks / facts.multiprocessors) * plan.steps / rate, moving)

    def write(self, kernel: Kernel, plan: Plan, place: Place) -> Text:
        c, product, (_, _, rows, columns) = place.names.locals, cast(Product, kernel.anchor), kernel.matrix
        half, down, across = C_TYPES[product.dtype], ceil(rows / TILE), ceil(columns / TILE)
        fetch = [f"const int {c.row} = threadIdx.x / 4, {c.term} = {c.ahead} * {TERMS} + threadIdx.x % 4 * {VECTOR};"]
        sides = (product.left, rows, c.first_row, 0), (product.right, columns, c.first_column, TILE)
        for operand, count, first, behind in sides:
            index = f"{operand.offset} + {c.batch} * {operand.batch} + ({first} + {c.row}) * {operand.row} + {c.term}"
            to = f"{c.staged} + ({c.ahead} % {STAGES} * {2 * TILE} + {behind} + {c.row}) * {PITCH} + {c.term} % {TERMS}"
            real = f"{first} + {c.row} < {count} && {c.term} < {product.inner} ? 16 : 0"  # bytes; others are zeros
            fetch += [f"fp::begin_copy_bytes<16>({to}, {place.pointers[operand.buffer]} + {index}, {real});"]
        multiply = [  # `fp_instructions.cuh` says which numbers a thread has
            f"uint32_t {c.a}[4], {c.b}[4];",
            f"fp::load_tiles<false>({c.a}, {c.at} + ({c.down} + {c.lane} % 16) * {PITCH} + {c.lane} / 16 * 8);",
            f"fp::load_tiles<false>({c.b}, {c.at} + ({TILE} + {c.along} + {c.lane} / 16 * 8 + {c.lane} % 8) * {PITCH} + {c.lane} / 8 % 2 * 8);",
            f"const uint32_t {c.halves}[2][2] = {{{{{c.b}[0], {c.b}[1]}}, {{{c.b}[2], {c.b}[3]}}}};",
            *(f"fp::multiply_tile<{half}>({c.sums}[{n}], {c.a}, {c.halves}[{n}]);" for n in range(2)),
        ]
        step = [
            f"fp::await_copies<{STAGES - 2}>();",
            "__syncthreads();",
            *fetch,
            "fp::end_copies();",
            f"if ({c.ahead} < {STAGES - 1}) continue;",
            f"const {half}* {c.at} = {c.staged} + ({c.ahead} + 1) % {STAGES} * {2 * TILE * PITCH};",
            *block(f"for (int {c.k} = 0; {c.k} < {TERMS}; {c.k} += 16, {c.at} += 16)", multiply),
        ]
        body = [
            f"extern __shared__ __align__(16) unsigned char {c.pool}[];",
            f"{half}* const {c.staged} = reinterpret_cast<{half}*>({c.pool});",
            f"const int {c.batch} = blockIdx.x / {down * across}, {c.lane} = threadIdx.x % 32;",
            f"const int {c.first_row} = blockIdx.x / {across} % {down} * {TILE}, {c.down} = threadIdx.x / 64 * 16;",
            f"const int {c.first_column} = blockIdx.x % {across} * {TILE}, {c.along} = threadIdx.x / 32 % 2 * 16;",
            f"float {c.sums}[2][4] = {{}};",
            *block(f"for (int {c.ahead} = 0; {c.ahead} < {plan.steps + STAGES - 1}; ++{c.ahead})", step),
        ]
        return Text((*body, *_results(kernel, place)))


def _results(kernel: Kernel, place: Place) -> list[str]:
    """The chain and its stores, for each sum of a thread."""
    c, scope = place.names.locals, Scope(Printer(place.names, place.pointers, branches=False))
    for axis, name in zip(kernel.rows, ("0", c.batch, c.row, c.column), strict=True):
        scope.define_axis(axis, name)
    scope.printer.expect(kernel.roots)
    total = next(node for node in kernel.nodes if isinstance(node, ReductionResult))
    scope.bind(total, f"{c.sums}[{c.i} / 4][{c.i} % 4]")
    stores = [scope.stored(store, place.program.buffer(store.buffer).dtype) for store in kernel.stores]
    each = [
        f"const int {c.row} = {c.first_row} + {c.down} + {c.lane} / 4 + {c.i} / 2 % 2 * 8;",
        f"const int {c.column} = {c.first_column} + {c.along} + {c.i} / 4 * 8 + {c.lane} % 4 * 2 + {c.i} % 2;",
        *block(f"if ({c.row} < {kernel.matrix[2]} && {c.column} < {kernel.matrix[3]})", [*scope.lines, *stores]),
    ]
    return loop(c.i, 8, each)
