"""Windows along a line that share what they have in common."""

from __future__ import annotations

import subprocess
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.ir.sliding import Line
from fusepass.codegen.render import render
from tests.support.emulate import compile_on_host, emulate, needs_compiler
from tests.support.regions import region, tensor_of

LINES = [
    Line(count, step, apart, size) for count, step, apart, size in product((1, 3, 8), (1, 2, 3), (1, 2, 4), (1, 3, 13))
]

# A part is the number that it has; a state counts how often each number is in it, and how many states became one.
PROGRAM = """
#include "emulated.h"
#include <cstdio>
#include <map>

static int merges = 0;

struct Numbers {
    std::map<int, int> times;
    void merge(const Numbers& other) {
        ++merges;
        for (const auto& [number, count] : other.times) times[number] += count;
    }
};

template <int Count, int Step, int Apart, int Size, int Together>
void check(int reductions) {
    constexpr int width = 2;
    std::map<int, int> asked;
    Numbers windows[Count * width];
    merges = 0;
    fp::Line<Count, Step, Apart, Size, Together>::template reduce<width>(windows, [&](int number, Numbers* parts) {
        ++asked[number];
        for (int w = 0; w < width; ++w) parts[w].times = {{number * width + w, 1}};
    });
    bool right = merges == reductions * width;
    std::map<int, int> needed;
    for (int u = 0; u < Count; ++u) {
        for (int w = 0; w < width; ++w) {
            std::map<int, int> wanted;
            for (int t = 0; t < Size; ++t) wanted[(u * Step + t * Apart) * width + w] = 1;
            right = right && windows[u * width + w].times == wanted;
        }
        for (int t = 0; t < Size; ++t) needed[u * Step + t * Apart] = 1;
    }
    if (!right || asked != needed) std::printf("%d %d %d %d\\n", Count, Step, Apart, Size);
}

int main() {
CHECKS}
"""


@needs_compiler
def test_each_window_has_its_parts_once_and_each_part_is_made_once(tmp_path: Path) -> None:
    checks = [
        f"    check<{line.count}, {line.step}, {line.apart}, {line.size}, {line.together}>({line.reductions});\n"
        for line in LINES
    ]
    source = tmp_path / "lines.cpp"
    source.write_text(PROGRAM.replace("CHECKS", "".join(checks)))
    made = compile_on_host(source, tmp_path / "lines")
    done = subprocess.run([made], capture_output=True, text=True, check=True)
    assert done.stdout == ""


@pytest.mark.parametrize("line", LINES, ids=str)
def test_sharing_never_costs_reductions(line: Line) -> None:
    assert line.reductions <= line.count * (line.size - 1)


def test_windows_of_thirteen_points_need_three_reductions_each() -> None:
    assert Line(8, 1, 1, 13).reductions == 25
    assert Line(4, 1, 1, 3).reductions == 6
    assert Line(4, 2, 1, 3).reductions == 8  # every second one: nothing to share


def _halves(x: Tensor) -> Tensor:
    x.view(-1)[torch.randint(x.numel(), (7,))] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 1, 2, 3]).to(x)
    return x


PAIRS = {
    "maximum": (lambda x: F.max_pool2d(x, 3, 1, 1), torch.float16),
    "bfloat16, by 2": (lambda x: F.max_pool2d(x, 3, 2, 1), torch.bfloat16),
    "dilated": (lambda x: F.max_pool2d(x, 3, 1, 1, 2), torch.float16),
    "wide, of one axis": (lambda x: F.max_pool1d(x.flatten(1, 2), 9, 1, 4), torch.bfloat16),
    "no border": (lambda x: F.max_pool2d(x, (5, 3), 1), torch.float16),
    "three axes": (lambda x: F.max_pool3d(x, 3, 1, 1), torch.float16),
}


@needs_compiler
@pytest.mark.parametrize("name", PAIRS)
def test_maxima_of_halves_are_found_in_pairs(name: str) -> None:
    function, dtype = PAIRS[name]
    facts = DeviceFacts.h200()
    made = region(function, _halves(torch.randn(2, 6, 20, 32).to(dtype)))
    program = made.passed(pass_options(facts))
    source = render(program, facts)
    assert "MaxPair<" in source.text
    results = emulate(program, source, made.memory(program))
    got = tensor_of(results[program.outputs[0]], program.buffer(program.outputs[0]))
    torch.testing.assert_close(got, made.eager()[0], equal_nan=True, rtol=0, atol=0)


def test_what_is_computed_before_a_maximum_is_in_float32() -> None:
    x, facts = torch.empty(2, 6, 20, 32, dtype=torch.float16, device="meta"), DeviceFacts.h200()
    made = region(lambda x: F.max_pool2d(-x, 3, 1, 1), x, cuda=True)
    assert "MaxPair<" not in render(made.passed(pass_options(facts)), facts).text


@needs_compiler
def test_an_average_of_negative_zeros_is_zero() -> None:
    facts = DeviceFacts.h200()
    made = region(lambda x: 1 / F.avg_pool2d(x, 3, 1, 1), torch.full((2, 4, 12, 16), -0.0))
    program = made.passed(pass_options(facts))
    results = emulate(program, render(program, facts), made.memory(program))
    got = tensor_of(results[program.outputs[0]], program.buffer(program.outputs[0]))
    assert torch.equal(got, made.eager()[0])
