"""Results of an output tile that leave through shared memory, as they lie in memory: where rows of results begin anywhere. Threads with whole rows."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Builder
from fusepass.codegen.ir.index import Axis, Index, axis_index
from fusepass.codegen.ir.program import Kernel, Store
from fusepass.codegen.render import render
from fusepass.codegen.schedule import ranking, schedule
from fusepass.codegen.schedule.output_tile_results import images_together
from fusepass.codegen.schedule.overrides import ScheduleOverrides
from fusepass.codegen.schedule.plan_output_tile import WindowTile
from tests.support.convolutions import Case as Convolution
from tests.support.convolutions import generated
from tests.support.emulate import emulate, needs_compiler
from tests.support.interpret import decode, interpret
from tests.support.regions import region, tensor_of
from tests.support.windows import SMALL, Case, assert_as_eager, prepared, ways
from tests.unit.test_render_cuda import inputs_of

TOGETHER: dict[str, Case] = {
    "bands of an image": (lambda x: F.avg_pool2d(x, 3, 1, 1), ((1, 3, 131, 61),), torch.float16),
    "several images": (lambda x: F.max_pool2d(x, 3, 1, 1), ((3, 8, 7, 7),), torch.bfloat16),
    "rows of pairs": (lambda x: F.avg_pool2d(x, 3, 1, 1), ((2, 16, 14, 14),), torch.float32),
    "rows shorter than a vector": (lambda x: F.avg_pool2d(x, 3, 1, 1), ((4, 40, 3, 3),), torch.float32),
    "doubles": (lambda x: F.avg_pool2d(x, 3, 1, 1), ((2, 6, 13, 13),), torch.float64),
    "computed behind": (lambda x, b: F.gelu(F.max_pool2d(x, 5, 1, 2) + b), ((2, 8, 15, 15), (8, 1, 1)), torch.float32),
    "two results": (lambda x: (F.avg_pool2d(x, 3, 1, 1), F.max_pool2d(x, 3, 1, 1)), ((2, 6, 17, 17),), torch.float16),
    "two types": (
        lambda x: (F.avg_pool2d(x, 3, 1, 1), F.avg_pool2d(x, 3, 1, 1).double()),
        ((2, 6, 11, 11),),
        torch.float32,
    ),
    "one axis": (lambda x: F.avg_pool1d(x, 25, 1, 12), ((3, 5, 145),), torch.float16),
}
ALONE: dict[str, Case] = {
    "whole vectors": (lambda x: F.max_pool2d(x, 3, 1, 1), ((2, 6, 20, 20),), torch.float32),
    "something else for each result": (
        lambda x, y: F.max_pool2d(x, 3, 1, 1) + y,
        ((2, 6, 15, 15), (2, 6, 15, 15)),
        torch.float32,
    ),
    "the same for all rows": (lambda x, y: F.max_pool2d(x, 3, 1, 1) + y, ((2, 6, 15, 15), (15,)), torch.float32),
    "results channels last": (
        lambda x: F.max_pool2d(x, 3, 1, 1).contiguous(memory_format=torch.channels_last),
        ((2, 6, 15, 15),),
        torch.float32,
    ),
}


@needs_compiler
@pytest.mark.parametrize("name", TOGETHER)
@pytest.mark.thinned(3)
def test_values(name: str) -> None:
    made, program = prepared(TOGETHER[name])
    rank = next(number for number, plan in enumerate(ways(program)) if isinstance(plan, WindowTile) and plan.exchanges)
    source = render(program, SMALL, overrides=ScheduleOverrides(len(program.kernels) - 1, rank))
    assert "_results" in source.text
    results = emulate(program, source, made.memory(program))
    assert_as_eager(made, program, results)


@needs_compiler
def test_places_that_need_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusepass.codegen.schedule._MAX_INT", 0)
    made, program = prepared(TOGETHER["bands of an image"])
    source = render(program, SMALL)
    assert "const int64_t out0_begin" in source.text
    results = emulate(program, source, made.memory(program))
    assert_as_eager(made, program, results)


@pytest.mark.parametrize("name", ALONE)
def test_threads_store_their_own(name: str) -> None:
    """Where they may in whole vectors, where results do not lie together, and where one that stands behind a row would load what is not there."""
    _, program = prepared(ALONE[name])
    assert not any(isinstance(plan, WindowTile) and plan.exchanges for plan in ways(program))


def test_both_ways_are_timed_where_schedules_are_measured() -> None:
    _, program = prepared(TOGETHER["several images"])
    assert {(True, 7), (True, 4), (True, 2), (False, 1)} <= {
        (plan.exchanges, plan.width) for plan in ways(program) if isinstance(plan, WindowTile)
    }


def test_large_odd_images_leave_together() -> None:
    """A vector of four results shares what it reads, and is stored whole; single ones would be neither."""
    facts = DeviceFacts.h200()
    made = region(lambda x: F.avg_pool2d(x, 3, 1, 1), torch.empty(64, 64, 255, 255, dtype=torch.float16, device="meta"))
    program = made.passed(pass_options(facts))
    plan = schedule(program.kernels[0], program, facts)
    assert (plan.exchanges, plan.width, plan.lanes) == (True, 4, 64)


def test_images_of_a_sample_lie_together() -> None:
    """Those of the next sample do not, where a buffer has other channels between."""
    n, c, y, x = (Axis(name, size) for name, size in (("n", 12), ("c", 6), ("y", 7), ("x", 7)))

    def stored(*strides: int) -> int:
        index = Index(98)
        for axis, stride in zip((n, c, y, x), strides, strict=True):
            index = index + axis_index(axis) * stride
        kernel = Kernel("pool", (n, c, y, x), (), (), (), (Store("y", index, Builder().const(1.0, DType.F32)),), ())
        return images_together(kernel, (y, x))

    assert stored(294, 49, 7, 1) == 72
    assert stored(392, 49, 7, 1) == 6
    assert stored(294, 49, 8, 1) == 0
    assert stored(294, 1, 42, 6) == 0


@needs_compiler
@pytest.mark.parametrize("window", [3, 7])
@pytest.mark.parametrize("size", [(113, 111), (131, 61), (35, 300), (19, 262), (301, 35)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.thinned(7)
@pytest.mark.invariant(17)
def test_results_do_not_depend_on_which_block_ends_last(size: tuple[int, int], window: int, dtype: torch.dtype) -> None:
    """Where output tiles overlap, a sum of the same points is added up in another order in each of them: one block stores it."""
    made = region(lambda x: F.avg_pool2d(x, window, 1, window // 2) * 0.7, torch.randn(1, 3, *size).to(dtype))
    program = made.passed(pass_options(SMALL))
    source = render(program, SMALL)
    turned = replace(source, text=source.text.replace("blockIdx.x", "(gridDim.x - 1 - blockIdx.x)"))
    first, second = (emulate(program, each, made.memory(program)) for each in (source, turned))
    (output,) = program.outputs
    assert torch.equal(
        tensor_of(first[output], program.buffer(output)), tensor_of(second[output], program.buffer(output))
    )


WHOLE_ROWS = {
    "7 x 7": Convolution((2, 16, 7, 7), 16, (3, 3), (1, 1), (1, 1), (1, 1), groups=16),
    "14 x 14, large windows": Convolution((2, 16, 14, 14), 16, (7, 7), (1, 1), (3, 3), (1, 1), groups=16),
    "halves": Convolution((2, 16, 14, 14), 16, (5, 5), (1, 1), (2, 2), (1, 1), groups=16, dtype=DType.F16),
    "every second": Convolution((2, 16, 13, 13), 16, (5, 5), (2, 2), (2, 2), (1, 1), groups=16),
    "odd rows, no border": Convolution((2, 16, 11, 15), 16, (3, 3), (1, 1), (0, 0), (1, 1), groups=16),
}


@needs_compiler
@pytest.mark.parametrize("name", WHOLE_ROWS)
def test_threads_with_whole_rows(name: str) -> None:
    """Of small images: they know which points are there, and tiles have what images have, once."""
    program = generated(WHOLE_ROWS[name])
    timed = ranking(program.kernels[0], program, SMALL)
    rank, plan = next((rank, each.plan) for rank, each in enumerate(timed) if each.plan.width > 4)
    assert (plan.lanes, plan.width) == (1, plan.image[1].size)
    inputs = inputs_of(program)
    source = render(program, SMALL, overrides=ScheduleOverrides(0, rank))
    tile = re.search(r"for \(int t_0 = threadIdx.x; t_0 < (\d+);", source.text)
    x = program.buffer("x")
    assert tile is not None
    assert int(tile[1]) * 16 <= plan.planes * x.shape[2] * x.shape[3] * x.dtype.nbytes + 64
    got, wanted = (
        decode(each["y"], x.dtype) for each in (emulate(program, source, inputs), interpret(program, inputs))
    )
    unit = 1e-5 if x.dtype is DType.F32 else 2e-3
    np.testing.assert_allclose(got, wanted, rtol=unit, atol=unit * np.abs(wanted).max())
