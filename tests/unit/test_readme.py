"""The documents tell the truth: their Python runs, what they show is what is generated, what they name exists.

``--update-golden`` rewrites the blocks below ``<!-- generated: ... -->`` instead of comparing them.
"""

from __future__ import annotations

import ast
import html
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import figures, readme
from fusepass import config
from fusepass.capture.trace import Captured, capture
from fusepass.cli import main
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import Generated, generate, pass_options
from fusepass.codegen.ir.text import program_text
from fusepass.codegen.lowering import registry
from fusepass.codegen.lowering.lower import lower
from fusepass.codegen.passes.pipeline import passes
from fusepass.compile.splice import subgraph
from fusepass.config import Algebra
from fusepass.patterns import pattern
from fusepass.patterns.opclass import direct_class
from fusepass.patterns.partition import partition
from fusepass.patterns.rules import RULES
from fusepass.report.table import wrap
from tests.support.invariants import INVARIANTS

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")),
)


def text(page: str) -> str:
    return (ROOT / page).read_text()


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of `page` that are in `language`."""
    return re.findall(rf"^```{language}\n(.*?)^```", text(page), re.DOTALL | re.MULTILINE)


def run_examples(page: str) -> None:
    """Run the Python of `page` in order and in one namespace, as a reader would type it."""
    namespace: dict[str, object] = {"__name__": "example"}
    for block in blocks(page, "python"):
        exec(compile(block, page, "exec"), namespace)


def compare(page: str, name: str, wanted: str, update: bool, ignored: str = r"\Z") -> None:
    """The block of `page` below ``<!-- generated: name -->`` is `wanted`, but for what `ignored` matches."""
    found = re.search(rf"(<!-- generated: {name} -->\n```\w+\n)(.*?)(^```)", text(page), re.DOTALL | re.MULTILINE)
    assert found is not None
    if update:
        (ROOT / page).write_text(text(page).replace(found[0], found[1] + wanted + found[3]))
        return
    shown = re.sub(ignored, "", found[2])
    assert shown == re.sub(ignored, "", wanted), "if this is intended: --update-golden"


def test_the_readme_s_examples_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, update_golden: bool
) -> None:
    """The first one compares fused with eager; the report shown is the one printed, but for the seconds."""
    monkeypatch.setenv("COLUMNS", "80")
    run_examples("README.md")
    printed = capsys.readouterr().out
    assert 'extern "C"' in printed, "at least one region was fused, so its source was printed"
    first = re.match(r".*?^seconds: .*?\n(?=\S)", printed, re.DOTALL | re.MULTILINE)
    assert first is not None
    compare("README.md", "report", first[0], update_golden, ignored=r"(?s)seconds: .*")


def test_what_a_newcomer_reads_is_short() -> None:
    words = [len(text(page).split()) for page in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
    assert words[0] <= 1300
    assert words[1] <= 4500
    assert sum(words) <= 8500


def test_the_recipe_for_deployment_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    run_examples("docs/deployment.md")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dynamic.fuse", "model.fuse", "model.ops", "model.pt2"]


@pytest.mark.usefixtures("_registry_unchanged")
def test_the_examples_for_contributors_run(capsys: pytest.CaptureFixture[str]) -> None:
    run_examples("CONTRIBUTING.md")
    lines = "".join(blocks("CONTRIBUTING.md", "python")).splitlines()
    said = [line.partition("# ")[2] for line in lines if line.startswith("print(")]
    assert capsys.readouterr().out.splitlines() == said


@pytest.fixture
def _registry_unchanged() -> Iterator[None]:
    """What the examples register is gone afterwards."""
    handlers, patterns = dict(registry._HANDLERS), dict(pattern._patterns)
    direct_class.forget()  # type: ignore[attr-defined]
    yield
    registry._HANDLERS.clear()
    registry._HANDLERS.update(handlers)
    pattern._patterns.clear()
    pattern._patterns.update(patterns)
    direct_class.forget()  # type: ignore[attr-defined]


class ScaledNorm(nn.Module):
    """The model of the generated excerpts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.norm(x + 1)) * 0.5


@cache
def generated() -> Generated:
    """The only region of `ScaledNorm`, for the GPU that `DeviceFacts.h200` describes."""
    with torch.no_grad():
        captured = capture(ScaledNorm(), (torch.rand(16, 128, 64),), {})
    assert isinstance(captured, Captured)
    (region,) = partition(captured.graph).regions
    program, builder = lower(subgraph(captured.graph, region), region.name, [node.name for node in region.inputs])
    return generate(program, builder, DeviceFacts.h200())


def excerpt(source: str) -> str:
    """Comment and head of the first kernel, and what follows its reductions."""
    kernel = source.partition("namespace {\n\n")[2].partition("\n}\n")[0] + "\n}"
    head, _, body = kernel.partition("{\n")
    return f"{head}{{\n    ...\n    // results{body.partition('// results')[2]}\n"


@pytest.mark.parametrize(("page", "name"), [("ARCHITECTURE.md", "ir"), ("README.md", "kernel")])
def test_what_is_shown_is_what_is_generated(page: str, name: str, update_golden: bool) -> None:
    wanted = program_text(generated().program) if name == "ir" else excerpt(generated().source.text)
    compare(page, name, wanted, update_golden)


@pytest.mark.parametrize("level", [Algebra.SAFE, Algebra.FINITE])
def test_the_rules_are_listed(level: Algebra, update_golden: bool) -> None:
    """Sorted, so that it does not matter which rules are tried first."""
    rules = sorted((rule.name, rule.why) for rule in RULES if rule.level is level)
    lines = [line for name, why in rules for line in (name, *wrap(why, 120, indent=2))]
    compare("docs/algebra.md", level, "".join(f"{line}\n" for line in lines), update_golden)


def test_the_configuration_table_is_complete() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (?:`(\w+)`|-)? ?\|", text("docs/configuration.md"), re.MULTILINE)
    assert {option for option, _ in rows} == {field.name for field in fields(config.Config)}
    documented = set(re.findall(r"FUSEPASS_\w+", str(config.Config.__doc__)))
    assert {variable for _, variable in rows if variable} == documented


@pytest.mark.parametrize(
    "line", [line for line in "\n".join(blocks("README.md", "sh")).splitlines() if line.startswith("fusepass")]
)
def test_the_commands_exist(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = line.partition("#")[0].split()[1:]
    command = [word for word in words if not word.startswith("-")]
    with pytest.raises(SystemExit) as stopped:
        main.main([*command[: 2 if command[0] == "cache" else 1], "--help"])
    assert stopped.value.code == 0
    usage = capsys.readouterr().out
    assert all(word in usage for word in words if word.startswith("--"))


def test_the_make_targets_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", text("Makefile"), re.MULTILINE))
    for page in PAGES:
        assert set(re.findall(r"(?:^|`)make ([\w-]+)", text(page), re.MULTILINE)) <= targets


@pytest.mark.parametrize("page", PAGES)
def test_links_and_paths_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)", text(page))
    folders = "fusepass|patterns|codegen|templates|tests|benchmarks|examples|docs"
    paths = re.findall(rf"`((?:{folders})/[\w/.]+)`", text(page))
    wanted = [((ROOT / page).parent / link) for link in links] + [ROOT / path for path in paths]
    assert [str(path) for path in wanted if not path.exists()] == []


def modules_page() -> str:
    """A line for each module: what its docstring says first."""
    lines = ["# Modules", "", "Generated from docstrings: `pytest tests/unit/test_readme.py --update-golden`."]
    for folder in ("fusepass", "patterns", "codegen"):
        lines += ["", f"## {folder}/", "", "| module | purpose |", "|---|---|"]
        for path in sorted(each for each in (ROOT / folder).rglob("*.py") if each.stat().st_size):
            said = ast.get_docstring(ast.parse(path.read_text()))
            assert said, path
            first = " ".join(said.partition("\n\n")[0].split()).replace("|", "\\|")
            lines.append(f"| `{path.relative_to(ROOT / folder).with_suffix('')}` | {first} |")
    return "\n".join(lines) + "\n"


def test_the_list_of_modules_is_what_they_say(update_golden: bool) -> None:
    page = ROOT / "docs" / "modules.md"
    if update_golden:
        page.write_text(modules_page())
    assert page.read_text() == modules_page(), "run with --update-golden"


def invariants_page() -> str:
    """A line for each invariant, with the tests whose marker has its number."""
    holders: dict[int, list[str]] = {number: [] for number in INVARIANTS}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            for mark in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.invariant":
                    (number,) = map(ast.literal_eval, mark.args)
                    holders[number].append(f"`{path.relative_to(ROOT)}::{node.name}`")
    lines = ["# Invariants", "", "What is always true, and the tests that hold it. Generated from the tests' markers:"]
    lines += [
        "`pytest tests/unit/test_readme.py --update-golden`.",
        "",
        "| # | always true | held by |",
        "|---|---|---|",
    ]
    for number, said in INVARIANTS.items():
        assert holders[number], f"no test holds invariant {number}"
        lines.append(f"| {number} | {said} | {', '.join(holders[number])} |")
    return "\n".join(lines) + "\n"


def test_the_list_of_invariants_is_what_the_markers_say(update_golden: bool) -> None:
    page = ROOT / "docs" / "invariants.md"
    if update_golden:
        page.write_text(invariants_page())
    assert page.read_text() == invariants_page(), "run with --update-golden"


def test_the_architecture_names_every_pass_in_order() -> None:
    section = text("ARCHITECTURE.md").partition("\n## The passes\n")[2].partition("\n## ")[0]
    wanted = [name for name, _ in passes(pass_options(DeviceFacts.h200()))]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == wanted


@pytest.mark.parametrize("page", PAGES)
def test_tests_that_are_named_exist(page: str) -> None:
    for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text(page)):
        assert f"\ndef {name}(" in text(path), f"{page} names {path}::{name}"


def test_what_was_measured_is_what_the_results_say() -> None:
    """`python -m benchmarks.readme` writes both."""
    shown = text("README.md").partition(readme.BEGIN)[2].partition(readme.END)[0]
    assert shown == readme.block()
    drawn = Counter(map(html.unescape, re.findall(r"<text[^>]*>([^<]*)</text>", readme.PLOT.read_text())))
    assert Counter(figures.texts(readme.shares())) <= drawn


def test_a_figure_shows_its_bars(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    shares = {"a < b": {"eager": 0.25, "fusepass": 0.5}, "c": {"fusepass": 1.2}}
    for _ in range(2):
        figures.draw_shares(shares, tmp_path / "bars.svg")
        drawn = (tmp_path / "bars.svg").read_text()
        for text, count in (("a &lt; b", 1), ("c", 1), ("25%", 1), ("50%", 1), ("120%", 1), ("torch.compile", 0)):
            assert drawn.count(f">{text}</text>") == count, text


def test_a_group_that_was_not_measured_is_not_spoken_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    single = next(path for path in readme.GROUPS if "single" in path.name)
    monkeypatch.setattr(readme, "GROUPS", {single: "operators", tmp_path / "none.json": "others"})
    assert re.search(r"^operators[^|]* \| \d+ \|", readme.block(), re.MULTILINE)
    assert not re.search(r"^others( \||,)", readme.block(), re.MULTILINE)


def test_who_shares_a_run_is_said_where_the_table_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {**json.loads(readme.RUN.read_text()), "devices": 2}
    monkeypatch.setattr(readme, "_read", lambda path: table)
    assert readme._where(table) == ""
    assert readme._where({**table, "devices": 3}) == ", shared by 3"
    assert readme._where({**table, "device": "another", "devices": 1}) == ", on one another"


def _anchors(page: str) -> list[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^##+ (.*)$", page, re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("page", PAGES)
def test_links_to_sections_lead_to_one(page: str) -> None:
    for path, anchor in re.findall(r"\]\((?!http)([^)#]*)#([^)]+)\)", text(page)):
        target = (ROOT / page).parent / path if path else ROOT / page
        assert anchor in _anchors(target.read_text()), f"{path}#{anchor}"


KERNELS = [page for page in PAGES if page.startswith("docs/kernels")]


@pytest.mark.parametrize("name", KERNELS)
def test_a_page_about_kernels_lists_its_sections(name: str) -> None:
    page = text(name)
    sections = [line[3:] for line in page.splitlines() if line.startswith("## ")]
    listed = re.findall(r"\[([^]]+)\]\(#", page.partition("\n## ")[0])
    assert sorted(listed) == sorted(sections)


def test_the_pages_about_kernels_are_listed() -> None:
    first, *others = sorted(KERNELS, key=len)
    linked = re.findall(r"\]\((kernels/\w+\.md)[#)]", text(first))
    assert {f"docs/{page}" for page in linked} == set(others)
