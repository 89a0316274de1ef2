"""A fused region at run time: allocate, call the library's anchor, launch the generated kernels.

The call itself is a small Python function, generated per region like the kernels, because at this size every attribute look-up shows.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Protocol

import torch

from fusepass.codegen import build
from fusepass.codegen.ir.program import Buffer, LibraryCall, Program, Ref, Role
from fusepass.codegen.ir.updates import written_over
from fusepass.codegen.source import Source, Target
from fusepass.errors import BuildError
from fusepass.runtime.fallbacks import FallbackCounter
from fusepass.runtime.fast_path import Launch, launcher
from fusepass.runtime.memory import has_elements_nowhere
from fusepass.runtime.meta import Meta, as_seen, with_strides
from fusepass.runtime.operators import shorter
from fusepass.runtime.pages import LEAST_BYTES, prefer_large

_ALIGNMENT = 256  # of temporaries within the workspace, in bytes
_TOO_LARGE = 720  # cudaErrorCooperativeLaunchTooLarge
_VECTOR = 16  # widest access of a kernel, in bytes
_allocators: Any = torch._C._dynamo.guards
_increment_version: Any = torch._C._increment_version
"""Takes tensors, and tells autograd that they were written; `torch.autograd.graph.increment_version` without its checks."""
_EMPTY = {"cpu": _allocators._empty_strided_cpu, "cuda": _allocators._empty_strided_cuda}
"""As `torch.empty_strided`, on the current device and without the dispatcher."""

Result = torch.Tensor | tuple[torch.Tensor, ...]


class Code(Protocol):
    """A program with its source, as `fusepass.codegen.generate.Generated` is; of one that was built elsewhere no more than this is known."""

    @property
    def program(self) -> Program: ...
    @property
    def source(self) -> Source: ...
    def unaligned(self) -> Source:
        """The source that assumes nothing about the alignment of inputs.

        Raises:
            BuildError: there is none.
        """


class Entry:
    """The entry of a built library.

    Attributes:
        call: takes pointers, `numbers` unless that is None, and the stream.
        numbers: the address of those that the source says, which lie there as long as this object lives.
    """

    __slots__ = ("_memory", "call", "numbers")

    def __init__(self, library: Any, source: Source, buffers: int) -> None:
        """The entry of `source`, which takes so many buffers.

        Raises:
            BuildError: the library cannot be loaded or has no such function.
        """
        general = source.numbers is not None
        self.call = build.load(library, source.entry, buffers + general)
        self._memory = ctypes.create_string_buffer(source.packed_numbers())
        self.numbers = ctypes.addressof(self._memory) if general else None


class FusedRegion:
    """A callable that computes one region.

    ``region(*inputs)`` takes tensors of exactly the specialised shapes and types on the specialised device, and gives
    a new tensor, or a tuple of them where the region has several results. Strides that differ (an ATen operator before it chose another layout) cost a copy.

    Args:
        name: the region's name.
        generated: its program and source.
        library: the built shared library of ``generated.source``.
        inputs: what each argument of the call looks like, numbers known at compile time included.
        used: for each program input, its position among the arguments.
        device: where everything lies.
        original: the region's ATen operators as a function of the same arguments; runs where the kernels cannot.
        fallbacks: counts those calls.
        conversions: what runs instead of a library call that only changes a layout, by the name of its result.
        exact: positions of arguments that lie as the program has them in every call, so that none compares strides.
        outputs: what each output looks like; as the program has it unless it is told.
        written: arguments that outputs are written over, by the numbers of both; such an output is no result.
        unaligned: the library for inputs that are not aligned to 16 bytes; it is built when first needed where there is none.
    """

    def __init__(
        self,
        name: str,
        generated: Code,
        library: Any,
        inputs: Sequence[Meta],
        used: Sequence[int],
        device: torch.device,
        original: Callable[..., Result],
        fallbacks: FallbackCounter,
        conversions: Mapping[str, FusedRegion] | None = None,
        exact: Collection[int] = (),
        outputs: Sequence[Meta] | None = None,
        written: Mapping[int, int] | None = None,
        unaligned: Any = None,
    ) -> None:
        program = generated.program
        self.name = name
        self.generated = generated
        self.device = device
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs or (Meta.of_buffer(program.buffer(name)) for name in program.outputs))
        self.written = written or {}
        self.original = original
        self.fallbacks = fallbacks
        self._unaligned: Entry | None = None
        self._lock = threading.Lock()
        self.library = library
        self._unaligned_library = unaligned
        self._entry = Entry(library, generated.source, len(program.arguments))
        self.conversions = conversions or {}
        self.used, self.exact = used, exact
        self._source, self._scope = _launcher(self, self._entry, used, exact)
        exec(compile(self._source, f"<fusepass {name}>", "exec"), self._scope)
        self.run: Callable[..., Result] = self._scope["run"]
        self.run.__name__ = self.run.__qualname__ = name

    def __call__(self, *inputs: torch.Tensor) -> Result:
        return self.run(*inputs)

    def reads_memory(self, position: int) -> bool:
        """Whether kernels alone read an argument, as memory that lies as told; to the library it is a tensor."""
        program = self.generated.program
        return not program.calls and lies_as_told(program, self.used, position, self.inputs[position])

    def seen(self, inputs: Sequence[Meta], outputs: Sequence[Meta]) -> FusedRegion:
        """This region, or what does as it for who has the same memory in other shapes.

        Args:
            inputs: what each argument looks like; one that is not as in `inputs` lies in each call as told here, and `reads_memory`.
            outputs: what each result looks like.
        """
        other = {number for number, pair in enumerate(zip(inputs, self.inputs, strict=True)) if pair[0] != pair[1]}
        if not other and tuple(outputs) == self.outputs:
            return self
        before, original = self.inputs, self.original

        def run(*arguments: torch.Tensor) -> Result:
            results = original(*map(as_seen, arguments, before))
            if isinstance(results, torch.Tensor):
                return as_seen(results, outputs[0])
            return tuple(map(as_seen, results, outputs))

        exact = {*self.exact, *other}
        return FusedRegion(
            self.name, self.generated, self.library, inputs, self.used, self.device, run, self.fallbacks,
            self.conversions, exact, outputs,
        )  # fmt: skip

    @property
    def may_write(self) -> dict[int, int]:
        """Which of the outputs may be written over which of the arguments, by their numbers."""
        program = self.generated.program
        return {
            program.outputs.index(output): self.used[program.inputs.index(updated)]
            for output, updated in written_over(program)
        }

    def writing(self, outputs: Collection[int]) -> FusedRegion:
        """This region, or what does as it and writes over arguments these of its outputs, which it `may_write`, and gives the others alone."""
        if not outputs:
            return self
        may_write = self.may_write
        written = {number: may_write[number] for number in outputs}
        return FusedRegion(
            self.name, self.generated, self.library, self.inputs, self.used, self.device, _copying(self.run, written),
            self.fallbacks, self.conversions, self.exact, self.outputs, written,
        )  # fmt: skip

    def stay(self) -> None:
        """To be called when this region is what serves calls from now on: launches that come again and again are replayed."""
        source = self.generated.source
        if source.replay is not None:
            self._scope["entry"] = build.load(self.library, source.replay, len(self.generated.program.arguments))

    def launcher(self, *, always_tuple: bool = False) -> Callable[..., Any]:
        """What does as `run` without Python, where that can be; `always_tuple` for one tensor, too."""
        launch = self._scope.get("launch")
        run: Callable[..., Any] = self.run
        failed: Callable[..., Any] = functools.partial(_failed, self)
        if always_tuple and len(self.outputs) - len(self.written) == 1:
            run, failed = functools.partial(_in_tuple, run), functools.partial(_in_tuple, failed)
        if not isinstance(launch, Launch):
            return run
        launch = replace(launch, single=launch.single and not always_tuple)
        scope = self._scope
        return launcher(launch, self.name, scope["entry"], self.device, scope["empty"], run, failed, self.library)

    def checked(self, *inputs: torch.Tensor) -> Result:
        """As the call, for arguments from anywhere.

        Raises:
            ValueError: an argument's shape, type or device is not what the region was specialised for.
        """
        for number, (tensor, expected) in enumerate(zip(inputs, self.inputs, strict=True)):
            if tuple(tensor.shape) != expected.shape or tensor.dtype != expected.dtype:
                raise ValueError(
                    f"{self.name}: argument {number} is {tensor.dtype}{list(tensor.shape)}; this code was specialised for "
                    f"{expected.dtype}{list(expected.shape)}. Call the optimised module, which specialises again."
                )
        return self.run(*map(with_strides, inputs, self.inputs))

    def unaligned_entry(self) -> Entry | None:
        """The entry for inputs that are not aligned to 16 bytes; None where it cannot be built."""
        with self._lock:
            if self._unaligned is None:
                try:
                    source = self.generated.unaligned()
                    library = self._unaligned_library or build.build(source)
                    self._unaligned = Entry(library, source, len(self.generated.program.arguments))
                except BuildError as error:
                    self.fallbacks.count(self.name, f"no kernel for unaligned inputs: {error.args[0]}", toolchain=True)
            return self._unaligned


def lies_as_told(program: Program, used: Sequence[int], position: int, told: Meta) -> bool:
    """Whether an argument like `told` lies as `program` reads it; `used`: for each of its inputs, the position among the arguments."""
    named = [name for name, place in zip(program.inputs, used, strict=True) if place == position]
    return all(program.buffer(name).strides == told.strides for name in named)


def _launcher(
    region: FusedRegion, entry: Entry, used: Sequence[int], exact: Collection[int]
) -> tuple[str, dict[str, Any]]:
    """Source of ``run(*inputs)`` and the names it refers to."""
    program, device = region.generated.program, region.device
    scope: dict[str, Any] = {
        "__name__": "fusepass.generated", "entry": entry.call, "region": region, "torch": torch, "empty": _EMPTY[device.type],
        "failed": _failed, "with_strides": with_strides, "without_memory": _without_memory,
    }  # fmt: skip
    arguments = [f"a{number}" for number in range(len(region.inputs))]
    names = {name: arguments[position] for name, position in zip(program.inputs, used, strict=True)}
    body: list[str] = []
    pointers = program.arguments
    sure = {arguments[position] for position in exact}
    targets = [arguments[position] for position in region.written.values()]
    plainly = f"return region.original({', '.join(arguments)})"
    for name, label in names.items():
        expected = Meta.of_buffer(program.buffer(name))
        if label in targets and label not in sure:
            body.append(f"if {label}.stride() != {expected.strides}: {plainly}")
        elif label not in sure and (program.buffer(name) in pointers or program.calls):
            scope[f"meta_{label}"] = expected
            body.append(f"if {label}.stride() != {expected.strides}: {label} = with_strides({label}, meta_{label})")
    for number, call in enumerate(program.calls):
        names[call.result] = f"c{number}"
        body += _library_call(call, number, names, scope)
        if call.result in region.conversions:
            scope[f"convert{number}"] = region.conversions[call.result].run
            (source,) = call.args
            body[-1] = f"c{number} = convert{number}({_python(source, names)})"
        # A converted input is large, and only this call has read it.
        read = [value.buffer for value in call.args if isinstance(value, Ref)]
        body += [f"{names[buffer]} = None" for buffer in read if buffer in region.conversions]
        expected = Meta.of_buffer(program.buffer(call.result))
        if program.buffer(call.result) in pointers and call.result not in region.conversions:
            scope[f"meta_c{number}"] = expected
            body.append(
                f"if c{number}.stride() != {expected.strides}: c{number} = with_strides(c{number}, meta_c{number})"
            )
    plain = not body  # nothing but memory and the launch is left
    given = list[str]()
    for number, (name, meta) in enumerate(zip(program.outputs, region.outputs, strict=True)):
        if number in region.written:
            names[name] = arguments[region.written[number]]
            continue
        given.append(name)
        names[name] = f"o{number}"
        scope[f"dtype{number}"] = meta.dtype
        body.append(f"o{number} = empty({meta.shape}, {meta.strides}, dtype{number})")
        nbytes = program.buffer(name).nbytes
        if device.type == "cpu" and nbytes >= LEAST_BYTES:
            plain = False
            scope["prefer_large"] = prefer_large
            body.append(f"prefer_large(o{number}.data_ptr(), {nbytes})")
    offsets, total = _workspace([buffer for buffer in pointers if buffer.role is Role.TEMP])
    if total:
        scope["bytes"] = torch.uint8
        body.append(f"workspace = empty(({total},), (1,), bytes)")
        body.append("base = workspace.data_ptr()")
    passed: list[str] = []
    places: list[tuple[int, int, int]] = []
    there: list[str] = []  # addresses that are 0 only of a tensor without memory
    for buffer in pointers:
        if buffer.role is Role.TEMP:
            places.append((2, 0, offsets[buffer.name]))
            passed.append(f"base + {offsets[buffer.name]}" if offsets[buffer.name] else "base")
        elif buffer.role is Role.INPUT or names[buffer.name] in targets:
            places.append((0, arguments.index(names[buffer.name]), 0) if plain else (0, 0, 0))
            body.append(f"p{len(passed)} = {names[buffer.name]}.data_ptr()")
            passed.append(f"p{len(passed)}")
            there += [passed[-1]] if buffer.nbytes else []
        else:
            places.append((1, given.index(buffer.name), 0) if plain else (0, 0, 0))
            passed.append(f"{names[buffer.name]}.data_ptr()")
    if plain:
        results = (meta for number, meta in enumerate(region.outputs) if number not in region.written)
        outputs = tuple((meta.shape, meta.strides, meta.dtype) for meta in results)
        workspace = ((total,), (1,), torch.uint8) if total else None
        single = len(outputs) == 1
        written = tuple(region.written.values())
        scope["launch"] = Launch(len(arguments), outputs, single, workspace, tuple(places), entry.numbers, written)
    body.append("call = entry")
    if entry.numbers is not None:
        scope["size_numbers"] = entry.numbers
        body.append("numbers = size_numbers")
        passed.append("numbers")
    from_outside = [
        text for text, buffer in zip(passed, pointers, strict=False)
        if buffer.role is Role.INPUT or names.get(buffer.name) in targets
    ]  # fmt: skip
    if there:
        body.append(f"if not ({' and '.join(there)}): return without_memory(region, ({', '.join(arguments)},))")
    if from_outside:
        body.append(f"if ({' | '.join(from_outside)}) & {_VECTOR - 1}:")
        if targets:
            body.append(f"    {plainly}")
        else:
            body.append("    other = region.unaligned_entry()")
            body.append(f"    if other is None: {plainly}")
            body.append("    call = other.call")
            if entry.numbers is not None:
                body.append("    numbers = other.numbers")
    stream = "None"
    if region.generated.source.target is Target.CUDA:
        stream = "stream(index)"
        scope |= {"stream": torch._C._cuda_getCurrentRawStream, "index": device.index}
    body.append(f"status = call({', '.join([*passed, stream])})")
    body.append(f"if status: return failed(region, status, ({', '.join(arguments)},))")
    if targets:
        scope["written"] = _increment_version
        body.append(f"written(({', '.join(targets)},))")
    body.append(f"return {', '.join(names[name] for name in given)}")
    if region.generated.source.target is Target.CUDA:
        scope |= {"current_device": torch._C._cuda_getDevice, "on_device": torch.cuda.device}
        again = f"    with on_device(index): return run({', '.join(arguments)})"
        body = ["if current_device() != index:", again, *body]
    lines = [f"def run({', '.join(arguments)}):", *(f"    {line}" for line in body)]
    return "\n".join(lines) + "\n", scope


def _library_call(call: LibraryCall, number: int, names: dict[str, str], scope: dict[str, Any]) -> list[str]:
    target: Any = torch.ops
    for part in call.target.split("."):
        target = getattr(target, part)
    scope[f"library{number}"] = shorter(target)
    arguments = [_python(value, names) for value in call.args]
    arguments += [f"{key}={_python(value, names)}" for key, value in call.kwargs]
    item = "" if call.item is None else f"[{call.item}]"
    return [f"c{number} = library{number}({', '.join(arguments)}){item}"]


def _python(value: object, names: dict[str, str]) -> str:
    if isinstance(value, Ref):
        return names[value.buffer]
    if isinstance(value, tuple):
        return "(" + "".join(_python(item, names) + ", " for item in value) + ")"
    return repr(value)


def _workspace(temporaries: Sequence[Buffer]) -> tuple[dict[str, int], int]:
    """Where each temporary lies in one allocation, and its size, in bytes."""
    offsets, total = {}, 0
    for buffer in temporaries:
        offsets[buffer.name] = total
        total += -(-prod(buffer.shape) * buffer.dtype.nbytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, total


def _copying(run: Callable[..., Result], written: Mapping[int, int]) -> Callable[..., Result]:
    """`run`, whose results by these numbers are copied to the arguments by those, and given no more."""

    def copied(*arguments: torch.Tensor) -> Result:
        results = run(*arguments)
        for number, argument in written.items():
            arguments[argument].copy_(results[number])
        given = tuple(result for number, result in enumerate(results) if number not in written)
        return given if len(given) > 1 else given[0]

    return copied


def _in_tuple(function: Callable[..., Any], *arguments: Any) -> tuple[Any]:
    return (function(*arguments),)


def _without_memory(region: FusedRegion, arguments: tuple[torch.Tensor, ...]) -> Result:
    """What the original makes of `arguments`, of which one that kernels read has no address: its operators know zeros that were never written.

    Raises:
        RuntimeError: the memory of one was released, as by ``tensor.untyped_storage().resize_(0)``; reading it would end the process.
    """
    for number, argument in enumerate(arguments):
        if has_elements_nowhere(argument):
            raise RuntimeError(
                f"{region.name}: argument {number}, {argument.dtype}{list(argument.shape)}, has elements but no memory: its "
                "storage was resized to nothing"
            )
    return region.original(*arguments)


def _failed(region: FusedRegion, status: int, arguments: tuple[torch.Tensor, ...]) -> Result:
    """What the original makes of `arguments`, for which the library gave a `status` other than 0.

    On a CPU that says that an index is out of range, and the original raises; on a GPU it is an error of CUDA's. One of
    them is no fault: other processes, or a limit set from outside, leave too little of the device for blocks that wait
    for each other.
    """
    if region.generated.source.target is not Target.CUDA:
        return region.original(*arguments)
    if status == _TOO_LARGE:
        if not region.written:  # else what stands for the original is a region, which tries and counts for itself
            region.fallbacks.count(region.name, "blocks that share a row do not fit the device all at once")
        return region.original(*arguments)
    raise RuntimeError(
        f"{region.name}: launching its kernels failed with CUDA error {status}. "
        "An earlier asynchronous error may be the cause: rerun with CUDA_LAUNCH_BLOCKING=1."
    )
