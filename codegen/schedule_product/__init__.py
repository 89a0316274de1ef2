"""How a matrix product is laid on a GPU's tensor cores, and whether it should be.

A block multiplies a tile of rows by a tile of columns, panel after panel of 128 bytes along the inner dimension, several
panels on their way through shared memory at a time. Where tiles do not fill the device, sums are computed in pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, prod

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.index import Axis
from fusepass.codegen.ir.product import Arithmetic, Operand, Product, parts_of, reach
from fusepass.codegen.ir.program import Kernel, Program, Role
from fusepass.codegen.schedule_product.cost import Estimate
from fusepass.codegen.schedule_product.tiles import PANEL_BYTES, TILINGS, Access, Tiling

GROUP = 8  # tiles of rows that blocks go through before the next tile of columns
_ACCESS, _ASYNCHRONOUS = 16, 4  # bytes of the widest copy, and of the smallest one by `cp.async`
_BLOCK_SHARED = 1 << 10  # bytes of shared memory that the system keeps for each block
_MAX_INT = 2**31 - 2**21
_MAX_BLOCKS = 2**31 - 1
_MOST_PIECES = 64
_LEAST_PANELS = 8  # of a piece
_LEAST_OF_TEAMS = 512  # terms: with fewer, what follows sums decides, and nothing is measured
_LAUNCH = 3e-6  # seconds that one more kernel costs

_HELPERS = 128  # threads
QUAD = 4  # neighbours that a product which makes its right operand loads at once
_LEAST_SIZE = 256  # rows, columns and terms from which the estimates above hold
_CLEAR = 1.5  # times faster, by estimate, to be chosen unmeasured


@dataclass(frozen=True)
class ProductSchedule:
    """The shape of one launch.

    Attributes:
        tiling: with `stages` and `resident` as they fit the device.
        left, right: how the operands are copied.
        tiles: tiles along the rows and along the columns.
        batches: matrices, times pieces.
        blocks: one for each tile of each of these; fewer where blocks stay.
        shared_bytes: dynamic shared memory of a block.
        wide: whether indices need 64 bits.
        arithmetic: the product's.
        seconds: how long it takes, by estimate.
        aligned: whether inputs start at a multiple of 16 bytes.
        helpers: threads that do not multiply, but copy the operands or make the right one.
    """

    tiling: Tiling
    left: Access
    right: Access
    tiles: tuple[int, int]
    batches: int
    blocks: int
    shared_bytes: int
    wide: bool
    arithmetic: Arithmetic
    seconds: float
    aligned: bool = True
    helpers: int = 0

    @property
    def threads(self) -> int:
        return self.tiling.threads + self.helpers

    @property
    def pieces(self) -> int:
        """Pieces in which each row is reduced: what a warp has of it."""
        return self.tiles[1] * self.tiling.warps_across

    @property
    def resident(self) -> int:
        return self.tiling.resident

    def __str__(self) -> str:
        tile = f"tiles of {self.tiling.rows} x {self.tiling.columns}, {self.tiling.stages} stages"
        return f"{self.blocks} blocks, {tile}, {self.arithmetic.value}"


def serves(program: Program, kernel: Kernel, facts: DeviceFacts) -> bool:
    """Whether there is a schedule for the product of `kernel` on the device."""
    return facts.tensor_cores and schedule_product(kernel, program, facts) is not None


def pieces_on(program: Program, kernel: Kernel, facts: DeviceFacts) -> int | None:
    """In how many pieces the kernel of a product reduces each row on a device.

    None where it cannot be laid out for it, or where its sums are better computed in pieces.
    """
    if not facts.tensor_cores or product_length(program, kernel, facts) < _product(kernel).inner:
        return None
    plan = schedule_product(kernel, program, facts)
    return None if plan is None else plan.pieces


def fills(program: Program, kernel: Kernel, facts: DeviceFacts) -> bool:
    """Whether the product of `kernel`, which makes its right operand, is better than the same one that reads it.

    That is so where each place is made once, for all rows, and four neighbours of a channel are loaded at once.
    """
    product, filling = _product(kernel), _product(kernel).filling
    if filling is None or not facts.tensor_cores:
        return False
    packed = replace(kernel, anchor=replace(product, fills=False))
    plan, read = (schedule_product(each, program, facts) for each in (kernel, packed))
    if plan is None or read is None or not read.tiling.chained or plan.tiles[0] > 1:
        return False
    # Both leave partial results, the one that reads behind an overflow flag.
    if plan.pieces != read.pieces or prod(size for *_, size in filling.image) >= _MAX_INT:
        return False
    last, _, _ = filling.image[-1]
    return not any(number % QUAD for number in (last, filling.sample, filling.channel))


def preferred(program: Program, kernel: Kernel, facts: DeviceFacts) -> bool:
    """Whether the product of `kernel` is generated without a measurement.

    Only where arithmetic speaks clearly for it: float32 without TF32, which the library multiplies outside of the tensor
    cores, at 51 TFLOP/s on an H200. Three TF32 products should reach some 100 there. Nothing is known of other devices.
    """
    product = _product(kernel)
    _, _, rows, columns = kernel.matrix
    if product.arithmetic is not Arithmetic.TF32_THREE or not facts.warp_groups:
        return False
    if min(rows, columns, product.inner) < _LEAST_SIZE or not serves(program, kernel, facts):
        return False
    library = _flops(kernel) / (facts.machine.rates.library_float32 * facts.multiprocessors)
    return _CLEAR * _pieces_and_seconds(program, kernel, facts)[1] <= library


def product_length(program: Program, kernel: Kernel, facts: DeviceFacts) -> int:
    """The terms that a piece of the product's sums should have; all of them where whole sums are the better way."""
    return _pieces_and_seconds(program, kernel, facts)[0]


def seconds_with_copies(program: Program, kernel: Kernel, facts: DeviceFacts) -> float:
    """How long the product of `kernel` takes, and what copies its operands."""
    product = _product(kernel)
    read = [program.buffer(operand.buffer) for operand in (product.left, product.right)]
    copies = [_LAUNCH + 2 * buffer.nbytes / facts.bandwidth for buffer in read if buffer.role is Role.TEMP]
    return _pieces_and_seconds(program, kernel, facts)[1] + sum(copies)


def _pieces_and_seconds(program: Program, kernel: Kernel, facts: DeviceFacts) -> tuple[int, float]:
    """The best length of a piece, and the estimated time with it."""
    product = _product(kernel)
    found = [(_seconds(program, kernel, facts, length), -length) for length in _lengths(product)]
    seconds, length = min(found)
    return -length, seconds


def _lengths(product: Product) -> Iterator[int]:
    yield product.inner
    depth = PANEL_BYTES // product.dtype.nbytes
    panels = ceil(product.inner / depth)
    pieces = 2
    while pieces <= _MOST_PIECES and panels >= pieces * _LEAST_PANELS:
        yield ceil(panels / pieces) * depth
        pieces *= 2


def _seconds(program: Program, kernel: Kernel, facts: DeviceFacts, length: int) -> float:
    product = replace(_product(kernel), length=length)
    rows = (Axis("piece", product.pieces), *kernel.rows[1:])
    plan = schedule_product(replace(kernel, anchor=product, rows=rows), program, facts)
    if plan is None:
        return float("inf")
    partial = 4 * prod(axis.size for axis in rows)
    merging = _LAUNCH + 2 * partial / facts.bandwidth if product.pieces > 1 else 0.0
    return plan.seconds + merging


def _flops(kernel: Kernel) -> int:
    return 2 * prod(kernel.matrix[1:]) * _product(kernel).inner


def _product(kernel: Kernel) -> Product:
    assert isinstance(kernel.anchor, Product)
    return kernel.anchor


def schedule_product(
    kernel: Kernel, program: Program, facts: DeviceFacts, *, aligned: bool = True
) -> ProductSchedule | None:
    """The schedule that takes least time by estimate; None where no tile fits the device.

    `aligned` says that inputs start at a multiple of 16 bytes. Copies of others are narrower, by which another tile may be the best; but a
    kernel that was made to reduce in pieces keeps to a tile that has as many.
    """
    _, batch, rows, columns = kernel.matrix
    product, estimate = _product(kernel), Estimate(kernel, program, facts)
    left = access_of(program, product, product.left, batch, rows, aligned)
    right = access_of(program, product, product.right, batch, columns, aligned)
    halves = any(program.buffer(store.buffer).dtype.is_half for store in kernel.stores)
    long = product.inner >= _LEAST_OF_TEAMS
    among = [tiling for tiling in TILINGS if long or not tiling.teams]
    fitting = [tiling for tiling in among if _serves(tiling, kernel, facts, left, right, halves)]
    found = [
        plan for tiling in fitting if (plan := _candidate(kernel, facts, estimate, tiling, left, right)) is not None
    ]
    if kernel.partials is not None:
        found = [plan for plan in found if plan.pieces == kernel.partials.pieces.size] or found
    best = min(found, key=lambda plan: plan.seconds, default=None)
    return best and replace(best, wide=_is_wide(kernel, program, best.tiling), aligned=aligned)


def _serves(tiling: Tiling, kernel: Kernel, facts: DeviceFacts, left: Access, right: Access, halves: bool) -> bool:
    """Whether a device multiplies the operands of `kernel` in such tiles, and what it stores is laid out in them, `halves` or not."""
    if not tiling.serves(_product(kernel), left, right) or (tiling.groups and not facts.warp_groups):
        return False
    if kernel.cols and not _holds_columns(kernel, tiling):
        return False
    return not (tiling.chained and halves)  # 32 columns are laid out at a time, half lines of such results


def _candidate(
    kernel: Kernel, facts: DeviceFacts, estimate: Estimate, tiling: Tiling, left: Access, right: Access
) -> ProductSchedule | None:
    """The schedule in tiles of one kind, as far as it does not depend on buffers; None where these do not fit."""
    product = _product(kernel)
    pieces, batch, rows, columns = kernel.matrix
    stage = tiling.stage(product, left, right)
    fitted = _fitted(tiling, stage, product, facts)
    if fitted is None:
        return None
    tiles = (ceil(rows / tiling.rows), ceil(columns / tiling.columns))
    count = pieces * batch * prod(tiles)
    if count > _MAX_BLOCKS or (tiling.iterations and tiles[0] > facts.multiprocessors):
        return None
    shared = fitted.shared(stage, product)
    sides = ((left, fitted.rows), (right, fitted.columns))
    narrow = sum(_narrow(access.vector * product.dtype.nbytes, height, fitted) for access, height in sides)
    beside = _beside(fitted, shared, product, facts)
    staying = count
    if tiling.iterations:
        staying = min(facts.multiprocessors // tiles[0], count // tiles[0]) * tiles[0]
    elif tiling.teams:
        staying = min(facts.multiprocessors, count)
    return ProductSchedule(
        tiling=fitted,
        left=left,
        right=right,
        tiles=tiles,
        batches=pieces * batch,
        blocks=staying,
        shared_bytes=shared,
        wide=False,
        arithmetic=product.arithmetic,
        seconds=estimate.seconds(fitted, count, beside, narrow),
        helpers=_HELPERS if product.fills or tiling.teams else 0,
    )


def access_of(program: Program, product: Product, operand: Operand, batch: int, rows: int, aligned: bool) -> Access:
    """The widest copies for which strides prove the alignment."""
    along, across = parts_of(operand.inner, product.inner), parts_of(operand.row, rows)
    inner_first = along[-1][1] == 1 and (across[-1][1] != 1 or product.inner >= rows)
    if not inner_first:
        along, across = across, along
    run, step = along[-1]
    if step != 1:
        return Access(inner_first=True, vector=1)
    vector = _ACCESS // product.dtype.nbytes
    if not aligned and program.buffer(operand.buffer).role is Role.INPUT:
        vector = 1
    others = (*across, *along[:-1], (batch, operand.batch), (2, operand.offset))
    while any(count > 1 and stride % vector for count, stride in others) or (len(along) > 1 and run % vector):
        vector //= 2
    return Access(inner_first, vector)


def _narrow(nbytes: int, height: int, tiling: Tiling) -> float:
    """Copies of so many bytes to a panel of `height` rows, if that is less than a whole access. For asynchronous ones, one of several blocks waits
    at a time; smaller ones go through registers, and all blocks wait.
    """
    if nbytes >= _ACCESS:
        return 0.0
    copies = height * PANEL_BYTES / nbytes
    return copies / tiling.resident if nbytes >= _ASYNCHRONOUS else copies


def _fitted(tiling: Tiling, stage: int, product: Product, facts: DeviceFacts) -> Tiling | None:
    """`tiling` with as many resident blocks, then stages, as the shared memory has room for."""
    for resident in range(tiling.resident, 0, -1):
        for stages in range(tiling.stages, tiling.least_stages(product.runs) - 1, -1):
            fitted = replace(tiling, stages=stages, resident=resident)
            if resident <= _room(fitted.shared(stage, product), facts):
                return fitted
    return None


def _room(shared: int, facts: DeviceFacts) -> int:
    """For how many blocks with so many bytes a multiprocessor has shared memory."""
    return (facts.shared_bytes_per_block + _BLOCK_SHARED) // (shared + _BLOCK_SHARED)


def _beside(tiling: Tiling, shared: int, product: Product, facts: DeviceFacts) -> int:
    """How many blocks a multiprocessor has memory and registers for, roughly."""
    registers = tiling.threads * tiling.registers(product.arithmetic)
    return max(min(_room(shared, facts), facts.registers // registers), 1)


def _is_wide(kernel: Kernel, program: Program, tiling: Tiling) -> bool:
    """Whether a place of an operand, up to a tile and a panel past its end, or of another buffer needs 64 bits."""
    product, (_, _, rows, columns) = _product(kernel), kernel.matrix
    extents = [program.buffer(name).extent for name in kernel.reads | kernel.writes]
    for operand, count, tile in ((product.left, rows, tiling.rows), (product.right, columns, tiling.columns)):
        extents.append(reach(operand.row, count + tile) + reach(operand.inner, product.inner + PANEL_BYTES))
    return max(*extents, prod(kernel.matrix)) >= _MAX_INT


def _holds_columns(kernel: Kernel, tiling: Tiling) -> bool:
    """Whether a tile has all columns of the kernel's rows that begin in it, as far as it has any, laid out in one piece."""
    if not tiling.is_plain or _product(kernel).arithmetic is not Arithmetic.HALVES:
        return False
    apart = _product(kernel).apart
    if not apart:
        return tiling.laid_out % kernel.col_count == 0
    if tiling.iterations or tiling.teams:
        return False
    together = kernel.col_count * apart
    return together <= tiling.rows and (kernel.rows[2].size == apart or tiling.rows % together == 0)
