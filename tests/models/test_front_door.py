"""The user's door on a real network: live parameters, buffers, gradients, report, graph, tracers, threads, copies."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusepass
from fusepass.api.module import OptimizedModule
from fusepass.errors import FusepassWarning
from fusepass.numerics.check import check, compare, reference
from fusepass.report.report import CaptureRoute, RegionState, Report

pytestmark = pytest.mark.models

ROOT = Path(__file__).parents[2]


class Net(nn.Module):
    """A convolution with BatchNorm, a block, and a head: three anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x))).mean((2, 3))
        return torch.log_softmax(self.head(self.block(x)) * 0.5, -1)


def inputs(batch: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(batch, 3, 6, 6).to(dtype)


def assert_right(model: nn.Module, optimised: nn.Module, x: Tensor) -> None:
    outcome = check(model, optimised, (x,))
    assert outcome.ok, outcome.explain()


def assert_fused(report: Report) -> None:
    assert report.capture is CaptureRoute.TRACED, report.reason
    assert report.regions
    assert {region.state for region in report.regions} == {RegionState.FUSED}
    assert report.fallbacks == ()


# ---- parameters stay live


def tie(model: Net) -> None:
    model.head.weight = model.block[0].weight


def untie(model: Net) -> None:
    model.head.weight = nn.Parameter(torch.randn(8, 8))


def write_data(model: Net) -> None:
    model.conv.weight.data[0] = 3.0


def replace_data(model: Net) -> None:
    model.conv.bias.data = torch.linspace(-1, 1, 8)


def write_transposed_data(model: Net) -> None:
    model.head.weight.data = torch.randn(8, 8).t()


def load(model: Net) -> None:
    model.load_state_dict(Net().state_dict())


def drop_bias(model: Net) -> None:
    model.head.bias = None


def replace_layer(model: Net) -> None:
    model.block[1] = nn.SiLU()


CHANGES: tuple[Callable[[Net], object], ...] = (
    write_data,
    replace_data,
    write_transposed_data,
    load,
    tie,
    untie,
    drop_bias,
    replace_layer,
    nn.Module.half,
    nn.Module.bfloat16,
    nn.Module.double,
    nn.Module.float,
)


def test_every_change_of_parameters_shows_in_the_next_call() -> None:
    """One after the other on one model, as an application would."""
    model = Net().eval()
    optimised = fusepass.optimize(model)
    for change in CHANGES:
        with torch.no_grad():
            change(model)
        x = inputs(dtype=model.conv.weight.dtype)
        outcome = check(model, optimised, (x,))
        assert outcome.ok, f"after {change.__name__}: {outcome.explain()}"
    assert_fused(optimised.report())


def test_writes_to_a_tied_weight_reach_both_uses() -> None:
    model = Net().eval()
    tie(model)
    optimised = fusepass.optimize(model, inputs())
    with torch.no_grad():
        model.head.weight.mul_(-2)
    assert_right(model, optimised, inputs())
    assert len({id(parameter) for parameter in optimised.parameters()}) == len(list(model.parameters()))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW], ids=lambda kind: kind.__name__)
def test_steps_of_an_optimiser_show_in_the_next_call(kind: type[torch.optim.Optimizer]) -> None:
    model = Net()
    optimised = fusepass.optimize(model)
    optimiser = kind(optimised.parameters(), lr=0.1)
    x, before = inputs(4), None
    for _ in range(3):
        optimiser.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FusepassWarning)
            optimised(x)[:, 0].sum().backward()
        optimiser.step()
        assert_right(model, optimised, x)
        with torch.no_grad():
            now = optimised(x)
        assert before is None or not torch.equal(now, before)
        before = now


def test_moving_through_the_optimised_module_moves_the_original() -> None:
    model = Net().eval()
    optimised = fusepass.optimize(model)
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.float32):
        assert optimised.to(dtype) is optimised
        assert model.conv.weight.dtype is dtype
        assert_right(model, optimised, inputs(dtype=dtype))
    optimised.to(memory_format=torch.channels_last)
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert_right(model, optimised, inputs())


# ---- BatchNorm


@pytest.mark.parametrize("momentum", [0.3, 1.0, None])
def test_running_statistics_follow_eager(momentum: float | None) -> None:
    """With momentum=None the average is cumulative: its weight is a value of `num_batches_tracked`."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=momentum), nn.ReLU(), nn.Softmax(1))
    twin = copy.deepcopy(model)
    optimised = fusepass.optimize(model)
    with torch.no_grad(), warnings.catch_warnings():
        if momentum is None:
            warnings.simplefilter("ignore", FusepassWarning)
        for call in range(1, 5):
            x = inputs() * call - 1
            torch.testing.assert_close(optimised(x), twin(x), rtol=1e-4, atol=1e-5)
            for name, buffer in twin.named_buffers():
                torch.testing.assert_close(model.get_buffer(name), buffer, rtol=1e-5, atol=1e-6)
            assert model[1].num_batches_tracked == call
    report = optimised.report()
    if momentum is None:
        assert any("depends on the values of a tensor" in refusal.reason for refusal in report.refusals)
    else:
        assert_fused(report)
        assert len(report.regions) == 1


@pytest.mark.parametrize("training", [False, True])
def test_without_running_statistics_the_batch_s_are_used(training: bool) -> None:
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False), nn.ReLU(), nn.Softmax(1)]
    model = nn.Sequential(*layers).train(training)
    optimised = fusepass.optimize(model)
    for shift in (0, 5):
        assert_right(model, optimised, inputs() + shift)
    assert_fused(optimised.report())
    assert dict(optimised.named_buffers()) == {}


def test_training_and_evaluation_are_specialised_apart() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Softmax(1))
    twin = copy.deepcopy(model)
    optimised = fusepass.optimize(model)
    with torch.no_grad():
        for training in (True, False, True, True, False):
            optimised.train(training)
            twin.train(training)
            x = inputs() + 1
            torch.testing.assert_close(optimised(x), twin(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.state_dict(), twin.state_dict())
    assert model[1].num_batches_tracked == 3
    assert len(optimised.report().regions) == 2
    assert_fused(optimised.report())


def test_one_layer_in_evaluation_within_a_model_in_training() -> None:
    model = Net().train()
    optimised = fusepass.optimize(model)
    assert_right(model, optimised, inputs())
    model.norm.eval()
    assert_right(model, optimised, inputs())
    with torch.no_grad():
        optimised(inputs())
    assert model.norm.num_batches_tracked == 0


def test_statistics_set_by_hand_are_used() -> None:
    model = Net().eval()
    optimised = fusepass.optimize(model, inputs())
    model.norm.running_mean.fill_(0.7)
    model.norm.running_var = torch.linspace(0.5, 2, 8)
    assert_right(model, optimised, inputs())
    model.norm.reset_running_stats()
    assert_right(model, optimised, inputs())


def test_too_few_values_for_batch_statistics_are_refused_as_by_the_original() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.ReLU())
    optimised = fusepass.optimize(model)
    with torch.no_grad(), pytest.warns(FusepassWarning), pytest.raises(ValueError, match="more than 1 value"):
        optimised(torch.randn(1, 4))
    assert_right(model, optimised, torch.randn(3, 4))
    assert [region.state for region in optimised.report().regions] == [RegionState.FUSED]


def test_a_faulty_call_raises_what_the_original_raises_and_leaves_no_trace() -> None:
    model = Net().eval()
    optimised = fusepass.optimize(model)
    wrong: tuple[tuple[Any, type[Exception], str], ...] = (
        (torch.randn(2, 5, 6, 6), RuntimeError, "expected input.* to have 3 channels"),
        (torch.randn(2, 3, 6, 6, dtype=torch.float64), RuntimeError, "type"),
        ("text", TypeError, "invalid combination of arguments"),
    )
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FusepassWarning)
        for argument, error, text in wrong:
            with pytest.raises(error, match=text):
                model(argument)
            with pytest.raises(error, match=text):
                optimised(argument)
        with pytest.raises(TypeError, match="missing 1 required positional argument"):
            optimised()
    assert_right(model, optimised, inputs())
    assert optimised.report().capture is CaptureRoute.TRACED
    assert len(optimised.report().regions) == 3


# ---- gradients


def gradients(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    x = x.clone().requires_grad_()
    model.zero_grad()
    result = model(x)
    result.square().sum().backward()
    return result.detach(), [x.grad, *(None if p.grad is None else p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("training", [False, True])
def test_gradients_and_calls_without_them_take_turns(training: bool) -> None:
    model = Net().train(training)
    twin = copy.deepcopy(model)
    optimised = fusepass.optimize(model)
    x = inputs()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            result, grads = gradients(optimised, x)
            expected, expected_grads = gradients(twin, x)
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(grads, expected_grads, rtol=1e-4, atol=1e-5)
            with torch.no_grad():
                assert not optimised(x).requires_grad
                twin(x)
            assert_right(model, optimised, x)
    assert not [entry for entry in seen if issubclass(entry.category, FusepassWarning)]
    assert optimised.report().fallbacks == ()
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-4, atol=1e-5)


def test_second_derivatives_and_only_some_parameters() -> None:
    model = Net().eval()
    model.conv.requires_grad_(False)
    twin = copy.deepcopy(model)
    optimised = fusepass.optimize(model)
    results = []
    for each in (optimised, twin):
        x = inputs().fill_(0.5).requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FusepassWarning)
            (first,) = torch.autograd.grad(each(x).sum(), x, create_graph=True)
        first.square().sum().backward()
        results.append([first, x.grad, *(parameter.grad for parameter in each.parameters())])
    torch.testing.assert_close(results[0], results[1])
    assert model.conv.weight.grad is None


def test_inference_mode_and_no_grad_are_right_in_any_order() -> None:
    model = Net().eval()
    optimised = fusepass.optimize(model)
    x = inputs()
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            outcome = compare(optimised(x), model(x), reference(model, (x,)))
            assert outcome.ok, outcome.explain()
            assert optimised(x).is_inference() == (mode is torch.inference_mode)
    assert_fused(optimised.report())


# ---- report


def test_the_report_tells_all_of_every_region() -> None:
    model = Net().eval()
    optimised = fusepass.optimize(model, inputs())
    report = optimised.report()
    assert_fused(report)
    assert (report.model, report.device) == ("Net", "cpu")
    assert len(report.regions) == 3
    assert report.ops_fused == sum(len(region.ops) for region in report.regions) <= report.ops_total
    places = {op.location for region in report.regions for op in region.ops}
    first = Net.forward.__code__.co_firstlineno
    assert places == {f"{Path(__file__).name}:{first + line} in forward" for line in (1, 2)}
    for region in report.regions:
        assert region.anchor is not None
        assert region.anchor.startswith("library: aten.")
        assert region.kernels
        assert 0 < region.bytes_after < region.bytes_before
        assert region.bytes_saved == region.bytes_before - region.bytes_after
        assert all(kernel.bytes_written > 0 and kernel.schedule for kernel in region.kernels)
        assert all(op.location and op.target.startswith("aten.") for op in region.ops)
        for source in region.sources:
            assert source.path is not None
            assert source.path.read_text() == source.text
            assert all(kernel.name in source.text for kernel in region.kernels)
        assert len(region.sources) == 1
    text = str(report)
    for region in report.regions:
        assert region.name[:20] in text
    assert max(map(len, text.splitlines())) <= 80 or sys.stdout.isatty()


def test_the_report_survives_json() -> None:
    optimised = fusepass.optimize(Net().eval(), inputs())
    report = optimised.report()
    assert Report.from_json(report.to_json()) == report


@pytest.mark.parametrize("training", [False, True])
def test_explain_says_what_the_report_of_the_optimised_module_says(training: bool) -> None:
    model = Net().train(training)
    before = copy.deepcopy(model.state_dict())
    explained = fusepass.explain(model, inputs())
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    report = fusepass.optimize(model, inputs()).report()
    assert timeless(explained) == timeless(report)


def timeless(report: Report) -> dict[str, Any]:
    facts = dict(vars(report), seconds=[stage for stage, _ in report.seconds])
    facts["regions"] = [dict(vars(region), build_seconds=0) for region in report.regions]
    return facts


# ---- the rewritten graph, torch.compile, torch.export


def fused_calls(graph: torch.fx.Graph) -> int:
    return sum(str(node.target).startswith("fusepass.") for node in graph.nodes if node.op == "call_function")


def test_the_rewritten_graph_has_one_readable_call_per_region() -> None:
    model = Net().eval()
    optimised = fusepass.optimize(model)
    x = inputs()
    graph_module = optimised.graph_module(x)
    report = optimised.report()
    lines = [line for line in graph_module.code.splitlines() if "torch.ops.fusepass." in line]
    assert len(lines) == len(report.regions) == fused_calls(graph_module.graph) == 3
    for line, region in zip(lines, report.regions, strict=True):
        assert line.strip().startswith(f"{region.name} = torch.ops.fusepass.{region.name}")
    assert graph_module.code.startswith("\n\n\ndef forward(self, x):")
    with torch.no_grad():
        outcome = compare(graph_module(x), model(x), reference(model, (x,)))
        assert outcome.ok, outcome.explain()
        assert torch.equal(graph_module(x), optimised(x))
    assert list(graph_module.state_dict()) == list(model.state_dict())
    for name, value in graph_module.state_dict(keep_vars=True).items():
        assert value is model.state_dict(keep_vars=True)[name]


def test_the_rewritten_graph_of_a_model_in_training_updates_its_buffers() -> None:
    model = Net()
    twin = copy.deepcopy(model)
    x = inputs()
    graph_module = fusepass.optimize(model).graph_module(x)
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(graph_module(x), twin(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-4, atol=1e-5)
    assert model.norm.num_batches_tracked == 1


def test_the_fused_operators_reject_other_shapes() -> None:
    graph_module = fusepass.optimize(Net().eval()).graph_module(inputs(2))
    with torch.no_grad(), pytest.raises(ValueError, match=r"specialised for .*\[2, 3, 6, 6\]"):
        graph_module(inputs(3))


def test_the_fused_operators_are_registered_properly() -> None:
    """PyTorch's own check: schema, fake implementation, and what both say of aliases and strides."""
    graph_module = fusepass.optimize(Net().eval()).graph_module(inputs())
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and str(node.target).startswith("fusepass."):
            examples = tuple(torch.randn(a.meta["val"].shape).abs() for a in node.args)
            torch.library.opcheck(node.target, examples, test_utils=("test_schema", "test_faketensor"))


def test_export_has_the_fused_calls_where_they_are_asked_for() -> None:
    model = Net().eval()
    x = inputs()
    program = fusepass.export(fusepass.optimize(model), (x,))
    assert fused_calls(program.graph) == 3
    with torch.no_grad():
        outcome = compare(program.module()(x), model(x), reference(model, (x,)))
    assert outcome.ok, outcome.explain()
    assert set(program.state_dict) == set(model.state_dict())


def test_compile_keeps_the_fused_calls() -> None:
    torch._dynamo.reset()
    model = Net().eval()
    x = inputs()
    optimised = fusepass.optimize(model, x)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    for backend in (keep, "eager", "aot_eager"):
        compiled = torch.compile(optimised, backend=backend, fullgraph=True)
        with torch.no_grad():
            outcome = compare(compiled(x), model(x), reference(model, (x,)))
        assert outcome.ok, f"{backend}: {outcome.explain()}"
    assert [fused_calls(graph.graph) for graph in graphs] == [3]


def test_compile_and_export_of_a_model_in_training_are_right() -> None:
    torch._dynamo.reset()
    model = Net()
    twin = copy.deepcopy(model)
    optimised = fusepass.optimize(model, inputs())
    compiled = torch.compile(optimised, backend="eager", fullgraph=True)
    with torch.no_grad():
        for _ in range(2):
            x = inputs()
            torch.testing.assert_close(compiled(x), twin(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-4, atol=1e-5)


# ---- threads and many signatures


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work` in threads that start together; the first failure is raised here."""
    barrier = threading.Barrier(count)
    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            barrier.wait()
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_threads_with_signatures_of_their_own() -> None:
    model = Net().eval()
    optimised = fusepass.optimize(model)
    batches = [inputs(1 + number) for number in range(6)]

    def work(number: int) -> None:
        for x in batches[number::2]:
            with torch.no_grad():
                for _ in range(5):
                    outcome = compare(optimised(x), model(x), reference(model, (x,)))
                    assert outcome.ok, outcome.explain()

    in_threads(2, work)
    assert_fused(optimised.report())
    assert len(optimised.report().regions) == 3 * 6


def test_threads_in_unlike_modes() -> None:
    """Grad mode is a thread's own: one that needs gradients is not served what another made."""
    model = Net().eval()
    optimised = fusepass.optimize(model)
    x = inputs()
    expected = model(x).detach()

    def work(number: int) -> None:
        with torch.set_grad_enabled(number % 2 == 1):
            for _ in range(10):
                result = optimised(x)
                assert result.requires_grad == (number % 2 == 1)
                torch.testing.assert_close(result.detach(), expected, rtol=1e-4, atol=1e-5)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FusepassWarning)
        in_threads(4, work)
    assert optimised.report().fallbacks == ()


def test_twenty_batch_sizes_make_a_bounded_number_of_specialisations() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.LayerNorm(7))
    optimised = fusepass.optimize(model, max_signatures=4)
    with torch.no_grad(), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            for batch in range(1, 21):
                x = torch.randn(batch, 5)
                outcome = compare(optimised(x), model(x), reference(model, (x,)))
                assert outcome.ok, f"batch of {batch}: {outcome.explain()}"
    warned = [str(entry.message) for entry in seen if issubclass(entry.category, FusepassWarning)]
    assert len(warned) == 1, warned
    assert "more than 4 signatures" in warned[0]
    report = optimised.report()
    assert len(report.regions) == 4
    assert [fallback.count for fallback in report.fallbacks] == [2 * 16]


# ---- copies and other processes


def clones(optimised: OptimizedModule, tmp_path: Path) -> dict[str, OptimizedModule]:
    torch.save(optimised, tmp_path / "model.pt")
    return {
        "copy": copy.copy(optimised),
        "deepcopy": copy.deepcopy(optimised),
        "pickle": pickle.loads(pickle.dumps(optimised)),
        "torch.save": torch.load(tmp_path / "model.pt", weights_only=False),
    }


@pytest.mark.parametrize("training", [False, True])
def test_copies_are_right_and_keep_their_mode(training: bool, tmp_path: Path) -> None:
    model = Net().train(training)
    x = inputs()
    optimised = fusepass.optimize(model, x, max_signatures=3)
    for name, twin in clones(optimised, tmp_path).items():
        assert isinstance(twin, OptimizedModule)
        assert twin.training == training
        outcome = check(model, twin, (x,))
        assert outcome.ok, f"{name}: {outcome.explain()}"
        assert_fused(twin.report())
        shares = twin.conv.weight is model.conv.weight
        assert shares == (name == "copy")


def test_an_optimised_model_within_a_model_is_copied_and_pickled_with_it() -> None:
    model = nn.Sequential(nn.Flatten(0, 0), fusepass.optimize(Net().eval()), nn.Softmax(-1))
    x = inputs()
    with torch.no_grad():
        expected = model(x)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert isinstance(twin[1], OptimizedModule)
            torch.testing.assert_close(twin(x), expected)
            assert twin[1].conv.weight is not model[1].conv.weight
            assert list(twin.state_dict()) == list(model.state_dict())


SAVE_AND_RUN = """
import sys, torch
folder = sys.argv[1]
model = torch.load(f"{folder}/model.pt", weights_only=False)
x = torch.load(f"{folder}/input.pt")
with torch.no_grad():
    results = [model(x), model(x)]
report = model.report()
assert report.fallbacks == () and len(report.regions) == 2, str(report)
torch.save({"results": results, "state": model.state_dict(), "options": model._options}, f"{folder}/output.pt")
torch.save(model, f"{folder}/again.pt")
"""


def test_a_saved_model_runs_in_another_process_and_comes_back(tmp_path: Path) -> None:
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5), nn.Softmax(-1)]
    model = nn.Sequential(*layers).eval()
    x = inputs()
    optimised = fusepass.optimize(model, x, max_signatures=3)
    torch.save(optimised, tmp_path / "model.pt")
    torch.save(x, tmp_path / "input.pt")
    command = [sys.executable, "-W", "error::UserWarning:fusepass", "-c", SAVE_AND_RUN, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "output.pt")
    with torch.no_grad():
        for result in found["results"]:
            outcome = compare(result, model(x), reference(model, (x,)))
            assert outcome.ok, outcome.explain()
    assert found["options"] == {"max_signatures": 3}
    torch.testing.assert_close(found["state"], dict(model.state_dict()), rtol=0, atol=0)
    again = torch.load(tmp_path / "again.pt", weights_only=False)
    assert_right(model, again, x)


def test_a_state_dict_goes_both_ways(tmp_path: Path) -> None:
    model, other = Net().eval(), Net().eval()
    optimised = fusepass.optimize(other, inputs())
    torch.save(model.state_dict(), tmp_path / "plain.pt")
    optimised.load_state_dict(torch.load(tmp_path / "plain.pt"))
    assert_right(model, optimised, inputs())
    torch.save(optimised.state_dict(), tmp_path / "optimised.pt")
    fresh = Net().eval()
    fresh.load_state_dict(torch.load(tmp_path / "optimised.pt"), strict=True)
    assert_right(fresh, optimised, inputs())
