"""Each program of docs/recipes.md runs by itself: `pip install -e '.[dev,recipes]'`, then `pytest -m recipes tests/recipes`."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.layout import ROOT

pytestmark = pytest.mark.recipes

PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
PROGRAM = re.compile(r"(?:<!-- needs: ([\w ]+) -->\n)?```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def recipes() -> list[object]:
    """Each program with what it needs, named after its section."""
    found = []
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        title = section.partition("\n")[0]
        found += [pytest.param(needs.split(), program, id=title) for needs, program in PROGRAM.findall(section)]
    return found


@pytest.mark.parametrize(("needs", "program"), recipes())
def test_a_recipe_runs(needs: list[str], program: str, tmp_path: Path) -> None:
    missing = [name for name in needs if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    path = tmp_path / "recipe.py"
    path.write_text(program, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, path.name],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
