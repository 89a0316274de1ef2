"""Plain text that fits a terminal: tables, wrapped paragraphs, byte counts."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

NARROWEST = 20
"""Columns below which text is no longer squeezed."""

_GAP = "  "
_CUT = "..."


@dataclass(frozen=True)
class Column:
    """How one column of a table is set.

    Attributes:
        title: its heading.
        right: align to the right, for numbers.
        least: the width that cells may be shortened to; None keeps every cell whole.
    """

    title: str
    right: bool = False
    least: int | None = None


def terminal_width() -> int:
    """Columns of the terminal: ``COLUMNS`` where that is set, 80 without a terminal, at least `NARROWEST`."""
    return max(NARROWEST, shutil.get_terminal_size((80, 24)).columns)


def human_bytes(count: int) -> str:
    """`count` bytes in binary units and three digits: ``"0 B"``, ``"1.50 KiB"``, ``"-12.0 MiB"``."""
    return f"{count} B" if abs(count) < 1024 else _scaled(count, 1024, ("KiB", "MiB", "GiB", "TiB", "PiB"))


def human_count(count: int) -> str:
    """`count` in decimal units and three digits: ``"0"``, ``"1.50 K"``, ``"12.0 M"``, ``"3.00 G"``."""
    return str(count) if abs(count) < 1000 else _scaled(count, 1000, ("K", "M", "G", "T", "P"))


def _scaled(count: int, base: int, units: Sequence[str]) -> str:
    size = float(count)
    for unit in units:
        size /= base
        if abs(size) < 999.5 or unit == units[-1]:
            break
    digits = 2 if abs(size) < 9.995 else 1 if abs(size) < 99.95 else 0
    return f"{size:.{digits}f} {unit}"


def shorten(text: str, width: int) -> str:
    """`text` in at most `width` columns, cut in the middle where needed: both ends of a name identify it."""
    if len(text) <= width:
        return text
    if width <= len(_CUT) + 1:
        return text[:width]
    head = (width - len(_CUT) + 1) // 2
    tail = width - len(_CUT) - head
    return text[:head] + _CUT + text[len(text) - tail :]


def wrap(text: str, width: int, *, indent: int = 0, lines: int | None = None) -> list[str]:
    """`text` as a paragraph indented by `indent`, later lines by two more; cut after `lines` lines."""
    return textwrap.wrap(
        " ".join(text.split()),
        width,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + 2),
        max_lines=lines,
        placeholder=f" {_CUT}",
        break_on_hyphens=False,
    )


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[list[str]]:
    """The lines of a table: one block for the headings, then one block of lines for each row.

    Cells that may be shortened are, widest first, until a row fits `width`. Where even that is not enough,
    the block of headings is empty and each row is its first cell with the others, named, in lines below.
    """
    widths = _fit(columns, rows, width)
    if widths is None:
        return [[], *(_stacked(columns, row, width) for row in rows)]
    titles = [column.title for column in columns]
    return [[_line(columns, cells, widths)] for cells in (titles, *rows)]


def _fit(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[int] | None:
    """Width of each column so that a line takes at most `width`, or None where there is no such choice."""
    widths = [max(map(len, cells)) for cells in zip([column.title for column in columns], *rows, strict=True)]
    least = [
        natural if column.least is None else min(natural, max(column.least, len(column.title)))
        for column, natural in zip(columns, widths, strict=True)
    ]
    room = width - len(_GAP) * (len(columns) - 1)
    if sum(least) > room:
        return None
    while sum(widths) > room:
        widest = max((i for i in range(len(widths)) if widths[i] > least[i]), key=lambda i: widths[i])
        widths[widest] -= 1
    return widths


def _line(columns: Sequence[Column], cells: Sequence[str], widths: Sequence[int]) -> str:
    parts = []
    for column, cell, size in zip(columns, cells, widths, strict=True):
        short = shorten(cell, size)
        parts.append(short.rjust(size) if column.right else short.ljust(size))
    return _GAP.join(parts).rstrip()


def _stacked(columns: Sequence[Column], row: Sequence[str], width: int) -> list[str]:
    named = [f"{column.title} {cell}" for column, cell in zip(columns, row, strict=True) if cell]
    return [shorten(row[0], width), *wrap(", ".join(named[1:]), width, indent=2)]
