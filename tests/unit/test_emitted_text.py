"""No text is edited after it was emitted: writers of kernels take values, and text is only put together."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

RENDER = Path(__file__).parents[2] / "codegen" / "render"
# fmt: off
EDITS = frozenset({
    "expandtabs", "format", "format_map", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rpartition", "rsplit", "rstrip",
    "split", "splitlines", "strip", "sub", "subn", "translate",
})
# fmt: on
"""Methods of strings and patterns that make another text of one."""
EDITORS = frozenset({"re", "string", "textwrap"})
ALLOWED = {
    ("numbers.py", "import re"): "takes marked numbers out, which are no part of C's text",
    ("numbers.py", "sub"): "takes marked numbers out, which are no part of C's text",
    ("spelling.py", "import re"): "makes identifiers of a model's names, before anything is emitted",
    ("spelling.py", "sub"): "makes identifiers of a model's names, before anything is emitted",
    ("spelling.py", "split"): "the list of reserved words",
    ("spelling.py", "rstrip"): "what a writer calls a variable: Python's own words have a line behind them",
    ("template.py", "rstrip"): "lines of a filled skeleton end without blanks",
    ("template.py", "splitlines"): "lines of a filled skeleton end without blanks",
    ("cuda/transpose/tiles.py", "split"): "the first word of an axis' name",
}
"""What looks like an edit of emitted text and is none, by file and call; why."""


def edits(source: str) -> Iterator[str]:
    """What edits text in a module, or names a place in it for which another text is to be put."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (f"import {name.name}" for name in names if name.name in EDITORS)
            case ast.ImportFrom(module=str(module)) if module in EDITORS:
                yield f"import {module}"
            case ast.Call(func=ast.Attribute(attr=attr)) | ast.Attribute(value=ast.Constant(), attr=attr) if (
                attr in EDITS
            ):
                yield attr
            case ast.Constant(value=str(text)) if "$" in text:
                yield f"$ in {text!r}"


def test_no_emitted_text_is_edited() -> None:
    modules = {path.relative_to(RENDER).as_posix(): path.read_text() for path in RENDER.rglob("*.py")}
    found = {(name, edit) for name, text in modules.items() for edit in edits(text)}
    assert found == set(ALLOWED)


@pytest.mark.parametrize(
    ("line", "edit"),
    [
        ('lines = [line.replace("blockIdx.x", number) for line in lines]', "replace"),
        ('lines = list(map("{} = 0;".format, names))', "format"),
        ('yield f"float $sums[{rows}];"', "$ in 'float $sums['"),
        ("import re", "import re"),
        ("from string import Template", "import string"),
        ('text = first.removesuffix(" + ")', "removesuffix"),
    ],
)
def test_an_edit_is_found(line: str, edit: str) -> None:
    assert edit in [*edits(line)]


def test_what_only_puts_text_together_is_none() -> None:
    assert not [
        *edits('from dataclasses import replace\nsums = replace(sums, staging="")\nline = f"float {c.sums}[{rows}];"')
    ]
