"""The call of a region as a small Python function, generated like its kernels: at this size every attribute look-up shows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from struct import Struct
from typing import Any

import torch

from fusepass.codegen.ir.index import contiguous_strides
from fusepass.codegen.ir.program import VIEW_TARGET, Buffer, LibraryCall, Program, Ref, Role
from fusepass.codegen.source import Target
from fusepass.runtime.fast_path import MADE, Launch
from fusepass.runtime.meta import Meta, with_strides
from fusepass.runtime.operators import EMPTY, gives_contiguous, reinterpret, shorter
from fusepass.runtime.pages import LEAST_BYTES, prefer_large

_ALIGNMENT = 256  # of temporaries within the workspace, in bytes
_VECTOR = 16  # widest access of a kernel, in bytes
_increment_version: Any = torch._C._increment_version
"""Takes tensors, and tells autograd that they were written; `torch.autograd.graph.increment_version` without its checks."""
_RecordFunction: Any = torch._C._profiler._RecordFunctionFast  # a context that profilers see by its name
_UNSEEN = "unseen=False"
"""The last parameter of what profilers see: whether it is left to who calls it."""


@dataclass(frozen=True)
class CallText:
    """The functions of a region's call.

    Attributes:
        source: of ``run(*arguments)``, which is ``launch(*arguments)`` where no strides are compared and no library is called; else it does
            that and then calls ``launch(*arguments, *results)``, with what the library's calls gave.
        scope: the names that both refer to, but for ``name``, ``entry``, ``region``, ``failed`` and ``without_memory``.
        launch: what ``launch`` does in the common case; None where more than allocating and launching.
    """

    source: str
    scope: dict[str, Any]
    launch: Launch | None


def call_text(
    program: Program,
    target: Target,
    device: torch.device,
    inputs: Sequence[Meta],
    outputs: Sequence[Meta],
    used: Sequence[int],
    exact: Collection[int],
    written: Mapping[int, int],
    conversions: Mapping[str, Callable[..., Any]],
    size_numbers: int | None,
    of_list: bool,
) -> CallText:
    """The call of a `program` that was built for `target`; `size_numbers` is what its entry takes behind the pointers, `of_list` as its `Source` has it, the
    others are as `FusedRegion` has them."""
    cuda = target is Target.CUDA
    scope: dict[str, Any] = {
        "__name__": "fusepass.generated", "torch": torch, "empty": EMPTY[device.type], "with_strides": with_strides,
    }  # fmt: skip
    arguments = [f"a{number}" for number in range(len(inputs))]
    names = {name: arguments[position] for name, position in zip(program.inputs, used, strict=True)}
    targets = [arguments[position] for position in written.values()]
    plainly = f"return region.original({', '.join(arguments)})"
    head = _layouts(program, names, {arguments[position] for position in exact}, targets, plainly, scope)
    for number, call in enumerate(program.calls):
        names[call.result] = f"c{number}"
        head += _library_call(program, call, number, names, conversions, scope)
    head += _seen_as(program, outputs, names, scope)
    given = [*arguments, *(f"c{number}" for number in range(len(program.calls)))]
    body, launch = _launch(program, outputs, given, names, written, size_numbers, scope)
    pointers, passed, from_outside, there = _pointers(program, names, targets)
    body += pointers
    body.append("call = entry")
    if size_numbers is not None:
        scope["size_numbers"] = size_numbers
        body.append("numbers = size_numbers")
        passed.append("numbers")
    if there:
        body.append(f"if not ({' and '.join(there)}): return without_memory(region, ({', '.join(arguments)},))")
    if of_list:
        scope["pack"] = Struct(f"{len(passed)}P").pack
        passed, launch = [f"pack({', '.join(passed)})"], None
    elif from_outside:
        body.append(f"if ({' | '.join(from_outside)}) & {_VECTOR - 1}:")
        if targets:
            body.append(f"    {plainly}")
        else:
            body += [
                "    other = region.unaligned_entry()",
                f"    if other is None: {plainly}",
                "    call = other.call",
            ]
            if size_numbers is not None:
                body.append("    numbers = other.numbers")
    body.append(f"status = call({', '.join([*passed, 'stream(index)' if cuda else 'None'])})")
    body.append(f"if status: return failed(region, status, ({', '.join(arguments)},))")
    if targets:
        scope["written"] = _increment_version
        body.append(f"written(({', '.join(targets)},))")
    results = [names[name] for number, name in enumerate(program.outputs) if number not in written]
    body.append(f"return {', '.join(results)}" if results else "return ()")
    if cuda:
        scope |= {"stream": torch._C._cuda_getCurrentRawStream, "index": device.index}
        scope |= {"current_device": torch._C._cuda_getDevice, "on_device": torch.cuda.device}
        again = f"    with on_device(index): return launch({', '.join(given if head else [*given, 'unseen=unseen'])})"
        body = ["if current_device() != index:", again, *body]
    scope |= {"profiler": torch.autograd.profiler, "record": _RecordFunction}
    if head:
        source = _function("launch", given, body)
        head.append(f"return launch({', '.join(given)})")
        source += _function("run", [*arguments, _UNSEEN], [*_seen("run", arguments), *head])
    else:
        source = _function("launch", [*given, _UNSEEN], [*_seen("launch", given), *body]) + "run = launch\n"
    return CallText(source, scope, launch)


def _function(name: str, parameters: Sequence[str], body: Sequence[str]) -> str:
    return "\n".join([f"def {name}({', '.join(parameters)}):", *(f"    {line}" for line in body)]) + "\n"


def _seen(function: str, parameters: Sequence[str]) -> list[str]:
    """Lines by which a profiler sees a call of `function` under the region's name."""
    return [
        "if profiler._is_profiler_enabled and not unseen:",
        f"    with record(name): return {function}({', '.join([*parameters, 'unseen=True'])})",
    ]


def _layouts(
    program: Program,
    names: Mapping[str, str],
    sure: Collection[str],
    targets: Collection[str],
    plainly: str,
    scope: dict[str, Any],
) -> list[str]:
    """Lines that give arguments the strides with which the program or the library reads them, but for those that are `sure` to have them."""
    body = []
    for name, label in names.items():
        expected = Meta.of_buffer(program.buffer(name))
        if label in targets and label not in sure:
            body.append(f"if {label}.stride() != {expected.strides}: {plainly}")
        elif label not in sure and (program.buffer(name) in program.arguments or program.calls):
            scope[f"meta_{label}"] = expected
            body.append(f"if {label}.stride() != {expected.strides}: {label} = with_strides({label}, meta_{label})")
    return body


def _library_call(
    program: Program,
    call: LibraryCall,
    number: int,
    names: Mapping[str, str],
    conversions: Mapping[str, Callable[..., Any]],
    scope: dict[str, Any],
) -> list[str]:
    """Lines that make the result of a library call."""
    body, known = [], True
    expected = Meta.of_buffer(program.buffer(call.result))
    if call.result in conversions:
        scope[f"convert{number}"] = conversions[call.result]
        (source,) = call.args
        body.append(f"c{number} = convert{number}({_python(source, names)})")
    else:
        target: Any = torch.ops
        for part in call.target.split("."):
            target = getattr(target, part)
        scope[f"library{number}"] = reinterpret if call.target == VIEW_TARGET else shorter(target)
        arguments = [_python(value, names) for value in call.args]
        arguments += [f"{key}={_python(value, names)}" for key, value in call.kwargs]
        item = "" if call.item is None else f"[{call.item}]"
        body.append(f"c{number} = library{number}({', '.join(arguments)}){item}")
        known = gives_contiguous(target) and expected.strides == contiguous_strides(expected.shape)
    # A converted input is large, and only this call has read it.
    read = [value.buffer for value in call.args if isinstance(value, Ref)]
    body += [f"{names[buffer]} = None" for buffer in read if buffer in conversions]
    if not known and (program.buffer(call.result) in program.arguments or _is_viewed(program, call.result)):
        scope[f"meta_c{number}"] = expected
        body.append(f"if c{number}.stride() != {expected.strides}: c{number} = with_strides(c{number}, meta_c{number})")
    return body


def _is_viewed(program: Program, name: str) -> bool:
    """Whether a view of a library call's result takes its layout for granted."""
    return any(call.target == VIEW_TARGET and Ref(name) in call.args for call in program.calls)


def _seen_as(program: Program, outputs: Sequence[Meta], names: Mapping[str, str], scope: dict[str, Any]) -> list[str]:
    """Lines that let results of library calls which are outputs have the shapes that are asked for."""
    body = []
    for name, meta in zip(program.outputs, outputs, strict=True):
        buffer = program.buffer(name)
        if buffer.role is Role.ANCHOR and Meta.of_buffer(buffer) != meta:
            scope["reinterpret"] = reinterpret
            body.append(f"{names[name]} = reinterpret({names[name]}, {meta.shape}, {meta.strides}, 0)")
    return body


def _launch(
    program: Program,
    outputs: Sequence[Meta],
    given: Sequence[str],
    names: dict[str, str],
    written: Mapping[int, int],
    numbers: int | None,
    scope: dict[str, Any],
) -> tuple[list[str], Launch | None]:
    """Lines that allocate results and workspace, which get `names`, and what the whole launch is, of the tensors that are `given`."""
    body, results, large = list[str](), list[int](), False
    made: list[tuple[Any, ...]] = []
    places: dict[str, tuple[int, int, int]] = {name: (0, given.index(label), 0) for name, label in names.items()}
    for number, (name, meta) in enumerate(zip(program.outputs, outputs, strict=True)):
        if number in written:
            names[name] = given[written[number]]
            places[name] = 0, written[number], 0
            continue
        if program.buffer(name).role is Role.ANCHOR:
            results.append(given.index(names[name]))
            continue
        results.append(MADE)
        places[name] = 1, len(made), 0
        made.append((meta.shape, meta.strides, meta.dtype))
        names[name] = f"o{number}"
        scope[f"dtype{number}"] = meta.dtype
        body.append(f"o{number} = empty({meta.shape}, {meta.strides}, dtype{number})")
        nbytes = program.buffer(name).nbytes
        if scope["empty"] is EMPTY["cpu"] and nbytes >= LEAST_BYTES:
            large = True
            scope["prefer_large"] = prefer_large
            body.append(f"prefer_large(o{number}.data_ptr(), {nbytes})")
    offsets, total = workspace_places([buffer for buffer in program.arguments if buffer.role is Role.TEMP])
    if total:
        scope["bytes"] = torch.uint8
        body.append(f"workspace = empty(({total},), (1,), bytes)")
        body.append("base = workspace.data_ptr()")
    for name, offset in offsets.items():
        names[name] = f"base + {offset}" if offset else "base"
        places[name] = 2, 0, offset
    if large:
        return body, None
    workspace = ((total,), (1,), torch.uint8) if total else None
    of_pointers = tuple(places[buffer.name] for buffer in program.arguments)
    launch = Launch(
        len(given),
        tuple(made),
        tuple(results),
        len(results) == 1,
        workspace,
        of_pointers,
        numbers,
        tuple(written.values()),
    )
    return body, launch


def _pointers(
    program: Program, names: Mapping[str, str], targets: Collection[str]
) -> tuple[list[str], list[str], list[str], list[str]]:
    """Lines that ask for addresses, what the entry is passed, which of these are of memory from outside, and which are 0 only without memory."""
    body, passed, from_outside, there = list[str](), list[str](), list[str](), list[str]()
    known: dict[str, str] = {}
    for buffer in program.arguments:
        name = names[buffer.name]
        if buffer.role is Role.TEMP:
            passed.append(name)
        elif buffer.role is Role.INPUT or name in targets:
            pointer = known.get(name) or f"p{len(passed)}"
            passed.append(pointer)
            if name not in known:
                known[name] = pointer
                body.append(f"{pointer} = {name}.data_ptr()")
                from_outside.append(pointer)
                there += [pointer] if buffer.nbytes else []
        else:
            passed.append(f"{name}.data_ptr()")
    return body, passed, from_outside, there


def _python(value: object, names: Mapping[str, str]) -> str:
    if isinstance(value, Ref):
        return names[value.buffer]
    if isinstance(value, tuple):
        return "(" + "".join(_python(item, names) + ", " for item in value) + ")"
    return repr(value)


def workspace_places(temporaries: Sequence[Buffer]) -> tuple[dict[str, int], int]:
    """Where each temporary lies in one allocation, and its size, in bytes."""
    offsets, total = {}, 0
    for buffer in temporaries:
        offsets[buffer.name] = total
        total += -(-prod(buffer.shape) * buffer.dtype.nbytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, total
