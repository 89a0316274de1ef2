"""Fake tensors of operators that ran before: as PyTorch gives them, without PyTorch being asked again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fusepass.capture import known_shapes as module
from fusepass.capture.known_shapes import known_shapes

aten = torch.ops.aten

OPERATORS: dict[str, Callable[[Tensor], Any]] = {
    "new": lambda x: aten.add.Tensor(x, x),
    "type": lambda x: aten._to_copy.default(x, dtype=torch.bfloat16),
    "several": lambda x: aten.native_layer_norm.default(x, [6], None, None, 1e-5),
    "view": lambda x: aten.permute.default(x, [1, 0]),
    "view behind the beginning": lambda x: aten.slice.Tensor(x, 0, 1, 3),
    "several views": lambda x: aten.split.Tensor(x, 2),
    "view as another type": lambda x: aten.view.dtype(x, torch.int32),
    "no tensor that is an argument": lambda x: aten._unsafe_view.default(x, [24]),
    "nothing of its own": lambda x: aten.to.dtype(x, torch.float32),
    "constructor": lambda x: aten.arange.default(x.shape[0], device="cpu"),
}


@pytest.fixture(autouse=True)
def nothing_known() -> Any:
    with mock.patch.object(module, "_known", {}):
        yield


def described(result: Any, base: Tensor) -> list[Any]:
    """All that one may know of fake results of an operator on `base`."""
    parts = result if isinstance(result, tuple | list) else [result]
    return [
        (
            tuple(part.shape), part.stride(), part.dtype, part.device, part.storage_offset(), part.requires_grad, part is base,
            part.untyped_storage()._cdata == base.untyped_storage()._cdata, part.fake_mode is base.fake_mode,
        )
        for part in parts
    ]  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
def test_results_look_as_pytorch_s(name: str) -> None:
    with FakeTensorMode():
        x, other = torch.empty(4, 6), torch.empty(4, 6)
        wanted = OPERATORS[name](x)
        with known_shapes():
            first, second, third = (OPERATORS[name](each) for each in (x, x, other))
    assert described(first, x) == described(second, x) == described(third, other) == described(wanted, x)
    assert first is not second or first is x


@pytest.mark.parametrize("name", ["new", "type", "several", "view", "view behind the beginning", "several views"])
def test_pytorch_is_asked_once(name: str) -> None:
    asked: list[Any] = []
    run = FakeTensorMode._dispatch_impl

    def count(mode: Any, func: Any, *rest: Any) -> Any:
        asked.append(func)
        return run(mode, func, *rest)

    with mock.patch.object(FakeTensorMode, "_dispatch_impl", count), mock.patch.object(FakeTensorMode, "cache", {}):
        for number in range(3):
            with FakeTensorMode(), known_shapes():  # another mode, as each capture has one
                x = torch.empty(4, 6)
                before = len(asked)
                OPERATORS[name](x)
                OPERATORS[name](x)
            again, asked[before:] = asked[before:], []
            if number:
                assert again == []
            else:
                assert again


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.double(),
        lambda x: x[:3],
        lambda x: x.t(),
        lambda x: torch.empty(4, 6, device="meta"),
    ],
)
def test_other_looks_are_other_results(change: Callable[[Tensor], Tensor]) -> None:
    with FakeTensorMode():
        x = torch.empty(4, 6)
        other = change(x)
        wanted = aten.mul.Tensor(other, 2)
        with known_shapes():
            aten.mul.Tensor(x, 2)
            got = aten.mul.Tensor(other, 2)
    assert described(got, other) == described(wanted, other)


def test_numbers_of_other_types_are_other_arguments() -> None:
    with FakeTensorMode(), known_shapes():
        x = torch.empty(3, dtype=torch.int64)
        assert [aten.mul.Tensor(x, number).dtype for number in (1, 1.0, True)] == [
            torch.int64,
            torch.float32,
            torch.int64,
        ]


def test_writes_and_sizes_of_symbols_are_left_to_pytorch() -> None:
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)
    with known_shapes(), mode:
        x = torch.empty(3)
        version = x._version
        assert aten.add_.Tensor(x, 1) is x
        assert aten.add_.Tensor(x, 1) is x
        assert x._version > version
        size = shapes.create_unbacked_symint()
        a, b = (torch.empty(size) for _ in range(2))
        assert str(aten.add.Tensor(a, a).shape[0]) == str(aten.add.Tensor(b, b).shape[0]) == str(size)
    assert not any(key[1] is aten.add_.Tensor for key in module._known)


def test_constants_keep_their_numbers() -> None:
    with FakeTensorMode(), known_shapes():
        numbers = [torch.tensor(number) for number in (2, 3)]
        assert [int(each * 2) for each in numbers] == [4, 6]


def test_what_is_known_has_a_bound() -> None:
    with mock.patch.object(module, "_MOST", 4), FakeTensorMode(), known_shapes():
        for size in range(20):
            aten.neg.default(torch.empty(size))
            assert len(module._known) <= 4


def test_other_threads_and_later_calls_have_pytorch_s() -> None:
    with FakeTensorMode():
        x = torch.empty(3)
        with known_shapes(), known_shapes():
            aten.exp.default(x)
        count = len(module._known)
        aten.log.default(x)
    assert len(module._known) == count > 0


def test_a_version_without_these_methods_does_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_UP", "under_another_name")
    with FakeTensorMode() as mode, known_shapes():
        x = mode.from_tensor(torch.empty(3, 4))
        assert (x + 1).shape == (3, 4)
    assert not hasattr(FakeTensorMode, "under_another_name")
