"""How close rendered kernels come to the device's copy rate: ``python -m tests.gpu.time_kernels [name ...]``.

Each kernel runs on buffers larger than the cache; the rate counts every input and result once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from fusepass.codegen.build import build_all, load
from fusepass.codegen.detect import device_facts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.ir.expr import ReduceOp
from fusepass.codegen.ir.product import Product
from fusepass.codegen.ir.program import Program, Role
from fusepass.codegen.render import describe, render
from fusepass.codegen.schedule.team import team_size
from fusepass.errors import BuildError
from tests.support import kernels as k
from tests.support.convolutions import Case as Convolution
from tests.support.convolutions import generated as convolution
from tests.support.products import Case, generated
from tests.support.regions import region


def _passed(
    function: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> Program:
    """The kernels that `function` of a tensor becomes."""
    made = region(function, torch.empty(shape, device="meta", dtype=dtype))
    return made.passed(pass_options(device_facts(torch.device("cuda"))))


def _batch_norm(x: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, None, None, training=True)


def _in_teams(program: Program) -> Program:
    """`program` with the teams that are chosen for it."""
    size = team_size(program, program.kernels[0], device_facts(torch.device("cuda")))
    return k.in_teams(program, *size) if size else program


_DEPTHWISE = Convolution((64, 96, 112, 112), 96, (5, 5), (1, 1), (2, 2), (1, 1), groups=96)

KERNELS: dict[str, Callable[[], Program]] = {
    "affine": lambda: k.affine(1 << 27),
    "affine half": lambda: k.affine(1 << 28, k.F16),
    "affine odd": lambda: k.affine((1 << 27) + 3),
    "transpose": lambda: k.transpose(1 << 14, 1 << 13),
    "mixed layouts": lambda: k.mixed_layouts(64, 64, 1 << 15),
    "mixed layouts half": lambda: k.mixed_layouts(64, 64, 1 << 16, k.F16),
    "mixed layouts odd": lambda: k.mixed_layouts(64, 64, 181 * 181),
    "max pool 2, channels last": lambda: k.max_pool_channels_last(64, 128, 126, 2, 2),
    "softmax channels last": lambda: k.softmax_channels_last(64, 128, 1 << 14),
    "bias and gelu": lambda: k.channel_bias_gelu(128, 64, 126 * 126),
    "max pool 2": lambda: k.max_pool(64 * 32, 256, 2, 2, 0),
    "max pool 5, overlapping": lambda: k.max_pool(64 * 32, 128, 5, 1, 2),
    "depthwise 5 x 5": lambda: convolution(_DEPTHWISE),
    "max pool 3, padded": lambda: k.max_pool(64 * 32, 256, 3, 2, 1),
    "layer norm 64 and gelu": lambda: k.layer_norm(1 << 21, 64, with_gelu=True),
    "layer norm 1024": lambda: k.layer_norm(1 << 17, 1024),
    "layer norm 1024 half": lambda: k.layer_norm(1 << 18, 1024, k.F16),
    "layer norm 8192": lambda: k.layer_norm(1 << 14, 8192),
    "layer norm 32768": lambda: k.layer_norm(1 << 12, 32_768),
    "layer norm 49152": lambda: k.layer_norm(2640, 49_152),
    "softmax 1000": lambda: k.softmax_rows(1 << 17, 1000),
    "softmax of 64 channels": lambda: k.softmax_channels(16, 64, 1 << 17),
    "softmax of 16 channels": lambda: k.softmax_channels(16, 16, 1 << 19),
    "softmax of 512 channels": lambda: k.softmax_channels(64, 512, 1 << 12),
    "moments of long rows": lambda: k.row_reduction(264 * 4, 1 << 17, ReduceOp.MOMENTS),
    "batch norm 2d": lambda: _passed(_batch_norm, (64, 64, 128, 256)),
    "batch norm 1d": lambda: _passed(_batch_norm, (16_384, 8192)),
    "batch norm 1d half": lambda: _passed(_batch_norm, (16_384, 16_384), torch.float16),
    "batch norm of small images": lambda: _passed(_batch_norm, (1024, 2048, 7, 7)),
    "min of 64 channels": lambda: k.row_reduction(1 << 21, 64, ReduceOp.MIN, outer=True),
    "softmax 393216": lambda: _in_teams(k.softmax_rows(2048, 393_216)),
    "softmax of a middle axis": lambda: _passed(lambda x: torch.log1p((x * 3.0).softmax(1)), (128, 513, 2047)),
    "group norm 2097152": lambda: _passed(lambda x: F.group_norm(x, 8), (28, 64, 512, 512)),
    "layer norm 4194304": lambda: _passed(nn.LayerNorm(1 << 22, device="meta"), (64, 1 << 22)),
    "layer norm 4194304 in teams": lambda: _in_teams(k.layer_norm(64, 1 << 22, weighted=False)),
    "layer norm 4194304, 16 samples": lambda: _passed(nn.LayerNorm(1 << 22, device="meta"), (16, 1 << 22)),
    "batch norm 16777216": lambda: _passed(_batch_norm, (64, 16, 512, 512)),
    "batch norm 16777216, 64 channels": lambda: _passed(_batch_norm, (64, 64, 512, 512)),
    "layer norm 49152, plain": lambda: k.layer_norm(2640, 49_152, weighted=False),
    "layer norm 80000, plain": lambda: _in_teams(k.layer_norm(1600, 80_000, weighted=False)),
    "batch norm 2d half": lambda: _passed(_batch_norm, (64, 64, 256, 256), torch.float16),
    "group norm 2097152 half": lambda: _passed(lambda x: F.group_norm(x, 8), (56, 64, 512, 512), torch.float16),
    "softmax 1000 half": lambda: _passed(lambda x: x.softmax(1), (1 << 18, 1000), torch.float16),
    "softmax 196608 half": lambda: _passed(lambda x: x.softmax(1), (4096, 196_608), torch.float16),
    "product 1024 x 8192 x 8192": lambda: generated(Case(1024, 8192, 8192)),
    "product 4096 x 4096 x 4096, TF32": lambda: generated(Case(4096, 4096, 4096, tf32=True)),
    "product 4096 x 4096 x 4096, half": lambda: generated(Case(4096, 4096, 4096, dtype=k.F16)),
    "product 16 x 4096 x 4096": lambda: generated(Case(16, 4096, 4096, length=512)),
    "sum of long columns": lambda: k.row_reduction(1 << 13, 1 << 14, ReduceOp.SUM, outer=True),
}


def main() -> None:
    facts = device_facts(torch.device("cuda"))
    names = sys.argv[1:] or list(KERNELS)
    programs = [KERNELS[name]() for name in names]
    sources = [render(program, facts) for program in programs]
    for name, program, source, path in zip(names, programs, sources, build_all(sources), strict=True):
        if isinstance(path, BuildError):
            print(f"{name}: {path}")
            continue
        run = load(path, source.entry, len(program.arguments))
        memory = [torch.zeros(b.nbytes, dtype=torch.uint8, device="cuda") for b in program.arguments]
        seconds = _median_seconds(run, [each.data_ptr() for each in memory])
        nbytes = sum(b.nbytes for b in program.arguments if b.role is not Role.TEMP)
        share = nbytes / seconds / facts.bandwidth
        print(f"{name:24} {seconds * 1e6:9.1f} us {nbytes / seconds / 1e12:5.2f} TB/s {share:5.2f} of copy")
        for kernel in program.kernels:
            print(f"    {describe(program, kernel, facts)}")
            if isinstance(kernel.anchor, Product):
                flops = 2 * kernel.row_count * min(kernel.anchor.length, kernel.anchor.inner)
                print(f"    {flops / seconds / 1e12:.1f} TFLOP/s with what follows")


def _median_seconds(run: Callable[..., int], pointers: list[int], repeats: int = 20) -> float:
    stream = torch.cuda.current_stream().cuda_stream
    times = []
    for _ in range(repeats + 3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run(*pointers, stream)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return sorted(times[3:])[repeats // 2]


if __name__ == "__main__":
    main()
