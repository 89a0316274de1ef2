"""Small modules and functions as regions: captured, lowered, run by the reference interpreter, held against PyTorch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._functorch.aot_autograd import aot_export_module
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map

from fusepass.codegen.ir.anchor_format import AnchorFormat
from fusepass.codegen.ir.expr import Builder
from fusepass.codegen.ir.program import Buffer, LibraryCall, Program, Ref, Role
from fusepass.codegen.ir.verify import verify
from fusepass.codegen.lowering.lower import lower
from fusepass.codegen.lowering.tensor import TORCH
from fusepass.codegen.lowering.tracer import Spec
from fusepass.codegen.passes.pipeline import PassOptions, run_passes
from fusepass.codegen.passes.rematerialisation import Rematerialise
from fusepass.codegen.passes.split import SplitPolicy
from fusepass.patterns.deciding import note_rounded
from fusepass.patterns.effects import writes
from tests.support.interpret import Array, interpret

_TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

NO_SPLIT = PassOptions(SplitPolicy(workers=1, least_piece=1, lanes=1), longest_cached_row=8192)
"""Passes as for rows that are many and short."""

TINY = PassOptions(SplitPolicy(workers=64, least_piece=4, lanes=2), longest_cached_row=4)
"""Thresholds so low that small shapes are split and made online."""


TILES = replace(NO_SPLIT, separate_from=1)
"""Passes for a device whose kernels exchange tiles."""


def computing_again(options: PassOptions, again: Rematerialise) -> PassOptions:
    """Passes that ask `again` whether convolutions and windows are computed twice."""
    assert options.anchors is not None
    return replace(options, anchors=replace(options.anchors, again=again))


@dataclass(frozen=True)
class Region:
    """A lowered region with what it was lowered from.

    Attributes:
        program: as `lower` made it.
        builder: interned its expressions.
        graph: the captured ATen graph.
        arguments: what the graph's placeholders stand for: parameters and buffers, then the inputs.
    """

    program: Program
    builder: Builder
    graph: torch.fx.GraphModule
    arguments: tuple[torch.Tensor, ...]

    def passed(self, options: PassOptions = NO_SPLIT) -> Program:
        """The program after all passes, verified after each."""
        return run_passes(self.program, self.builder, options, check=True)

    def eager(self) -> tuple[torch.Tensor, ...]:
        """What PyTorch's operators give."""
        return tuple(self.graph(*self.arguments))

    def exact(self) -> tuple[torch.Tensor, ...]:
        """What PyTorch's operators give in float64, rounded once to the results' types."""
        wide = [a.double() if a.is_floating_point() else a for a in self.arguments]
        return tuple(r.to(e.dtype) for r, e in zip(self.graph(*wide), self.eager(), strict=True))

    def run(self, program: Program | None = None) -> tuple[torch.Tensor, ...]:
        """What the interpreter makes of `program` (by default the region's own)."""
        program = program or self.program
        memory = self.memory(program)
        results = interpret(program, memory)
        return tuple(tensor_of(results[name], program.buffer(name)) for name in program.outputs)

    def memory(self, program: Program) -> dict[str, Array]:
        """The memory of every input, and of every library call's result."""
        memory = {name: memory_of(tensor) for name, tensor in zip(program.inputs, self.arguments, strict=True)}
        for call in program.calls:
            memory[call.result] = memory_of(called(program, call, memory))
        return memory

    def check(self, program: Program | None = None, *, exact: bool = True, tolerance: float | None = None) -> None:
        """Assert that `program` gives PyTorch's values, types and strides, NaN and infinities where it has them."""
        eager = self.eager()
        wanted = self.exact() if exact else eager
        (traced,) = self.graph.graph.find_nodes(op="output")
        fakes = [node.meta["val"] for node in traced.args[0]]
        for number, (got, want, like, fake) in enumerate(zip(self.run(program), wanted, eager, fakes, strict=True)):
            where = f"output {number}"
            assert got.dtype is like.dtype, where
            assert got.shape == like.shape, where
            assert _strides(got) == _strides(fake), where
            bound = tolerance or _TOLERANCE.get(got.dtype, 0.0)
            torch.testing.assert_close(
                got, want, rtol=bound, atol=bound, equal_nan=True, msg=lambda text, at=where: f"{at}: {text}"
            )


def trace(model: Callable[..., Any], *inputs: torch.Tensor) -> tuple[torch.fx.GraphModule, tuple[torch.Tensor, ...]]:
    """The ATen graph of `model`, composite operators whole, and what its placeholders stand for.

    A module is made functional by AOTAutograd; a function is recorded as it is, which takes a fifth of the time, unless an operator writes.
    """
    shim = _Shim(model)
    with torch.no_grad():
        if not isinstance(model, nn.Module):
            graph = make_fx(shim.forward, tracing_mode="fake")(*inputs)
            if not any(writes(node.target) for node in graph.graph.nodes):
                return graph, inputs
        graph, signature = aot_export_module(shim, inputs, trace_joint=False, decompositions={})
    for check in graph.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default):
        graph.graph.erase_node(check)  # as partitioning does
    state = {**dict(shim.named_parameters()), **dict(shim.named_buffers())}
    names = [*signature.inputs_to_parameters.values(), *signature.inputs_to_buffers.values()]
    return graph, (*(state[name].detach() for name in names), *inputs)


def region(
    model: Callable[..., Any],
    *inputs: torch.Tensor,
    anchor_format: AnchorFormat = AnchorFormat.CALLER,
    cuda: bool = False,
) -> Region:
    """Capture and lower a module or function, as for a GPU if `cuda`; the program is verified."""
    graph, arguments = trace(model, *inputs)
    if cuda:
        _move_to_cuda(graph.graph)
    note_rounded(graph.graph)  # as partitioning does
    names = [node.name for node in graph.graph.find_nodes(op="placeholder")]
    program, builder = lower(graph, "region", names, anchor_format=anchor_format)
    verify(program)
    return Region(program, builder, graph, arguments)


def operator_region(
    target: OpOverload, *args: Any, results: int | None = None, cuda: bool = False, **kwargs: Any
) -> Region:
    """A region of one call of `target`, spelled exactly so, that gives the first `results` of its results (all)."""
    graph = torch.fx.Graph()
    tensors: list[torch.Tensor] = []

    def argument(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        tensors.append(value)
        return _node(graph.placeholder(f"x{len(tensors)}"), value)

    node_args, node_kwargs = tree_map(argument, (args, kwargs))
    result = target(*args, **kwargs)
    call = _node(graph.call_function(target, node_args, node_kwargs), result)
    if isinstance(result, torch.Tensor):
        graph.output((_without_overlap(graph, call, result),))
    else:
        parts = [
            (graph.call_function(operator.getitem, (call, n)), part)
            for n, part in enumerate(result)
            if part is not None
        ]
        graph.output(tuple(_node(node, part) for node, part in parts[:results]))
    if cuda:
        _move_to_cuda(graph)
    module = torch.fx.GraphModule({}, graph)
    program, builder = lower(module, "region", [f"x{n + 1}" for n in range(len(tensors))])
    verify(program)
    return Region(program, builder, module, tuple(tensors))


def _move_to_cuda(graph: torch.fx.Graph) -> None:
    """Let lowering find inputs on a GPU."""
    for node in graph.find_nodes(op="placeholder"):
        node.meta["val"] = Spec.of(node.meta["val"], torch.device("cuda"))


def _without_overlap(graph: torch.fx.Graph, call: torch.fx.Node, result: torch.Tensor) -> torch.fx.Node:
    if all(step or n == 1 for n, step in zip(result.shape, result.stride(), strict=True)):
        return call
    layout = {"memory_format": torch.contiguous_format}
    return _node(graph.call_function(torch.ops.aten.clone.default, (call,), layout), result.contiguous())


def _node(node: torch.fx.Node, value: Any) -> torch.fx.Node:
    node.meta["val"] = value
    return node


class Functional(nn.Module):
    """A function that writes to its arguments or to what it made, as a module, so that tracing removes the writes."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs)


class _Shim(nn.Module):
    def __init__(self, model: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = self.model(*inputs)
        return tuple(result) if isinstance(result, tuple | list) else (result,)


def memory_of(tensor: torch.Tensor) -> Array:
    """The elements from the first to the last that `tensor` addresses, as the interpreter wants them."""
    if tensor.numel() == 0:
        extent = 0
    else:
        extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.detach().as_strided((extent,), (1,)).clone()
    return flat.view(torch.int16).numpy().view(np.uint16) if flat.dtype is torch.bfloat16 else flat.numpy()


def tensor_of(memory: Array, buffer: Buffer) -> torch.Tensor:
    """The tensor that lies in `memory`."""
    if memory.dtype == np.uint16:
        flat = torch.from_numpy(memory.view(np.int16)).view(torch.bfloat16)
    else:
        flat = torch.from_numpy(memory)
    return flat.as_strided(buffer.shape, buffer.strides)


def called(program: Program, call: LibraryCall, memory: Mapping[str, Array]) -> torch.Tensor:
    def value(argument: object) -> Any:
        if isinstance(argument, Ref):
            return tensor_of(memory[argument.buffer], program.buffer(argument.buffer))
        return [value(item) for item in argument] if isinstance(argument, tuple) else argument

    target: Any = reduce(getattr, call.target.split("."), torch.ops)
    buffer = program.buffer(call.result)
    assert buffer.role is Role.ANCHOR
    result = target(*map(value, call.args), **{name: value(item) for name, item in call.kwargs})
    result = result if call.item is None else result[call.item]
    laid_out = torch.empty_strided(buffer.shape, buffer.strides, dtype=TORCH[buffer.dtype])
    return laid_out.copy_(result)


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides, without those that address nothing."""
    return tuple(s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1 and tensor.numel())
