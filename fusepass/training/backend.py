"""The torch.compile backend: fuses the graphs that Dynamo and AOTAutograd make, forward and backward."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._functorch import config as functorch
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._guards import TracingContext
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fusepass.autotune.generation import prepare
from fusepass.background import Job
from fusepass.capture.functional import LOST_WRITE, WRONG_SHAPE, forgets_gaps, keeps_dimensions, may_write
from fusepass.capture.isolation import whole_operators
from fusepass.capture.known_shapes import known_shapes
from fusepass.capture.threads import tracing_apart
from fusepass.codegen.forms import Forms
from fusepass.codegen.lowering.modes import without_modes
from fusepass.compile.grouped import group_queries
from fusepass.compile.pipeline import CompiledGraph, compile_graph
from fusepass.config import current, override
from fusepass.garbage import collector_paused
from fusepass.patterns.simplify import Application
from fusepass.progress import shown
from fusepass.runtime.fallbacks import FallbackCounter
from fusepass.runtime.memory import untraceable
from fusepass.supported import check_versions
from fusepass.training.aot import with_gradients
from fusepass.training.attention import with_attention
from fusepass.training.calls import AsTraced, Backward, Call, PerShape, Run, Unfused, without_views
from fusepass.training.constant_parts import ConstantParts, constant_parts
from fusepass.training.draws import with_draws
from fusepass.training.gradients import DECOMPOSITIONS
from fusepass.training.joint import partition_joint
from fusepass.training.later import Later
from fusepass.training.masks import with_choices
from fusepass.training.replayed import replayed
from fusepass.training.replayed_steps import replayed_backward, replayed_forward
from fusepass.training.steps import Step
from fusepass.training.traced_nodes import traced_quickly

Observer = Callable[[CompiledGraph], None]


def fusepass_backend(
    graph: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str = "default",
) -> Callable[..., Any]:
    """What ``torch.compile(model, backend="fusepass", options=...)`` calls for each graph that Dynamo finds.

    Args:
        graph: the graph, as Dynamo traced it.
        example_inputs: fake tensors and, where shapes are dynamic, symbolic numbers.
        options: options of `fusepass.config.Config`, by name.
        mode: as Inductor's: ``"reduce-overhead"`` stands for the option ``cuda_graphs=True``, ``"max-autotune"`` for ``tune="max"``
            besides, ``"max-autotune-no-cudagraphs"`` for ``tune="max"`` and ``cuda_graphs=False``.

    Raises:
        TypeError: an option is unknown.
        ValueError: an option is out of range, or there is no such mode.
    """
    check_versions()
    if mode not in _MODES:
        raise ValueError(f"mode is {mode!r}; allowed is one of {', '.join(_MODES)}")
    return Backend(_named(graph), {**_MODES[mode], **(options or {})})(graph, example_inputs)


def _named(graph: fx.GraphModule) -> str:
    """What warnings call a graph of Dynamo's: it names the line of the user's program that the graph begins with."""
    for node in graph.graph.nodes:
        frames = re.findall(r'File "(.+)", line (\d+), in (.+)', node.meta.get("stack_trace") or "")
        if frames:
            file, line, function = frames[-1]
            return f"graph of {function} ({Path(file).name}:{line})"
    return "graph"


_MODES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "reduce-overhead": {"cuda_graphs": True},
    "max-autotune": {"tune": "max", "cuda_graphs": True},
    "max-autotune-no-cudagraphs": {"tune": "max", "cuda_graphs": False},
}


class Backend:
    """A backend with its own options, name and observer.

    Args:
        name: what reports call the graphs.
        options: options of `fusepass.config.Config`, by name.
        fallbacks: counts calls that run as the original operators.
        observe: is called with each compiled graph.
        observe_backward: is called with those of backward in its place; by default all go to `observe`.
        observe_step: is called with what says how each graph's forward and backward are replayed.

    Attributes:
        jobs: graphs that are compiled beside the program, and such as failed.
    """

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any],
        *,
        fallbacks: FallbackCounter | None = None,
        observe: Observer = lambda compiled: None,
        observe_backward: Observer | None = None,
        observe_step: Callable[[Step], None] = lambda step: None,
    ) -> None:
        self._name = name
        self._options = dict(options)
        self._fallbacks = fallbacks or FallbackCounter()
        self._observe = observe
        self._observe_backward = observe_backward or observe
        self._observe_step = observe_step
        self.jobs: list[Job] = []

    def __call__(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        # A wrong option is to be told now, not in a compiler callback.
        fakes = (value for value in example_inputs if isinstance(value, torch.Tensor))
        reason = next((reason for fake in fakes if (reason := untraceable(fake)) is not None), None)
        if reason is not None:
            return self._plain(graph, reason)
        with (
            override(**self._options),
            collector_paused(),
            known_shapes(),
            tracing_apart(),
            traced_quickly(),
            whole_operators(example_inputs),
            # What may raise, as solvers do, is kept in order by a token, else an argument that is None where the graph says that it is a tensor.
            functorch.patch(unlift_effect_tokens=True),
        ):
            prepare(sum(node.op.startswith("call_") for node in graph.graph.nodes))
            given, applied = with_attention(with_choices(graph))  # the partitioner adds to these
            visible = sys.maxsize
            graphs = current().cuda_graphs
            step = None if graphs is False else Step(self._name, asked=graphs is True)

            def cut(*args: Any, num_fwd_outputs: int, **kwargs: Any) -> Any:
                nonlocal visible
                visible = num_fwd_outputs
                return partition_joint(*args, num_fwd_outputs=num_fwd_outputs, applied=applied, **kwargs)

            try:
                compiled = partial(
                    with_gradients,
                    inputs=example_inputs,
                    fw_compiler=lambda forward, inputs: self._compile_forward(forward, inputs, applied, visible, step),
                    inference_compiler=partial(
                        self._compile_forward, applied=applied, visible=sys.maxsize, inference=True
                    ),
                    bw_compiler=partial(self._compile, step=step, backward=True),
                    partition_fn=cut,
                    decompositions=DECOMPOSITIONS,
                    keep_inference_input_mutations=True,
                )
                return with_draws(given, compiled)
            except _Mistraced as mistraced:
                return self._plain(graph, str(mistraced))
            except TensorifyScalarRestartAnalysis:  # it would take a float64 number in a tensor for a constant
                if not (any(map(may_write, graph.graph.nodes)) and any(map(_is_number, graph.graph.nodes))):
                    raise  # Dynamo then takes the numbers of Python's that changed nothing, such as a layer's momentum, for constants
                return self._plain(graph, "PyTorch's tracing loses writes to a float64 tensor of no dimensions")

    def _plain(self, graph: fx.GraphModule, reason: str) -> Callable[..., Any]:
        """`graph` as Dynamo traced it, for what AOTAutograd loses of it."""

        def run(*arguments: Any) -> Any:
            self._fallbacks.count(self._name, reason)
            return graph(*arguments)

        return run

    def _compile_forward(
        self,
        graph: fx.GraphModule,
        example_inputs: Sequence[Any],
        applied: Sequence[Application],
        visible: int,
        step: Step | None = None,
        inference: bool = False,
    ) -> Callable[..., Any]:
        """A graph of forward, in which rules have been `applied`, of whose results so many are not for backward alone, which is replayed as
        a part of `step`; where no gradients follow, it is `inference`.

        Raises:
            _Mistraced: it is not what forward does.
        """
        if forgets_gaps(graph.graph):
            raise _Mistraced(LOST_WRITE)
        if keeps_dimensions(graph.graph):
            raise _Mistraced(WRONG_SHAPE)
        if step is not None:
            self._observe_step(step)
        call = self._compile(graph, example_inputs, applied, step, visible=visible, inference=inference)
        return without_views(call, visible)

    def _compile(
        self,
        graph: fx.GraphModule,
        example_inputs: Sequence[Any],
        applied: Sequence[Application] = (),
        step: Step | None = None,
        *,
        backward: bool = False,
        visible: int = sys.maxsize,
        inference: bool = False,
    ) -> Callable[..., Any]:
        """Forward, backward and inference graphs alike; AOTAutograd may ask for the backward one much later."""
        context = TracingContext.try_get()
        if context is not None and context.fw_metadata is not None:
            context.fw_metadata.bw_donated_idxs = []  # what forward saved is not overwritten: it serves any number of times
        unbacked = next(filter(_is_unbacked, graph.graph.nodes), None) if _is_symbolic(graph) else None
        with override(**self._options) as config:  # backward is compiled when the caller's are no longer in force
            limit, graphs = config.max_signatures, config.cuda_graphs if inference else False
            if _is_symbolic(graph) and group_queries(graph.graph):
                graph.recompile()
        metadata = None if context is None or backward else context.fw_metadata
        static = frozenset[int]() if metadata is None else frozenset(metadata.static_input_indices)

        def of_the_model(given: Sequence[int]) -> list[int]:
            """Which of the graph's arguments in these places are parameters or buffers."""
            return [number for number, place in enumerate(given) if place in static]

        def specialise(graph: fx.GraphModule, forms: Forms | None, given: Sequence[int]) -> CompiledGraph:
            """Compile a graph of constant shapes, which takes the tensors in these places of the graph's arguments."""
            parameters = of_the_model(given) if inference else ()
            return self.specialise(graph, forms, applied, parameters=parameters, backward=backward, visible=visible)

        def calls(compiled: CompiledGraph, given: Sequence[int], results: Sequence[int]) -> Run:
            """Those of the graph for one set of sizes, which takes and gives the tensors of the graph in these places."""
            if step is None:
                return Run(compiled)
            if backward:
                return replayed_backward(compiled, step)
            return replayed_forward(compiled, step, of_the_model(given), sum(place < visible for place in results))

        count, unfused = len(example_inputs), Unfused(graph, partial(self._fallbacks.count, self._name))

        def later(make: Callable[[], Call], what: str = "") -> Call:
            """What `make` gives; beside the program, if that is asked for, whose calls run the operators meanwhile."""
            if config.compile != "background":
                return make()
            name = f"{self._name}{' (backward)' if backward else ''}{what}"
            return Later(name, unfused, make, self.jobs)

        fuse = partial(self.specialise, applied=applied, emptying=False)
        if unbacked is not None:
            plain = make_boxed_func(self._plain(graph, _reason(unbacked)))
            parts = {} if backward else constant_parts(graph.graph, alone=True)
            return later(lambda: AsTraced(graph, ConstantParts(graph, parts, fuse), unfused, plain)) if parts else plain
        per_shape = PerShape(graph, specialise, limit, unfused, calls, later, guarded=not backward)
        if _is_symbolic(graph):
            parts = constant_parts(graph.graph) if inference else {}
            if not parts:
                return per_shape
            return later(lambda: AsTraced(graph, ConstantParts(graph, parts, fuse), unfused, per_shape))

        def whole() -> Call:
            compiled = specialise(graph, None, range(count))
            if graphs:
                return AsTraced(graph, replayed(compiled, static, self._name, asked=graphs is True), unfused, per_shape)
            (output,) = graph.graph.find_nodes(op="output")
            run = calls(compiled, range(count), range(len(output.args[0])))
            return (Backward if backward else AsTraced)(graph, run, unfused, per_shape)

        return later(whole)

    def specialise(
        self,
        graph: fx.GraphModule,
        forms: Forms | None = None,
        applied: Sequence[Application] = (),
        *,
        parameters: Collection[int] = (),
        backward: bool = False,
        visible: int = sys.maxsize,
        emptying: bool = True,
    ) -> CompiledGraph:
        """Compile a graph of constant shapes; `forms` has the libraries for other shapes of it, rules have been `applied` to it, and so many of
        its results are `visible` to others than backward; the placeholders in the positions of `parameters` are that, or buffers. Its call takes a
        list, `emptying` it."""
        # AOTAutograd calls under its fake tensor mode, in which no number can be read, a constant's neither.
        with override(**self._options), without_modes(), shown(f"{self._name}{' (backward)' if backward else ''}"):
            compiled = compile_graph(
                graph,
                name=self._name,
                fallbacks=self._fallbacks,
                forms=forms,
                exact_inputs=True,
                applied=applied,
                emptying=emptying,
                visible=visible,
                parameters=parameters,
            )
        (self._observe_backward if backward else self._observe)(compiled)
        return compiled


class _Mistraced(Exception):
    """AOTAutograd's graph is not what Dynamo traced; says why."""


def _is_number(node: fx.Node) -> bool:
    """Whether a value, as Dynamo traced it, is a float64 tensor of no dimensions that stands for no number of Python's."""
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor) or value.dim() or value.dtype is not torch.float64:
        return False
    return node.op != "placeholder" or any(user.target != "item" for user in node.users)


def _is_unbacked(node: fx.Node) -> bool:
    """Whether a size or number depends on data: no arguments say what it will be."""
    return bool(node.meta.get("unbacked_bindings") or _HOST & {node.target} or _depends_on_data(node.meta.get("val")))


def _reason(node: fx.Node) -> str:
    """Why a graph is not fused in which `node` is the first that gives a size or number that depends on data."""
    if node.op == "placeholder":
        return "the graph before it gives it sizes or numbers that depend on the values of tensors"
    return (
        f"what {node.target} gives has a size, or is a number, that depends on the values of tensors; without "
        "torch._dynamo.config.capture_dynamic_output_shape_ops and capture_scalar_outputs the graph ends there, and the rest is fused"
    )


_HOST = frozenset({torch.ops.aten._local_scalar_dense.default})


def _depends_on_data(value: Any) -> bool:
    return (
        bool(free_unbacked_symbols(value)) if isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat) else False
    )


def _is_symbolic(graph: fx.GraphModule) -> bool:
    values = (node.meta.get("val") for node in graph.graph.nodes)
    return any(
        isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
        or (isinstance(value, torch.Tensor) and value._has_symbolic_sizes_strides)
        for value in values
    )
