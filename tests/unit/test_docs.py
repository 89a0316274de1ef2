"""The documentation as a site: every page is in its menu, its examples run, its commands parse, what the API pages name exists."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import fusepass
from fusepass.cli import main
from tests.support.layout import ROOT
from tests.unit.test_readme import PAGES, blocks, run_examples, text

SITE: dict[str, Any] = yaml.safe_load(text("mkdocs.yml"))


def pages_of(menu: Any) -> list[str]:
    """The pages of a part of the menu."""
    if isinstance(menu, str):
        return [menu]
    parts = menu.values() if isinstance(menu, dict) else menu
    return [page for part in parts for page in pages_of(part)]


def test_the_menu_has_every_page_but_the_diary() -> None:
    there = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    diary = {page for page in there if page.startswith("notes/")}
    assert sorted(pages_of(SITE["nav"])) == sorted(there - diary)


def test_the_first_examples_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FUSEPASS_TUNE", "off")
    run_examples("docs/start.md")
    assert "conv2d_gelu_group_norm" in capsys.readouterr().out


COMMANDS = [
    (page, line)
    for page in PAGES
    for line in "\n".join(blocks(page, "sh")).splitlines()
    if line.startswith("fusepass ")
]


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_a_command_parses(page: str, line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    assert callable(main._parser().parse_args(words).run)


def test_what_the_api_pages_name_exists() -> None:
    named = [
        name
        for page in ("docs/api/index.md", "docs/api/values.md")
        for name in re.findall(r"^::: (\S+)", text(page), re.M)
    ]
    for name in named:
        parts = name.split(".")
        count = next(n for n in range(len(parts), 0, -1) if _is_module(".".join(parts[:n])))
        module = importlib.import_module(".".join(parts[:count]))
        assert functools.reduce(getattr, parts[count:], module).__doc__
    members = re.search(r"^::: fusepass\n(.*?)\n\n", text("docs/api/index.md"), re.MULTILINE | re.DOTALL)
    assert members is not None
    functions = {name for name in fusepass.__all__ if callable(getattr(fusepass, name)) and name.islower()}
    assert {*re.findall(r"- (\w+)", members[1])} == functions - {"__version__"}


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of something that is no package
        return False


def test_the_changelog_knows_this_version() -> None:
    headings = re.findall(r"^## (.*)$", text("CHANGELOG.md"), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert fusepass.__version__ in headings


def test_the_forms_for_issues_ask_for_commands_that_there_are() -> None:
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    bodies = [form for path in forms if "body" in (form := yaml.safe_load(path.read_text()))]
    assert len(bodies) == 3
    for form in bodies:
        assert {"name", "description", "body"} <= {*form}
        for command in re.findall(r"`(fusepass [^`]*)`", str(form)):
            words = command.replace("...", "2,3").split()[1:]
            assert callable(main._parser().parse_args(words).run)


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="the extra `docs` is not installed")
def test_the_site_is_built_without_warnings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 'id="fusepass.optimize"' in (tmp_path / "api" / "index.html").read_text()
