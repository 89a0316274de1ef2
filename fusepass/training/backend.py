"""The torch.compile backend: fuses the graphs that Dynamo and AOTAutograd make, forward and backward."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fusepass.capture.functional import LOST_WRITE, WRONG_SHAPE, forgets_gaps, keeps_dimensions, may_write
from fusepass.capture.isolation import whole_resampling
from fusepass.capture.threads import made_concrete, tracing_apart
from fusepass.codegen.forms import Forms
from fusepass.codegen.lowering.modes import without_modes
from fusepass.compile.pipeline import CompiledGraph, compile_graph
from fusepass.config import override
from fusepass.patterns.simplify import Application
from fusepass.runtime.fallbacks import FallbackCounter
from fusepass.runtime.memory import untraceable, unusual_kind
from fusepass.structure import Template
from fusepass.supported import check_versions
from fusepass.training.attention import with_attention
from fusepass.training.draws import with_draws
from fusepass.training.gradients import DECOMPOSITIONS
from fusepass.training.joint import partition_joint
from fusepass.training.replayed import replayed

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
        mode: as Inductor's: ``"max-autotune"`` stands for the options ``tune="max"`` and ``cuda_graphs=True``,
            ``"max-autotune-no-cudagraphs"`` and ``"reduce-overhead"`` for one of them.

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
    "max-autotune-no-cudagraphs": {"tune": "max"},
}


class Backend:
    """A backend with its own options, name and observer.

    Args:
        name: what reports call the graphs.
        options: options of `fusepass.config.Config`, by name.
        fallbacks: counts calls that run as the original operators.
        observe: is called with each compiled graph.
        observe_backward: is called with those of backward in its place; by default all go to `observe`.
    """

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any],
        *,
        fallbacks: FallbackCounter | None = None,
        observe: Observer = lambda compiled: None,
        observe_backward: Observer | None = None,
    ) -> None:
        self._name = name
        self._options = dict(options)
        self._fallbacks = fallbacks or FallbackCounter()
        self._observe = observe
        self._observe_backward = observe_backward or observe

    def __call__(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        # A wrong option is to be told now, not in a compiler callback.
        fakes = (value for value in example_inputs if isinstance(value, torch.Tensor))
        reason = next((reason for fake in fakes if (reason := untraceable(fake)) is not None), None)
        if reason is not None:
            return self._plain(graph, reason)
        with override(**self._options), tracing_apart(), whole_resampling(example_inputs):
            given, applied = with_attention(graph)
            try:
                compiler = aot_autograd(
                    fw_compiler=partial(self._compile_forward, applied=applied),
                    inference_compiler=partial(self._compile_forward, applied=applied, inference=True),
                    bw_compiler=partial(self._compile, backward=True),
                    partition_fn=partition_joint,
                    decompositions=DECOMPOSITIONS,
                    keep_inference_input_mutations=True,
                )
                return with_draws(given, lambda whole: compiler(whole, example_inputs))
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
        inference: bool = False,
    ) -> Callable[..., Any]:
        """A graph of forward, in which rules have been `applied`; where no gradients follow, it is `inference`.

        Raises:
            _Mistraced: it is not what forward does.
        """
        if forgets_gaps(graph.graph):
            raise _Mistraced(LOST_WRITE)
        if keeps_dimensions(graph.graph):
            raise _Mistraced(WRONG_SHAPE)
        return _without_views(self._compile(graph, example_inputs, applied, inference=inference))

    def _compile(
        self,
        graph: fx.GraphModule,
        example_inputs: Sequence[Any],
        applied: Sequence[Application] = (),
        *,
        backward: bool = False,
        inference: bool = False,
    ) -> Callable[..., Any]:
        """Forward, backward and inference graphs alike; AOTAutograd may ask for the backward one much later."""
        context = TracingContext.try_get()
        if context is not None and context.fw_metadata is not None:
            context.fw_metadata.bw_donated_idxs = []  # what forward saved is not overwritten: it serves any number of times
        unbacked = next(filter(_is_unbacked, graph.graph.nodes), None) if _is_symbolic(graph) else None
        if unbacked is not None:
            return make_boxed_func(self._plain(graph, _reason(unbacked)))
        specialise = partial(self.specialise, applied=applied, backward=backward)
        with override(**self._options) as config:  # backward is compiled when the caller's are no longer in force
            limit, replays = config.max_signatures, config.cuda_graphs is True and inference
        static = context.fw_metadata.static_input_indices if replays and context and context.fw_metadata else ()
        unfused = _Unfused(graph, partial(self._fallbacks.count, self._name))
        per_shape = _PerShape(graph, specialise, limit, unfused)
        if _is_symbolic(graph):
            return per_shape
        replay = partial(replayed, static=static, name=self._name) if replays else None
        return _AsTraced(graph, specialise, per_shape, replay)

    def specialise(
        self,
        graph: fx.GraphModule,
        forms: Forms | None = None,
        applied: Sequence[Application] = (),
        *,
        backward: bool = False,
    ) -> CompiledGraph:
        """Compile a graph of constant shapes; `forms` has the libraries for other shapes of it, and rules have been `applied` to it."""
        # AOTAutograd calls under its fake tensor mode, in which no number can be read, a constant's neither.
        with override(**self._options), without_modes():
            compiled = compile_graph(
                graph, name=self._name, fallbacks=self._fallbacks, forms=forms, applied=applied, emptying=True
            )
        (self._observe_backward if backward else self._observe)(compiled)
        return compiled


def _without_views(call: Callable[..., Any]) -> Callable[..., Any]:
    """A boxed `call`, of whose results those that are not for backward alone are no views to autograd, which forbids writes to one of several
    that is.

    A rule may leave away a copy of a view, or see a library's result in another shape.
    """
    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    count = sys.maxsize if metadata is None else metadata.num_forward_returns

    def run(arguments: list[Any]) -> Any:
        results = call(arguments)
        return [*map(_alone, results[:count]), *results[count:]]

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _alone(result: Any) -> Any:
    """A tensor in the same memory that is no view."""
    if not isinstance(result, torch.Tensor) or not result._is_view():
        return result
    memory, offset = result.untyped_storage(), result.storage_offset()
    return result.new_empty(0).set_(memory, offset, result.shape, result.stride())


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


class _AsTraced:
    """A graph of constant shapes, for arguments of the types that it was traced with; boxed, as `_PerShape` is: a call empties the list that it takes.

    A backward graph is traced with what PyTorch's fake kernels say that forward saves. Where that has other types (statistics
    of normalisations on a CPU), `per_shape` serves, which looks at the arguments themselves.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        specialise: Callable[[fx.GraphModule], CompiledGraph],
        per_shape: _PerShape,
        replay: Callable[[CompiledGraph], Callable[[list[Any]], Any]] | None = None,
    ) -> None:
        self._boxed_call = True  # to AOTAutograd
        self._unfused = per_shape.unfused
        self._dtypes = [_dtype(node.meta.get("val")) for node in graph.graph.find_nodes(op="placeholder")]
        self._per_shape = per_shape
        compiled = specialise(graph)
        self._run: Callable[[list[Any]], Any] = compiled.call if replay is None else replay(compiled)
        self._compared = False

    def __call__(self, arguments: list[Any]) -> Any:
        if not self._compared:  # what calls the graph gives the same types each time
            if self._unfused.serves(arguments, self._unfused.known):
                self._run = self._unfused
            elif [_dtype(argument) for argument in arguments] != self._dtypes:
                self._run = self._per_shape
            self._compared = True
        if self._unfused.gradients and self._unfused.serves(arguments, self._unfused.gradients):
            return self._unfused(arguments)
        return self._run(arguments)


def _dtype(value: Any) -> torch.dtype | None:
    return value.dtype if isinstance(value, torch.Tensor) else None


class _Unfused:
    """A graph as it was traced, boxed: for arguments with which no kernel can be called.

    Dynamo compares the dispatch keys of inputs, but not of the gradients that backward gets, which may be of any kind.

    Attributes:
        count: is told why a call runs as the original operators.
        known: the arguments that are of the same kind in each call.
        gradients: the others, as only a backward graph has them; else None.
    """

    def __init__(self, graph: fx.GraphModule, count: Callable[[str], None]) -> None:
        self._boxed_call = True
        self._graph, self.count = graph, count
        nodes = graph.graph.find_nodes(op="placeholder")
        first = next((i for i, node in enumerate(nodes) if str(node.target).startswith("tangents")), None)
        self.known, self.gradients = slice(first), None if first is None else slice(first, None)
        self._taken_for_plain = [_taken_for_plain(node.meta.get("val")) for node in nodes]

    def serves(self, arguments: Sequence[Any], some: slice = slice(None)) -> bool:
        """Whether one of these `arguments` is not the plain tensor that tracing took it for, which is counted."""
        plain = compress(arguments[some], self._taken_for_plain[some])
        reason = next((reason for argument in plain if (reason := unusual_kind(argument)) is not None), None)
        if reason is None:
            return False
        self.count(reason)
        return True

    def __call__(self, arguments: list[Any]) -> Any:
        values = tuple(arguments)
        arguments.clear()
        return self._graph(*values)


def _taken_for_plain(value: Any) -> bool:
    """Whether tracing took the argument of this description for plain memory; it knows some others, which regions leave out."""
    strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return strided and not (value.is_neg() or value.is_conj() or value.is_quantized or value.device.type == "meta")


class _PerShape:
    """A graph with symbolic shapes, made anew for each set of concrete ones, up to `limit` of them; others run its operators."""

    def __init__(
        self,
        graph: fx.GraphModule,
        specialise: Callable[[fx.GraphModule, Forms], CompiledGraph],
        limit: int,
        unfused: _Unfused,
    ) -> None:
        self._boxed_call = True
        self.unfused = unfused
        self._graph = graph
        self._specialise = specialise
        self._limit = limit
        self._forms = Forms()
        self._made: dict[object, Callable[[list[Any]], Any]] = {}
        self._lock = threading.Lock()

    def __call__(self, arguments: list[Any]) -> Any:
        if self.unfused.serves(arguments):
            return self.unfused(arguments)
        signature = tuple(map(_shape_key, arguments))
        made = self._made.get(signature) or self._new(signature, arguments)
        if made is not None:
            return made(arguments)
        self.unfused.count(f"called with more than {self._limit} sets of sizes; the option max_signatures allows more")
        return self.unfused(arguments)

    def _new(self, signature: object, arguments: Sequence[Any]) -> Callable[[list[Any]], Any] | None:
        """What serves calls with `arguments` from now on; None where it would be one too many. One thread makes one at a time."""
        with self._lock:
            if signature not in self._made and len(self._made) < self._limit:
                self._made[signature] = self._concrete(arguments)
            return self._made.get(signature)

    def _concrete(self, arguments: Sequence[Any]) -> Callable[[list[Any]], Any]:
        """The graph for the shapes and numbers of `arguments`."""
        tensors, inputs = Template.of(tuple(arguments))
        form: list[Template] = []

        def flat(*values: torch.Tensor) -> list[torch.Tensor]:
            results, template = Template.of(self._graph(*inputs.fill(values)))
            form.append(template)
            return results

        mode = FakeTensorMode()
        with mode:
            fakes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in tensors]
        with torch.no_grad(), mode:
            graph = made_concrete(self._graph, flat, fakes, DECOMPOSITIONS)
        call, holes, outputs = self._specialise(graph, self._forms).call, inputs.holes, form[-1]

        def run(values: list[Any]) -> Any:
            used = [values[hole] for hole in holes]
            values.clear()
            return outputs.fill(call(used))

        return run


def _shape_key(argument: Any) -> object:
    if isinstance(argument, torch.Tensor):
        return tuple(argument.shape), argument.stride(), argument.dtype
    return type(argument), argument
