"""Elements at places that come from data: PyTorch's values, its errors, and what the kernels look like."""

from __future__ import annotations

import re
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusepass
from fusepass.capture.trace import Captured, capture
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import generate, pass_options
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Apply, Expr, Gather, Op
from fusepass.codegen.render import render
from fusepass.codegen.schedule import schedule
from fusepass.config import override
from tests.support.emulate import emulate, needs_compiler
from tests.support.interpret import interpret
from tests.support.interpreted import interpreted
from tests.support.native import run_native
from tests.support.regions import Functional, region, tensor_of

TABLE, IDS = torch.randn(7, 5, 3, dtype=torch.float64), torch.tensor([[6, 0, 2], [2, 5, 1]])


def _halves_exchanged(x: Tensor) -> Tensor:
    return torch.cat([x[:, 3:], x[:, :3]], 1)


CASES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "embedding": lambda x, i: F.embedding(i, x[:, :, 0]) * 2,
    "embedding of a transposed table": lambda x, i: F.embedding(i, x[:, 0].contiguous().t().contiguous().t()),
    "index_select": lambda x, i: x.index_select(0, i[0]),
    "gather": lambda x, i: x[:, 0].gather(0, i),
    "take_along_dim": lambda x, i: torch.take_along_dim(x[:2, :, 0], i % 5, 1),
    "one index": lambda x, i: x[i],
    "negative indices": lambda x, i: x[i - 7],
    "two indices": lambda x, i: x[i, i % 5],
    "indices apart": lambda x, i: x[i, :, i % 3],
    "an index behind a slice": lambda x, i: x[:, 1:4][:, i % 3],
    "a slice of what is looked up": lambda x, i: x[i][:, 1:, ::2].exp(),
    "looked up twice": lambda x, i: x[i][i % 2],
    "looked up, and what lies across, in as many rows": lambda x, i: x[:5, :, 0][i[0] % 5].t()[i[1] % 5] + 1,
    "columns of a mean, moved round": lambda x, i: _halves_exchanged(torch.stack([x, x * 2]).mean(0)[:, :, 0][i[0]]),
    "an activation of the table": lambda x, i: torch.tanh(x)[i] + 1,
    "a softmax of the table": lambda x, i: torch.softmax(x, 0)[i],
    "a padded table": lambda x, i: F.pad(x, (1, 1))[i],
    "summed": lambda x, i: F.embedding(i, x[:, 0]).sum(1),
    "normalised": lambda x, i: F.layer_norm(F.embedding(i, x[:, :, 1]), (5,), eps=1e-2),
    "concatenated": lambda x, i: torch.cat([x[i], x[None, :3]], 0),
    "a table of one row": lambda x, i: x[:1][i * 0],
    "a number": lambda x, i: x[0, 0, 0].index_select(0, i[0, :1] * 0),
    "at places counted": lambda x, i: x.index_select(1, torch.arange(4, -1, -1)) + 1,
    "at places counted, of what is computed": lambda x, i: x.exp().softmax(-1)[:, (torch.arange(9) * 2 + 1) % 5],
    "at places counted, of a mean of windows": lambda x, i: F.avg_pool1d(x, 2, 1)[..., (torch.arange(4) + 1) % 2],
    "at places counted and found": lambda x, i: x.exp()[i[0], (torch.arange(3) + 1) % 5],
    "at places counted from the end": lambda x, i: x[torch.arange(-7, -2)] * 2,
    "a cross product": lambda x, i: torch.linalg.cross(x, x.flip(0).exp()) + x,
    "differences of places": lambda x, i: x[:5] + x[0, :3].flatten()[torch.arange(5)[:, None] - torch.arange(3) + 2],
    "nearest": lambda x, i: F.interpolate(x, 8),
    "bilinear": lambda x, i: F.interpolate(x[None], (9, 4), mode="bilinear"),
    "corners": lambda x, i: F.interpolate(x[None], (9, 4), mode="bilinear", align_corners=True),
    "bicubic": lambda x, i: F.interpolate(x[None], (3, 7), mode="bicubic"),
    "reflect": lambda x, i: F.pad(x, (2, 1, 3, 4), mode="reflect"),
    "replicate": lambda x, i: F.pad(x, (2, 1, 3, 4), mode="replicate"),
    "reflected and summed": lambda x, i: F.pad(x.exp(), (1, 1), mode="reflect").sum(-1),
    "circular": lambda x, i: F.pad(x, (1, 2), mode="circular") * 2,
    "computed places, then padded": lambda x, i: F.pad(x[:, :, (torch.arange(6) * 0.5).long()], (2, 1)),
    "looked up, then padded": lambda x, i: F.pad(x[i.flatten()], (0, 0, 0, 0, 2, 1)),
    "upsampled and pooled": lambda x, i: F.avg_pool2d(F.interpolate(x[None].tanh(), (8, 8), mode="bilinear"), 3),
    "upsampled and normalised": lambda x, i: F.group_norm(F.interpolate(x[None], (7, 6), mode="bilinear"), 1),
    "nll_loss": lambda x, i: F.nll_loss(F.log_softmax(x[:2], 1), i % 5, ignore_index=1),
    "cross_entropy": lambda x, i: F.cross_entropy(x[:2], i % 5, label_smoothing=0.1),
    "one of each row": lambda x, i: torch.zeros_like(x[:2, :, 0]).scatter(1, i[:, :1] % 5, x[2:4, :2, 1].exp()),
    "one of each column, a number": lambda x, i: x[:, :3, 0].scatter(0, i[:1], 2.5) * 2,
    "one of each row, added": lambda x, i: x[:2, :, 0].scatter_add(-1, i[:, 2:] % 5, x[3:5, :1, 1]),
    "one for a whole row": lambda x, i: (i[:, 0, None] % 5).new_zeros(2, 5).scatter(1, i[:, :1] % 5, 1).cumsum(1),
    "grid_sample": lambda x, i: F.grid_sample(x[None], x[None, :, :, :2].tanh(), align_corners=False),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.thinned(3)
def test_values(name: str) -> None:
    made = region(Functional(CASES[name]), TABLE, IDS)
    made.check()
    made.check(made.passed())


def test_a_known_place_of_a_scatter_is_none_of_its_index() -> None:
    """As in the gradient of what ``multi_margin_loss`` gathers."""
    made = region(lambda x, y: x.scatter_add(1, (torch.arange(4) % 5)[:, None], y), TABLE[:4, :, 0], TABLE[3:, :1, 1])
    made.check(made.passed())


COUNTED = {
    "at places counted": (0, 1),
    "at places counted, of what is computed": (0, 2),
    "at places counted, of a mean of windows": (0, 2),
    "at places counted and found": (1, 1),
    "at places counted from the end": (0, 1),
    "a cross product": (0, 1),
    "differences of places": (0, 1),
}
"""Elements looked up, and kernels."""


@pytest.mark.parametrize("name", COUNTED)
def test_places_that_are_counted_are_not_looked_up(name: str) -> None:
    kernels = region(Functional(CASES[name]), TABLE, IDS).passed().kernels
    looked_up = [node for kernel in kernels for node in kernel.nodes if isinstance(node, Gather)]
    assert (len(looked_up), len(kernels)) == COUNTED[name]


BEYOND: dict[str, Callable[[Tensor], Tensor]] = {
    "products": lambda x: x + torch.arange(10) * 2_000_000_000,
    "a range": lambda x: x + torch.arange(-7, 20_000_000_000, 2_000_000_000)[:10],
    "quotients": lambda x: x + (torch.arange(10) * 2_000_000_000) // 1999,
    "remainders": lambda x: x + (torch.arange(10) * 2_000_000_000) % 1_999_999_999,
    "differences": lambda x: x + (torch.arange(10) - 5) * 2_000_000_000,
}


@needs_compiler
@pytest.mark.parametrize("name", BEYOND)
@pytest.mark.parametrize("on_gpu", [True, False])
def test_what_is_counted_may_be_beyond_32_bits(name: str, on_gpu: bool) -> None:
    made = region(Functional(BEYOND[name]), torch.arange(30).view(3, 10))
    facts = DeviceFacts.h200() if on_gpu else DeviceFacts.cpu(1)
    program = made.passed(pass_options(facts))
    memory = made.memory(program)
    results = emulate(program, render(program, facts), memory) if on_gpu else run_native(program, memory)
    (output,) = program.outputs
    assert torch.equal(tensor_of(results[output], program.buffer(output)), made.eager()[0])


UPSAMPLED: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "twice": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), True),
    "four times, by size": (lambda x: F.interpolate(x, (20, 24), mode="bilinear"), True),
    "half": (lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear"), True),
    "less than twice": (
        lambda x: F.interpolate(x, scale_factor=1.75, mode="bilinear", recompute_scale_factor=False),
        False,
    ),
    "three times": (lambda x: F.interpolate(x, scale_factor=3, mode="bilinear"), False),
    "a factor beside the size": (lambda x: torch.ops.aten.upsample_bilinear2d(x, [10, 12], False, 1.0, 2.0), False),
    "corners": (lambda x: F.interpolate(x, (9, 11), mode="bilinear", align_corners=True), True),
    "corners, one element": (lambda x: F.interpolate(x, (1, 1), mode="bilinear", align_corners=True), True),
    "line": (lambda x: F.interpolate(x[0], scale_factor=2, mode="linear"), True),
    "volume": (lambda x: F.interpolate(x[None], scale_factor=2, mode="trilinear"), True),
    "cubic, twice": (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), True),
    "cubic, half": (lambda x: F.interpolate(x, scale_factor=0.5, mode="bicubic"), True),
}
"""Interpolations, and whether the places of all elements are exact, so that whole numbers find them."""


@pytest.mark.parametrize("name", UPSAMPLED)
def test_interpolated(name: str) -> None:
    """What is infinite or no number shows in the same places as in eager, of the first and last elements, too."""
    function, exact = UPSAMPLED[name]
    x = torch.arange(180.0, dtype=torch.float64).view(2, 3, 5, 6).sin()
    x[0, 0, 0, 1], x[0, 1, 1, 0], x[0, 2, -1, -2] = torch.nan, torch.inf, -torch.inf
    x[1, 0, -1, -1], x[1, 1, 0, 0], x[1, 2, 2, 3] = torch.nan, torch.inf, -torch.inf
    made = region(function, x)
    made.check()
    made.check(made.passed())
    floors = [node for kernel in made.program.kernels for node in kernel.nodes if is_apply(node, Op.CAST, DType.I32)]
    assert (not floors) is exact


def is_apply(node: Expr, op: Op, dtype: DType) -> bool:
    return isinstance(node, Apply) and node.op is op and node.dtype is dtype


def test_a_vector_of_interpolated_elements_lies_in_one_row() -> None:
    made = region(
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), torch.empty(8, 64, 216, 223, device="meta")
    )
    program = made.passed(pass_options(DeviceFacts.h200()))
    assert schedule(program.kernels[0], program, DeviceFacts.h200()).width == 2


def test_a_stored_table_is_read_in_place() -> None:
    made = region(lambda x, i: torch.relu(x.transpose(0, 1)[:, i]), TABLE, IDS)
    assert [buffer.name for buffer in made.program.buffers] == ["arg0_1", "arg1_1", "out0"]


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6)

    def forward(self, ids: Tensor) -> Tensor:
        return F.gelu(self.table(ids)).mean(-1)


WRONG = [torch.tensor([[1, 9]]), torch.tensor([[-1, 0]])]


@pytest.mark.parametrize("ids", WRONG, ids=["too large", "negative"])
@pytest.mark.parametrize("compiled", [False, True], ids=["interpreted", "compiled"])
def test_an_index_out_of_range_raises_what_eager_raises(ids: Tensor, compiled: bool) -> None:
    model = Lookup()
    good = torch.tensor([[1, 8]])
    with override(debug=True), torch.no_grad():
        if compiled:
            fused = fusepass.optimize(model)
            torch.testing.assert_close(fused(good), model(good))
        else:
            with interpreted():
                fused = fusepass.optimize(model)
                torch.testing.assert_close(fused(good), model(good))
        assert fused.report().fused_share == 1
        with pytest.raises(IndexError) as wanted:
            model(ids)
        with pytest.raises(IndexError) as raised:
            fused(ids)
        assert str(raised.value) == str(wanted.value)
        torch.testing.assert_close(fused(good), model(good))


def test_a_counted_place_out_of_range_raises_what_eager_raises() -> None:
    class Shifted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 2).index_select(0, torch.arange(5) + 1)

    model, x = Shifted(), torch.randn(5, 3)
    with interpreted(), override(debug=True):
        fused = fusepass.optimize(model)
        with pytest.raises(IndexError) as wanted:
            model(x)
        with pytest.raises(IndexError) as raised:
            fused(x)
        assert str(raised.value) == str(wanted.value)


def test_a_place_to_write_to_out_of_range_raises_what_eager_raises() -> None:
    model = Written()
    good, wrong = torch.tensor([[1], [8]]), torch.tensor([[1], [9]])
    with interpreted(), override(debug=True), torch.no_grad():
        fused = fusepass.optimize(model)
        torch.testing.assert_close(fused(good), model(good))
        assert fused.report().fused_share == 1
        for call in (model, fused):
            with pytest.raises(RuntimeError, match="out of bounds"):
                call(wrong)


class Written(nn.Module):
    def forward(self, places: Tensor) -> Tensor:
        return torch.zeros(2, 9).scatter(1, places, places.exp()) * 2


class Probabilities(nn.Module):
    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, x: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        return F.binary_cross_entropy(x, target, weight, reduction=self.reduction) * 2


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("bad", [1.5, -0.1, float("nan")])
def test_what_is_no_probability_raises_what_eager_raises(reduction: str, bad: float) -> None:
    model = Probabilities(reduction)
    good, target, weight = torch.rand(3, 5), torch.rand(3, 5), torch.rand(5)
    good[0, :2] = torch.tensor([0.0, 1.0])
    wrong = good.clone()
    wrong[2, 1] = bad
    with interpreted(), override(debug=True), torch.no_grad():
        fused = fusepass.optimize(model)
        torch.testing.assert_close(fused(good, target, weight), model(good, target, weight))
        assert fused.report().fused_share == 1
        for call in (model, fused):
            with pytest.raises(RuntimeError, match="between 0 and 1"):
                call(wrong, target, weight)


def test_a_place_in_a_dimension_of_one_is_checked() -> None:
    made = region(lambda x, i: x[:1].expand(1, 5, 3)[i] + 1, TABLE, torch.tensor([0, 1]) * 0)
    wrong = dict(zip(made.program.inputs, [TABLE.numpy().reshape(-1), np.array([0, 1])], strict=True))
    with pytest.raises(IndexError):
        interpret(made.program, wrong)


def test_a_place_is_checked_once_per_row() -> None:
    program = region(lambda x, i: F.embedding(i, x[:, :, 0].contiguous()) * 2, TABLE, IDS)
    text = generate(program.program, program.builder, DeviceFacts.cpu(cores=2)).source.text
    lines = [line.strip() for line in text.splitlines()]
    check = next(number for number, line in enumerate(lines) if "fp::place(" in line)
    assert text.count("fp::place(") == 1
    assert any(line.startswith("for") for line in lines[check + 1 :])


TRUTHS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "compared": lambda y, i, m: (y > 0.25).long(),
    "compared, wrapped and counted from the end": lambda y, i, m: (y > 0.25).long() % 4 - 2,
    "chosen": lambda y, i, m: torch.where(y > 0.25, 3, 2),
    "chosen twice": lambda y, i, m: torch.where(y > 0.25, torch.where(y > 1, 3, 2), torch.where(y < -1, 3, 2)),
    "negated": lambda y, i, m: 1 - (y > 0.25).int(),
    "added": lambda y, i, m: (y > 0.25).long() + (y > 1),
    "multiplied": lambda y, i, m: (y > 0.25) * 3,
    "a sign": lambda y, i, m: y.relu().sign().long(),
    "a sign of integers": lambda y, i, m: i.relu().sign(),
    "stored": lambda y, i, m: m.long(),
    "stored, and another": lambda y, i, m: (m & (y < 1)).long(),
    "a bit": lambda y, i, m: i & 1,
    "a remainder": lambda y, i, m: i % 2,
    "a quotient": lambda y, i, m: (i & 3) // 2,
    "clamped": lambda y, i, m: i.clamp(0, 1),
    "of integers": lambda y, i, m: (i > 2).long(),
}


@pytest.mark.models
@pytest.mark.parametrize("name", TRUTHS)
@pytest.mark.thinned(5)
def test_a_truth_value_as_a_place(name: str) -> None:
    """GCC 12 gathers by the mask that a comparison of vectors gives, in which true is -1, where a place is one as a number."""
    model = Functional(lambda x, *others: x[TRUTHS[name](*others)])
    x, y = torch.randn(4), torch.randn(37, generator=torch.Generator().manual_seed(3))
    with override(debug=True, algebra="off", tune="off"), torch.no_grad():
        fused = fusepass.optimize(model)
        inputs = x, y, (y * 9).int(), y > 0
        assert torch.equal(fused(*inputs), model(*inputs))
        assert fused.report().fused_share == 1


FOR_A_GPU = ["embedding", "gather", "summed", "bilinear", "indices apart"]
PADDED = ["computed places, then padded", "looked up, then padded"]


@pytest.mark.parametrize("name", FOR_A_GPU + PADDED)
def test_the_kernel_for_a_gpu(name: str) -> None:
    made = region(CASES[name], TABLE.float(), IDS)
    generated = generate(made.program, made.builder, DeviceFacts.h200())
    memory = made.memory(generated.program)
    results = emulate(generated.program, generated.source, memory)
    wanted = interpret(generated.program, memory)
    for output in generated.program.outputs:
        np.testing.assert_allclose(results[output], wanted[output], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("function", "shape", "width"),
    [
        (lambda x, i: F.interpolate(x.permute(0, 3, 1, 2), scale_factor=2, mode="bilinear"), (2, 5, 6, 16), 4),
        (lambda x, i: F.embedding(i, x).relu(), (20, 8), 4),
        (lambda x, i: F.embedding(i, x).relu(), (20, 6), 2),
        (lambda x, i: F.layer_norm(F.embedding(i, x), (16,)), (20, 16), 4),
        (lambda x, i: F.pad(F.embedding(i, x), (0, 0, 1, 1)).exp(), (20, 8), 0),  # not everywhere
        (lambda x, i: x[:, i].relu(), (20, 8), 0),
        (lambda x, i: F.interpolate(x[None], scale_factor=2, mode="linear"), (20, 8), 0),
    ],
)
def test_neighbours_are_looked_up_at_once(
    function: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...], width: int
) -> None:
    """Where a place is the same for all elements of a vector, which lie beside each other there."""
    torch.manual_seed(0)
    made = region(function, torch.randn(shape), IDS)
    generated = generate(made.program, made.builder, DeviceFacts.h200())
    found = re.findall(r"load_vector<(\d)>\(arg0_1 \+", generated.source.text)
    assert {int(each) for each in found} == ({width} if width else set())
    memory = made.memory(generated.program)
    results, wanted = emulate(generated.program, generated.source, memory), interpret(generated.program, memory)
    for output in generated.program.outputs:
        np.testing.assert_allclose(results[output], wanted[output], rtol=1e-5, atol=1e-5)


def test_an_index_is_recorded_in_one_run() -> None:
    """Without a decomposition or another tracer, whose imports take seconds."""
    with torch.no_grad(), mock.patch("torch._functorch.aot_autograd.aot_export_module", side_effect=AssertionError):
        made = capture(Functional(lambda x, i: x.tanh()[i, None, i % 3] * 2), (TABLE, IDS), {})
    assert isinstance(made, Captured)


def test_a_mask_is_no_index() -> None:
    """How many elements a mask takes is not known, so the choice by it is not captured; one by numbers is."""
    with torch.no_grad():
        chosen = fusepass.explain(Functional(lambda x, i: x.tanh()[i] * 2), TABLE, IDS[0])
        with pytest.warns(fusepass.FusepassWarning, match="nonzero"):
            masked = fusepass.explain(Functional(lambda x, i: x.tanh()[i > 2] * 2), TABLE[:3], IDS[0])
    assert chosen.fused_share == 1
    assert masked.fused_share < 1
