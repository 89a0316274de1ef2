"""Profiles: steps, times, rates and limits; table, JSON, and the page, which a real browser opens."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fusepass
from fusepass import measure
from fusepass.cli import main
from fusepass.errors import CaptureError
from fusepass.profiling.profile import OpTime, Profile, Step
from fusepass.profiling.steps import COLUMNS
from fusepass.report.markup import marked
from fusepass.report.report import SourceFile
from tests.support.fake_time import Told

pytestmark = pytest.mark.usefixtures("without_gradients")

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Net(nn.Module):
    """A region with an anchor, an operator that does not fuse, a region without an anchor; draws and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.linear(x)))
        z = torch.special.bessel_j0(y)
        return torch.tanh(z + torch.rand_like(z)) * 2


@pytest.fixture
def two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock by which a call takes 2 s, and rounds that are over at once."""

    def clock(device: torch.device) -> measure.Clock:
        def seconds(call: Callable[[], object]) -> float:
            call()
            return 2.0

        return Told(seconds)

    monkeypatch.setattr(measure, "clock", clock)
    monkeypatch.setattr("fusepass.profiling.profiler._SECONDS", 0.0)


def op(name: str, seconds: float, *inputs: str) -> OpTime:
    return OpTime(name, f"aten.{name}.default", "net.py:3 in <forward>", seconds, inputs)


SOURCE = SourceFile("conv_gelu.cu", None, "if (a < b && c) store();\n")
CONV = Step(
    name="conv_gelu", kind="fused", ops=(op("conv", 3e-3), op("gelu", 1e-3, "conv")), seconds=2e-3, bytes_moved=4_000_000,
    bytes_saved=1 << 20, flops=10**9, limit_seconds=1e-3, bound_by_products=True, inputs=(), sources=(SOURCE,),
)  # fmt: skip
SORT = Step(
    name="sort", kind="operator", ops=(op("sort", 5e-4, "gelu"),), seconds=5e-4, bytes_moved=1_000_000,
    bytes_saved=0, flops=0, limit_seconds=1e-4, bound_by_products=False, inputs=("conv_gelu",),
)  # fmt: skip
PROFILE = Profile("Net", "cuda:0", 1e10, "measured", 1e12, (CONV, SORT))


def test_rates_and_sums() -> None:
    assert (CONV.seconds_before, CONV.bandwidth, CONV.flop_rate, CONV.fraction) == (4e-3, 2e9, 5e11, 0.5)
    assert (CONV.rate, SORT.rate) == ("500 GFLOP/s", "2 GB/s")
    assert (PROFILE.seconds, PROFILE.seconds_before) == pytest.approx((2.5e-3, 4.5e-3))


def test_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = str(PROFILE).splitlines()
    assert lines[0] == "Net on cuda:0"
    assert " ".join(lines[1:3]) == (
        "limits: copy rate 10 GB/s (measured), matrix products 1 TFLOP/s (measured) "
    )  # an empty line follows
    rows = [line.split() for line in lines if line.startswith(("conv_gelu", "sort"))]
    assert rows == [
        ["conv_gelu", "fused", "2", "4", "1.00", "MiB", "500", "GFLOP/s", "50%"],
        ["sort", "operator", "0.5", "0.5", "2", "GB/s", "20%"],
    ]
    assert lines[-1] == "in all: 2.5 ms; operators one by one 4.5 ms, 1.80x"
    assert max(map(len, lines)) <= 80


def test_json_keys() -> None:
    data = json.loads(PROFILE.to_json())
    assert list(data) == [
        "format", "model", "device", "bandwidth", "bandwidth_source", "flop_limit", "steps", "seconds", "seconds_before",
    ]  # fmt: skip
    assert list(data["steps"][0]) == [
        "name", "kind", "ops", "seconds", "bytes_moved", "bytes_saved", "flops", "limit_seconds", "bound_by_products",
        "inputs", "sources", "choice", "seconds_before", "bandwidth", "flop_rate", "fraction",
    ]  # fmt: skip
    assert data["steps"][1]["ops"] == [
        {
            "name": "sort",
            "target": "aten.sort.default",
            "location": "net.py:3 in <forward>",
            "seconds": 5e-4,
            "inputs": ["gelu"],
        }
    ]
    page = Path("docs/profile.md")
    told = (Path(__file__).parents[2] / page).read_text()
    assert [key for key in (*data, *data["steps"][0]) if f"`{key}`" not in told] == []


@pytest.mark.usefixtures("two_seconds")
def test_every_step_is_timed_and_rated() -> None:
    net, x = Net().train(), torch.rand(4, 6)
    profile = fusepass.optimize(net).profile(x)
    kinds = {step.name: step.kind for step in profile.steps}
    (anchor,) = (step for step in profile.steps if step.flops)
    tail = profile.steps[[step.name for step in profile.steps].index("rand_like") + 1]
    assert kinds[anchor.name] == kinds[tail.name] == "fused"
    assert kinds["special_bessel_j0"] == kinds["rand_like"] == "operator"
    assert {step.seconds for step in profile.steps} == {2.0}
    assert [op.name for op in tail.ops] == ["add_1", "tanh", "mul"]
    assert (tail.seconds_before, tail.inputs) == (6.0, ("special_bessel_j0", "rand_like"))
    assert tail.ops[1].inputs == ("add_1",)
    assert tail.bytes_moved == 3 * 4 * 8 * 4
    assert tail.bandwidth == tail.bytes_moved / 2
    assert anchor.flops == 2 * 4 * 6 * 8
    assert profile.flop_limit == 2 * 1024**3 / 2.0
    assert profile.bandwidth == 2 * (1 << 26) / 2.0
    assert anchor.limit_seconds == max(anchor.bytes_moved / profile.bandwidth, anchor.flops / profile.flop_limit)
    assert "extern" in anchor.sources[0].text


@pytest.mark.invariant(27)
def test_profiling_changes_nothing() -> None:
    """No call is made: random generators, inputs and running statistics stay."""
    net, x = Net().train(), torch.rand(4, 6)
    before = [tensor.clone() for tensor in (x, *net.parameters(), *net.buffers())]
    state = torch.get_rng_state()
    with torch.enable_grad():
        profile = fusepass.optimize(net).profile(x)
    assert torch.equal(state, torch.get_rng_state())
    after = (x, *net.parameters(), *net.buffers())
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert all(step.seconds > 0 and step.seconds_before > 0 for step in profile.steps)


def test_a_region_left_to_eager_is_profiled_as_such(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from fusepass.autotune import tune
    from fusepass.report.choice import EAGER, Choice

    monkeypatch.setattr(tune, "_measured", lambda *_: Choice(EAGER, ((EAGER, 1.0), ("generated", 2.0)), 0.5))
    optimised = fusepass.optimize(nn.Sequential(nn.Tanh(), nn.ReLU()), tune="max", cache_dir=tmp_path)
    (step,) = optimised.profile(torch.rand(8)).steps
    assert (step.kind, step.bytes_saved, len(step.ops)) == ("eager", 0, 2)
    assert step.choice.startswith('left to eager: chosen "eager": generated code runs at 0.50x eager')
    profile = Profile("Net", "cpu", 1e9, "measured", 0.0, (step,))
    assert f"{step.name}: {step.choice}" in " ".join(str(profile).split())
    assert "left to eager: chosen &#34;eager&#34;" in profile.to_html()


def test_a_model_without_a_graph_has_no_profile() -> None:
    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.sum().item()

    with pytest.raises(CaptureError, match="Reads has no single graph"):
        fusepass.optimize(Reads()).profile(torch.rand(2))


def test_the_page_needs_nothing_else_and_escapes_what_it_shows() -> None:
    page = PROFILE.to_html()
    assert re.findall(r"""(?:src|href)=["'](?!#)|https?:|@import|url\(|<script \w|<link""", page) == []
    assert '<span class="keyword">if</span> (a &lt; b &amp;&amp; c) store();' in page
    assert "net.py:3 in &lt;forward&gt;" in page
    assert re.findall(r'<rect class="(\w+)"', page).count("op") == 3
    assert '<a href="#region-conv_gelu">' in page
    assert 'id="region-conv_gelu"' in page
    assert "region-sort" not in page
    assert len(re.findall('<path class="edge"', page)) == 3


def test_the_page_says_what_its_colours_and_columns_mean() -> None:
    """Kinds of boxes in a legend, columns with their units; colours for dark pages; wide things scroll by themselves."""
    page = PROFILE.to_html()
    legend = re.findall(r"<dt>(?:<svg.*?</svg> )?([\w ]+)</dt><dd>(.+?)</dd>", page)
    assert [name for name, _ in legend[:5]] == ["fused", "eager", "fallback", "operator", "time"]
    assert [name for name, _ in legend[5:]] == [column.title for column in COLUMNS[2:]]
    assert all(re.search(rf"^  \.{name} {{", page, re.MULTILINE) for name, _ in legend[:5])
    light, dark = (set(re.findall(r"--[\w-]+(?=:)", part)) for part in page.split("prefers-color-scheme")[:2])
    assert light == dark == set(re.findall(r"var\((--[\w-]+)\)", page))
    assert '<meta name="viewport" content="width=device-width' in page
    assert [re.search(rf'<div class="wide">\n<{tag} id', page) is not None for tag in ("svg", "table")] == [True, True]


def test_what_the_search_looks_at() -> None:
    page = PROFILE.to_html()
    assert '<input id="search" type="search"' in page
    words = re.findall(r'data-words="(.*?)"', page)
    assert any("conv aten.conv.default net.py:3" in text for text in words)
    assert sum(text.startswith("conv_gelu fused") for text in words) == 1
    assert words.count("") == 1  # the region's section, which is searched as a whole


def test_sources_are_marked_and_nothing_is_lost() -> None:
    source = (
        '#include "a.h"\n// x < y\nconst float f = 1.5e-3f; /* two\nlines */ char c[] = "a\\"b"; int64_t i1 = x[2];\n'
    )
    page = str(marked(source))
    assert html.unescape(re.sub(r"</?span.*?>", "", page)) == source
    found = re.findall(r'<span class="(\w+)">(.*?)</span>', page, re.DOTALL)
    assert [(kind, html.unescape(text)) for kind, text in found] == [
        ("directive", '#include "a.h"'), ("comment", "// x < y"), ("keyword", "const"), ("keyword", "float"),
        ("number", "1.5e-3f"), ("comment", "/* two\nlines */"), ("keyword", "char"), ("text", '"a\\"b"'),
        ("keyword", "int64_t"), ("number", "2"),
    ]  # fmt: skip


def test_notebooks_show_profiles_and_reports() -> None:
    frame = PROFILE._repr_html_()
    (inside,) = re.findall(r'^<iframe srcdoc="([^"]*)" style="[^"]*"></iframe>$', frame)
    assert html.unescape(inside) == PROFILE.to_html()
    optimised = fusepass.optimize(nn.Sequential(nn.GELU(), nn.Softmax(1)), tune="off")
    optimised(torch.rand(3, 5))
    piece = optimised.report()._repr_html_()
    assert piece.count("<div") == piece.count("</div>") == 1
    assert "<td>gelu_softmax</td><td>2</td><td>1</td>" in piece
    assert "static_cast&lt;float*&gt;" in piece


def test_a_profile_without_regions_makes_a_page() -> None:
    assert "There are none." in Profile("Net", "cpu", 1e9, "measured", 0.0, ()).to_html()


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_a_browser_shows_the_page(tmp_path: Path) -> None:
    """A headless browser without a network, 400 pixels wide and dark: all is in view, nothing makes the page wider, the search finds."""
    assert BROWSER is not None
    probe = tmp_path / "probe.html"
    script = """onload = () => {
      const frame = document.querySelector('iframe').contentWindow, page = frame.document;
      const shown = (e) => { const r = e.getBoundingClientRect(); return r.width > 0 && r.height > 0; };
      const all = (s) => [...page.querySelectorAll(s)].filter(shown).length;
      const inside = [...page.querySelectorAll('svg rect')].every((e) => {
        const r = e.getBoundingClientRect(), s = e.ownerSVGElement.getBoundingClientRect();
        return r.left >= s.left && r.right <= s.right + 1 && r.top >= s.top && r.bottom <= s.bottom + 1; });
      const seen = ['#graph .op', '#graph .fused', '#graph .operator', '#graph .edge', '#legend dt', '#steps tr', 'section pre'].map(all);
      const light = (what) => Math.max(...frame.getComputedStyle(page.body)[what].match(/\\d+/g).slice(0, 3).map(Number));
      const dark = light('backgroundColor') < 64 && light('color') > 192;
      const wide = frame.innerWidth + ' ' + (page.documentElement.scrollWidth <= frame.innerWidth);
      const search = page.getElementById('search');
      const find = (words) => { search.value = words; search.dispatchEvent(new frame.Event('input')); return all('#steps td:first-child') + all('section'); };
      document.title = ['seen', ...seen, inside, 'dark', dark, 'wide', wide, 'found', ...[' SORT ', 'store()', 'none', ''].map(find)].join(' ');
    }"""
    piece = f'<meta name="color-scheme" content="light dark"><div style="width: 400px">{PROFILE._repr_html_()}</div>'
    probe.write_text(
        f"<!DOCTYPE html><title></title>{piece}<script>{script}</script>".replace("<iframe ", "<iframe frameborder=0 ")
    )
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--blink-settings=preferredColorScheme=0"]
    command += ["--proxy-server=127.0.0.1:9", "--dump-dom", probe.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    title = re.search("<title>(.*)</title>", done.stdout)
    assert title is not None, done.stderr
    assert title[1] == "seen 3 2 1 3 5 3 1 true dark true wide 400 true found 1 1 0 3"


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path), *__import__("sys").path])
    (tmp_path / "net_of_test_profile.py").write_text(
        "from torch import nn\nnet = nn.Sequential(nn.Tanh(), nn.ReLU())\n"
    )
    command = ["profile", "net_of_test_profile:net", "--input", "4,8"]
    assert main.main([*command, "--html", "page.html"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Sequential on cpu\n")
    assert "tanh_relu" in out
    assert "tanh_relu, fused" in (tmp_path / "page.html").read_text()
    assert main.main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"][0]["name"] == "tanh_relu"
