"""Weights that the CPU's library lays out once: what is packed, that it computes the same, and that no stale weight goes unnoticed."""

from __future__ import annotations

import copy
import ctypes
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fusepass
from fusepass.autotune import layout
from fusepass.capture.trace import Captured, capture
from fusepass.patterns import packing
from fusepass.patterns.channels_last import laid_out
from fusepass.patterns.packing import PACKED_WEIGHTS, Call, kept_values, pack, packable, packed_calls
from fusepass.patterns.simplify import simplify
from fusepass.runtime.kept import Fingerprint, Kept

aten = torch.ops.aten


class Net(nn.Module):
    """A residual block, a gate made of the image, a depthwise convolution and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.second, self.again = nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16)
        self.gate, self.depth = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.hidden, self.head = nn.Linear(16, 24), nn.Linear(24, 5, bias=False)
        for norm in (self.norm, self.again):
            nn.init.normal_(norm.weight), nn.init.normal_(norm.bias), nn.init.normal_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = F.relu(self.again(self.second(x)) + x)
        x = F.hardswish(self.depth(x * F.hardsigmoid(self.gate(x.mean((2, 3), keepdim=True)))))
        return self.head(F.relu(self.hidden(x.mean((2, 3)))))  # type: ignore[no-any-return]


def packed(model: nn.Module, *inputs: Tensor) -> fx.GraphModule:
    """The graph of a call, channels last where it has images, and packed."""
    with torch.no_grad():
        made = capture(model, inputs, {})
    assert isinstance(made, Captured)
    simplify(made.graph)
    graph = laid_out(made.graph) or made.graph
    pack(graph, range(len(made.states)))
    return graph


def calls(model: nn.Module, *inputs: Tensor) -> list[Call]:
    return [*packed_calls(packed(model.eval(), *inputs).graph)]


def said(call: Call) -> tuple[str, bool, str]:
    return str(call.anchor.target.overloadpacket), call.other is not None, call.function.name  # type: ignore[union-attr]


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Options of a model whose graph is packed whatever is measured."""

    def seconds(what: str, graph: object, ways: object, depends: Any) -> dict[str, float]:
        return {name: 0.1 if PACKED_WEIGHTS in name else 1.0 for name in depends["forms"]}

    monkeypatch.setattr(layout, "seconds_of", seconds)
    return {"tune": "fast", "disable": "whole-graph", "cache_dir": tmp_path}


def test_what_the_library_computes() -> None:
    found = calls(Net(), torch.randn(2, 3, 6, 5))
    assert [said(call) for call in found] == [
        ("aten.convolution", False, "none"),
        ("aten.convolution", True, "none"),
        ("aten.convolution", False, "none"),
        ("aten.convolution", False, "hardswish"),
        ("aten.addmm", False, "none"),
        ("aten.mm", False, "none"),
    ]
    with fusepass.override(algebra="finite"):  # by the library's relu NaN becomes 0
        finite = calls(Net(), torch.randn(2, 3, 6, 5))
    assert [call.function.name for call in finite] == ["relu", "relu", "hardsigmoid", "hardswish", "relu", "none"]
    assert finite[1].other is finite[0].result
    assert found[3].weight.op == "placeholder"  # the gate is no part of it: it depends on the image
    normalised = aten._native_batch_norm_legit_no_training.default
    assert not found[0].anchor.graph.find_nodes(op="call_function", target=normalised)


def functional(function: Callable[[nn.Conv2d, Tensor], Any], **options: Any) -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(4, 4, 3, padding=1, **options)

        def forward(self, x: Tensor) -> Any:
            return function(self.convolution, x)

    return Model().eval()


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda c, x: F.conv2d(x, x[:, :, :3, :3] @ c.weight[:1, :, :1, :1].expand(2, 4, 3, 1)), []),
        (lambda c, x: (y := c(x), F.relu(y)), [(False, "none")]),
        (lambda c, x: c(x) + x[:, :1], [(False, "none")]),
        (lambda c, x: torch.add(c(x), c.bias.sum() * x, alpha=2), [(False, "none")]),
        (lambda c, x: (y := c(x)) + y, [(False, "none")]),
        (lambda c, x: F.hardswish((y := c(x)) + c(y)), [(False, "none"), (True, "none")]),
        (lambda c, x: F.relu(c(x)) + F.leaky_relu(c(2 * x)), [(False, "none"), (False, "leaky_relu")]),
        (lambda c, x: F.relu(c(x).float().double()), [(False, "none")]),
        (lambda c, x: F.relu6(c(x)), [(False, "none")]),
    ],
    ids=["its-own", "two", "broadcast", "alpha", "twice", "hardswish", "leaky", "wider", "relu6"],
)
def test_what_the_library_does_to_results(function: Any, expected: list[tuple[bool, str]]) -> None:
    assert [said(call)[1:] for call in calls(functional(function), torch.randn(2, 4, 6, 6))] == expected


def test_what_is_never_packed() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Buffer(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            y = x @ self.weight
            self.weight += 1
            return y

    x = torch.randn(2, 4)
    assert not calls(Counting(), x)
    assert not calls(nn.Linear(4, 3).double(), x.double())
    with torch.no_grad():
        made = capture(nn.Sequential(nn.Linear(4, 3), nn.Dropout()), (x,), {})
    assert isinstance(made, Captured)
    assert not packable(made.graph.graph, range(len(made.states)))  # it may not be run again


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_values_stay_whatever_becomes_of_the_parameters(dtype: torch.dtype, chosen: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Net().eval().to(dtype)
    optimised = fusepass.optimize(model, **chosen)
    x = torch.randn(2, 3, 6, 5, dtype=dtype)

    def agree() -> None:
        exact = copy.deepcopy(model).double()(x.double())
        ours, theirs = ((value.double() - exact).norm() / exact.norm() for value in (optimised(x), model(x)))
        assert ours <= 2 * theirs + 8 * torch.finfo(dtype).eps / 2
        assert optimised(x).stride() == model(x).stride()

    agree()
    if dtype is torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        assert any(rewrite.rule == PACKED_WEIGHTS for rewrite in optimised.report().rewrites)
    agree()
    model.first.weight.data.mul_(2)
    agree()
    model.first.weight.data[3, 1, 2, 0] = 9
    agree()
    model.hidden.weight.detach().view(torch.int16 if dtype.itemsize == 2 else dtype).numpy()[5, 7] = 16200
    agree()
    model.again.running_var.add_(1)
    agree()
    model.head.weight.data = model.head.weight.data.flip(0).clone()
    agree()
    model.second = nn.Conv2d(16, 16, 1).to(dtype)
    agree()
    model.load_state_dict(Net().to(dtype).state_dict())
    agree()
    model.train()
    before = model.norm.running_mean.clone()
    optimised(x)
    assert not torch.equal(before, model.norm.running_mean)
    model.eval()
    agree()


@torch.no_grad()
def test_what_was_found_holds_for_other_sizes(monkeypatch: pytest.MonkeyPatch, chosen: dict[str, Any]) -> None:
    asked: list[object] = []
    told = layout.seconds_of
    monkeypatch.setattr(layout, "seconds_of", lambda *given: (asked.append(given), told(*given))[1])
    model = Net().eval()
    optimised = fusepass.optimize(model, **chosen)
    for rows in (8, 9, 10, 11):
        x = torch.randn(2, 3, rows, 5)
        torch.testing.assert_close(optimised(x), model(x))
    assert len(asked) <= 2  # again where the number of bytes has another digit in base 2


@torch.no_grad()
def test_inference_mode_and_frozen_parameters(chosen: dict[str, Any]) -> None:
    model, x = Net().eval(), torch.randn(2, 3, 6, 5)
    optimised = fusepass.optimize(model, **chosen)
    with torch.inference_mode():
        torch.testing.assert_close(optimised(x), model(x))
    torch.testing.assert_close(optimised(x), model(x))
    model.requires_grad_(False)
    with torch.enable_grad():
        torch.testing.assert_close(optimised(x), model(x))
        assert not optimised(x).requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(optimised(x), model(x))


@torch.no_grad()
@pytest.mark.parametrize("function", [*packing._FUNCTIONS, *packing._WITH_NUMBERS], ids=str)
def test_nan_and_infinities_stay_where_they_are(function: Any, chosen: dict[str, Any]) -> None:
    numbers = (-2.0, 3.0) if function is torch.ops.aten.hardtanh.default else ()
    model = functional(
        lambda c, x: function(function(c(x) + x, *numbers).mean((2, 3)) @ c.weight[:, :, 1, 1], *numbers)
    )
    x = torch.randn(6, 4, 6, 6)
    x[0, 1, 2, 3], x[1, 0, 0, 0], x[2, 2, 5, 5] = math.nan, math.inf, -math.inf
    optimised = fusepass.optimize(model, **chosen)
    torch.testing.assert_close(optimised(x), model(x), equal_nan=True)
    assert any(rewrite.rule == PACKED_WEIGHTS for rewrite in optimised.report().rewrites)


def test_parameters_are_kept_until_a_bit_changes() -> None:
    made: list[int] = []

    def double(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        made.append(1)
        return a * 2, b * 2

    a, b = torch.randn(70_000), torch.randn(5)
    kept = Kept(double, [a.nbytes, b.nbytes])
    for change in (lambda: None, lambda: a.data[69_999:].neg_(), lambda: b.numpy().__setitem__(0, 7), lambda: None):
        change()
        for value, parameter in zip(kept.of(a, b), (a, b), strict=True):
            torch.testing.assert_close(value, parameter * 2)
    assert sum(made) == 3
    assert kept.of(a.clone(), b.clone())[0] is kept.of(a, b)[0]


def test_what_layers_of_one_kind_keep_is_kept_as_long_as_they_live() -> None:
    made: list[weakref.ref[Tensor]] = []

    def double(a: Tensor) -> tuple[Tensor, ...]:
        result = a * 2
        made.append(weakref.ref(result))
        return (result,)

    layers = [torch.randn(100) for _ in range(3)]
    kept = Kept(double, [layers[0].nbytes])
    for layer in layers * 2:
        torch.testing.assert_close(kept.of(layer)[0], layer * 2)
    assert len(made) == 3
    layers.pop(1)
    layers[1].neg_()
    kept.of(layers[1])
    assert [each() is not None for each in made] == [True, False, False, True]


def test_fingerprints_tell_contents_apart() -> None:
    size = 2 * 32768 + 200
    memory, short = torch.zeros(size, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8)
    fingerprint = Fingerprint([size, 3, 0])
    empty = torch.empty(0)
    seen = {fingerprint([memory, short, empty])}
    for place in (0, 7, 8, 63, 64, 1023, 1024, 32767, 32768, 65535, 65536, size - 9, size - 1):
        for bit in (1, 128):
            memory[place] = bit
            seen.add(fingerprint([memory, short, empty]))
            memory[place] = 0
    for place in range(3):
        short[place] = 1
        seen.add(fingerprint([memory, short, empty]))
        short[place] = 0
    signs = memory[: size // 4 * 4].view(torch.float32)
    for pair in (
        (0, 1),
        (0, 2),
        (1, 17),
        (3, 35),
        (0, 8192),
        (5, 16384),
    ):  # as far apart as lanes, stripes and chunks are
        for place in pair:
            signs[place] = -0.0
        seen.add(fingerprint([memory, short, empty]))
        signs[list(pair)] = 0.0
    memory[:32768], memory[32768:65536] = 1, 2
    seen.add(fingerprint([memory, short, empty]))
    memory[:32768], memory[32768:65536] = 2, 1
    seen.add(fingerprint([memory, short, empty]))
    assert len(seen) == 1 + 26 + 3 + 6 + 2
    assert len(next(iter(seen))) == 2 * ctypes.sizeof(ctypes.c_uint64)
    memory.zero_()
    assert fingerprint([memory, short, empty]) in seen
    with torch.no_grad():
        torch.set_num_threads(threads := torch.get_num_threads())
        assert fingerprint([memory.clone(), short, empty]) == fingerprint([memory, short, empty]), threads


class Scaled(nn.Module):
    """A table of positions, a scale that a rotated weight is multiplied by, and two results that are made of parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.scale = nn.Parameter(torch.randn(6, 8)), nn.Parameter(torch.randn(8))
        self.product = nn.Linear(8, 8)
        self.register_buffer("places", torch.tensor([3, 1, 0, 5]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = (self.table[self.places] * self.scale).t()
        sums = (self.scale + 1).view(2, 4)
        return self.product(x) + rows.t().sin(), sums[0], x * sums[0].repeat(2)


def test_what_is_made_of_parameters_alone_is_kept(chosen: dict[str, Any]) -> None:
    model, x = Scaled().eval(), torch.randn(4, 8)
    kept = [str(node.target) for node in kept_values(packed(model, x).graph)]
    assert kept == ["aten.sin.default", "aten.repeat.default"]
    optimised = fusepass.optimize(model, **chosen)
    with torch.no_grad():
        for change in (lambda: None, lambda: model.scale.mul_(2), lambda: model.table.data.neg_(), lambda: None):
            change()
            for got, wanted in zip(optimised(x), model(x), strict=True):
                torch.testing.assert_close(got, wanted)
            optimised(x)[1].fill_(7)  # a caller's own
    assert any(rewrite.rule == PACKED_WEIGHTS for rewrite in optimised.report().rewrites)
