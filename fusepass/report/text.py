"""How a report reads on a terminal."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from fusepass.report.records import ModelRecord, OpRecord, RefusalReport, RegionRecord, RewriteReport
from fusepass.report.table import Column, human_bytes, human_count, table, wrap

_COLUMNS = (
    Column("region", least=16),
    Column("ops", right=True),
    Column("kernels", right=True),
    Column("before", right=True),
    Column("after", right=True),
    Column("state"),
)
_REASON_LINES = 6  # a compiler's whole output may stand in a reason
_ROUTES = {
    "traced": "traced",
    "dynamo": "captured by Dynamo",
    "children": "captured child by child",
    "untouched": "left as it is",
}


def report_text(report: ModelRecord, width: int) -> str:
    """The whole report in lines of at most `width` columns: summary, regions, refusals, fallbacks, rules, totals; the same of backward."""
    under_way = _list("compiled in the background", report.background, width)
    sections = [_summary(report, width), under_way, *_sections(report, width)]
    if report.backward is not None:
        sections += [wrap("backward", width), *_sections(report.backward, width)]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _sections(report: ModelRecord, width: int) -> list[list[str]]:
    return [
        _regions(report.regions, width),
        _list("not fused", _refusals(report.refusals), width),
        _list("ran as the original operators", _fallbacks(report), width),
        _list("rules applied", _rewrites(report.rewrites), width),
        _totals(report, width),
    ]


def region_text(region: RegionRecord, width: int) -> str:
    """One region in lines of at most `width` columns, with its kernels and source files."""
    saved = f"{human_bytes(region.bytes_before)} moved before, {human_bytes(region.bytes_after)} after"
    lines = wrap(f"{region.name} on {region.device}, {region.state}", width)
    lines += wrap(region.signature, width, indent=2) + wrap(saved, width, indent=2)
    lines += _details(region, width, indent=2)
    for kernel in region.kernels:
        traffic = f"reads {human_bytes(kernel.bytes_read)}, writes {human_bytes(kernel.bytes_written)}"
        lines += wrap(f"kernel {kernel.name}: {kernel.schedule}; {traffic}", width, indent=2)
    for source in region.sources:
        lines += wrap(f"source {source.name}: {source.path or 'not written to disk'}", width, indent=2)
    return "\n".join(lines)


def short_target(target: str) -> str:
    """An ATen operator without namespace and overload: ``gelu`` for ``aten.gelu.default``."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else target


def _summary(report: ModelRecord, width: int) -> list[str]:
    how = _ROUTES[report.capture] + (f": {report.reason}" if report.reason else "")
    return wrap(f"{report.model} on {report.device}, {how}", width, lines=_REASON_LINES)


def _regions(regions: Sequence[RegionRecord], width: int) -> list[str]:
    if not regions:
        return ["no regions"]
    cells = [
        (
            region.name,
            str(len(region.ops)),
            str(len(region.kernels)),
            human_bytes(region.bytes_before),
            human_bytes(region.bytes_after),
            region.state.value,
        )
        for region in regions
    ]
    head, *blocks = table(_COLUMNS, cells, width)
    rule = "-" * max(len(line) for block in (head, *blocks) for line in block)
    lines = [*head, rule] if head else []
    for region, block in zip(regions, blocks, strict=True):
        lines += block + _details(region, width, indent=4)
    return lines


def _details(region: RegionRecord, width: int, *, indent: int) -> list[str]:
    """The pattern, the operators by line of the model, the anchor's implementation, why it is not in use."""
    lines = wrap(f"pattern: {region.pattern}", width, indent=indent)
    for location, ops in _by_location(region.ops).items():
        names = ", ".join(short_target(op.target) for op in ops)
        lines += wrap(f"{location}: {names}" if location else names, width, indent=indent)
    if region.anchor:
        lines += wrap(f"anchor ({region.anchor})", width, indent=indent)
    if region.written:
        lines += wrap(f"writes {', '.join(region.written)}", width, indent=indent)
    if region.like:
        lines += wrap(f"kernels and choice: those of {region.like}", width, indent=indent)
    if region.sizes:
        lines += wrap(f"library {region.sizes}", width, indent=indent, lines=_REASON_LINES)
    if region.choice and not region.like:
        lines += wrap(str(region.choice), width, indent=indent, lines=_REASON_LINES)
    not_built = [f'"{name}" (predicted to take {times:.1f}x as long)' for name, times in region.ruled_out]
    not_built += [f'"{name}" (beyond tune_budget)' for name in region.beyond_budget]
    if not_built:
        lines += wrap(f"not built: {', '.join(not_built)}", width, indent=indent, lines=_REASON_LINES)
    if region.reason:
        lines += wrap(f"because: {region.reason}", width, indent=indent, lines=_REASON_LINES)
    return lines


def _by_location(ops: Iterable[OpRecord]) -> dict[str, list[OpRecord]]:
    groups: dict[str, list[OpRecord]] = defaultdict(list)
    for op in ops:
        groups[op.location].append(op)
    return groups


def _refusals(refusals: Iterable[RefusalReport]) -> list[str]:
    """One text for each (operator, reason), with the first place and how many more there are."""
    groups: dict[tuple[str, str], list[RefusalReport]] = defaultdict(list)
    for refusal in refusals:
        groups[refusal.target, refusal.reason].append(refusal)
    texts = []
    for (target, reason), group in groups.items():
        place = group[0].location or group[0].node
        more = f" and {len(group) - 1} more" if len(group) > 1 else ""
        texts.append(f"{short_target(target)} ({place}{more}): {reason}")
    return texts


def _fallbacks(report: ModelRecord) -> list[str]:
    return [f"{entry.where}, {_counted(entry.count, 'call')}: {entry.reason}" for entry in report.fallbacks]


def _rewrites(rewrites: Iterable[RewriteReport]) -> list[str]:
    """One text for each rule, with what its applications save together."""
    groups: dict[str, list[RewriteReport]] = defaultdict(list)
    for rewrite in rewrites:
        groups[rewrite.rule].append(rewrite)
    texts = []
    for rule, group in groups.items():
        flops = [sum(r.flops_before for r in group), sum(r.flops_after for r in group)]
        moved = [sum(r.bytes_before for r in group), sum(r.bytes_after for r in group)]
        changes = [f"FLOPs {human_count(flops[0])} to {human_count(flops[1])}"] if flops[0] != flops[1] else []
        changes += [f"bytes {human_bytes(moved[0])} to {human_bytes(moved[1])}"] if moved[0] != moved[1] else []
        texts.append(f"{rule}, {_counted(len(group), 'time')}" + (": " if changes else "") + ", ".join(changes))
    return texts


def _list(title: str, texts: Sequence[str], width: int) -> list[str]:
    lines = [line for text in texts for line in wrap(text, width, indent=2, lines=_REASON_LINES)]
    return wrap(title, width) + lines if texts else []


def _totals(report: ModelRecord, width: int) -> list[str]:
    regions = Counter(region.state.value for region in report.regions)
    states = ", ".join(f"{count} {state}" for state, count in regions.items()) or "none"
    saved, before = report.bytes_saved, report.bytes_before
    share = saved / before if before else 0.0
    lines = [
        f"operators fused: {report.ops_fused} of {report.ops_total} ({report.fused_share:.0%})",
        f"regions: {states}",
        f"memory traffic saved per call: {human_bytes(saved)} of {human_bytes(before)} ({share:.0%})",
    ]
    lines += _not_built(report.regions)
    lines += [f"cuda graphs: {'; '.join(report.cuda_graphs)}"] if report.cuda_graphs else []
    if report.seconds:
        lines.append("seconds: " + ", ".join(f"{name} {seconds:.2f}" for name, seconds in report.seconds))
    return [line for text in lines for line in wrap(text, width)]


def _not_built(regions: Sequence[RegionRecord]) -> list[str]:
    """How many candidates were left out, why, and how to have them."""
    ruled_out = sum(len(region.ruled_out) for region in regions)
    beyond = sum(len(region.beyond_budget) for region in regions)
    parts = [f'{ruled_out} predicted to be much slower (tune="max" builds these)'] if ruled_out else []
    parts += [f"{beyond} beyond tune_budget (a larger one builds these)"] if beyond else []
    return [f"candidates not built: {', '.join(parts)}"] if parts else []


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
