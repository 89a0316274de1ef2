"""Records the ATen operators that run as an fx graph: a dispatch mode of fifty lines that imports nothing.

torch's own tracer, `make_fx`, loads Dynamo and SymPy, three seconds that a first call would wait for; this needs neither because
every size is a number here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

Decompose = Callable[..., Any]


class Spec(torch.Tensor):
    """What a tensor looks like, without its elements: shape, strides, type and device, for ``meta["val"]`` of a node."""

    @staticmethod
    def of(tensor: torch.Tensor, device: torch.device | None = None) -> Spec:
        """The description of `tensor`, as if it lay on `device`."""
        spec = Spec.described(tensor.shape, tensor.stride(), tensor.dtype, device or tensor.device)
        if tensor.is_conj():  # so that a copy of it, which is not, is told apart
            torch._C._set_conj(spec, True)
        if tensor.is_neg():
            torch._C._set_neg(spec, True)
        return spec

    @staticmethod
    def described(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device) -> Spec:
        """The description of a tensor with these properties."""
        return torch.Tensor._make_wrapper_subclass(Spec, shape, strides, dtype=dtype, device=device)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Spec({self.dtype}, {tuple(self.shape)}, strides {self.stride()}, {self.device})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:  # copying a graph copies what its nodes carry
            return Spec.of(args[0])
        raise TypeError(f"{func} was called on the description of a tensor")


def meta_like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the meta device with the layout of `tensor`, which may be fake or a `Spec`."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _not_for_dynamo(function: Any) -> Any:
    """Mark `function` as one that Dynamo skips, before torch loads Dynamo to mark it so."""
    function.__dict__["__dynamo_disable"] = function
    return function


def results_of(node: fx.Node) -> list[torch.Tensor]:
    """What describes the tensors that `node` gives; a result that was not asked for, such as the gradient of a frozen bias, is not there."""
    value = node.meta.get("val")
    every = value if isinstance(value, tuple | list) else (value,)
    return [each for each in every if isinstance(each, torch.Tensor)]


class Tracer(TorchDispatchMode):
    """While active, adds every operator that runs to `graph`.

    Args:
        decompose: what to run instead of an operator; None to record the operator itself.
        describe: what ``meta["val"]`` of a node says of a result.
    """

    def __init__(
        self,
        decompose: Callable[[OpOverload], Decompose | None] = lambda _: None,
        describe: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = fx.Graph()
        self.constants: dict[str, torch.Tensor] = {}
        self._decompose = decompose
        self._describe = describe
        self._nodes: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def placeholder(self, name: str, tensor: torch.Tensor) -> fx.Node:
        """A graph input that stands for `tensor`."""
        node = self.graph.placeholder(name)
        self.bind(tensor, node)
        return node

    def bind(self, tensor: torch.Tensor, node: fx.Node) -> None:
        """From here on `tensor` is the value of `node`."""
        node.meta["val"] = self._describe(tensor)
        self._nodes[tensor] = node

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        """The node whose value `tensor` is; one that nobody computed under this tracer becomes a constant."""
        node = self._nodes.get(tensor)
        return self.foreign(tensor) if node is None else node

    def foreign(self, tensor: torch.Tensor) -> fx.Node:
        """What stands for a tensor that was made outside."""
        name = f"_tensor_constant{len(self.constants)}"
        self.constants[name] = tensor
        node = self.graph.get_attr(name)
        self.bind(tensor, node)
        return node

    def module(self) -> fx.GraphModule:
        """The graph as a module that holds its constants; few ever read its code, which takes long to make."""
        return _LazyGraphModule(self.constants, self.graph)

    @_not_for_dynamo
    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        decompose = self._decompose(func)
        if decompose is not None:
            with self:
                result = decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return self.run(func, args, kwargs)

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run and record one operator."""
        result = func(*args, **kwargs)
        if func.namespace != "prim":  # prim operators only ask for metadata
            self.record(func, args, kwargs, result)
        return result

    def record(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> fx.Node:
        """Add a call that gave `result`."""
        node_args, node_kwargs = pytree.tree_map_only(torch.Tensor, self.node_of, (args, kwargs))
        name = func._schema.name.split("::")[-1]
        node = self.graph.create_node("call_function", func, node_args, node_kwargs, name)
        if isinstance(result, torch.Tensor):
            self.bind(result, node)
        elif isinstance(result, tuple | list):
            node.meta["val"] = pytree.tree_map_only(torch.Tensor, self._describe, result)
            for number, part in enumerate(result):
                if isinstance(part, torch.Tensor):
                    self.bind(part, self.graph.call_function(operator.getitem, (node, number)))
        return node
