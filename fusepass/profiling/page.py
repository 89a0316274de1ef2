"""A profile as one HTML page that needs nothing else: where its boxes and edges go; the skeleton prints them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fusepass.profiling.steps import COLUMNS, Step, cells
from fusepass.report.markup import fill
from fusepass.report.records import SourceFile
from fusepass.report.table import shorten

_ROW = 34  # all in pixels
_BOX = 26
_PAD = 8
_MARGIN = 90  # room for the edges, on the outer side of each column
_WIDTH = 330
_GAP = 90
_CHARACTERS = 30

_LEGEND = (
    ("fused", "a region that runs as generated kernels"),
    ("eager", "a region that is left to its own operators, which measured as fast"),
    ("fallback", "a region that runs as its own operators for want of kernels"),
    ("operator", "an operator outside of all regions"),
    ("time", "time; all bars have one scale"),
)
_COLUMN_WORDS = (
    ("ms", "milliseconds of one run of the step, lower quartile of the rounds"),
    ("before", "milliseconds of its operators, each by itself"),
    ("saved", "bytes of memory traffic that fusing saves, in binary units"),
    ("rate", "bytes per second, or floating-point operations per second where matrix products are the limit"),
    ("of limit", "share of the device's limit that is reached, in percent"),
)


@dataclass(frozen=True)
class _Box:
    """A rectangle with its words; `bar` is the length of its time, `link` the section that it leads to."""

    style: str
    x: float
    y: float
    width: float
    height: float
    label: str = ""
    detail: str = ""
    hint: str = ""
    bar: float = 0.0
    link: str = ""

    @property
    def middle(self) -> float:
        return self.y + self.height / 2


@dataclass(frozen=True)
class _Region:
    link: str
    title: str
    lines: tuple[str, ...]
    sources: tuple[SourceFile, ...]


@dataclass(frozen=True)
class _Page:
    title: str
    summary: tuple[str, ...]
    width: float
    height: float
    boxes: tuple[_Box, ...]
    edges: tuple[str, ...]
    legend: tuple[tuple[str, str], ...]
    columns: tuple[tuple[str, str], ...]
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    regions: tuple[_Region, ...]


def page(what: str, summary: Sequence[str], steps: Sequence[Step]) -> str:
    """The page of a profile of `what`, with sentences on the whole and its steps, as HTML."""
    return fill("html/profile.html.j2", page=_laid_out(what, summary, steps))


def _laid_out(what: str, summary: Sequence[str], steps: Sequence[Step]) -> _Page:
    longest = max((s for step in steps for s in (step.seconds, *(op.seconds for op in step.ops))), default=1.0)
    groups, ops, boxes = _place(steps, longest)
    edges = [
        *_edges(ops, _op_inputs(steps), left=True),
        *_edges(boxes, _step_inputs(steps), left=False),
    ]
    rows = sum(max(len(step.ops), 1) for step in steps)
    return _Page(
        title=f"Profile of {what}",
        summary=tuple(summary),
        width=2 * (_MARGIN + _WIDTH) + _GAP,
        height=rows * _ROW + len(steps) * _PAD + _PAD,
        boxes=(*groups, *ops.values(), *boxes.values()),
        edges=tuple(edges),
        legend=_LEGEND,
        columns=_COLUMN_WORDS,
        headings=tuple(column.title for column in COLUMNS),
        rows=tuple(map(cells, steps)),
        regions=tuple(_region(step) for step in steps if step.kind != "operator"),
    )


def _place(steps: Sequence[Step], longest: float) -> tuple[list[_Box], dict[str, _Box], dict[str, _Box]]:
    """Boxes around the operators of regions, boxes of operators, boxes of steps, the latter two by name."""
    groups, ops, after = [], {}, {}
    y = float(_PAD)
    right = _MARGIN + _WIDTH + _GAP
    for step in steps:
        height = max(len(step.ops), 1) * _ROW
        is_region = step.kind != "operator"
        if is_region:
            groups.append(_Box(step.kind, _MARGIN - 6, y, _WIDTH + 12, height, hint=step.name))
        for number, op in enumerate(step.ops):
            ops[op.name] = _Box(
                "op", _MARGIN, y + number * _ROW + (_ROW - _BOX) / 2, _WIDTH, _BOX,
                label=shorten(op.name, _CHARACTERS), detail=_time(op.seconds), hint=f"{op.target} {op.location}".strip(),
                bar=_WIDTH * op.seconds / longest,
            )  # fmt: skip
        after[step.name] = _Box(
            step.kind, right, y + (_ROW - _BOX) / 2, _WIDTH, height - (_ROW - _BOX),
            label=shorten(step.name, _CHARACTERS), detail=_time(step.seconds), hint=step.name,
            bar=_WIDTH * step.seconds / longest, link=_link(step) if is_region else "",
        )  # fmt: skip
        y += height + _PAD
    return groups, ops, after


def _op_inputs(steps: Sequence[Step]) -> Iterator[tuple[str, str]]:
    return ((source, op.name) for step in steps for op in step.ops for source in op.inputs)


def _step_inputs(steps: Sequence[Step]) -> Iterator[tuple[str, str]]:
    return ((source, step.name) for step in steps for source in step.inputs)


def _edges(boxes: dict[str, _Box], pairs: Iterator[tuple[str, str]], *, left: bool) -> Iterator[str]:
    """Curves beside the column, farther out the longer they are."""
    for source, target in pairs:
        if source not in boxes or target not in boxes:
            continue
        first, then = boxes[source], boxes[target]
        x = first.x if left else first.x + first.width
        reach = min(14 + abs(then.middle - first.middle) / 6, _MARGIN - 12)
        bend = x - reach if left else x + reach
        yield f"M {x:g} {first.middle:g} C {bend:g} {first.middle:g}, {bend:g} {then.middle:g}, {x:g} {then.middle:g}"


def _region(step: Step) -> _Region:
    places = "; ".join(dict.fromkeys(f"{op.target} ({op.location})" if op.location else op.target for op in step.ops))
    gain = step.seconds_before / step.seconds
    time = f"{_time(step.seconds)}; its operators one by one {_time(step.seconds_before)}, {gain:.2f}x"
    return _Region(_link(step), f"{step.name}, {step.kind}", (places, time, *filter(None, [step.choice])), step.sources)


def _link(step: Step) -> str:
    return f"region-{step.name}"


def _time(seconds: float) -> str:
    return f"{1e6 * seconds:.3g} us" if seconds < 1e-3 else f"{1e3 * seconds:.3g} ms"
