"""Fills the Jinja2 skeletons of `templates/`; what a skeleton asks for must be there."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import jinja2

import fusepass.templates


@cache
def _environment() -> jinja2.Environment:
    folder = Path(fusepass.templates.__path__[0])
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def fill(template: str, **values: object) -> str:
    """`template`, a path below `templates/`, with `values`; lines end without blanks."""
    text = _environment().get_template(template).render(values)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
