"""What capture runs in place of a model: flat tensors in, flat tensors out; and the model's Python kept honest."""

from __future__ import annotations

import contextlib
import operator
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from fusepass.capture.isolation import NotBeside, memory_of, unchanged_globals, untouched_globals
from fusepass.capture.snapshot import Snapshot
from fusepass.capture.twin import twin
from fusepass.errors import CaptureError
from fusepass.guards.tensors import Slot, put_tensor
from fusepass.structure import Template

MODEL = "model"
"""Name of the model inside the shim; the prefix of its submodules' names there."""

_OWN = tuple(f'File "{Path(__file__).with_name(name)}"' for name in ("shim.py", "capture.py"))


class Shim(nn.Module):
    """What is exported: flat tensors in, flat tensors out, the model inside.

    Attributes:
        states: the model's tensors as fakes, by names of this module's own; each once, parameters first.
        places: where these tensors are in the model, and which of them is there.
        guard: makes the context in which the model's own code runs, given the memory of `states` and inputs.
        outputs, aliases: of the last run, the form of the result, and for each tensor in it the indices of states
            and inputs whose memory it shares.
    """

    def __init__(self, model: nn.Module, call: Callable[..., Any], inputs: Template) -> None:
        super().__init__()
        self.model = model
        self.call = call
        self.inputs = inputs
        self.grad_mode = torch.is_grad_enabled()
        self.guard: Callable[[frozenset[int]], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self.states: dict[str, torch.Tensor] = {}
        self.places: list[tuple[Slot, int]] = []
        self.outputs: Template | None = None
        self.aliases: list[frozenset[int]] = []
        self._inference = torch.is_inference_mode_enabled()
        self._refused: str | None = None  # no exception, whose traceback would keep the model
        self._beside = False

    def stand_in(self) -> None:
        """Run a twin of the model from here on, if it has one: other threads shall not meet what tracing puts into it."""
        apart = twin(self.model) if getattr(self.call, "__self__", None) is self.model else None
        if apart is not None:
            self.call = types.MethodType(self.call.__func__, apart)  # type: ignore[attr-defined]
            self.model = apart

    def stand_beside(self) -> None:
        """Run a twin of the model from here on, with Python state of its own, while other threads call the model.

        Raises:
            NotBeside: it has none.
        """
        apart = twin(self.model, apart=True) if getattr(self.call, "__self__", None) is self.model else None
        if apart is None:
            raise NotBeside("a module of it has an attribute that may lead to other modules or tensors")
        self.call = types.MethodType(self.call.__func__, apart)  # type: ignore[attr-defined]
        self.model, self._beside = apart, True

    @contextlib.contextmanager
    def with_states(self) -> Iterator[None]:
        """While open, `states` are attributes of this module, as an export makes them."""
        vars(self).update(self.states)
        try:
            yield
        finally:
            for name in self.states:
                del vars(self)[name]

    @contextlib.contextmanager
    def _placed(self, states: Sequence[torch.Tensor]) -> Iterator[None]:
        """While open, these are the tensors of the model, whatever their names are: attributes of that name may be something else."""
        modules = list(self.model.modules())
        before = [(slot, put_tensor(modules[slot.index], slot.name, states[i])) for slot, i in self.places]
        try:
            yield
        finally:
            for slot, tensor in before:
                put_tensor(modules[slot.index], slot.name, tensor)

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, fake) for name, fake in self.states.items() if isinstance(fake, nn.Parameter))

    def named_buffers(self, *_: Any, **__: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, fake) for name, fake in self.states.items() if not isinstance(fake, nn.Parameter))

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self._refused is not None:
            raise CaptureError(self._refused, only_children=True)
        states = [getattr(self, name) for name in self.states]
        for name, state in zip(self.states, states, strict=True):
            if isinstance(self.states[name], nn.Parameter) and not isinstance(state, nn.Parameter):
                state._is_param = True  # what isinstance(state, nn.Parameter) asks
        with self._placed(states), torch.set_grad_enabled(self.grad_mode):
            memory = [memory_of(tensor) for tensor in (*states, *tensors)]
            result = self._run(tensors, frozenset(memory))
        outputs, self.outputs = Template.of(result)
        _check_outputs(outputs, self.outputs)
        memory = [memory_of(tensor) for tensor in (*states, *tensors)]
        self.aliases = [
            frozenset(index for index, place in enumerate(memory) if place == memory_of(output)) for output in outputs
        ]
        self._check_modes(outputs)
        return tuple(outputs)

    def _check_modes(self, outputs: Sequence[torch.Tensor]) -> None:
        """Decline results of a mode that forward enters, which a graph does not; later runs, as fakes tell nothing of it.

        Raises:
            CaptureError: there are some.
        """
        for output, aliases in zip(outputs, self.aliases, strict=True):
            if aliases or type(output) is not torch.Tensor:  # a view is as its base
                continue
            if output.requires_grad:
                self._refused = "forward returns a tensor that records gradients, although none are recorded around it"
            elif output.is_inference() != self._inference:
                self._refused = "forward returns a tensor of another inference mode than that around it"
            if self._refused is not None:
                raise CaptureError(self._refused, only_children=True)

    def _run(self, tensors: Sequence[torch.Tensor], given: frozenset[int]) -> Any:
        """The model's result; what it changed in Python is put back.

        Raises:
            CaptureError: it changed something.
        """
        inputs = self.inputs.fill(tensors)
        args, kwargs = inputs
        snapshot = Snapshot(self.model, around=not self._beside)
        try:
            with untouched_globals() if self._beside else unchanged_globals(), self.guard(given):
                result = self.call(*args, **kwargs)
        finally:
            changed = snapshot.undo_changes()
        if changed is not None:
            text = f"forward changes Python state: {changed.label}"
            raise CaptureError(text, only_children=not changed.followed)
        left, form = Template.of_call(args, kwargs)
        if not form.same_form(self.inputs) or not all(map(operator.is_, left, tensors)):
            raise CaptureError("forward changes a container among its inputs")
        return result


def _check_outputs(tensors: Sequence[torch.Tensor], form: Template) -> None:
    if form.opaque is not None:
        raise CaptureError(f"forward returns a {type(form.opaque).__name__}")
    if not tensors:
        raise CaptureError("forward returns no tensor")


def clean_metadata(graph: fx.Graph) -> None:
    """Take the shim out of what nodes say about where they come from."""
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if stack:
            node.meta["nn_module_stack"] = {
                key.removeprefix(f"{MODEL}."): (path.removeprefix(f"{MODEL}."), kind)
                for key, (path, kind) in stack.items()
                if key
            }
        frames = node.meta.get("stack_trace")
        if frames:
            parts = re.split(r"^(?=\s*File )", frames, flags=re.M)
            kept = [frame for frame in parts if not any(own in frame for own in _OWN)]
            node.meta["stack_trace"] = sys.intern("".join(kept))  # the same for each layer and each signature
