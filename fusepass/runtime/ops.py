"""Every fused region as a registered operator, so that torch.compile, torch.export and dispatch modes see one."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fusepass.runtime.meta import Meta
from fusepass.runtime.region import FusedRegion

NAMESPACE = "fusepass"


@dataclass(frozen=True)
class Operators:
    """A region's own operators.

    Attributes:
        graph: takes the region's inputs, gives a tuple of its outputs.
        constants: by the positions of its inputs, those that are numbers fixed at capture.
        inputs: how it takes the others; the fused call may get their memory in other shapes.
        outputs: how its results lie.
    """

    graph: fx.GraphModule
    constants: Mapping[int, torch.Tensor]
    inputs: Sequence[Meta]
    outputs: Sequence[Meta]


_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_regions: dict[str, FusedRegion] = {}
_operators: dict[str, Callable[[], Operators]] = {}
_lock = threading.Lock()


def register(region: FusedRegion, operators: Callable[[], Operators]) -> Any:
    """The operator ``torch.ops.fusepass.<name>_<digest>`` of a region: regions that compute the same on the same kind of arguments share one.

    Args:
        region: what it computes.
        operators: gives the region's own operators.
    """
    digest = hashlib.sha256(f"{region.identity}{region.inputs}{region.outputs}{region.device}".encode()).hexdigest()[:8]
    name = f"{region.name}_{digest}"
    return register_as(name, region, operators)


def register_as(name: str, region: FusedRegion, operators: Callable[[], Operators]) -> Any:
    """The operator ``torch.ops.fusepass.<name>``, which is `region` from now on."""
    with _lock:
        if name not in _regions:
            _define(name, region)
        # The newest region serves: it holds the live fallback counter and library.
        _regions[name], _operators[name] = region, operators
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def called(graph: fx.Graph) -> dict[str, tuple[FusedRegion, Operators]]:
    """The regions whose operators `graph` calls, by the operators' names, and each region's own operators."""
    targets = {node.target for node in graph.nodes if node.op == "call_function"}
    names = [
        target._opname
        for target in targets
        if isinstance(target, torch._ops.OpOverload) and target.namespace == NAMESPACE
    ]
    return {name: (_regions[name], _operators[name]()) for name in sorted(names) if name in _regions}


def schema(name: str, region: FusedRegion) -> str:
    """That of the operator `name`, which is `region`. Its tag is `needs_exact_strides`: kernels read memory by those they were generated for."""
    arguments = ", ".join(f"Tensor a{number}" for number in range(len(region.inputs)))
    results = ", ".join(["Tensor"] * len(region.outputs))
    return f"{name}({arguments}) -> {f'({results})' if len(region.outputs) > 1 else results}"


def _define(name: str, region: FusedRegion) -> None:
    many = len(region.outputs) > 1
    _library.define(schema(name, region), tags=(torch.Tag.needs_exact_strides,))

    def run(*inputs: torch.Tensor) -> Any:
        return _regions[name].checked(*inputs)

    def meta(*inputs: torch.Tensor) -> Any:
        made = tuple(
            torch.empty_strided(each.shape, each.strides, dtype=each.dtype, device="meta")
            for each in _regions[name].outputs
        )
        return made if many else made[0]

    _library.impl(name, run, "CompositeExplicitAutograd")
    # Fake tensors are served by it as well. `register_fake` would look for this line in every module there is.
    _library.impl(name, meta, "Meta")
