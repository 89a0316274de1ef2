"""Generates the one kernel of a list: what a member is made of is lowered once, for any number of elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fusepass.autotune.work import Work
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import Generated, KernelSummary, Recalled, generate
from fusepass.codegen.ir.anchor_format import AnchorFormat
from fusepass.codegen.ir.outline import Outline
from fusepass.codegen.ir.program import Buffer, Program, Role
from fusepass.codegen.lowering.lower import Unsupported, lower
from fusepass.codegen.lowering.tensor import dtype_of
from fusepass.codegen.lowering.tracer import Spec
from fusepass.codegen.passes.anchors import AnchorSource
from fusepass.codegen.search.candidate import Candidate, CandidateSpec
from fusepass.codegen.source import Target

_SIZE = 1 << 16
"""Elements for which a member is lowered; the kernel takes any number."""


def list_candidate(work: Work, facts: DeviceFacts) -> Candidate:
    """The program of a region that is a list.

    Raises:
        Unsupported: the kernel IR cannot express it.
    """
    region = work.region
    members = [_MemberOf.region(member, region.outputs) for member in region.members]
    program = _lowered(members[0], region.name, facts)
    if facts.target is Target.CUDA:
        from fusepass.codegen.render.cuda.lists import describe_list, render_list
    else:
        from fusepass.codegen.render.cpu.lists import describe_list, render_list
    sizes = [member.outputs[0].meta["val"].numel() for member in members]
    outline = _outline(work, program, members)
    reads, writes = _traffic(program, members)
    (kernel,) = program.kernels
    summary = KernelSummary(kernel.name, describe_list(program, sizes), reads, writes)
    recalled = Recalled(render_list(program, sizes, facts), (summary,), lambda: program)
    spec = CandidateSpec(AnchorFormat.CALLER, AnchorSource.PREFERRED)
    return Candidate(spec, Generated(outline, facts, recalled=recalled), {})


@dataclass(frozen=True)
class _MemberOf:
    """The operators of a member, what they read of others, and what others read of them."""

    nodes: Sequence[fx.Node]
    inputs: Sequence[fx.Node]
    outputs: Sequence[fx.Node]

    @classmethod
    def region(cls, nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> _MemberOf:
        inside, given = {*nodes}, {*outputs}
        inputs = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside)
        return cls(nodes, tuple(inputs), tuple(node for node in nodes if node in given))

    def named(self, program: Program) -> dict[str, fx.Node]:
        """By the buffers of the program that was made for the list, the values of this member."""
        return dict(zip((*program.inputs, *program.outputs), (*self.inputs, *self.outputs), strict=True))


def _lowered(member: _MemberOf, name: str, facts: DeviceFacts) -> Program:
    """The program of `member` after all passes, in one kernel over one axis."""
    single = not member.outputs[0].meta["val"].dim()
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in member.inputs:
        copies[node] = graph.placeholder(node.name)
    for node in member.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    for node, copy in copies.items():
        copy.meta = {**node.meta, "val": _in_a_row(node.meta["val"], single)}
    graph.output(tuple(copies[node] for node in member.outputs))
    module = fx.GraphModule(torch.nn.Module(), graph)
    labels = [copies[node].name for node in member.inputs]
    lowered, builder = lower(module, name, labels, wide=facts.target is Target.CPU)
    program = generate(lowered, builder, facts).program
    if (
        program.calls
        or len(program.kernels) != 1
        or not program.kernels[0].is_pointwise
        or len(program.kernels[0].rows) != 1
    ):
        raise Unsupported("the operators of a list are more than one kernel over all elements")
    return program


def _in_a_row(value: torch.Tensor, single: bool) -> Spec:
    """How a value of a member is described to lowering: by its elements as they lie in memory; a number as one unless all values are numbers (`single`)."""
    shape = (_SIZE,) if single or value.dim() else ()
    return Spec.described(shape, (1,) * len(shape), value.dtype, value.device)


def _outline(work: Work, program: Program, members: Sequence[_MemberOf]) -> Outline:
    """What allocates for a call of the whole list, and which buffers its entry takes: for each member those of `program`."""
    region = work.region
    buffers = {node: _buffer(node.name, node, Role.INPUT) for node in work.arguments}
    results = {node: _buffer(f"out{number}", node, Role.OUTPUT) for number, node in enumerate(region.outputs)}
    every = {**buffers, **results}
    return Outline(
        program.name,
        tuple(every.values()),
        tuple(each.name for each in buffers.values()),
        tuple(each.name for each in results.values()),
        (),
        (),
        tuple(
            (results[region.outputs[number]].name, write.all_input_nodes[0].name)
            for number, write in work.updates.items()
        ),
        tuple(every[member.named(program)[each.name]].name for member in members for each in program.arguments),
    )


def _buffer(name: str, node: fx.Node, role: Role) -> Buffer:
    value = node.meta["val"]
    return Buffer(name, dtype_of(value.dtype), tuple(value.shape), value.stride(), role)


def _traffic(program: Program, members: Sequence[_MemberOf]) -> tuple[int, int]:
    """Bytes that the kernel reads and writes."""
    read, written = dict[fx.Node, int](), dict[fx.Node, int]()
    for member in members:
        for name, node in member.named(program).items():
            if name in {buffer.name for buffer in program.arguments}:
                (written if name in program.outputs else read)[node] = node.meta["val"].nbytes
    return sum(read.values()), sum(written.values())
