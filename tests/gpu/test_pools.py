"""Windows that overlap, on a GPU: as far from float64 as eager is, by the rules' schedule and by each of the others that are timed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fusepass
from fusepass.codegen.build import build_all, load
from fusepass.codegen.detect import device_facts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.ir.program import Role
from fusepass.codegen.render import render
from fusepass.codegen.schedule import ranking
from fusepass.codegen.schedule.overrides import ScheduleOverrides
from fusepass.errors import BuildError
from fusepass.numerics.check import check
from tests.support.regions import region
from tests.unit.test_output_tile_stages import CASES

pytestmark = pytest.mark.gpu

POOLS: dict[str, tuple[nn.Module, tuple[tuple[int, ...], ...]]] = {
    "maximum of 13": (nn.MaxPool2d(13, 1, 6), ((64, 512, 20, 20), (3, 5, 13, 13), (2, 3, 130, 71))),
    "maximum of 5": (nn.MaxPool2d(5, 1, 2), ((64, 512, 13, 13), (1, 1, 5, 3), (2, 7, 257, 255))),
    "average of 3": (nn.AvgPool2d(3, 1, 1), ((64, 192, 35, 35), (256, 832, 7, 7), (1, 3, 1, 1000))),
    "average of 3 that counts": (nn.AvgPool2d(3, 1, 1, count_include_pad=False), ((7, 30, 14, 14), (5, 3, 28, 29))),
    "in steps": (nn.MaxPool2d(5, 2, 2), ((8, 64, 113, 111), (9, 31, 20, 22))),
    "channels that are vectors": (nn.AvgPool2d(5, 1, 2), ((32, 96, 57, 40), (64, 192, 35, 35))),
    "with holes": (nn.MaxPool2d(3, 1, 1, 2), ((8, 33, 31, 17),)),
    "maximum and its place": (nn.MaxPool2d(3, 2, 1, return_indices=True), ((8, 64, 113, 111), (3, 5, 8, 8))),
    "maximum of few and its place": (nn.AdaptiveMaxPool2d(5, return_indices=True), ((8, 64, 33, 31),)),
    "of a gelu": (nn.Sequential(nn.GELU(), nn.AvgPool2d(3, 1, 1)), ((16, 96, 35, 35), (4, 24, 56, 56))),
    "before a mean": (nn.Sequential(nn.MaxPool2d(5, 1, 2), nn.AdaptiveAvgPool2d(1)), ((64, 128, 28, 28), (64, 512, 13, 13))),
    "before a norm": (nn.Sequential(nn.AvgPool2d(3, 1, 1), nn.GroupNorm(4, 64)), ((16, 64, 56, 56), (5, 64, 33, 35))),
    "of eight, side by side": (nn.AvgPool2d(8), ((16, 64, 56, 56), (3, 5, 24, 17), (2, 3, 8, 72))),
    "of pairs, side by side": (nn.MaxPool2d(6), ((16, 64, 114, 114), (3, 5, 12, 30))),
    "average of a line": (nn.AvgPool1d(25, 1, 12), ((64, 321, 721), (2, 3, 1440), (1, 1, 99))),
    "maximum of a long line": (nn.MaxPool1d(301, 1, 150), ((8, 64, 4097),)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", POOLS)
@torch.no_grad()
def test_values(name: str, dtype: torch.dtype) -> None:
    module, shapes = POOLS[name]
    model = module.to("cuda", dtype)
    fused = fusepass.optimize(model, tune="off")
    for shape in shapes:
        x = torch.randn(shape, device="cuda", dtype=dtype)
        x.view(-1)[torch.randint(x.numel(), (3,))] = torch.tensor(
            [torch.inf, -torch.inf, torch.nan], device="cuda", dtype=dtype
        )
        misaligned = torch.randn(x.numel() + 1, device="cuda", dtype=dtype)[1:].view(shape)
        last = [x.to(memory_format=torch.channels_last)] if x.dim() == 4 else []
        for each in (x, misaligned, *last):
            outcome = check(model, fused, (each,))
            assert outcome.ok, f"{shape}: {outcome.explain()}"
    assert fused.report().regions


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_each_way(name: str) -> None:
    """All ways that are timed give the same, where a sum is rounded alike."""
    function, shapes, dtype = CASES[name]
    inputs = [torch.randn(shape).to(dtype) for shape in shapes]
    made, facts = region(function, *inputs), device_facts(torch.device("cuda"))
    program = made.passed(pass_options(facts))
    last = len(program.kernels) - 1
    ways = ranking(program.kernels[last], program, facts)
    sources = [render(program, facts, overrides=ScheduleOverrides(last, rank)) for rank in range(len(ways))]
    exact = made.exact()
    for way, source, library in zip(ways, sources, build_all(sources), strict=True):
        assert not isinstance(library, BuildError), library
        memory = {name: torch.from_numpy(array).cuda() for name, array in made.memory(program).items()}
        for buffer in program.arguments:
            if buffer.role is not Role.INPUT:
                memory[buffer.name] = torch.full((buffer.nbytes,), 0x7F, dtype=torch.uint8, device="cuda")
        pointers = [memory[buffer.name].data_ptr() for buffer in program.arguments]
        run = load(library, source.entry, len(pointers))
        assert run(*pointers, torch.cuda.current_stream().cuda_stream) == 0
        for output, wanted in zip(program.outputs, exact, strict=True):
            got = memory[output].view(wanted.dtype)[: wanted.numel()].view(wanted.shape).cpu()
            unit = torch.finfo(wanted.dtype).eps
            torch.testing.assert_close(
                got, wanted, rtol=4 * unit, atol=4 * unit, msg=lambda text, way=way: f"{way.plan}: {text}"
            )
