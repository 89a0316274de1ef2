"""Convolutions as products of scaled halves: what the kernels compute, where they stand, and when they are tried."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fusepass import override
from fusepass.autotune import candidates
from fusepass.autotune.work import Work
from fusepass.codegen.forms import Forms
from fusepass.codegen.generate import generate
from fusepass.codegen.ir.dtype import DType, Precision
from fusepass.codegen.ir.expr import Builder
from fusepass.codegen.ir.index import Bound, axis_index
from fusepass.codegen.ir.product import Arithmetic, Nested, Operand, Product, nested
from fusepass.codegen.ir.program import Program
from fusepass.codegen.ir.text import program_text
from fusepass.codegen.ir.verify import verify
from fusepass.codegen.lowering.tracer import Spec
from fusepass.codegen.passes.anchors import AnchorOptions, AnchorSource, generate_anchors
from fusepass.codegen.passes.axes import order_and_merge
from fusepass.codegen.passes.halves import scales_of
from fusepass.codegen.passes.products import split_products
from fusepass.codegen.render import describe, render
from fusepass.codegen.schedule_product import schedule_product
from fusepass.codegen.schedule_product.tiles import TILINGS, Tiling
from fusepass.codegen.search.space import search_space
from fusepass.codegen.source import Source
from fusepass.compile.splice import subgraph
from fusepass.errors import IRError
from fusepass.patterns.partition import partition
from fusepass.report.choice import GENERATED
from tests import compile_cuda
from tests.support.candidates import generate_candidates
from tests.support.convolutions import HALVED as CASES
from tests.support.convolutions import Case, program_of
from tests.support.emulate import emulate, needs_compiler
from tests.support.interpret import interpret
from tests.support.machine_code import told_by_ptxas
from tests.support.numpy_ops import Array
from tests.support.precision import cudnn
from tests.support.products import H200, ONE, tiling_id
from tests.support.regions import trace

EVERY_HALVED = AnchorOptions(lambda program, kernel: True, AnchorSource.HALVES, warps=4)


def halved(case: Case, *, chain: bool = True) -> Program:
    """The case with its convolution as a product of halves."""
    rounded = replace(case, precision=Precision.TF32, warps=4)
    program = program_of(rounded, chain=chain)
    return generate_anchors(program, Builder(), EVERY_HALVED)


def product_kernel(program: Program) -> int:
    (found,) = (number for number, kernel in enumerate(program.kernels) if isinstance(kernel.anchor, Product))
    return found


def operands(case: Case, seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {"x": torch.randn(case.source), "w": torch.randn(case.weight), "bias": torch.randn(case.out_channels)}


def memory(case: Case, given: dict[str, Tensor]) -> dict[str, Array]:
    found = {name: tensor.numpy().ravel() for name, tensor in given.items()}
    if case.channels_last:
        found["x"] = np.ascontiguousarray(np.moveaxis(given["x"].numpy(), 1, -1)).ravel()
    return found


def exact(case: Case, given: dict[str, Tensor]) -> Array:
    x, w, bias = (given[name].double() for name in ("x", "w", "bias"))
    result: Array = (torch.convolution(x, w, bias, *case.geometry).relu() * 2).numpy()  # type: ignore[call-overload]
    return result


def bound(case: Case, given: dict[str, Tensor]) -> Array:
    """What rounding each operand to 11 digits may cost."""
    x, w = (given[name].double().abs() for name in ("x", "w"))
    terms = torch.convolution(x, w, None, *case.geometry)  # type: ignore[call-overload]
    result: Array = (2 * terms * 2.0**-10 + 1e-6 * terms.abs().max()).numpy()
    return result


@pytest.mark.parametrize("name", CASES)
def test_values(name: str) -> None:
    case = CASES[name]
    program = halved(case)
    verify(program)
    assert not program.calls
    given = operands(case)
    found = interpret(program, memory(case, given))["y"].reshape(case.result)
    assert (np.abs(found - exact(case, given)) <= bound(case, given)).all()


@pytest.mark.parametrize("name", CASES)
def test_values_after_all_passes(name: str) -> None:
    case = CASES[name]
    rounded = program_of(replace(case, precision=Precision.TF32))
    program = generate(rounded, Builder(), H200, AnchorSource.HALVES).program
    verify(program)
    assert any(isinstance(kernel.anchor, Product) for kernel in program.kernels)
    given = operands(case)
    found = interpret(program, memory(case, given))["y"].reshape(case.result)
    assert (np.abs(found - exact(case, given)) <= bound(case, given)).all()


EMULATED = [
    "2d",
    "2d, a border of whole vectors",
    "2d, strided and dilated",
    "2d, odd channels, one by one",
    "1d",
    "3d, strided",
    "transposed, cut",
]
EMULATED += ["transposed, by 2", "transposed, by 1 and 2, dilated"]


@needs_compiler
@pytest.mark.parametrize("name", EMULATED)
@pytest.mark.thinned(5)
def test_values_thread_by_thread(name: str) -> None:
    case = CASES[name]
    program = halved(case)
    given = operands(case)
    found = emulate(program, render(program, ONE), memory(case, given))["y"].reshape(case.result)
    assert (np.abs(found - exact(case, given)) <= bound(case, given)).all()


@needs_compiler
@pytest.mark.parametrize(
    ("tile", "case"),
    [
        ((128, 256), Case((2, 40, 9, 40), 72, (3, 3), (1, 1), (1, 1), (1, 2))),  # several tiles, an end within a panel
        ((64, 128), Case((2, 40, 9, 15), 72, (3, 3), (1, 1), (1, 1), (1, 1))),  # rows of odd length
        ((64, 128), Case((2, 40, 9, 15), 20, (4, 4), (2, 2), (1, 1), (1, 1), True)),
    ],
)
def test_values_of_groups_of_warps(tile: tuple[int, int], case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "fusepass.codegen.schedule_product"
    tilings = [each for each in __import__(module, fromlist=["TILINGS"]).TILINGS if each.groups]
    chosen = tuple(
        each for each in tilings if (each.rows, each.columns) == tile and Arithmetic.HALVES in each.arithmetics
    )
    monkeypatch.setattr(f"{module}.TILINGS", chosen)
    program = halved(case)
    given = operands(case)
    found = emulate(program, render(program, ONE), memory(case, given))["y"].reshape(case.result)
    assert (np.abs(found - exact(case, given)) <= bound(case, given)).all()


@needs_compiler
@pytest.mark.parametrize(
    ("tile", "name"),
    [
        ((64, 256), "2d, neighbours"),  # an end within a panel, several runs in one
        ((128, 128), "2d, neighbours, dilated"),  # several tiles, more than one run of panels
        ((64, 128), "transposed, neighbours, by 2"),
        ((64, 128), "1d"),
    ],
)
def test_values_of_columns_that_are_neighbours(
    tile: tuple[int, int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = tuple(each for each in TILINGS if each.runs and not each.iterations and (each.rows, each.columns) == tile)
    monkeypatch.setattr("fusepass.codegen.schedule_product.TILINGS", chosen)
    case = CASES[name]
    program = halved(case)
    source = render(program, H200)
    assert "fp::RunMultiplier" in source.text
    given = operands(case)
    found = emulate(program, source, memory(case, given))["y"].reshape(case.result)
    assert (np.abs(found - exact(case, given)) <= bound(case, given)).all()


@needs_compiler
@pytest.mark.parametrize("length", [64, 128])
def test_sums_in_pieces(length: int) -> None:
    case = CASES["3d"]
    builder = Builder()
    program = order_and_merge(split_products(halved(case), builder, lambda program, kernel: length), builder)
    given = operands(case)
    for found in (interpret(program, memory(case, given)), emulate(program, render(program, ONE), memory(case, given))):
        assert (np.abs(found["y"].reshape(case.result) - exact(case, given)) <= bound(case, given)).all()


def test_scales_of_samples_and_channels_cost_nothing() -> None:
    case = CASES["2d"]
    given = operands(case)
    plain = dict(given)
    scale = 2.0 ** torch.tensor([-60.0, 50.0]).view(2, 1, 1, 1)
    across = 2.0 ** torch.randint(-20, 20, (1, 24, 1, 1)).float()
    given |= {"x": given["x"] * scale * across, "w": given["w"] / across, "bias": torch.zeros(20)}
    plain["bias"] = torch.zeros(20)
    program = halved(case)
    found = interpret(program, memory(case, given))["y"].reshape(case.result) / scale.numpy()
    assert (np.abs(found - exact(case, plain)) <= bound(case, plain)).all()


@needs_compiler
def test_an_input_is_packed_again_after_an_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to pack it run, in the emulation too: a number that its guessed scale makes too large is in a row that was not looked at."""
    monkeypatch.setitem(scales_of.__kwdefaults__, "least", 0)
    case = replace(CASES["2d"], source=(2, 24, 20, 11))
    program = halved(case)
    given = operands(case)
    flagging = given | {"x": given["x"].clone()}
    flagging["x"][1, 3, 0, 5] = 2000.0
    source = render(program, ONE)
    for number, each in enumerate((given, flagging)):
        for found in (interpret(program, memory(case, each)), emulate(program, source, memory(case, each))):
            assert (np.abs(found["y"].reshape(case.result) - exact(case, each)) <= bound(case, each)).all()
            overflow_flags = [found[name][0] for name in found if name.endswith("_alarm")]
            assert all(overflow_flag == number for overflow_flag in overflow_flags)


NOT_FINITE = {
    "2d": replace(CASES["2d"], padding=(0, 0)),  # libraries differ in what a zero of the border meets
    "transposed": replace(CASES["transposed"], source=(2, 24, 9, 11), padding=(2, 4)),
    "transposed, by 2": replace(CASES["transposed, by 2"], source=(2, 24, 9, 11), padding=(3, 3)),
}


@needs_compiler
@pytest.mark.parametrize(("name", "emulated"), [*((name, False) for name in NOT_FINITE), ("2d", True)])
def test_what_is_not_finite_spreads_as_in_the_library(name: str, emulated: bool) -> None:
    case = NOT_FINITE[name]
    given = operands(case)
    x = given["x"]
    w = given["w"].transpose(0, 1) if case.transposed else given["w"]
    x[0, 3, 4, 5], x[0, 7, 8, 10], x[1, 0, 0, 0], x[1, 1, 5, 5] = torch.inf, torch.nan, -torch.inf, 1e20
    x[1, 2, 5, 5], w[4, 3], w[5, 0, 0, 0], w[6, 0, 1, 1] = 1e-30, 1e-20, 0, torch.inf
    program = halved(case, chain=False)
    inputs = memory(case, given)
    found = emulate(program, render(program, ONE), inputs) if emulated else interpret(program, inputs)
    actual = torch.from_numpy(found["conv_out"].astype(np.float64)).reshape(case.result)
    wanted = torch.convolution(x, given["w"], None, *case.geometry).double()  # type: ignore[call-overload]
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(kind(actual), kind(wanted))
    assert wanted.isfinite().any()


def test_what_cannot_be_the_epilogue_reads_the_result() -> None:
    program = halved(CASES["2d"], chain=False)
    assert [kernel.anchor is None for kernel in program.kernels] == [True] * 7 + [False]
    assert program.kernels[-1].writes == {"conv_out"}


def test_what_stays_as_it_was() -> None:
    """No rounding allowed, few channels, groups, phases that differ: there is no such product."""
    case = CASES["2d"]
    others = (
        replace(case, precision=Precision.FLOAT32),
        replace(case, source=(2, 16, 9, 11)),
        replace(case, source=(2, 17, 9, 11)),
        replace(case, groups=4),
        Case((2, 24, 5, 6), 9, (3, 4), (2, 2), (1, 1), (1, 1), True, precision=Precision.TF32),
        Case((2, 24, 5, 6), 9, (4, 4), (2, 2), (1, 1), (3, 1), True, precision=Precision.TF32),
    )
    for other in others:
        program = program_of(replace(other, warps=4))
        made = generate_anchors(program, Builder(), EVERY_HALVED)
        assert not any(isinstance(kernel.anchor, Product) for kernel in made.kernels)


def test_only_where_it_is_asked_for() -> None:
    program = program_of(replace(CASES["2d"], precision=Precision.TF32))
    for anchor in AnchorSource:
        made = generate(program, Builder(), H200, anchor).program
        asked = anchor in (
            AnchorSource.HALVES,
            AnchorSource.REGISTER_STATIONARY,
        )  # weights of many channels are not held
        assert any(isinstance(kernel.anchor, Product) for kernel in made.kernels) is asked


@pytest.mark.parametrize("effort", ["fast", "max"])
def test_large_convolutions_are_tried_so(effort: str) -> None:
    def offered(*shape: int, out: int = 64) -> list[str]:
        model = nn.Sequential(nn.Conv2d(shape[1], out, 3), nn.ReLU()).to("meta")
        graph, _ = trace(model, torch.empty(shape, device="meta"))
        return [spec.name for spec in search_space(graph, H200, effort)]

    name, tiled = "scaled halves anchor", "tiled scaled halves anchor"
    assert name in offered(64, 32, 64, 64)
    assert tiled in offered(64, 32, 64, 64)
    assert tiled not in offered(128, 16, 64, 64)  # those of few channels are so anyway
    assert offered(64, 32, 64, 64)[0] in (GENERATED, "channels last")
    assert name not in offered(2, 32, 64, 64)
    assert name in offered(128, 16, 64, 64)
    assert name not in offered(2, 16, 64, 64)
    with cudnn(allow_tf32=False):
        assert name not in offered(64, 32, 64, 64)
        assert name in offered(128, 16, 64, 64)


def test_dimensions_that_go_on_as_one_are_one() -> None:
    assert nested([4, 5, 8], [40, 8, 1]) == 1
    assert nested([1, 5, 1], [7, 3, 9]) == 3
    assert nested([1, 1], [2, 3]) == 1
    assert nested([4, 5, 8], [50, 8, 1]) == Nested((4, 40), (50, 1))
    operand = Operand("x", 100, Nested((3, 4), (20, 2)), Nested((2, 8), (20, 1)))
    assert operand.extent(2, 12, 16) == 1 + 100 + 40 + 6 + 20 + 7


def test_a_border_is_wide_enough_for_vectors_where_that_costs_little() -> None:
    def columns(*shape: int) -> tuple[int, int]:
        program = halved(Case((2, 24, *shape), 8, (3, 3), (1, 1), (1, 1), (1, 1)))
        (image,) = (buffer for buffer in program.buffers if buffer.name.endswith("_input"))
        anchor = program.kernels[product_kernel(program)].anchor
        assert isinstance(anchor, Product)
        return image.shape[2], anchor.right.offset // 24

    assert columns(5, 64) == (72, 3)
    assert columns(5, 16) == (18, 0)
    assert columns(5, 65) == (67, 0)


def test_a_product_of_other_sizes_is_refused() -> None:
    program = halved(CASES["2d"])
    at = product_kernel(program)
    kernel = program.kernels[at]
    assert isinstance(kernel.anchor, Product)
    assert isinstance(kernel.anchor.right.row, Nested)
    for row, fault in ((Nested((9, 12), (312, 24)), "does not have"), (Nested((9, 11), (3120, 24)), "out of range")):
        right = replace(kernel.anchor.right, row=row)
        broken = replace(kernel, anchor=replace(kernel.anchor, right=right))
        with pytest.raises(IRError, match=fault):
            verify(replace(program, kernels=(*program.kernels[:at], broken)))


def test_points_beyond_the_result_do_not_exist() -> None:
    program = halved(CASES["transposed, by 2"])
    assert "where 0 <= " in program_text(program)
    at = product_kernel(program)
    kernel = program.kernels[at]
    assert split_products(program, Builder(), lambda program, kernel: 64) == program
    column = kernel.rows[-1]
    for broken, fault in (
        (replace(kernel, within=()), "spans -"),
        (replace(kernel, within=(Bound(axis_index(replace(column, name="other")), 0, 3),)), "for what is no row"),
        (replace(kernel, anchor=None), "whole sums"),
    ):
        with pytest.raises(IRError, match=fault):
            verify(replace(program, kernels=(*program.kernels[:at], broken)))


def test_copies_are_of_16_bytes() -> None:
    for name, case in CASES.items():
        program = halved(case)
        kernel = program.kernels[product_kernel(program)]
        plan = schedule_product(kernel, program, H200)
        assert plan is not None
        assert (plan.left.vector, plan.right.vector) == (8, 8), name
        assert plan.right.inner_first
        assert describe(program, kernel, H200).endswith("halves")
        assert {buffer.dtype for buffer in program.buffers} == {DType.F32, DType.F16}


def test_what_rows_have_in_common_is_done_before_sums_are_laid_out() -> None:
    """Where phases are stored together; else threads store their own sums, in pairs where rows begin at even places."""
    big = Case((64, 64, 32, 32), 64, (4, 4), (2, 2), (1, 1), (1, 1), True)
    text = render(halved(big), H200).text
    assert "sum = maximum_0 * 2.0f;" in text
    assert "across += 16" in text
    plain = replace(big, transposed=False, stride=(1, 1))
    assert "fp::Vec<float, 2>*" not in render(halved(plain), H200).text
    plain = replace(plain, kernel=(3, 3), source=(64, 72, 32, 32))
    text = render(halved(plain), H200).text
    assert "reinterpret_cast<fp::Vec<float, 2>*>(y + " in text
    assert "lay_out" not in text


@pytest.mark.parametrize("name", ["3d, strided", "transposed, by 2"])
def test_what_is_left_for_nvcc(name: str) -> None:
    compile_cuda.keep(render(halved(CASES[name]), H200))


@pytest.mark.parametrize("tiling", [each for each in TILINGS if each.runs and not each.iterations], ids=tiling_id)
@pytest.mark.thinned(3)
def test_columns_that_are_neighbours_leave_sums_in_registers(
    tiling: Tiling, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing is spilled, and ptxas does not say that products run one by one."""
    monkeypatch.setattr("fusepass.codegen.schedule_product.TILINGS", (tiling,))
    source = render(halved(CASES["2d, neighbours"]), H200)
    assert "fp::RunMultiplier" in source.text
    told = told_by_ptxas(source, tmp_path)
    assert "C75" not in told, told
    assert {*re.findall(r"(\d+) bytes spill stores", told)} == {"0"}, told


@pytest.mark.parametrize(
    ("first", "last", "left_out"),
    [
        (nn.Conv1d(32, 64, 15), nn.ReLU(), True),
        (nn.Conv1d(32, 64, 15), nn.Softmax(1), True),
        (nn.Conv1d(32, 64, 3), nn.ReLU(), False),  # memory bounds it
        (nn.ConvTranspose3d(32, 48, 4, 2), nn.Softmax(1), False),
    ],
)
def test_beside_halves_a_generated_convolution_is_tried_that_alone_reduces_or_waits_for_memory(
    first: nn.Module, last: nn.Module, left_out: bool
) -> None:
    size = (64, 32, 20_000) if isinstance(first, nn.Conv1d) else (16, 32, 16, 16, 16)
    graph, _ = trace(nn.Sequential(first, last).to("meta"), torch.empty(size, device="meta"))
    for node in graph.graph.nodes:
        if isinstance(value := node.meta.get("val"), Tensor):
            node.meta["val"] = Spec.of(value, torch.device("cuda"))
    (region,) = partition(graph).regions
    work = Work(region, subgraph(graph, region), {})
    with (
        override(tune="fast"),
        mock.patch.object(candidates, "device_facts", return_value=H200),
        mock.patch.object(candidates, "recall", return_value=None),
    ):
        begun: list[Source] = []
        generate_candidates(work, Forms(), begun.append)
    names = [each.name for each in work.candidates]
    assert {"scaled halves anchor", "tiled scaled halves anchor"} <= {*names}
    slow = [source for each in work.candidates if "halves" in each.name for source in each.sources]
    assert sorted(map(id, begun[: len(slow)])) == sorted(map(id, slow))  # while the others are generated
    assert ("generated anchor" not in names) is left_out
