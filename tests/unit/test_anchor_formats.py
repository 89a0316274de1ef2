"""The memory format of convolutions: which is chosen, what lowering makes of it, and that callers see nothing of it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusepass
import fusepass.codegen.search.rounding
import fusepass.codegen.search.space
import fusepass.compile.pipeline
from fusepass import measure, override
from fusepass.api.module import OptimizedModule
from fusepass.autotune.work import Work
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import conversions, generate, pass_options
from fusepass.codegen.ir.convolution import Convolution
from fusepass.codegen.ir.dtype import Precision
from fusepass.codegen.ir.program import CONVERSION_TARGET
from fusepass.codegen.ir.verify import verify
from fusepass.codegen.lowering.formats import AnchorFormat, channels_last_strides, is_channels_last
from fusepass.codegen.lowering.lower import lower
from fusepass.codegen.lowering.tracer import Spec
from fusepass.codegen.passes.anchors import AnchorSource
from fusepass.codegen.passes.pipeline import run_passes
from fusepass.codegen.render import render
from fusepass.codegen.schedule import schedule
from fusepass.codegen.search.candidate import CandidateSpec
from fusepass.codegen.search.rounding import differs_from_float32
from fusepass.codegen.search.space import anchor_formats, is_precise, library_rounds, search_space
from fusepass.errors import FusepassWarning
from fusepass.report.choice import GENERATED
from fusepass.runtime.fallbacks import FallbackCounter
from fusepass.runtime.region import FusedRegion
from tests.support.emulate import emulate
from tests.support.interpret import interpret
from tests.support.precision import cudnn
from tests.support.regions import TILES, TINY, memory_of, region, tensor_of, trace

H200 = DeviceFacts.h200()
LAST = AnchorFormat.CHANNELS_LAST


class Then(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Both(nn.Module):
    """A model that also gives the convolution's own result."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(5, 6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.conv(x)
        return y, y.relu() + 1


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).sigmoid() * x


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "relu": (lambda: nn.Sequential(nn.Conv2d(5, 6, 3), nn.ReLU()), (2, 5, 7, 9)),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose2d(5, 6, 3, 2, 1), nn.Tanh()), (2, 5, 6, 5)),
    "groups": (lambda: nn.Sequential(nn.Conv2d(6, 8, 3, groups=2), nn.Tanh()), (2, 6, 6, 5)),
    "one by one": (lambda: nn.Sequential(nn.Conv2d(6, 8, 1), nn.Tanh()), (2, 6, 6, 5)),
    "3d": (lambda: nn.Sequential(nn.Conv3d(3, 4, 2), nn.GELU()), (2, 3, 4, 5, 6)),
    "group norm": (lambda: nn.Sequential(nn.Conv2d(5, 8, 3), nn.GroupNorm(2, 8), nn.GELU()), (2, 5, 7, 8)),
    "instance norm": (lambda: nn.Sequential(nn.Conv2d(5, 8, 3), nn.InstanceNorm2d(8)), (2, 5, 7, 8)),
    "batch norm": (lambda: nn.Sequential(nn.Conv2d(5, 8, 3), nn.BatchNorm2d(8)), (2, 5, 7, 8)),
    "layer norm": (lambda: nn.Sequential(nn.ConvTranspose2d(5, 8, 2, 2), nn.LayerNorm(12)), (2, 5, 7, 6)),
    "softmax": (lambda: nn.Sequential(nn.Conv2d(5, 130, 3), nn.Softmax(1)), (2, 5, 5, 6)),
    "smallest channel": (
        lambda: nn.Sequential(nn.Conv2d(5, 8, 3), Then(lambda x: x.amin(1, keepdim=True))),
        (2, 5, 5, 6),
    ),
    "max pool": (lambda: nn.Sequential(nn.Conv2d(5, 8, 3), nn.Hardswish(), nn.MaxPool2d(2)), (2, 5, 8, 8)),
    "global pool": (lambda: nn.Sequential(nn.Conv2d(5, 8, 3), nn.GELU(), nn.AdaptiveAvgPool2d(1)), (2, 5, 8, 8)),
    "pool and norm": (lambda: nn.Sequential(nn.Conv2d(5, 8, 3), nn.MaxPool2d(2), nn.GroupNorm(2, 8)), (2, 5, 8, 8)),
    "concatenation": (
        lambda: nn.Sequential(nn.Conv2d(5, 8, 3), Then(lambda x: torch.cat([x, x + 1], 1))),
        (2, 5, 6, 7),
    ),
    "both results": (Both, (2, 5, 6, 7)),
    "residual": (Residual, (2, 6, 6, 7)),
}
every_model = pytest.mark.parametrize("name", MODELS)


@every_model
def test_lowered(name: str) -> None:
    """The library reads and writes channels last; outputs have eager's strides, which `check` compares."""
    make, shape = MODELS[name]
    made = region(make().double(), torch.randn(shape, dtype=torch.float64), anchor_format=LAST)
    calls = {call.target: call for call in made.program.calls}
    assert set(calls) == {CONVERSION_TARGET, "aten.convolution.default"}
    for call in calls.values():
        result = made.program.buffer(call.result)
        assert result.strides == channels_last_strides(result.shape)
    assert calls["aten.convolution.default"].args[0] == calls[CONVERSION_TARGET].args[0].__class__(
        calls[CONVERSION_TARGET].result
    )
    made.check()
    made.check(made.passed(TILES))
    made.check(made.passed(replace(TINY, separate_from=1)))


@every_model
@pytest.mark.thinned(5)
def test_kernels(name: str) -> None:
    """CUDA kernels on the host, on what the library would have left channels last."""
    make, shape = MODELS[name]
    made = region(make(), torch.randn(shape), anchor_format=LAST)
    facts = replace(H200, multiprocessors=1, l2_bytes=4096)
    program = made.passed(replace(pass_options(facts), separate_from=1))
    memory = made.memory(program)
    got = emulate(program, render(program, facts), memory)
    wanted = interpret(program, memory)
    for output in program.outputs:
        buffer = program.buffer(output)
        torch.testing.assert_close(
            tensor_of(got[output], buffer), tensor_of(wanted[output], buffer), rtol=1e-5, atol=2e-5
        )


@pytest.mark.parametrize("name", ["layer norm", "softmax"])
def test_short_rows_read_what_the_library_left_once(name: str) -> None:
    """Normalised along the width or the channels and written contiguously: one kernel, which exchanges tiles."""
    make, _ = MODELS[name]
    made = region(make(), torch.randn((2, 5, 150, 6) if name == "layer norm" else (2, 5, 64, 64)), anchor_format=LAST)
    facts = replace(H200, multiprocessors=1)
    program = made.passed(replace(pass_options(facts), separate_from=1))
    (kernel,) = program.kernels
    assert schedule(kernel, program, facts).exchanges


@pytest.mark.parametrize("shape", [(2, 5, 7, 9), (1, 64, 16, 16), (2, 3, 4, 5, 6), (3, 8, 1, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.thinned(5)
def test_conversions(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The generated kernel does what the library's call would do."""
    x = torch.randn(shape).to(dtype)
    conv = (nn.Conv2d if len(shape) == 4 else nn.Conv3d)(shape[1], 4, 1).to(dtype)
    made = region(nn.Sequential(conv, nn.ReLU()), x, anchor_format=LAST)
    ((call, program, builder),) = conversions(made.program)
    verify(program)
    generated = generate(program, builder, H200)
    (name,) = program.inputs
    (result,) = emulate(generated.program, generated.source, {name: memory_of(x)}).values()
    copy = tensor_of(result, program.buffer(call.result))
    assert is_channels_last(copy.shape, copy.stride())
    assert torch.equal(copy, x)


@every_model
@pytest.mark.thinned(5)
@pytest.mark.invariant(30)
def test_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose convolution is made to run channels last: values and strides are eager's."""
    monkeypatch.setattr(fusepass.codegen.search.space, "anchor_formats", lambda graph, facts: (LAST,))
    make, shape = MODELS[name]
    model = make().eval()
    x = torch.randn(shape)
    fused = fusepass.optimize(model, algebra="off")  # which would take the chain into the weights
    with torch.no_grad():
        for _ in range(2):
            got, wanted = fused(x), model(x)
            for mine, eager in zip(*((y if isinstance(y, tuple) else (y,)) for y in (got, wanted)), strict=True):
                assert mine.stride() == eager.stride()
                torch.testing.assert_close(mine, eager, rtol=1e-5, atol=1e-5)
            for parameter in model.parameters():
                parameter.data.mul_(1.5)  # which no version counter sees
    assert not fused.report().fallbacks
    (found,) = fused.report().regions
    assert any(kernel.name.endswith("channels_last_0") for kernel in found.kernels)
    assert found.anchor == "library: aten.convolution, channels last"
    assert len(found.sources) == 2


def breaking(monkeypatch: pytest.MonkeyPatch, word: str) -> list[str]:
    """Let no region with this word in its name be loaded; the names of all that are asked for, as they are."""
    real, asked = fusepass.compile.pipeline.load_candidates, list[str]()

    def load(work: Work, counter: FallbackCounter) -> dict[str, FusedRegion]:
        asked.append(work.region.name)
        if word not in work.region.name:
            return real(work, counter)
        work.reason = "broken"
        return {}

    monkeypatch.setattr(fusepass.compile.pipeline, "load_candidates", load)
    return asked


def checked(model: nn.Module, x: Tensor) -> OptimizedModule:
    """`model` optimised, whose results at `x` are eager's, with eager's strides."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FusepassWarning)
        fused = fusepass.optimize(model)
        for mine, eager in zip(fused(x), model(x), strict=True):
            assert mine.stride() == eager.stride()
            torch.testing.assert_close(mine, eager, rtol=1e-5, atol=1e-5)
    return fused


class Chain(nn.Module):
    """Two convolutions whose chains make a region each; `between` is what else reads the value between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.between = nn.Conv2d(4, 6, 3), nn.Conv2d(6, 5, 3), between

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x).relu() + 1
        return self.second(y).tanh() * 2, self.between(y)


@pytest.mark.parametrize(
    ("between", "handed"),
    [
        (lambda y: torch.zeros(1), True),
        (lambda y: (y + 1).sigmoid(), True),
        (lambda y: y, False),  # the caller sees it
        (lambda y: y.view(2, -1).relu() + 1, False),  # a view of it is taken
        (torch.special.bessel_j0, False),  # an operator that runs as it is reads it
    ],
)
@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.thinned(3)
@pytest.mark.invariant(30)
def test_one_region_writes_as_the_next_one_reads(
    between: Callable[[Tensor], Tensor], handed: bool, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No conversion is left; where a region cannot be made, operators run on the layouts that they know."""
    monkeypatch.setattr(fusepass.codegen.search.space, "anchor_formats", lambda graph, facts: (LAST,))
    if broken:
        breaking(monkeypatch, "tanh")
    x = torch.randn(2, 4, 9, 8)
    fused = checked(Chain(between).eval(), x)
    with torch.no_grad():
        public = fused.graph_module(x)
    if not broken:
        conversions = [kernel.name for found in fused.report().regions for kernel in found.kernels]
        assert sum("channels_last" in name for name in conversions) == (1 if handed else 2)
    assert "fusepass" in str(public.graph)


class Chains(nn.Module):
    """Two chains of their own, each of two regions, of which the second reads what the first one writes."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Chain(lambda y: y.sum()), Chain(lambda y: y.sum())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x)[0], self.right(x)[0].sigmoid()


def test_only_regions_beside_operators_are_made_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """They write as those operators read; what lies between other regions stays as it is."""
    monkeypatch.setattr(fusepass.codegen.search.space, "anchor_formats", lambda graph, facts: (LAST,))
    asked = breaking(monkeypatch, "sigmoid")
    regions = checked(Chains().eval(), torch.randn(2, 4, 9, 8)).report().regions
    (broken,) = (found.name for found in regions if "sigmoid" in found.name)
    assert sorted(Counter(asked).values()) == [1, 1, 2, 2]
    assert Counter(asked)[broken] == 2
    conversions = [kernel.name for found in regions if found.name != broken for kernel in found.kernels]
    assert sum("channels_last" in name for name in conversions) == 2  # each chain's input


def test_inputs_without_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusepass.codegen.search.space, "anchor_formats", lambda graph, facts: (LAST,))
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU())
    x = torch.randn(2 * 4 * 6 * 6 + 1)[1:].view(2, 4, 6, 6)
    with torch.no_grad():
        torch.testing.assert_close(fusepass.optimize(model)(x), model(x))


CHOICES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...], tuple[int, ...], torch.dtype, bool]] = {
    "2d": (F.conv2d, (2, 32, 9, 9), (16, 32, 3, 3), torch.float32, True),
    "eight channels": (F.conv2d, (2, 8, 9, 9), (16, 8, 3, 3), torch.float32, False),
    "half": (F.conv2d, (2, 8, 9, 9), (16, 8, 3, 3), torch.float16, True),
    "transposed": (F.conv_transpose2d, (2, 32, 9, 9), (32, 16, 3, 3), torch.float32, True),
    "transposed, generated": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2),
        (2, 16, 9, 9),
        (16, 16, 3, 3),
        torch.float32,
        False,
    ),
    "three channels": (F.conv2d, (2, 3, 9, 9), (16, 3, 3, 3), torch.float32, False),
    "six results": (F.conv2d, (2, 32, 9, 9), (6, 32, 3, 3), torch.float32, False),
    "four halves": (F.conv2d, (2, 4, 9, 9), (8, 4, 3, 3), torch.float16, False),
    "groups": (lambda x, w: F.conv2d(x, w, groups=2), (2, 8, 9, 9), (16, 4, 3, 3), torch.float32, False),
    "one pixel": (F.conv2d, (2, 8, 3, 3), (16, 8, 3, 3), torch.float32, False),
    "3d": (F.conv3d, (2, 8, 9, 9, 9), (16, 8, 3, 3, 3), torch.float32, False),
    "double": (F.conv2d, (2, 8, 9, 9), (16, 8, 3, 3), torch.float64, False),
    "1d": (F.conv1d, (2, 8, 9), (16, 8, 3), torch.float32, False),
}


@pytest.mark.parametrize("name", CHOICES)
def test_choice(name: str) -> None:
    function, x, weight, dtype, last = CHOICES[name]
    graph, _ = trace(lambda a, b: function(a, b).relu(), torch.randn(x).to(dtype), torch.randn(weight).to(dtype))
    formats = anchor_formats(graph, H200)
    assert (formats[0] is LAST) is last
    no_choice = name in ("one pixel", "double", "1d")
    assert set(formats) == ({AnchorFormat.CALLER} if no_choice else {AnchorFormat.CALLER, LAST})
    assert anchor_formats(graph, DeviceFacts.cpu(2))[0] is AnchorFormat.CALLER


@pytest.mark.parametrize(
    ("effort", "channels", "names"),
    [
        ("off", 16, ["channels last"]),
        ("fast", 16, ["channels last", "library anchor, channels last", "generated anchor, channels last", GENERATED]),
        ("fast", 3, [GENERATED, "library anchor", "generated anchor"]),
        (
            "max",
            3,
            [
                *(GENERATED, "library anchor", "generated anchor"),
                *("channels last", "library anchor, channels last", "generated anchor, channels last"),
            ],
        ),
    ],
)
def test_what_is_offered(effort: str, channels: int, names: list[str]) -> None:
    """The chosen one first; less effort tries less."""
    graph, _ = trace(nn.Sequential(nn.Conv2d(channels, 24, 3), nn.ReLU()), torch.randn(2, channels, 6, 6))
    assert [spec.name for spec in search_space(graph, H200, effort)] == names


def test_what_is_offered_on_a_cpu_and_without_an_anchor() -> None:
    graph, _ = trace(nn.Sequential(nn.Conv2d(16, 8, 3), nn.ReLU()), torch.randn(2, 16, 6, 6))
    assert [spec.name for spec in search_space(graph, DeviceFacts.cpu(2), "fast")] == [GENERATED]
    assert [spec.name for spec in search_space(graph, DeviceFacts.cpu(2), "max")] == [GENERATED, "channels last"]
    graph, _ = trace(lambda a: a.relu() + 1, torch.randn(2, 8))
    assert [spec.name for spec in search_space(graph, H200, "max")] == [GENERATED]


def test_a_variant_of_another_precision_is_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the library computes in float32 as it stands, channels last would round to TF32."""
    graph, _ = trace(nn.Sequential(nn.Conv2d(16, 8, 3), nn.ReLU()), torch.randn(2, 16, 6, 6))
    for rounds in (False, True):
        monkeypatch.setattr(fusepass.codegen.search.space, "rounds_to_tf32", lambda node, rounds=rounds: rounds)
        assert is_precise(CandidateSpec(LAST, AnchorSource.LIBRARY), graph, H200) is rounds
        assert is_precise(CandidateSpec(AnchorFormat.CALLER, AnchorSource.LIBRARY), graph, H200)
    with cudnn(allow_tf32=False):
        monkeypatch.setattr(fusepass.codegen.search.space, "rounds_to_tf32", lambda node: False)
        assert is_precise(CandidateSpec(LAST, AnchorSource.LIBRARY), graph, H200)


@pytest.mark.parametrize(
    ("then", "last"),
    [
        (lambda y, z: y.relu() + z, True),
        (lambda y, z: (y + z).softmax(1), False),
        (lambda y, z: F.max_pool2d(y + z, 2), False),
        (lambda y, z: torch.logsumexp(y + z, 1), False),
        (lambda y, z: (y + z[:1, :, :1, :1]).softmax(1), False),  # part of it, but nothing says so before lowering
        (lambda y, z: y.softmax(1), True),
    ],
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_what_reductions_read_besides(
    then: Callable[[Tensor, Tensor], Tensor], last: bool, layout: torch.memory_format
) -> None:
    x, w, z = torch.randn(2, 32, 9, 9), torch.randn(16, 32, 3, 3), torch.randn(2, 16, 7, 7).to(memory_format=layout)
    graph, _ = trace(lambda x, w, z: then(F.conv2d(x, w), z), x, w, z)
    assert (anchor_formats(graph, H200)[0] is LAST) is (last or layout is torch.channels_last)


def test_no_choice_where_the_caller_has_channels_last() -> None:
    x = torch.randn(2, 8, 9, 9).to(memory_format=torch.channels_last)
    graph, _ = trace(lambda a, b: F.conv2d(a, b).relu(), x, torch.randn(16, 8, 3, 3))
    assert anchor_formats(graph, H200) == (AnchorFormat.CALLER,)


def test_float32_without_tensor_cores_stays() -> None:
    graph, _ = trace(lambda a, b: F.conv2d(a, b).relu(), torch.randn(2, 32, 9, 9), torch.randn(16, 32, 3, 3))
    with cudnn(allow_tf32=False):
        assert anchor_formats(graph, H200)[0] is AnchorFormat.CALLER


def test_without_convolution() -> None:
    graph, _ = trace(lambda a: a.relu() + 1, torch.randn(2, 8))
    assert anchor_formats(graph, H200) == (AnchorFormat.CALLER,)


@pytest.mark.parametrize("transposed", [False, True])
def test_the_precision_of_a_kernel_is_tried(transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU computes in float32; what is rounded to 10 bits of mantissa on the way is found out."""
    operands = [torch.empty(2, 16, 9, 9), torch.empty(16, 16, 3, 3)]
    geometry = ([1, 1], [0, 0], [1, 1], transposed, [0, 0], 1)
    assert not differs_from_float32(operands, geometry, torch.device("cpu"))
    real = torch.ops.aten.convolution.default

    def rounded(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        return real(*((each.view(torch.int32) & ~0x1FFF).view(torch.float32) for each in (x, weight)), *rest)

    monkeypatch.setattr(torch.ops.aten.convolution, "default", rounded)
    assert differs_from_float32(operands, geometry, torch.device("cpu"))


def test_generated_code_rounds_where_the_library_does() -> None:
    few = trace(lambda a, b: F.conv2d(a, b).relu(), torch.randn(2, 3, 9, 9), torch.randn(16, 3, 3, 3))[0]
    many = trace(lambda a, b: F.conv2d(a, b).relu(), torch.randn(2, 32, 9, 9), torch.randn(16, 32, 3, 3))[0]
    assert library_rounds(many, H200)
    assert library_rounds(few, H200)
    assert not library_rounds(many, DeviceFacts.cpu())
    with cudnn(allow_tf32=False):
        assert not library_rounds(many, H200)
    for tf32 in (False, True):
        program, builder = lower(many, "region", ["a", "b"], tf32=tf32)
        assert [call.tf32 for call in program.calls] == [tf32]
        kernel = run_passes(program, builder, pass_options(H200, AnchorSource.GENERATED)).kernels[-1]
        assert isinstance(kernel.anchor, Convolution)
        assert kernel.anchor.precision is (Precision.TF32 if tf32 else Precision.FLOAT32)


def test_what_a_device_rounds_is_tried_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A later process finds on disk what the first one tried."""
    graph = trace(lambda a, b: F.conv2d(a, b).relu(), torch.randn(2, 32, 9, 9), torch.randn(16, 32, 3, 3))[0]
    for node in graph.graph.nodes:
        if isinstance(value := node.meta.get("val"), Tensor):
            node.meta["val"] = Spec.of(value, torch.device("cuda"))
    tried: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a device")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91000)
    monkeypatch.setattr(measure, "free_bytes", lambda device: 1 << 40)
    monkeypatch.setattr(fusepass.codegen.search.rounding, "differs_from_float32", lambda *_: tried.append(True) or True)
    with override(cache_dir=tmp_path):
        for _ in range(2):
            monkeypatch.setattr(fusepass.codegen.search.rounding, "_known", {})
            assert library_rounds(graph, H200)
            assert (
                len(search_space(graph, H200, "max")) > 2
            )  # capture describes tensors; nothing can be computed of these
        assert len(tried) == 1
        with cudnn(deterministic=True):  # for which the library may have another kernel
            assert library_rounds(graph, H200)
    assert len(tried) == 2


@pytest.mark.parametrize("make", [nn.Conv2d, nn.ConvTranspose2d])
@pytest.mark.parametrize("multiprocessors", [1, 132])
def test_depthwise_ones_channel_by_channel(make: type[nn.Conv2d | nn.ConvTranspose2d], multiprocessors: int) -> None:
    """A copy that lies so is what windows go over; the library computes nothing."""
    model = nn.Sequential(make(6, 6, 3, padding=1, groups=6), nn.Sigmoid()).double()
    x = torch.randn(2, 6, 9, 12, dtype=torch.float64).to(memory_format=torch.channels_last)
    made = region(model, x, anchor_format=AnchorFormat.CHANNELS_FIRST)
    made.check()
    facts = replace(H200, multiprocessors=multiprocessors)
    generated = generate(made.program, made.builder, facts, AnchorSource.GENERATED)
    assert [call.target for call in generated.program.calls] == [CONVERSION_TARGET]
    got = emulate(generated.program, generated.source, made.memory(generated.program))
    (output,) = generated.program.outputs
    with torch.no_grad():
        wanted = model(x)
    torch.testing.assert_close(tensor_of(got[output], generated.program.buffer(output)), wanted, rtol=1e-9, atol=1e-9)


def test_depthwise_ones_of_what_lies_channels_last_are_offered_that() -> None:
    first = CandidateSpec(AnchorFormat.CHANNELS_FIRST, AnchorSource.GENERATED)
    for groups, layout, offered in (
        (8, torch.channels_last, True),
        (8, torch.contiguous_format, False),
        (1, torch.channels_last, False),
    ):
        conv = nn.Conv2d(8, 8, 3, groups=groups)
        graph, _ = trace(nn.Sequential(conv, nn.ReLU()), torch.randn(2, 8, 6, 6).to(memory_format=layout))
        assert (first in search_space(graph, H200, "fast")) is offered


@pytest.mark.parametrize(
    ("make", "laid"),
    [
        (lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8), True),
        (lambda: nn.Conv2d(8, 8, 5, stride=2, padding=(2, 1), dilation=(1, 2), groups=8), True),
        (lambda: nn.ConvTranspose2d(8, 8, 3, padding=1, groups=8), True),
        (lambda: nn.ConvTranspose2d(8, 8, 3, 2, 1, groups=8), False),  # a tap of each phase is not there
        (lambda: nn.Conv2d(4, 8, 3, groups=4), True),  # two results of each channel
        (lambda: nn.AvgPool2d(3, 1, 1), False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_by_tap(make: Callable[[], nn.Module], laid: bool, dtype: torch.dtype) -> None:
    """So that neighbouring threads, which have neighbouring channels, load vectors of them."""
    model = nn.Sequential(make(), nn.Sigmoid()).to(dtype)
    channels = 4 if "Conv2d(4" in repr(model) else 8
    x = torch.randn(5, channels, 41, 43, dtype=dtype).to(memory_format=torch.channels_last)
    made = region(model, x)
    options = replace(pass_options(H200, AnchorSource.GENERATED), taps_from=1)
    program = made.passed(options)
    assert not program.calls
    assert any("weights by tap" in kernel.origin for kernel in program.kernels) is laid
    got = emulate(program, render(program, H200), made.memory(program))
    (output,) = program.outputs
    with torch.no_grad():
        wanted = model.double()(x.double())
    bound = 1e-9 if dtype is torch.float64 else 2e-2
    found = tensor_of(got[output], program.buffer(output)).double()
    torch.testing.assert_close(found, wanted, rtol=bound, atol=bound)
