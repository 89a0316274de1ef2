"""PyTorch on this machine is right where tests compare with it; elsewhere they say nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_convolutions_in_steps(dtype: torch.dtype, stride: int) -> None:
    """One wide: what oneDNN gets wrong for bfloat16 with tiles (AMX); `tests` does without them."""
    x, weight = torch.randn(5, 3, 31, 2).to(dtype), torch.randn(8, 3, 3, 3).to(dtype)
    exact = F.conv2d(x.double(), weight.double(), stride=stride, padding=1)
    wrong = F.conv2d(x, weight, stride=stride, padding=1) - exact
    assert wrong.abs().max() < 4 * torch.finfo(dtype).eps * exact.abs().max()
