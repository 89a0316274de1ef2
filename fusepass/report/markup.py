"""HTML of reports, profiles and sources: the skeletons of `templates/html`, filled; sources with their tokens marked."""

from __future__ import annotations

import html
import re
from functools import cache
from pathlib import Path

import jinja2
from markupsafe import Markup

import fusepass.templates
from fusepass.report.records import ModelRecord
from fusepass.report.table import human_bytes

_TOKENS = re.compile(
    r"(?P<comment>//[^\n]*|/\*.*?\*/)"
    r"|(?P<directive>^[ \t]*\#[^\n]*)"
    r'|(?P<text>"(?:\\.|[^"\\\n])*")'
    r"|(?P<number>\b\d[\w.]*(?:(?<=[eE])[+-]\d+f?)?)"
    r"|(?P<keyword>\b(?:auto|bool|break|char|const|constexpr|continue|do|double|else|extern|false|float|for|if|inline|int"
    r"|int8_t|int16_t|int32_t|int64_t|long|namespace|return|short|sizeof|static|static_cast|struct|switch|template|true"
    r"|typename|uint8_t|uint16_t|uint32_t|uint64_t|unsigned|using|void|while|__\w+__|__restrict)\b)",
    re.DOTALL | re.MULTILINE,
)


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(fusepass.templates.__path__[0])),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"source": marked, "bytes": human_bytes}
    return environment


def fill(template: str, **values: object) -> str:
    """`template`, a path below `templates/`, with `values`, which are escaped."""
    return _environment().get_template(template).render(values)


def marked(source: str) -> Markup:
    """C++ or CUDA as HTML, each comment, directive, text, number and keyword in a ``span`` of that class."""
    parts, end = [], 0
    for found in _TOKENS.finditer(source):
        parts.append(html.escape(source[end : found.start()]))
        parts.append(f'<span class="{found.lastgroup}">{html.escape(found[0])}</span>')
        end = found.end()
    return Markup("".join([*parts, html.escape(source[end:])]))


def report_html(report: ModelRecord) -> str:
    """A report as a piece of a page, for notebooks."""
    return fill("html/report.html.j2", report=report)


def framed(page: str, height: int) -> str:
    """A whole page as a piece of another one, whose styles and names it leaves alone; `height` in pixels."""
    return f'<iframe srcdoc="{html.escape(page)}" style="width:100%;height:{height}px;border:0"></iframe>'
