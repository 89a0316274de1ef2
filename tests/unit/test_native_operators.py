"""Fused operators without Python or fusepass: what their library's text says, and programs that load it."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import cpp_extension

import fusepass
from fusepass.artifact.libraries import Libraries
from fusepass.artifact.native import operators_text, value_text
from fusepass.codegen.ir.program import Ref
from fusepass.errors import ArtifactError
from fusepass.runtime import ops

SHAPE = (2, 3, 6, 6)


def model() -> nn.Module:
    torch.manual_seed(0)
    convolved = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.GroupNorm(2, 8), nn.Flatten())
    return nn.Sequential(convolved, nn.Linear(128, 16), nn.GELU(), nn.LayerNorm(16)).eval()


def exported(net: nn.Module) -> Any:
    """With a library that serves several sizes."""
    fused = fusepass.optimize(net)
    with torch.no_grad():
        for rows in (5, 3):
            fused(torch.rand(rows, *SHAPE[1:]))
    return fusepass.export(fused, (torch.rand(SHAPE),))


def test_the_text_says_what_python_s_call_does() -> None:
    program = exported(model())
    regions = {name: region for name, (region, _) in ops.called(program.graph).items()}
    text = operators_text(regions, Libraries())
    assert len(regions) == 2
    for name, region in regions.items():
        assert f'library.def("{ops.schema(name, region)}", {{at::Tag::needs_exact_strides}});' in text
        assert f'"{region.generated.source.entry}");' in text
        assert region.generated.source.numbers is not None
    assert text.count("static int64_t numbers[] = {") >= 2
    assert 'fp::called("aten::convolution", "", {' in text
    assert "fp::lying(fp::called(" in text


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (None, "Optional[int]", "c10::IValue()"),
        (True, "bool", "c10::IValue(true)"),
        (3, "int", "c10::IValue(int64_t{3})"),
        (3, "float", f"c10::IValue({3.0.hex()})"),
        (-math.inf, "number", "c10::IValue(-std::numeric_limits<double>::infinity())"),
        (math.nan, "float", "c10::IValue(std::numeric_limits<double>::quiet_NaN())"),
        ([1, 2], "List[int]", "c10::List<int64_t>({int64_t{1}, int64_t{2}})"),
        ((), "Optional[List[int]]", "c10::List<int64_t>()"),
        ([True], "List[bool]", "c10::List<bool>({true})"),
        ([1], "List[float]", f"c10::List<double>({{{1.0.hex()}}})"),
        ((Ref("x"), Ref("x")), "List[Tensor]", "c10::List<at::Tensor>({a0, a0})"),
        (torch.bfloat16, "Optional[int]", "c10::IValue(static_cast<int64_t>(at::ScalarType::BFloat16))"),
        (torch.channels_last_3d, "Optional[int]", "c10::IValue(static_cast<int64_t>(at::MemoryFormat::ChannelsLast3d))"),
        (torch.contiguous_format, "Optional[int]", "c10::IValue(static_cast<int64_t>(at::MemoryFormat::Contiguous))"),
    ],
)  # fmt: skip
def test_arguments_are_written_as_their_operator_takes_them(value: object, kind: str, text: str) -> None:
    assert value_text(value, kind, {"x": "a0"}) == text


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="takes 'mean' as str"):
        value_text("mean", "str", {})
    plain = torch.export.export(model(), (torch.rand(SHAPE),))
    with pytest.raises(ArtifactError, match=r"calls no fused operators: make it with fusepass\.export"):
        fusepass.build_operators(plain, tmp_path / "ops.so")


CPP = r"""
#include <dlfcn.h>
#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <cstdio>

int main(int, char** argv)
{
    if (dlopen(argv[1], RTLD_NOW) == nullptr) return std::puts(dlerror()), 1;
    torch::inductor::AOTIModelPackageLoader model(argv[2]);
    const at::Tensor x = at::linspace(-1, 1, 216).reshape({2, 3, 6, 6});
    for (const at::Tensor& result : model.run({x}))
        for (int64_t each = 0; each < result.numel(); ++each) std::printf("%.9g\n", result.flatten()[each].item<double>());
}
"""

PYTHON = """
import sys, torch
torch.ops.load_library("ops.so")
program = torch.export.load("net.pt2").module()
x, expected = torch.load("call.pt")
shifted = torch.zeros(x.numel() + 1)[1:].view_as(x).copy_(x)  # aligned to 4 bytes
with torch.no_grad():
    for each in (x, shifted):
        torch.testing.assert_close(program(each), expected)
assert not any(name.startswith("fusepass") for name in sys.modules)
for name in sys.argv[1:]:
    operator = getattr(torch.ops.fusepass, name)
    try:
        operator(*[torch.rand(3)] * len(operator.default._schema.arguments))
    except ValueError as error:
        assert "; this code was generated for Float[" in str(error)
        print("refused")
"""


@pytest.mark.slow
def test_programs_load_the_library(tmp_path: Path) -> None:
    """In C++ with what AOTInductor makes, and in Python without fusepass."""
    net, x = model(), torch.linspace(-1, 1, 216).reshape(SHAPE)
    program = exported(net)
    fusepass.build_operators(program, tmp_path / "ops.so")
    torch.export.save(program, tmp_path / "net.pt2")
    with torch.no_grad():
        expected = net(x)
        torch.save((x, expected), tmp_path / "call.pt")
        torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "aoti.pt2"))
    names = ops.called(program.graph)
    done = subprocess.run(
        [sys.executable, "-c", PYTHON, *names], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "refused\n" * len(names)

    (tmp_path / "main.cpp").write_text(CPP)
    folders = cpp_extension.library_paths()
    command = ["c++", "-std=c++20", "-O0", "-w", *(f"-I{each}" for each in cpp_extension.include_paths()), "main.cpp"]
    command += [flag for each in folders for flag in (f"-L{each}", f"-Wl,-rpath,{each}")]
    subprocess.run([*command, "-ltorch", "-ltorch_cpu", "-lc10", "-o", "main"], cwd=tmp_path, check=True)
    done = subprocess.run(
        ["./main", "./ops.so", "aoti.pt2"], cwd=tmp_path, env={"PATH": "/nonexistent"}, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = torch.tensor([float(line) for line in done.stdout.split()])
    torch.testing.assert_close(found, expected.flatten())
