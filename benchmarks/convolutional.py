"""Networks of images and volumes, and blocks of them: convolutions, as their papers describe them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.blocks import Concatenate, Residual, SqueezeExcite, Sum, convolution
from benchmarks.layers import Apply, Group, Input, Size, Workload

_HALF, _FLOAT = torch.float16, torch.float32


def _alexnet(s: Size) -> tuple[nn.Module, ...]:
    a, b, c, hidden = s.of(96), s.of(256), s.of(384), s.of(4096)
    return (
        nn.Conv2d(3, a, 11, 4, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
        nn.Conv2d(a, b, 5, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
        nn.Conv2d(b, c, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(c, c, 3, padding=1), nn.ReLU(inplace=True),
        nn.Conv2d(c, b, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
        nn.AdaptiveAvgPool2d(6), nn.Flatten(), nn.Dropout(), nn.Linear(36 * b, hidden), nn.ReLU(inplace=True),
        nn.Dropout(), nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Linear(hidden, 1000),
    )  # fmt: skip


def _vgg16(s: Size) -> tuple[nn.Module, ...]:
    layers: list[nn.Module] = []
    inputs = 3
    for count, width in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
        for _ in range(count):
            layers += [nn.Conv2d(inputs, s.of(width), 3, padding=1), nn.ReLU(inplace=True)]
            inputs = s.of(width)
        layers.append(nn.MaxPool2d(2))
    hidden = s.of(4096)
    return (
        *layers, nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Linear(49 * inputs, hidden), nn.ReLU(inplace=True),
        nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Linear(hidden, 1000),
    )  # fmt: skip


def _with_shortcut(inputs: int, outputs: int, stride: int, *layers: nn.Module) -> nn.Module:
    """A residual block, whose input is convolved where it has another shape than the result."""
    alike = stride == 1 and inputs == outputs
    added = Residual(*layers) if alike else Sum([nn.Sequential(*layers), convolution(inputs, outputs, 1, stride)])
    return nn.Sequential(added, nn.ReLU(inplace=True))


def _basic(inputs: int, outputs: int, stride: int) -> nn.Module:
    first = convolution(inputs, outputs, 3, stride, after=nn.ReLU(inplace=True))
    return _with_shortcut(inputs, outputs, stride, first, convolution(outputs, outputs))


def _bottleneck(inputs: int, narrow: int, outputs: int, stride: int = 1, groups: int = 1) -> nn.Module:
    return _with_shortcut(
        inputs, outputs, stride,
        convolution(inputs, narrow, 1, after=nn.ReLU(inplace=True)),
        convolution(narrow, narrow, 3, stride, groups=groups, after=nn.ReLU(inplace=True)),
        convolution(narrow, outputs, 1),
    )  # fmt: skip


def _classifier(width: int, classes: int = 1000) -> tuple[nn.Module, ...]:
    return nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)


def _resnet18(s: Size) -> tuple[nn.Module, ...]:
    a, b, c, d = (s.of(width) for width in (64, 128, 256, 512))
    return (
        convolution(3, a, 7, 2, after=nn.ReLU(inplace=True)), nn.MaxPool2d(3, 2, 1),
        _basic(a, a, 1), _basic(a, a, 1), _basic(a, b, 2), _basic(b, b, 1),
        _basic(b, c, 2), _basic(c, c, 1), _basic(c, d, 2), _basic(d, d, 1), *_classifier(d),
    )  # fmt: skip


def _inception(s: Size) -> tuple[nn.Module, ...]:
    inputs = s.of(480)
    return (Concatenate([
        nn.Conv2d(inputs, s.of(192), 1),
        nn.Sequential(nn.Conv2d(inputs, s.of(96), 1), nn.Conv2d(s.of(96), s.of(208), 3, padding=1)),
        nn.Sequential(nn.Conv2d(inputs, s.of(32), 1), nn.Conv2d(s.of(32), s.of(64), 5, padding=2)),
        nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(inputs, s.of(64), 1)),
    ]), nn.ReLU())  # fmt: skip


class _DenseLayer(nn.Sequential):
    """Layers whose result is put behind their input's channels."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__(nn.BatchNorm2d(inputs), nn.ReLU(), nn.Conv2d(inputs, growth, 3, padding=1, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, super().forward(x)], 1)


def _separable(inputs: int, outputs: int, stride: int) -> nn.Module:
    each = convolution(inputs, inputs, 3, stride, groups=inputs, after=nn.ReLU())
    return nn.Sequential(each, convolution(inputs, outputs, 1, after=nn.ReLU()))


def _mobilenet(s: Size) -> tuple[nn.Module, ...]:
    widths = [s.of(width) for width in (32, 64, 128, 128, 256, 256, 512, 512, 1024)]
    blocks = map(_separable, widths, widths[1:], (1, 2, 1, 2, 1, 2, 1, 2))
    return (convolution(3, widths[0], 3, 2, after=nn.ReLU()), *blocks, *_classifier(widths[-1]))


def _inverted(
    inputs: int, outputs: int, hidden: int, kernel: int, stride: int, *inside: nn.Module
) -> tuple[nn.Module, ...]:
    """A block of MobileNet: wide inside, where channels are convolved one by one."""
    return (
        convolution(inputs, hidden, 1, after=nn.ReLU6()),
        convolution(hidden, hidden, kernel, stride, groups=hidden, after=nn.ReLU6()),
        *inside, convolution(hidden, outputs, 1),
    )  # fmt: skip


def _shuffle(channels: int, groups: int) -> tuple[nn.Module, ...]:
    narrow = channels // 4
    return (
        Residual(
            convolution(channels, narrow, 1, groups=groups, after=nn.ReLU()), nn.ChannelShuffle(groups),
            convolution(narrow, narrow, 3, groups=narrow), convolution(narrow, channels, 1, groups=groups)),
        nn.ReLU(),
    )  # fmt: skip


def _fire(inputs: int, squeezed: int, expanded: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, squeezed, 1), nn.ReLU(),
        Concatenate([nn.Conv2d(squeezed, expanded, 1), nn.Conv2d(squeezed, expanded, 3, padding=1)]), nn.ReLU(),
    )  # fmt: skip


class _UNet(nn.Module):
    """Two levels down, two up, each beside what it had on the way down."""

    def __init__(self, inputs: int, width: int, classes: int) -> None:
        super().__init__()
        self.down1, self.down2 = self._twice(inputs, width), self._twice(width, 2 * width)
        self.bottom = self._twice(2 * width, 4 * width)
        self.up2, self.merge2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), self._twice(4 * width, 2 * width)
        self.up1, self.merge1 = nn.ConvTranspose2d(2 * width, width, 2, 2), self._twice(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    @staticmethod
    def _twice(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            convolution(inputs, outputs, after=nn.ReLU()), convolution(outputs, outputs, after=nn.ReLU())
        )

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down1(x)
        coarse = self.down2(F.max_pool2d(fine, 2))
        y = self.up2(self.bottom(F.max_pool2d(coarse, 2)))
        y = self.up1(self.merge2(torch.cat([coarse, y], 1)))
        return self.head(self.merge1(torch.cat([fine, y], 1))).softmax(1)


def _upwards(x: Tensor) -> Tensor:
    """The mean of each channel, everywhere."""
    return F.interpolate(F.adaptive_avg_pool2d(x, 1), size=x.shape[2:], mode="bilinear", align_corners=False)


def _dilated(inputs: int, outputs: int, dilation: int) -> nn.Module:
    convolved = nn.Conv2d(inputs, outputs, 3, padding=dilation, dilation=dilation, bias=False)
    return nn.Sequential(convolved, nn.BatchNorm2d(outputs), nn.ReLU())


def _pyramid_pooling(inputs: int, width: int) -> tuple[nn.Module, ...]:
    """What DeepLab sees an image with: convolutions of growing dilation, and the whole image's mean."""
    pooled = nn.Sequential(Apply(_upwards), nn.Conv2d(inputs, width, 1))
    dilated = (_dilated(inputs, width, dilation) for dilation in (2, 4, 6))
    branches = Concatenate([convolution(inputs, width, 1), *dilated, pooled])
    return branches, convolution(5 * width, width, 1, after=nn.ReLU())


class _FeaturePyramid(nn.Module):
    """The features of a coarse map, doubled and added to those of a fine one."""

    def __init__(self, coarse: int, fine: int, width: int) -> None:
        super().__init__()
        self.coarse, self.fine = nn.Conv2d(coarse, width, 1), nn.Conv2d(fine, width, 1)
        self.smooth = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, coarse: Tensor, fine: Tensor) -> Tensor:
        return self.smooth(self.fine(fine) + F.interpolate(self.coarse(coarse), scale_factor=2, mode="nearest"))


def _upsampling(inputs: int, outputs: int, stride: int = 2) -> nn.Module:
    transposed = nn.ConvTranspose2d(inputs, outputs, 4, stride, stride // 2, bias=False)
    return nn.Sequential(transposed, nn.BatchNorm2d(outputs), nn.ReLU())


def _generator(s: Size) -> tuple[nn.Module, ...]:
    a, b, c, d = (s.of(width) for width in (512, 256, 128, 64))
    layers = _upsampling(100, a, 1), _upsampling(a, b), _upsampling(b, c), _upsampling(c, d)
    return *layers, nn.ConvTranspose2d(d, 3, 4, 2, 1), nn.Tanh()


def _discriminator(s: Size) -> tuple[nn.Module, ...]:
    a, b, c = s.of(64), s.of(128), s.of(256)
    return (
        nn.Conv2d(3, a, 4, 2, 1), nn.LeakyReLU(0.2),
        nn.Conv2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b), nn.LeakyReLU(0.2),
        nn.Conv2d(b, c, 4, 2, 1, bias=False), nn.BatchNorm2d(c), nn.LeakyReLU(0.2),
        nn.Conv2d(c, 1, 8), nn.Flatten(), nn.Sigmoid(),
    )  # fmt: skip


def _style(channels: int) -> nn.Module:
    """A residual block of the networks that paint one picture like another."""
    return Residual(
        nn.ReflectionPad2d(1), nn.Conv2d(channels, channels, 3), nn.InstanceNorm2d(channels), nn.ReLU(),
        nn.ReflectionPad2d(1), nn.Conv2d(channels, channels, 3), nn.InstanceNorm2d(channels),
    )  # fmt: skip


def _autoencoder(s: Size) -> tuple[nn.Module, ...]:
    a, b, c = s.of(32), s.of(64), s.of(128)
    return (
        nn.Conv2d(3, a, 4, 2, 1), nn.LeakyReLU(0.2),
        nn.Conv2d(a, b, 4, 2, 1), nn.InstanceNorm2d(b), nn.LeakyReLU(0.2),
        nn.Conv2d(b, c, 4, 2, 1), nn.InstanceNorm2d(c), nn.LeakyReLU(0.2),
        nn.ConvTranspose2d(c, b, 4, 2, 1), nn.InstanceNorm2d(b), nn.ReLU(),
        nn.ConvTranspose2d(b, a, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(a, 3, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip


def _super_resolution(s: Size) -> tuple[nn.Module, ...]:
    width = s.of(64)
    return (
        nn.Conv2d(3, width, 9, padding=4), nn.PReLU(),
        Residual(convolution(width, width, after=nn.PReLU()), convolution(width, width)),
        nn.Conv2d(width, 4 * width, 3, padding=1), nn.PixelShuffle(2), nn.PReLU(), nn.Conv2d(width, 3, 9, padding=4),
    )  # fmt: skip


class _ConditionedBlock(nn.Module):
    """A residual block of a diffusion model, told the step (N) by waves of it."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.step = nn.Sequential(nn.Linear(channels, channels), nn.SiLU(), nn.Linear(channels, 2 * channels))
        first, self.after = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.before = nn.Sequential(nn.GroupNorm(groups, channels), nn.SiLU(), first)
        self.norm = nn.GroupNorm(groups, channels)

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        half = x.shape[1] // 2
        angle = step[:, None] * torch.exp(torch.arange(half, dtype=x.dtype, device=x.device) * (-9.21 / half))
        scale, shift = self.step(torch.cat([angle.cos(), angle.sin()], -1))[..., None, None].chunk(2, 1)
        return x + self.after(F.silu(self.norm(self.before(x)) * (1 + scale) + shift))


class _PoolMixer(nn.Module):
    """A block of PoolFormer: positions are mixed by what a pool adds to them, channels by a small network."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = nn.GroupNorm(1, channels), nn.GroupNorm(1, channels)
        self.mix = nn.Sequential(nn.Conv2d(channels, 4 * channels, 1), nn.GELU(), nn.Conv2d(4 * channels, channels, 1))
        self.scales = nn.Parameter(torch.rand(2, channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        x = x + self.scales[0] * (F.avg_pool2d(y, 3, 1, 1, count_include_pad=False) - y)
        return x + self.scales[1] * self.mix(self.second(x))


# A table, as in workloads.py.
# fmt: off
CONVOLUTIONAL = tuple(Workload(name, layers, *shapes, Group.NETWORKS, *more) for name, layers, shapes, *more in (
    ("lenet", lambda s: (
        nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
        ((4096, 1, 32, 32), (3, 1, 32, 32))),
    ("eval_alexnet", _alexnet, ((256, 3, 224, 224), (2, 3, 64, 64)), _FLOAT, False),
    ("vgg16", _vgg16, ((16, 3, 224, 224), (2, 3, 32, 32))),
    ("resnet18", _resnet18, ((32, 3, 224, 224), (2, 3, 64, 64))),
    ("eval_resnet18", _resnet18, ((32, 3, 224, 224), (2, 3, 32, 32)), _FLOAT, False),
    ("resnet18_two_images", _resnet18, ((2, 3, 224, 224), (2, 3, 72, 56))),
    ("half_eval_resnet18", _resnet18, ((64, 3, 224, 224), (2, 3, 32, 32)), _HALF, False),
    ("resnet50_stage", lambda s: (
        _bottleneck(s.of(256), s.of(128), s.of(512), 2), *(_bottleneck(s.of(512), s.of(128), s.of(512)) for _ in range(2))),
        ((32, 256, 56, 56), (2, 8, 8, 10))),
    ("resnext_block", lambda s: (_bottleneck(256, 128, 256, groups=32),), ((32, 256, 56, 56), (2, 256, 4, 5))),
    ("inception_block", _inception, ((32, 480, 56, 56), (2, 15, 6, 7))),
    ("densenet_block", lambda s: (
        *(_DenseLayer(64 + 32 * i, 32) for i in range(6)), nn.BatchNorm2d(256), nn.ReLU(), nn.Conv2d(256, 128, 1),
        nn.AvgPool2d(2)), ((16, 64, 112, 112), (2, 64, 6, 4))),
    ("mobilenet", _mobilenet, ((32, 3, 224, 224), (2, 3, 64, 48))),
    ("mobilenet_strided_block", lambda s: _inverted(s.of(128), s.of(192), s.of(768), 5, 2), ((32, 128, 56, 56), (2, 4, 9, 7))),
    ("efficientnet_block", lambda s: (Residual(
        *_inverted(48, 48, 288, 3, 1, SqueezeExcite(288, 12, F.hardsigmoid))),), ((32, 48, 56, 56), (2, 48, 5, 4))),
    ("shufflenet_block", lambda s: _shuffle(240, 3), ((32, 240, 56, 56), (2, 240, 5, 4))),
    ("squeezenet_fires", lambda s: (_fire(64, 16, 64), _fire(128, 16, 64), nn.MaxPool2d(3, 2)),
        ((32, 64, 112, 112), (2, 64, 7, 9))),
    ("poolformer_stages", lambda s: (
        nn.Conv2d(3, s.of(64), 7, 4, 2), *(_PoolMixer(s.of(64)) for _ in range(2)),
        nn.Conv2d(s.of(64), s.of(128), 3, 2, 1), *(_PoolMixer(s.of(128)) for _ in range(2))),
        ((64, 3, 224, 224), (2, 3, 32, 40))),
    ("unet", lambda s: (_UNet(8, s.of(64), 4),), ((8, 8, 128, 256), (2, 8, 12, 8))),
    ("deeplab_pyramid_pooling", lambda s: _pyramid_pooling(s.of(512), s.of(128)), ((8, 512, 64, 64), (2, 16, 9, 7))),
    ("feature_pyramid", lambda s: (_FeaturePyramid(s.of(512), s.of(256), s.of(256)),), (
        (Input((16, 512, 28, 28)), Input((16, 256, 56, 56))), (Input((2, 16, 3, 4)), Input((2, 8, 6, 8))))),
    ("dcgan_generator", _generator, ((256, 100, 1, 1), (3, 100, 1, 1))),
    ("dcgan_discriminator", _discriminator, ((256, 3, 64, 64), (3, 3, 64, 64))),
    ("style_blocks", lambda s: (_style(s.of(128)), _style(s.of(128))), ((8, 128, 128, 128), (2, 4, 7, 6))),
    ("image_autoencoder", _autoencoder, ((32, 3, 256, 256), (2, 3, 24, 32))),
    ("super_resolution", _super_resolution, ((8, 3, 128, 128), (2, 3, 7, 6))),
    ("diffusion_block_of_a_step", lambda s: (_ConditionedBlock(128, 32),), (
        (Input((16, 128, 64, 64)), Input((16,))), (Input((2, 128, 4, 3)), Input((2,))))),
    ("c3d_stem", lambda s: (
        nn.Conv3d(3, s.of(64), 3, padding=1), nn.ReLU(), nn.MaxPool3d((1, 2, 2)),
        nn.Conv3d(s.of(64), s.of(128), 3, padding=1), nn.ReLU(), nn.MaxPool3d(2)),
        ((4, 3, 16, 112, 112), (2, 3, 4, 8, 12))),
))
# fmt: on
