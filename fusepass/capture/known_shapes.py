"""Fake tensors that operators gave before for such arguments, in a fifth of the time that PyTorch takes to look into its own cache.

Capture for training runs each operator some four times on fake tensors: in Dynamo, twice in AOTAutograd, and in passes. PyTorch remembers what came
of it, but first asks for all that an argument may be: symbolic, sparse, a constant. Of one that is none of these, a few properties tell
all. An operator is remembered if its schema says that it writes nothing, and if it gives new tensors or views of its first argument.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._ops import OpOverload

from fusepass.capture.threads import replaced, unreplaced

_Make = Callable[[Any, Sequence[Any]], Any]

_LOOK_UP, _RUN = "_cached_dispatch_impl", "_dispatch_impl"
"""PyTorch's methods that look an operator up, or run it, and that run it. Where a version has no such, its own cache has to do."""

_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
_DEPENDS_ON_DATA = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_UNKNOWN: Any = object()
_MOST = 1 << 16
_known: dict[Any, _Make | None] = {}  # as PyTorch's own cache, for the whole process
_here = threading.local()


@contextmanager
def known_shapes() -> Iterator[None]:
    """While open, operators that this thread runs on fake tensors give what they gave before for arguments of the same look."""
    if getattr(_here, "open", False):
        yield
        return
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # takes seconds

    if not all(hasattr(FakeTensorMode, name) for name in (_LOOK_UP, _RUN)):
        yield
        return
    asked = unreplaced(FakeTensorMode, _LOOK_UP)

    def look(value: Any, mode: Any) -> Any:
        """All of an argument that an operator's shapes may follow from; raises TypeError for one that is not as simple as that."""
        kind = type(value)
        if kind is FakeTensor:
            if value.fake_mode is not mode or not _is_plain(value):
                raise TypeError
            return (
                value.shape,
                value.stride(),
                value.dtype,
                value.fake_device,
                value.storage_offset(),
                value.requires_grad,
            )
        if kind in _PLAIN:
            return kind, value  # 1 equals 1.0
        if kind is list or kind is tuple:
            return kind, *[look(each, mode) for each in value]
        raise TypeError

    def dispatch(mode: Any, func: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if type(func) is not OpOverload or not _may_be_known(func):
            return asked(mode, func, types, args, kwargs)
        shapes = mode.shape_env
        try:
            key = (
                shapes and shapes.settings, func, torch.get_default_dtype(), torch._C._get_default_device(), torch.is_inference_mode_enabled(),
                *[look(each, mode) for each in args], *[(name, look(each, mode)) for name, each in kwargs.items()],
            )  # fmt: skip
            make = _known.get(key, _UNKNOWN)
        except TypeError:
            return asked(mode, func, types, args, kwargs)
        if make is None:
            return asked(mode, func, types, args, kwargs)
        if make is not _UNKNOWN:
            return make(mode, args)
        result = getattr(mode, _RUN)(func, types, args, kwargs)
        if len(_known) >= _MOST:
            _known.clear()
        _known[key] = _maker(func, args, result, FakeTensor)
        return result

    _here.open = True
    try:
        with replaced(FakeTensorMode, _LOOK_UP, dispatch):
            yield
    finally:
        _here.open = False


@functools.cache
def _may_be_known(func: OpOverload) -> bool:
    """Whether shapes of results follow from what arguments look like, and nothing is written."""
    return (
        func.namespace in ("aten", "prims")
        and not any(tag in func.tags for tag in _DEPENDS_ON_DATA)
        and not any(each.alias_info is not None and each.alias_info.is_write for each in func._schema.arguments)
    )


def _is_plain(tensor: Any) -> bool:
    """Whether a fake tensor is nothing but sizes, strides, a type and a device."""
    return (
        tensor.constant is None
        and not tensor._has_symbolic_sizes_strides
        and tensor.layout is torch.strided
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference())
    )


def _maker(func: OpOverload, args: Sequence[Any], result: Any, fake: Any) -> _Make | None:
    """What gives another `result` of the same look; None for one that is more than that."""
    from torch._subclasses.fake_tensor import in_kernel_invocation_manager as in_kernel

    parts = [*result] if isinstance(result, tuple | list) else [result]
    if not all(part is None or (type(part) is fake and _is_plain(part) and not part.requires_grad) for part in parts):
        return None
    memory = [each.untyped_storage()._cdata for each in args if type(each) is fake]
    base = args[0] if func.is_view and args and type(args[0]) is fake else None
    looks: list[Any] = []
    for part in parts:
        if part is None:
            looks.append(None)
            continue
        place, offset = part.untyped_storage()._cdata, part.storage_offset()
        look = part.shape, part.stride(), part.dtype, part.fake_device
        if base is not None and part is not base and place == memory[0] and part.dtype is base.dtype:
            looks.append((*look, offset))
        elif offset or place in memory:
            return None
        else:
            memory.append(place)
            looks.append((*look, None))

    def one(mode: Any, args: Sequence[Any], look: Any) -> Any:
        if look is None:
            return None
        shape, strides, dtype, device, offset = look
        if offset is not None:
            with in_kernel(mode):
                return fake(mode, torch.as_strided(args[0], shape, strides, offset), device)
        with torch._C._DisableTorchDispatch():
            return fake(mode, torch.empty_strided(shape, strides, dtype=dtype, device="meta"), device)

    if isinstance(result, tuple | list):
        kind = list if isinstance(result, list) else tuple
        return lambda mode, args: kind([one(mode, args, look) for look in looks])
    (only,) = looks
    return lambda mode, args: one(mode, args, only)
