"""What became of a whole graph is kept on disk: found by all that decides it, and as good as what is compiled anew."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusepass
from examples.small_products import SmallProducts
from fusepass.autotune import layout, tune
from fusepass.capture.trace import Captured, capture
from fusepass.codegen import cache, cache_archive, choices, toolchain
from fusepass.codegen.detect import taken_for
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.lowering import registry
from fusepass.codegen.render.cuda.family import register, unregister
from fusepass.codegen.search.candidate import GENERATED
from fusepass.compile import pipeline, recalled
from fusepass.config import override
from fusepass.patterns import pattern
from fusepass.patterns.library import POINTWISE
from fusepass.patterns.packing import PACKED_WEIGHTS
from fusepass.report.choice import EAGER, Choice

pytestmark = pytest.mark.usefixtures("graphs", "without_gradients")

X = torch.randn(2, 3, 8, 8)


class Network(nn.Module):
    """A library's convolution and a product, a reduction, a constant, a statistic that is written, an operator alone, two results."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm, self.linear = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
        y = torch.relu(self.norm(self.convolution(x))) * weights
        return torch.softmax(self.linear(y), -1), x.flatten(1).sum(1)


class Chain(nn.Module):
    """One region, which is all that a call runs."""

    def __init__(self, shift: float = 1.0) -> None:
        super().__init__()
        self.shift, self.scale = shift, nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.scale) * 2 + self.shift


@pytest.fixture
def simplified(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The graphs that are compiled from now on, by the names of their models' operators."""
    found: list[str] = []
    real: Callable[..., Any] = pipeline.simplify

    def counted(graph: Any) -> Any:
        found.append(str(graph.graph))
        return real(graph)

    monkeypatch.setattr(pipeline, "simplify", counted)
    return found


def compiled_of(fused: Any) -> pipeline.CompiledGraph:
    (made,) = fused._specialiser.table
    compiled: pipeline.CompiledGraph = made.compiled
    return compiled


@pytest.mark.parametrize("training", [False, True])
def test_a_second_process_decides_nothing(
    simplified: list[str], monkeypatch: pytest.MonkeyPatch, training: bool
) -> None:
    models = [Network().train(training) for _ in range(2)]
    plain = copy.deepcopy(models[1])
    first, again = (fusepass.optimize(model, tune="off") for model in models)
    first(X)
    assert len(simplified) == 1

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something was decided")

    with monkeypatch.context() as patch:
        for name in ("partition", "chosen_layout", "generated", "build_candidates", "splice", "operators_of"):
            patch.setattr(pipeline, name, never)
        for _ in range(3):  # the values of parameters are no part of the key; the third call needs no Python
            torch.testing.assert_close(again(X), plain(X))
    torch.testing.assert_close(models[1].state_dict(), plain.state_dict())
    assert len(simplified) == 1
    was, now = first.report(), again.report()
    assert [*now.regions] == [replace(region, build_seconds=0.0) for region in was.regions]
    assert (now.refusals, now.rewrites, now.graphs) == (was.refusals, was.rewrites, was.graphs)
    assert now.fallbacks == ()
    assert [stage for stage, _ in now.seconds] == ["capture", "look up"]


def test_weights_that_are_laid_out_once(graphs: Path, simplified: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that was quicker, edits are noticed as ever; where there is no memory for it by now, nothing is recalled."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
    chosen(monkeypatch, GENERATED)
    monkeypatch.setattr(
        layout,
        "_fastest",
        lambda _, forms: (PACKED_WEIGHTS if PACKED_WEIGHTS in forms else layout._PLAIN, dict.fromkeys(forms, 1.0)),
    )
    monkeypatch.setattr(pipeline, "leave_out", lambda *_, **__: None)
    fusepass.optimize(model, tune="fast")(X)
    again = fusepass.optimize(model, tune="fast")
    for _ in range(3):
        torch.testing.assert_close(again(X), model(X))
        model[0].weight.data.mul_(1.5)
    torch.testing.assert_close(again(X), model(X))
    assert len(simplified) == 1
    assert PACKED_WEIGHTS in [rewrite.rule for rewrite in again.report().rewrites]
    assert json.loads(next(graphs.glob("*.json")).read_text())["record"]["packed"]
    monkeypatch.setattr(layout, "free_bytes", lambda device: 0)
    torch.testing.assert_close(fusepass.optimize(model, tune="fast")(X), model(X))
    assert len(simplified) == 2


def test_a_call_of_one_region_needs_as_little(simplified: list[str]) -> None:
    model, x = Chain(), torch.rand(2, 8)
    fusepass.optimize(model, tune="off")(x)
    again = fusepass.optimize(model, tune="off")
    for _ in range(4):
        torch.testing.assert_close(again(x), model(x))
    run, positions = compiled_of(again).without_python()
    assert (len(simplified), [*positions]) == (1, [1, 0])
    torch.testing.assert_close(run(x, model.scale)[0], model(x))


def test_what_else_is_asked_of_it_is_compiled_then(simplified: list[str], tmp_path: Path) -> None:
    model = Network().eval()
    fusepass.optimize(model, tune="off")(X)
    again = fusepass.optimize(model, tune="off")
    expected = again(X)
    assert len(simplified) == 1
    for result, wanted in zip(again.graph_module(X)(X), expected, strict=True):
        assert torch.equal(result, wanted)
    assert len(simplified) == 2
    assert [work.region.name for work in compiled_of(again).works] == [region.name for region in again.report().regions]
    fusepass.save(again, tmp_path / "model.fp", X)
    for result, wanted in zip(fusepass.load(tmp_path / "model.fp")(X), expected, strict=True):
        assert torch.equal(result, wanted)
    assert len(simplified) == 2


def test_dynamo_traces_what_was_recalled(simplified: list[str]) -> None:
    model, x = Chain(), torch.rand(2, 8)
    fusepass.optimize(model, tune="off")(x)
    again = fusepass.optimize(model, tune="off")
    again(x)
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    around = torch.compile(lambda x: again(x) + 1, backend=backend, fullgraph=True)
    torch.testing.assert_close(around(x), model(x) + 1)
    assert len(simplified) == 2
    assert "torch.ops.fusepass" in graphs[0].code or "fusepass" in graphs[0].print_readable(print_output=False)


def test_sizes_that_come_later_know_of_those_recalled(simplified: list[str]) -> None:
    model = Chain()
    fusepass.optimize(model, tune="off")(torch.rand(2, 8))
    again = fusepass.optimize(model, tune="off")
    for rows in (2, 3, 5):
        x = torch.rand(rows, 8)
        torch.testing.assert_close(again(x), model(x))
    assert len(simplified) == 4  # the first in the first process, and as others come
    assert "for several sizes" in str([region.sizes for region in again.report().regions])


def key_of(model: nn.Module, *inputs: Tensor, given: int = 1, **options: Any) -> str | None:
    with override(**options):
        captured = capture(model, inputs, {})
        assert isinstance(captured, Captured)
        return recalled.key_of(captured.graph, parameters=given)


class Renamed(Chain):
    def forward(self, y: Tensor) -> Tensor:
        return torch.tanh(y * self.scale) * 2 + self.shift


class Constant(nn.Module):
    def __init__(self, values: list[float]) -> None:
        super().__init__()
        self.values = values

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tensor(self.values)


class Seen(nn.Module):
    """The same operators, whose results lie in one memory or in two."""

    def __init__(self, *, once: bool) -> None:
        super().__init__()
        self.once = once

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, z = x + 1, x + 1
        return y.view(-1), (y if self.once else z).view(-1)


_SWITCHES: dict[str, tuple[Callable[[Any], object], object, object]] = {
    "threads": (torch.set_num_threads, torch.get_num_threads() + 1, torch.get_num_threads()),
    "default type": (torch.set_default_dtype, torch.float64, torch.float32),
    "determinism": (torch.use_deterministic_algorithms, True, False),
    "flash attention": (torch.backends.cuda.enable_flash_sdp, False, True),
    "oneDNN": (torch._C._set_mkldnn_enabled, False, True),
    "cuDNN's search": (torch._C._set_cudnn_benchmark, True, False),
}


def test_what_decides_what_becomes_of_a_graph_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.rand(2, 8)
    keys = {
        "as it is": key_of(Chain(), x),
        "shape": key_of(Chain(), torch.rand(3, 8)),
        "strides": key_of(Chain(), torch.rand(8, 2).t()),
        "type": key_of(Chain(), x.double()),
        "number": key_of(Chain(1.5), x),
        "names": key_of(Renamed(), x),
        "visible results": key_of(Chain(), x, given=2),
        "constant": key_of(Constant([1.0, 2.0]), x[:, :2]),
        "constant of other contents": key_of(Constant([1.0, 3.0]), x[:, :2]),
        "memory shared": key_of(Seen(once=True), x),
        "memory apart": key_of(Seen(once=False), x),
        "tune": key_of(Chain(), x, tune="max"),
        "rounding": key_of(Chain(), x, rounding="eager"),
        "algebra": key_of(Chain(), x, algebra="off"),
        "disable": key_of(Chain(), x, disable={"pointwise"}),
        "budget": key_of(Chain(), x, tune_budget=1.0),
    }
    with taken_for(DeviceFacts.cpu(cores=77)):
        keys["device"] = key_of(Chain(), x)
    for name, (change, value, before) in _SWITCHES.items():
        change(value)
        try:
            keys[name] = key_of(Chain(), x)
        finally:
            change(before)
    for owner, name, value in (
        (recalled, "package_key", lambda: "of another version"),
        (torch, "__version__", "of another version"),
        (toolchain, "cpu_identity", lambda: "another one"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            keys[name] = key_of(Chain(), x)
    assert None not in keys.values()
    assert len({*keys.values()}) == len(keys), sorted(keys, key=lambda name: str(keys[name]))
    weighted = Chain()
    weighted.scale.mul_(3)
    assert key_of(weighted, torch.rand(2, 8)) == keys["as it is"]
    elsewhere = {"cache_dir": "/elsewhere", "cache_size": 1 << 30, "progress": False, "max_signatures": 9}
    assert key_of(Chain(), x, **elsewhere) == keys["as it is"]


def test_nothing_is_kept_of_what_cannot_be_told_or_is_to_be_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    x = torch.rand(2, 8)
    assert key_of(Chain(), x, debug=True) is None
    assert key_of(Chain(), x, dump=tmp_path) is None
    with monkeypatch.context() as patch:
        tanh = registry._HANDLERS[torch.ops.aten.tanh.default]
        patch.setitem(registry._HANDLERS, torch.ops.aten.tanh.default, lambda call, x: tanh(call, x))
        assert key_of(Chain(), x) is None  # what a user has registered is not in the package's files
    register(SmallProducts())
    try:
        assert key_of(Chain(), x) is None
    finally:
        unregister(SmallProducts.name)
    own = pattern.Pattern(**{**vars(POINTWISE), "name": "own"})
    pattern.register(own)
    try:
        assert key_of(Chain(), x) is None
    finally:
        pattern.unregister("own")
    assert key_of(Chain(), x) is not None


def chosen(monkeypatch: pytest.MonkeyPatch, name: str, **told: Any) -> list[str]:
    """Let every trial choose `name`; gives a list that grows with each."""
    measured: list[str] = []

    def fastest(*_: Any) -> Choice:
        measured.append(name)
        return Choice(name, seconds=((EAGER, 1.0), (GENERATED, 1.0)), speedup=1.0, **told)

    monkeypatch.setattr(tune, "fastest", fastest)
    return measured


@pytest.mark.parametrize("name", [GENERATED, EAGER])
def test_it_serves_as_long_as_the_choices_that_it_was_made_by(
    name: str, simplified: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = chosen(monkeypatch, name)
    model, x = Chain(), torch.rand(2, 8)

    def run() -> tuple[int, int]:
        """How many graphs were compiled and how many choices made so far."""
        fused = fusepass.optimize(model, tune="fast")
        torch.testing.assert_close(fused(x), model(x))
        (region,) = fused.report().regions
        assert region.choice is not None
        assert region.choice.chosen == name
        return len(simplified), len(measured)

    assert (run(), run()) == ((1, 1), (1, 1))
    choices.clear()
    assert (run(), run()) == ((2, 2), (2, 2))
    (entry,) = choices.entries()
    assert entry.record is not None
    other = {**vars(entry.record), "created": "another time"}
    choices.store(entry.key, choices.Record(**other))  # as somebody who has measured once more
    assert (run(), run()) == ((3, 2), (3, 2))


def test_what_was_decided_for_a_process_alone_is_not_kept(
    graphs: Path, simplified: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Chain(), torch.rand(2, 8)
    with monkeypatch.context() as patch:
        chosen(patch, GENERATED, disturbed=True)
        fusepass.optimize(model, tune="fast")(x)
    with monkeypatch.context() as patch:
        patch.setattr(tune.measure, "free_bytes", lambda device: 0)
        torch.testing.assert_close(fusepass.optimize(model, tune="fast")(x), model(x))
    assert not graphs.exists()
    assert len(simplified) == 2


def test_records_are_moved_cleared_and_damaged_as_libraries_are(
    graphs: Path, simplified: list[str], tmp_path: Path
) -> None:
    model, x = Chain(), torch.rand(2, 8)

    def run() -> int:
        """How many graphs were compiled for a new model."""
        before = len(simplified)
        torch.testing.assert_close(fusepass.optimize(model, tune="off")(x), model(x))
        return len(simplified) - before

    assert (run(), run()) == (1, 0)
    (path,) = graphs.glob("*.json")
    cache_archive.write(tmp_path / "archive")
    whole = path.read_text()
    for text in ("", "[]", whole[:-9], whole.replace("tanh", "tan_h")):
        path.write_text(text)
        assert (run(), run()) == (1, 0), text
    path.write_text(json.dumps(json.loads(whole) | {"sha256": 64 * "0"}))
    assert run() == 1
    path.chmod(0o666)  # others may have written it
    assert run() == 1
    for entry in cache.entries():
        entry.library.unlink(missing_ok=True)
    assert (run(), run()) == (1, 0)
    cache.clear()
    assert not graphs.exists()
    cache_archive.read(tmp_path / "archive")
    assert run() == 0


def test_other_compilers_build_anew(simplified: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Chain(), torch.rand(2, 8)
    fusepass.optimize(model, tune="off")(x)
    with monkeypatch.context() as patch:
        patch.setattr(recalled, "compilers", lambda source: "-0123456789abcdef")
        fusepass.optimize(model, tune="off")(x)
    assert len(simplified) == 2
    with monkeypatch.context() as patch:
        patch.setattr(recalled, "compilers", lambda source: "")  # there is none, and what any made serves
        torch.testing.assert_close(fusepass.optimize(model, tune="off")(x), model(x))
    assert len(simplified) == 2
