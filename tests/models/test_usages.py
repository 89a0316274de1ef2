"""What else is done with a module, done with an optimised one."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusepass
from fusepass.report import CaptureRoute

pytestmark = pytest.mark.models


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return F.gelu(self.norm(self.linear(x))) * scale


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 8)


@torch.no_grad()
def test_arguments_can_be_asked_for() -> None:
    assert list(inspect.signature(fusepass.optimize(Scaled())).parameters) == ["x", "scale"]


@torch.no_grad()
def test_torchscript_compiles_the_original(x: Tensor) -> None:
    model = Scaled().eval()
    scripted = torch.jit.script(fusepass.optimize(model))
    torch.testing.assert_close(scripted(x, 2.0), model(x, 2.0))
    assert set(scripted.state_dict()) == set(model.state_dict())


@torch.no_grad()
def test_replicas_of_data_parallel_run_the_original(x: Tensor) -> None:
    model = Scaled().eval()
    optimised = fusepass.optimize(model)
    assert nn.DataParallel(optimised)(x).shape == (3, 16)
    replica = optimised._replicate_for_data_parallel()
    assert type(replica) is Scaled
    assert replica._parameters is not model._parameters
    for name, child in optimised._modules.items():
        setattr(replica, name, child)
    torch.testing.assert_close(replica(x), model(x))


@torch.no_grad()
def test_export_may_leave_a_size_open(x: Tensor) -> None:
    model = Scaled().eval()
    optimised = fusepass.optimize(model, x)
    program = torch.export.export(optimised, (x,), dynamic_shapes={"args": ({0: torch.export.Dim("rows")},)})
    more = torch.randn(7, 8)
    torch.testing.assert_close(program.module()(more), model(more))


@torch.no_grad()
def test_a_padded_batch_that_eager_makes_a_nested_tensor() -> None:
    """Eager writes zeros where the padding is, and does so by the values of the mask; compilers of whole graphs do not."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
    optimised, x = fusepass.optimize(model), torch.randn(2, 6, 16)
    behind = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for padding in (behind, behind.flip(1), behind):
            wanted = model(x, src_key_padding_mask=padding)
            torch.testing.assert_close(optimised(x, src_key_padding_mask=padding), wanted)
    assert optimised.report().capture is CaptureRoute.CHILDREN
    assert "enable_nested_tensor=False" in str(optimised.report()).replace("\n    ", " ")
    assert fusepass.explain(model, x).capture is CaptureRoute.TRACED
