"""Nodes of AOTAutograd's joint trace for plain operators, without the proxies that PyTorch's tracer passes them through.

Of an operator on tensors of the graph that writes nothing and has no decomposition, `make_fx` needs a node and its description. The rest of what it does
is for symbols, constants and subclasses, which keep its own way.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor

from fusepass.capture.threads import replaced, unreplaced

_NEEDED = ("proxy_call", "extract_val", "_ProxyTensor")
"""Of PyTorch's tracer; a version that has no such traces in its own way."""
_SIMPLE = (int, float, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
_OTHERWISE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


@contextmanager
def traced_quickly() -> Iterator[None]:
    """While open, ``make_fx`` of this thread adds plain operators to its graph in the short way."""
    if not all(hasattr(proxy_tensor, name) for name in _NEEDED):
        yield
        return
    asked = unreplaced(proxy_tensor, "proxy_call")

    def proxy_call(mode: Any, func: Any, pre_dispatch: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if pre_dispatch or type(func) is not OpOverload or not _is_plain(func) or func in _taken_apart(mode):
            return asked(mode, func, pre_dispatch, args, kwargs)
        tracer = mode.tracer
        try:
            node_args = tuple([_argument(each, tracer) for each in args])
            node_kwargs = {name: _argument(each, tracer) for name, each in kwargs.items()}
        except TypeError:
            return asked(mode, func, pre_dispatch, args, kwargs)
        result = func(*args, **kwargs)
        parts = result if isinstance(result, tuple | list) else (result,)
        if not all(part is None or (type(part) is FakeTensor and part not in tracer.tensor_tracker) for part in parts):
            return asked(mode, func, pre_dispatch, args, kwargs)
        name = tracer.graph._target_to_str(func.overloadpacket.__name__)
        node = tracer.create_node("call_function", func, node_args, node_kwargs, name)
        node.meta["val"] = proxy_tensor.extract_val(result)
        if parts is not result:
            _track(tracer, result, node)
            return result
        for number, part in enumerate(parts):
            if part is not None:
                place = tracer.create_node("call_function", operator.getitem, (node, number), {})
                place.meta["val"] = node.meta["val"][number]
                _track(tracer, part, place)
        return result

    with replaced(proxy_tensor, "proxy_call", proxy_call):
        yield


def _argument(value: Any, tracer: Any) -> Any:
    """What stands for an argument in a graph; raises TypeError for one that a node's description does not tell all of."""
    if type(value) is FakeTensor:
        found = tracer.tensor_tracker.get(value)
        if found is None or found.constant is not None or value._has_symbolic_sizes_strides:
            raise TypeError
        return found.proxy.node
    if value is None or type(value) in _SIMPLE:
        return value
    if type(value) in (list, tuple):
        return type(value)([_argument(each, tracer) for each in value])
    raise TypeError


def _track(tracer: Any, tensor: torch.Tensor, node: fx.Node) -> None:
    tracer.tensor_tracker[tensor] = proxy_tensor._ProxyTensor(tracer.proxy(node), None)


def _taken_apart(mode: Any) -> Any:
    """The decompositions in force: of a mode, in PyTorch 2.11 of the process."""
    found = getattr(mode, "decomposition_table", None)
    return vars(proxy_tensor)["CURRENT_DECOMPOSITION_TABLE"] if found is None else found


@functools.cache
def _is_plain(func: OpOverload) -> bool:
    """Whether an operator writes nothing, is not taken apart, and gives tensors whose sizes its arguments tell."""
    return (
        func.namespace in ("aten", "prims")
        and func is not torch.ops.aten.lift_fresh.default
        and not any(tag in func.tags for tag in _OTHERWISE)
        and not any(each.alias_info is not None and each.alias_info.is_write for each in func._schema.arguments)
        and not torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), torch._C.DispatchKey.CompositeImplicitAutograd
        )
    )
