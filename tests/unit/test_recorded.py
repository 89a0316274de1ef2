"""What was generated of a region is kept on disk: found by all that decides it, and as good as what is generated anew."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusepass
from examples.small_products import SmallProducts
from fusepass.autotune import candidates, recorded, tune
from fusepass.capture.trace import Captured, capture
from fusepass.codegen import cache, cache_archive, cache_limit, choices, generate, key
from fusepass.codegen.detect import taken_for
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.forms import Forms
from fusepass.codegen.generate import TEAMS
from fusepass.codegen.ir.text import program_text
from fusepass.codegen.lowering import registry
from fusepass.codegen.lowering.lower import lower
from fusepass.codegen.render.cuda.family import register, unregister
from fusepass.codegen.search.candidate import GENERATED
from fusepass.compile import pipeline
from fusepass.config import override
from fusepass.patterns.partition import partition
from fusepass.patterns.simplify import simplify
from fusepass.report.choice import EAGER, Choice

pytestmark = pytest.mark.usefixtures("records", "without_gradients")  # but not `graphs`: whole graphs are compiled anew


class Convolved(nn.Module):
    """Three regions: a convolution that the library computes, a reduction along rows, and a pointwise one like an earlier one."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 4, 3), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(torch.relu(self.convolution(x))) * 2)


class Chain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * 2 + 1


@pytest.fixture
def generations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the regions that are lowered from now on."""
    lowered: list[str] = []

    def counted(graph: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        lowered.append(name)
        return lower(graph, name, *args, **kwargs)

    monkeypatch.setattr(candidates, "lower", counted)
    return lowered


def test_a_second_process_generates_nothing(generations: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Convolved(), torch.randn(2, 3, 8, 8)
    first = fusepass.optimize(model)
    expected = first(x)
    assert len(generations) == len(first.report().regions) > 0
    torch.testing.assert_close(expected, model(x))

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something was generated")

    for owner, name in (
        (candidates, "lower"),
        (generate, "run_passes"),
        (generate, "render"),
        (candidates, "search_space"),
    ):
        monkeypatch.setattr(owner, name, never)
    again = fusepass.optimize(model)
    assert torch.equal(again(x), expected)
    assert again.report().fallbacks == ()
    assert [told(region) for region in again.report().regions] == [told(region) for region in first.report().regions]


def told(region: Any) -> tuple[Any, ...]:
    return region.name, region.kernels, region.sources, region.bytes_after, region.state, region.anchor


class Shifted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * 2 + 1.5


class Renamed(nn.Module):
    def forward(self, y: Tensor) -> Tensor:
        return torch.tanh(y) * 2 + 1


def key_of(model: nn.Module, x: Tensor, **options: Any) -> str | None:
    """The key of the one region of `model`; nothing is built."""
    with override(**options):
        captured = capture(model, (x,), {})
        assert isinstance(captured, Captured)
        graph = captured.graph
        simplify(graph)
        (work,), _ = pipeline.generated(graph, partition(graph).regions, Forms())
    return work.record_key


def test_what_decides_what_is_generated_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.rand(8)
    keys = [
        key_of(Chain(), x),
        key_of(Chain(), torch.rand(9)),
        key_of(Chain(), torch.rand(16)[::2]),
        key_of(Chain(), x.double()),
        key_of(Shifted(), x),
        key_of(Renamed(), x),
        key_of(Chain(), x, disable={TEAMS}),
        key_of(Chain(), x, tune="max"),
    ]
    with taken_for(DeviceFacts.cpu(cores=77)):
        keys.append(key_of(Chain(), x))
    torch.set_default_dtype(torch.float64)
    try:
        keys.append(key_of(Chain(), x))
    finally:
        torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(recorded, "package_key", lambda: "of another version")
    keys.append(key_of(Chain(), x))
    monkeypatch.undo()
    assert None not in keys
    assert len({*keys}) == len(keys)
    assert key_of(Chain(), torch.rand(8)) == keys[0]


def test_nothing_is_kept_of_what_cannot_be_told_or_is_to_be_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    x = torch.rand(8)
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
    assert key_of(Chain(), x) is not None


def test_the_package_is_known_by_what_is_in_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "codegen").mkdir()
    file = tmp_path / "codegen" / "key.py"
    monkeypatch.setattr(key, "__file__", str(file))
    found: list[str] = []
    for text in ("one", "two", "one"):
        file.write_text(text)
        (tmp_path / "codegen" / "key.pyc").write_text(str(len(found)))  # which says nothing more
        found.append(key.package_key.__wrapped__())
    assert found[0] == found[2] != found[1]


def test_what_is_not_in_a_record_is_generated_when_it_is_asked_for(generations: list[str]) -> None:
    model, x = Chain(), torch.rand(9)
    first, again = fusepass.optimize(model), fusepass.optimize(model)
    programs = []
    for fused in (first, again):
        torch.testing.assert_close(fused(x[:8]), model(x[:8]))
        (compiled,) = [each.compiled for each in fused._specialiser.table]
        (work,) = compiled.works
        assert work.generated is not None
        count = len(generations)
        programs.append(program_text(work.generated.program))
    assert len(generations) == count + 1 == 2
    assert programs[0] == programs[1]
    torch.testing.assert_close(again(x[1:]), model(x[1:]))  # aligned to nothing
    other = torch.rand(40)  # a library for several sizes is made of both programs
    torch.testing.assert_close(again(other), model(other))
    assert "for several sizes" in str([region.sizes for region in again.report().regions])
    assert again.report().fallbacks == ()


@pytest.mark.parametrize("chosen", [GENERATED, EAGER])
def test_choices_are_asked_for_as_ever(chosen: str, generations: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def fastest(*_: Any) -> Choice:
        measured.append(chosen)
        return Choice(chosen, seconds=((EAGER, 1.0), (GENERATED, 1.0)), speedup=1.0)

    monkeypatch.setattr(tune, "fastest", fastest)
    model, x = Chain(), torch.rand(8)
    for number in range(2):
        fused = fusepass.optimize(model, tune="fast")
        torch.testing.assert_close(fused(x), model(x))
        (region,) = fused.report().regions
        assert region.choice is not None
        assert (region.choice.chosen, region.choice.recorded) == (chosen, bool(number))
    assert (len(generations), len(measured)) == (1, 1)
    choices.clear()
    fusepass.optimize(model, tune="fast")(x)
    assert (len(generations), len(measured)) == (2, 2)


def test_records_are_trimmed_moved_cleared_and_damaged_as_libraries_are(
    records: Path, generations: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> int:
        """How many regions were generated for a new model."""
        before, x = len(generations), torch.rand(8)
        torch.testing.assert_close(fusepass.optimize(Chain())(x), Chain()(x))
        return len(generations) - before

    assert (run(), run()) == (1, 0)
    (path,) = records.glob("*.json")
    assert path.stat().st_mode & 0o077 == 0
    cache_archive.write(tmp_path / "archive")
    whole = path.read_text()
    for text in ("", "[]", whole[:-9], whole.replace("tanh", "tan_h")):
        path.write_text(text)
        assert (run(), run()) == (1, 0), text
    other = json.loads(whole)
    path.write_text(json.dumps(other | {"sha256": 64 * "0"}))
    assert run() == 1
    path.chmod(0o666)  # others may have written it
    assert run() == 1
    os.utime(path, (0, 0))
    assert cache_limit.trim(tmp_path / "cache", 1) > 0
    assert not path.exists()
    assert run() == 1
    cache.clear()
    assert not records.exists()
    cache_archive.read(tmp_path / "archive")
    assert run() == 0
