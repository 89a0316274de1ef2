"""Modules for which PyTorch has kernels in inference give what these give: the same strides, and NaN where all keys are masked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusepass
from fusepass.capture import fast_paths
from fusepass.capture.trace import Captured, capture
from fusepass.numerics.check import check
from tests.support.interpreted import original_operators

WIDTH, LENGTH, BATCH = 12, 3, 2
PADDING = torch.tensor([[False, False, True], [True, True, True]])
HIDDEN = torch.tensor([[True, True, True], [True, False, False], [False, False, True]])
OF_HEADS = torch.stack([HIDDEN, HIDDEN.T, ~HIDDEN, HIDDEN & HIDDEN.T])
AHEAD = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "padding": {"key_padding_mask": PADDING},
    "hidden": {"attn_mask": HIDDEN},
    "of heads": {"attn_mask": OF_HEADS},
    "both": {"key_padding_mask": PADDING, "attn_mask": HIDDEN},
    "ahead": {"attn_mask": AHEAD, "is_causal": True},
    "numbers": {"attn_mask": torch.where(HIDDEN, -1.0, 0.5)},
}


class Given(nn.Module):
    """Calls with `given`, of which tensors are buffers."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__()
        self.options = {name: value for name, value in given.items() if not isinstance(value, Tensor)}
        self.masks = [name for name in given if name not in self.options]
        for name in self.masks:
            self.register_buffer(name, given[name])

    @property
    def given(self) -> dict[str, Any]:
        return self.options | {name: getattr(self, name) for name in self.masks}


class Attends(Given):
    """Attention of a tensor to itself; without the weights where nobody asked for them."""

    def __init__(self, options: dict[str, Any], given: dict[str, Any]) -> None:
        super().__init__(given)
        self.attention = nn.MultiheadAttention(WIDTH, **options)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        result, weights = self.attention(x, x, x, **self.given)
        return (result,) if weights is None else (result, weights)


def tokens(turned: bool = False) -> Tensor:
    return torch.randn(LENGTH, BATCH, WIDTH).transpose(0, 1) if turned else torch.randn(BATCH, LENGTH, WIDTH)


def holds(model: nn.Module, x: Tensor) -> None:
    """The optimised model, captured whole, gives eager's values and strides."""
    model = model.eval()
    with original_operators(), torch.no_grad():
        fused = fusepass.optimize(model)
        outcome = check(model, fused, (x,))
    assert outcome.ok, outcome.explain()
    assert not fused.report().fallbacks


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("asked", [{"need_weights": False}, {}, {"average_attn_weights": False}], ids=str)
def test_attention(asked: dict[str, Any], mask: str) -> None:
    holds(Attends({"num_heads": 2, "batch_first": True}, asked | MASKS[mask]), tokens())


@pytest.mark.parametrize(
    "options",
    [
        {"num_heads": 2},
        {"num_heads": 3, "batch_first": True},
        {"num_heads": 2, "batch_first": True, "bias": False},
        {"num_heads": 2, "batch_first": True, "add_bias_kv": True},
    ],
    ids=str,
)
def test_attention_without_a_kernel(options: dict[str, Any]) -> None:
    holds(Attends(options, {}), tokens())


def test_attention_in_training_and_of_what_lies_in_another_order() -> None:
    options = {"num_heads": 2, "batch_first": True}
    holds(Attends(options, {"need_weights": False}), tokens(turned=True))
    model = Attends(options, {}).train()
    with original_operators(), torch.no_grad():
        assert check(model, fusepass.optimize(model), (tokens(),)).ok


def test_nothing_is_copied() -> None:
    model = Attends({"num_heads": 2, "batch_first": True}, {"need_weights": False}).eval()
    with torch.no_grad():
        captured = capture(model, (tokens(),), {})
    assert isinstance(captured, Captured)
    assert not captured.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)


@pytest.mark.parametrize(
    "given",
    [{"attn_mask": HIDDEN[:1]}, {"attn_mask": OF_HEADS[:1]}, {"key_padding_mask": PADDING[:, :2]}],
    ids=["hidden", "of heads", "padding"],
)
def test_masks_of_other_shapes_are_refused(given: dict[str, Any]) -> None:
    model = Attends({"num_heads": 2, "batch_first": True}, given).eval()
    with torch.no_grad(), pytest.raises((AssertionError, RuntimeError)) as wanted:
        model(tokens())
    with torch.no_grad(), pytest.raises(type(wanted.value)):
        fusepass.optimize(model)(tokens())


def test_a_hint_without_a_mask_hides_nothing() -> None:
    holds(Attends({"num_heads": 2, "batch_first": True}, {"is_causal": True, "need_weights": False}), tokens())


class Layer(Given):
    def __init__(self, given: dict[str, Any], **options: Any) -> None:
        super().__init__(given)
        self.layer = nn.TransformerEncoderLayer(WIDTH, dim_feedforward=8, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x, **self.given)
        return result


@pytest.mark.parametrize("turned", [False, True], ids=["in order", "turned"])
@pytest.mark.parametrize("heads", [2, 3])
@pytest.mark.parametrize("norm_first", [False, True])
def test_a_layer(norm_first: bool, heads: int, turned: bool) -> None:
    holds(Layer({}, nhead=heads, norm_first=norm_first), tokens(turned))


@pytest.mark.parametrize(
    "given",
    [
        {"src_key_padding_mask": PADDING},
        {"src_mask": HIDDEN, "src_key_padding_mask": PADDING},
        {"src_mask": AHEAD, "is_causal": True},
    ],
    ids=["padding", "both", "ahead"],
)
def test_a_layer_with_masks(given: dict[str, Any]) -> None:
    holds(Layer(given, nhead=2), tokens())


class Writes(nn.Module):
    """Writes its input, so that AOTAutograd traces it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Layer({"src_key_padding_mask": PADDING}, nhead=2, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        result: Tensor = self.inner(x.transpose(0, 1).contiguous().transpose(0, 1))
        return result


def test_as_well_by_aot_autograd() -> None:
    holds(Writes(), tokens())


@pytest.mark.parametrize("code", fast_paths._NOTES, ids=lambda code: code.co_qualname)
def test_the_modules_say_why(code: Any) -> None:
    """This PyTorch has the variables and the reason that are looked for."""
    assert fast_paths._NOTES[code] in code.co_varnames
    assert not fast_paths._TRACING.isdisjoint(code.co_consts)
