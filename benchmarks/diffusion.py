"""Parts of networks for diffusion: what is between two sizes of a UNet, and a decoder of latent images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_TIME = 1280  # numbers that stand for a time


class _Residual(nn.Module):
    """GroupNorm, SiLU and convolution, twice, and what is told of the time between, if anything is."""

    def __init__(self, inputs: int, outputs: int, time: int = 0) -> None:
        super().__init__()
        self.first_norm, self.first = nn.GroupNorm(32, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.second_norm, self.second = nn.GroupNorm(32, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs) if time else None
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, time: Tensor | None = None) -> Tensor:
        y = self.first(F.silu(self.first_norm(x)))
        if self.time is not None and time is not None:
            y = y + self.time(F.silu(time))[:, :, None, None]
        skipped: Tensor = self.skip(x)
        return skipped + self.second(F.silu(self.second_norm(y)))


class UNetPart(nn.Module):
    """Two residual blocks of 320 channels, half the size, two of 640, over (N, 320, H, W); the times are the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Residual(320, 320, _TIME), _Residual(320, 320, _TIME)])
        self.down = nn.Conv2d(320, 640, 3, stride=2, padding=1)
        self.more = nn.ModuleList([_Residual(640, 640, _TIME), _Residual(640, 640, _TIME)])
        self.register_buffer("times", torch.randn(64, _TIME))

    def forward(self, x: Tensor) -> Tensor:
        time = self.get_buffer("times")[: x.shape[0]]
        for block in self.blocks:
            x = block(x, time)
        x = self.down(x)
        for block in self.more:
            x = block(x, time)
        return x


class _Attention(nn.Module):
    """One head over all positions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.given = nn.GroupNorm(32, channels), nn.Linear(channels, 3 * channels)
        self.out = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.given(self.norm(x).flatten(2).transpose(1, 2)).unsqueeze(1).chunk(3, -1)
        y = self.out(F.scaled_dot_product_attention(q, k, v).squeeze(1))
        return x + y.transpose(1, 2).reshape(x.shape)


class Decoder(nn.Sequential):
    """(N, 4, H, W) to images of (N, 3, 8 H, 8 W)."""

    def __init__(self) -> None:
        layers: list[nn.Module] = [
            nn.Conv2d(4, 512, 3, padding=1),
            _Residual(512, 512),
            _Attention(512),
            _Residual(512, 512),
        ]
        for inputs, outputs in ((512, 512), (512, 256), (256, 128)):
            layers += [nn.Upsample(scale_factor=2), nn.Conv2d(inputs, inputs, 3, padding=1), _Residual(inputs, outputs)]
        super().__init__(*layers, nn.GroupNorm(32, 128), nn.SiLU(), nn.Conv2d(128, 3, 3, padding=1))
