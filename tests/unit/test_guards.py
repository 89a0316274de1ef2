"""What must hold for a load that several parts of an expression make."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.ir.guards import either, guarded_loads
from fusepass.codegen.ir.index import Axis, Bound, axis_index
from fusepass.codegen.render import render
from fusepass.codegen.schedule import schedule
from fusepass.codegen.schedule.plan_flat import Transposed
from tests.support.emulate import needs_compiler
from tests.support.emulated import check_emulated
from tests.support.regions import region

FIRST, SECOND = axis_index(Axis("i", 10)), axis_index(Axis("j", 4))
ROW = Bound(SECOND, 1, 3)


def part(low: int, high: int) -> Bound:
    return Bound(FIRST, low, high)


@pytest.mark.parametrize(
    ("guards", "expected"),
    [
        ([(part(0, 3),)], (part(0, 3),)),
        ([(part(4, 10),), (part(0, 2),), (part(2, 4),)], ()),
        ([(part(2, 4),), (part(4, 6),)], (part(2, 6),)),
        ([(part(2, 6),), (part(3, 5),)], (part(2, 6),)),
        ([(part(0, 2),), (part(3, 10),)], None),
        ([(part(0, 2),), ()], ()),
        ([(ROW, part(0, 5)), (ROW, part(5, 10))], (ROW,)),
        ([(ROW, part(0, 5)), (ROW,)], (ROW,)),
        ([(ROW,), (part(0, 5),)], None),
        ([(ROW, part(0, 5)), (part(5, 10),)], None),
    ],
    ids=str,
)
def test_either(guards: list[tuple[Bound, ...]], expected: tuple[Bound, ...] | None) -> None:
    assert either(guards) == expected


def _boxes(x: Tensor) -> Tensor:
    return torch.cat((x[:, :2].sigmoid() * 2 - 0.5, (x[:, 2:4].sigmoid() * 2) ** 2, x[:, 4:].sigmoid()), 1)


def _rotated(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * 3 - b, b * 3 + a), -1)


@pytest.mark.parametrize(
    ("function", "always"), [(_boxes, 1), (_rotated, 1), (lambda x: torch.cat((x.sin(), x.exp()), 1), 0)]
)
def test_what_all_pieces_of_a_concatenation_load_is_always_loaded(
    function: Callable[[Tensor], Tensor], always: int
) -> None:
    (kernel,) = region(function, torch.empty(8, 10, 6)).passed().kernels
    (store,) = kernel.stores
    assert sum(guard == () for _, guard in guarded_loads([store.value])) == always


@needs_compiler
def test_such_a_load_crosses_tiles() -> None:
    torch.manual_seed(0)
    facts = DeviceFacts.h200()
    made = region(lambda x: _boxes(x).transpose(1, 2).contiguous(), torch.randn(8, 85, 640))
    program = made.passed(pass_options(facts))
    (kernel,) = program.kernels
    assert isinstance(schedule(kernel, program, facts), Transposed)
    assert "_tile[" in render(program, facts).text
    check_emulated(made, program, facts, 1e-5, 1e-6)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_that_take_iterations_within_a_vector_are_no_branches(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    facts = DeviceFacts.h200()

    def waves(x: Tensor) -> Tensor:
        steps = torch.arange(1, 65, device=x.device)
        return torch.stack(((x / steps).sin(), (x / steps).cos()), -1).flatten(1)

    made = region(waves, torch.randn(4096, 1).to(dtype))
    program = made.passed(pass_options(facts))
    assert schedule(program.kernels[-1], program, facts).width > 1
    check_emulated(made, program, facts, 1e-5 if dtype is torch.float32 else 1e-2)
