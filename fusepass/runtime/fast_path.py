"""The usual call without Python: a small library that all models share and that is built once, behind the first kernels.

Between two calls of a small model other code takes the processor's caches, and then each Python object and each piece
of the interpreter that a call touches costs more than what it does. The library compares what `fusepass.dispatch.signature`
compares and launches what `fusepass.runtime.region` launches, in the common case alone: whatever is unusual is left to Python.
So is everything until it is there, and where it cannot be built.
"""

from __future__ import annotations

import atexit
import contextvars
import ctypes
import sysconfig
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fusepass import background
from fusepass.codegen import build, cache, cache_entry, toolchain
from fusepass.codegen.key import cache_key
from fusepass.codegen.source import Source, Target
from fusepass.errors import BuildError
from fusepass.structure import PLAIN, Template, is_record

_SMALL_RESULTS = 1 << 16
"""Bytes of results that a region's launcher makes several of before they are asked for."""

_SMALL_WORKSPACE = 1 << 20
"""Bytes of a workspace that stays from call to call."""

MISSED: Any = object()
"""What stands for the result of a call that needs more than a look at the signature."""

_ENTRY = "fp_calls"
_TEXT = f"""// {sysconfig.get_config_var("SOABI")}
#include "fp_calls.hpp"

extern "C" PyObject* {_ENTRY}(PyObject* missed, PyObject* data_ptr, PyObject* profiler)
{{
    return fp::types(missed, data_ptr, profiler);
}}
"""
_SOURCE = Source(
    "calls",
    _ENTRY,
    Target.CPU,
    _TEXT,
    (
        "fp_calls.hpp",
        "fp_recording.hpp",
        "fp_call.hpp",
        "fp_form.hpp",
        "fp_code.hpp",
        "fp_launcher.hpp",
        "fp_store.hpp",
        "fp_objects.hpp",
    ),
    "native",
)


@dataclass(frozen=True)
class Types:
    """The library's types; `templates/include` says what they take and do."""

    launcher: Callable[..., Any]
    call: Callable[..., Any]
    door: Callable[..., Any]
    code: Callable[..., Any]
    recording: Callable[..., Any]


_types: Types | None = None
_given_up = False
_building: threading.Thread | None = None
_lock = threading.Lock()


def begin() -> None:
    """Load the library; where it must be built, start that beside what else is done. `types` has it some time later. Nothing where no compiler
    is to run (`fusepass.codegen.build.given`)."""
    global _building, _given_up
    if build.is_given():
        return
    with _lock:
        if _types is not None or _given_up or _building is not None:
            return
        try:
            library = cache.lookup(cache_key(_SOURCE))
            if library is None:
                toolchain.identity(_SOURCE.target)
        except (BuildError, OSError):  # no compiler: a later call may find one
            return
        if library is not None:
            _load(library)
            return
        import torch.utils.cpp_extension  # noqa: F401, as for every build: in one thread

        context = contextvars.copy_context()
        thread = _building = threading.Thread(target=context.run, args=(_build,), daemon=True)
        background.start_thread(thread)
    atexit.register(_end, thread)


def _end(thread: threading.Thread) -> None:
    """Wait for the library, or its compiler would go on alone and leave its files behind; not where jobs beside the program are dropped, too."""
    background.stop()
    thread.join()


def _build() -> None:
    global _building, _given_up
    try:
        _load(build.build(_SOURCE))
    except (BuildError, OSError, background.Stopped):
        _given_up = True
    _building = None


def _load(library: Path) -> None:
    global _types, _given_up
    try:
        with cache_entry.opened(library) as path:
            entry = getattr(ctypes.PyDLL(path), _ENTRY)
    except (OSError, AttributeError):
        _given_up = True
        return
    entry.argtypes, entry.restype = (ctypes.py_object,) * 3, ctypes.py_object
    _types = Types(*entry(MISSED, torch.Tensor.data_ptr, vars(torch.autograd.profiler)))


def types() -> Types | None:
    """The library; None while it is not there."""
    return _types


def awaited() -> bool:
    """Whether the library is being built."""
    return _building is not None


def wait() -> None:
    """Until the library is there, or cannot be built."""
    begin()
    building = _building
    if building is not None:
        building.join()


@dataclass(frozen=True)
class _Hole:
    """Where an argument has a tensor.

    Attributes:
        number: of the tensor, among those of the call.
    """

    number: int


@dataclass(frozen=True)
class Form:
    """How the tensors of a call are found in its arguments.

    Attributes:
        tensors: how many there are.
        taken: what the library takes: their number where they are the positional arguments; else that number and a node for
            positional and keyword arguments. A node is a pair: None and the number of a tensor, `...` and a value that must
            be equal, `NotImplemented` and the type of a value that is not looked at, a tuple's or list's type and nodes, `dict` or
            a dataclass and keys and nodes.
    """

    tensors: int
    taken: object

    @classmethod
    def of(cls, inputs: Template, *, opaque: bool = False) -> Form | None:
        """That of calls of the form `inputs`; None where comparing them takes Python, if types are not enough (`opaque`)."""
        count = len(inputs.holes)
        args, kwargs = inputs.fill([_Hole(number) for number in range(count)])
        if not kwargs and args == tuple(map(_Hole, range(count))):
            return cls(count, count)
        nodes = _node(args, opaque), _node(kwargs, opaque)
        return None if None in nodes else cls(count, (count, *nodes))


_COMPARED = (*PLAIN[:2], *PLAIN[3:], torch.layout, torch.memory_format, torch.Size)
"""Types of plain values that the library compares: not complex numbers, of which each part has a sign of its own."""


def _node(value: Any, opaque: bool) -> object | None:
    if isinstance(value, _Hole):
        return None, value.number
    if type(value) in (tuple, list) or (isinstance(value, tuple) and pytree.is_namedtuple_instance(value)):
        nodes = tuple(_node(entry, opaque) for entry in value)
        return None if None in nodes else (type(value), nodes)
    if type(value) is dict or is_record(value):
        entries = value if type(value) is dict else vars(value)
        nodes = tuple(_node(entry, opaque) for entry in entries.values())
        return None if None in nodes else (type(value), (tuple(entries), nodes))
    if isinstance(value, _COMPARED):
        return ..., value
    return (NotImplemented, type(value)) if opaque else None


MADE = -1
"""In `Launch.results`, one that the launch allocates."""


@dataclass(frozen=True)
class Launch:
    """How a region is launched where nothing is unusual.

    Attributes:
        inputs: how many tensors it takes.
        outputs: shape, strides and type of each result that it allocates.
        results: of each result the number of the input that it is, or `MADE`.
        single: whether it gives one tensor instead of a tuple.
        workspace: shape, strides and type of the memory for temporaries; None without any.
        places: for each pointer of the entry 0 and the number of an input, 1 and that of an output, or 2 and an offset into
            the workspace, as three numbers.
        numbers: what the entry takes behind the pointers; None for nothing.
        written: numbers of inputs that are written.
    """

    inputs: int
    outputs: tuple[tuple[Any, ...], ...]
    results: tuple[int, ...]
    single: bool
    workspace: tuple[Any, ...] | None
    places: tuple[tuple[int, int, int], ...]
    numbers: int | None
    written: tuple[int, ...] = ()


def launcher(
    launch: Launch,
    name: str,
    entry: object,
    device: torch.device,
    empty: Callable[..., torch.Tensor],
    plain: Callable[..., Any],
    failed: Callable[..., Any],
    library: Path | ctypes.CDLL,
) -> Callable[..., Any]:
    """What does `launch` without Python; `plain`, which does it with Python, where that cannot be.

    Args:
        launch: what to do.
        name: the region's.
        entry: the library's function.
        device: where.
        empty: makes a tensor there.
        plain: is called in whatever is unusual: another device is the current one, inputs are not aligned.
        failed: takes a status other than 0 and the arguments.
        library: where the entry lies, which may be loaded already.
    """
    made = types()
    try:
        address = ctypes.cast(entry, ctypes.c_void_p).value  # type: ignore[arg-type]
    except ctypes.ArgumentError:  # a function of Python
        return plain
    if made is None:
        return plain
    cuda = device.type == "cuda"
    alone = not cuda or torch.cuda.device_count() == 1
    try:
        result: Callable[..., Any] = made.launcher(
            name, "fusepass.generated", plain, failed, empty, launch.outputs, launch.workspace,
            torch._C._cuda_getCurrentRawStream if cuda else None, None if alone else torch._C._cuda_getDevice,
            device.index or 0, address, launch.numbers or 0, launch.single, launch.inputs, launch.places,
            *_runtime(library if cuda else None),
            sum(map(_nbytes, launch.outputs)) <= _SMALL_RESULTS, _nbytes(launch.workspace) <= _SMALL_WORKSPACE,
            torch._C._increment_version, launch.written, launch.results,
        )  # fmt: skip
    except ValueError:  # more buffers than are worth it
        return plain
    return result


def _runtime(library: Path | ctypes.CDLL | None) -> tuple[int, int]:
    """Where `cudaStreamIsCapturing` and `cudaGetLastError` lie in the CUDA that `library` uses; 0 where they cannot be found."""
    if library is None:
        return 0, 0
    try:
        loaded = build.loaded(library)
        functions = loaded.cudaStreamIsCapturing, loaded.cudaGetLastError
    except (OSError, AttributeError):
        return 0, 0
    capturing, forget_error = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)
    return capturing, forget_error


def _nbytes(tensor: tuple[Any, ...] | None) -> int:
    """Of a tensor as `Launch` describes it; 0 for none."""
    if tensor is None:
        return 0
    shape, _, dtype = tensor
    return int(prod(shape) * dtype.itemsize)


def door(hooks: Sequence[Any]) -> Callable[..., Any] | None:
    """What a model asks first: takes positional and keyword arguments and gives the result, or `MISSED`."""
    made = types()
    return None if made is None else made.door(tuple(hooks))
