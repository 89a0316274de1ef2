"""Calls of forward and backward of a training step that are replayed, or launched where they may not be or nothing is won by it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from fusepass.compile.pipeline import CompiledGraph
from fusepass.measure import extent
from fusepass.patterns.aliasing import written
from fusepass.patterns.effects import drawn_before, draws
from fusepass.runtime.cuda_graphs import CudaGraphs, Pool, settings
from fusepass.runtime.draws import Course, ReplayedDraws, watched
from fusepass.runtime.replay_trial import ReplayTrial, Taken
from fusepass.runtime.replayable import step_obstacle
from fusepass.training.calls import Call, Run
from fusepass.training.captured import Captured
from fusepass.training.steps import Size, Slot, Step, addresses

_saved_tensors_hooks: Callable[[bool], object] = torch._C._autograd._top_saved_tensors_default_hooks


def replayed_forward(compiled: CompiledGraph, step: Step, static: Sequence[int], visible: int) -> Run:
    """Calls of `compiled`, a graph of forward, through a CUDA graph of `step`; plain ones where there can be none.

    Args:
        compiled: made with ``emptying``, of constant shapes.
        static: positions of the arguments that lie in the same memory at each call, as parameters do.
        step: what it shares with backward.
        visible: how many of its results, from the first on, others than backward get.
    """
    graph = compiled.before.graph
    nodes = graph.find_nodes(op="placeholder")
    described = [node.meta.get("val") for node in nodes]
    reason = step_obstacle(graph, described, static, asked=step.asked)
    if reason is not None:
        step.refuse(reason)
        return Run(compiled)
    device = described[0].device
    step.graphs = CudaGraphs(device)
    (output,) = graph.find_nodes(op="output")
    results = {node for node in output.all_input_nodes if node.op != "placeholder"}
    parameters = [nodes[place] for place in static]  # of which gradients take about as much
    size = Size(sum(map(_nbytes, [*results, *parameters])), None if step.asked else ReplayTrial.of(compiled.calls))
    step.sizes.append(size)
    places = [nodes.index(target) for node in graph.nodes for target in written(node) if target in nodes]
    return ReplayedForward(compiled, step, size, static, places, visible, any(map(draws, graph.nodes)), device)


def replayed_backward(compiled: CompiledGraph, step: Step) -> Run:
    """As `replayed_forward`, for a graph of backward."""
    if not step.sizes:
        return Run(compiled)
    nodes = compiled.before.graph.find_nodes(op="placeholder")
    described = [node.meta.get("val") for node in nodes]
    reason = step_obstacle(compiled.before.graph, described, (), asked=step.asked)
    if reason is None and any(map(draws, compiled.before.graph.nodes)):
        reason = "backward draws random numbers"
    if reason is not None:
        step.refuse(f"backward: {reason}")
        return Run(compiled)
    states = drawn_before(compiled.before.graph)
    return ReplayedBackward(compiled, step, [place for place, node in enumerate(nodes) if node in states])


class ReplayedForward(Run):
    """The calls of a compiled forward.

    Args:
        compiled: made with ``emptying``, of constant shapes.
        step: what it shares with backward.
        size: what is known of it.
        static: positions of the arguments that lie in the same memory at each call, as parameters do.
        written: positions of those that it writes.
        visible: how many of its results, from the first on, are not for backward alone.
        drawing: whether it draws random numbers.
        device: where it runs.
    """

    def __init__(
        self,
        compiled: CompiledGraph,
        step: Step,
        size: Size,
        static: Sequence[int],
        written: Sequence[int],
        visible: int,
        drawing: bool,
        device: torch.device,
    ) -> None:
        super().__init__(compiled)
        self._segments = compiled.segments
        self._plain = compiled.call if compiled.segments is None else compiled.segments.body
        self._step, self._size = step, size
        self._static, self._written = tuple(static), tuple(written)
        self._visible = visible
        self._drawing, self._device = drawing, device
        self._course: Course | None = None  # of its draws, in the last call that was launched

    def best(self) -> tuple[Call, bool]:
        if self._size.reason is not None:
            return super().best()
        return self._serve, self._size.settled

    def _serve(self, arguments: list[Any]) -> Any:
        step, size = self._step, self._size
        if size.reason is not None or step.graphs.capturing():
            return self._launch(arguments)
        trial = size.trial
        if trial is None:
            return self._replay(arguments)[0]
        if not trial.ready():
            return self._launch(arguments)
        replays = trial.replays()
        if trial.verdict is not None:
            size.trial = None
            if trial.verdict:
                step.give_up(size, trial.verdict)
            return self._serve(arguments)
        run = self._replay if replays else lambda given: (self._launch(given), False)
        (results, replayed), pending = step.graphs.timed(lambda: run(arguments))
        step.opened = (size, replays, pending) if replays == replayed else None
        return results

    def _launch(self, arguments: list[Any]) -> Any:
        launch = Run.best(self)[0]
        if not self._drawing:
            return launch(arguments)
        results, course = watched(lambda: launch(arguments), self._device)
        self._course = course or self._course
        return results

    def _replay(self, arguments: list[Any]) -> tuple[Any, bool]:
        """The results, and whether they are a graph's."""
        step = self._step
        reason = self._obstacle()
        if reason is not None:
            step.launches(reason)
            return self._launch(arguments), False
        with step.lock:
            slot = step.slot(self._size, self._static, arguments, lambda pool: self._capture(arguments, pool))
            if slot is not None:
                results = slot.forward.run(arguments)
                if self._written:
                    torch._C._increment_version([arguments[position] for position in self._written])
                arguments.clear()
                return results, True
        return self._launch(arguments), False

    def _obstacle(self) -> str | None:
        """Why a call is launched here and now, whatever slots there are."""
        if _saved_tensors_hooks(False) is not None:
            return "hooks get what forward saves"
        if self._drawing and self._size.streams and (self._course is None or self._step.devices is None):
            return "forward draws, and no step was launched that shows where, and where backward finds that"
        return None

    def _capture(self, arguments: Sequence[Any], pool: Pool) -> Captured:
        fixed, visible, graphs = self._static, self._visible, self._step.graphs
        if self._course is None:
            return Captured(self._plain, arguments, fixed, visible, graphs, pool, exact=True, segments=self._segments)
        drawn = ReplayedDraws(self._course, self._device)

        def drawing(given: list[Any]) -> Sequence[Any]:
            with drawn.captured():
                results: Sequence[Any] = self._plain(given)
                return results

        return Captured(
            drawing,
            arguments,
            fixed,
            visible,
            graphs,
            pool,
            exact=True,
            before=drawn.begin,
            generators=drawn.generators,
            segments=self._segments,
        )


class ReplayedBackward(Run):
    """The calls of a compiled backward, made with ``emptying``, that shares `step` with its forward.

    The library's attention gives backward the generator's state, for a launched backward on the host as a rule, for a captured one on the
    device. So forward is first replayed behind a step that shows where.

    Args:
        states: positions of arguments that are such states.
    """

    def __init__(self, compiled: CompiledGraph, step: Step, states: Sequence[int]) -> None:
        super().__init__(compiled)
        self._segments = compiled.segments
        self._plain = compiled.call if compiled.segments is None else compiled.segments.body
        self._step = step
        self._states = states
        self._key = object()

    def best(self) -> tuple[Call, bool]:
        if all(size.reason is not None for size in self._step.sizes):
            return super().best()
        return self._serve, all(size.settled for size in self._step.sizes)

    def _serve(self, arguments: list[Any]) -> Any:
        step = self._step
        opened, step.opened = step.opened, None
        if opened is None:
            return self._run(arguments)
        size, replayed, pending = opened
        results, after = step.graphs.timed(lambda: self._run(arguments))
        if size.trial is not None:
            size.trial.add(replayed, lambda: _sum((pending(), after())))
        return results

    def _run(self, arguments: list[Any]) -> Any:
        step = self._step
        if step.graphs.capturing():
            return Run.best(self)[0](arguments)
        if step.devices is None:
            step.devices = {place: arguments[place].device for place in self._states}
        else:
            with step.lock:
                captured = self._captured(arguments)
                if captured is not None:
                    results = captured.run(arguments)
                    arguments.clear()
                    return results
        for place, device in step.devices.items():
            arguments[place] = arguments[place].to(device)
        return Run.best(self)[0](arguments)

    def _captured(self, arguments: Sequence[Any]) -> Captured | None:
        """The graph for a call with these arguments; None where their forward was launched, or it is another stream's."""
        step, stream, key = self._step, self._step.graphs.stream(), (self._key, settings())
        for slot in step.slots:
            if slot.stream != stream:
                continue
            if slot.backward is not None:
                captured = slot.backward[1]
                if slot.backward[0] == key and captured.addresses == addresses(arguments, captured.fixed):
                    return captured
            elif any(map(slot.forward.lends, arguments)):
                return self._capture(slot, key, arguments)
        return None

    def _capture(self, slot: Slot, key: object, arguments: Sequence[Any]) -> Captured | None:
        fixed = [number for number, each in enumerate(arguments) if _stays(slot, each)]

        def capture() -> Captured:
            graphs, pool, segments = self._step.graphs, slot.pool, self._segments
            return Captured(self._plain, arguments, fixed, sys.maxsize, graphs, pool, exact=False, segments=segments)

        captured, nbytes = self._step.captured(slot.size, capture)
        if captured is not None:
            slot.backward = key, captured
            slot.nbytes += nbytes
        return captured


def _stays(slot: Slot, argument: torch.Tensor) -> bool:
    """Whether an argument of backward lies in a slot, or in the model's memory that it is for."""
    return slot.forward.lends(argument) or argument.untyped_storage().data_ptr() in slot.states


def _sum(both: Iterable[Taken | None]) -> Taken | None:
    """What forward and backward took; None as long as the device works on one."""
    taken = [each for each in both if each is not None]
    return Taken(sum(each.host for each in taken), sum(each.device for each in taken)) if len(taken) == 2 else None


def _nbytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    return extent(value) * value.dtype.itemsize if isinstance(value, torch.Tensor) else 0
