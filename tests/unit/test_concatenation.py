"""Many pieces of a concatenation: what a thread loads of them goes into one variable."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.ir.concatenation import alike, concatenations
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Builder, Expr, Op
from fusepass.codegen.ir.index import Axis, Bound, axis_index
from fusepass.codegen.render import render
from tests import compile_cuda
from tests.support.emulate import needs_compiler
from tests.support.emulated import check_emulated
from tests.support.regions import region

H200 = DeviceFacts.h200()


def _normalised(*pieces: Tensor) -> Tensor:
    return F.batch_norm(torch.cat(pieces, 1), None, None, training=True).relu()


def _twice_a_piece(*pieces: Tensor) -> Tensor:
    return _normalised(pieces[0] * 2, *pieces[1:])


def _pointwise(*pieces: Tensor) -> Tensor:
    return torch.cat(pieces, 1).relu() + 1


def _scanned(*pieces: Tensor) -> Tensor:
    return torch.cat(pieces, 1).flatten(2).cumsum(2) * 2


CASES: dict[str, tuple[Callable[..., Tensor], int, torch.dtype, int, int]] = {
    "normalised": (_normalised, 70, torch.float32, 1, 69),
    "halves": (_normalised, 70, torch.bfloat16, 1, 69),
    "one of them twice": (_twice_a_piece, 70, torch.float32, 1, 69),
    "pointwise": (_pointwise, 70, torch.float32, 1, 69),
    "scanned": (_scanned, 70, torch.float32, 1, 69),
    "few": (_normalised, 5, torch.float32, 5, 0),
    "few and pointwise": (_pointwise, 20, torch.float32, 20, 0),
}
"""A function of how many pieces of a type; into how many variables they are loaded, and how often another one is where one is not."""


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_pieces(name: str) -> None:
    torch.manual_seed(0)
    function, count, dtype, variables, others = CASES[name]
    made = region(function, *(torch.randn(2, 1 + n % 3, 8, 98).to(dtype) for n in range(count)))
    program = made.passed(pass_options(H200))
    source = render(program, H200)
    compile_cuda.keep(source)
    text = source.text
    assert text.count(" = {};") == variables
    assert text.count("else if (") == others
    assert ("masked" in text) is (name not in ("normalised", "halves", "pointwise", "scanned"))
    check_emulated(made, program, H200, 1e-5 if dtype is torch.float32 else 2e-2)


def _chosen(ends: list[tuple[int, int]], values: list[Expr], builder: Builder, last: Expr) -> Expr:
    index = axis_index(Axis("i", 12))
    for (low, high), value in zip(ends, values, strict=True):
        last = builder.masked((Bound(index, low, high),), value, last)
    return last


@pytest.mark.parametrize(
    ("ends", "found"),
    [
        ([(0, 4), (4, 12)], True),
        ([(4, 12), (0, 4)], True),
        ([(0, 4), (4, 8), (8, 12)], True),
        ([(0, 4), (4, 11)], False),  # padding
        ([(0, 4), (5, 12)], False),
        ([(0, 5), (4, 12)], False),
        ([(3, 9)], False),
    ],
)
def test_what_is_a_concatenation(ends: list[tuple[int, int]], found: bool) -> None:
    builder, index = Builder(), axis_index(Axis("i", 12))
    loads = [builder.load(f"x{number}", index, DType.F32) for number in range(len(ends))]
    whole = _chosen(ends, loads, builder, builder.const(0, DType.F32))
    outside = builder.apply(Op.ADD, whole, builder.const(1.0, DType.F32))
    made = list(concatenations([outside]))
    assert [each.whole for each in made] == ([whole] if found else [])
    if found:
        assert [(bound.low, bound.high) for bound, _ in made[0].pieces] == sorted(ends)


def test_functions_of_what_is_loaded_are_alike() -> None:
    builder, index = Builder(), axis_index(Axis("i", 12))
    x, y, half = (
        builder.load(*each) for each in (("x", index, DType.F32), ("y", index, DType.F32), ("z", index, DType.F16))
    )
    two, three = (builder.const(number, DType.F32) for number in (2.0, 3.0))
    assert alike(builder.apply(Op.MUL, x, two), builder.apply(Op.MUL, y, two))
    assert not alike(builder.apply(Op.MUL, x, two), builder.apply(Op.MUL, y, three))
    assert not alike(builder.apply(Op.MUL, x, two), builder.apply(Op.ADD, y, two))
    assert not alike(x, half)
    assert not alike(x, builder.apply(Op.NEG, y))


def test_pieces_that_a_slice_leaves_out_are_not_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    def nested(x: Tensor) -> Tensor:
        for _ in range(40):
            x = torch.cat([torch.tanh(x), x], 1)[:, :8]
        return x + 1

    applied: list[Op] = []
    apply = Builder.apply
    monkeypatch.setattr(
        Builder, "apply", lambda self, op, *args, **kwargs: applied.append(op) or apply(self, op, *args, **kwargs)
    )
    region(nested, torch.randn(2, 8))
    assert sum(op is Op.TANH for op in applied) == 40


def test_concatenations_of_what_is_read_of_others_grow_with_their_number() -> None:
    """Not by a factor with each: what would be computed at many places is computed once."""

    def sliced(count: int) -> Callable[[Tensor], Tensor]:
        def net(x: Tensor) -> Tensor:
            parts = [x]
            for number in range(count):
                joined = torch.cat(parts, 1)
                parts.append(torch.tanh(joined[:, number : number + 8] * 1.1) + joined[:, -8:])
            return torch.cat(parts, 1)

        return net

    made = {count: region(sliced(count), torch.randn(2, 8)) for count in (8, 16)}
    lengths = {count: len(render(each.passed(), DeviceFacts.cpu(cores=2)).text) for count, each in made.items()}
    assert lengths[16] < 3 * lengths[8]
    assert lengths[16] < 100_000
    made[8].check()
