"""Dropout's mask as an operator: one kernel with the bits of the chain of PyTorch's operators, and one library for nearly all masks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

import fusepass
from fusepass.autotune.work import Work
from fusepass.codegen import build
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.lowering.dropout import kept as by_operators
from fusepass.codegen.lowering.tracer import Spec
from fusepass.codegen.source import Source
from fusepass.compile import pipeline
from fusepass.compile.dropout import Rule
from fusepass.errors import BuildError, FusepassWarning
from fusepass.report.choice import EAGER, Choice
from fusepass.runtime import mask_kernel, masks
from fusepass.runtime.fallbacks import FallbackCounter
from tests import compile_cuda
from tests.support.emulate import emulate, needs_compiler

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
H200 = DeviceFacts.h200()
WIDTHS = {F16: 8, BF16: 8, F32: 4, F64: 2}
SMALL, LARGE = Rule(2048, WIDTHS), Rule(132 * 2048, WIDTHS)  # devices: how many threads PyTorch's kernel has at most
STATE = torch.tensor([12345, 2**33 + 16])
COUNTS = (2, 4, 6, 8, 12, 30, 48, 100, 2048, 4098, 4100, 4104, 8192, 10000, 16400)


def _rule(count: int, p: float, dtype: torch.dtype, rule: Rule = SMALL) -> tuple[float, torch.dtype, int, int]:
    return p, dtype, rule.threads(count), rule.width(dtype, count)


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    masks._launch.cache_clear()
    yield
    masks._launch.cache_clear()


class Operators(TorchDispatchMode):
    """Counts operators of PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


# ---- bits


@needs_compiler
@pytest.mark.parametrize("seed_and_offset", [(0, 0), (5, 12), (2**63 + 11, 2**34), (2**64 - 1, 2**40 + 8)], ids=str)
@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
@pytest.mark.invariant(33)
def test_a_kernel_has_the_bits_of_the_operators(dtype: torch.dtype, seed_and_offset: tuple[int, int]) -> None:
    state = torch.tensor([number - 2**64 if number >= 2**63 else number for number in seed_and_offset])
    for count in COUNTS:
        for p in (0.1, 0.5, 1.0):
            args = (state, (count,), (1,), *_rule(count, p, dtype))
            assert torch.equal(masks.kept(*args), by_operators(*args))


@needs_compiler
@pytest.mark.parametrize(
    ("size", "stride"), [((3, 5, 4), (20, 1, 5)), ((2, 8, 3, 3), (72, 1, 24, 8)), ((6,), (1,))], ids=str
)
def test_a_mask_lies_as_it_is_asked_to(size: tuple[int, ...], stride: tuple[int, ...]) -> None:
    args = (STATE, size, stride, *_rule(prod(size), 0.5, F32))
    mask = masks.kept(*args)
    assert (mask.shape, mask.stride(), mask.dtype) == (size, stride, torch.bool)
    assert torch.equal(mask, by_operators(*args))


@needs_compiler
def test_a_state_may_lie_anywhere() -> None:
    states = torch.tensor([[1, 5, 7], [2, 40, 9], [3, 80, 11]])
    rule = _rule(100, 0.5, F32)
    for state in (states[1, 1:], states[:2, 1]):
        assert torch.equal(masks.kept(state, [100], [1], *rule), by_operators(state, [100], [1], *rule))
    with pytest.raises(
        ValueError, match=r"dropout_mask: argument 0 is torch.int64\[3\]; .* specialised for torch.int64\[2\]"
    ):
        masks.kept(states[0], [100], [1], *rule)


@needs_compiler
@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
def test_cuda_has_the_bits_of_the_operators(dtype: torch.dtype) -> None:
    for count in COUNTS:
        made = mask_kernel.generated(H200, count, *_rule(count, 0.3, dtype))
        compile_cuda.keep(made.source)
        (found,) = emulate(made.program, made.source, {"state": STATE.numpy()}).values()
        assert torch.equal(torch.from_numpy(found), by_operators(STATE, (count,), (1,), *_rule(count, 0.3, dtype)))


@needs_compiler
@pytest.mark.parametrize("dtype", [BF16, F32, F64], ids=str)
def test_wide_indices_give_the_same_bits(dtype: torch.dtype) -> None:
    """The library for more than 2^31 elements, called for few."""
    count, many = 1 << 15, 1 << 32
    made, wide = (mask_kernel.generated(H200, each, *_rule(each, 0.3, dtype)) for each in (count, many))
    compile_cuda.keep(wide.source)
    assert "const int64_t i = first * 16;" in wide.source.text
    assert "const int i = first * 16;" in made.source.text
    few = replace(wide.source, numbers=made.source.numbers)
    (found,) = emulate(made.program, few, {"state": STATE.numpy()}).values()
    assert torch.equal(torch.from_numpy(found), by_operators(STATE, (count,), (1,), *_rule(count, 0.3, dtype)))


# ---- one launch, few libraries


@needs_compiler
def test_a_mask_is_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    args = (STATE, (64, 48), (48, 1), *_rule(64 * 48, 0.1, F32))
    masks.kept(*args)
    monkeypatch.setattr(build, "build_each", lambda sources: pytest.fail("built again"))
    with Operators() as chain:
        by_operators(*args)
    with Operators() as operators:
        masks.kept(*args)
    assert (chain.count > 150, operators.count) == (True, 0)


def test_nothing_is_built_for_a_mask_without_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "build_each", lambda sources: pytest.fail("built"))
    mask = masks.kept(STATE, [4, 0, 3], [1, 1, 1], 0.5, F32, 0, 1)
    assert (mask.shape, mask.dtype) == ((4, 0, 3), torch.bool)


def _sources(counts: list[int], dtype: torch.dtype) -> list[Source]:
    mask_kernel._form.cache_clear()
    rules = [_rule(count, p, dtype, rule) for rule in (SMALL, LARGE) for p in (0.1, 0.5) for count in counts]
    return [mask_kernel.generated(H200, count, *rule).source for count, rule in zip(counts * 4, rules, strict=True)]


@pytest.mark.parametrize("dtype", [F16, F32, F64], ids=str)
def test_a_library_serves_all_sizes_of_its_kind(dtype: torch.dtype) -> None:
    """Whichever of them comes first: where each of PyTorch's threads has a vector, several, and where indices have 64 bits."""
    counts = [16, 64, 4096, 1 << 14, 12 << 20, (1 << 28) + 16, 1 << 32, 3 << 33]
    texts = {source.text for source in _sources(counts, dtype)}
    assert len(texts) == 3
    for first in (4096, 3 << 33):
        assert _sources([first], dtype)[0].text in texts


@pytest.mark.parametrize("count", [1000, 8200, (1 << 20) + 8, (1 << 31) + 8])
def test_vectors_of_fewer_elements_have_libraries_for_all_sizes_too(count: int) -> None:
    """None of the numbers that its sizes decide is in the text."""
    made = mask_kernel.generated(H200, count, *_rule(count, 0.3, F32, LARGE))
    code = "\n".join(line for line in made.source.text.splitlines() if not line.startswith("//"))
    assert made.source.numbers is not None
    assert {count, count // 8, 0.7} <= {*made.source.numbers}
    assert str(count // 8) not in code


# ---- where there is no compiler


def _no_compiler(sources: list[Source]) -> Iterator[tuple[int, BuildError]]:
    return enumerate([BuildError("no compiler was found")] * len(sources))


def test_without_a_compiler_the_operators_run_and_count(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = FallbackCounter()
    monkeypatch.setattr(masks, "fallbacks", counts)
    monkeypatch.setattr(build, "build_each", _no_compiler)
    args = (STATE, (100,), (1,), *_rule(100, 0.5, F32))
    of_model = FallbackCounter()
    of_model.join(counts)
    of_model.join(counts)
    with pytest.warns(
        FusepassWarning, match="fusepass::kept runs as the original operators: it has no kernel: no compiler was found"
    ) as said:
        found = [masks.kept(*args) for _ in range(3)]
    assert len(said) == 1
    assert all(torch.equal(each, by_operators(*args)) for each in found)
    assert [(record.where, record.count) for record in of_model.records()] == [("fusepass::kept", 3)]


def test_a_bug_is_raised_when_debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "build_each", _no_compiler)
    with fusepass.override(debug=True), pytest.raises(BuildError, match="no compiler was found"):
        masks.kept(STATE, [100], [1], *_rule(100, 0.5, F32))


def test_graphs_with_masks_report_those_that_have_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = FallbackCounter()
    monkeypatch.setattr(masks, "fallbacks", counts)
    with_mask, without = FallbackCounter(), FallbackCounter()
    pipeline.compile_graph(_graph(torch.device("cpu")), name="masked", fallbacks=with_mask)
    pipeline.compile_graph(_graph(torch.device("cpu"), masked=False), name="plain", fallbacks=without)
    with pytest.warns(FusepassWarning, match="for a reason"):
        counts.count("fusepass::kept", "for a reason")
    assert (with_mask.total, without.total) == (1, 0)


# ---- what is built beside regions


def _graph(device: torch.device, *, masked: bool = True) -> fx.GraphModule:
    """A chain with a mask in it."""
    graph = fx.Graph()
    state, x = graph.placeholder("state"), graph.placeholder("x")
    state.meta["val"] = Spec.described((2,), (1,), torch.int64, device)
    x.meta["val"] = Spec.described((64, 48), (48, 1), F32, device)
    factor = graph.call_function(torch.ops.aten.gt.Scalar, (x, 0))
    if masked:
        factor = graph.call_function(masks.KEPT, (state, [64, 48], [48, 1], *_rule(64 * 48, 0.5, F32)))
    result = graph.call_function(torch.ops.aten.tanh.default, (x,))
    product = graph.call_function(torch.ops.aten.mul.Tensor, (result, factor))
    for node, dtype in ((factor, torch.bool), (result, F32), (product, F32)):
        node.meta["val"] = Spec.described((64, 48), (48, 1), dtype, device)
    graph.output((product,))
    return fx.GraphModule({}, graph)


@pytest.mark.parametrize(
    ("tune", "choice", "reason", "begun"),
    [
        ("off", None, None, False),
        ("off", None, "beyond the IR", True),
        ("fast", None, None, True),  # for the trial
        ("fast", Choice("generated"), None, False),
        ("fast", Choice(EAGER), None, True),
    ],
)
def test_what_masks_need_is_built_beside_regions(
    tune: str, choice: Choice | None, reason: str | None, begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def generate(works: Sequence[Work], *_: object, **__: object) -> None:
        for work in works:
            work.choice, work.reason = choice, reason

    monkeypatch.setattr(pipeline, "generate_all", generate)
    monkeypatch.setattr(pipeline, "spend", lambda *_: 0.0)
    monkeypatch.setattr(masks, "device_facts", lambda device: H200)
    graph, told = _graph(torch.device("cuda", 0)), list[Source]()
    regions = pipeline.partition(graph).regions
    assert len(regions) == 1
    with fusepass.override(tune=tune):
        pipeline.generated(graph, regions, pipeline.Forms(), begin=told.append)
    expected = mask_kernel.generated(H200, 64 * 48, *_rule(64 * 48, 0.5, F32)).source
    assert told == ([expected] if begun else [])


def test_whoever_reads_graphs_has_the_kernel() -> None:
    program = """
import sys, torch
import fusepass.artifact.graph
print(torch._C._dispatch_has_kernel_for_dispatch_key("fusepass::kept", "CUDA"), "fusepass.codegen.passes.pipeline" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]
