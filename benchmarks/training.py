"""Steps of training, forward and backward: eager PyTorch, torch.compile's own backend and fusepass as one, side by side.

python benchmarks/training.py --device cuda --json training.json      # or --only 'gpt|gates', --size reduced
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import measure
from benchmarks.blocks import Attention, CausalAttention, Gated, Residual, convolution, feed_forward
from benchmarks.layers import Apply, Size, Workload
from benchmarks.run import about_machine
from fusepass.numerics.check import in_float64

WAYS: dict[str, str | None] = {"eager": None, "compile": "inductor", "fusepass": "fusepass"}
"""The backend of torch.compile that stands for each way of training; none for eager."""

_HALF, _BFLOAT = torch.float16, torch.bfloat16


class Gate(nn.Module):
    """gelu(norm(x)) * sigmoid(x)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.norm(x)) * torch.sigmoid(x)


def _language(width: int, heads: int) -> tuple[nn.Module, ...]:
    attention = Residual(nn.LayerNorm(width), CausalAttention(width, heads))
    return attention, Residual(nn.LayerNorm(width), *feed_forward(width, 4 * width))


def _image_transformer(width: int, heads: int) -> tuple[nn.Module, ...]:
    """A layer whose attention is written out."""
    return Residual(nn.LayerNorm(width), Attention(width, heads)), Residual(
        nn.LayerNorm(width), *feed_forward(width, 4 * width)
    )


def _bottleneck(wide: int, narrow: int) -> tuple[nn.Module, ...]:
    relu = nn.ReLU()
    inner = (
        convolution(wide, narrow, 1, after=relu),
        convolution(narrow, narrow, after=relu),
        convolution(narrow, wide, 1),
    )
    return Residual(*inner), relu


def _diffusion(channels: int) -> nn.Module:
    def half() -> tuple[nn.Module, ...]:
        return nn.GroupNorm(min(32, channels), channels), nn.SiLU(), nn.Conv2d(channels, channels, 3, padding=1)

    return Residual(*half(), *half())


def _next(channels: int) -> nn.Module:
    """A block of ConvNeXt, https://arxiv.org/abs/2201.03545."""
    return Residual(
        nn.Conv2d(channels, channels, 7, padding=3, groups=channels),
        Apply(lambda x: x.permute(0, 2, 3, 1)),
        nn.LayerNorm(channels),
        *feed_forward(channels, 4 * channels),
        Apply(lambda x: x.permute(0, 3, 1, 2)),
    )


def _cross_entropy(x: Tensor) -> Tensor:
    """Of each row, whose class is that of its largest number."""
    return F.cross_entropy(x.float(), x.detach().argmax(-1), reduction="none")


def _focal(x: Tensor) -> Tensor:
    """Focal loss, https://arxiv.org/abs/1708.02002, of shares that are others' signs."""
    loss = F.binary_cross_entropy_with_logits(x, (x.detach().roll(1, 0) > 0).to(x.dtype), reduction="none")
    return (1 - (-loss).exp()) ** 2 * loss


# fmt: off
MODELS = (
    Workload("gates", lambda s: tuple(Gate(s.of(1024)) for _ in range(4)), (16384, 1024), (6, 32)),
    Workload("bfloat16_gates", lambda s: tuple(Gate(s.of(1024)) for _ in range(2)), (16384, 1024), (6, 32), dtype=_BFLOAT),
    Workload("gpt", lambda s: _language(s.of(768), 12) * 2, (8, 512, 768), (2, 5, 24)),
    Workload("bfloat16_gpt", lambda s: sum((_language(s.of(768), 12) for _ in range(4)), ()), (8, 512, 768), (2, 5, 24), dtype=_BFLOAT),
    Workload("bfloat16_gated_mlp", lambda s: tuple(
        Residual(nn.RMSNorm(s.of(2048)), Gated(s.of(2048), s.of(4096))) for _ in range(3)
    ), (4, 1024, 2048), (2, 3, 64), dtype=_BFLOAT),
    Workload("bottlenecks", lambda s: sum((_bottleneck(s.of(256), s.of(64)) for _ in range(3)), ()), (32, 256, 28, 28), (2, 8, 6, 6)),
    Workload("half_diffusion_blocks", lambda s: tuple(_diffusion(s.of(128)) for _ in range(3)), (8, 128, 64, 64), (2, 4, 6, 6), dtype=_HALF),
    Workload("bfloat16_convnext", lambda s: tuple(_next(s.of(96)) for _ in range(3)), (32, 96, 56, 56), (2, 3, 9, 9), dtype=_BFLOAT),
    Workload("bfloat16_cross_entropy", lambda s: (Apply(_cross_entropy),), (4096, 32000), (4, 50), dtype=_BFLOAT),
    Workload("focal_loss", lambda s: (Apply(_focal),), (4096, 8192), (4, 50)),
    Workload("maxpool", lambda s: (nn.MaxPool2d(2),), (64, 64, 112, 112), (2, 3, 8, 6)),
    Workload("maxpool_overlapping", lambda s: (nn.MaxPool2d(3, 2, 1),), (64, 64, 112, 112), (2, 3, 8, 6)),
    Workload("avgpool", lambda s: (nn.AvgPool2d(2),), (64, 64, 112, 112), (2, 3, 8, 6)),
    Workload("gelu_avgpool", lambda s: (nn.GELU(), nn.AvgPool2d(2)), (64, 64, 112, 112), (2, 3, 8, 6)),
    Workload("stem", lambda s: (convolution(3, s.of(64), 7, 2, after=nn.ReLU()), nn.MaxPool2d(3, 2, 1)), (64, 3, 224, 224), (2, 3, 16, 16)),
    Workload("bfloat16_vit", lambda s: sum((_image_transformer(s.of(768), 12) for _ in range(2)), ()), (32, 197, 768), (2, 5, 24), dtype=_BFLOAT),
)
# fmt: on


@dataclass(frozen=True)
class Step:
    """What one way of training takes for a step.

    Attributes:
        timing: milliseconds, the L2 cache flushed before each.
        kernels_ms: what the device works, by the profiler; None on a CPU.
        peak_mib: memory allocated at most during a step, beyond what was before; None on a CPU.
        off: the distance of all gradients from float64's, relative to the norm of these.
        error: what was raised, if anything was.
    """

    timing: measure.Timing | None = None
    kernels_ms: float | None = None
    peak_mib: float | None = None
    off: float | None = None
    error: str = ""


@dataclass(frozen=True)
class Row:
    """A model with its steps, by way."""

    name: str
    steps: dict[str, Step] = field(default_factory=dict)


def step(call: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> None:
    """Forward, the mean of the squares, backward; gradients are new ones."""
    model.zero_grad(set_to_none=True)
    x.grad = None
    call(x).to(torch.promote_types(x.dtype, torch.float32)).square().mean().backward()


def measure_model(workload: Workload, size: Size, device: torch.device, seconds: float) -> Row:
    """A row of all ways, interleaved for so many seconds."""
    model, (x,) = workload.model(size, device), workload.inputs(size, device)
    x.requires_grad_()
    exact = _exact(model, x)
    calls: dict[str, Callable[[], None]] = {}
    steps: dict[str, Step] = {}
    for way, backend in WAYS.items():
        torch._dynamo.reset()
        try:
            call = model if backend is None else torch.compile(model, backend=backend)
            calls[way] = partial(step, call, model, x)
            for _ in range(measure.WARM_UPS):
                calls[way]()
            steps[way] = Step(
                None, _kernels_ms(calls[way], device), _peak_mib(calls[way], device), _off(model, x, exact)
            )
        except Exception as error:  # others go on
            calls.pop(way, None)
            steps[way] = Step(error=repr(error))
    timings = measure.interleaved(calls, partial(workload.redraw, size, (x.detach(),)), device, seconds)
    return Row(workload.name, {way: replace(found, timing=timings.get(way)) for way, found in steps.items()})


def _gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    found = [x.grad, *(each.grad for each in model.parameters())]
    return [each.detach().double() for each in found if each is not None]


def _exact(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The gradients of float64."""
    wide, (given,) = in_float64(model, (x.detach(),))
    given = given.requires_grad_()
    step(wide, wide, given)
    return _gradients(wide, given)


def _off(model: nn.Module, x: Tensor, exact: Sequence[Tensor]) -> float:
    found = zip(_gradients(model, x), exact, strict=True)
    off = sum(float((got - wanted).square().sum()) for got, wanted in found)
    return (off / sum(float(wanted.square().sum()) for wanted in exact)) ** 0.5


def _kernels_ms(call: Callable[[], object], device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize(device)
    return sum(event.self_device_time_total for event in profile.key_averages()) / 1e3


def _peak_mib(call: Callable[[], object], device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def _line(row: Row) -> str:
    parts = [f"{row.name:24}"]
    for way, found in row.steps.items():
        if found.timing is None:
            parts.append(f"{way} {found.error[:60]}")
            continue
        kernels = "" if found.kernels_ms is None else f" (kernels {found.kernels_ms:.3f}, {found.peak_mib:.0f} MiB)"
        parts.append(f"{way} {found.timing.median:8.3f} ms{kernels} off {found.off:.1e}")
    return "  ".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each model; with ``--json`` write them, too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=[size.value for size in Size], default=Size.FULL.value)
    parser.add_argument("--only", default="", metavar="PATTERN", help="models whose names it matches")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each model")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # events are recorded on the current device
    rows = []
    for workload in MODELS:
        if re.search(options.only, workload.name):
            rows.append(measure_model(workload, Size(options.size), device, options.seconds))
            print(_line(rows[-1]), flush=True)
            if options.json:  # what is cut off leaves what it has measured
                found = {**about_machine(options.device), "rows": [asdict(row) for row in rows]}
                options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if rows else 2


if __name__ == "__main__":
    sys.exit(main())
