"""The zoo on a CUDA device, in both modes, and layers whose CUDA implementation is the library's alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fusepass
from fusepass.errors import FusepassWarning
from fusepass.numerics.check import check
from fusepass.structure import flatten
from tests.models.zoo import ZOO
from tests.support.precision import exact_products

pytestmark = [pytest.mark.gpu, pytest.mark.models]


def _on_device(value: object) -> object:
    match value:
        case Tensor():
            return value.cuda()
        case list() | tuple():
            return type(value)(map(_on_device, value))
        case dict():
            return {key: _on_device(each) for key, each in value.items()}
    return value


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", ZOO)
def test_values_and_buffers(name: str, training: bool) -> None:
    entry = ZOO[name]
    model, inputs = entry.make().train(training).cuda(), tuple(map(_on_device, entry.inputs()))
    with exact_products(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FusepassWarning)
        fused = fusepass.optimize(model, tune="off")
        for call in ("first", "second"):
            outcome = check(model, fused, inputs)
            assert outcome.ok, f"{call} call: {outcome.explain()}\n{fused.report()}"
    failed = [region.reason for region in fused.report().regions if region.reason is not None]
    assert not failed


LIBRARY: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "lstm": (lambda: nn.LSTM(8, 16, 2, batch_first=True), (3, 5, 8)),
    "gru": (lambda: nn.GRU(8, 16, bidirectional=True), (5, 3, 8)),
    "rnn": (lambda: nn.RNN(8, 16, nonlinearity="relu"), (5, 3, 8)),
    "encoder": (lambda: nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True), (2, 5, 16)),
}


@pytest.mark.parametrize("name", LIBRARY)
def test_library_layers(name: str) -> None:
    """Results are the library's, also after a parameter got other values or other memory."""
    make, shape = LIBRARY[name]
    model = nn.Sequential(nn.LayerNorm(shape[-1]), make()).cuda().eval()
    x = torch.randn(shape, device="cuda")
    with torch.no_grad(), exact_products(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FusepassWarning)
        fused = fusepass.optimize(model)
        for change in (lambda p: None, lambda p: p.mul_(1.5), lambda p: setattr(p, "data", p.data * 0.5)):
            for parameter in model[1].parameters():
                change(parameter)
            mine, theirs = flatten(fused(x))[0], flatten(model(x))[0]
            for got, wanted in zip(mine, theirs, strict=True):
                torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
