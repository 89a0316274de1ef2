"""Kernels that write over what they read, element by element."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fusepass.capture.trace import Captured, capture
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import generate
from fusepass.codegen.ir.updates import written_over
from fusepass.codegen.lowering.lower import lower
from fusepass.codegen.render import describe, render
from fusepass.compile.pipeline import compile_graph
from fusepass.compile.splice import subgraph
from fusepass.config import override
from fusepass.patterns.partition import partition
from fusepass.patterns.simplify import simplify
from tests.support.emulate import emulate, needs_compiler
from tests.support.moved import Given, _recorded
from tests.support.regions import NO_SPLIT, region


class Softmax(nn.Module):
    """Makes rows their softmax, and gives the logarithms of their sums."""

    def forward(self, x: Tensor) -> Tensor:
        total = x.exp().sum(-1)
        x.copy_(x.exp() / total[:, None])
        return total.log()


@pytest.mark.parametrize("pitch", [37, 40])
def test_rows_are_written_over_once_they_are_reduced(pitch: int) -> None:
    """Rows behind each other, and with gaps, which stay as they are."""
    memory = torch.randn(500, pitch)
    x, before = memory[:, :37], memory.clone()
    with torch.no_grad(), override(tune="off"):
        captured = capture(Softmax(), (memory.clone()[:, :37],), {})
        assert isinstance(captured, Captured)
        compiled = compile_graph(captured.graph, name="softmax")
        (found,) = compiled.call(x)
    (region,) = compiled.report.regions
    assert len(region.written) == 1
    assert len(region.kernels) == 1
    torch.testing.assert_close(found, before[:, :37].logsumexp(-1))
    torch.testing.assert_close(x, before[:, :37].softmax(-1))
    assert torch.equal(memory[:, 37:], before[:, 37:])


def test_no_other_block_reads_what_is_written_over() -> None:
    """Where blocks would compute some rows of their neighbours, too, so that each stores whole sectors."""
    graph = _recorded(lambda x: x.softmax(1), (Given((16, 64, 127 * 127)),))
    simplify(graph)
    (region,) = partition(graph).regions
    names = [node.name for node in region.inputs]
    shared = []
    for updates in ({}, {0: names[0]}):
        made = generate(*lower(subgraph(graph, region), region.name, names, updates=updates), H200)
        assert len(made.program.kernels) == 1
        assert len(written_over(made.program)) == len(updates)
        shared.append("also the next block's" in made.kernels[0].schedule)
    assert shared == [True, False]


H200 = DeviceFacts.h200()
LITTLE = replace(H200, l2_bytes=4096, shared_bytes_per_block=24 << 10, multiprocessors=1)
ROWS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, int], str]] = {
    "next rows under way": (lambda x: x.softmax(1), (9, 8008), "fetched ahead"),
    "read again": (lambda x: x.softmax(1), (5, 40_000), "shared memory for"),
    "rows begin anywhere": (lambda x: x.log_softmax(1), (7, 7003), "rows begin anywhere"),
}


@needs_compiler
@pytest.mark.parametrize("name", ROWS)
def test_teams_write_over_their_rows(name: str) -> None:
    """While copies of the next ones are under way."""
    function, shape, plan = ROWS[name]
    made = region(function, torch.randn(shape, generator=torch.Generator().manual_seed(2)).half())
    program = made.passed(replace(NO_SPLIT, teams=lambda program, kernel: (2, 2), longest_cached_row=1))
    program = replace(program, updates=((program.outputs[0], program.inputs[0]),))
    assert written_over(program) == program.updates
    assert plan in describe(program, program.kernels[0], LITTLE)
    source, memory = render(program, LITTLE), made.memory(program)
    apart, over = (emulate(program, source, memory, in_place=in_place) for in_place in (False, True))
    assert (over[program.outputs[0]] == apart[program.outputs[0]]).all()
