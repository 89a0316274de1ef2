"""A fused region at run time: allocate, call the library's anchor, launch the generated kernels."""

from __future__ import annotations

import ctypes
import functools
import threading
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from fusepass.codegen import build
from fusepass.codegen.ir.program import Program
from fusepass.codegen.ir.updates import written_over
from fusepass.codegen.source import Source, Target
from fusepass.errors import BuildError
from fusepass.runtime.call_text import CallText, call_text
from fusepass.runtime.fallbacks import FallbackCounter
from fusepass.runtime.fast_path import launcher
from fusepass.runtime.memory import has_elements_nowhere
from fusepass.runtime.meta import Meta, as_seen, with_strides

_TOO_LARGE = 720  # cudaErrorCooperativeLaunchTooLarge
Result = torch.Tensor | tuple[torch.Tensor, ...]


class Code(Protocol):
    """A program with its source, as `fusepass.codegen.generate.Generated` is; of one that was built elsewhere no more than this is known."""

    @property
    def outline(self) -> Program: ...
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
        self.call = build.load(library, source.entry, 1 if source.of_list else buffers + general)
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
        program = generated.outline
        self.name = self.__name__ = name  # the latter for graphs that call it
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

    def __call__(self, *inputs: torch.Tensor) -> Result:
        return self.run(*inputs)

    @property
    def identity(self) -> str:
        """Text that two regions share only if they compute the same of what the program takes."""
        source, outline = self.generated.source, self.generated.outline
        calls = [(call.result, call.target, call.args, call.kwargs, call.item) for call in outline.calls]
        return f"{source.text}{source.numbers}{outline.buffers}{outline.inputs}{outline.outputs}{calls}"

    @property
    def run(self) -> Callable[..., Result]:
        """The call as a function."""
        run: Callable[..., Result] = self._scope["run"]
        return run

    @functools.cached_property
    def _text(self) -> CallText:
        conversions = {name: conversion.run for name, conversion in self.conversions.items()}
        return call_text(
            self.generated.outline, self.generated.source.target, self.device, self.inputs, self.outputs, self.used,
            self.exact, self.written, conversions, self._entry.numbers, self.generated.source.of_list,
        )  # fmt: skip

    @functools.cached_property
    def _scope(self) -> dict[str, Any]:
        """What `run` refers to, and `run`: made when it is first asked for, as not every region that is loaded is called."""
        scope: dict[str, Any] = {
            **self._text.scope, "name": self.name, "entry": self._entry.call, "region": self, "failed": _failed, "without_memory": _without_memory,
        }  # fmt: skip
        exec(compile(self._text.source, f"<fusepass {self.name}>", "exec"), scope)
        scope["run"].__name__ = scope["run"].__qualname__ = self.name
        return scope

    def _changed(self, **changes: Any) -> FusedRegion:
        """This region but for these arguments of the constructor."""
        same: dict[str, Any] = {
            "name": self.name, "generated": self.generated, "library": self.library, "inputs": self.inputs, "used": self.used,
            "device": self.device, "original": self.original, "fallbacks": self.fallbacks, "conversions": self.conversions,
            "exact": self.exact, "outputs": self.outputs, "written": self.written,
            "unaligned": self._unaligned_library,
        }  # fmt: skip
        return type(self)(**same | changes)

    def needs_layout(self, position: int) -> bool:
        """Whether a call depends on the strides of an argument."""
        program = self.generated.outline
        named = (name for name, place in zip(program.inputs, self.used, strict=True) if place == position)
        return any(program.calls or program.buffer(name) in program.arguments for name in named)

    def exactly(self, positions: Collection[int]) -> FusedRegion:
        """This region for who gives these arguments as they are told in each call, so that it compares no strides of them."""
        known = [
            number
            for number in positions
            if number not in self.exact and lies_as_told(self.generated.outline, self.used, number, self.inputs[number])
        ]
        return self._changed(exact={*self.exact, *known}) if known else self

    def reads_memory(self, position: int) -> bool:
        """Whether kernels alone read an argument, as memory that lies as told; to the library it is a tensor."""
        program = self.generated.outline
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

        return self._changed(inputs=inputs, original=run, exact={*self.exact, *other}, outputs=outputs)

    @property
    def may_write(self) -> dict[int, int]:
        """Which of the outputs may be written over which of the arguments, by their numbers."""
        program = self.generated.outline
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
        return self._changed(original=_copying(self.run, written), written=written)

    def stay(self) -> None:
        """To be called when this region is what serves calls from now on: launches that come again and again are replayed."""
        source = self.generated.source
        if source.replay is not None:
            self._scope["entry"] = build.load(self.library, source.replay, len(self.generated.outline.arguments))

    @property
    def entry(self) -> Callable[..., int]:
        """The library's function: takes pointers, numbers unless there are none, and the stream."""
        return self._entry.call

    def with_entry(self, entry: Callable[..., int]) -> Callable[..., Result]:
        """What does as the call, with `entry` in place of the library's function."""
        scope = {**self._scope, "entry": entry}
        exec(compile(self._text.source, f"<fusepass {self.name}>", "exec"), scope)
        run: Callable[..., Result] = scope["run"]
        return run

    def launcher(self, *, always_tuple: bool = False) -> Callable[..., Any]:
        """What does as `run` without Python, where that can be; `always_tuple` for one tensor, too."""
        scope, launch = self._scope, self._text.launch
        alone = always_tuple and len(self.outputs) - len(self.written) == 1
        if launch is None:
            return functools.partial(_in_tuple, self.run) if alone else self.run
        plain: Callable[..., Any] = scope["launch"]
        failed: Callable[..., Any] = functools.partial(_failed, self)
        if alone:
            plain, failed = functools.partial(_in_tuple, plain), functools.partial(_in_tuple, failed)
        launch = replace(launch, single=launch.single and not always_tuple)
        made = launcher(launch, self.name, scope["entry"], self.device, scope["empty"], plain, failed, self.library)
        if self.run is scope["launch"]:
            return made
        run: Any = self.run
        names = {**scope, "launch": made}
        names["run"] = types.FunctionType(run.__code__, names, run.__name__, run.__defaults__)
        return names["run"]  # type: ignore[no-any-return]

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
                    self._unaligned = Entry(library, source, len(self.generated.outline.arguments))
                except BuildError as error:
                    self.fallbacks.count(self.name, f"no kernel for unaligned inputs: {error.args[0]}", toolchain=True)
            return self._unaligned


def lies_as_told(program: Program, used: Sequence[int], position: int, told: Meta) -> bool:
    """Whether an argument like `told` lies as `program` reads it; `used`: for each of its inputs, the position among the arguments."""
    named = [name for name, place in zip(program.inputs, used, strict=True) if place == position]
    return all(program.buffer(name).strides == told.strides for name in named)


def _copying(run: Callable[..., Result], written: Mapping[int, int]) -> Callable[..., Result]:
    """`run`, whose results by these numbers are copied to the arguments by those, and given no more."""

    def copied(*arguments: torch.Tensor) -> Result:
        results = run(*arguments)
        for number, argument in written.items():
            arguments[argument].copy_(results[number])
        given = tuple(result for number, result in enumerate(results) if number not in written)
        return given[0] if len(given) == 1 else given

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
    """What the original makes of `arguments`, behind which results of library calls may stand, for which the library gave a `status` other than 0.

    On a CPU that says that an index is out of range, and the original raises; on a GPU it is an error of CUDA's. One of
    them is no fault: other processes, or a limit set from outside, leave too little of the device for blocks that wait
    for each other.
    """
    arguments = arguments[: len(region.inputs)]
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
