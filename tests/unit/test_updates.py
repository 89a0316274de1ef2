"""What a region writes over its inputs, such as running statistics: when it may, and that a call then does just what eager does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusepass
from fusepass.capture.trace import Captured, capture
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import generate
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Builder, Op
from fusepass.codegen.ir.index import Axis, Index, axis_index
from fusepass.codegen.ir.program import Buffer, Kernel, LibraryCall, Program, Ref, Role, Store, Team
from fusepass.codegen.ir.text import program_text
from fusepass.codegen.ir.updates import written_over
from fusepass.codegen.ir.verify import verify
from fusepass.codegen.lowering.lower import lower
from fusepass.codegen.passes.updates import store_once, write_last
from fusepass.codegen.render import render
from fusepass.compile.pipeline import CompiledGraph, compile_graph
from fusepass.compile.splice import subgraph
from fusepass.numerics.check import check
from fusepass.patterns.partition import partition
from fusepass.patterns.simplify import simplify
from fusepass.runtime.region import FusedRegion
from tests.support.emulate import emulate
from tests.support.interpret import interpret
from tests.support.noted import noted_regions
from tests.support.regions import memory_of

F32, I64 = DType.F32, DType.I64
B = Builder()
ROW = Axis("i", 8)
COUNTED = B.apply(Op.ADD, B.load("n", Index(), I64), B.const(1, I64))


def doubled(source: str, target: str, name: str, **changes: Any) -> Kernel:
    """A kernel that stores twice `source` in `target`."""
    value = B.apply(Op.MUL, B.load(source, axis_index(ROW), F32), B.const(2.0, F32))
    return replace(Kernel(name, (ROW,), (), (), (), (Store(target, axis_index(ROW), value),)), **changes)


COUNT = Kernel("count", (), (), (), (), (Store("m", Index(), COUNTED),), ("add",))
BUFFERS = (
    Buffer("x", F32, (8,), (1,), Role.INPUT),
    Buffer("n", I64, (), (), Role.INPUT),
    Buffer("new", F32, (8,), (1,), Role.OUTPUT),
    Buffer("m", I64, (), (), Role.OUTPUT),
    Buffer("out", F32, (8,), (1,), Role.OUTPUT),
)
UPDATES = (("new", "x"), ("m", "n"))


def updating(*kernels: Kernel, **changes: Any) -> Program:
    made = Program("p", BUFFERS, ("x", "n"), ("new", "m", "out"), (), kernels, UPDATES)
    return replace(made, **changes)


EARLY = (doubled("x", "new", "first"), COUNT, doubled("x", "out", "second"))
REVERSED = replace(EARLY[0], stores=(Store("new", axis_index(ROW), B.load("x", axis_index(ROW) * -1 + 7, F32)),))
LAST = (doubled("x", "out", "first"), doubled("out", "new", "second", once=COUNT.stores))

PROGRAMS: dict[str, tuple[Program, tuple[str, ...]]] = {
    "the last kernel writes what none reads any more": (updating(*LAST), ("new", "m")),
    "it reads what it writes over, element by element": (updating(*reversed(EARLY)), ("new", "m")),
    "it reads another element than it writes over": (updating(EARLY[2], COUNT, REVERSED), ("m",)),
    "it writes more than one number for an element": (
        updating(COUNT, replace(EARLY[0], stores=(*EARLY[0].stores, *EARLY[2].stores))), ("m",)
    ),
    "a later kernel reads what it writes over": (updating(LAST[1], LAST[0], doubled("x", "out", "third")), ("m",)),
    "a later kernel may not be launched": (
        updating(*LAST, replace(LAST[0], name="third", team=Team(2, 1, "exchange"))), ()
    ),
    "the last kernel is launched whole or not at all": (
        updating(LAST[0], replace(LAST[1], team=Team(2, 1, "exchange"))), ("new", "m")
    ),
    "the last kernel may have nothing to do": (
        updating(LAST[0], replace(LAST[1], once=(), when="x"), COUNT), ("m",)
    ),
    "another kernel writes the rest": (updating(LAST[0], replace(LAST[1], once=(), rest=True), COUNT), ("m",)),
    "the library reads it": (
        updating(*LAST, calls=(LibraryCall("y", "aten.t.default", (Ref("x"),)),)), ("m",)
    ),
    "it lies otherwise": (
        updating(*LAST, buffers=(replace(BUFFERS[0], shape=(16,)), *BUFFERS[1:])), ("m",)
    ),
    "nobody wants it": (updating(*LAST, updates=()), ()),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_may_be_written_over_an_input(name: str) -> None:
    program, expected = PROGRAMS[name]
    assert tuple(output for output, _ in written_over(program)) == expected


def test_nothing_is_written_where_a_place_may_be_outside() -> None:
    """The C++ kernels report that at the end, and then the original operators run, on inputs as they were."""
    with torch.no_grad():
        made = capture(nn.Sequential(nn.Embedding(5, 8), nn.Tanh()), (torch.tensor([1, 2]),), {})
    assert isinstance(made, Captured)
    (region,) = partition(made.graph).regions
    program, _ = lower(subgraph(made.graph, region), "region", [node.name for node in region.inputs])
    gathered = next(kernel for kernel in program.kernels if kernel.checks)
    assert written_over(updating(*LAST))
    assert written_over(replace(updating(*LAST), kernels=(*LAST, gathered))) == ()


@pytest.mark.parametrize("kernels", [EARLY, LAST], ids=["early", "last"])
def test_writes_come_last_and_counts_with_them(kernels: Sequence[Kernel]) -> None:
    program = updating(*kernels)
    made = store_once(write_last(program, B), B)
    verify(made)
    assert dict(written_over(made)) == dict(UPDATES)
    *_, last = made.kernels
    assert [store.buffer for store in last.stores] == ["new"]
    assert [store.buffer for store in last.once] == ["m"]
    assert "once" in program_text(made)
    assert "new may be written over x" in program_text(made)
    assert write_last(made, B) == made
    assert store_once(made, B) == made
    values = {"x": memory_of(torch.randn(8)), "n": memory_of(torch.tensor(41))}
    before, after = interpret(program, values), interpret(made, values)
    for facts in (DeviceFacts.h200(), DeviceFacts.cpu(2)):
        run = emulate(made, render(made, facts), values) if facts.name != "cpu" else after
        assert all((before[name] == found[name]).all() for name in program.outputs for found in (after, run))


def test_outputs_of_another_shape_are_left_to_the_caller() -> None:
    other = (Buffer("z", F32, (4,), (1,), Role.INPUT), Buffer("w", F32, (4,), (1,), Role.OUTPUT))
    j = Axis("j", 4)
    kernel = Kernel("w", (j,), (), (), (), (Store("w", axis_index(j), B.load("z", axis_index(j) * -1 + 3, F32)),))
    program = updating(*EARLY, kernel, buffers=(*BUFFERS, *other), updates=(*UPDATES, ("w", "z")))
    program = replace(program, inputs=("x", "n", "z"), outputs=("new", "m", "out", "w"))
    made = store_once(write_last(program, B), B)
    verify(made)
    assert dict(written_over(made)) == dict(UPDATES)


WAITING: dict[str, Sequence[Kernel]] = {
    "for another": (
        doubled("x", "out", "first"),
        Kernel("count", (), (), (), (), (Store("m", Index(), B.cast(B.load("out", Index(3), F32), I64)),)),
        doubled("out", "new", "second"),
    ),
    "by another": (
        COUNT,
        Kernel("out", (ROW,), (), (), (), (Store("out", axis_index(ROW), B.cast(B.load("m", Index(), I64), F32)),)),
        doubled("out", "new", "second"),
    ),
    "for one that may not run": (doubled("x", "out", "first"), COUNT, doubled("x", "new", "last", when="x")),
}


@pytest.mark.parametrize("name", WAITING)
def test_numbers_that_others_wait_for_have_a_kernel(name: str) -> None:
    program = updating(*WAITING[name])
    assert store_once(program, B) == program


class Norm(nn.Module):
    """A norm in training with something before and behind it, and what it counts."""

    def __init__(self, norm: nn.Module, before: nn.Module | None = None) -> None:
        super().__init__()
        self.before, self.norm = before or nn.Identity(), norm

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(self.before(x)).tanh()
        return result


class Sorted(nn.Module):
    """What is in no region."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sort(0)[0]


class Average(nn.Module):
    """Keeps an average of what it has seen, and how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 2
        self.average.lerp_(x.mean(0), 0.1)
        return (x - x.mean(0)) * 3


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "images": (lambda: Norm(nn.BatchNorm2d(6)), (4, 6, 5, 7)),
    "columns": (lambda: Norm(nn.BatchNorm1d(6)), (33, 6)),
    "behind a convolution": (lambda: Norm(nn.BatchNorm1d(6), nn.Conv1d(3, 6, 3)), (4, 3, 17)),
    "without weights": (lambda: Norm(nn.BatchNorm2d(6, affine=False)), (4, 6, 5, 7)),
    "statistics of a single call": (lambda: Norm(nn.BatchNorm1d(6, momentum=1.0)), (33, 6)),
    "instances": (lambda: Norm(nn.InstanceNorm1d(6, track_running_stats=True)), (4, 6, 50)),
    "averages": (Average, (20, 6)),
}


def compiled(model: nn.Module, x: Tensor) -> CompiledGraph:
    with torch.no_grad():
        made = capture(model, (x,), {})
        assert isinstance(made, Captured)
        return compile_graph(made.graph, name="model", exact_inputs=True)


def buffers(model: nn.Module) -> list[Tensor]:
    return [buffer.clone() for buffer in model.buffers()]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.invariant(34)
def test_a_call_writes_what_eager_writes(name: str) -> None:
    """Once for each call, and nothing but the region is called for it."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make().train()
    own = copy.deepcopy(model)
    with torch.no_grad(), fusepass.config.override(tune="off"):
        optimised = fusepass.optimize(own)
        for number in range(5):
            x = torch.randn(shape) + number
            versions = [buffer._version for buffer in own.buffers()]
            torch.testing.assert_close(optimised(x), model(x))
            for mine, eager in zip(own.buffers(), model.buffers(), strict=True):
                torch.testing.assert_close(mine, eager)
            told = [version < buffer._version for version, buffer in zip(versions, own.buffers(), strict=True)]
            assert told == [True] * len(told) or name == "instances"  # whose calls count nothing
        outcome = check(model, fusepass.optimize(model), (x,))
        assert outcome.ok, outcome.explain()
        graph = compiled(model, torch.randn(shape))
    assert "copy_" not in graph.call.__self__.code  # type: ignore[attr-defined]
    assert "copy_" in graph.graph_module.code  # which others may trace


@pytest.mark.parametrize("name", ["columns", "behind a convolution", "averages"])
def test_the_backend_writes_what_eager_writes(name: str) -> None:
    """Which does not say how the model's tensors lie in each call."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make().train()
    own = copy.deepcopy(model)
    with torch.no_grad():
        run = torch.compile(own, backend="fusepass", options={"tune": "off"})
        for number in range(4):
            x = torch.randn(shape) + number
            torch.testing.assert_close(run(x), model(x))
            torch.testing.assert_close(buffers(own), buffers(model))


def test_two_norms_are_written_by_calls() -> None:
    """Each of several regions would need a launch for its own."""
    model = nn.Sequential(Norm(nn.BatchNorm1d(6)), Sorted(), Norm(nn.BatchNorm1d(6))).train()
    graph = compiled(model, torch.randn(20, 6))
    assert graph.call.__self__.code.count("torch._foreach_") == 2  # type: ignore[attr-defined]


class Given(nn.Module):
    """Gives one of its buffers, which it has written."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm(x).relu() + 1, self.norm.running_mean  # type: ignore[return-value]


class Before(nn.Module):
    """Reads what it writes elsewhere, too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.sort(self.norm.running_mean)[0]  # type: ignore[arg-type]
        return self.norm(x).relu() + 1, first


@pytest.mark.parametrize("make", [Given, Before])
def test_what_is_written_and_given(make: Callable[[], nn.Module]) -> None:
    model = make().train()
    own = copy.deepcopy(model)
    with torch.no_grad():
        optimised = fusepass.optimize(own)
        for _ in range(3):
            x = torch.randn(30, 6) + 2
            for mine, eager in zip(optimised(x), model(x), strict=True):
                torch.testing.assert_close(mine, eager)
            torch.testing.assert_close(buffers(own), buffers(model))


def test_what_only_writes_is_left() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("a", torch.zeros(8))
            self.register_buffer("b", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            self.a += x * 2
            self.b += x * 3
            return x

    model = Counts()
    own = copy.deepcopy(model)
    with torch.no_grad():
        optimised = fusepass.optimize(own)
        for _ in range(3):
            x = torch.randn(8)
            optimised(x), model(x)
            torch.testing.assert_close(buffers(own), buffers(model))


# ---- the call


def writing(monkeypatch: pytest.MonkeyPatch, exact: bool = True) -> FusedRegion:
    """The region of a norm that writes over its arguments."""
    found = noted_regions(monkeypatch)
    with torch.no_grad(), fusepass.config.override(tune="off"):
        made = capture(Norm(nn.BatchNorm1d(6)).train(), (torch.randn(20, 6),), {})
        assert isinstance(made, Captured)
        compile_graph(made.graph, name="model", exact_inputs=exact)
    region = found[-1].writing([*found[-1].may_write])
    assert len(region.written) == 3
    return region


def arguments(region: FusedRegion, x: Tensor, statistics: Sequence[Tensor]) -> list[Tensor]:
    """For each of the region's inputs one of those: `x`, weights, or what is written, by its place."""
    given = [x if meta.shape == x.shape else torch.linspace(1, 2, 6) for meta in region.inputs]
    for number, place in enumerate(region.written.values()):
        given[place] = statistics[number]
    return given


def unaligned(tensor: Tensor) -> Tensor:
    room = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)
    room[1:] = tensor.flatten()
    return room[1:].view(tensor.shape)


def apart(tensor: Tensor) -> Tensor:
    return tensor[:, None].expand(-1, 2).clone()[:, 0] if tensor.dim() else tensor


ODD: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "as told": (torch.clone, True),
    "unaligned": (unaligned, True),
    "in gaps": (apart, False),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("without_python", [False, True])
def test_memory_that_lies_oddly_is_written(name: str, without_python: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lies, exact = ODD[name]
    region = writing(monkeypatch, exact)
    if without_python:
        fusepass.runtime.fast_path.wait()
    run = region.launcher() if without_python else region.run
    kinds = [region.outputs[number] for number in region.written]
    start = [lies((torch.rand(meta.shape) * 5).to(meta.dtype)) for meta in kinds]
    eager = [each.clone() for each in start]
    for _ in range(3):
        x = torch.randn(20, 6)
        given = arguments(region, x, start)
        result = run(*given)
        assert isinstance(result, Tensor)
        plain = region.original(*arguments(region, x, eager))
        torch.testing.assert_close(result, plain)
        torch.testing.assert_close(start, eager)


@pytest.mark.invariant(34)
def test_a_launch_that_fails_writes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be launched has written nothing, so the operators run on what was there."""
    region = writing(monkeypatch)
    start = [torch.zeros(region.outputs[number].shape, dtype=region.outputs[number].dtype) for number in region.written]
    eager = [each.clone() for each in start]
    x = torch.randn(20, 6)
    region._scope["entry"] = lambda *pointers: 720
    region.run(*arguments(region, x, start))
    region.original(*arguments(region, x, eager))
    torch.testing.assert_close(start, eager)


def test_a_graph_that_replays_writes_once_for_each_launch() -> None:
    """The kernels for a GPU, one after the other as they are launched, over the memory that they read."""
    model = Norm(nn.BatchNorm2d(6)).train()
    x = torch.randn(4, 6, 16, 16)
    with torch.no_grad():
        made = capture(model, (x,), {})
        assert isinstance(made, Captured)
        simplify(made.graph)
        (region,) = partition(made.graph).regions
        names = [node.name for node in region.inputs]
        over = {
            number: node.name
            for number, output in enumerate(region.outputs)
            for user in output.users
            if user.target is torch.ops.aten.copy_.default and (node := user.all_input_nodes[0])
        }
        program, builder = lower(subgraph(made.graph, region), "region", names, updates=over)
        made_for = generate(program, builder, DeviceFacts.h200()).program
        assert len(written_over(made_for)) == 3
        assert [len(kernel.once) for kernel in made_for.kernels][-1] == 1
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        values = {
            name: memory_of(x if "x" in name.split("_") or name == "input_1" else tensors[_dotted(name, tensors)])
            for name in made_for.inputs
        }
        found = emulate(made_for, render(made_for, DeviceFacts.h200()), values)
        model(x)
        for output, updated in written_over(made_for):
            want = tensors[_dotted(updated, tensors)]
            torch.testing.assert_close(torch.from_numpy(found[output]).view(want.shape), want)


def _dotted(name: str, tensors: dict[str, Tensor]) -> str:
    return next(each for each in tensors if each.replace(".", "_") == name)
