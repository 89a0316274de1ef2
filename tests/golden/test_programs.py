"""Programs as text, after lowering and after all passes: what changes in them is to be seen and wanted.

`pytest tests/golden --update-golden` writes the texts anew.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusepass.codegen.ir.program import Program
from fusepass.codegen.ir.text import program_text
from fusepass.codegen.passes.pipeline import PassOptions
from fusepass.codegen.passes.split import SplitPolicy
from tests.support.regions import NO_SPLIT, region

TEXTS = Path(__file__).parent / "programs"
SPLIT = PassOptions(SplitPolicy(workers=16, least_piece=8, lanes=4), longest_cached_row=64)


class SubtractMean(nn.Module):
    """The mean over all but samples and channels, taken away."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(tuple(range(2, x.dim())), keepdim=True)


def _images(*shape: int) -> Tensor:
    return torch.zeros(shape)


REGIONS: dict[str, tuple[Callable[..., Any], Tensor, PassOptions]] = {
    "bias_relu": (nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), _images(2, 3, 6, 6), NO_SPLIT),
    "layer_norm_gelu": (
        nn.Sequential(nn.ConvTranspose3d(2, 4, 4, 2, 1), nn.LayerNorm(8), nn.GELU()), _images(2, 2, 4, 4, 4), NO_SPLIT
    ),
    "layer_norm_few_long_rows": (nn.LayerNorm((8, 6, 6)), _images(2, 8, 6, 6), SPLIT),
    "batch_norm_subtract_mean": (
        nn.Sequential(nn.ConvTranspose3d(2, 4, 3, 2, 1), nn.BatchNorm3d(4), SubtractMean()),
        _images(2, 2, 3, 3, 3),
        NO_SPLIT,
    ),
    "gelu_group_norm_channels_last": (
        nn.Sequential(nn.GELU(), nn.GroupNorm(2, 8)),
        _images(2, 8, 6, 6).to(memory_format=torch.channels_last),
        NO_SPLIT,
    ),
    "batch_norm_average": (nn.Sequential(nn.BatchNorm3d(4), nn.AdaptiveAvgPool3d(1)), _images(2, 4, 3, 5, 5), SPLIT),
    "max_pool_softmax": (nn.Sequential(nn.MaxPool2d(3, 2, 1), nn.Softmax(1)), _images(2, 4, 7, 7), NO_SPLIT),
    "softmax_few_long_rows": (nn.Softmax(1), _images(3, 96), SPLIT),
    "linear_half_swish": (nn.Sequential(nn.Linear(8, 6), nn.SiLU()).half(), _images(4, 8).half(), NO_SPLIT),
    "argmax_and_mask": (
        lambda x: (*x.max(1), F.pad(x, (1, 1)).masked_fill(F.pad(x, (1, 1)) > 0, -1.0)), _images(3, 5), NO_SPLIT
    ),
    "concatenate": (lambda x: torch.cat([x.relu(), x[:, :2].flip(1)], 1), _images(3, 5), NO_SPLIT),
}  # fmt: skip


@pytest.mark.parametrize("name", REGIONS)
def test_program(name: str, update_golden: bool) -> None:
    model, x, options = REGIONS[name]
    made = region(model, x)
    for stage, program in (("lowered", made.program), ("passed", made.passed(options))):
        _compare(TEXTS / f"{name}.{stage}.txt", program, update=update_golden)


def _compare(path: Path, program: Program, *, update: bool) -> None:
    text = program_text(program)
    if update:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert path.read_text() == text, f"{path.name} has changed; if that is wanted: pytest tests/golden --update-golden"


def test_no_text_is_left_over() -> None:
    assert {path.name.split(".")[0] for path in TEXTS.iterdir()} == set(REGIONS)


@pytest.mark.parametrize("name", ["max_pool_softmax", "batch_norm_subtract_mean"])
def test_equal_programs_have_equal_texts(name: str) -> None:
    model, x, options = REGIONS[name]
    assert program_text(region(model, x).passed(options)) == program_text(region(model, x).passed(options))
