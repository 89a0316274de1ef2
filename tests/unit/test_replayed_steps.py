"""Training steps that are replayed, forward and backward: whose memory each result is in, which calls are launched, what is told."""

from __future__ import annotations

import copy
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition
from torch._guards import TracingContext
from torch.utils.checkpoint import checkpoint

import fusepass
from fusepass.compile import segments
from fusepass.errors import FusepassWarning
from fusepass.garbage import collector_paused
from fusepass.patterns.effects import drawn_before, draws
from fusepass.runtime.cuda_graphs import Pool, Tensors
from fusepass.runtime.replay_trial import Pending, Taken
from fusepass.runtime.replayable import step_obstacle
from fusepass.training import captured
from fusepass.training.captured import Captured
from fusepass.training.replayed_steps import replayed_backward, replayed_forward
from fusepass.training.steps import Step


class FakeGraphs:
    """Graphs without a device. A capture changes nothing of what it is told to keep; a replay writes where the captured run's results lie."""

    def __init__(self, kept: Sequence[Tensor] = ()) -> None:
        self.kept = kept
        self.captures = self.replays = self.now = self.taken = 0
        self.memory = 1 << 30
        self.busy = False
        self.launch, self.replay = Taken(host=100e-6, device=101e-6), Taken(host=20e-6, device=40e-6)

    def capturing(self) -> bool:
        return self.busy

    def stream(self) -> int:
        return self.now

    def own_pool(self) -> Pool:
        return Pool(object())

    def room(self) -> int:
        return self.memory

    def make_room(self, nbytes: int) -> None:
        self.made_room = nbytes

    def reserved(self) -> int:
        return self.taken

    def capture(
        self, run: Callable[[], Tensors], pool: Pool, generators: Sequence[Any] = ()
    ) -> tuple[Callable[[], None], Tensors]:
        self.captures += 1
        self.taken += 1 << 20
        before = [each.detach().clone() for each in self.kept]
        results = run()
        for each, value in zip(self.kept, before, strict=True):
            each.data.copy_(value)
        for each in results:
            if isinstance(each, Tensor) and each.is_floating_point() and not _is_any(each, self.kept):
                each.detach().fill_(float("nan"))  # nothing was executed

        written = [_memory(each) if isinstance(each, Tensor) else None for each in results]
        again = _keeping_nothing(run)

        def replay() -> None:
            self.replays += 1
            for memory, made in zip(written, again(), strict=True):
                if memory is not None and memory.data_ptr() != made.data_ptr():
                    for dim, stride in enumerate(made.stride()):
                        memory, made = (each if stride else each.narrow(dim, 0, 1) for each in (memory, made))
                    memory.copy_(made)

        return replay, results

    def timed(self, run: Callable[[], Any]) -> tuple[Any, Pending]:
        before = self.replays
        results = run()
        taken = self.launch if self.replays == before else self.replay
        return results, lambda: taken


def _symbolic(graph: fx.Graph, described: Sequence[Any], static: object, *, asked: bool) -> str | None:
    """As `step_obstacle` where a CPU is none."""
    constant = all(isinstance(each, Tensor) and not each._has_symbolic_sizes_strides for each in described)
    return None if constant else "an argument is no tensor"


def _memory(tensor: Tensor) -> Tensor:
    """The memory of `tensor`, which it does not keep."""
    size = tensor.untyped_storage().nbytes()
    storage = torch._C._construct_storage_from_data_pointer(tensor.untyped_storage().data_ptr(), tensor.device, size)
    whole = torch.empty(0, dtype=tensor.dtype)
    return whole.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _keeping_nothing(run: Any) -> Callable[[], Tensors]:
    """`run`, for the memory of what it is called with, which it does not keep."""

    def cell(value: Any) -> Any:
        return types.CellType([*map(_memory, value)] if isinstance(value, list) else value)

    cells = tuple(cell(each.cell_contents) for each in run.__closure__)
    return types.FunctionType(run.__code__, run.__globals__, closure=cells)


def _is_any(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    return any(tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() for other in others)


class Steps:
    """`torch.compile` of a model whose steps are replayed; nothing is generated for it.

    Attributes:
        graphs: the stand-in for CUDA.
        steps: one for each graph that Dynamo found.
        cuts: of each graph of forward and of backward; tensors are large from so many bytes on, if that is given.
    """

    def __init__(
        self,
        model: Any,
        monkeypatch: pytest.MonkeyPatch,
        *,
        asked: bool = True,
        dynamic: bool | None = None,
        large: int | None = None,
    ) -> None:
        state = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
        self.graphs = FakeGraphs(state)
        self.steps: list[Step] = []
        self._asked = asked
        if large is not None:
            monkeypatch.setattr(segments, "LARGE", large)
        self.cuts: list[segments.Cut | None] = []
        monkeypatch.setattr("fusepass.training.replayed_steps.step_obstacle", _symbolic)
        monkeypatch.setattr("fusepass.training.replayed_steps.CudaGraphs", lambda device: self.graphs)
        torch._dynamo.reset()
        self._compiled = torch.compile(model, backend=self._backend, dynamic=dynamic)

    def __call__(self, *arguments: Any) -> Any:
        return self._compiled(*arguments)

    @property
    def counts(self) -> tuple[int, int]:
        """Captures and replays."""
        return self.graphs.captures, self.graphs.replays

    @property
    def status(self) -> str:
        (step,) = self.steps
        return step.status

    def _backend(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        step = Step("Net", asked=self._asked)
        self.steps.append(step)
        visible = 0

        def cut(*args: Any, num_fwd_outputs: int, **options: Any) -> Any:
            nonlocal visible
            visible = num_fwd_outputs
            return default_partition(*args, num_fwd_outputs=num_fwd_outputs, **options)

        def compiled(graph: fx.GraphModule, inputs: object, *, backward: bool) -> Callable[[list[Any]], Any]:
            context = TracingContext.get()
            assert context.fw_metadata is not None
            context.fw_metadata.bw_donated_idxs = []

            def call(arguments: list[Any]) -> Any:
                values = tuple(arguments)
                arguments.clear()
                return graph(*values)

            where = segments.find_cut(graph.graph, sys.maxsize if backward else visible)
            self.cuts.append(where)
            made: Any = SimpleNamespace(
                call=call,
                without_python=lambda: (call, ()),
                before=graph,
                calls=100,
                segments=None if where is None else segments.segments_of(graph, where),
            )
            if backward:
                run = replayed_backward(made, step)
            else:
                run = replayed_forward(made, step, context.fw_metadata.static_input_indices, visible)

            def boxed(arguments: list[Any]) -> Any:
                return run.best()[0](arguments)

            boxed._boxed_call = True  # type: ignore[attr-defined]
            return boxed

        return aot_autograd(
            fw_compiler=partial(compiled, backward=False),
            bw_compiler=partial(compiled, backward=True),
            inference_compiler=lambda graph, inputs: graph,
            partition_fn=cut,
            keep_inference_input_mutations=True,
        )(graph, inputs)  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _afterwards() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Steps]:
    return lambda model, **options: Steps(model, monkeypatch, **options)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Sigmoid())


def pair(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """A model and its like."""
    return model, copy.deepcopy(model)


def same(model: nn.Module, other: nn.Module, **tolerance: float) -> None:
    for (name, mine), (_, theirs) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=name)
        torch.testing.assert_close(mine.grad, theirs.grad, msg=name, **tolerance)
    for mine, theirs in zip(model.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)


def one_step(compiled: Callable[[Tensor], Tensor], model: nn.Module, other: nn.Module, x: Tensor) -> None:
    """Forward and backward of both, `model` by way of `compiled`: gradients, parameters and buffers are the same afterwards."""
    compiled(x).sum().backward()
    other(x).sum().backward()
    same(model, other)


@pytest.mark.parametrize("large", [captured.LARGE, 64], ids=["copied together", "some alone"])
@pytest.mark.parametrize("to_none", [True, False])
def test_training_is_eager_s(
    steps: Callable[..., Steps], to_none: bool, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Optimisers write parameters in place; gradients stay where they are or are made anew; statistics move once a step."""
    monkeypatch.setattr(captured, "LARGE", large)
    model, other = pair(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)))
    compiled = steps(model)
    optimisers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, other)]
    held = []
    for number in range(6):
        x = torch.rand(5, 4)
        for run, optimiser in zip((compiled, other), optimisers, strict=True):
            optimiser.zero_grad(set_to_none=to_none)
            result = run(x)
            result.square().mean().backward()
            optimiser.step()
            held.append(result)
        same(model, other)
        assert compiled.counts == (2 * min(number, 1), 2 * number)
    for mine, theirs in zip(held[::2], held[1::2], strict=True):  # no later call wrote over it
        torch.testing.assert_close(mine, theirs)
    assert compiled.status == "training: replayed, 2 captured, 2 MiB"


@pytest.mark.parametrize("given", [True, False], ids=["input needs gradients", "input needs none"])
def test_large_results_and_their_gradients_stay_outside_of_the_graph(steps: Callable[..., Steps], given: bool) -> None:
    """As logits of a model whose loss is the caller's: what makes them, and what reads their gradient, is launched."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 300, bias=False)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.body(x)
            return self.head(y), y.sum()

    model, other = pair(Head())
    compiled = steps(model, large=2000)
    held = []
    for number in range(5):
        x = torch.rand(5, 4, requires_grad=given)
        for run in (compiled, other):
            run_on = x.detach().requires_grad_(given)
            logits, total = run(run_on)
            (logits.square().mean() + total).backward()
            held.append((logits, run_on.grad))
        same(model, other)
        assert compiled.counts == (2 * min(number, 1), 2 * number)
    for (mine, gradient), (theirs, wanted) in zip(held[::2], held[1::2], strict=True):
        torch.testing.assert_close(mine, theirs)
        torch.testing.assert_close(gradient, wanted)
    forward, backward = compiled.cuts
    assert forward is not None
    assert backward is not None
    mm = torch.ops.aten.mm.default
    assert [node.target for node in forward.tail] == [mm]
    assert [node.target for node in backward.head].count(mm) == 2
    # Neither the logits nor their gradient is in memory of the graphs.
    (slot,) = compiled.steps[0].slots
    assert slot.backward is not None
    for graph in (slot.forward, slot.backward[1]):
        sizes = {tensor.numel() for _, tensors in [*graph._copied_in, *graph._copied_out] for tensor in tensors}
        assert 1500 not in sizes


def test_gradients_accumulate(steps: Callable[..., Steps]) -> None:
    model, other = pair(net())
    compiled = steps(model)
    for _ in range(3):
        model.zero_grad()
        other.zero_grad()
        kept = []
        for _ in range(3):
            x = torch.rand(5, 4)
            compiled(x).sum().backward()
            other(x).sum().backward()
            kept.append([each.grad for each in model.parameters()])
        same(model, other)
    assert compiled.counts == (2, 16)


@pytest.mark.invariant(29)
def test_forwards_that_wait_for_backward_have_memory_of_their_own(steps: Callable[..., Steps]) -> None:
    """Two batches through one model before backward, as a GAN's or a siamese network's."""
    model, other = pair(net())
    compiled = steps(model)
    for number in range(5):
        model.zero_grad()
        other.zero_grad()
        x, y, z = torch.rand(3, 5, 4)
        for run in (compiled, other):
            first, second = run(x), run(y)
            if number % 2:
                second.sum().backward()
                first.square().sum().backward()
            else:
                (first * second).sum().backward()
        same(model, other)
        compiled(z)  # its results are dropped before backward
    assert len(compiled.steps[0].slots) == 2
    assert compiled.graphs.captures == 4


def test_there_is_an_end_to_memory(steps: Callable[..., Steps], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusepass.training.steps._MOST_SLOTS", 2)
    model, other = pair(net())
    compiled = steps(model)
    for _ in range(3):
        model.zero_grad()
        other.zero_grad()
        inputs = torch.rand(4, 5, 4)
        for run in (compiled, other):
            torch.stack([run(x) for x in inputs]).square().sum().backward()
        same(model, other)
    assert len(compiled.steps[0].slots) == 2
    assert compiled.status.endswith(
        "launched 5 times, as what earlier calls saved for backward took all memory that is for it"
    )


def test_backward_may_run_twice_or_never(steps: Callable[..., Steps]) -> None:
    model, other = pair(net())
    compiled = steps(model)
    waiting = []
    for number in range(6):
        model.zero_grad()
        other.zero_grad()
        x = torch.rand(5, 4, requires_grad=True)
        gradients = []
        for run in (compiled, other):
            loss = run(x).square().sum()
            if number == 2:
                continue
            gradients.append([torch.autograd.grad(loss, x, retain_graph=True)[0], torch.autograd.grad(loss, x)[0]])
            if number == 4:
                waiting.append(run(x))
        if gradients:
            for mine, theirs in zip(*gradients, strict=True):
                torch.testing.assert_close(mine, theirs)
    for result in waiting:
        result.sum().backward()
    same(model, other)
    with pytest.raises(RuntimeError, match="second time"):
        waiting[0].sum().backward()


def test_what_raises_leaves_later_calls_right(steps: Callable[..., Steps]) -> None:
    model, other = pair(net())
    compiled = steps(model)

    def fails(gradient: Tensor) -> None:
        raise ValueError("a hook of the user's")

    for number in range(5):
        x = torch.rand(5, 4)
        if number == 3:
            result = compiled(x)
            result.register_hook(fails)
            with pytest.raises(ValueError, match="a hook"):
                result.sum().backward()
        model.zero_grad()
        other.zero_grad()
        one_step(compiled, model, other, x)


def test_backward_in_another_thread(steps: Callable[..., Steps]) -> None:
    model, other = pair(net())
    compiled = steps(model)
    for _ in range(4):
        model.zero_grad()
        other.zero_grad()
        x = torch.rand(5, 4)
        loss = compiled(x).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        other(x).sum().backward()
        same(model, other)
    assert compiled.counts == (2, 6)


def test_threads_share_a_model(steps: Callable[..., Steps]) -> None:
    model, other = pair(net())
    compiled = steps(model)
    inputs = [torch.rand(5, 4, requires_grad=True) for _ in range(4)]
    for _ in range(2):
        compiled(inputs[0]).sum().backward()
    expected = [torch.autograd.grad(other(x).square().sum(), x)[0] for x in inputs]
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(40):
            found = torch.autograd.grad(compiled(inputs[number]).square().sum(), inputs[number])[0]
            if not torch.allclose(found, expected[number]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_each_stream_has_slots_of_its_own(steps: Callable[..., Steps]) -> None:
    model, other = pair(net())
    compiled = steps(model)
    for stream in (0, 1, 0, 1, 0, 1):
        compiled.graphs.now = stream
        one_step(compiled, model, other, torch.rand(5, 4))
    assert compiled.counts == (4, 8)
    x = torch.rand(5, 4)
    loss = compiled(x).sum()
    compiled.graphs.now = 0  # another stream than forward's
    loss.backward()
    other(x).sum().backward()
    same(model, other)
    assert compiled.counts == (4, 9)


def test_other_parameters_are_captured_anew(steps: Callable[..., Steps]) -> None:
    model, other = pair(net())
    compiled = steps(model)
    for number in range(5):
        if number == 3:
            with torch.no_grad():
                for each in (model, other):
                    each[0].weight.data = each[0].weight * 2.0
        model.zero_grad()
        other.zero_grad()
        one_step(compiled, model, other, torch.rand(5, 4))
    assert compiled.counts == (4, 8)


def test_what_is_written_between_forward_and_backward_is_noticed(steps: Callable[..., Steps]) -> None:
    """As without a graph: parameters and inputs that backward needs are the caller's own."""
    compiled = steps(net())
    for changed in (None, None, "weight", "input", None):
        x = torch.rand(5, 4)
        loss = compiled(x).sum()
        if changed is None:
            loss.backward()
            continue
        with torch.no_grad():
            (x if changed == "input" else compiled.graphs.kept[2]).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_what_hooks_get_is_not_lent(steps: Callable[..., Steps]) -> None:
    model, other = pair(net())
    compiled = steps(model)
    for _ in range(2):
        compiled(torch.rand(5, 4)).sum().backward()
    model.zero_grad()
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        packed.append(tensor)
        return len(packed) - 1

    x = torch.rand(5, 4)
    for run in (compiled, other):
        with torch.autograd.graph.saved_tensors_hooks(pack, packed.__getitem__):
            loss = run(x).sum()
        loss.backward()
    same(model, other)
    assert compiled.counts == (2, 2)
    for _ in range(2):
        checkpoint(compiled, x, use_reentrant=False).sum().backward()
        checkpoint(other, x, use_reentrant=False).sum().backward()
    same(model, other)
    assert "hooks get what forward saves" in compiled.status


def test_gradients_of_any_kind_of_memory(steps: Callable[..., Steps]) -> None:
    """Gradients that are what backward was given, parts of it, or elements that stand for many."""

    def mixed(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return x + y, (w.sum() * x.sum().tanh())

    compiled = steps(mixed)
    for _ in range(4):
        inputs = [torch.rand(3, 4, requires_grad=True) for _ in range(3)]
        gradients = []
        for run in (compiled, mixed):
            first, second = run(*inputs)
            found = torch.autograd.grad(first.sum() + second * 2, inputs)
            gradients.append(found)
        for mine, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(mine, theirs)
    assert compiled.graphs.captures == 2


def test_sizes_in_turn(steps: Callable[..., Steps]) -> None:
    model, other = pair(net())
    compiled = steps(model)
    for size in (5, 5, 3, 3, 5, 3, 5):
        model.zero_grad()
        other.zero_grad()
        one_step(compiled, model, other, torch.rand(size, 4))


def test_a_graph_around_it_takes_the_launches(steps: Callable[..., Steps]) -> None:
    compiled = steps(net())
    compiled.graphs.busy = True
    for _ in range(3):
        compiled(torch.rand(5, 4)).sum().backward()
    assert compiled.counts == (0, 0)


def test_a_capture_that_fails_is_told_once(
    steps: Callable[..., Steps], monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    def fails(*arguments: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    model, other = pair(net())
    compiled = steps(model)
    monkeypatch.setattr(compiled.graphs, "capture", fails)
    for _ in range(4):
        one_step(compiled, model, other, torch.rand(5, 4))
    told = [str(w.message) for w in recwarn if isinstance(w.message, FusepassWarning)]
    assert told == ["Net runs without a CUDA graph: operation not permitted when stream is capturing"]
    assert compiled.status == "training: not used: operation not permitted when stream is capturing"


@pytest.mark.parametrize(
    ("launch", "replay", "verdict"),
    [
        (Taken(100e-6, 101e-6), Taken(20e-6, 40e-6), "replayed, 2 captured, 2 MiB"),
        (Taken(100e-6, 300e-6), Taken(20e-6, 250e-6), "not used: its kernels take longer than their launches"),
        (Taken(20e-6, 21e-6), Taken(20e-6, 20e-6), "not used: a replay takes as long as the launches"),
    ],
)
def test_unasked_it_is_replayed_where_that_is_faster(
    steps: Callable[..., Steps], launch: Taken, replay: Taken, verdict: str, recwarn: pytest.WarningsRecorder
) -> None:
    model, other = pair(net())
    compiled = steps(model, asked=False)
    compiled.graphs.launch, compiled.graphs.replay = launch, replay
    for number in range(14):
        model.zero_grad()
        other.zero_grad()
        one_step(compiled, model, other, torch.rand(5, 4))
        assert number > 3 or compiled.counts == (0, 0)
    assert compiled.status == f"training: {verdict}"
    assert not [w for w in recwarn if isinstance(w.message, FusepassWarning)]


def test_unasked_it_takes_a_quarter_of_the_free_memory_at_most(steps: Callable[..., Steps]) -> None:
    compiled = steps(net(), asked=False)
    compiled.graphs.memory = 1000
    for _ in range(8):
        compiled(torch.rand(5, 4)).sum().backward()
    assert compiled.graphs.captures == 0
    assert "are more than a quarter of the memory that is free" in compiled.status


def test_what_is_dropped_gives_its_memory_back(steps: Callable[..., Steps]) -> None:
    compiled = steps(net())
    for _ in range(3):
        compiled(torch.rand(5, 4)).sum().backward()
    (step,) = compiled.steps
    gone = [weakref.ref(each) for each in (step.slots[0].forward, step.slots[0].backward[1])]
    with collector_paused():  # without cycles there is nothing for it to do
        step.slots.clear()
        assert [each() for each in gone] == [None, None]


class Generator:
    """Of a device: draws read the state that it has adopted."""

    def __init__(self, seed: int, offset: int) -> None:
        self.state = [seed, offset]

    def clone_state(self) -> Generator:
        return Generator(*self.state)

    def graphsafe_get_state(self) -> Generator:
        like = Generator(0, 0)
        like.state = self.state
        return like

    def graphsafe_set_state(self, other: Generator) -> None:
        self.state = other.state

    def initial_seed(self) -> int:
        return self.state[0]

    def manual_seed(self, seed: int) -> None:
        self.state[:] = seed, 0

    def get_offset(self) -> int:
        return self.state[1]

    def set_offset(self, offset: int) -> None:
        self.state[1] = offset


@pytest.mark.parametrize("drawing", ["k", "l", "klk", "lkl", "kk", "llkkll"])
def test_draws_of_a_replay_are_those_of_a_launch(drawing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is told where the generator is, for generated kernels (k) and the library (l), and it moves on by as much."""
    from fusepass.codegen.lowering import dropout
    from fusepass.runtime.draws import ReplayedDraws, generator_of, watched

    generator, cpu = Generator(7, 40), torch.device("cpu")
    capturing = False
    monkeypatch.setattr(dropout, "default_generator", lambda device: generator)
    monkeypatch.setattr("fusepass.runtime.draws.default_generator", lambda device: generator)
    monkeypatch.setattr("fusepass.runtime.draws.generator_of", lambda device: generator)
    assert callable(generator_of)

    def by_kernel() -> list[list[int]]:
        if capturing:
            return [state.tolist() for state in dropout.draw((4, 8), device=cpu)]
        seed, offset = generator.state
        dropout.note(offset, (4, 8))
        generator.set_offset(offset + 12)
        return [[seed, offset], [seed, offset + 4]]

    def by_library() -> list[list[int]]:
        generator.state[1] += 32
        return [[generator.state[0], generator.state[1] - 32]]

    def call() -> list[list[list[int]]]:
        return [by_kernel() if each == "k" else by_library() for each in drawing]

    _, course = watched(call, cpu)
    assert course is not None
    draws = ReplayedDraws(course, cpu)
    for seed, offset in ((7, 40), (7, 1000), (1 << 62 | 5, 8)):
        generator.state = [seed, offset]
        launched, behind = call(), [*generator.state]
        generator.state = own = [seed, offset]
        draws.begin()
        capturing = True
        with draws.captured():
            replayed = call()
        capturing = False
        assert replayed == launched
        assert generator.state is own
        assert generator.state == behind


def test_what_is_refused_says_why() -> None:
    aten = torch.ops.aten

    def graph_of(*targets: Any, write: bool = False) -> fx.Graph:
        graph = fx.Graph()
        x = graph.placeholder("x")
        x.meta["val"] = torch.empty(2, device="meta")
        value = x
        for target in targets:
            value = graph.call_function(target, (value,))
        if write:
            graph.call_function(aten.copy_.default, (x, value))
        graph.output((value,))
        return graph

    def reason(graph: fx.Graph, static: Sequence[int] = (), asked: bool = True) -> str | None:
        return step_obstacle(
            graph, [node.meta["val"] for node in graph.find_nodes(op="placeholder")], static, asked=asked
        )

    assert reason(graph_of(aten.tanh.default, write=True)) == "an input is written"
    assert reason(graph_of(aten.tanh.default, write=True), (0,)) == "everything lies on the CPU"
    assert reason(graph_of(aten.nonzero.default)) == "everything lies on the CPU"
    foreign = torch.ops.profiler._record_function_enter_new.default
    assert reason(graph_of(foreign), asked=False) == f"{foreign} is an operator of others"
    assert step_obstacle(graph_of(aten.tanh.default), [3], (), asked=True) == "an argument is no tensor"


def test_arguments_that_overlap_themselves_are_read_where_they_lie_or_not_at_all() -> None:
    """As a mask for all samples that forward saved: a copy would have other strides than the graph is made for."""
    graphs, lies = FakeGraphs(), torch.rand(4, 1).expand(4, 3)
    x = torch.rand(4, 3)

    def call(arguments: list[Any]) -> list[Any]:
        return [arguments[0] * arguments[1]]

    captured = Captured(call, [x, lies], (1,), 1, graphs, graphs.own_pool(), exact=True)
    (result,) = captured.run([x + 1, lies])
    assert torch.equal(result, (x + 1) * lies)
    with pytest.raises(RuntimeError, match="an argument that would be copied overlaps itself"):
        Captured(call, [x, lies], (), 1, graphs, graphs.own_pool(), exact=True)


def test_attention_draws_forward_with_dropout_and_backward_never() -> None:
    graph = fx.Graph()
    q = graph.placeholder("q")
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    forwards = [graph.call_function(flash.default, (q, q, q, p)) for p in (0.0, 0.1)]
    seed, offset = graph.placeholder("seed"), graph.placeholder("offset")
    operator = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
    backward = graph.call_function(operator, (*(q,) * 6, seed, offset, *(q,) * 7))
    assert [*map(draws, (*forwards, backward))] == [False, True, False]
    assert drawn_before(graph) == {seed, offset}


def test_the_report_of_an_optimised_model_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = FakeGraphs()
    monkeypatch.setattr("fusepass.training.replayed_steps.step_obstacle", _symbolic)
    monkeypatch.setattr("fusepass.training.replayed_steps.CudaGraphs", lambda device: graphs)
    model, other = pair(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.GELU()))
    graphs.kept = [*model.parameters(), *model.buffers()]
    fused = fusepass.optimize(model, cuda_graphs=True, tune="off")
    for _ in range(4):
        model.zero_grad()
        other.zero_grad()
        x = torch.rand(5, 4)
        fused(x).square().sum().backward()
        other(x).square().sum().backward()
        same(model, other, rtol=1e-3, atol=1e-3)  # kernels round otherwise
    assert graphs.replays == 6
    assert fused.report().cuda_graphs == ("training: replayed, 2 captured, 2 MiB",)
    for size in (6, 6, 7, 6, 7, 7):  # graphs of dynamic shapes, by sizes
        model.zero_grad()
        other.zero_grad()
        x = torch.rand(size, 4)
        fused(x).square().sum().backward()
        other(x).square().sum().backward()
        same(model, other, rtol=1e-3, atol=1e-3)
    assert fused.report().cuda_graphs[1] == "training: replayed, 4 captured, 4 MiB"


def test_on_a_cpu_the_report_says_so_where_it_was_asked_for() -> None:
    for asked, told in ((True, ("training: not used: everything lies on the CPU",)), ("auto", ())):
        fused = fusepass.optimize(nn.Sequential(nn.Linear(4, 8), nn.GELU()), cuda_graphs=asked, tune="off")
        fused(torch.rand(5, 4)).sum().backward()
        assert fused.report().cuda_graphs == told
