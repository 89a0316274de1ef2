"""Sums of tensors that lie differently: which become contiguous, that values and what callers see stay, and that descriptions are true."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fusepass
from fusepass import measure
from fusepass.capture.trace import Captured, capture
from fusepass.patterns.channels_last import Followed
from fusepass.patterns.one_layout import ONE_LAYOUT, contiguous_sums
from tests.support.regions import Functional

aten = torch.ops.aten
IMAGE = torch.randn(2, 64, 8, 8)
ROWS = torch.randn(2, 64, 64)


def rows_of(image: Tensor) -> Tensor:
    return image.flatten(2).transpose(1, 2)


class Blocks(nn.Module):
    """Rows of an image through residual blocks of norms, products, attention over channels and a convolution of the image that they are again."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.mixed = nn.Conv2d(3, 64, 2, 2), nn.Conv2d(64, 64, 3, padding=1, groups=64)
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(4))
        self.products = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.head = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = rows_of(self.patches(x))
        x = x + self.products[0](self.norms[0](x))
        y = self.norms[1](x)
        x = x + (y.transpose(1, 2) @ y).softmax(-1).mean(1, keepdim=True) * self.products[1](y)
        image = self.norms[2](x).transpose(1, 2).reshape(-1, 64, 8, 8)
        x = x + rows_of(F.gelu(self.mixed(image)))
        x = torch.cat([x.mean(1, keepdim=True), x + self.products[2](x).sigmoid()], 1)
        return self.head(self.norms[3](x)[:, 0])


def graph_of(model: nn.Module, *inputs: Tensor) -> fx.GraphModule:
    with torch.no_grad():
        made = capture(model.eval(), inputs, {})
    assert isinstance(made, Captured)
    return made.graph


def function(of: Callable[..., object]) -> nn.Module:
    return Functional(of)


@torch.no_grad()
def test_residual_sums_of_rows_are_contiguous() -> None:
    graph = graph_of(Blocks(), torch.randn(2, 3, 16, 16))
    made, first = contiguous_sums(graph)
    assert first is not None
    before, after = (each.graph.find_nodes(op="call_function", target=aten.add.Tensor) for each in (graph, made))
    apart = [node for node in before if not node.meta["val"].is_contiguous()]
    assert len(apart) == 4
    assert all(node.meta["val"].is_contiguous() for node in after)
    inputs = measure.made_up(
        [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")], torch.device("cpu")
    )
    ours, theirs = Followed(made).run(*inputs), fx.Interpreter(graph).run(*inputs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)
        assert one.stride() == other.stride()


def test_the_model_and_its_report() -> None:
    model, x = Blocks().eval(), torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        fused = fusepass.optimize(model, tune="off")
        torch.testing.assert_close(fused(x), model(x))
        assert ONE_LAYOUT in {rewrite.rule for rewrite in fused.report().rewrites}
        other = fusepass.optimize(model, tune="off", disable=ONE_LAYOUT)
        torch.testing.assert_close(other(x), model(x))
        assert ONE_LAYOUT not in {rewrite.rule for rewrite in other.report().rewrites}


LEFT: dict[str, tuple[Callable[..., object], tuple[Tensor, ...]]] = {
    "returned": (lambda image, rows: rows_of(image) + rows, (IMAGE, ROWS)),
    "returned as a view": (lambda image, rows: (rows_of(image) + rows)[:, 1:], (IMAGE, ROWS)),
    "contiguous first": (lambda image, rows: (rows + rows_of(image)).softmax(-1).mean(1), (IMAGE, ROWS)),
    "channels last": (
        lambda image, other: F.max_pool2d(image + other, 2).flatten(1).sum(1),
        (IMAGE.contiguous(memory_format=torch.channels_last), IMAGE),
    ),
    "alike": (lambda image, other: (rows_of(image) + rows_of(other)).softmax(-1).mean(1), (IMAGE, IMAGE + 1)),
    "gaps": (lambda image, rows: (rows_of(image)[:, ::2] + rows[:, ::2]).mean(1), (IMAGE, ROWS)),
    "few": (lambda image, rows: (rows_of(image) + rows).mean(1), (IMAGE[:1, :8], ROWS[:1, :, :8].contiguous())),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_stays(name: str) -> None:
    of, inputs = LEFT[name]
    graph = graph_of(function(of), *inputs)
    assert contiguous_sums(graph) == (graph, None)


@pytest.mark.parametrize(
    "behind",
    [
        lambda x: x.view(2, 8, 8, 64).mean((1, 2)),
        lambda x: x.transpose(1, 2).reshape(2, 64, 8, 8).amax((2, 3)),
        lambda x: F.conv2d(x.transpose(1, 2).reshape(2, 64, 8, 8), torch.ones(1, 64, 3, 3)),
        lambda x: torch.cat([x, x * 2], -1).cumsum(1)[:, -1].contiguous(),
        lambda x: torch.sort(x, 1)[0].sum(1),
        lambda x: F.layer_norm(x, [64]).split(32, -1)[1].mean(1),
        lambda x: x.unfold(1, 4, 2).sum((1, 3)),
    ],
)
@torch.no_grad()
def test_whatever_follows(behind: Callable[[Tensor], Tensor]) -> None:
    model = function(lambda image, rows: behind(rows_of(image) * 1.5 + rows))
    graph = graph_of(model, IMAGE, ROWS)
    made, _ = contiguous_sums(graph)
    inputs = [IMAGE, ROWS]
    ours, theirs = Followed(made).run(*inputs), fx.Interpreter(graph).run(*inputs)
    torch.testing.assert_close(ours, theirs)
    assert [each.stride() for each in ours] == [each.stride() for each in theirs]
    fused = fusepass.optimize(model, tune="off")
    torch.testing.assert_close(fused(IMAGE, ROWS), model(IMAGE, ROWS))


def test_gradients() -> None:
    model, x = Blocks(), torch.randn(2, 3, 16, 16)
    fused = fusepass.optimize(model, tune="off")
    model(x).square().sum().backward()
    wanted = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    fused(x).square().sum().backward()
    for parameter, want in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, want, rtol=1e-4, atol=1e-5)
