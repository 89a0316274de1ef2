"""Outlines of programs, and sources, as what JSON holds and back: what is kept of generated code once it is compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.outline import Outline
from fusepass.codegen.ir.program import Buffer, LibraryCall, Program, Ref, Role
from fusepass.codegen.ir.updates import written_over
from fusepass.codegen.plain import UNKNOWN, decode, encode
from fusepass.codegen.source import Source, Target


def outline_data(program: Program) -> dict[str, Any]:
    """What `outline_of` makes the outline of `program` of.

    Raises:
        ArtifactError: a library call has an argument that is not plain.
    """
    return {
        "program": program.name,
        "buffers": [
            [each.name, each.dtype.name, list(each.shape), list(each.strides), each.role.value]
            for each in program.buffers
        ],
        "inputs": list(program.inputs),
        "outputs": list(program.outputs),
        "passed": [each.name for each in program.arguments],
        "calls": [_call(call) for call in program.calls],
        "updates": [list(pair) for pair in written_over(program)],
    }


def outline_of(data: Mapping[str, Any]) -> Outline:
    """The outline of which `outline_data` made `data`."""
    buffers = tuple(
        Buffer(name, DType[dtype], tuple(shape), tuple(strides), Role(role))
        for name, dtype, shape, strides, role in data["buffers"]
    )
    calls = tuple(map(_call_of, data["calls"]))
    updates = tuple((output, updated) for output, updated in data["updates"])
    return Outline(
        data["program"], buffers, tuple(data["inputs"]), tuple(data["outputs"]), calls, (), updates, tuple(data["passed"])
    )  # fmt: skip


def source_data(source: Source) -> dict[str, Any]:
    """`source` without its text and headers, which a built library has no use for."""
    return {
        "name": source.name,
        "entry": source.entry,
        "target": source.target.value,
        "arch": source.arch,
        "numbers": encode(source.numbers),
        "replay": source.replay,
        "of_list": source.of_list,
    }


def source_of(data: Mapping[str, Any], text: str = "", headers: Sequence[str] = ()) -> Source:
    """The source of which `source_data` made `data`, with this text and these headers."""
    decoded = {"target": Target(data["target"]), "numbers": decode(data["numbers"])}
    return Source(**{**data, **decoded, "text": text, "headers": tuple(headers)})


def _call(call: LibraryCall) -> list[Any]:
    def reference(value: Any) -> Any:
        return {"buffer": value.buffer} if isinstance(value, Ref) else UNKNOWN

    args = [encode(value, reference) for value in call.args]
    return [
        call.result,
        call.target,
        args,
        [[name, encode(value, reference)] for name, value in call.kwargs],
        call.item,
    ]


def _call_of(data: Sequence[Any]) -> LibraryCall:
    def reference(value: Any) -> Any:
        return Ref(value["buffer"]) if "buffer" in value else UNKNOWN

    result, target, args, kwargs, item = data
    read = tuple(decode(value, reference) for value in args)
    return LibraryCall(result, target, read, tuple((name, decode(each, reference)) for name, each in kwargs), item=item)
