"""The benchmarks measure what they say: limits, workloads, timing, summaries, and a run that survives failures."""

from __future__ import annotations

import importlib
import json
import math
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import algebra, cpu, measure, run, summary, training
from benchmarks.case import Outcome, Row, Settings, measure_workload
from benchmarks.drawn import CHAINS, SINGLE, drawn
from benchmarks.implementations import Implementation
from benchmarks.layers import Size, Workload
from benchmarks.limits import cost
from benchmarks.measure import Timing
from benchmarks.worker import Worker
from benchmarks.workloads import ALL, EXTRA, MISSION, VISIBLE, by_name
from fusepass.config import override
from tests.support.interpreted import interpreted

# Milliseconds, worked out elsewhere from the same rates and rounded to three digits after the point.
# fmt: off
LIMITS = {
    "convt3d_layernorm_gelu_scale": 0.367, "convt3d_batchnorm_submean": 0.063, "convt2d_gelu_groupnorm": 1.654,
    "convt3d_scale_batchnorm_gap": 1.435, "layernorm_3d_shape": 0.134, "conv2d_relu_bias": 0.801,
    "convt3d_add_layernorm_avgpool_gelu": 0.155, "convt2d_sub_tanh": 0.735,
    "conv3d_relu_leaky_gelu_sigmoid_bias": 0.284, "linear_sub_mul_relu": 1.100,
    "convt2d_batchnorm_tanh_maxpool_groupnorm": 0.574, "convt3d_depthmean_add_softmax_tanh_scale": 1.240,
    "conv2d_instancenorm_div": 0.801, "conv2d_add_scale_sigmoid_groupnorm": 0.310,
    "conv2d_channelmin_tanh_tanh": 0.407, "conv3d_hardswish_groupnorm_mean": 0.184, "linear_mish_mish": 1.100,
    "conv2d_minconst_add_mul": 0.801, "linear_scale_batchnorm": 1.100, "conv2d_sub_hardswish_maxpool_mish": 0.801,
    "linear_swish_add_groupnorm": 2.199, "linear_batchnorm_gelu_relu": 4.398, "conv3d_maxpool_logsumexp_relu": 0.620,
    "linear_sigmoid_linear_logsumexp": 3.299, "conv3d_mish_tanh": 0.546, "convt3d_softmax_sigmoid": 0.134,
    "linear_sub_mean_logsumexp_gelu_residual": 2.199, "linear_scale_hardtanh_gelu": 2.199,
    "linear_maxpool1d_sum_scale": 2.199, "conv2d_relu_handwritten_hardswish": 0.138, "convt3d_relu_groupnorm": 0.620,
    "conv2d_avgpool_sigmoid_sum": 0.460, "conv2d_gelu_gap_squeeze": 0.203, "conv2d_batchnorm_scale": 0.138,
    "linear_groupnorm_min_bias": 1.100, "conv3d_mul_instancenorm_clamp_mul_max": 0.011,
    "conv2d_groupnorm_scale_maxpool_clamp": 0.050, "conv2d_sub_sub_mish": 0.558,
    "convt3d_maxpool_softmax_sub_swish_max": 0.015, "convt2d_softmax_bias_scale_sigmoid": 0.367,
    "convt2d_add_min_gelu_mul": 0.367, "linear_batchnorm_bias_div_swish": 1.100, "linear_gelu_softmax": 1.100,
    "softmax_wide": 3.018, "groupnorm_large": 3.520, "avgpool3d": 2.263, "batchnorm_train": 2.012,
}
# fmt: on


def test_limits_agree_with_those_worked_out_by_hand() -> None:
    computed = {workload.name: cost(workload).limit_ms for workload in MISSION + VISIBLE}
    assert computed.keys() == LIMITS.keys()
    for name, limit in LIMITS.items():
        assert computed[name] == pytest.approx(limit, rel=0.01, abs=0.0006), name


def test_cost_of_one_linear_layer() -> None:
    at_least = cost(by_name("linear_mish_mish"))
    assert at_least.matmul_flops == 2 * 1024 * 8192 * 8192
    assert at_least.convolution_flops == 0
    assert at_least.bytes == 4 * (8192 * 8192 + 8192 + 2 * 1024 * 8192)
    assert at_least.largest == 1024 * 8192


def test_cost_of_several_inputs_and_of_layers_of_the_library() -> None:
    pyramid = cost(by_name("feature_pyramid"))
    assert pyramid.bytes == 4 * (2 * 256 * 16 * 56 * 56 + 512 * 16 * 28 * 28 + 256 * (512 + 1 + 256 + 1 + 9 * 256 + 1))
    columns = cost(by_name("interactions_of_columns"))
    assert columns.bytes == 4 * 8192 * (13 + 1) + 8 * 8192 * 26 + 4 * (
        100000 * 64 + 14 * 64 + (64 + 27 * 27 + 1) * 64 + 65
    )
    per_step = 4 * 512 * (256 + 512) + 4 * 512 * (512 + 512)
    assert cost(by_name("lstm")).matmul_flops == 2 * 32 * 256 * per_step


def test_inputs_are_drawn_anew_in_their_memory() -> None:
    workload = by_name("interactions_of_columns")
    numbers, columns = inputs = workload.inputs(Size.REDUCED, "cpu")
    assert (numbers.dtype, columns.dtype, columns.shape) == (torch.float32, torch.int64, (4, 26))
    before = [x.clone() for x in inputs]
    workload.redraw(Size.REDUCED, inputs)
    assert not any(map(torch.equal, inputs, before))
    assert 0 <= columns.min() < columns.max() < 3125
    (half,) = by_name("half_conv2d_batchnorm_relu_add").inputs(Size.REDUCED, "cpu")
    assert half.dtype is torch.float16


def test_ten_extra_workloads_and_no_name_twice() -> None:
    assert len(EXTRA) == 13
    assert len({workload.name for workload in ALL}) == len(ALL)


def test_single_operators_are_measured_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []
    monkeypatch.setattr(run, "_measure", lambda found, *_: (chosen.extend(each.name for each in found), ([], []))[1])
    assert run.main(["--device", "cpu", "--only", "softmax_small"]) == 2
    assert run.main(["--device", "cpu", "--group", "single", "--only", "softmax_small|maxpool_odd$"]) == 0
    assert chosen == ["softmax_small", "maxpool_odd"]


OTHER_TYPES = {
    "half_to_float": torch.float32,
    "maximum_and_place_of_rows": torch.int64,
    "enlarged_classes": torch.int64,
    "half_place_of_rows": torch.int64,
    "nearest_points": torch.int64,
    "half_place_of_columns": torch.int64,
    "least_place_of_odd_rows": torch.int64,
    "to_bytes": torch.int8,
    "place_of_greatest_so_far": torch.int64,
}
"""Of the results of workloads, where these are not the workload's own type."""


@pytest.mark.parametrize("workload", ALL, ids=lambda workload: workload.name)
def test_reduced_workloads_run_and_use_every_parameter(workload: Workload) -> None:
    model, inputs = workload.model(Size.REDUCED, "cpu"), workload.inputs(Size.REDUCED, "cpu")
    assert model.training is workload.training
    found: Tensor | tuple[Tensor, ...] = model(*(x.requires_grad_(x.is_floating_point()) for x in inputs))
    results = found if isinstance(found, tuple) else (found,)
    for y in results:
        assert y.dtype == OTHER_TYPES.get(workload.name, workload.dtype)
        assert y.isfinite().all()
    if all(y.is_floating_point() for y in results):
        torch.stack([y.float().square().sum() for y in results]).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("number", range(60))
@pytest.mark.thinned(2)
def test_workloads_drawn_at_random_run_at_both_sizes(number: int) -> None:
    """What a seed gives is the same in the process that measures it, which is told a name."""
    workload, again = drawn(5, number), by_name(drawn(5, number).name)
    assert (workload.full, workload.reduced, workload.dtype) == (again.full, again.reduced, again.dtype)
    assert 0 < cost(workload).limit_ms < 20
    model, other = (each.model(Size.REDUCED, "cpu") for each in (workload, again))
    assert str(model) == str(other)
    with torch.no_grad():
        assert model(*workload.inputs(Size.REDUCED, "cpu")).numel() > 0


def test_seeds_draw_all_kinds() -> None:
    names = {drawn(5, number).name.split("_", 3)[3] for number in range(300)}
    assert names == {*SINGLE, *CHAINS}
    assert drawn(6, 0).full != drawn(5, 0).full


def test_a_network_of_several_inputs_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the command line to the table; in this process, and with kernels that are interpreted."""

    def here(self: Worker, workload: Workload, timeout_s: float) -> Row:
        with interpreted(), override(tune="off"):
            return measure_workload(workload, self._settings)

    monkeypatch.setattr(Worker, "measure", here)
    measured: list[Row] = []
    text = summary.text
    monkeypatch.setattr(summary, "text", lambda rows, left_out: (measured.extend(rows), text(rows, left_out))[1])
    arguments = ["--device", "cpu", "--group", "networks", "--only", "^interactions", "--seconds", "0"]
    assert run.main([*arguments, "--implementations", "eager,fusepass"]) == 0
    (row,) = measured
    assert row.group == "networks"
    assert row.regions
    assert all(outcome.correct and outcome.timing for outcome in row.outcomes.values())


@pytest.mark.parametrize(
    ("example", "workload"),
    [
        ("conv_transpose3d_layer_norm_gelu", MISSION[0]),
        ("conv_transpose3d_batch_norm_subtract_mean", MISSION[1]),
        ("conv_transpose2d_gelu_group_norm", MISSION[2]),
        ("conv_transpose3d_scale_batch_norm_pool", MISSION[3]),
        ("layer_norm_3d", MISSION[4]),
    ],
)
def test_examples_are_the_mission_workloads(example: str, workload: Workload) -> None:
    module = importlib.import_module(f"examples.{example}")
    torch.manual_seed(0)
    model = module.make_model()
    assert module.make_inputs("meta", full=True)[0].shape == workload.full
    (x,) = module.make_inputs("cpu", full=False)
    with torch.no_grad():
        assert torch.equal(model(x), workload.model(Size.FULL, "cpu")(x))


def test_timing_summary() -> None:
    timing = Timing.of([float(sample) for sample in range(101, 0, -1)])
    assert timing == Timing(median=51.0, low=11.0, high=91.0, runs=101)
    assert Timing.of([3.0]) == Timing(3.0, 3.0, 3.0, 1)


def test_calls_are_interleaved_on_fresh_inputs() -> None:
    events: list[str] = []
    calls = {"a": lambda: events.append("a"), "b": lambda: events.append("b")}
    timings = measure.interleaved(calls, lambda: events.append("new"), torch.device("cpu"), seconds=0)
    warm = 2 * measure.WARM_UPS
    assert events[:warm] == ["a"] * measure.WARM_UPS + ["b"] * measure.WARM_UPS
    rounds = [tuple(events[start : start + 3]) for start in range(warm, len(events), 3)]
    assert len(rounds) == 5
    assert {*rounds} == {("new", "a", "b"), ("new", "b", "a")}
    assert [timing.runs for timing in timings.values()] == [5, 5]


def test_poisoned_memory_is_what_the_next_tensor_gets() -> None:
    """Only seen where the allocator hands freed blocks out again, as glibc does with small ones, in whatever order."""
    measure.poison(torch.device("cpu"), 1 << 12)
    blocks = [torch.empty(1 << 10) for _ in range(8)]
    assert any(block.isnan().any() for block in blocks)


def row(name: str, group: str, eager: float, ours: float, correct: bool = True) -> Row:
    outcomes = {
        "eager": Outcome(timing=Timing(eager, eager, eager, 9), correct=True),
        "fusepass": Outcome(timing=Timing(ours, ours, ours, 9), correct=correct, check="max error 1"),
    }
    return Row(name, group, limit_ms=1.0, outcomes=outcomes)


def test_summary_means_and_problems() -> None:
    rows = [row("one", "mission", 8.0, 2.0), row("two", "extra", 4.0, 4.0, correct=False)]
    rows.append(Row("three", "extra", error="the process died with exit code -11"))
    assert summary.mean(rows, summary.over("eager")) == pytest.approx(2.0)
    assert summary.mean(rows, summary.of_limit("fusepass")) == pytest.approx(math.sqrt(1 / 8))
    assert summary.mean(rows, summary.over("compile")) is None
    text = summary.text(rows, ["four"])
    assert "two: fusepass is outside the numeric policy: max error 1" in text
    assert "three: the process died with exit code -11" in text
    assert "fusepass is 2.00 x eager" in text
    assert text.endswith("left out for lack of time (1): four")


def test_a_workload_that_hangs_is_stopped_and_the_next_one_measured() -> None:
    settings = Settings("cpu", Size.REDUCED, (Implementation.EAGER,), seconds=0.0)
    worker = Worker(settings)
    try:
        workload = by_name("softmax_wide")
        assert worker.measure(workload, timeout_s=0.0).error == "stopped after 0 s"
        result = worker.measure(workload, timeout_s=120)
    finally:
        worker.stop()
    assert result.error == ""
    assert result.outcomes["eager"].correct
    assert result.outcomes["eager"].timing is not None


def test_torch_compile_is_as_fast_as_the_better_of_its_modes() -> None:
    measured = row("one", "mission", 8.0, 2.0)
    measured.outcomes["compile"] = Outcome(timing=Timing(6.0, 6.0, 6.0, 9))
    assert "3.00 x compile" in summary.text([measured], [])
    measured.outcomes["autotune"] = Outcome(timing=Timing(5.0, 5.0, 5.0, 9))
    assert "2.50 x compile" in summary.text([measured], [])


def test_devices_share_the_workloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two are measured at the same time, or none would get beyond the barrier; rows keep the workloads' order."""
    meeting = threading.Barrier(2, timeout=30)

    def instead(self: Worker, workload: Workload, timeout_s: float) -> Row:
        meeting.wait()
        return Row(workload.name, workload.group.value)

    monkeypatch.setattr(Worker, "measure", instead)
    path = tmp_path / "rows.json"
    assert run.main(["--device", "cpu,cpu", "--only", "^convt3d_(layernorm|batchnorm)", "--json", str(path)]) == 0
    data = json.loads(path.read_text())
    assert [entry["workload"] for entry in data["rows"]] == [
        "convt3d_layernorm_gelu_scale",
        "convt3d_batchnorm_submean",
    ]
    assert data["devices"] == 2


def test_the_command_line_writes_json_and_says_what_the_budget_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def instead(self: Worker, workload: Workload, timeout_s: float) -> Row:
        return Row(workload.name, workload.group.value, seconds=1e9)

    monkeypatch.setattr(Worker, "measure", instead)
    path = tmp_path / "out" / "rows.json"
    arguments = ["--device", "cpu", "--group", "mission", "--only", "convt", "--budget-s", "60", "--json", str(path)]
    assert run.main(arguments) == 0
    data = json.loads(path.read_text())
    assert [entry["workload"] for entry in data["rows"]] == ["convt3d_layernorm_gelu_scale"]
    assert len(data["left_out"]) == 3
    assert data["torch"] == torch.__version__
    assert "left out for lack of time (3)" in capsys.readouterr().out
    assert run.main(["--only", "no such workload"]) == 2


def test_the_cpu_benchmark_measures_both_and_says_what_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu, "CASES", {"chain": cpu.Case(lambda x: torch.tanh(x) * 2, (64, 64))})
    monkeypatch.setenv("FUSEPASS_TUNE", "fast")
    threads = torch.get_num_threads()
    try:
        assert cpu.main(["--seconds", "0", "--json", str(tmp_path / "rows.json")]) == 0
    finally:
        torch.set_num_threads(threads)
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert (row["name"], row["rounds"]) == ("chain", 5)
    assert row["chosen"] in (["eager"], ["generated"])
    assert row["ratio"] == pytest.approx(row["eager"] / row["fusepass"])
    assert "geometric mean" in capsys.readouterr().out


def test_steps_of_training_are_measured_in_all_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training, "WAYS", {"eager": None, "fusepass": "fusepass", "other": "no such backend"})
    path = tmp_path / "rows.json"
    arguments = ["--device", "cpu", "--size", "reduced", "--seconds", "0", "--json", str(path)]
    assert training.main([*arguments, "--only", "^gates"]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["name"] == "gates"
    steps = row["steps"]
    assert steps["eager"]["off"] < 1e-5
    assert steps["fusepass"]["off"] < 2 * steps["eager"]["off"] + 1e-6
    assert steps["fusepass"]["timing"]["runs"] == 5
    assert "no such backend" in steps["other"]["error"]
    assert "off" in capsys.readouterr().out
    assert training.main([*arguments, "--only", "no such model"]) == 2


def test_the_algebra_saves_on_a_cpu_what_it_is_said_to_save() -> None:
    """The committed figures, of each case, are what is asked for."""
    rows = json.loads(algebra.RESULTS.read_text())["rows"]
    assert [row["name"] for row in rows] == list(algebra.CASES)
    for row in rows:
        case = algebra.CASES[row["name"]]
        assert (tuple(row["shape"]), row["least"]) == (case.shape, case.least)
        assert row["correct"]
        assert row["compiled"] / row["fusepass"] >= case.least
