"""Results in the memory of what nobody reads any more: when they may be there, and that they are the same bits there."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fusepass
from fusepass.capture.trace import Captured, capture
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir import updates
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Builder, Op
from fusepass.codegen.ir.index import Axis, Index, axis_index
from fusepass.codegen.ir.program import Buffer, Kernel, LibraryCall, Program, Ref, Role, Store, Team
from fusepass.codegen.ir.updates import read_in_place, recycled
from fusepass.codegen.outlines import outline_data, outline_of
from fusepass.codegen.render import render
from fusepass.compile.pipeline import compile_graph
from fusepass.config import override
from fusepass.runtime import fast_path, operators
from fusepass.runtime.region import FusedRegion
from tests.support.emulate import emulate, needs_compiler
from tests.support.interpreted import interpreted
from tests.support.regions import NO_SPLIT, region

F32 = DType.F32
B = Builder()
ROW, COLUMN = Axis("i", 8), Axis("j", 4)
HERE = axis_index(ROW) * 4 + axis_index(COLUMN)
ACROSS = axis_index(COLUMN) * 8 + axis_index(ROW)
CONVOLUTION = LibraryCall("c", "aten.convolution.default", (Ref("x"),))


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "LEAST_BYTES", 1)


# ---- programs


def sum_of(target: str, *read: str | tuple[str, Index], index: Index = HERE, **changes: Any) -> Kernel:
    """A kernel that stores the sum of what it reads, at the element that it stores unless told otherwise."""
    loads = [B.load(*(each if isinstance(each, tuple) else (each, HERE)), F32) for each in read]
    value = loads[0]
    for load in loads[1:]:
        value = B.apply(Op.ADD, value, load)
    return replace(Kernel(target, (ROW, COLUMN), (), (), (), (Store(target, index, value),)), **changes)


def buffer(name: str, role: Role, shape: tuple[int, ...] = (8, 4), **changes: Any) -> Buffer:
    strides = tuple(4 if dim == 0 and len(shape) == 2 else 1 for dim in range(len(shape)))
    return replace(Buffer(name, F32, shape, strides, role), **changes)


X, Y, C, OUT = (
    buffer(*each) for each in (("x", Role.INPUT), ("y", Role.INPUT), ("c", Role.ANCHOR), ("out", Role.OUTPUT))
)
LATER = buffer("later", Role.OUTPUT)


def program(*kernels: Kernel, buffers: tuple[Buffer, ...] = (X, Y, OUT), **changes: Any) -> Program:
    outputs = tuple(each.name for each in buffers if each.role is Role.OUTPUT)
    made = Program("p", buffers, ("x", "y"), outputs, (), kernels, (), ("y",))
    return replace(made, **changes)


SUM = sum_of("out", "x", "y")
TWO = replace(SUM, stores=(Store("later", HERE, B.load("y", HERE, F32)), *SUM.stores))
WITH_CALL: dict[str, Any] = {"buffers": (X, Y, C, OUT), "calls": (CONVOLUTION,)}
PROGRAMS: dict[str, tuple[Program, tuple[tuple[str, str], ...]]] = {
    "an input that dies": (program(SUM), (("out", "y"),)),
    "one that lives": (program(SUM, dying=()), ()),
    "each once": (
        program(SUM, sum_of("later", "x"), buffers=(X, Y, OUT, LATER), dying=("x", "y")), (("out", "y"), ("later", "x"))
    ),
    "what the library gave": (program(sum_of("out", "c", "y"), **WITH_CALL), (("out", "c"),)),
    "what the library made a view of": (
        program(sum_of("out", "c"), **WITH_CALL | {"calls": (replace(CONVOLUTION, target="aten.t.default"),)}), ()
    ),
    "what the library gave and reads again": (
        program(
            sum_of("out", "c", "d"), buffers=(X, Y, C, buffer("d", Role.ANCHOR), OUT), dying=(),
            calls=(CONVOLUTION, LibraryCall("d", "aten.t.default", (Ref("c"),))),
        ), ()
    ),
    "what the library gave is a result": (program(sum_of("out", "c"), **WITH_CALL, dying=(), outputs=("out", "c")), ()),
    "what the library reads": (program(SUM, **WITH_CALL | {"calls": (replace(CONVOLUTION, args=(Ref("y"),)),)}), ()),
    "the same memory in another shape": (
        program(SUM, buffers=(X, buffer("y", Role.INPUT, (32,)), OUT)), (("out", "y"),)
    ),
    "of another size": (program(SUM, buffers=(X, buffer("y", Role.INPUT, (9, 4)), OUT)), ()),
    "with gaps": (program(SUM, buffers=(X, buffer("y", Role.INPUT, strides=(8, 1)), OUT)), ()),
    "elements that share memory": (program(SUM, buffers=(X, buffer("y", Role.INPUT, strides=(0, 1)), OUT)), ()),
    "of another type": (program(SUM, buffers=(X, buffer("y", Role.INPUT, dtype=DType.I32), OUT)), ()),
    "another element": (program(sum_of("out", "x", ("y", HERE * -1 + 31))), ()),
    "this element and another": (program(sum_of("out", "y", ("y", HERE * -1 + 31))), ()),
    "the other way round": (program(sum_of("out", "x", ("y", ACROSS))), ()),
    "what is read beside it crosses shared memory": (program(sum_of("out", ("x", ACROSS), "y")), ()),
    "an earlier kernel reads it all": (
        program(sum_of("later", ("y", ACROSS)), sum_of("out", "x"), buffers=(X, Y, OUT, LATER)), (("out", "y"),)
    ),
    "a later kernel reads it": (program(SUM, sum_of("later", "y"), buffers=(X, Y, OUT, LATER)), (("later", "y"),)),
    "a later kernel may not be launched": (
        program(SUM, sum_of("later", "x", team=Team(2, 1, "exchange")), buffers=(X, Y, OUT, LATER)), (("later", "y"),)
    ),
    "the last thing stored of an element": (program(TWO, buffers=(X, Y, LATER, OUT)), (("out", "y"),)),
    "not the last thing stored of an element": (
        program(replace(TWO, stores=TWO.stores[::-1]), buffers=(X, Y, OUT)), ()
    ),
    "the kernel may have nothing to do": (program(replace(SUM, when="x")), ()),
    "another kernel writes the rest": (program(replace(SUM, rest=True)), ()),
    "it is to be written over another input": (program(SUM, updates=(("out", "x"),)), ()),
    "not read at all": (program(sum_of("out", "x")), ()),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_a_result_may_take(name: str) -> None:
    made, expected = PROGRAMS[name]
    assert recycled(made) == expected
    assert recycled(outline_of(outline_data(made))) == expected


def test_small_results_have_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "LEAST_BYTES", OUT.nbytes + 1)
    assert recycled(program(SUM)) == ()


@pytest.mark.parametrize("facts", [DeviceFacts.h200(), DeviceFacts.cpu(2)], ids=["cuda", "cpu"])
def test_kernels_promise_nothing_of_memory_that_they_may_share(facts: DeviceFacts) -> None:
    for dying, own in (("y",), {"y", "out"}), ((), set()):
        made = program(SUM, dying=dying)
        text = render(made, facts).text
        assert read_in_place(made) == own
        assert {
            name for promised, name in re.findall(r"float\*( __restrict\w*)? (x|y|out)[,)]", text) if not promised
        } == own


def normed(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    total = x + y
    return total, torch.nn.functional.layer_norm(total, total.shape[-1:])


KERNELS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], int]] = {
    "elements": (lambda x, y: torch.relu(x + y * 2), ((37, 53),) * 2, 1),
    "channels": (lambda x, s, y: torch.relu(x * s[:, None] + y), ((5, 6, 49), (6,), (5, 6, 49)), 1),
    "short rows": (lambda x: x.softmax(1), ((301, 7),), 1),
    "rows": (lambda x: x.softmax(1), ((9, 1024),), 1),
    "rows that begin anywhere": (lambda x: x.softmax(1), ((9, 1003),), 1),
    "rows that are read again": (lambda x: x.log_softmax(1), ((2, 30_011),), 1),
    "two results": (normed, ((19, 96),) * 2, 1),
    "columns": (lambda x: x.softmax(1), ((3, 20, 33),), 0),
    "crossing": (lambda x, y: x.t() + y, ((64, 96), (96, 64)), 0),
}


@needs_compiler
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernels_give_the_same_bits_in_shared_memory(name: str, dtype: torch.dtype) -> None:
    function, shapes, count = KERNELS[name]
    generator = torch.Generator().manual_seed(3)
    made = region(function, *(torch.randn(shape, generator=generator).to(dtype) for shape in shapes))
    passed = made.passed(NO_SPLIT)
    passed = replace(passed, dying=passed.inputs)
    assert len(recycled(passed)) == count
    memory = made.memory(passed)
    source = render(passed, DeviceFacts.h200())
    apart, shared = (emulate(passed, source, memory, in_place=in_place) for in_place in (False, True))
    assert all((apart[output] == shared[output]).all() for output in passed.outputs)


# ---- graphs


class Model(nn.Module):
    """A function of inputs and, where it takes them, of weights."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.linspace(-1, 1, 256)) if "weight" in signature(function).parameters else None

    def forward(self, *given: Tensor) -> Any:
        return self.function(*given) if self.weight is None else self.function(*given, weight=self.weight)


def poisoned(*described: Any) -> Tensor:
    made: Tensor = torch._C._dynamo.guards._empty_strided_cpu(*described)
    ctypes.memset(made.data_ptr(), 0xFF, made.untyped_storage().nbytes())
    return made


@contextmanager
def noted(on: bool = True) -> Iterator[list[str]]:
    """While open, models are optimised with memory that is taken again, or that is not; gets what was taken. New memory is not what it was."""
    found: list[str] = []
    reusing = FusedRegion.reusing

    def noting(region: FusedRegion, dying: Collection[int]) -> FusedRegion:
        made = reusing(region, dying)
        found.extend(made.reused.values())
        return made

    with (
        override(tune="off", debug=True),
        mock.patch.object(updates, "LEAST_BYTES", 1 if on else 1 << 60),
        mock.patch.dict(operators.EMPTY, cpu=poisoned),
        mock.patch.object(FusedRegion, "reusing", noting),
    ):
        yield found


def sort(x: Tensor) -> Tensor:
    """As large as `x`, and made by no region."""
    return x.sort(-1).values


def dies(x: Tensor) -> Tensor:
    y = x.sin() * 2
    return (sort(y) + y).cos()


def is_returned(x: Tensor) -> tuple[Tensor, ...]:
    y = x.sin() * 2
    return (sort(y) + y).cos(), y


def a_view_is_returned(x: Tensor) -> tuple[Tensor, ...]:
    y = x.sin() * 2
    return (sort(y) + y).cos(), y.view(16, 16)


def is_read_later(x: Tensor) -> Tensor:
    y = x.sin() * 2
    return sort(y * 3 * sort((sort(y) + y).cos())[255])


def a_view_is_read_later(x: Tensor) -> Tensor:
    y = x.sin() * 2
    z = sort((sort(y) + y).cos())
    return sort(y.view(16, 16)).view(256) + z


def is_given_twice(x: Tensor) -> Tensor:
    y = x.sin() * 2
    return sort(y) + y * y.view(16, 16).t().reshape(256)


def is_a_part(x: Tensor) -> Tensor:
    y = x.sin() * 2
    return (sort(y)[:64] + y[64:128]).cos()


def an_input(x: Tensor) -> Tensor:
    return sort(x) + x * 2


def a_view_of_an_input(x: Tensor) -> Tensor:
    y = x.view(16, 16)
    return sort(y) + y * 2


def a_parameter(x: Tensor, weight: Tensor) -> Tensor:
    return sort(x) * 2 + weight


def one_after_another(x: Tensor) -> Tensor:
    y = x.sin() * 2
    z = (sort(y) + y).cos()
    return (sort(z) + z).cos()


def an_operator_gave_it(x: Tensor) -> Tensor:
    y = torch.renorm(x.view(16, 16), 2, 0, 3.0).view(256)
    return (sort(y) + y).cos()


GRAPHS: dict[Callable[..., Any], int] = {
    dies: 1, is_returned: 0, a_view_is_returned: 0, is_read_later: 0, a_view_is_read_later: 0, is_given_twice: 0, is_a_part: 0,
    an_input: 0, a_view_of_an_input: 0, a_parameter: 0, one_after_another: 2, an_operator_gave_it: 1,
}  # fmt: skip


@pytest.mark.parametrize("function", GRAPHS, ids=lambda function: function.__name__)
def test_which_arguments_give_their_memory(function: Callable[..., Any]) -> None:
    x = torch.randn(256)
    before, model = x.clone(), Model(function)
    with torch.no_grad(), interpreted(), noted() as taken:
        fused = fusepass.optimize(model)
        found = [as_tuple(fused(x)) for _ in range(3)]
        eager = as_tuple(model(x))
    assert len(taken) == GRAPHS[function], (taken, fused.report())
    assert torch.equal(x, before)
    for results in found:
        torch.testing.assert_close(results, eager)
        assert not any(result._is_view() for result in results[:1])
    apart = {result.data_ptr() for results in found for result in results[:1]} | {x.data_ptr()}
    assert len(apart) == len(found) + 1


def test_what_is_saved_for_backward_stays() -> None:
    """Results of forward for backward, and gradients of what dies."""
    x = torch.randn(256)
    for function in (dies, one_after_another, is_read_later):
        model = Model(function)
        gradients = []
        with interpreted(), noted():
            for call in (fusepass.optimize(model), model):
                given = x.clone().requires_grad_()
                call(given).square().sum().backward()
                gradients.append(given.grad)
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@needs_compiler
@pytest.mark.parametrize("without_python", [False, True])
def test_a_result_lies_where_its_argument_lay(without_python: bool) -> None:
    """In the launcher of Python and in that of C++; an argument that is not aligned stays as it is."""
    if without_python:
        fast_path.wait()
    regions: list[FusedRegion] = []
    with torch.no_grad(), noted(), mock.patch.object(FusedRegion, "stay", lambda region: regions.append(region)):
        fusepass.optimize(Model(dies))(torch.randn(256))
    region = next(each for each in regions if each.reused)
    run = region.launcher() if without_python else region.run
    (name,) = region.reused.values()
    program = region.generated.outline
    place = region.used[program.inputs.index(name)]
    for shift in (0, 1):
        arguments = [torch.randn(257)[shift : 256 + shift] for _ in region.inputs]
        wanted = region.original(*(each.clone() for each in arguments))
        before = [each.clone() for each in arguments]
        result = run(*arguments)
        torch.testing.assert_close(result, wanted)
        assert not result._is_view()
        assert (result.data_ptr() == arguments[place].data_ptr()) == (not shift)
        for number, (each, was) in enumerate(zip(arguments, before, strict=True)):
            assert torch.equal(each, was if shift or number != place else result)


def test_trials_leave_their_inputs_alone() -> None:
    """A region whose argument may die writes to memory of its own until its graph calls it."""
    with torch.no_grad(), interpreted(), noted() as taken:
        captured = capture(Model(dies), (torch.randn(256),), {})
        assert isinstance(captured, Captured)
        compiled = compile_graph(captured.graph, name="model")
    assert len(taken) == 1
    assert [each.reused for each in compiled.called.values()] == [{}, {}]
    assert any(recycled(each.generated.outline) for each in compiled.called.values())


def drawn(seed: int) -> Callable[..., Any]:
    """A function of some twenty steps, many of them regions, over values that later steps read, view or return."""

    def steps(x: Tensor) -> tuple[Tensor, ...]:
        rest, values = Random(seed), [x]
        for _ in range(20):
            a, b = (values[-1 - min(int(rest.expovariate(0.7)), len(values) - 1)] for _ in range(2))
            match rest.randrange(8):
                case 0 | 1:
                    values.append((a + b.flatten().view(a.shape)).cos())
                case 2:
                    values.append(a.sin() * 2)
                case 3:
                    values.append(sort(a))
                case 4:
                    values.append(a.view(16, 16) if a.dim() == 1 else a.view(256))
                case 5:
                    values.append((a.view(16, 16).t() if a.dim() == 1 else a.t()).softmax(-1) - 0.5)
                case 6 | 7:
                    values.append((sort(a) + a).cos())
        return (values[-1], *rest.sample(values[1:], rest.randrange(3)))

    return steps


@pytest.mark.parametrize("seed", range(10))
def test_random_graphs_give_the_same_bits(seed: int) -> None:
    """In memory that is taken again and in memory of their own, which is poisoned."""
    x = torch.randn(256, generator=torch.Generator().manual_seed(seed))
    before, results = x.clone(), []
    for on in (False, True):
        with torch.no_grad(), interpreted(), noted(on) as taken:
            fused = fusepass.optimize(Model(drawn(seed)))
            results += [fused(x) for _ in range(2)]
        assert bool(taken) <= on
    assert torch.equal(x, before)
    first, *others = results
    for other in others:
        assert all(map(torch.equal, first, other))
        assert not any(result._is_view() for result in other[:1] if not first[0]._is_view())


def test_random_graphs_take_memory_often() -> None:
    count = 0
    for seed in range(4):
        with torch.no_grad(), interpreted(), noted() as taken:
            fusepass.optimize(Model(drawn(seed)))(torch.randn(256))
        count += len(taken)
    assert count >= 4


def as_tuple(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)
