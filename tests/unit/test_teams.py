"""Rows that blocks share: when they do, what their kernels compute, and that nothing depends on who comes first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fusepass
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.ir.dataflow import Dataflow, kept_in_memory
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.program import Buffer, Program, Role, Team
from fusepass.codegen.ir.team import exchange_offsets
from fusepass.codegen.ir.text import program_text
from fusepass.codegen.ir.verify import verify
from fusepass.codegen.render import describe, render
from fusepass.codegen.schedule import schedule
from fusepass.codegen.schedule.plan import Keep
from fusepass.codegen.schedule.plan_rows import Rows
from fusepass.codegen.schedule.team import team_size
from fusepass.codegen.source import Target
from fusepass.errors import FusepassWarning, IRError
from fusepass.runtime.fallbacks import FallbackCounter
from fusepass.runtime.region import _failed
from tests import compile_cuda
from tests.support import kernels as k
from tests.support.emulate import emulate, needs_compiler
from tests.support.regions import NO_SPLIT, region, tensor_of
from tests.support.thinned import thinned

H200 = DeviceFacts.h200()
A100 = replace(H200, arch="sm_80", multiprocessors=108, l2_bytes=40 << 20, shared_bytes_per_block=163 << 10)
LITTLE = replace(H200, l2_bytes=4096, shared_bytes_per_block=24 << 10, multiprocessors=1)
"""A block, one of two on a multiprocessor, keeps some 2500 floats."""
MUCH = replace(LITTLE, shared_bytes_per_block=96 << 10)
RING = replace(LITTLE, shared_bytes_per_block=100 << 10, multiprocessors=8)
"""A block has a multiprocessor to itself, and keeps a circular buffer of 6 places of 1024 vectors."""


def size(program: Program, facts: DeviceFacts = H200) -> tuple[int, ...] | None:
    return team_size(program, program.kernels[0], facts)


MODELS: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...]]] = {
    "layer norm": (lambda x, *weights: F.layer_norm(x, x.shape[1:], *weights), (3, 4, 30, 40), (4, 30, 40)),
    "layer norm, odd": (lambda x, *_: F.gelu(F.layer_norm(x, x.shape[1:])), (2, 3, 7, 401), ()),
    "group norm": (lambda x, *weights: F.group_norm(x, 2, *weights), (2, 6, 41, 24), (6,)),
    "batch norm": (lambda x, *weights: F.batch_norm(x, None, None, *weights, True), (3, 2, 33, 44), (2,)),
    "batch norm, odd": (lambda x, *_: F.batch_norm(x, None, None, None, None, True).relu(), (5, 1, 29, 31), ()),
    "runs that begin anywhere": (lambda x, *_: F.batch_norm(x, None, None, None, None, True), (7, 3, 15, 27), ()),
    "long runs that begin anywhere": (lambda x, *_: F.batch_norm(x, None, None, None, None, True), (4, 3, 33, 37), ()),
    "runs with a number each": (lambda x, w, _: (x - x.mean((0, 2), keepdim=True)) * w, (9, 4, 343), (9, 1, 1)),
    "layer norm inside": (lambda x, *w: F.layer_norm(x * 2 - 1, x.shape[1:], *w).tanh() + x, (3, 5, 999), (5, 999)),
    "windows": (lambda x, *_: F.group_norm(F.avg_pool2d(x, 3, 2, 1), 2), (2, 4, 41, 58), ()),
    "padding": (lambda x, *_: F.group_norm(F.pad(x, (1, 2)), 1).relu(), (2, 3, 31, 40), ()),
    "softmax": (lambda x, *_: x.softmax(1), (2, 9001), ()),
    "log softmax of a sum": (lambda x, *_: (x + 1.5).log_softmax(1) * 2, (5, 4000), ()),
    "two sweeps": (lambda x, *_: F.normalize(x.softmax(1), dim=1), (3, 6000), ()),
    "several results": (
        lambda x, *_: (x - x.mean(1, keepdim=True), x * x.amax(1, keepdim=True), x.sum(1)), (3, 5003), ()
    ),
    "one row": (lambda x, *_: x.softmax(1), (1, 7777), ()),
    "fewer columns than blocks have threads": (lambda x, *_: x.softmax(1), (2, 1030), ()),
    "no column for some blocks": (lambda x, *_: x.softmax(1), (4, 5), ()),
}  # fmt: skip
"""A function of a tensor and two weights, the tensor's shape, and the weights'."""


@needs_compiler
@pytest.mark.parametrize(("members", "teams", "facts"), thinned([(2, 2, LITTLE), (5, 1, LITTLE), (3, 4, MUCH)], 2))
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.thinned(5)
def test_values(name: str, members: int, teams: int, facts: DeviceFacts) -> None:
    """No further from float64 than the numeric policy lets them be."""
    function, shape, weights = MODELS[name]
    random = torch.Generator().manual_seed(1)
    x, *others = (torch.randn(size, generator=random) for size in (shape, weights, weights))
    made = region(function, x * 2 + 5, *others)
    program = made.passed(replace(NO_SPLIT, teams=lambda program, kernel: (members, teams), longest_cached_row=1))
    assert any(kernel.team for kernel in program.kernels)
    results = emulate(program, render(program, facts), made.memory(program))
    for number, (eager, exact) in enumerate(zip(made.eager(), made.exact(), strict=True)):
        got = tensor_of(results[program.outputs[number]], program.buffer(program.outputs[number])).double()
        allowed = 2 * (eager.double() - exact.double()).abs().max() + 8 * 2**-24 * exact.double().abs().max()
        assert (got - exact.double()).abs().max() <= allowed


@needs_compiler
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("cols", [50_000, 49_152 * 4, 60_001])
@pytest.mark.thinned(3)
def test_a_team_of_all_blocks_holds_a_part_in_registers(
    cols: int, aligned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left is read again; slices are of any length."""
    monkeypatch.setitem(team_size.__globals__, "_HELD_WORDS", {1: 12, 2: 0})
    facts = replace(LITTLE, multiprocessors=4)
    program = k.in_teams(k.layer_norm(3, cols, weighted=False), 4, 1)
    plan = schedule(program.kernels[0], program, facts, aligned=aligned)
    assert plan.resident == 1
    assert isinstance(plan, Rows)
    assert plan.team is not None
    assert plan.team.held == 12 // plan.width
    assert plan.team.on_chip(plan.lanes) < plan.team.part
    random = np.random.default_rng(0)
    inputs = {"x": random.standard_normal(3 * cols).astype(np.float32) + 3}
    results = emulate(program, render(program, facts, aligned=aligned), inputs, shift=0 if aligned else 1)
    exact = inputs["x"].reshape(3, cols).astype(np.float64)
    exact = (exact - exact.mean(1, keepdims=True)) / np.sqrt(exact.var(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(results["y"].reshape(3, cols), exact, atol=4e-6)


CIRCULAR_BUFFERS: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...], tuple[int, int], str]] = {
    "layer norm": (
        lambda x, *weights: F.layer_norm(x, x.shape[1:], *weights), (5, 13_000), (13_000,), (2, 1),
        "a ring of 6 places, 4 vectors of weights",
    ),
    "layer norm of halves": (
        lambda x, *weights: F.layer_norm(x, x.shape[1:], *weights), (4, 16_008), (16_008,), (2, 1),
        "a ring of 6 places, 2 vectors of weights",
    ),
    "weights for some vectors": (
        lambda x, *weights: F.layer_norm(x, x.shape[1:], *weights).relu(), (3, 39_996), (39_996,), (2, 1),
        "a ring of 29 places, 8 vectors of weights",
    ),
    "three teams": (lambda x, *_: F.normalize(x, dim=1) * 2, (7, 8_004), (), (2, 3), "a ring of 6 places"),
    "one step a row": (lambda x, *_: x - x.mean(1, keepdim=True), (9, 4_100), (), (2, 2), "a ring of 6 places"),
    "group norm": (lambda x, *weights: F.group_norm(x, 2, *weights), (3, 4, 60, 52), (4,), (2, 1), "a ring of 6 places"),
    "group norm, rows anywhere": (
        lambda x, *weights: F.group_norm(x, 2, *weights), (3, 4, 61, 53), (4,), (2, 1), "a ring of 6 places"
    ),
    "group norm of one group": (
        lambda x, *weights: F.group_norm(x, 1, *weights), (5, 4, 50, 64), (4,), (2, 1), "a ring of 6 places"
    ),
    "group norm of one group, rows anywhere": (
        lambda x, *weights: F.group_norm(x, 1, *weights).relu(), (5, 7, 43, 41), (7,), (2, 2), "rows begin anywhere"
    ),
    "batch norm": (
        lambda x, *weights: F.batch_norm(x, None, None, *weights, True), (3, 5, 44, 64), (5,), (2, 2), "a ring of 6 places"
    ),
    "another input": (
        lambda x, y, _: F.layer_norm(x, x.shape[1:]) * y, (5, 8_188), (5, 8_188), (2, 2), "a ring of 6 places"
    ),
    "no column for a block": (lambda x, *_: F.layer_norm(x, x.shape[1:]), (3, 8), (), (3, 1), "a ring of 6 places"),
    "runs that begin anywhere": (
        lambda x, *w: F.batch_norm(x, None, None, *w, True), (14, 5, 31, 33), (5,), (2, 2), "runs of 1023 begin anywhere"
    ),
    "long runs that begin anywhere": (
        lambda x, *w: F.batch_norm(x, None, None, *w, True), (13, 5, 35, 31), (5,), (2, 2), "runs of 1085 begin anywhere"
    ),
    "long runs of halves that begin anywhere": (
        lambda x, *w: F.batch_norm(x, None, None, *w, True), (9, 5, 47, 49), (5,), (2, 2), "runs of 2303 begin anywhere"
    ),
    "rows of halves that begin anywhere": (
        lambda x, *_: F.layer_norm(x, x.shape[1:]), (5, 14_003), (), (2, 2), "rows begin anywhere"
    ),
    "weights of rows that begin anywhere": (
        lambda x, *w: F.layer_norm(x, x.shape[1:], *w), (5, 13_003), (13_003,), (2, 1), "rows begin anywhere"
    ),
    "a large team": (lambda x, *_: F.layer_norm(x, x.shape[1:]), (3, 66_000), (), (8, 1), "a ring of 6 places"),
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("name", thinned(CIRCULAR_BUFFERS, 2))
@pytest.mark.thinned(5)
def test_a_ring(name: str) -> None:
    """What blocks reduction loop is ahead of what they store, by a row or more; results are as near as the numeric policy wants them."""
    function, shape, weights, (members, teams), plan = CIRCULAR_BUFFERS[name]
    random = torch.Generator().manual_seed(3)
    dtype = torch.float16 if "halves" in name else torch.float32
    x, *others = (torch.randn(size, generator=random).to(dtype) for size in (shape, weights, weights))
    made = region(function, x * 2 + 5, *others)
    program = made.passed(replace(NO_SPLIT, teams=lambda program, kernel: (members, teams), longest_cached_row=1))
    facts = replace(RING, shared_bytes_per_block=480 << 10) if "some vectors" in name else RING
    assert plan in describe(program, program.kernels[0], facts)
    results = emulate(program, render(program, facts), made.memory(program))
    for number, (eager, exact) in enumerate(zip(made.eager(), made.exact(), strict=True)):
        got = tensor_of(results[program.outputs[number]], program.buffer(program.outputs[number])).double()
        digits = 2**-24 if dtype is torch.float32 else 2**-12
        allowed = 2 * (eager.double() - exact.double()).abs().max() + 8 * digits * exact.double().abs().max()
        assert (got - exact.double()).abs().max() <= allowed


@needs_compiler
@pytest.mark.parametrize(
    ("function", "shape", "dtype"),
    [
        (lambda x: F.layer_norm(x, x.shape[1:]), (5, 52_004), torch.float32),
        (lambda x: x - x.amax(1, keepdim=True), (3, 52_001), torch.float32),  # one reduction loop; rows begin anywhere
        (lambda x: F.normalize(x, dim=1), (4, 104_000), torch.float16),
    ],
)
def test_a_block_that_stays_copies_its_next_row_ahead(
    function: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Rows that fill a block's memory, more than twice as many as blocks."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    made = region(function, x)
    program = made.passed(replace(NO_SPLIT, longest_cached_row=1 << 20))
    facts = replace(H200, multiprocessors=1)
    assert "1 blocks" in describe(program, program.kernels[0], facts)
    assert "shared memory, fetched ahead" in describe(program, program.kernels[0], facts)
    results = emulate(program, render(program, facts), made.memory(program))
    (exact,) = made.exact()
    torch.testing.assert_close(tensor_of(results[program.outputs[0]], program.buffer(program.outputs[0])), exact)
    assert "fetched" not in describe(program, program.kernels[0], replace(H200, multiprocessors=3))


@needs_compiler
def test_nan_and_infinities_stand_where_pytorch_has_them() -> None:
    x = torch.randn(4, 6000)
    x[0, 5999], x[1, 17], x[2, 3000] = torch.nan, torch.inf, -torch.inf
    x[3] = -torch.inf
    made = region(lambda x: (x.softmax(1), x - x.amax(1, keepdim=True)), x)
    program = made.passed(replace(NO_SPLIT, teams=lambda program, kernel: (3, 2), longest_cached_row=1))
    results = emulate(program, render(program, LITTLE), made.memory(program))
    for name, eager in zip(program.outputs, made.eager(), strict=True):
        got = tensor_of(results[name], program.buffer(name))
        torch.testing.assert_close(got, eager, rtol=1e-5, atol=1e-6, equal_nan=True)


@needs_compiler
def test_results_depend_neither_on_timing_nor_on_how_many_teams_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    program = k.in_teams(k.layer_norm(7, 20_000), 3, 3)
    source = render(program, LITTLE)
    random = np.random.default_rng(0)
    inputs = {name: random.standard_normal(program.buffer(name).numel).astype(np.float32) for name in program.inputs}
    first = emulate(program, source, inputs)
    for room in ("3", "2", "1"):
        monkeypatch.setenv("EMULATED_TEAMS", room)
        again = emulate(program, source, inputs)
        assert all(np.array_equal(first[name].view(np.uint32), again[name].view(np.uint32)) for name in first)


@needs_compiler
def test_a_device_without_room_for_a_team_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    program = k.in_teams(k.softmax_rows(2, 6000), 2, 1)
    monkeypatch.setenv("EMULATED_TEAMS", "0")
    with pytest.raises(AssertionError, match="720"):
        emulate(program, render(program, LITTLE), {"x": np.zeros(12_000, np.float32)})


def test_a_region_that_does_not_fit_runs_as_its_operators_and_says_so() -> None:
    """720 is what CUDA calls a cooperative launch that is too large."""
    generated = SimpleNamespace(source=SimpleNamespace(target=Target.CUDA))
    counter = FallbackCounter()
    region: Any = SimpleNamespace(
        name="norm", generated=generated, fallbacks=counter, original=torch.neg, written={}, inputs=("x",)
    )
    with pytest.warns(FusepassWarning, match="norm runs as the original operators: blocks that share a row do not fit"):
        assert _failed(region, 720, (torch.ones(()),)) == -1
    assert counter.total == 1
    with pytest.raises(RuntimeError, match="CUDA error 719"):
        _failed(region, 719, (torch.ones(()),))
    region.written = {1: 0}
    assert _failed(region, 720, (torch.ones(()),)) == -1
    assert counter.total == 1  # the region that stands for its operators counts


@needs_compiler
def test_wide_indices_and_unaligned_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    program = k.in_teams(k.layer_norm(3, 8192, k.F16), 2, 2)
    random = np.random.default_rng(0)
    inputs = {name: random.standard_normal(program.buffer(name).numel).astype(np.float16) for name in program.inputs}
    narrow = emulate(program, render(program, LITTLE), inputs)
    monkeypatch.setattr("fusepass.codegen.schedule._MAX_INT", 0)
    wide = emulate(program, render(program, LITTLE, aligned=False), inputs, shift=1)
    for name in narrow:
        np.testing.assert_allclose(narrow[name].astype(np.float64), wide[name].astype(np.float64), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (k.softmax_rows(4096, 393_216), (16, 16)),  # 14 blocks keep it; with 16 all threads have equally many vectors
        (
            k.layer_norm(16, 64 * 256 * 256, weighted=False),
            (132, 1),
        ),  # 16.8 MB, of which a circular buffer has 1.75 times as much
        (k.layer_norm(16, 64 * 256 * 256), (132, 1)),  # half of the weights wait in registers
        (k.layer_norm(32, 64 * 256 * 256, k.F16), (66, 2)),
        (k.layer_norm(32, 64 * 256 * 256, k.F16, weighted=False), (66, 2)),
        (k.layer_norm(32, (64 * 256 * 256) + 1, k.F16), (66, 2)),  # rows meet the weights at places of their own
        (k.layer_norm(32, 2 << 20), (66, 2)),  # nothing is converted
        (k.layer_norm(224, 2 << 20, weighted=False), (66, 2)),
        (k.layer_norm(2048, 65_536, weighted=False), (2, 66)),
        (k.softmax_rows(16, 64 * 256 * 256), (132, 2)),  # two teams keep nine tenths; a circular buffer would not help
        (k.layer_norm(16, 6 << 20), None),  # no circular buffer, and all rows read weights twice as large as they are
        (k.layer_norm(4, 16 << 20, weighted=False), (132, 1)),  # 67 MB, of which the device keeps less than all
        (k.layer_norm(2, 1 << 28, weighted=False), None),  # and here next to nothing
        (k.layer_norm(2048, 49_152), None),  # a block keeps a row
        (k.layer_norm(64, 100_000, weighted=False), None),  # the second time all is in the cache
        (k.row_reduction(4096, 393_216, k.ReduceOp.SUM), None),  # read once anyway
        (k.softmax_channels(4096, 393_216, 4), None),  # rows are neighbours in memory
    ],
    ids=lambda value: value.name if isinstance(value, Program) else str(value),
)
def test_who_forms_teams(program: Program, expected: tuple[int, int] | None) -> None:
    assert size(program) == expected


@pytest.mark.parametrize("facts", [H200, A100], ids=["H200", "A100"])
@pytest.mark.parametrize(
    ("rows", "cols"), [(1, 4 << 20), (7, 3 << 20), (97, 1_234_567), (4096, 60_001), (300, 1 << 20)]
)
def test_teams_fit_the_device(rows: int, cols: int, facts: DeviceFacts) -> None:
    program = k.layer_norm(rows, cols, weighted=False)
    found = size(program, facts)
    if found is None:
        return
    members, teams = found
    program = k.in_teams(program, *found)
    plan = schedule(program.kernels[0], program, facts)
    assert members >= 2
    assert 1 <= teams <= rows
    assert plan.blocks == members * teams <= 2 * facts.multiprocessors
    assert plan.resident == (1 if plan.blocks <= facts.multiprocessors else 2)
    assert plan.resident * plan.threads <= facts.max_threads
    slots = 32 * 12
    assert plan.resident * (plan.shared_bytes + slots + 1024) <= facts.shared_bytes_per_block + 1024
    assert isinstance(plan, Rows)
    assert plan.team is not None
    assert members * plan.team.part * plan.width >= cols
    assert 0 < plan.team.kept <= plan.team.part
    assert plan.keep.in_shared


def test_weights_that_every_row_meets_stay_in_the_cache() -> None:
    program = k.in_teams(k.layer_norm(4, 16 << 20, weighted=False), 264, 1)
    assert schedule(program.kernels[0], program, H200).memory.once == {"x", "y"}


def test_the_pass_leaves_other_kernels_alone() -> None:
    made = region(lambda x: torch.relu(x).sum(1) + 1, torch.randn(3, 50))
    program = made.passed(replace(NO_SPLIT, teams=lambda program, kernel: (2, 1)))
    assert not any(kernel.team for kernel in program.kernels)


def test_mixed_layouts_form_no_team() -> None:
    x = torch.randn(2, 32, 8, 8).to(memory_format=torch.channels_last)
    made = region(lambda x: F.group_norm(x, 1).clone(memory_format=torch.contiguous_format), x)
    program = made.passed(replace(NO_SPLIT, teams=lambda program, kernel: (2, 1)))
    assert not any(kernel.team for kernel in program.kernels)


@pytest.mark.parametrize(
    ("function", "shape", "aligned", "expected"),
    [
        (lambda x: F.layer_norm(x, x.shape[1:]), (3, 64, 40), True, True),
        (lambda x: x.softmax(1), (3, 4095), True, True),  # an element is as good as a vector
        (lambda x: F.layer_norm(x, x.shape[1:]), (3, 64, 40), False, False),  # vectors may stand anywhere
        (lambda x: F.layer_norm(x.sin(), x.shape[1:]), (3, 64, 40), True, False),  # what is kept is not what is loaded
        (lambda x: F.group_norm(F.pad(x, (1, 2)), 1).relu(), (2, 3, 31, 40), True, False),  # not all is loaded
    ],
)
def test_what_is_kept_as_it_was_loaded_is_fetched_ahead(
    function: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...], aligned: bool, expected: bool
) -> None:
    made = region(function, torch.empty(shape, device="meta"))
    program = made.passed(replace(NO_SPLIT, teams=lambda program, kernel: (2, 1), longest_cached_row=1))
    kernel = next(kernel for kernel in program.kernels if kernel.team)
    for facts, fetches in ((LITTLE, expected), (replace(LITTLE, arch="sm_75"), False)):
        plan = schedule(kernel, program, facts, aligned=aligned)
        assert isinstance(plan, Rows)
        assert plan.keep is (Keep.FETCHED if fetches else Keep.SHARED)


def test_large_layer_norm_is_one_kernel() -> None:
    made = region(lambda x: F.layer_norm(x, x.shape[1:]), torch.empty(16, 64, 256, 256, device="meta"))
    program = made.passed(pass_options(H200))
    assert [kernel.team is not None for kernel in program.kernels] == [True]
    assert "teams of 132, 512 lanes x 1 rows" in describe(program, program.kernels[0], H200)
    assert "shared memory, a ring of 14 places" in describe(program, program.kernels[0], H200)
    assert "rows shared by 1 x 132 blocks through exchange_" in program_text(program)


@pytest.mark.parametrize(
    ("of", "circular_buffer"),
    [
        (lambda x, w, b, _: F.group_norm(x, 1, w, b), True),  # a weight for each 3136 columns
        (lambda x, w, b, _: F.layer_norm(x, x.shape[1:]) * w[:, None, None] + b[:, None, None], True),
        (lambda x, w, b, each: F.group_norm(x, 1, w, b) * each, False),  # and one of each column, which the cache keeps
    ],
    ids=["group norm", "layer norm", "for each column"],
)
def test_weights_of_channels_are_none_of_a_column(of: Callable[..., torch.Tensor], circular_buffer: bool) -> None:
    x, each, weight = (torch.empty(size, device="meta") for size in ((64, 192, 56, 56), (192, 56, 56), (192,)))
    program = region(of, x, weight, weight, each).passed(pass_options(H200))
    said = describe(program, program.kernels[0], H200)
    assert ("a ring of 14 places" in said) is circular_buffer
    assert "in registers" not in said


def test_a_value_that_is_simple_to_compute_again_is_not_kept_beside_what_it_is_made_of() -> None:
    def kept(function: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype = torch.float32) -> list[str]:
        (kernel,) = region(function, torch.randn(2, 50, dtype=dtype)).passed().kernels
        return [str(each.node.dtype) for each in kept_in_memory(kernel, Dataflow())]

    assert kept(lambda x: F.layer_norm(x * 2 + 1, (50,)) + x) == ["f32"]
    assert kept(lambda x: F.layer_norm(x, (50,)), torch.float16) == ["f16"]
    assert kept(lambda x: F.layer_norm(x.sin(), (50,)) + x) == ["f32", "f32"]  # a sine costs more than room
    chosen = lambda x: torch.where(torch.arange(50) == (x[:, :1] * 9).sin().long(), 0, x)  # noqa: E731
    assert kept(lambda x: chosen(x).softmax(1), torch.float16) == [
        "f16"
    ]  # nor a comparison with what is the same for all columns, however that is made


def test_teams_can_be_switched_off() -> None:
    made = region(lambda x: F.layer_norm(x, x.shape[1:]), torch.empty(16, 64, 256, 256, device="meta"))
    with fusepass.override(disable="teams"):
        program = made.passed(pass_options(H200))
    assert len(program.kernels) == 3
    assert not any(kernel.team for kernel in program.kernels)


@pytest.mark.parametrize(
    ("team", "fault"),
    [
        (Team(1, 2, "room"), "2 teams of 1 blocks, which have nothing to share"),
        (Team(2, 64, "room"), "room is no temporary of"),
        (Team(2, 1, "x"), "x is no temporary of"),
        (Team(2, 1, "x"), "x is a team's and has a reader or writer"),
        (Team(2, 1, "nowhere"), "nowhere is no temporary of"),
    ],
)
def test_verify_knows_teams(team: Team, fault: str) -> None:
    program = k.softmax_rows(3, 100)
    words = exchange_offsets(program.kernels[0], 2, 2)[""] // 4
    room = Buffer("room", DType.I32, (words,), (1,), Role.TEMP)
    kernels = (replace(program.kernels[0], team=team),)
    with pytest.raises(IRError, match=fault):
        verify(replace(program, buffers=(*program.buffers, room), kernels=kernels))


@pytest.mark.parametrize(
    ("program", "waiting", "nearer"),
    [
        (k.layer_norm(16, 1 << 22, weighted=False), 0, 2),
        (k.layer_norm(16, 1 << 22), 8, 0),  # half of the weights come from the cache, which is left to them
        (k.layer_norm(32, (1 << 22) + 1, k.F16, weighted=False), 0, 2),
    ],
    ids=["no weights", "weights", "rows that begin anywhere"],
)
def test_what_a_ring_brings_to_the_cache(program: Program, waiting: int, nearer: int) -> None:
    found = size(program, H200)
    assert found is not None
    program = k.in_teams(program, *found)
    plan = schedule(program.kernels[0], program, H200)
    assert isinstance(plan, Rows)
    assert plan.buffer is not None
    assert (plan.buffer.waiting, plan.buffer.nearer) == (waiting, nearer)
    assert ("fp::prefetch(" in render(program, H200).text) == (nearer > 0)


@pytest.mark.parametrize("facts", [H200, A100], ids=["H200", "A100"])
@pytest.mark.parametrize(
    "program",
    [
        k.layer_norm(16, 1 << 22, weighted=False),
        k.layer_norm(100, 1_000_001, k.F16, weighted=False),
        k.softmax_rows(4096, 393_216),
    ],
    ids=["layer norm", "halves", "softmax"],
)
def test_what_is_left_for_nvcc(program: Program, facts: DeviceFacts) -> None:
    found = size(program, facts)
    assert found is not None
    compile_cuda.keep(render(k.in_teams(program, *found), facts))
