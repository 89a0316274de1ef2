"""What the pipeline found out of one graph, as the values that a report is made of."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from fusepass.autotune.work import Work
from fusepass.codegen.generate import Generated, anchor_traffic
from fusepass.codegen.ir.anchor_format import AnchorFormat
from fusepass.codegen.source import Target
from fusepass.compile.chunked import Chunked, Scaled
from fusepass.compile.chunks import KEPT_WHOLE
from fusepass.patterns.partition import Partition
from fusepass.patterns.simplify import Application
from fusepass.report.report import (
    CaptureRoute,
    GraphNode,
    KernelRecord,
    OpRecord,
    RefusalReport,
    RegionReport,
    RegionState,
    Report,
    RewriteReport,
    SourceFile,
    TensorRecord,
)


def summary(
    name: str,
    graph: fx.GraphModule,
    parts: Partition,
    works: Sequence[Work],
    applications: Sequence[Application],
    seconds: Mapping[str, float],
    steps: Sequence[Report] = (),
) -> Report:
    """The report of one captured graph.

    Args:
        name: the model's name.
        graph: the captured graph, simplified, its regions not yet replaced.
        parts: what became of its operators.
        works: its regions, at the end of the pipeline.
        applications: the rewrites, in order.
        seconds: per stage, in the order in which they ran.
        steps: of graphs that calls of `graph` run for each chunk of a product.
    """
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    written = {write.name for work in works for write in work.writes}
    devices = [node.meta["val"].device for node in calls if isinstance(node.meta.get("val"), torch.Tensor)]
    return Report(
        model=name,
        device=str(devices[0]) if devices else "cpu",
        capture=CaptureRoute.TRACED,
        regions=(*map(_region_report, works), *(region for step in steps for region in step.regions)),
        refusals=tuple(_refusals(calls, parts, written)),
        rewrites=tuple(
            RewriteReport(a.rule, a.node, a.before.flops, a.after.flops, a.before.bytes, a.after.bytes)
            for a in applications
        ),
        ops_total=sum(not _is_getitem(node) for node in calls) + sum(step.ops_total for step in steps),
        ops_fused=len(written)
        + sum(step.ops_fused for step in steps)
        + sum(not _is_getitem(node) for work in works if work.state is RegionState.FUSED for node in work.region.nodes),
        seconds=tuple(seconds.items()),
        graphs=(_nodes(graph, works),),
    )


def _refusals(calls: Sequence[fx.Node], parts: Partition, written: set[str]) -> Iterator[RefusalReport]:
    in_chunks = {node.name for node in calls if isinstance(node.target, Chunked | Scaled)}
    for refusal in parts.refusals:
        if refusal.node not in in_chunks | written:
            yield RefusalReport(refusal.node, refusal.target, refusal.reason)
    for node in calls:
        if KEPT_WHOLE in node.meta:
            yield RefusalReport(node.name, _packet(node), node.meta[KEPT_WHOLE])


def _nodes(graph: fx.GraphModule, works: Sequence[Work]) -> tuple[GraphNode, ...]:
    """The graph as values; of operators with several results, what takes one out is looked through."""
    regions = {
        node: work.region.name for work in works if work.state is RegionState.FUSED for node in work.region.nodes
    }
    kinds = {"placeholder": "input", "get_attr": "input", "call_function": "operator", "output": "output"}
    return tuple(
        GraphNode(
            node.name,
            kinds[node.op],
            _packet(node) if node.op == "call_function" else "",
            regions.get(node, ""),
            tuple(_tensor(each) for each in node.all_input_nodes if isinstance(each.meta.get("val"), torch.Tensor)),
        )
        for node in graph.graph.nodes
        if node.op in kinds and not (node.op == "call_function" and _is_getitem(node))
    )


def _tensor(node: fx.Node) -> TensorRecord:
    source, value = node, node.meta["val"]
    while source.op == "call_function" and _is_getitem(source):
        (source,) = source.all_input_nodes[:1]
    return TensorRecord(source.name, _type(node), value.numel() * value.itemsize)


def _is_getitem(node: fx.Node) -> bool:
    return node.target is operator.getitem


def _region_report(work: Work) -> RegionReport:
    region, candidate, generated = work.region, work.candidate, work.generated
    anchor = None if region.anchor is None else f"{_implementation(generated)}: {_packet(region.anchor)}"
    anchor_format = AnchorFormat.CALLER if candidate is None else candidate.spec.anchor_format
    if anchor is not None and anchor_format is not AnchorFormat.CALLER:
        anchor += f", {anchor_format.value}"
    inputs = ", ".join(_type(node) for node in work.arguments)
    outputs = ", ".join(_type(node) for node in region.outputs)
    report = RegionReport(
        name=region.name,
        pattern=region.pattern,
        ops=tuple(
            OpRecord(node.name, _packet(node), location)
            for node, location in zip(region.nodes, region.locations, strict=True)
            if not _is_getitem(node) and (not region.members or node in region.members[0])
        ),
        kernels=(),
        bytes_before=region.bytes_before,
        bytes_after=region.bytes_after,
        anchor=anchor,
        device=str(work.device),
        signature=f"{inputs} -> {outputs}",
        state=work.state,
        reason=work.reason,
        choice=work.choice,
        build_seconds=work.seconds,
        like=None if work.like is None else work.like.region.name,
        written=tuple(write.all_input_nodes[0].name for write in work.writes),
        ruled_out=tuple(work.ruled_out.items()),
        beyond_budget=work.beyond_budget,
    )
    if candidate is None or generated is None:
        return report
    suffix = "cu" if generated.source.target is Target.CUDA else "cpp"
    read_and_written = sum(kernel.read + kernel.written for kernel in generated.kernels)
    return replace(
        report,
        bytes_after=read_and_written + anchor_traffic(generated.outline),
        sizes=generated.sizes or None,
        kernels=tuple(
            KernelRecord(kernel.name, kernel.schedule, kernel.read, kernel.written)
            for each in (*candidate.conversions.values(), generated)
            for kernel in each.kernels
        ),
        sources=tuple(
            SourceFile(
                f"{each.outline.name}.{suffix}",
                None if library is None else library.with_name(f"source.{suffix}"),
                each.source.text,
            )
            for each, library in (
                (generated, candidate.library),
                *((conversion, candidate.converters.get(name)) for name, conversion in candidate.conversions.items()),
            )
        ),
    )


def _implementation(generated: Generated | None) -> str:
    """Who computes a region's anchor."""
    return "generated" if generated is not None and generated.generates_anchor else "library"


def _packet(node: fx.Node) -> str:
    return str(getattr(node.target, "overloadpacket", node.target))


def _type(node: fx.Node) -> str:
    value = node.meta["val"]
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
