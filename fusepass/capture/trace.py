"""Traces a model into one flat ATen graph for one signature: functional ATen, composite operators whole.

`fusepass.capture.record` does it in one real run; what that declines, `torch._functorch.aot_autograd.aot_export_module` traces under
fake tensors. Around both this module keeps tracing honest: nothing of the user's is written, and what forward changes besides
tensors is put back and reported.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils import _pytree as pytree

from fusepass.capture.branches import MOST_BRANCHES, Condition
from fusepass.capture.escapes import Declined, NoEscape
from fusepass.capture.functional import LOST_WRITE, forgets_gaps
from fusepass.capture.isolation import NotBeside, quiet_fake_tensors, whole_operators
from fusepass.capture.layouts import Following, Note, Noting
from fusepass.capture.mutation import Exported, finish
from fusepass.capture.naming import identifiers, input_text, positional_names
from fusepass.capture.own_draws import drawn
from fusepass.capture.record import Recorder, cloned, copy_of, cuda_devices
from fusepass.capture.shim import Shim, clean_metadata
from fusepass.capture.threads import tracing_apart
from fusepass.codegen.lowering.interpreter import Interpreter
from fusepass.codegen.lowering.tracer import Spec
from fusepass.config import current
from fusepass.errors import CaptureError, warn
from fusepass.guards.pystate import hooked_module
from fusepass.guards.surroundings import Surroundings
from fusepass.guards.tensors import LiveTensors, Slot
from fusepass.patterns.effects import is_random
from fusepass.runtime.memory import unusual
from fusepass.runtime.modes import without_cached_casts
from fusepass.structure import KeyPath, Template, key_paths

DEVICES = ("cpu", "cuda")
"""Device types on which models are optimised."""

_DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)
_LONGEST_REASON = 200
_OF_RECORDING = "while a forward was recorded that PyTorch's export traces"
"""A note of errors that are raised when debugging."""


@dataclass(frozen=True)
class CaptureFailure:
    """Why a model is not traced.

    Attributes:
        reason: one line.
        error: what forward raised, if it did: perhaps the fault of the inputs.
        final: no other way of capturing can help either.
        lasting: trying the same call again would fail again.
        only_children: no way of capturing it whole gives eager's results.
        needs_gradients: a tensor of it that is no parameter does.
    """

    reason: str
    error: Exception | None = None
    final: bool = False
    lasting: bool = False
    only_children: bool = False
    needs_gradients: bool = False


@dataclass(frozen=True)
class Captured:
    """A model as one flat ATen graph for one signature.

    Attributes:
        graph: functional ATen but for ``copy_`` nodes at the end, which write mutated placeholders. Placeholders
            are `states`, then every tensor among the inputs; the result is a flat tuple of tensors.
        states: where the tensor of each leading placeholder lives.
        state_indices: the positions of `states` in `LiveTensors.slots`.
        inputs: ``(args, kwargs)`` of the call, with holes for the tensors.
        paths: how each leaf of `inputs` is reached from ``(args, kwargs)``.
        outputs: the result of the call, with holes for the graph's results.
        mutated_states: positions in `LiveTensors.slots` of the tensors that the graph writes.
        mutated_inputs: positions among the input tensors of those that it writes.
        conditions: what must hold of the arguments of a call for forward to take the same branches.
    """

    graph: fx.GraphModule
    states: tuple[Slot, ...]
    state_indices: tuple[int, ...]
    inputs: Template
    paths: tuple[KeyPath, ...]
    outputs: Template
    mutated_states: tuple[int, ...]
    mutated_inputs: tuple[int, ...]
    conditions: tuple[Condition, ...] = ()


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    forward: Callable[..., Any] | None = None,
    branches: int = MOST_BRANCHES,
) -> Captured | CaptureFailure:
    """Trace ``forward(*args, **kwargs)``, by default ``model.forward``, under the present grad mode and autocast.

    Forward may branch on the values of tensors up to `branches` times; the graph is then right under conditions. Hooks of `model` itself do not run. The model, the inputs and the random generators are afterwards as before.
    """
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        final = isinstance(model, torch.jit.ScriptModule)
        return CaptureFailure("a part of it is TorchScript, which has no Python to trace", final=final, lasting=final)
    live = LiveTensors(model)
    tensors, inputs = Template.of_call(args, kwargs)
    refused = _refusal(model, inputs, [*live.tensors, *tensors])
    if refused is not None:
        return refused
    try:
        _state.captures = getattr(_state, "captures", 0) + 1
        return _trace(Shim(model, forward or model.forward, inputs), live, tensors, branches)
    except CaptureError as error:
        return CaptureFailure(str(error), final=error.final, lasting=error.final, only_children=error.only_children)
    except _DATA_DEPENDENT as error:  # tracing's own: the call is not at fault
        return CaptureFailure(_one_line(error))
    except Exception as error:  # whatever the model's Python raises under tracing
        if _OF_RECORDING in getattr(error, "__notes__", ()):
            raise
        return CaptureFailure(_one_line(error), error)
    finally:
        _state.captures -= 1


def capture_beside(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    forward: Callable[..., Any] | None = None,
    branches: int = MOST_BRANCHES,
) -> Captured:
    """As `capture`, while other threads call the model, which notice nothing: a twin of it is recorded that shares its parameters alone.

    Its forward may not change what it shares with the model, which could not be put back.

    Raises:
        NotBeside: this cannot be ensured, or the recorder does not capture the model; `capture` may.
    """
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise NotBeside("a part of it is TorchScript")
    around = Surroundings(model, forward).writable
    if around is not None:
        raise NotBeside(f"forward may change {around}")
    live = LiveTensors(model)
    tensors, inputs = Template.of_call(args, kwargs)
    refused = _refusal(model, inputs, [*live.tensors, *tensors])
    if refused is not None:
        raise NotBeside(refused.reason)
    try:
        _state.captures = getattr(_state, "captures", 0) + 1
        shim = Shim(model, forward or model.forward, inputs)
        shim.stand_beside()
        with without_cached_casts():
            return _trace(shim, live, tensors, branches, export=False)
    except NotBeside:
        raise
    except Exception as error:  # whatever the model's Python raises
        raise NotBeside(_one_line(error)) from error
    finally:
        _state.captures -= 1


_state = threading.local()


def capturing() -> bool:
    """Whether this thread is tracing a model, of which what asks may be a part."""
    return bool(getattr(_state, "captures", 0))


def _refusal(model: nn.Module, inputs: Template, tensors: Sequence[torch.Tensor]) -> CaptureFailure | None:
    """Why there is no point in tracing."""
    for tensor in tensors:
        if tensor.device.type not in DEVICES:
            return CaptureFailure(f"device {tensor.device.type} is not supported, only cpu and cuda are", final=True)
        if torch.is_grad_enabled() and tensor.requires_grad:
            return CaptureFailure("a tensor that it uses needs gradients", final=True, needs_gradients=True)
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            return CaptureFailure(f"a tensor is a {type(tensor).__name__}", final=True)
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            return CaptureFailure("a tensor is sparse, quantized, or lazily conjugated or negated", final=True)
        reason = unusual(tensor)
        if reason is not None:
            return CaptureFailure(reason, final=True)
    if inputs.opaque is not None:
        return CaptureFailure(f"an input is a {type(inputs.opaque).__name__}, which has no comparable value")
    hooked = hooked_module(model)
    return None if hooked is None else CaptureFailure(f"forward hooks on {hooked}")


def _trace(
    shim: Shim, live: LiveTensors, tensors: Sequence[torch.Tensor], branches: int, *, export: bool = True
) -> Captured:
    """The graph of `shim`; where the recorder declines it, by PyTorch's `export` if that may be.

    Raises:
        CaptureError: the model does what a graph cannot express.
        Exception: whatever its forward raises.
    """
    owned = live.tensors
    # aot_export_module takes parameters before buffers.
    order = sorted(range(len(owned)), key=lambda index: not isinstance(owned[index], nn.Parameter))
    slots = [live.slots[index] for index in order]
    states = {f"state_{i}": owned[i] for i in order}
    shim.places = [*((slot, i) for i, slot in enumerate(slots)), *((slot, order.index(i)) for slot, i in live.ties)]
    paths = key_paths(shim.inputs.fill(tensors))
    positional = positional_names(shim.call, len(shim.inputs.fill(tensors)[0]))
    texts = [slot.dotted for slot in slots]
    texts += [input_text(paths[hole], positional) for hole in shim.inputs.holes]
    names = identifiers(texts)
    try:
        finished = finish(_record(shim, states, tensors, names, branches))
    except Exception as error:  # the export knows more, and says what forward itself raises
        if not export or (isinstance(error, CaptureError) and error.only_children):
            raise
        expected = isinstance(error, Declined | CaptureError)
        try:
            finished = finish(_export(shim, states, tensors, names))
        except _DATA_DEPENDENT:
            if expected:
                raise
            raise error from None  # forward raised it for these values, of which the export knows nothing
        if not expected:  # forward does not raise it: perhaps it is a bug of the recorder's
            if current().debug:
                error.add_note(_OF_RECORDING)
                raise
            text = f"{type(shim.model).__name__} is captured by PyTorch's export, which takes longer: recording it failed with "
            warn(text + _one_line(error))
    clean_metadata(finished.graph.graph)
    assert shim.outputs is not None, "the model has run"
    return Captured(
        graph=finished.graph,
        states=tuple(slots[i] for i in finished.used_states),
        state_indices=tuple(order[i] for i in finished.used_states),
        inputs=shim.inputs,
        paths=tuple(paths),
        outputs=shim.outputs,
        mutated_states=tuple(order[i] for i in finished.mutated if i < len(order)),
        mutated_inputs=tuple(i - len(order) for i in finished.mutated if i >= len(order)),
        conditions=finished.conditions,
    )


def _record(
    shim: Shim,
    states: Mapping[str, torch.Tensor],
    tensors: Sequence[torch.Tensor],
    names: Sequence[str],
    branches: int,
) -> Exported:
    """The graph of one real run.

    Raises:
        Declined: the recorder does not know how to express it.
    """
    recorder = Recorder(shim.model)
    shim.states = dict(zip(states, cloned(list(states.values())), strict=True))
    placeholders: list[fx.Node] = []
    arguments: list[torch.Tensor] = []
    for name, tensor in zip(names, (*shim.states.values(), *tensors), strict=True):
        if len(placeholders) < len(states) and not isinstance(tensor, nn.Parameter):
            placeholders.append(recorder.placeholder(name, tensor))
        else:
            given, node = recorder.fix(name, tensor)
            placeholders.append(node)
            arguments += [given] if len(placeholders) > len(states) else []
    shim.guard = NoEscape
    with shim.with_states(), torch.no_grad(), recorder:
        results = shim(*arguments)
    if len(recorder.branches) > branches:
        raise Declined("forward depends on the values of tensors too often")
    current = [recorder.node_of(state) for state in shim.states.values()]
    mutated = [index for index, node in enumerate(current) if node is not placeholders[index]]
    recorder.graph.output((*(current[index] for index in mutated), *map(recorder.node_of, results)))
    return Exported(recorder.module(), names, len(states), mutated, shim.aliases, recorder.branches)


def _export(
    shim: Shim, states: Mapping[str, torch.Tensor], tensors: Sequence[torch.Tensor], names: Sequence[str]
) -> Exported:
    """The graph by AOTAutograd, under fake tensors. Imports SymPy and Dynamo, which takes seconds."""
    from torch._functorch.aot_autograd import aot_export_module

    fake_mode = FakeTensorMode()
    shim.stand_in()
    notes = _real_run(shim, states, tensors)
    shim.guard = functools.partial(Following, notes)
    shim.states = {name: _fake(state, fake_mode) for name, state in states.items()}
    fakes = tuple(_fake(tensor, fake_mode) for tensor in tensors)
    with torch.no_grad(), quiet_fake_tensors(), tracing_apart(), whole_operators(fakes):
        graph, signature = aot_export_module(shim, fakes, trace_joint=False, decompositions={})
    if not isinstance(graph, fx.GraphModule) or shim.outputs is None:
        raise CaptureError("the export gave no graph")
    if forgets_gaps(graph.graph):
        raise CaptureError(LOST_WRITE, final=True)
    _lay_out(graph, [*states.values(), *tensors])
    placeholders = [*shim.states, *signature.user_inputs]
    written = {*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()}
    written |= {*getattr(signature, "parameters_to_mutate", {}).values()}
    mutated = sorted(placeholders.index(name) for name in written)
    return Exported(graph=graph, names=names, states=len(states), mutated=mutated, aliases=shim.aliases)


def _real_run(shim: Shim, states: Mapping[str, torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[Note]:
    """How eager lays tensors out, from a run on copies.

    What functions of the model remember (`functools.lru_cache`) is no tensor of a tracing then. The run raises what forward
    does: fake tensors may not, as for a write to a tensor that overlaps with itself.

    Raises:
        CaptureError: a tensor has another shape afterwards, of which functional tensors tell nothing.
    """
    notes: list[Note] = []
    shim.guard = functools.partial(Noting, notes)
    shim.states = {name: _copy(state) for name, state in states.items()}
    given = [copy_of(tensor) for tensor in tensors]
    every = [*shim.states.values(), *given]
    layouts = [(tensor.shape, tensor.stride()) for tensor in every]
    devices = cuda_devices([*states.values(), *tensors])
    expected = suppress(CaptureError)  # which drawing random numbers is here; the rest is for tracing to find
    with shim.with_states(), torch.random.fork_rng(devices), torch.no_grad(), expected:
        shim(*given)
    if layouts != [(tensor.shape, tensor.stride()) for tensor in every]:
        raise CaptureError("forward gives an input or a tensor of a module another shape or other strides")
    return notes


def _copy(state: torch.Tensor) -> torch.Tensor:
    """A clone; of a parameter, a parameter."""
    copy = copy_of(state)
    return nn.Parameter(copy, state.requires_grad) if isinstance(state, nn.Parameter) else copy


class _RealRun(Interpreter):
    """Describes what each operator gives as eager lays it out; fake tensors guess, by rules that are not all eager's."""

    def __init__(self, graph: fx.GraphModule, devices: Sequence[int]) -> None:
        super().__init__(graph)
        self._devices = devices

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_random(target):
            return drawn(target, args, kwargs, self._devices)
        return super().call_function(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function":
            n.meta["val"] = pytree.tree_map_only(torch.Tensor, Spec.of, result)
        return result


def _lay_out(graph: fx.GraphModule, tensors: Sequence[torch.Tensor]) -> None:
    """Run a functional graph once, for the strides of what its operators give; where one raises, the guesses stay."""
    plain = torch._C._DisableAutocast()  # the graph holds the casts
    with torch.no_grad(), plain, suppress(*_OF_OPERATORS):
        _RealRun(graph, cuda_devices(tensors)).run(*tensors)


_OF_OPERATORS = (RuntimeError, IndexError, ValueError, ZeroDivisionError)
"""What PyTorch's operators raise for arguments or numbers that they do not take."""


def _fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A fake with the layout of `tensor` and memory of its own, even where real tensors share theirs."""
    with mode:
        fake = torch.empty_strided(
            tensor.shape,
            tensor.stride(),
            dtype=tensor.dtype,
            device=tensor.device,
            requires_grad=tensor.requires_grad,
        )
    return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def _one_line(error: Exception) -> str:
    """`error` as the reason of a refusal."""
    if isinstance(error, _DATA_DEPENDENT):
        return f"forward depends on the values of a tensor ({error})"
    if isinstance(error, AssertionError) and "convert all Tensors to FakeTensors" in str(error):
        return "forward uses a tensor that is neither an input nor an attribute of a module"
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"[:_LONGEST_REASON].rstrip(": ")
