"""What AOTAutograd calls: compiled graphs behind a look at their arguments, which are not always what tracing took them for.

All of it is boxed: a call empties the list that it takes, so that each argument is let go of behind its last use. A look takes the host as
long as a few launches, so no call describes its arguments in Python. Forward's are compared by Dynamo before. Those of backward, which come
from forward by way of hooks, and from autograd, are compared with those of an earlier call by PyTorch's guards, all at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, Protocol

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fusepass.capture.threads import made_concrete
from fusepass.codegen.forms import Forms
from fusepass.compile.pipeline import CompiledGraph
from fusepass.runtime.fast_path import types
from fusepass.runtime.memory import unusual_kind
from fusepass.runtime.meta import Meta, with_strides
from fusepass.runtime.operators import reinterpret
from fusepass.structure import Template
from fusepass.training.gradients import DECOMPOSITIONS

Call = Callable[[list[Any]], Any]
_Guards: Any = torch._C._dynamo.guards.TensorGuards
_MOST_RECENT = 4  # sets of sizes that a call is compared with before it is described


def without_views(call: Call, visible: int) -> Call:
    """A boxed `call`, of whose `visible` first results none is a view to autograd, which forbids writes to one of several that is.

    A rule may leave away a copy of a view, or see a library's result in another shape.
    """

    def run(arguments: list[Any]) -> Any:
        results = call(arguments)
        for result in results[:visible]:
            if isinstance(result, torch.Tensor) and result._is_view():
                return [*map(_alone, results[:visible]), *results[visible:]]
        return results

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _alone(result: Any) -> Any:
    """A tensor in the same memory that is no view."""
    if not isinstance(result, torch.Tensor) or not result._is_view():
        return result
    return reinterpret(result, tuple(result.shape), result.stride(), 0)


class Run:
    """A compiled graph's call: with Python, until the library is there that needs none."""

    def __init__(self, compiled: CompiledGraph) -> None:
        self._call: Call = compiled.call
        self._compiled: CompiledGraph | None = compiled

    def best(self) -> tuple[Call, bool]:
        """The call, and whether it stays the best one."""
        if self._compiled is not None and types() is not None:
            self._call, self._compiled = self._compiled.without_python()[0], None
        return self._call, self._compiled is None


class _Like:
    """Whether a call's arguments are as those of an earlier one: tensors of the same kind, type, shape and strides, the same numbers.

    Args:
        arguments: of the earlier call.
        positions: of those to compare.
    """

    def __init__(self, arguments: Sequence[Any], positions: Sequence[int]) -> None:
        tensors = [i for i in positions if isinstance(arguments[i], torch.Tensor)]
        others = [i for i in positions if i not in tensors]
        with (
            torch._C._DisableTorchDispatch()
        ):  # AOTAutograd watches some first calls by a mode, which guards would ask of later ones
            guards = _Guards(*(arguments[i] for i in tensors), dynamic_dims_sizes=None, dynamic_dims_strides=None)
        self._check = guards.check
        self._all = tensors == list(range(len(arguments)))
        self._tensors = _picker(tensors)
        self._others = _picker(others)
        self._numbers = self._others(arguments)
        self._types = tuple(map(type, self._numbers))

    def __call__(self, arguments: Sequence[Any]) -> bool:
        if self._all:
            return self._check(*arguments)  # type: ignore[no-any-return]
        numbers = self._others(arguments)
        return (
            numbers == self._numbers
            and tuple(map(type, numbers)) == self._types
            and self._check(*self._tensors(arguments))
        )


def _picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """What takes these out of a sequence."""
    if len(positions) < 2:
        return lambda values: tuple(values[i] for i in positions)
    return itemgetter(*positions)


class Best(Protocol):
    """What is compiled of a graph."""

    def best(self) -> tuple[Call, bool]:
        """The call, and whether it stays the best one."""


class AsTraced:
    """A graph for arguments as those that it was traced with, which Dynamo sees to: one look, at those of constant shape, is enough.

    Args:
        graph: as it was traced.
        run: what is compiled of it.
        unfused: serves tensors that no kernel can be called with.
        otherwise: serves other shapes, strides and types.
    """

    def __init__(self, graph: fx.GraphModule, run: Best, unfused: Unfused, otherwise: Call) -> None:
        self._boxed_call = True  # to AOTAutograd
        values = [node.meta.get("val") for node in graph.graph.find_nodes(op="placeholder")]
        self._described = [Meta.of(value) if _is_constant(value) else None for value in values]
        self._compiled = run
        self._unfused, self._otherwise = unfused, otherwise
        self._run: Call | None = None

    def __call__(self, arguments: list[Any]) -> Any:
        return self._look(arguments) if self._run is None else self._run(arguments)

    def _look(self, arguments: list[Any]) -> Any:
        """A call before it is known what serves later ones."""
        if self._unfused.serves(arguments):
            self._run = self._unfused
        elif any(map(_is_other, arguments, self._described)):
            self._run = self._otherwise
        else:
            run, stays = self._compiled.best()
            self._run = run if stays else None
            return run(arguments)
        return self._run(arguments)


class Backward(AsTraced):
    """As `AsTraced`, where any call may bring other arguments.

    The graph is traced with what PyTorch's fake kernels say that forward saves. Where that has other types (statistics of normalisations on a
    CPU) or strides, `otherwise` serves, which looks at the arguments themselves. Gradients may be of any kind, and have any strides.
    """

    _like: Callable[[Sequence[Any]], bool] | None = None

    def __call__(self, arguments: list[Any]) -> Any:
        if self._like is not None and self._like(arguments):
            return self._run(arguments)  # type: ignore[misc]
        return self._look(arguments)

    def _look(self, arguments: list[Any]) -> Any:
        if self._unfused.serves(arguments):
            return self._unfused(arguments)
        found = [_described(argument) for argument in arguments]
        if found == self._described:
            self._run, stays = self._compiled.best()
            if stays:
                self._like = _Like(arguments, range(len(arguments)))
            return self._run(arguments)
        saved = self._unfused.saved
        if self._run is None and found[:saved] != self._described[:saved]:
            self._run, self._like = self._otherwise, _any
        if any(map(_differs, found, self._described)) or self._run is self._otherwise:
            return self._otherwise(arguments)
        laid = [
            value if meta is None else with_strides(value, meta)
            for value, meta in zip(arguments, self._described, strict=True)
        ]
        arguments.clear()
        return self._compiled.best()[0](laid)


def _is_other(argument: Any, described: Meta | None) -> bool:
    """Whether an argument is not what is `described` of it, if anything is."""
    return described is not None and _described(argument) != described


def _any(arguments: Sequence[Any]) -> bool:
    return True


def _described(value: Any) -> Meta | None:
    return Meta.of(value) if isinstance(value, torch.Tensor) else None


def _differs(found: Meta | None, described: Meta | None) -> bool:
    """Whether a tensor differs by more than strides."""
    if found is None or described is None:
        return found is not described
    return (found.shape, found.dtype) != (described.shape, described.dtype)


class Unfused:
    """A graph as it was traced, boxed: for arguments with which no kernel can be called.

    Dynamo compares the dispatch keys of inputs, but not of the gradients that backward gets, which may be of any kind.

    Attributes:
        count: is told why a call runs as the original operators.
        saved: how many arguments come before the gradients that backward gets; None in another graph.
    """

    def __init__(self, graph: fx.GraphModule, count: Callable[[str], None]) -> None:
        self._boxed_call = True
        self._graph, self.count = graph, count
        nodes = graph.graph.find_nodes(op="placeholder")
        self.saved = next((i for i, node in enumerate(nodes) if str(node.target).startswith("tangents")), None)
        self._taken_for_plain = [_taken_for_plain(node.meta.get("val")) for node in nodes]

    def serves(self, arguments: Sequence[Any]) -> bool:
        """Whether one of these `arguments` is not the plain tensor that tracing took it for, which is counted."""
        pairs = zip(arguments, self._taken_for_plain, strict=True)
        reasons = (unusual_kind(argument) for argument, plain in pairs if plain)
        reason = next((reason for reason in reasons if reason is not None), None)
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


class PerShape:
    """A graph with symbolic shapes, made anew for each set of concrete ones, up to `limit` of them; others run its operators.

    Args:
        graph: with symbolic shapes, or traced with others than those that come.
        specialise: compiles a graph of constant shapes that takes the tensors in these places of the graph's arguments.
        limit: of sets of sizes.
        unfused: what serves other calls.
        calls: makes the calls of a compiled graph that takes and gives the tensors in these places of the graph's arguments and results.
        later: has what it is given made, now or beside the program.
        guarded: whether arguments of constant shape are compared by Dynamo.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        specialise: Callable[[fx.GraphModule, Forms, Sequence[int]], CompiledGraph],
        limit: int,
        unfused: Unfused,
        calls: Callable[[CompiledGraph, Sequence[int], Sequence[int]], Run],
        later: Callable[[Callable[[], Call], str], Call],
        *,
        guarded: bool,
    ) -> None:
        self._boxed_call = True
        self.unfused = unfused
        self._graph = graph
        self._specialise = specialise
        self._limit = limit
        self._calls = calls
        self._later = later
        self._forms = Forms()
        self._made: dict[object, Call] = {}
        self._recent: tuple[tuple[_Like, Call], ...] = ()
        self._lock = threading.Lock()
        values = [node.meta.get("val") for node in graph.graph.find_nodes(op="placeholder")]
        # What differs from call to call comes first.
        self._compared = [i for i, value in enumerate(values) if not _is_constant(value)]
        self._compared += [] if guarded else [i for i, value in enumerate(values) if _is_constant(value)]

    def __call__(self, arguments: list[Any]) -> Any:
        for like, made in self._recent:
            if like(arguments):
                return made(arguments)
        if self.unfused.serves(arguments):
            return self.unfused(arguments)
        signature = tuple(map(_shape_key, arguments))
        found = self._made.get(signature) or self._new(signature, arguments)
        if found is not None:
            others = [
                pair for pair in self._recent if pair[1] is not found
            ]  # another thread may have had the same sizes
            self._recent = ((_Like(arguments, self._compared), found), *others[: _MOST_RECENT - 1])
            return found(arguments)
        self.unfused.count(f"called with more than {self._limit} sets of sizes; the option max_signatures allows more")
        return self.unfused(arguments)

    def _new(self, signature: object, arguments: Sequence[Any]) -> Call | None:
        """What serves calls with `arguments` from now on; None where it would be one too many. One thread makes one at a time."""
        with self._lock:
            if signature not in self._made and len(self._made) < self._limit:
                tensors, inputs = Template.of(tuple(arguments))
                mode = FakeTensorMode()
                with mode:  # what is made later keeps no argument
                    fakes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in tensors]
                what = f" for {', '.join(str(list(each.shape)) for each in tensors)}"
                self._made[signature] = self._later(partial(self._concrete, inputs, mode, fakes), what)
            return self._made.get(signature)

    def _concrete(self, inputs: Template, mode: FakeTensorMode, fakes: Sequence[torch.Tensor]) -> Call:
        """The graph for the shapes and numbers of arguments: `inputs`, with `fakes` of `mode` for their tensors."""
        form: list[Template] = []

        def flat(*values: torch.Tensor) -> list[torch.Tensor]:
            results, template = Template.of(self._graph(*inputs.fill(values)))
            form.append(template)
            return results

        with torch.no_grad(), mode:
            graph = made_concrete(self._graph, flat, fakes, DECOMPOSITIONS)
        used, outputs = _picker(inputs.holes), form[-1]
        compiled = self._calls(self._specialise(graph, self._forms, inputs.holes), inputs.holes, outputs.holes)

        def run(values: list[Any]) -> Any:
            given = list(used(values))
            values.clear()
            results = list(outputs.leaves)  # AOTAutograd's graphs give flat tuples
            for position, result in zip(outputs.holes, compiled.best()[0](given), strict=True):
                results[position] = result
            return results

        return run


def _is_constant(value: Any) -> bool:
    """Whether the argument of this description is a tensor of constant shape and strides."""
    return isinstance(value, torch.Tensor) and not value._has_symbolic_sizes_strides


def _shape_key(argument: Any) -> object:
    if isinstance(argument, torch.Tensor):
        return tuple(argument.shape), argument.stride(), argument.dtype
    return type(argument), argument
