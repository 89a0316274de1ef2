"""Steps of training as a GPU would run them, without one: graphs are cut, divided and lowered for it, and what came of regions is interpreted.

Operators that are in no region run on this CPU, and so do those of some regions, as where trials find them faster: values that forward and
backward compare may then come from either.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from functorch.compile import aot_function
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import make_boxed_func
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils import _pytree as pytree

from fusepass.autotune import candidates, schedules
from fusepass.autotune.work import Work
from fusepass.codegen.detect import taken_for
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.forms import Forms
from fusepass.codegen.lowering import activations
from fusepass.codegen.lowering.modes import without_modes
from fusepass.codegen.lowering.tracer import Spec
from fusepass.codegen.search import space
from fusepass.compile import pipeline
from fusepass.compile.boundary_views import Edges
from fusepass.compile.corrections import correct
from fusepass.compile.grouped import group_queries
from fusepass.compile.splice import splice
from fusepass.config import override
from fusepass.patterns.partition import partition
from fusepass.patterns.simplify import simplify
from fusepass.training.gradients import DECOMPOSITIONS, ON_A_GPU
from fusepass.training.joint import minimum_cut
from tests.support.interpret import interpret
from tests.support.regions import called, memory_of, tensor_of

_TRIED = 0.03
"""Share of the graphs whose regions have all candidates that may be tried."""

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def trained_on_a_gpu(model: nn.Module, chance: random.Random, facts: DeviceFacts | None = None) -> Callable[..., Any]:
    """What stands for `model`, on a CPU, in steps of training as the device of `facts`, by default an H200, would run them.

    A region is one of its candidates, or its own operators, as `chance` has it.
    """

    def compiled(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        with without_modes():  # AOTAutograd's, in which no number can be read
            here = _Here(_fused(graph, chance, facts or DeviceFacts.h200()))
        return make_boxed_func(lambda *given: tuple(here.run(*given)))

    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    traced: dict[Any, Callable[..., Any]] = {}

    def trace() -> Callable[..., Any]:
        return aot_function(
            lambda held, *inputs: torch.func.functional_call(model, held, inputs),
            fw_compiler=compiled,
            bw_compiler=compiled,
            partition_fn=minimum_cut,
            decompositions=DECOMPOSITIONS | ON_A_GPU,
            num_params_buffers=len(state),
            keep_inference_input_mutations=True,
        )

    def call(*inputs: Any) -> Any:
        given = [each for each in inputs if isinstance(each, Tensor)]
        kinds = [(each.requires_grad, each.shape, each.stride(), each.dtype) for each in given]
        key = (*kinds, torch.is_grad_enabled(), model.training)
        if key not in traced:
            traced[key] = trace()
        results = traced[key](state, *inputs)
        flat = isinstance(results, list) and all(isinstance(each, Tensor) for each in results)
        return tuple(results) if flat else results  # AOTAutograd gives a tuple of tensors as a list

    return call


def _fused(graph: fx.GraphModule, chance: random.Random, facts: DeviceFacts) -> fx.GraphModule:
    """`graph` with calls in the place of its regions, as `compile_graph` does it."""
    owner = _LazyGraphModule(graph, graph.graph)
    _move(owner.graph)
    correct(owner.graph)
    group_queries(owner.graph)
    simplify(owner)
    regions = partition(owner).regions
    tried = chance.random() < _TRIED
    with (
        taken_for(facts),
        override(tune="max" if tried else "off"),
        contextlib.nullcontext() if tried else _without_text(),
        mock.patch.object(candidates, "recall", return_value=None),
        mock.patch.object(schedules, "times_are_taken", return_value=True),
        mock.patch.object(space, "rounds_to_tf32", return_value=False),  # nor do operators that run here
        mock.patch.object(pipeline, "updates_of", return_value={}),  # writes stay where they are
        mock.patch.object(activations, "FLOAT32_SIXTH", 1 / 6),  # of float64, which a CPU divides by six
    ):
        works, _ = pipeline.generated(owner, regions, Forms(), exact=True)
    ways = {work.region.name: Edges(tuple(work.arguments), work.region.outputs) for work in works}
    return splice(owner, regions, ways, {work.region.name: _call(work, chance) for work in works})


@contextlib.contextmanager
def _without_text() -> Iterator[None]:
    """While open, sizes that differ are no reason to look at sources: rendering them takes as long as the passes."""
    with (
        mock.patch.object(Forms, "shared", lambda forms, generated: generated),
        mock.patch.object(candidates, "reuse"),
    ):
        yield


def _move(graph: fx.Graph) -> None:
    """Say of everything that it lies on a GPU, but of numbers that are fixed at capture."""
    for node in graph.nodes:
        if node.op == "call_function":
            node.kwargs = pytree.tree_map_only(torch.device, lambda device: CUDA, node.kwargs)
        if "val" in node.meta and node.op != "get_attr" and "lift_fresh" not in str(node.target):
            node.meta["val"] = pytree.tree_map_only(Tensor, lambda value: Spec.of(value, CUDA), node.meta["val"])


class _Here(fx.Interpreter):
    """Runs a graph of a GPU on this CPU."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_function(target, args, pytree.tree_map_only(torch.device, lambda device: CPU, kwargs))


def _call(work: Work, chance: random.Random) -> Callable[..., Any]:
    """A way in which the region may run; its own operators are the only one of what is beyond the IR."""
    first = work.like or work
    made = [*first.candidates, None]
    candidate = chance.choice(made) if len(made) > 2 or chance.random() < 0.3 else made[0]
    if candidate is None:
        values = {node: place for place, node in enumerate(work.arguments)}
        owner = _Here(work.graph)

        def original(*given: Tensor) -> Any:
            results = owner.run(*(given[values[n]] if n in values else work.constants[n] for n in work.region.inputs))
            return results if len(results) > 1 else results[0]

        return original
    program = candidate.generated.program
    names = [node.name for node in first.arguments]
    described = dict(zip(names, (node.meta["val"] for node in first.arguments), strict=True))

    def interpreted(*given: Tensor) -> Any:
        tensors = dict(zip(names, given, strict=True))
        memory = {name: memory_of(_as_told(tensors[name], described[name])) for name in program.inputs}
        for library in program.calls:
            memory[library.result] = memory_of(called(program, library, memory))
        found = interpret(program, memory)
        results = tuple(tensor_of(found[name], program.buffer(name)) for name in program.outputs)
        return results if len(results) > 1 else results[0]

    return interpreted


def _as_told(tensor: Tensor, told: Tensor) -> Tensor:
    """`tensor` with the strides that it is described with: some operators have others on a CPU."""
    if tensor.stride() == told.stride():
        return tensor
    return torch.empty_strided(told.shape, told.stride(), dtype=tensor.dtype).copy_(tensor)
