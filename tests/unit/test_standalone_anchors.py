"""Convolutions and matrix products with nothing beside them: regions on CUDA, where generated code may do them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fusepass.autotune import candidates
from fusepass.autotune.work import Work
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.forms import Forms
from fusepass.compile.splice import subgraph
from fusepass.config import override
from fusepass.patterns.partition import partition
from tests.support.candidates import generate_candidates

FEW = (lambda x, w: F.conv2d(x, w), (64, 3, 40, 40), (32, 3, 3, 3))
PRODUCT = (lambda x, w: x @ w, (1024, 512), (512, 768))
_PLAIN = (False, [0, 0], 1, False, False, True, False)
_GROUPED = (False, [0, 0], 16, False, False, True, False)
Example = tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...], tuple[int, ...]]


def graph_of(example: Example, device: str, dtype: torch.dtype = torch.float32) -> fx.GraphModule:
    """A captured function of tensors that exist on no device."""
    function, *shapes = example
    with FakeTensorMode():
        inputs = [torch.empty(shape, device=device, dtype=dtype) for shape in shapes]
        return make_fx(function)(*inputs)


def work_of(example: Example, monkeypatch: pytest.MonkeyPatch, tune: str) -> Work:
    monkeypatch.setattr(candidates, "device_facts", lambda device: DeviceFacts.h200())
    monkeypatch.setattr(candidates, "recall", lambda work: None)
    graph = graph_of(example, "cuda")
    (region,) = partition(graph).regions
    work = Work(region, subgraph(graph, region), {})
    with override(tune=tune, debug=True):
        generate_candidates(work, Forms())
    return work


@pytest.mark.parametrize("example", [FEW, PRODUCT], ids=["convolution", "product"])
def test_regions_where_code_may_be_generated(example: Example) -> None:
    assert len(partition(graph_of(example, "cuda")).regions) == 1
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.float16), ("cuda", torch.float64)):
        parts = partition(graph_of(example, device, dtype))
        assert not parts.regions
        assert [refusal.reason for refusal in parts.refusals] == ["nothing beside it to fuse with"]


def product_of_halves(rows: int, terms: int, columns: int) -> Example:
    return lambda x, w: x @ w.t(), (rows, terms), (columns, terms)


@pytest.mark.parametrize(
    ("sizes", "region"),
    [
        ((4096, 1024, 1024), False),
        ((4096, 1025, 1024), True),  # neither operand's rows begin with whole accesses
        ((4096, 1024, 1023), True),  # the result's do not
        ((64, 1025, 1024), False),  # little to multiply
    ],
)
def test_large_products_of_halves_that_lie_badly_are_regions(sizes: tuple[int, int, int], region: bool) -> None:
    assert bool(partition(graph_of(product_of_halves(*sizes), "cuda", torch.bfloat16)).regions) is region


def test_large_convolutions_of_halves_are_regions() -> None:
    function = FEW[0]
    for shape, large in (((64, 64, 56, 56), True), ((1, 64, 56, 56), False)):
        parts = partition(graph_of((function, shape, (64, 64, 3, 3)), "cuda", torch.bfloat16))
        assert len(parts.regions) == large
    assert not partition(graph_of(PRODUCT, "cuda", torch.bfloat16)).regions


def test_small_products_are_left_alone() -> None:
    assert not partition(graph_of((lambda x, w: x @ w, (96, 64), (64, 80)), "cuda")).regions


@pytest.mark.parametrize("tune", ["off", "fast"])
def test_few_channels_are_generated(tune: str, monkeypatch: pytest.MonkeyPatch) -> None:
    work = work_of(FEW, monkeypatch, tune)
    assert work.choice is None
    assert work.candidates[0].generated.generates_anchor


def test_convolutions_that_rewrites_make_are_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are written as `_convolution`, which says that float32 is not to be rounded; generated ones need not be told."""

    def precise(x: Tensor, w: Tensor) -> Tensor:
        return torch.ops.aten._convolution.default(x, w, None, [2, 2], [1, 1], [1, 1], *_PLAIN)  # type: ignore[no-any-return]

    def depthwise(x: Tensor, w: Tensor) -> Tensor:
        return torch.ops.aten._convolution.default(x, w, None, [1, 1], [0, 0], [1, 1], *_GROUPED).relu()  # type: ignore[no-any-return]

    work = work_of((precise, *FEW[1:]), monkeypatch, "off")
    assert work.candidates[0].generated.generates_anchor
    many = work_of((precise, (64, 48, 40, 40), (32, 48, 3, 3)), monkeypatch, "fast")
    assert [each.generated.generates_anchor for each in many.candidates] == [False, True]
    assert "TF32 x 3" in many.candidates[1].generated.source.text
    grouped = work_of((depthwise, (8, 16, 20, 20), (16, 1, 3, 3)), monkeypatch, "fast")
    assert [each.generated.generates_anchor for each in grouped.candidates] == [False, True]


def test_the_library_alone_is_left_to_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    work = work_of(PRODUCT, monkeypatch, "off")
    assert work.choice is not None
    assert work.choice.leaves_eager
    assert work.reason is None
    assert "there is no generated code" in str(work.choice)


def test_what_could_be_generated_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    work = work_of(PRODUCT, monkeypatch, "fast")
    assert work.choice is None
    assert [each.generated.generates_anchor for each in work.candidates] == [False, True]


def test_with_something_beside_it_the_library_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    work = work_of((lambda x, w: (x @ w).relu(), *PRODUCT[1:]), monkeypatch, "off")
    assert work.choice is None
    assert not work.candidates[0].generated.generates_anchor
