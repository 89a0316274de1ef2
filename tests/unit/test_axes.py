"""Loops in the order of memory, merged where nothing tells their axes apart, split where division would remain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.ir.program import Kernel
from fusepass.codegen.passes.axes import rename_axes, split_axes
from fusepass.codegen.schedule import schedule
from fusepass.codegen.schedule.plan_flat import Pointwise, Transposed
from tests.support.regions import NO_SPLIT, region

F64 = torch.float64


def _sizes(kernel: Kernel) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(axis.size for axis in kernel.rows), tuple(axis.size for axis in kernel.cols)


def _images() -> Tensor:
    return torch.randn(2, 6, 4, 5, dtype=F64)


Input = Callable[[], Tensor]
CASES: dict[str, tuple[Callable[[Tensor], Any], Input, tuple[tuple[int, ...], tuple[int, ...]]]] = {
    "pointwise is one axis": (lambda x: x + 1, _images, ((240,), ())),
    "a bias per channel splits it in three": (lambda x: x + x[:1, :, :1, :1], _images, ((2, 6, 20), ())),
    "channels_last": (
        lambda x: x + x[:1, :, :1, :1], lambda: _images().to(memory_format=torch.channels_last), ((40, 6), ())
    ),
    "transposed input": (lambda x: x * 2, lambda: torch.randn(5, 7, dtype=F64).t(), ((35,), ())),
    "expanded input": (lambda x: x + 1, lambda: torch.randn(3, 1, dtype=F64).expand(3, 4), ((3, 4), ())),
    "every second": (lambda x: x + 1, lambda: torch.randn(3, 8, dtype=F64)[:, ::2], ((12,), ())),
    "rows of channels": (lambda x: F.layer_norm(x, (6, 4, 5)), _images, ((2,), (120,))),
    "columns around the rows": (lambda x: F.batch_norm(x, None, None, training=True), _images, ((6,), (2, 20))),
    "groups": (lambda x: F.group_norm(x, 3), _images, ((6,), (40,))),
    "groups of channels_last": (
        lambda x: F.group_norm(x, 3), lambda: _images().to(memory_format=torch.channels_last), ((2, 3), (20, 2))
    ),
    "rows as they are read, if they are written across": (
        lambda x: F.layer_norm(x, (5,)).contiguous(),
        lambda: _images().to(memory_format=torch.channels_last),
        ((2, 4, 6), (5,)),
    ),
    "softmax over channels": (lambda x: x.softmax(1), _images, ((2, 20), (6,))),
    "one element": (lambda x: x + 1, lambda: torch.randn(1, 1, 1, dtype=F64), ((1,), ())),
    "ones are dropped": (lambda x: x.sum(2), lambda: torch.randn(3, 1, 5, 1, dtype=F64), ((3,), (5,))),
    "everything": (lambda x: x.sum(), _images, ((), (240,))),
    "a flip is not merged": (lambda x: x.flip(1) + 1, lambda: torch.randn(3, 4, dtype=F64), ((3, 4), ())),
    "a flip of all is": (lambda x: x.flip(0, 1) + 1, lambda: torch.randn(3, 4, dtype=F64), ((12,), ())),
}  # fmt: skip


def test_rows_lie_as_in_what_is_large_though_that_does_not_depend_on_all_of_them() -> None:
    """Sums of three stacked tensors, in pieces: the pieces' own results depend on which tensor it is, and lie otherwise."""
    given = (torch.empty(4096, 768, device="meta") for _ in range(3))
    made = region(lambda *x: torch.stack(x).sum(1), *given, cuda=True)
    first, _ = made.passed(pass_options(DeviceFacts.h200())).kernels
    assert all(load.index.stride(first.rows[-1]) == 1 for load in first.loads())


@pytest.mark.parametrize("name", CASES)
def test_loops(name: str) -> None:
    function, make, sizes = CASES[name]
    made = region(function, make())
    program = made.passed(NO_SPLIT)
    (kernel,) = program.kernels
    assert _sizes(kernel) == sizes
    made.check(program)


def test_the_last_axis_is_the_fastest_in_what_is_stored() -> None:
    """A scattered store costs more than a scattered load."""
    made = region(lambda x: (x * 2).t().contiguous(), torch.randn(5, 7, dtype=F64))
    (kernel,) = made.passed(NO_SPLIT).kernels
    assert _sizes(kernel) == ((7, 5), ())
    (store,) = kernel.stores
    assert [store.index.stride(axis) for axis in kernel.rows] == [5, 1]


def test_names_are_short_and_stable() -> None:
    made = region(lambda x: x.softmax(1), _images())
    (kernel,) = made.passed(NO_SPLIT).kernels
    assert [axis.name for axis in (*kernel.rows, *kernel.cols)] == ["i0", "i1", "j0"]
    assert rename_axes(kernel, made.builder) == kernel


def test_split_axes_iterations_quotients_into_axes() -> None:
    made = region(lambda x: x.reshape(2, 3, 2, 20).permute(1, 0, 2, 3).reshape(3, 80) + 1, _images())
    (kernel,) = made.program.kernels
    assert "//" in str([str(load.index) for load in kernel.loads()])
    split = split_axes(kernel, made.builder)
    assert _sizes(split) == ((3, 2, 2, 20), ())
    (load,) = split.loads()
    assert "//" not in str(load.index)
    assert "%" not in str(load.index)


def test_an_axis_is_split_where_another_part_of_it_is_nearest() -> None:
    """Groups of channels that lie last change places: what is written along the positions is read along channels of a group."""
    x = torch.randn(2, 128, 6, 8).contiguous(memory_format=torch.channels_last)
    made = region(lambda x: F.channel_shuffle(x, 4), x)
    program = made.passed(pass_options(DeviceFacts.h200()))
    made.check(program)
    (kernel,) = program.kernels
    assert 32 in [axis.size for axis in kernel.rows]
    assert isinstance(schedule(kernel, program, DeviceFacts.h200()), Transposed)
    near = region(lambda x: F.pixel_shuffle(x, 2), torch.randn(2, 16, 8, 8)).passed(pass_options(DeviceFacts.h200()))
    assert isinstance(schedule(near.kernels[0], near, DeviceFacts.h200()), Pointwise)
