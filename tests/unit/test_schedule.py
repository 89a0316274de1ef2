"""Schedules of sample kernels on a described H200, and the properties that every schedule has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.ir.expr import Builder, ReduceOp
from fusepass.codegen.ir.index import Axis, axis_index
from fusepass.codegen.ir.program import Kernel, Program, Role, Store
from fusepass.codegen.ir.tile import Tile
from fusepass.codegen.schedule import schedule
from fusepass.codegen.schedule.plan import CircularBuffer, Keep, Pieces, Schedule, TeamPart
from fusepass.codegen.schedule.plan_flat import Pointwise, Transposed
from fusepass.codegen.schedule.plan_output_tile import OutputTile, PlaneTile
from fusepass.codegen.schedule.plan_rows import Columns, Rows
from fusepass.errors import ScheduleError
from tests.support import kernels as k
from tests.support.regions import NO_SPLIT, region

H200 = DeviceFacts.h200()


def first(program: Program, *, aligned: bool = True) -> Schedule:
    return schedule(program.kernels[0], program, H200, aligned=aligned)


@pytest.mark.parametrize(
    ("make", "walk", "width", "lanes", "keep"),
    [
        (lambda: k.affine(1 << 28), Pointwise, 4, 256, Keep.NOTHING),
        (lambda: k.affine(1 << 28, k.F16), Pointwise, 8, 256, Keep.NOTHING),
        (lambda: k.affine(100_000_003), Pointwise, 4, 256, Keep.NOTHING),
        (lambda: k.affine(1), Pointwise, 1, 64, Keep.NOTHING),
        (lambda: k.max_pool(64, 256, 2, 2, 0), Pointwise, 2, 256, Keep.NOTHING),
        (lambda: k.layer_norm(1 << 22, 64), Rows, 4, 4, Keep.REGISTERS),
        (lambda: k.layer_norm(1 << 16, 1024), Rows, 4, 32, Keep.REGISTERS),
        (lambda: k.layer_norm(1 << 14, 8192), Rows, 4, 256, Keep.REGISTERS),
        (lambda: k.layer_norm(1 << 12, 49_152), Rows, 4, 512, Keep.REGISTERS),
        (lambda: k.layer_norm(1 << 12, 20_000), Rows, 4, 512, Keep.REGISTERS),
        (lambda: k.layer_norm(12, 49_152), Rows, 4, 512, Keep.REGISTERS),  # more threads have too few registers
        (lambda: k.layer_norm(1 << 12, 5121), Rows, 4, 128, Keep.REGISTERS),
        (lambda: k.layer_norm(1 << 12, 54_000), Rows, 4, 1024, Keep.FETCHED),
        (lambda: k.layer_norm(1 << 12, 98_304, k.F16), Rows, 8, 1024, Keep.FETCHED),  # kept as halves
        (lambda: k.layer_norm(1 << 10, 1 << 20), Rows, 4, 1024, Keep.NOTHING),
        (lambda: k.softmax_rows(1 << 22, 2), Rows, 2, 1, Keep.REGISTERS),
        (lambda: k.softmax_rows(1, 30_000), Rows, 4, 1024, Keep.REGISTERS),
        (lambda: k.softmax_channels(64, 8, 1 << 16), Columns, 4, 128, Keep.REGISTERS),
        (lambda: k.softmax_channels(16, 32, 1 << 14), Columns, 2, 32, Keep.REGISTERS),
        (lambda: k.softmax_channels(16, 64, 1 << 14), Columns, 2, 32, Keep.REGISTERS),
        (lambda: k.softmax_channels(32, 256, 1 << 14), Columns, 2, 32, Keep.REGISTERS),
        (lambda: k.softmax_channels(64, 512, 1 << 12), Columns, 2, 16, Keep.REGISTERS),
        (lambda: k.softmax_channels(16, 1000, 49), Columns, 1, 8, Keep.REGISTERS),
        (lambda: k.batch_norm_stats(16, 32, 63 * 63 * 4), Rows, 4, 1024, Keep.NOTHING),
        (lambda: k.batch_norm_1d(16_384, 4096), Columns, 1, 16, Keep.NOTHING),
        (lambda: k.row_reduction(264, 131_072, ReduceOp.MOMENTS), Rows, 4, 512, Keep.NOTHING),
    ],
)
def test_choices(make: Callable[[], Program], walk: type[Schedule], width: int, lanes: int, keep: Keep) -> None:
    plan = first(make())
    assert (type(plan), plan.width, plan.lanes, keep_of(plan)) == (walk, width, lanes, keep)


@pytest.mark.parametrize(
    ("function", "width"),
    [
        (lambda x: F.avg_pool3d(x[None, None], 3, (3, 3, 1), 1), 1),
        (lambda x: F.avg_pool1d(x, 5, 1, 2), 4),
        (lambda x: F.interpolate(x, scale_factor=2) + 1, 4),
    ],
)
def test_large_windows_over_neighbours_have_single_elements(function: Callable[[Tensor], Tensor], width: int) -> None:
    """Threads side by side read what lies side by side, where windows have many points."""
    program = region(function, torch.empty(8, 64, 1024, device="meta")).passed(NO_SPLIT)
    plan = first(program)
    assert (type(plan), plan.width) == (Pointwise, width)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("name", k.SAMPLES)
@pytest.mark.thinned(3)
@pytest.mark.invariant(14)
def test_every_schedule_fits_the_device_and_covers_the_kernel(name: str, aligned: bool) -> None:
    program = k.SAMPLES[name]()
    for kernel in program.kernels:
        check_fits(schedule(kernel, program, H200, aligned=aligned), kernel)


def keep_of(plan: Schedule) -> Keep:
    return plan.keep if isinstance(plan, Rows | Columns) else Keep.NOTHING


def check_fits(plan: Schedule, kernel: Kernel) -> None:
    """Assert that an H200 can launch `plan`, and that its threads reach all points of `kernel`."""
    assert 32 <= plan.threads <= 1024
    assert plan.threads % 32 == 0 or isinstance(plan, OutputTile) or (isinstance(plan, Columns) and plan.span > 1)
    assert plan.shared_bytes <= H200.shared_bytes_per_block - 1024
    rows, cols = kernel.row_count, kernel.col_count
    match plan:
        case Pointwise():
            assert plan.blocks * plan.threads * plan.unroll * plan.width >= rows
            assert plan.ragged is (rows % plan.width != 0)
        case OutputTile():
            depth = plan.depth if isinstance(plan, PlaneTile) else 1
            assert rows <= plan.blocks * plan.threads * plan.unroll * plan.width * depth < 3 * rows
            assert plan.groups % plan.planes == 0
            assert plan.unroll <= plan.tile_height <= plan.groups // plan.planes * plan.unroll
            assert plan.resident * (plan.shared_bytes + 1024) <= H200.shared_bytes_per_block + 1024
            assert plan.resident * -(-plan.threads // 32) * 32 <= H200.max_threads
        case Transposed():
            columns = prod(axis.size for axis in plan.columns)
            tall, wide = plan.tile
            assert plan.blocks >= -(-(rows // columns) // tall) * -(-columns // wide)
            assert rows // columns % plan.width == 0
            assert tall & (tall - 1) == wide & (wide - 1) == 0
        case Rows(split=TeamPart() as team):
            assert team.members * team.part * plan.width >= cols
            assert 0 < team.kept <= team.part
        case Columns(team=TeamPart(buffer=CircularBuffer() as buffer) as team):
            assert team.members * team.part * plan.span >= cols > (team.members - 1) * team.part * plan.span
            assert plan.iterations <= buffer.ahead < min(3 * plan.iterations, buffer.places)
        case Rows(split=Pieces() as pieces):
            assert plan.blocks == rows // pieces.over * pieces.count
            assert pieces.count * pieces.rows >= pieces.over
            assert rows % pieces.over == 0
            assert cols % plan.width == 0
            assert plan.lanes <= 32 or plan.groups == 1
            covered, cols = plan.lanes * plan.unroll, plan.vectors(cols)
        case Rows():
            assert plan.keep is Keep.FETCHED or plan.blocks * plan.groups >= rows
            assert plan.lanes <= 32 or plan.groups == 1
            assert cols % plan.width == 0 or plan.start is not None
            assert plan.lanes & (plan.lanes - 1) == 0 or plan.lanes % 32 == 0
            covered, cols = plan.lanes * plan.unroll, plan.vectors(cols)
        case Columns():
            assert plan.blocks * plan.lanes * plan.width >= rows
            assert rows % plan.width == 0
            assert plan.groups == 1 or plan.lanes in (8, 16, 32) or (kernel.scans and plan.lanes % 32 == 0)
            covered = plan.groups * plan.unroll
    if keep_of(plan).in_registers:
        assert covered >= cols


@pytest.mark.parametrize(
    ("make", "width", "unroll", "lanes", "groups", "columns"),
    [
        (lambda: k.mixed_layouts(64, 64, 1 << 14), 4, 4, 16, 16, ("c",)),
        (lambda: k.mixed_layouts(64, 64, 1 << 14, k.F16), 8, 4, 16, 16, ("c",)),
        (lambda: k.mixed_layouts(64, 64, 1 << 14, k.F64), 2, 8, 16, 8, ("c",)),
        (lambda: k.mixed_layouts(64, 64, 127 * 127), 1, 8, 64, 4, ("c",)),
        (lambda: k.mixed_layouts(64, 64, 126 * 126), 4, 4, 32, 8, ("c",)),
        (lambda: k.mixed_layouts(64, 512, 7 * 7), 4, 4, 16, 16, ("hw",)),  # in one piece
        (lambda: k.mixed_layouts(64, 512, 9 * 9), 4, 4, 8, 32, ("hw",)),
        (lambda: k.mixed_layouts(64, 512, 12 * 12), 4, 4, 32, 8, ("c",)),
        (lambda: k.into_channels_last(64, 3, 1 << 14), 4, 2, 128, 2, ("c",)),
        (lambda: k.into_channels_last(64, 85, 1 << 14), 4, 4, 8, 32, ("c",)),  # no whole lines
        (lambda: k.into_channels_last(64, 64, 1 << 14), 4, 4, 16, 16, ("hw",)),
        (lambda: k.into_channels_last(64, 32, 1 << 14), 4, 2, 8, 32, ("hw",)),
        (lambda: k.mixed_layouts(64, 8, 1 << 14), 4, 2, 64, 4, ("c",)),
        (lambda: k.max_pool_channels_last(64, 64, 130, 2, 2), 4, 4, 16, 16, ("h", "w")),
        (lambda: k.transpose(4096, 4096), 4, 4, 16, 16, ("j",)),
    ],
)
def test_tiles(
    make: Callable[[], Program], width: int, unroll: int, lanes: int, groups: int, columns: tuple[str, ...]
) -> None:
    plan = first(make())
    assert isinstance(plan, Transposed)
    assert tuple(axis.name for axis in plan.columns) == columns
    assert (plan.width, plan.unroll, plan.lanes, plan.groups) == (width, unroll, lanes, groups)


@pytest.mark.parametrize(
    ("make", "panel"),
    [
        (lambda: k.into_channels_last(128, 256, 1 << 14), 4),  # all channels of a place, then the next places
        (lambda: k.into_channels_last(4, 96, 1 << 14), 2),  # of 6 tiles, some with channels of two samples
        (lambda: k.into_channels_last(4, 2048, 1 << 9), 1),  # few places
        (lambda: k.mixed_layouts(64, 128, 1 << 14), 1),  # all channels of some places, then the next places
        (lambda: k.transpose(4096, 4096), 64),
    ],
)
def test_neighbouring_tiles_are_neighbours_in_memory(make: Callable[[], Program], panel: int) -> None:
    assert first(make()).panel == panel


@pytest.mark.parametrize(
    "make", [lambda: k.channel_bias_gelu(8, 48, 4096), lambda: k.concatenate(4, 6, 10, 64), lambda: k.affine(4096)]
)
def test_nothing_crosses_where_all_is_laid_out_alike(make: Callable[[], Program]) -> None:
    assert isinstance(first(make()), Pointwise)


def test_rows_that_begin_anywhere_are_stored_in_whole_accesses() -> None:
    assert first(k.out_of_channels_last(32, 64, 513 * 513)).realigned == {"y"}
    assert first(k.out_of_channels_last(32, 64, 512 * 513)).realigned == frozenset()  # whole accesses anyway
    assert first(k.out_of_channels_last(128, 512, 7 * 7)).realigned == frozenset()  # more than one end in a tile
    assert first(k.mixed_layouts(32, 64, 513 * 513)).realigned == {
        "y"
    }  # in the tile of x, as there is no room for a third one


def test_tiles_overlap_by_a_sector_where_rows_begin_anywhere() -> None:
    odd = first(k.out_of_channels_last(32, 64, 513 * 513))
    assert (odd.overlap, odd.tile[0] - odd.own_rows) == (8, 8)
    assert first(k.out_of_channels_last(32, 64, 513 * 513, k.F16)).overlap == 16
    assert first(k.mixed_layouts(32, 64, 513 * 513)).overlap == 8
    assert first(k.out_of_channels_last(32, 64, 130 * 130)).overlap == 8  # multiples of 16 bytes, with parts of sectors
    assert first(k.out_of_channels_last(32, 64, 512 * 513)).overlap == 0
    assert first(k.into_channels_last(32, 64, 513 * 513)).overlap == 0  # what is stored begins with a line
    assert first(k.out_of_channels_last(128, 512, 15 * 15)).overlap == 0  # short rows
    assert first(k.out_of_channels_last(256, 3, 223 * 223)).overlap == 0  # tiles of many sectors, as columns are few


def test_few_columns_are_all_in_a_tile() -> None:
    assert [axis.name for axis in first(k.into_channels_last(64, 37, 240 * 240)).columns] == ["c"]
    assert [axis.name for axis in first(k.into_channels_last(64, 64, 240 * 240)).columns] == ["hw"]  # whole lines
    assert first(k.into_channels_last(256, 3, 223 * 223)).width == 4  # single elements would be too few for a block
    assert first(k.into_channels_last(255, 3, 223 * 223)).tile == (256, 4)


def test_vectors_where_all_that_lies_along_the_rows_leaves_from_tiles() -> None:
    assert first(k.out_of_channels_last(32, 64, 513 * 513)).width == 4
    assert first(k.out_of_channels_last(32, 64, 513 * 513, k.F16)).width == 8
    assert first(k.out_of_channels_last(33, 64, 513 * 513)).width == 1  # rows are no multiple of a vector
    assert first(k.mixed_layouts(32, 64, 513 * 513)).width == 1  # z is loaded along them


def conflicts(addresses: Iterable[int], nbytes: int) -> int:
    """How many different words the busiest bank has, of threads that access one element each at the same time."""
    half = list(addresses)[: 16 if nbytes == 8 else 32]  # wider elements go half a warp at a time
    words = {(address * nbytes + part) // 4 for address in half for part in range(0, nbytes, 4)}
    return max(Counter(word % 32 for word in words).values())


@pytest.mark.parametrize("nbytes", [1, 2, 4, 8])
@pytest.mark.parametrize("share", [1, 2, 4])
def test_tiles_have_no_bank_conflicts(nbytes: int, share: int) -> None:
    """Whatever a whole vector has: when the columns are written and when the rows are read."""
    rows, width = 128 // nbytes, 16 // nbytes // min(share, 16 // nbytes)
    tile = Tile(rows, 64, 256 if nbytes < 8 else 128, width, nbytes)
    step = tile.pitch
    across = [(t % tile.lanes * width, t // tile.lanes) for t in range(32)]
    along = [(t // (rows // width), t % (rows // width) * width) for t in range(32)]
    for lane in range(width):
        assert conflicts(((col + lane) * step + row for col, row in across), nbytes) == 1
        assert conflicts((col * step + row + lane for col, row in along), nbytes) == 1


@pytest.mark.parametrize("nbytes", [2, 4, 8])
def test_whole_vectors_have_no_bank_conflicts(nbytes: int) -> None:
    vector = 16 // nbytes
    tile = Tile(512 // nbytes, 32, 256 if nbytes < 8 else 128, vector, nbytes, vector)

    def place(across: int, along: int) -> int:
        return across * tile.pitch + (along ^ across // tile.width % tile.iterations * vector)

    assert sorted(place(i, j) for i in range(tile.across) for j in range(tile.along)) == [
        *range(tile.across * tile.along)
    ]
    for lane in range(vector):
        writes = (place(t % tile.lanes * vector + lane, t // tile.lanes) for t in range(32))
        assert conflicts(writes, nbytes) == 1
    for line in range(tile.across):
        starts = [place(line, lane * vector) for lane in range(32)]
        assert all(place(line, lane * vector + v) == starts[lane] + v for lane in range(32) for v in range(vector))
        # Accesses of 16 bytes go eight threads at a time.
        words = {(start * nbytes // 4 + word) % 32 for start in starts[:8] for word in range(4)}
        assert len(words) == 32


def test_a_last_vector_may_be_shorter_where_memory_is_gone_over_as_it_lies() -> None:
    assert "vectors of 4, 1 per thread, 256 threads, the last one shorter" in str(first(k.affine(1_000_003)))
    assert first(k.affine(1_000_003, k.F16)).width == 8
    assert first(k.affine(1_000_003), aligned=False).width == 1
    assert first(k.last_axis_bias(1023, 63)).width == 1  # weights begin anew within a vector
    assert first(k.affine(3)).width == 1


def test_unaligned_inputs_take_single_elements_where_they_are_most_of_the_traffic() -> None:
    assert first(k.row_reduction(1000, 1024, ReduceOp.SUM), aligned=False).width == 1
    assert not first(k.layer_norm(1000, 1024), aligned=False).memory.aligned


def test_wide_indices_only_where_they_are_needed() -> None:
    assert not first(k.affine((1 << 31) - (1 << 22))).memory.wide
    assert first(k.affine(1 << 31)).memory.wide
    assert first(k.layer_norm(1 << 25, 64)).memory.wide


def test_more_blocks_than_a_launch_has_is_an_error() -> None:
    with pytest.raises(ScheduleError, match="layer_norm needs 4294967296 blocks; a launch has at most 2147483647"):
        first(k.layer_norm(1 << 32, 4096))


def test_large_buffers_that_nobody_reads_again_are_passed_by() -> None:
    assert first(k.softmax_rows(250, 54_000)).memory.once == {"x", "y"}
    assert first(k.softmax_rows(1 << 10, 49_152)).memory.once == frozenset()  # blocks that copy ahead do without
    assert first(k.softmax_rows(1 << 7, 49_152)).memory.once == frozenset()
    program = k.batch_norm_2d(64, 64, 1 << 14)
    stats, apply = (schedule(kernel, program, H200) for kernel in program.kernels)
    assert (stats.memory.once, stats.memory.backwards) == (frozenset(), False)
    assert apply.memory.backwards


def test_kernels_without_rows_or_with_rows_in_registers_do_without_eviction_hints() -> None:
    rows = k.softmax_channels(64, 64, 1 << 14), k.softmax_rows(1 << 16, 512)
    for program in (k.affine(1 << 24), k.out_of_channels_last(32, 64, 512 * 512), *rows):
        assert first(program).memory.once == frozenset()


def test_what_is_only_read_is_passed_by() -> None:
    """If it is all that is large, and nobody reads it again."""
    shape = (30_000, 2000)
    assert first(_region(lambda x: x.sum(-1), shape)).memory.once == {"arg0_1"}
    for function in (lambda x, y: (x - y).abs().mean(-1), lambda x, y: x.sum(-1)[:, None] + y, lambda x, y: x.relu()):
        assert first(_region(function, shape, shape)).memory.once == frozenset()
    assert first(_region(lambda x: (x.sum(-1), x.flip(-1).sum(0)), shape)).memory.once == frozenset()


def test_a_schedule_says_what_it_is() -> None:
    assert str(first(k.layer_norm(1 << 22, 64))) == (
        "524288 blocks, vectors of 4, 4 lanes x 8 rows, 4 per thread at a time, registers"
    )
    assert str(first(k.affine(1 << 28))) == "262144 blocks, vectors of 4, 1 per thread, 256 threads"


@pytest.mark.parametrize(
    ("make", "lanes", "groups"),
    [
        (lambda: k.softmax_rows(1 << 17, 1000), 32, 1),
        (lambda: k.softmax_rows(1 << 17, 1001), 32, 1),
        (lambda: k.softmax_rows(1 << 17, 320), 32, 1),  # 2.5 KB, read and written
        (lambda: k.softmax_rows(1 << 17, 316), 32, 2),
        (lambda: k.layer_norm(1 << 17, 1024, k.F16), 32, 1),
        (lambda: k.layer_norm(1 << 20, 128), 8, 4),
        (lambda: k.softmax_rows(1 << 22, 32), 4, 16),
        (lambda: k.softmax_rows(1 << 22, 2), 1, 256),
        (lambda: k.softmax_rows(1 << 22, 5), 1, 64),  # 20 bytes, in five loads
        (lambda: k.softmax_rows(1 << 22, 7), 2, 64),  # in seven: too many stores to the same sectors
        (lambda: k.softmax_rows(1 << 22, 10), 2, 32),  # 40 bytes
        (lambda: k.layer_norm(1 << 22, 21, k.F16), 8, 32),
        (lambda: k.row_reduction(1 << 22, 10, ReduceOp.SUM), 1, 64),  # which stores little
        (lambda: k.row_reduction(1 << 17, 256, ReduceOp.SUM), 16, 4),  # which is read alone
        (lambda: k.softmax_rows(300, 256), 32, 2),
        (lambda: k.softmax_channels_last(64, 64, 1 << 14), 4, 64),  # through a tile
    ],
)
def test_blocks_have_as_few_rows_as_a_multiprocessor_can_begin_blocks_for(
    make: Callable[[], Program], lanes: int, groups: int
) -> None:
    plan = first(make())
    assert (plan.lanes, plan.groups) == (lanes, groups)


def test_rows_in_registers_exchange_stores_that_lie_along_the_rows() -> None:
    assert first(k.softmax_channels_last(64, 64, 1 << 14)).exchanges
    assert first(k.softmax_channels_last(64, 136, 1 << 14, k.F16)).exchanges
    assert not first(k.softmax_rows(1 << 20, 64)).exchanges  # all along the columns
    assert not first(k.softmax_channels_last(64, 2048, 1 << 10)).exchanges  # a block has one row
    assert not first(k.softmax_channels(64, 64, 1 << 14)).exchanges


def test_columns_in_registers_exchange_stores_that_lie_along_the_columns() -> None:
    assert str(first(k.width_norm_channels_last(1 << 14, 64, 64))) == (
        "32768 blocks, single elements, 32 lanes of rows x 4 groups of columns, 16 columns at a time, registers, "
        "stores exchanged"
    )
    for channels, width, dtype in (
        (64, 10, k.F32),
        (67, 33, k.F32),
        (40, 200, k.F32),
        (64, 128, k.F16),
        (32, 50, k.F64),
    ):
        for samples in (100, 1 << 14):
            plan = first(k.width_norm_channels_last(samples, channels, width, dtype))
            assert plan.exchanges, (channels, width, samples)
            assert plan.threads % 32 == 0
    assert not first(k.width_norm_channels_last(1 << 10, 64, 2000)).exchanges  # no room for the tile
    assert not first(k.softmax_channels(64, 64, 1 << 14)).exchanges  # all along the rows


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: F.layer_norm(F.max_pool2d(x, 2).permute(0, 2, 3, 1), (x.shape[1],)), (64, 64, 112, 112)),
        (lambda x: F.avg_pool1d(x, 2).softmax(1).sum(1), (32, 256, 4096)),
        (lambda x: (x[..., ::2].softmax(1) * x[..., 1::2]).sum(1), (64, 64, 128, 128)),
        (lambda x: x.repeat_interleave(2, -1).mean(1), (64, 256, 4096)),
        (lambda x: F.interpolate(x, scale_factor=2, mode="nearest").softmax(1), (16, 64, 128, 128)),
        (lambda x: F.interpolate(x, scale_factor=8, mode="bilinear").argmax(1), (16, 21, 64, 64)),
        (lambda x: F.pad(x, (2, 2), mode="reflect").sum(1), (64, 128, 5000)),
        (lambda x: F.embedding(torch.zeros(64, 32, dtype=torch.int64, device=x.device), x).sum(1), (50_000, 256)),
    ],
)
def test_threads_stand_along_rows_that_step_over_elements_or_repeat_them_or_look_them_up(
    function: Callable[[Tensor], Tensor], shape: tuple[int, ...]
) -> None:
    program = region(function, torch.empty(shape, device="meta")).program
    plan = first(program)
    assert isinstance(plan, Columns)
    assert plan.lanes >= 8


def _region(function: Callable[..., Any], *shapes: tuple[int, ...]) -> Program:
    return region(function, *(torch.empty(shape, device="meta") for shape in shapes)).passed(pass_options(H200))


def _distances(x: Tensor, y: Tensor) -> Tensor:
    return (x[:, :, None] - y[:, None]).square().sum(-1)


def _sines_and_cosines(x: Tensor) -> Tensor:
    return torch.cat((x.sin(), x.cos()), -1)


def _between_ends(x: Tensor) -> Tensor:
    first = x.flatten()[:500_000].long()
    return (x[first] - x[first + 1]).square().sum(-1)


def _overlaps(boxes: Tensor) -> Tensor:
    others = boxes[:2000]
    low, high = torch.maximum(boxes[:, None, :2], others[:, :2]), torch.minimum(boxes[:, None, 2:], others[:, 2:])
    width, height = (high - low).clamp(min=0).unbind(-1)
    return width * height


def _centres(boxes: Tensor) -> Tensor:
    left, top, right, bottom = boxes.unbind(-1)
    return torch.stack(((left + right) / 2, (top + bottom) / 2, right - left, bottom - top), -1)


def _interleaved(x: Tensor) -> Tensor:
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even - odd, even + odd), -1).flatten(-2)


@pytest.mark.parametrize(
    ("function", "shapes", "wanted"),
    [
        (lambda x: x.sum(-1), [(30_000, 2000)], {"lanes": 256, "unroll": 2}),
        (
            lambda x: x.sum(-1),
            [(30_000, 1111)],
            {"lanes": 128, "unroll": 3},
        ),  # most of 256 threads would have one vector
        (
            lambda x: x.sum(-1),
            [(200_000, 300)],
            {"lanes": 32, "groups": 4},
        ),  # blocks of one row would have little to do
        (lambda x: x.argmax(-1), [(20_000, 2500)], {"lanes": 32}),  # states with places take long to merge
        (lambda x: x.argmax(-1), [(20_000, 8192)], {"lanes": 128}),
        (lambda x: x.mean((2, 3)), [(256, 2048, 7, 7)], {"lanes": 8, "unroll": 7}),
        (lambda x: x.unfold(-1, 16, 8).mean(-1), [(256, 100_000)], {"width": 4, "lanes": 1}),
        (
            lambda x: x.view(768, -1).float().sum(-1),
            [(256, 3, 512, 512)],
            {"lanes": 256},
        ),  # longer than stays in registers
        (
            lambda x, c: (x[:, None] - c).square().sum(-1),
            [(20_000, 32), (64, 32)],
            {"width": 4, "lanes": 4, "groups": 64},
        ),
        (_between_ends, [(50_000, 64)], {"width": 4, "lanes": 4, "groups": 64}),
        (_distances, [(64, 256, 72), (64, 256, 72)], {"width": 4, "lanes": 16, "groups": 16}),
        (
            lambda x, y: (x[:, :, None] + y[:, None]).relu().mean(1),
            [(64, 2000)] * 2,
            {"width": 4, "lanes": 32, "groups": 8, "unroll": 16},
        ),  # neighbours read the same
        (
            lambda x, c: (x[:, :, None] == c).float().mean(1),
            [(4096, 200), (50,)],
            {"width": 4, "lanes": 4, "groups": 64, "unroll": 13},
        ),
        (lambda x: x.sum(1), [(300, 512, 400)], {"width": 4, "lanes": 32, "groups": 4, "unroll": 4}),
        (lambda x: x.sum(1), [(16, 512, 400)], {"width": 1, "lanes": 32, "groups": 4}),  # too few for vectors
        (lambda x: F.pad(x, (2, 2), mode="reflect").sum(1), [(64, 128, 5000)], {"width": 1, "lanes": 32, "groups": 4}),
        (lambda x: F.avg_pool2d(x, 2).softmax(1).sum(1), [(64, 64, 112, 112)], {"lanes": 32, "groups": 8}),
        (lambda x: x.softmax(1).sum(1), [(64, 64, 113, 113)], {"lanes": 32, "groups": 4}),
    ],
)
def test_rows_and_columns(
    function: Callable[..., Tensor], shapes: Sequence[tuple[int, ...]], wanted: dict[str, int]
) -> None:
    plan = first(_region(function, *shapes))
    assert {name: getattr(plan, name) for name in wanted} == wanted, str(plan)


@pytest.mark.parametrize(
    ("function", "shape", "width", "unroll"),
    [
        (lambda x: x[:, 1:] - x[:, :-1], (512, 50_000), 2, 2),  # what is read twice is moved once
        (lambda x: x[:, 1:] - x[:, :-1], (511, 50_000), 1, 4),  # pairs would lie in two rows
        (_interleaved, (256, 1024, 128), 4, 1),  # each of two loads picks its elements of one access
        (lambda x: x[:, :, None] * x[:, None], (64, 1500), 4, 2),  # 32 bytes of what is mostly written
        (lambda x: x.half()[:, :, None] * x.half()[:, None], (64, 1500), 4, 4),  # eight would lie in two rows
        (lambda x: (x * 20).round().to(torch.int8), (8192, 8192), 4, 2),  # four bytes would be little to write
        (_sines_and_cosines, (100_000, 64), 1, 4),  # a warp has parts of one kind
        (lambda x: x.sum(-1), (16_000_000, 3), 4, 1),  # rows shorter than an access are windows
        (lambda x: x.norm(dim=-1), (16_000_000, 2), 2, 1),
        (lambda x: x.half()[:, :, None] * x.half()[:, None], (64, 1501), 8, 2),  # so do four
        (_overlaps, (5000, 4), 1, 4),  # what is loaded lies four apart
        (_centres, (6_000_000, 4), 4, 1),
        (lambda x: x.gather(1, (x > 0).long()), (8192, 4096), 4, 4),
        (lambda x: torch.cat((x.sin(), x.cos()), -1), (8192, 4096), 4, 1),
        (lambda x: F.interpolate(x, size=(224, 224), mode="bilinear"), (64, 3, 500, 375), 4, 1),
        (
            lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
            (32, 64, 112, 112),
            4,
            1,
        ),  # of several lines each
        (
            lambda x: F.avg_pool2d(x.permute(0, 3, 1, 2), 2),
            (64, 112, 112, 128),
            4,
            1,
        ),  # no output tile: windows share nothing
    ],
)
def test_elements(function: Callable[..., Tensor], shape: tuple[int, ...], width: int, unroll: int) -> None:
    plan = first(_region(function, shape))
    assert (type(plan), plan.width, plan.unroll) == (Pointwise, width, unroll), str(plan)


@pytest.mark.parametrize(
    ("function", "shapes", "dtype", "wanted"),
    [
        (lambda x: x.sum(1), [(300, 512, 801)], torch.float16, {"width": 4, "lanes": 32, "groups": 4, "unroll": 4}),
        (lambda x: x.sum(1), [(200, 1000, 801)], torch.float16, {"width": 1, "groups": 1}),  # longer ones alone
        (lambda x: x.argmax(-1), [(20_000, 5000)], torch.float16, {"width": 8, "lanes": 32}),
        (lambda x: x.sum(-1), [(16_000_000, 3)], torch.float16, {"width": 8, "unroll": 1}),  # rows are windows
        (lambda x: x.float().mean(-1), [(256, 224, 224, 3)], torch.uint8, {"width": 4}),  # of 16 bytes of results
        (lambda x, y: torch.cat((x, y), -1), [(60_000, 100), (60_000, 77)], torch.float32, {"width": 1, "unroll": 4}),
        (lambda x, y: torch.cat((x, y), -1), [(60_000, 100), (60_000, 77)], torch.float16, {"width": 8, "unroll": 1}),
    ],
)
def test_types(
    function: Callable[..., Tensor], shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, wanted: dict[str, int]
) -> None:
    made = region(function, *(torch.empty(shape, dtype=dtype, device="meta") for shape in shapes))
    plan = first(made.passed(pass_options(H200)))
    assert {name: getattr(plan, name) for name in wanted} == wanted, str(plan)


def test_tiles_fit_static_shared_memory() -> None:
    for channels, places in ((2, 1 << 20), (1 << 20, 2), (3, 5), (64, 64), (1000, 1 << 10)):
        for dtype in (k.F16, k.F32, k.F64):
            program = k.mixed_layouts(4, channels, places, dtype)
            plan = first(program)
            along, across = plan.tile
            tiles = 2 * Tile(along, across, plan.threads, 1, dtype.nbytes).shared_bytes
            assert tiles <= 48 << 10


def test_tiles_are_told() -> None:
    assert str(first(k.transpose(4096, 4096))) == (
        "4096 blocks, vectors of 4, 4 per thread, 256 threads, tiles of 64 x 64 exchanged"
    )


def test_samples_that_share_large_weights_are_taken_together() -> None:
    assert "16 per thread, 256 threads, 1048576 vectors apart" in str(first(k.last_axis_bias(16, 1 << 22)))
    assert "10 per thread" in str(first(k.last_axis_bias(20, 1 << 22)))  # of more there would be some left
    assert "apart" not in str(first(k.last_axis_bias(1 << 16, 1 << 10)))  # small enough for a near cache
    assert "apart" not in str(first(k.last_axis_bias(17, 1 << 22)))
    assert "apart" not in str(first(_region(lambda x: torch.cat((x, x[:1])), (1 << 22, 4))))  # one row is read again
    made = region(lambda x, w: (x - 1) * w + w, *(torch.empty(n, 1 << 22, device="meta") for n in (64, 1)))
    assert "16 per thread" in str(first(made.passed()))  # of each there is a vector in registers


def test_a_small_kernel_between_large_ones_does_not_change_the_direction() -> None:
    program = k.batch_norm_2d(64, 64, 1 << 14)
    axis = Axis("i", 8)
    store = Store("few", axis_index(axis), Builder().const(1.0, k.F32))
    between = Kernel("between", (axis,), (), (), (), (store,))
    buffers = (*program.buffers, k.buffer("few", Role.TEMP, [8]))
    three = replace(program, kernels=(program.kernels[0], between, program.kernels[1]), buffers=buffers)
    assert [schedule(kernel, three, H200).memory.backwards for kernel in three.kernels] == [False, False, True]
