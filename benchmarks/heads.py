"""The head of a language model, linear and cross entropy: eager, torch.compile's own backend, chunks by hand and fusepass side by side, time and peak.

python benchmarks/heads.py --json heads.json      # or --only 'llama|gpt', --small on a CPU
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
from torch import Tensor

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import measure
from benchmarks.run import about_machine

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
PARTS = 8
"""Chunks by hand."""


def plain(x: Tensor, weight: Tensor, classes: Tensor) -> Tensor:
    """Of logits in their own type."""
    return F.cross_entropy(F.linear(x, weight), classes)


def widened(x: Tensor, weight: Tensor, classes: Tensor) -> Tensor:
    """Of logits in float32, as Hugging Face's models have it."""
    return F.cross_entropy(F.linear(x, weight).float(), classes)


def capped(x: Tensor, weight: Tensor, classes: Tensor) -> Tensor:
    """Soft caps, https://arxiv.org/abs/2408.00118, and a z-loss, https://arxiv.org/abs/2204.02311."""
    logits = 30 * torch.tanh(F.linear(x, weight).float() / 30)
    return F.cross_entropy(logits, classes) + 1e-4 * logits.logsumexp(-1).square().mean()


def smoothed(x: Tensor, weight: Tensor, classes: Tensor) -> Tensor:
    """With label smoothing."""
    return F.cross_entropy(F.linear(x, weight).float(), classes, label_smoothing=0.1)


@dataclass(frozen=True)
class Head:
    """A workload: `rows` tokens, `depth` features, `width` words."""

    name: str
    loss: Loss
    rows: int
    depth: int
    width: int
    dtype: torch.dtype = torch.bfloat16

    def inputs(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Features, the weight and classes, some of them ignored."""
        draw = torch.Generator(device).manual_seed(0)
        x = torch.randn(self.rows, self.depth, device=device, dtype=self.dtype, generator=draw)
        weight = torch.randn(self.width, self.depth, device=device, dtype=self.dtype, generator=draw) * self.depth**-0.5
        classes = torch.randint(self.width, (self.rows,), device=device, generator=draw)
        classes[::17] = -100
        return x.requires_grad_(), weight.requires_grad_(), classes


HEADS = (
    Head("llama", plain, 8192, 4096, 131072),
    Head("llama_widened", widened, 8192, 4096, 131072),
    Head("gpt2", widened, 8192, 768, 50257),
    Head("gemma_capped", capped, 4096, 2304, 256000),
    Head("qwen_smoothed", smoothed, 16384, 2048, 151936),
    Head("float32", plain, 8192, 1024, 32000, torch.float32),
)


@dataclass(frozen=True)
class Step:
    """What one way takes for a step.

    Attributes:
        timing: milliseconds.
        peak_gb: gigabytes (1e9 bytes) allocated at most, beyond features, weight and classes; the gradients of the first two are among them.
        off: the distance of both gradients from float64's, relative to the norm of these, for some of the words.
        error: what was raised, if anything was.
    """

    timing: measure.Timing | None = None
    peak_gb: float | None = None
    off: float | None = None
    error: str = ""


@dataclass(frozen=True)
class Row:
    """A head with its steps, by way."""

    name: str
    steps: dict[str, Step] = field(default_factory=dict)


def step(loss: Loss, x: Tensor, weight: Tensor, classes: Tensor) -> None:
    """Forward and backward; gradients are new ones."""
    x.grad = weight.grad = None
    loss(x, weight, classes).backward()


def by_hand(loss: Loss, x: Tensor, weight: Tensor, classes: Tensor) -> None:
    """A step in chunks, each forward and backward before the next; it knows that the loss is a mean."""
    x.grad = weight.grad = None
    gradient = torch.empty_like(x)
    counted = (classes >= 0).sum()
    for part, of_part, kinds in zip(x.chunk(PARTS), gradient.chunk(PARTS), classes.chunk(PARTS), strict=True):
        given = part.detach().requires_grad_()
        (loss(given, weight, kinds) * ((kinds >= 0).sum() / counted)).backward()
        of_part.copy_(given.grad)
    x.grad = gradient


def forward(loss: Loss, x: Tensor, weight: Tensor, classes: Tensor) -> None:
    """The loss alone."""
    with torch.no_grad():
        loss(x, weight, classes)


def ways(loss: Loss) -> dict[str, Callable[[Tensor, Tensor, Tensor], None]]:
    """Of a step, and of the loss alone."""
    inductor, fused = (torch.compile(loss, backend=backend, dynamic=False) for backend in ("inductor", "fusepass"))
    return {
        "eager": partial(step, loss),
        "compile": partial(step, inductor),
        "by hand": partial(by_hand, inductor),
        "fusepass": partial(step, fused),
        "compile, loss": partial(forward, inductor),
        "fusepass, loss": partial(forward, fused),
    }


def measure_head(head: Head, device: torch.device, seconds: float) -> Row:
    """A row of all ways, interleaved for so many seconds."""
    torch._dynamo.reset()
    x, weight, classes = head.inputs(device)
    steps: dict[str, Step] = {}
    calls: dict[str, Callable[[], None]] = {}
    for way, run in ways(head.loss).items():
        call = partial(run, x, weight, classes)
        try:
            for _ in range(measure.WARM_UPS):
                call()
            peak = _peak_gb(call, x, weight, device)
            steps[way] = Step(None, peak, None if x.grad is None else _off(head, x, weight, classes))
            calls[way] = call
        except Exception as error:  # others go on
            steps[way] = Step(error=repr(error))
    x.grad = weight.grad = None
    timings = measure.interleaved(calls, lambda: None, device, seconds)
    return Row(head.name, {way: replace(found, timing=timings.get(way)) for way, found in steps.items()})


def _peak_gb(call: Callable[[], None], x: Tensor, weight: Tensor, device: torch.device) -> float | None:
    x.grad = weight.grad = None
    if device.type != "cuda":
        call()
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 1e9


def _off(head: Head, x: Tensor, weight: Tensor, classes: Tensor) -> float:
    """Against float64, some tokens at a time."""
    wide, rows = weight.detach().double(), []
    of_weight = torch.zeros_like(wide)
    counted = (classes >= 0).sum()
    for part, kinds in zip(x.detach().split(512), classes.split(512), strict=True):
        given, own = part.double().requires_grad_(), wide.detach().requires_grad_()
        (_exact(head.loss)(given, own, kinds) * ((kinds >= 0).sum() / counted)).backward()
        rows.append(given.grad)
        of_weight += own.grad  # type: ignore[operator]
    pairs = ((x.grad, torch.cat(rows)), (weight.grad, of_weight))  # type: ignore[arg-type]
    return max(float((got.double() - wanted).norm() / wanted.norm()) for got, wanted in pairs)  # type: ignore[union-attr]


def _exact(loss: Loss) -> Loss:
    """The loss of float64, which `widened` and others would round to float32."""

    def run(x: Tensor, weight: Tensor, classes: Tensor) -> Tensor:
        before = torch.Tensor.float
        torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
        try:
            return loss(x, weight, classes)
        finally:
            torch.Tensor.float = before  # type: ignore[method-assign]

    return run


def _line(row: Row) -> str:
    parts = [f"{row.name:14}"]
    for way, found in row.steps.items():
        if found.timing is None:
            parts.append(f"{way} {found.error[:60]}")
            continue
        peak = "" if found.peak_gb is None else f" {found.peak_gb:.2f} GB"
        off = "" if found.off is None else f" off {found.off:.1e}"
        parts.append(f"{way} {found.timing.median:.2f} ms{peak}{off}")
    return "  |  ".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each head; with ``--json`` write them, too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", metavar="PATTERN", help="heads whose names it matches")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each head")
    parser.add_argument("--small", action="store_true", help="a sixteenth of the rows, features and words")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    rows = []
    for head in HEADS:
        if not re.search(options.only, head.name):
            continue
        if options.small:
            head = replace(head, rows=head.rows // 16, depth=head.depth // 16, width=head.width // 16)
        rows.append(measure_head(head, device, options.seconds))
        print(_line(rows[-1]), flush=True)
        if options.json:
            found = {**about_machine(options.device), "rows": [asdict(row) for row in rows]}
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if rows else 2


if __name__ == "__main__":
    sys.exit(main())
