"""What operators outside the vocabulary are made of, remembered for each operator and kind of arguments.

To run a decomposition on the meta device takes PyTorch 10 ms and more, and a network has the same ones over and over: partition asks
for them, and each lowering of each region.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from fusepass.codegen.lowering import registry

_KEPT = 512  # graphs that are remembered

_parts: dict[Hashable, fx.GraphModule] = {}


def call_key(node: fx.Node) -> tuple[Hashable, ...]:
    """The operator of `node` and what its decomposition sees of the arguments: calls that are equal in this are made of the same."""
    seen: dict[fx.Node, int] = {}
    return node.target, _kind(node.args, seen), _kind(tuple(node.kwargs.items()), seen)


def _kind(arg: Any, seen: dict[fx.Node, int]) -> Hashable:
    """What decompositions see of an argument: all of it, but of a tensor no values, though which ones are the same, by numbers in `seen`."""
    if isinstance(arg, fx.Node):
        value = arg.meta["val"]
        return (seen.setdefault(arg, len(seen)), tuple(value.shape), value.stride(), value.dtype, value.device)
    return tuple(_kind(each, seen) for each in arg) if isinstance(arg, tuple | list) else (type(arg), arg)


def parts_of(node: fx.Node) -> fx.GraphModule:
    """What `node`, an operator outside the vocabulary, becomes under PyTorch's decompositions of everything outside the vocabulary: a placeholder
    for each tensor that it reads, and its result. Nobody may change it.
    """
    how = registry.decomposition(node.target) if isinstance(node.target, OpOverload) else None
    key = (registry.size(), how, *call_key(node))
    found = _parts.get(key)
    if found is None:
        found = _parts[key] = _traced(node)
        for oldest in list(_parts)[:-_KEPT]:
            _parts.pop(oldest, None)  # another thread may have been quicker
    return found


def _traced(node: fx.Node) -> fx.GraphModule:
    sources = list(dict.fromkeys(node.all_input_nodes))

    def call(*tensors: torch.Tensor) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), dict(zip(sources, tensors, strict=True)).__getitem__)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    return registry.decomposed(call, [source.meta["val"] for source in sources], [source.name for source in sources])
