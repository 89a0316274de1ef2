"""Gradients of gradients, which AOTAutograd does not give: the operators of a graph run again, as autograd records them."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._compile import _disable_dynamo
from torch.autograd.graph import GradientEdge

_DEVICES = ("cpu", "cuda")
_is_kept: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
_version: Callable[[Tensor], int] = operator.attrgetter("_version")
_TWICE = "gradients of its gradients are taken"
_BATCHED = "vmap takes its gradients"
_Generator = str | torch.device
_Gradients = tuple[Tensor | None, ...]


class Differentiable:
    """Calls of `compiled`, which is made of `graph`; when gradients of its gradients are asked for, `graph` gives them.

    That is known only once backward runs. So each call leaves a hook at what autograd recorded of it, which has the arguments until then. The first time
    that it finds the gradients themselves recorded (``create_graph=True``), or taken of many at once (``vmap``), it runs `graph` again and puts
    its gradients in the place of the compiled ones. Later calls run `graph` from the start.

    Args:
        graph: as Dynamo traced it, under the present autocast.
        compiled: what computes the same.
        count: is told of each call that `graph` serves, and why.
    """

    def __init__(self, graph: fx.GraphModule, compiled: Callable[..., Any], count: Callable[[str], None]) -> None:
        self._graph = graph
        self._compiled = compiled
        self._count = count
        self._autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _DEVICES]
        self._reason: str | None = None
        self._known = False
        self._generators: list[_Generator] = []  # that a call draws from
        self._written: list[int] = []  # positions of arguments that a call writes to
        self._statistics: set[int] = set()  # of those that it writes to, but that its results do not depend on
        self._checked: Callable[[Sequence[Any]], Sequence[Tensor]] = _none  # picks other tensors
        self._places: list[tuple[int, bool] | None] = []  # of the results
        self._arguments: dict[int, int] = {}  # those that are written are outputs of what autograd recorded
        self._at = -1  # the result that leads to what autograd recorded; -1 where none does

    def __call__(self, *arguments: Any) -> Any:
        if self._reason is not None:
            self._count(self._reason)
            return self._graph(*arguments)
        if not self._known:
            return self._first(arguments)
        if self._at < 0:
            return self._compiled(*arguments)
        states = [(each, _state(each)) for each in self._generators]
        before = {number: arguments[number].clone() for number in self._written}
        results = self._compiled(*arguments)
        self._watch(results, arguments, states, before)
        return results

    def _first(self, arguments: Sequence[Any]) -> Any:
        """A call that shows what all calls do: autograd records the same of each."""
        tensors = {number: each for number, each in enumerate(arguments) if isinstance(each, Tensor)}
        if any(each.is_inference() for each in tensors.values()):
            return self._compiled(*arguments)
        devices: set[_Generator] = {each.device for each in tensors.values() if each.is_cuda}
        states = [(each, _state(each)) for each in ("cpu", *devices)]
        versions = {number: each._version for number, each in tensors.items()}
        leaves = {number for number, each in tensors.items() if each.requires_grad and each.is_leaf}
        placeholders = self._graph.graph.find_nodes(op="placeholder")
        dependent = {number for number in tensors if not _is_statistic(placeholders[number])}
        before = {number: tensors[number].clone() for number in dependent - leaves}
        results = self._compiled(*arguments)
        written = {number for number, each in tensors.items() if each._version != versions[number]}
        self._generators = [each for each, state in states if not torch.equal(state, _state(each))]
        self._written = sorted(written & dependent)
        self._statistics = written - dependent
        checked = sorted(tensors.keys() - written)
        self._checked = operator.itemgetter(*checked, checked[0]) if checked else _none
        found = [] if written & leaves else [_compiled_node(each) for each in results]
        node = next((each for each in found if each is not None), None)
        if node is not None:
            self._at = found.index(node)
            self._places = [_place(each, node) for each in results]
            self._arguments = {
                edge[1]: number
                for number in self._written
                if tensors[number].grad_fn is not None
                for edge in tensors[number].grad_fn.next_functions  # type: ignore[union-attr]
                if edge[0] is node
            }
            states = [(each, state) for each, state in states if each in self._generators]
            self._watch(results, arguments, states, {number: before[number] for number in self._written})
        self._known = True
        return results

    def _watch(
        self,
        results: Sequence[Any],
        arguments: Sequence[Any],
        states: Sequence[tuple[_Generator, Tensor]],
        before: Mapping[int, Tensor],
    ) -> None:
        """Leave the hook."""
        result = results[self._at]
        place = self._places[self._at]
        node = (result._base if place is not None and place[1] else result).grad_fn
        if node is not None:
            node.register_prehook(_Hook(self, node, arguments, states, before))

    def _version(self, arguments: Sequence[Any]) -> int:
        """A number that grows with each write to an argument that no call writes."""
        return sum(map(_version, self._checked(arguments)))

    def _again(self, hook: _Hook, node: Any, gradients: Sequence[Tensor | None], reason: str) -> _Gradients:
        """What `node`, which stands for a compiled call, is to give for `gradients`, as autograd records it."""
        self._count(reason)
        self._reason = reason
        if self._version(hook.arguments) != hook.version:
            raise RuntimeError(
                "a tensor that gradients of gradients need has been modified by an inplace operation since forward"
            )
        with torch.enable_grad(), self._as_then(hook.states):
            arguments = [
                each.clone() if number in self._statistics or number in hook.before else each
                for number, each in enumerate(hook.arguments)
            ]
            results = self._graph(*arguments)
        outputs: dict[int, Tensor] = {}
        for result, place in zip(results, self._places, strict=True):
            if place is not None:
                outputs[place[0]] = result._base if place[1] and result._base is not None else result
        outputs |= {output: arguments[number] for output, number in self._arguments.items()}
        given = [(number, each) for number, each in enumerate(gradients) if each is not None]
        if not all(number in outputs and outputs[number].shape == each.shape for number, each in given):
            raise RuntimeError("gradients of gradients are not known of a result that is a view of another")
        edges = [
            (number, GradientEdge(*edge)) for number, edge in enumerate(node.next_functions) if edge[0] is not None
        ]
        found = torch.autograd.grad(
            [outputs[number] for number, _ in given],
            [edge for _, edge in edges],
            [each for _, each in given],
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
        by_edge = {number: gradient for (number, _), gradient in zip(edges, found, strict=True)}
        return tuple(map(by_edge.get, range(len(node.next_functions))))

    @contextmanager
    def _as_then(self, states: Sequence[tuple[_Generator, Tensor]]) -> Iterator[None]:
        """Autocast and random generators as they were in the compiled call; generators are put back."""
        with ExitStack() as stack:
            for kind, enabled, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled=enabled))
            for generator, state in states:
                stack.callback(_set_state, generator, _state(generator))
                _set_state(generator, state)
            yield


class _Hook:
    """Runs before the compiled backward of one call, and has what the call was given.

    A forward that asks for gradients itself, as models of forces do, has Dynamo see backward; it does not look into this.
    """

    __slots__ = ("_node", "_owner", "arguments", "before", "states", "version")

    def __init__(
        self,
        owner: Differentiable,
        node: Any,
        arguments: Sequence[Any],
        states: Sequence[tuple[_Generator, Tensor]],
        before: Mapping[int, Tensor],
    ) -> None:
        self._owner = owner
        self._node = weakref.ref(node)  # which has the hook
        # What the call writes leads back to the node, which has the hook; its clone does not.
        self.arguments = [before.get(number, each) for number, each in enumerate(arguments)] if before else arguments
        self.states = states
        self.before = before
        self.version = owner._version(arguments)

    @_disable_dynamo
    def __call__(self, gradients: tuple[Tensor | None, ...]) -> tuple[Any, ...] | None:
        batched = not all(map(_has_memory, gradients))
        if not torch.is_grad_enabled() and not batched:
            if not _is_kept():
                self.arguments, self.before = (), {}
            return None
        node: Any = self._node()
        found = self._owner._again(self, node, gradients, _BATCHED if batched else _TWICE)
        handle: Any = None

        @_disable_dynamo
        def replaced(compiled: Any, _: Any) -> _Gradients:
            handle.remove()
            return found

        handle = node.register_hook(replaced)
        return tuple(map(_plain_zeros, gradients)) if batched else None


def _none(arguments: Sequence[Any]) -> tuple[Tensor, ...]:
    return ()


def _compiled_node(result: object) -> Any:
    """What autograd recorded of a compiled call, by one of its results; None where that has no gradient of it."""
    if not isinstance(result, Tensor) or not result.requires_grad:
        return None
    for each in (result, result._base):
        if each is not None and each.grad_fn is not None and each.grad_fn.name().startswith("CompiledFunction"):
            return each.grad_fn
    return None


def _place(result: object, node: Any) -> tuple[int, bool] | None:
    """Which output of `node` a result is, and whether it is a view of it; None where it is none."""
    if isinstance(result, Tensor) and result.requires_grad:
        if result.grad_fn is node:
            return result.output_nr, False
        if result._base is not None and result._base.grad_fn is node:
            return result._base.output_nr, True
    return None


def _is_statistic(placeholder: fx.Node) -> bool:
    """Whether an argument is only brought up to date, as running statistics and counts of batches are: results do not depend on it."""
    return bool(placeholder.users) and all(_updates(placeholder, user) for user in placeholder.users)


def _updates(placeholder: fx.Node, user: fx.Node) -> bool:
    """Whether `user` adds a number to an argument, or is a normalisation that computes its own statistics, and reads it for nothing else."""
    if user.target == "add_":
        return not user.users and user.all_input_nodes == [placeholder] and user.args[0] is placeholder
    if user.target is not F.batch_norm or user.args[5:6] != (True,):
        return False
    return placeholder not in (user.args[0], *user.args[3:])


def _has_memory(gradient: Tensor | None) -> bool:
    """False for what stands for many gradients, as ``vmap`` and ``is_grads_batched=True`` have them, and for others that kernels cannot read."""
    return gradient is None or torch._C._has_storage(gradient)


def _plain_zeros(gradient: Tensor | None) -> Any:
    """Something of the shape of one of many gradients."""
    return gradient if gradient is None else torch.zeros(gradient.shape, dtype=gradient.dtype, device=gradient.device)


def _state(generator: _Generator) -> Tensor:
    return torch.get_rng_state() if generator == "cpu" else torch.cuda.get_rng_state(generator)


def _set_state(generator: str | torch.device, state: Tensor) -> None:
    if generator == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, generator)
