"""Reports: text that fits the terminal, JSON that keeps everything, sums over graphs, counted fallbacks."""

import copy
import json
import pickle
import threading
import warnings
from dataclasses import asdict, replace
from pathlib import Path

import networkx as nx
import pytest
import torch
from torch import nn

import fusepass
from fusepass.errors import FusepassWarning
from fusepass.report.choice import Choice
from fusepass.report.report import (
    CaptureRoute,
    KernelRecord,
    OpRecord,
    RefusalReport,
    RegionReport,
    RegionState,
    Report,
    RewriteReport,
    SourceFile,
)
from fusepass.report.table import Column, human_bytes, human_count, shorten, table
from fusepass.runtime.fallbacks import FallbackCounter, FallbackReport

MIB = 1 << 20

CONV = RegionReport(
    name="conv_transpose_native_layer_norm_gelu_mul",
    pattern="anchor",
    ops=(
        OpRecord("convolution", "aten.convolution.default", "net.py:12 in forward"),
        OpRecord("gelu", "aten.gelu.default", "net.py:13 in forward"),
        OpRecord("mul", "aten.mul.Tensor", "net.py:13 in forward"),
    ),
    kernels=(KernelRecord("gelu_mul", "grid 64, 256 threads, one row per warp", 2 * MIB, MIB),),
    bytes_before=6 * MIB,
    bytes_after=2 * MIB,
    anchor="library: aten.convolution",
    device="cuda:0",
    signature="float32[2, 3, 8, 8] -> float32[2, 4, 8, 8]",
    sources=(
        SourceFile("gelu_mul.cu", Path("cache/ab/gelu_mul.cu"), "int entry();\n"),
        SourceFile("b", None, ""),
    ),
    build_seconds=0.5,
)
NORM = RegionReport(
    name="norm",
    pattern="normalisation",
    ops=(OpRecord("native_layer_norm", "aten.native_layer_norm.default"),),
    kernels=(),
    bytes_before=4 * MIB,
    bytes_after=3 * MIB,
    anchor=None,
    device="cuda:0",
    signature="float32[8] -> float32[8]",
    state=RegionState.FALLBACK,
    reason="the build failed:\n" + "error: " * 200,
)
FOLD = RewriteReport("fold-scale", "mul", 3_000_000, 0, 4 * MIB, 2 * MIB)
CLONE = RewriteReport("idle-clone", "clone")
REPORT = Report(
    model="Net",
    device="cuda:0",
    capture=CaptureRoute.TRACED,
    regions=(CONV, NORM),
    refusals=(
        RefusalReport("sort", "aten.sort.default", "no class of operators", "net.py:14 in forward"),
        RefusalReport("sort_1", "aten.sort.default", "no class of operators", "net.py:15 in forward"),
        RefusalReport("topk", "aten.topk.default", "no class of operators"),
    ),
    fallbacks=(FallbackReport("norm", "the build failed", 3),),
    rewrites=(FOLD, FOLD, CLONE),
    ops_total=8,
    ops_fused=4,
    seconds=(("capture", 0.25), ("build", 1.5)),
)


def test_totals() -> None:
    assert REPORT.fused_share == 0.5
    assert REPORT.bytes_before == 10 * MIB
    assert REPORT.bytes_saved == 4 * MIB, "a region that fell back saves nothing"
    assert replace(REPORT, ops_total=0, ops_fused=0).fused_share == 0.0


def test_json_round_trip() -> None:
    assert Report.from_json(REPORT.to_json()) == REPORT
    untouched = Report("Net", "cpu", CaptureRoute.UNTOUCHED, reason="forward() reads a file")
    assert Report.from_json(untouched.to_json()) == untouched


def test_a_choice_is_kept_and_told() -> None:
    times = (("eager", 2e-3), ("generated", 2.5e-3))
    left = replace(
        NORM,
        state=RegionState.EAGER,
        reason=None,
        choice=Choice("eager", times, 0.8, interval=(0.79, 0.82), dropped=(("x", "no"),)),
    )
    unclear = replace(CONV, choice=Choice(reason="a tensor has no elements"))
    report = replace(REPORT, regions=(left, unclear))
    assert Report.from_json(report.to_json()) == report
    words = " ".join(str(report).split())
    told = 'left to eager: chosen "eager": generated code runs at 0.80x eager in the median round (0.79 to 0.82), measured (lower quartiles: eager 2 ms, generated 2.5 ms); "x" is not used: no'
    assert told in words
    assert 'chosen "generated": not measured, a tensor has no elements' in words
    assert "regions: 1 eager, 1 fused" in words
    assert left.bytes_saved == 0


def test_json_keys_and_values() -> None:
    data = json.loads(REPORT.to_json())
    assert list(data) == [
        "format", "model", "device", "capture", "regions", "refusals", "fallbacks", "reason", "rewrites",
        "ops_total", "ops_fused", "seconds", "cuda_graphs", "background", "graphs", "backward",
    ]  # fmt: skip
    assert list(data["regions"][0]) == [
        "name", "pattern", "ops", "kernels", "bytes_before", "bytes_after", "anchor", "device", "signature",
        "state", "reason", "sources", "build_seconds", "choice", "sizes", "like", "written",
        "ruled_out", "beyond_budget",
    ]  # fmt: skip
    assert data["format"] == 2
    told = (Path(__file__).parents[2] / "docs" / "report.md").read_text()
    keys = [*data, *data["regions"][0], *asdict(Choice())]
    assert [key for key in keys if f"`{key}`" not in told] == []
    assert data["capture"] == "traced"
    assert data["rewrites"][0] == {
        "rule": "fold-scale",
        "node": "mul",
        "flops_before": 3_000_000,
        "flops_after": 0,
        "bytes_before": 4 * MIB,
        "bytes_after": 2 * MIB,
    }
    assert data["seconds"] == {"capture": 0.25, "build": 1.5}
    assert data["regions"][0]["ops"][1] == {
        "name": "gelu",
        "target": "aten.gelu.default",
        "location": "net.py:13 in forward",
    }
    assert [source["path"] for source in data["regions"][0]["sources"]] == ["cache/ab/gelu_mul.cu", None]
    assert [region["state"] for region in data["regions"]] == ["fused", "fallback"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": 1}',
        '{"format": 2}',
        REPORT.to_json().replace('"fused"', '"melted"'),
        REPORT.to_json().replace('"target"', '"goal"'),
    ],
)
def test_from_json_refuses_what_is_no_report(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - also json's own error
        Report.from_json(text)


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
def test_text_fits_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    long = replace(CONV, name="encoder_" * 40, pattern="p" * 300, signature="s" * 300)
    for value in (REPORT, replace(REPORT, regions=(long, NORM), reason="r" * 500), CONV, NORM, long):
        lines = str(value).splitlines()
        assert max(map(len, lines)) <= columns
        assert all(line == line.rstrip() for line in lines)


def test_text_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = str(REPORT)
    assert text.splitlines()[:8] == [
        "Net on cuda:0, traced",
        "",
        "region                                ops  kernels    before     after  state",
        "-" * 80,
        "conv_transpose_na...er_norm_gelu_mul    3        1  6.00 MiB  2.00 MiB  fused",
        "    pattern: anchor",
        "    net.py:12 in forward: convolution",
        "    net.py:13 in forward: gelu, mul",
    ]
    assert "    anchor (library: aten.convolution)\n" in text
    assert "  sort (net.py:14 in forward and 1 more): no class of operators\n" in text
    assert "  topk (topk): no class of operators\n" in text
    assert "  norm, 3 calls: the build failed\n" in text
    assert "  fold-scale, 2 times: FLOPs 6.00 M to 0, bytes 8.00 MiB to 4.00 MiB\n  idle-clone, 1 time\n" in text
    assert text.endswith(
        "operators fused: 4 of 8 (50%)\n"
        "regions: 1 fused, 1 fallback\n"
        "memory traffic saved per call: 4.00 MiB of 10.0 MiB (40%)\n"
        "seconds: capture 0.25, build 1.50"
    )
    assert text.count("error:") < 60, "a compiler's output is cut"


def test_narrow_terminal_keeps_every_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    words = " ".join(str(REPORT).split())
    assert "conv_transpose_nati...ayer_norm_gelu_mul ops 3, kernels 1, before 6.00 MiB" in words
    assert "after 2.00 MiB, state fused" in words


def test_wide_terminal_keeps_the_whole_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert CONV.name in str(REPORT)


def test_text_without_regions_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = str(Report("Net", "cpu", CaptureRoute.UNTOUCHED, reason="forward() reads a file"))
    assert text.startswith("Net on cpu, left as it is: forward() reads a file\n\nno regions\n\n")
    assert "memory traffic saved per call: 0 B of 0 B (0%)" in text


def test_region_text_lists_kernels_and_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert str(CONV).splitlines()[-3:] == [
        "  kernel gelu_mul: grid 64, 256 threads, one row per warp; reads 2.00 MiB, writes 1.00 MiB",
        "  source gelu_mul.cu: cache/ab/gelu_mul.cu",
        "  source b: not written to disk",
    ]
    assert "because: the build failed:" in str(NORM)


def test_merge_adds_up() -> None:
    other = Report(
        model="Net",
        device="cpu",
        capture=CaptureRoute.DYNAMO,
        regions=(NORM,),
        refusals=(REPORT.refusals[0], RefusalReport("cat", "aten.cat.default", "two consumers")),
        fallbacks=(FallbackReport("norm", "the build failed", 4), FallbackReport("norm", "gradients", 1)),
        reason="data-dependent control flow",
        rewrites=(CLONE,),
        ops_total=2,
        ops_fused=1,
        seconds=(("capture", 0.5), ("partition", 0.125)),
    )
    merged = Report.merge([REPORT, other])
    assert merged == Report(
        model="Net",
        device="cuda:0, cpu",
        capture=CaptureRoute.DYNAMO,
        regions=(CONV, NORM, NORM),
        refusals=(*REPORT.refusals, other.refusals[1]),
        fallbacks=(FallbackReport("norm", "the build failed", 7), FallbackReport("norm", "gradients", 1)),
        reason="data-dependent control flow",
        rewrites=(FOLD, FOLD, CLONE, CLONE),
        ops_total=10,
        ops_fused=5,
        seconds=(("capture", 0.75), ("build", 1.5), ("partition", 0.125)),
    )
    assert Report.merge([REPORT]) == REPORT


class Sorted(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, places = (x.exp() * 2 + x).sort(-1)
        return values.tanh() * places.to(x.dtype)


def test_the_graph_before_and_after_goes_to_networkx() -> None:
    with torch.no_grad():
        report = fusepass.optimize(Sorted(), torch.randn(4, 8), tune="off").report()
    before, after = report.to_networkx(fused=False), report.to_networkx()
    assert nx.is_directed_acyclic_graph(before)
    assert nx.is_directed_acyclic_graph(after)
    targets = [data["target"] for _, data in before.nodes(data=True) if data["kind"] == "operator"]
    assert sorted(targets)[:2] == ["aten._to_copy", "aten.add"]
    assert len(targets) == report.ops_total
    fused = [data["ops"] for _, data in after.nodes(data=True) if data["kind"] == "region"]
    assert sum(map(len, fused)) == report.ops_fused
    (sort,) = (name for name, data in after.nodes(data=True) if data["target"] == "aten.sort")
    assert [edge["type"] for *_, edge in after.in_edges(sort, data=True)] == ["float32[4, 8]"]
    assert sorted(edge["bytes"] for *_, edge in after.out_edges(sort, data=True)) == [4 * 8 * 4, 4 * 8 * 8]
    assert Report.from_json(report.to_json()).graphs == report.graphs
    twice = Report.merge([report, report]).to_networkx()
    assert (len(twice), twice.size()) == (2 * len(after), 2 * after.size())


def test_merge_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one report"):
        Report.merge([])


@pytest.mark.invariant(21)
def test_fallbacks_are_counted_and_warned_of_once() -> None:
    counter = FallbackCounter()
    with pytest.warns(FusepassWarning, match="norm runs as the original operators: gradients are needed") as seen:
        counter.count("norm", "gradients are needed")
    assert "doctor" not in str(seen[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        counter.count("norm", "gradients are needed")
    with pytest.warns(FusepassWarning, match=r"no compiler; `python -m fusepass doctor`"):
        counter.count("norm", "no compiler", toolchain=True)
    with warnings.catch_warnings(action="error"):  # the tool chain is spoken of once, whatever it fails at
        counter.count("gelu", "no compiler", toolchain=True)
    with pytest.warns(FusepassWarning, match="gelu runs"):
        counter.count("gelu", "gradients are needed")
    assert counter.total == 5
    assert counter.records() == (
        FallbackReport("norm", "gradients are needed", 2),
        FallbackReport("norm", "no compiler", 1),
        FallbackReport("gelu", "no compiler", 1),
        FallbackReport("gelu", "gradients are needed", 1),
    )


def test_counting_from_threads_loses_nothing_and_warns_once() -> None:
    counter = FallbackCounter()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        threads = [threading.Thread(target=lambda: [counter.count("r", "c") for _ in range(2000)]) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert counter.records() == (FallbackReport("r", "c", 16000),)
    assert len(seen) == 1


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda counter: pickle.loads(pickle.dumps(counter))])
def test_copies_of_a_counter_are_independent(duplicate) -> None:
    counter = FallbackCounter()
    with pytest.warns(FusepassWarning):
        counter.count("r", "c")
    twin = duplicate(counter)
    twin.count("r", "c")
    assert (counter.total, twin.total) == (1, 2)
    assert duplicate(FallbackCounter()).total == 0


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (-1536, "-1.50 KiB"),
        (12 * MIB, "12.0 MiB"),
        (320 << 30, "320 GiB"),
        (1000 * MIB, "0.98 GiB"),
        (10 * MIB - 1, "10.0 MiB"),
        (1 << 60, "1024 PiB"),
    ],
)
def test_human_bytes(count: int, text: str) -> None:
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"), [(999, "999"), (1500, "1.50 K"), (12_000_000, "12.0 M"), (10**18, "1000 P")]
)
def test_human_count(count: int, text: str) -> None:
    assert human_count(count) == text


def test_shorten_keeps_both_ends() -> None:
    assert shorten("abcdefghij", 10) == "abcdefghij"
    assert shorten("abcdefghij", 9) == "abc...hij"
    assert shorten("abcdefghij", 8) == "abc...ij"
    assert [shorten("abcdefghij", width) for width in (4, 1, 0)] == ["abcd", "a", ""]


def test_table_takes_from_the_widest_column_first() -> None:
    columns = (Column("a", least=4), Column("b", least=4), Column("n", right=True))
    blocks = table(columns, [("x" * 30, "y" * 10, "5"), ("x", "", "12")], 28)
    assert blocks == [
        ["a             b            n"],
        ["xxxxx...xxxx  yyyyyyyyyy   5"],
        ["x                         12"],
    ]
