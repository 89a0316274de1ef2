"""Recurrent layers of the library stay one operator each, and give what they give in eager."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils import _pytree as pytree

import fusepass
from fusepass.capture.recurrent import RECURRENT
from fusepass.capture.trace import Captured, capture
from fusepass.errors import FusepassWarning
from fusepass.numerics.check import check
from fusepass.report.report import CaptureRoute

LAYERS: dict[str, Callable[[], nn.RNNBase]] = {
    "gru": lambda: nn.GRU(3, 4),
    "gru_two_layers": lambda: nn.GRU(3, 4, 2, batch_first=True),
    "lstm": lambda: nn.LSTM(3, 4, 2, bias=False),
    "lstm_projected": lambda: nn.LSTM(3, 4, proj_size=2),
    "rnn_tanh": lambda: nn.RNN(3, 4, bidirectional=True),
    "rnn_relu": lambda: nn.RNN(3, 4, nonlinearity="relu", dropout=0.5, num_layers=2),
}


class Around(nn.Module):
    """A recurrent layer with pointwise operators on both sides, its state given or not."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, ...]:
        y, after = self.layer(F.gelu(x) * 2.0, state)
        return (F.silu(y) + 1.0, *pytree.tree_leaves(after))


def recurrent(model: nn.Module, *args: Tensor) -> int:
    """Operators in the graph that are recurrent layers."""
    with torch.no_grad():
        found = capture(model, args, {})
    assert isinstance(found, Captured)
    return sum(node.target in RECURRENT.values() for node in found.graph.graph.nodes)


@pytest.mark.parametrize("name", LAYERS)
def test_one_operator_whatever_the_length(name: str) -> None:
    model = Around(LAYERS[name]()).eval()
    assert [recurrent(model, torch.randn(steps, 5, 3)) for steps in (1, 2, 40)] == [1, 1, 1]
    assert recurrent(model, torch.randn(7, 3)) == 1  # without a batch


@pytest.mark.parametrize("name", LAYERS)
def test_values_follow_parameters(name: str) -> None:
    model = Around(LAYERS[name]()).eval()
    fused = fusepass.optimize(model)
    x = torch.randn(6, 5, 3)
    for change in (lambda p: None, lambda p: p.mul_(1.5), lambda p: setattr(p, "data", p.data * 0.5)):
        with torch.no_grad():
            for parameter in model.parameters():
                change(parameter)
        outcome = check(model, fused, (x,))
        assert outcome.ok, outcome.explain()
    report = fused.report()
    assert report.capture is CaptureRoute.TRACED
    assert report.ops_fused
    assert "a recurrent layer, which the library does in one call" in {refusal.reason for refusal in report.refusals}


def test_a_given_state_is_read_and_not_written() -> None:
    model = Around(nn.GRU(3, 4, 2))
    outcome = check(model, fusepass.optimize(model), (torch.randn(6, 5, 3), torch.randn(2, 5, 4)))
    assert outcome.ok, outcome.explain()


def test_random_numbers_between_layers_are_eager_s() -> None:
    model = Around(nn.GRU(3, 4, 2, dropout=0.5)).train()
    x = torch.randn(6, 5, 3)
    assert recurrent(model, x) == 1
    outcome = check(model, fusepass.optimize(model), (x,))
    assert outcome.ok, outcome.explain()


def test_autocast_casts_inside() -> None:
    model, x = Around(nn.GRU(3, 4)), torch.randn(6, 5, 3)
    fused = fusepass.optimize(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert recurrent(model, x) == 0
        with torch.no_grad():
            mine, theirs = fused(x), model(x)
    for got, wanted in zip(mine, theirs, strict=True):
        assert got.dtype is wanted.dtype
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)


def test_random_numbers_that_are_cast_inside_are_eager_s() -> None:
    """What traces the cast operators would draw for other elements, so nothing is traced."""
    model, x = Around(nn.GRU(3, 4, 2, dropout=0.5)).train(), torch.randn(6, 5, 3)
    fused = fusepass.optimize(model)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FusepassWarning)
        torch.manual_seed(1)
        mine = fused(x)
        torch.manual_seed(1)
        theirs = model(x)
    for got, wanted in zip(mine, theirs, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)


def test_packed_sequences_run_as_in_eager() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(3, 4)

        def forward(self, x: PackedSequence) -> Tensor:
            result: Tensor = self.layer(x)[0].data
            return result * 2.0

    model = Packed()
    x = pack_padded_sequence(torch.randn(6, 3, 3), torch.tensor([6, 4, 1]))
    with torch.no_grad():
        torch.testing.assert_close(fusepass.optimize(model)(x), model(x))
