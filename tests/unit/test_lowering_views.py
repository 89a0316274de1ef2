"""Operators that only move elements, alone and behind one another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusepass.codegen.ir.expr import Apply, Op, Window
from tests.support.regions import NO_SPLIT, Functional, region

F64 = torch.float64
VIEWS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "cat": lambda x, y: (torch.cat([x, -x], 0), torch.cat([x, x[:, :2].exp(), x], 1), torch.cat([x, x[..., :1]], -1)),
    "cat of functions": lambda x, y: (
        torch.cat([f(x * 2.0**k) for k in range(3) for f in (torch.sin, torch.cos, torch.neg)], -1),
        torch.cat([x.abs().log(), x, (2 * x.abs()).log() * 3, x.exp() * 3], 1),
        torch.cat([x.exp(), x[:1].exp()]) + torch.cat([x.tanh(), x[:1].tanh(), x[:0]]),
    ),
    "cat with nothing": lambda x, y: (torch.cat([x[:0], x, x[:0]]), torch.cat([torch.empty(0, dtype=F64), x])),
    "cat of types": lambda x, y: (torch.cat([x.int(), x.half()]), torch.cat([x, x.float(), x.int()], 1)),
    "stack": lambda x, y: (torch.stack([x, x + 1], 1), torch.stack([x, -x], -1)),
    "pad": lambda x, y: (F.pad(x, (1, 2)), F.pad(x, (1, 2, 0, 3), value=2.5), F.pad(x, (-1, 2, 1, -2))),
    "pad of a sum": lambda x, y: F.pad(F.pad(x + y, (1, 0)), (0, 1, 2, 0), value=1.0),
    "slice": lambda x, y: (x[1:3, ::2, -2:] + 1, x[:, 4:100] * 2, x[-3:-1] - y, x[None, :, 0] + 1),
    "select": lambda x, y: (x[..., 1] + 1, x[-1] + 1, x[2, -1, 3] + 1),
    "flip": lambda x, y: (x.flip(0, 2), x.flip(-1), x.flip(1)[:, 1:] + 1),
    "flip of a reshape": lambda x, y: (x.reshape(60, 2).flip(-1), x.flip(0).view(-1, 2), x[:2, :1].flatten(1).flip(0)),
    "roll": lambda x, y: (x.roll(2, 1), x.roll((1, -1), (0, 2)), x.roll(7), x.roll(1, 0).roll(-1, 0)),
    "expand": lambda x, y: (y.expand(3, 6, 5) + 0, y[:, None].expand(-1, 4, 5) * 2, x[:1].expand(4, -1, -1) + x),
    "permute": lambda x, y: (x.permute(2, 0, 1) + 1, x.permute(-1, 0, -2) + 1, x.mT * 2, x.movedim(0, -1) + 1, y.T + 1),
    "view": lambda x, y: (x.view(8, 3, 5) + 1, x.view(-1) + 1, x.flatten(1) + 1, x.unflatten(1, (2, 3)) + 1),
    "reshape of a permute": lambda x, y: (
        x.permute(1, 0, 2).reshape(8, 15) + 1,
        x.reshape(2, 2, 3, 2, 5).permute(0, 2, 1, 3, 4).reshape(12, 10) + 1,
    ),
    "squeeze": lambda x, y: (x[:1].squeeze(0) + 1, x.unsqueeze(-2) + 1, x[:1, :1].squeeze() + 1, x[:1].squeeze(1) + 1),
    "chunk": lambda x, y: [c + 1 for c in (*x.chunk(3, 1), *x.split([1, 2, 3], 1), *x.split(4, 1), *x.unbind(0))],
    "gate": lambda x, y: x.chunk(2, 1)[0] * x.chunk(2, 1)[1].sigmoid(),
    "repeat": lambda x, y: (y.tile(2, 3), y.repeat(2, 1, 2), y.repeat_interleave(2, 0)),
    "shuffle": lambda x, y: (
        F.pixel_shuffle(x[:, :4].reshape(4, 4, 5, 1), 2),
        F.pixel_unshuffle(x[:, :, :4].reshape(4, 6, 2, 2), 2),
        F.channel_shuffle(x.reshape(4, 6, 5, 1), 3),
    ),
    "triangle": lambda x, y: (y.tril(), x.triu(1), y[:5] + torch.eye(5, dtype=F64)),
    "range": lambda x, y: (
        x + torch.arange(5), x + torch.arange(2, 12, 2, dtype=F64), x + torch.arange(0.0, 1.0, 0.2),
        x * torch.linspace(0, 1, 5, dtype=F64),
    ),
    "diagonal": lambda x, y: (y.diagonal() + 1, torch.diag_embed(y)),
    "unfold": lambda x, y: (x.unfold(1, 3, 2) + 1, x.as_strided((3, 3), (1, 2)) + 1),
    "fill": lambda x, y: (
        x + torch.full((5,), 2.0), torch.full_like(x, 3) + x, torch.zeros_like(x) + x, torch.ones_like(x) * x,
        x.new_full((5,), 2) + x, x.new_zeros(5) + x, x.new_ones(5) + x,
    ),
    "as is": lambda x, y: (x, x.view(-1), x),
}  # fmt: skip
LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(4, 6, 5, dtype=F64),
    "inside another": lambda: torch.randn(5, 9, 7, dtype=F64)[1:, 2:8, 1:6],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", VIEWS)
def test_view(name: str, layout: str) -> None:
    x = LAYOUTS[layout]()
    if layout != "contiguous" and name in ("view", "unfold", "as is", "chunk", "gate", "diagonal"):
        pytest.skip("wants dense memory")
    made = region(VIEWS[name], x, torch.randn(6, 5, dtype=F64))
    made.check()
    made.check(made.passed(NO_SPLIT))


def test_functions_that_pieces_have_in_common_are_computed_once() -> None:
    """Else a thread goes through all of them, and those of a warp through those of all its elements."""

    def waves(x: Tensor) -> Tensor:
        return torch.cat([x, *(f(x * 2.0**k) for k in range(4) for f in (torch.sin, torch.cos))], -1)

    made = region(waves, torch.randn(7, 3))
    (kernel,) = made.passed().kernels
    operations = [node.op for node in kernel.nodes if isinstance(node, Apply)]
    assert [operations.count(op) for op in (Op.SIN, Op.COS)] == [1, 1]
    made.check()


def test_wide_pools_that_are_put_together_have_kernels_of_their_own() -> None:
    """So that their threads share what they load; a narrow one is computed where it is put."""

    def pyramid(x: Tensor) -> Tensor:
        return torch.cat([x, F.max_pool2d(x, 3, 1, 1), F.max_pool2d(x, 9, 1, 4), F.max_pool2d(x, 13, 1, 6)], 1)

    made = region(pyramid, torch.randn(2, 3, 14, 15))
    *parts, whole = made.passed().kernels
    sizes = [{axis.size for node in kernel.nodes if isinstance(node, Window) for axis in node.axes} for kernel in parts]
    assert set().union(*sizes) == {9, 13}
    assert {axis.size for node in whole.nodes if isinstance(node, Window) for axis in node.axes} == {3}
    made.check()


WRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "copy": lambda x: torch.zeros_like(x).copy_(x[0]),
    "fill": lambda x: torch.zeros_like(x).fill_(x[0, 0, 0]),
    "into a slice": lambda x: _assigned(x.clone()),
    "into what was empty": lambda x: torch.empty_like(x).copy_(x) + torch.empty(5, dtype=F64).fill_(2),
}


def _assigned(x: Tensor) -> Tensor:
    x[:, 0] = 1
    x[1].mul_(2)
    return x


@pytest.mark.parametrize("name", WRITES)
def test_write(name: str) -> None:
    region(Functional(WRITES[name]), torch.randn(4, 6, 5, dtype=F64)).check()


def test_reshapes_that_cancel_leave_no_division() -> None:
    made = region(lambda x: x.reshape(8, 15).reshape(2, 12, 5).reshape(-1).reshape(4, 6, 5) + 1, torch.randn(4, 6, 5))
    (load,) = made.program.kernels[0].loads()
    assert str(load.index) == "30*d0 + 5*d1 + d2"
