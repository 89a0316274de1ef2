"""Replaying a specialisation: when it is captured, what each replay reads and writes, what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fusepass
from fusepass.errors import FusepassWarning
from fusepass.runtime.cuda_graphs import Pool, Tensors
from fusepass.runtime.replay import Replay
from fusepass.runtime.replay_trial import Pending, ReplayTrial, Taken

pytestmark = pytest.mark.usefixtures("without_gradients")


class FakeGraphs:
    """Graphs without a device. As on one, a capture executes nothing that shows, and a replay reads and writes the memory
    that the captured run did, whatever became of the Python objects meanwhile."""

    def __init__(self) -> None:
        self.captures = 0
        self.replays = 0
        self.now = 0
        self.busy = False
        self.launch = Taken(host=100e-6, device=101e-6)
        self.replay = Taken(host=20e-6, device=40e-6)
        self.working = False
        self.recording = False
        self.pools: dict[int, Pool] = {}

    def capturing(self) -> bool:
        return self.busy

    def stream(self) -> int:
        return self.now

    def pool(self) -> Pool:
        return self.pools.setdefault(self.now, Pool(object()))

    def capture(self, run: Callable[[], Tensors], pool: Pool) -> tuple[Callable[[], None], Tensors]:
        self.captures += 1
        self.recording = True
        results = run()
        self.recording = False

        def replay() -> None:
            self.replays += 1
            for kept, made in zip(results, run(), strict=True):
                kept.copy_(made)

        return replay, results

    def timed(self, run: Callable[[], Tensors]) -> tuple[Tensors, Pending]:
        before = self.replays
        results = run()
        taken = self.launch if self.replays == before else self.replay
        return results, lambda: None if self.working else taken


@pytest.fixture
def graphs() -> FakeGraphs:
    return FakeGraphs()


def scaled(weight: Tensor, x: Tensor) -> Tensors:
    return (weight * x,)


def replayed(call: Callable[..., Tensors], graphs: FakeGraphs, states: int = 1, *written: int) -> Replay:
    return Replay(call, states, frozenset(written), graphs, "Net")


def test_the_first_call_warms_up_and_the_second_is_captured(graphs: FakeGraphs) -> None:
    replay = replayed(scaled, graphs)
    weight = torch.tensor([2.0, 3.0])
    assert replay.status == "captured at the second call"
    for number in range(4):
        assert torch.equal(replay(weight, torch.full((2,), float(number)))[0], weight * number)
        assert (graphs.captures, graphs.replays) == (min(number, 1), number)
    assert replay.status == "replayed, 1 captured"


@pytest.mark.invariant(29)
def test_results_that_are_held_are_not_overwritten(graphs: FakeGraphs) -> None:
    replay = replayed(scaled, graphs)
    weight = torch.ones(2)
    held = [replay(weight, torch.full((2,), float(number)))[0] for number in range(4)]
    assert [result.tolist() for result in held] == [[float(n)] * 2 for n in range(4)]
    assert len({result.data_ptr() for result in held}) == 4


def test_parameters_are_read_where_they_lie(graphs: FakeGraphs) -> None:
    replay = replayed(scaled, graphs)
    weight, x = torch.ones(2), torch.tensor([1.0, 2.0])
    for _ in range(3):
        replay(weight, x)
    weight.mul_(5)
    assert replay(weight, x)[0].tolist() == [5.0, 10.0]
    assert graphs.captures == 1


@pytest.mark.invariant(29)
def test_another_address_is_captured_anew(graphs: FakeGraphs) -> None:
    replay = replayed(scaled, graphs)
    x = torch.ones(2)
    weights = [torch.full((2,), float(n)) for n in range(4)]
    for weight in (weights[0], weights[0], weights[1], weights[1], weights[2]):
        assert torch.equal(replay(weight, x)[0], weight)
    assert graphs.captures == 3


def test_addresses_that_keep_changing_end_it_with_a_warning(graphs: FakeGraphs) -> None:
    replay = replayed(scaled, graphs)
    weights = [torch.full((2,), float(n)) for n in range(12)]
    for weight in weights[:9]:
        assert torch.equal(replay(weight, torch.ones(2))[0], weight)
    with pytest.warns(FusepassWarning, match="Net runs without a CUDA graph: .* changed their addresses 8 times"):
        assert torch.equal(replay(weights[9], torch.ones(2))[0], weights[9])
    for weight in weights[10:]:
        assert torch.equal(replay(weight, torch.ones(2))[0], weight)
    assert graphs.captures == 8
    assert replay.status.startswith("not used: the model's tensors changed")


def test_what_is_written_reaches_the_input_and_the_buffer(graphs: FakeGraphs) -> None:
    def counting(count: Tensor, x: Tensor) -> Tensors:
        result = x + count
        x.mul_(2)
        return (result,)

    replay = replayed(counting, graphs, 1, 1)
    count = torch.tensor(10.0)
    for _ in range(2):
        replay(count, torch.ones(2))
    x = torch.tensor([1.0, 2.0])
    assert replay(count, x)[0].tolist() == [11.0, 12.0]
    assert x.tolist() == [2.0, 4.0]


def test_inputs_keep_their_strides(graphs: FakeGraphs) -> None:
    seen = []

    def call(x: Tensor) -> Tensors:
        seen.append(x.stride())
        return (x.t() * 1.0,)

    replay = replayed(call, graphs, 0)
    x = torch.rand(3, 8)[:, ::2].t()
    for _ in range(3):
        result = replay(x)[0]
        assert torch.equal(result, x.t())
        assert result.stride() == (x.t() * 1.0).stride()
    assert set(seen) == {x.stride()}


def test_inside_another_capture_it_runs_plainly(graphs: FakeGraphs) -> None:
    replay = replayed(scaled, graphs)
    graphs.busy = True
    for _ in range(3):
        replay(torch.ones(2), torch.ones(2))
    assert (graphs.captures, graphs.replays) == (0, 0)


def test_each_stream_has_a_capture_of_its_own(graphs: FakeGraphs) -> None:
    replay = replayed(scaled, graphs)
    weight = torch.ones(2)
    for stream in (0, 1, 0, 1, 0, 1):
        graphs.now = stream
        replay(weight, torch.ones(2))
    assert (graphs.captures, graphs.replays) == (2, 4)
    for stream in range(2, 8):
        graphs.now = stream
        for _ in range(3):
            assert replay(weight, torch.ones(2))[0].tolist() == [1.0, 1.0]
    assert graphs.captures == 4, "streams beyond the fourth run plainly"


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda weight, x: (x.view(-1),), "shares memory with an input"),
        (lambda weight, x: (weight,), "shares memory with an input, a parameter"),
        (lambda weight, x: (y := x * 2, y[:1]), "or another result"),
        (lambda weight, x: ((x * 2)[:1].expand(3),), "a result overlaps itself"),
    ],
)
def test_results_that_copies_would_change_are_not_captured(
    call: Callable[..., Tensors], reason: str, graphs: FakeGraphs
) -> None:
    replay = replayed(call, graphs)
    weight, x = torch.ones(2), torch.tensor([1.0, 2.0])
    replay(weight, x)
    with pytest.warns(FusepassWarning, match=reason):
        replay(weight, x)
    for result, expected in zip(replay(weight, x), call(weight, x), strict=True):
        assert torch.equal(result, expected)
        assert (result.data_ptr() == x.data_ptr()) == (expected.data_ptr() == x.data_ptr())
    assert graphs.replays == 0


def test_a_capture_that_fails_warns_once_and_calls_run_plainly(
    graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    def fails(run: object, pool: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(graphs, "capture", fails)
    replay = replayed(scaled, graphs)
    for _ in range(4):
        assert replay(torch.ones(2), torch.ones(2))[0].tolist() == [1.0, 1.0]
    assert [str(w.message) for w in recwarn] == [
        "Net runs without a CUDA graph: operation not permitted when stream is capturing"
    ]


def tried(graphs: FakeGraphs, call: Callable[..., Tensors] = scaled, *written: int) -> Replay:
    return Replay(call, 1, frozenset(written), graphs, "Net", ReplayTrial())


def test_unasked_it_replays_where_launches_take_longer_than_kernels(graphs: FakeGraphs) -> None:
    replay, weight = tried(graphs), torch.tensor([2.0, 3.0])
    for number in range(12):
        assert not replay.settled or number > 8
        assert torch.equal(replay(weight, torch.full((2,), float(number)))[0], weight * number)
        assert (graphs.captures, graphs.replays) == (min(max(number - 4, 0), 1), max(number - 4, 0))
    assert replay.settled
    assert replay.status == "replayed, 1 captured"


@pytest.mark.parametrize(
    ("launch", "replayed", "reason"),
    [
        (Taken(100e-6, 300e-6), Taken(20e-6, 250e-6), "its kernels take longer than their launches"),
        (Taken(20e-6, 21e-6), Taken(20e-6, 20e-6), "a replay takes as long as the launches"),
        (Taken(20e-6, 10e-6), Taken(40e-6, 15e-6), "a replay takes as long as the launches"),
    ],
)
def test_unasked_it_launches_where_a_replay_is_no_faster(
    graphs: FakeGraphs, launch: Taken, replayed: Taken, reason: str, recwarn: pytest.WarningsRecorder
) -> None:
    graphs.launch, graphs.replay = launch, replayed
    replay, weight = tried(graphs), torch.tensor([2.0, 3.0])
    for number in range(12):
        assert torch.equal(replay(weight, torch.full((2,), float(number)))[0], weight * number)
    assert replay.settled
    assert not replay.used
    assert replay.status == f"not used: {reason}"
    assert graphs.replays < 12 - 4
    assert not recwarn.list


def test_the_trial_waits_for_nothing(graphs: FakeGraphs) -> None:
    """A device that is behind has not said yet what calls took."""
    graphs.working = True
    replay, weight = tried(graphs), torch.ones(2)
    for _ in range(9):
        replay(weight, torch.ones(2))
    assert graphs.captures == 0
    graphs.working = False
    for _ in range(5):
        replay(weight, torch.ones(2))
    assert replay.status == "replayed, 1 captured"


def test_a_capture_that_fails_unasked_is_told_in_the_report_alone(
    graphs: FakeGraphs, recwarn: pytest.WarningsRecorder
) -> None:
    replay, weight = tried(graphs, lambda weight, x: (weight,)), torch.ones(2)
    for _ in range(9):
        assert replay(weight, torch.ones(2))[0] is weight
    assert replay.status == "not used: a result shares memory with an input, a parameter or another result"
    assert not recwarn.list


def test_a_cache_that_stays_where_it_is_is_written_there(graphs: FakeGraphs) -> None:
    """Once it lies elsewhere, the graph has memory of its own for it, and what was written is copied."""

    def append(weight: Tensor, cache: Tensor, x: Tensor) -> Tensors:
        if not graphs.recording:
            cache.add_(x)
        return (cache * weight,)

    replay, weight, cache = replayed(append, graphs, 1, 1), torch.ones(2), torch.zeros(2)
    for number in range(5):
        before = cache._version
        assert replay(weight, cache, torch.ones(2))[0].tolist() == [number + 1.0] * 2
        assert cache._version > before
        assert cache.tolist() == [number + 1.0] * 2
    assert graphs.captures == 1
    for _ in range(4):
        other = torch.full((2,), 5.0)
        assert replay(weight, other, torch.ones(2))[0].tolist() == [6.0] * 2
        assert other.tolist() == [6.0] * 2
    assert cache.tolist() == [5.0] * 2
    assert graphs.captures == 2


def test_statistics_that_are_written_have_another_version(graphs: FakeGraphs) -> None:
    def counting(count: Tensor, x: Tensor) -> Tensors:
        count.data.add_(1)  # as a kernel: no version is counted
        return (x + count,)

    replay, count = replayed(counting, graphs, 1, 0), torch.tensor(0.0)
    replay(count, torch.ones(2))
    for _ in range(3):
        before = count._version
        replay(count, torch.ones(2))
        assert count._version > before


def test_another_setting_is_captured_anew(graphs: FakeGraphs) -> None:
    replay, weight, before = replayed(scaled, graphs), torch.ones(2), torch.backends.cuda.matmul.fp32_precision
    try:
        for precision in ("ieee", "ieee", "tf32", "tf32"):
            torch.backends.cuda.matmul.fp32_precision = precision
            replay(weight, torch.ones(2))
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert graphs.captures == 2


def test_threads_do_not_mix_their_inputs(graphs: FakeGraphs) -> None:
    replay = replayed(scaled, graphs)
    weight = torch.ones(2)
    for _ in range(2):
        replay(weight, torch.ones(2))
    wrong = []

    def work(value: float) -> None:
        for _ in range(200):
            if replay(weight, torch.full((2,), value))[0].tolist() != [value, value]:
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(float(n),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_on_a_cpu_it_changes_nothing_and_the_report_says_so() -> None:
    net = nn.Sequential(nn.Tanh(), nn.ReLU())
    optimised = fusepass.optimize(net, cuda_graphs=True)
    x = torch.rand(4)
    for _ in range(3):
        torch.testing.assert_close(optimised(x), net(x))
    report = optimised.report()
    assert report.cuda_graphs == ("not used: everything lies on the CPU",)
    assert "cuda graphs: not used: everything lies on the CPU" in str(report)
    assert fusepass.optimize(net).report().cuda_graphs == ()


def test_the_option_reaches_the_calls_of_a_model(graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole model over the fake layer: assigned parameters, running statistics, held results."""
    monkeypatch.setattr("fusepass.dispatch.specialisation.obstacle", lambda graph, arguments: None)
    monkeypatch.setattr("fusepass.dispatch.specialisation.CudaGraphs", lambda device: graphs)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.GELU()).eval()
    optimised = fusepass.optimize(net, cuda_graphs=True)
    inputs = [torch.rand(5, 3) for _ in range(6)]
    held = []
    for number, x in enumerate(inputs):
        if number == 3:
            net[0].weight = nn.Parameter(torch.rand(4, 3))
        if number == 4:
            net.load_state_dict({name: value.clone() for name, value in net.state_dict().items()}, assign=True)
        if number == 5:
            net[1].running_mean.add_(1.0)
        held.append((optimised(x), net(x)))
    for result, expected in held:
        torch.testing.assert_close(result, expected)
    assert (graphs.captures, graphs.replays) == (3, 5)
    assert optimised.report().cuda_graphs == ("replayed, 3 captured",)


def test_what_dynamo_serves_is_not_captured() -> None:
    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x) * x.sum().item()

    optimised = fusepass.optimize(Reads(), cuda_graphs=True)
    with pytest.warns(FusepassWarning, match="not captured whole"):
        optimised(torch.ones(3))
    assert optimised.report().cuda_graphs == ("not used: captured by Dynamo",)


def test_only_places_given_by_masks_wait() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from fusepass.runtime.replayable import obstacle

    aten = torch.ops.aten

    def graph_at(target: object, places: torch.dtype) -> torch.fx.Graph:
        graph = torch.fx.Graph()
        x, at = graph.placeholder("x"), graph.placeholder("at")
        node = graph.call_function(target, (x, [None, at], x) if "put" in str(target) else (x, [None, at]))  # type: ignore[arg-type]
        with FakeTensorMode():
            at.meta["val"] = torch.empty(2, dtype=places, device="cuda")
            node.meta["val"] = torch.empty(2, 2, device="cuda")
        return graph

    for target in (aten.index.Tensor, aten.index_put.default):
        assert obstacle(graph_at(target, torch.int64), ()) is None
        assert obstacle(graph_at(target, torch.bool), ()) == f"{target.overloadpacket} waits for the device"


def test_random_numbers_and_waiting_are_refused() -> None:
    from fusepass.runtime.replayable import obstacle, unasked_obstacle

    cuda = torch.device("cuda")

    def graph_of(target: object, on: torch.device = cuda, **options: object) -> torch.fx.Graph:
        from torch._subclasses.fake_tensor import FakeTensorMode

        graph = torch.fx.Graph()
        node = graph.call_function(target, (graph.placeholder("x"),), options)  # type: ignore[arg-type]
        with FakeTensorMode(allow_non_fake_inputs=True):
            node.meta["val"] = torch.empty(2, device=on)
        return graph

    aten = torch.ops.aten
    assert obstacle(graph_of(aten.tanh.default), ()) is None
    assert obstacle(graph_of(aten.rand_like.default), ()) == "aten.rand_like draws random numbers"
    attention = aten._scaled_dot_product_flash_attention.default
    assert obstacle(graph_of(attention), ()) is None
    assert obstacle(graph_of(attention, dropout_p=0.0), ()) is None
    assert (
        obstacle(graph_of(attention, dropout_p=0.1), ())
        == "aten._scaled_dot_product_flash_attention draws random numbers"
    )
    assert obstacle(graph_of(aten.nonzero.default), ()) == "aten.nonzero waits for the device"
    assert obstacle(graph_of(aten.tanh.default), (torch.rand(2),)) == "tensors lie on several devices"
    assert obstacle(graph_of(aten.tanh.default, torch.device("cpu")), ()) == "everything lies on the CPU"

    assert unasked_obstacle(graph_of(aten.tanh.default), ()) is None
    foreign = graph_of(torch.ops.profiler._record_function_enter_new.default)
    assert unasked_obstacle(foreign, ()) == "profiler._record_function_enter_new.default is an operator of others"
    large = graph_of(aten.tanh.default)
    for node in large.nodes:
        if node.op == "call_function":
            node.meta["val"] = node.meta["val"].repeat(1 << 26)
    assert unasked_obstacle(large, ()) == "its values take more than 256 MiB at once"


@pytest.mark.parametrize(("kept", "refused"), [(False, False), (True, True)])
def test_memory_counts_while_somebody_reads_it(kept: bool, refused: bool) -> None:
    """Three values of 100 MiB, one made of the other, and views of them: two at once, or three where the first is a result."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from fusepass.runtime.replayable import unasked_obstacle

    aten = torch.ops.aten
    with FakeTensorMode(allow_non_fake_inputs=True):
        value = torch.empty(25 << 20, device="cuda")
        rows = value.view(25, -1)
    graph = torch.fx.Graph()
    first = node = graph.placeholder("x")
    for target, arguments, made in (
        (aten.tanh.default, (), value),
        (aten.view.default, ([25, -1],), rows),
        (aten.exp.default, (), rows),
        (aten.relu.default, (), rows),
    ):
        node = graph.call_function(target, (node, *arguments))  # type: ignore[arg-type]
        node.meta["val"] = made
        first = first if first.op == "call_function" else node
    graph.output((node, first) if kept else (node,))
    assert (unasked_obstacle(graph, ()) == "its values take more than 256 MiB at once") is refused
