"""The module that an artifact becomes: it finds the signature of a call, compares tensors and modes, and runs its graph."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd import forward_ad

from fusepass import measure
from fusepass.artifact.call import Expected, call_text, template_of, template_text
from fusepass.artifact.versions import autocast
from fusepass.errors import ArtifactError
from fusepass.runtime.memory import overlaps_written, tensor_guards
from fusepass.runtime.modes import function_modes, obstacle
from fusepass.structure import Template

MISSED: Any = object()
_frames: Any = torch._C._dynamo.eval_frame
_SKIP = _frames._FrameAction.SKIP
_MOST_TOLD = 3  # signatures that the text of an error describes
_MOST_FURTHER = 512  # signatures of sizes that were not saved; the oldest one is forgotten

Place = tuple[dict[str, Any], str]
"""Where a tensor of the model is kept: a dict and a key."""


_Shapes = tuple[Sequence[int] | None, ...]
"""Of the tensors of a call."""

Further = Callable[[Sequence[torch.Tensor], Template, tuple[Any, ...], dict[str, Any]], "Signature | str | None"]
"""Gives what serves a call in sizes that were not saved; why there is nothing, or None where it is another call: `fusepass.artifact.dynamic`."""


class LoadedModule(nn.Module):
    """A model that `fusepass.load` read: it is called as the original was, with inputs like those that it was saved for.

    It has the original's parameters and buffers under their names, so ``load_state_dict`` works; none asks for gradients.
    """

    def __init__(self, model: str) -> None:
        super().__init__()
        self._model = model
        self._signatures: list[Signature] = []
        self._of_shapes: dict[_Shapes, list[Signature]] = {}
        self._served: dict[_Shapes, list[Signature]] = {}
        self._further: list[Further] = []
        self._added: deque[Signature] = deque()
        self._plain: dict[str, Any] = {}
        self._report = ""
        self.training = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original's result. `torch.compile` of a model around it leaves it as it is.

        Raises:
            ValueError: the inputs are like none that it was saved for; the text says what differs.
            ArtifactError: it cannot run here: gradients are asked for, a mode is active, or a parameter was replaced by one
                of another kind.
        """
        if not kwargs:
            for signature in self._served.get(_shapes(args), ()):
                result = signature.serve(args)
                if result is not MISSED:
                    return result
        tensors, inputs = Template.of_call(args, kwargs)
        self._refuse([*tensors, *self.parameters()])
        for signature in self._of_shapes.get(_sorted(tensors), ()):
            fitting = signature.fitting(tensors, inputs, args, kwargs)
            if fitting is not None:
                result = signature.run_checked(fitting)
                if not kwargs and signature not in (served := self._served.setdefault(_shapes(args), [])):
                    served.append(signature)
                return result
        for further in self._further:
            made = further(tensors, inputs, args, kwargs)
            if isinstance(made, Signature) and (fitting := made.fitting(tensors, inputs, args, kwargs)) is not None:
                result = made.run_checked(fitting)
                self._add_further(made)
                return result
        self._misfit(tensors, inputs, args, kwargs)

    # As torch.compiler.disable, which imports Dynamo: forward is part of no graph, and none is made of it or what it calls.
    forward._torchdynamo_disable = True  # type: ignore[attr-defined]
    _frames.set_code_exec_strategy(forward.__code__, _frames._FrameExecStrategy(_SKIP, _SKIP))

    def _add(self, signature: Signature) -> None:
        """Serve the calls of `signature`, too."""
        self._signatures.append(signature)
        self._of_shapes.setdefault(signature.shapes, []).append(signature)

    def _add_further(self, signature: Signature) -> None:
        """Serve the calls of a `signature` of sizes that were not saved, too, until there are many newer ones."""
        self._of_shapes.setdefault(signature.shapes, []).append(signature)
        self._added.append(signature)
        if len(self._added) > _MOST_FURTHER:
            oldest = self._added.popleft()
            for known in (self._of_shapes, self._served):
                for shapes, signatures in [*known.items()]:
                    known[shapes] = [each for each in signatures if each is not oldest]

    def made_up(self) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Arguments for a call of each signature: whole numbers are zeros, so that they are valid indices."""
        return [signature.made_up() for signature in self._signatures]

    def report(self) -> str:
        """What was fused when it was saved, as text."""
        return self._report

    def extra_repr(self) -> str:
        count = len(self._signatures)
        return f"{self._model}, {count} signature{'s' if count > 1 else ''}"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a loaded artifact is neither copied nor pickled: load its file again")

    def _refuse(self, tensors: Sequence[torch.Tensor]) -> None:
        reason = obstacle(tensors)
        if reason is not None:
            raise ArtifactError(
                f"{self._model} was loaded from an artifact, which runs compiled kernels alone: {reason}"
            )
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            raise ArtifactError(
                f"{self._model} was loaded from an artifact, which computes no gradients: call it under torch.no_grad()"
            )

    def _misfit(
        self, tensors: Sequence[torch.Tensor], inputs: Template, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> NoReturn:
        for further in self._further:
            problem = further(tensors, inputs, args, kwargs)
            if isinstance(problem, str):
                raise ValueError(
                    f"{self._model} was not saved for such sizes: {problem}. Save it with an example like this one"
                )
        wanted: dict[str, list[str]] = {}
        alike = [each for each in self._signatures if each.takes(tensors, inputs, args, kwargs)]
        for each in alike or self._signatures:
            found, needed = each.problem(tensors, inputs, args, kwargs)
            wanted.setdefault(found, []).append(needed)
        told = "; ".join(f"{found}, not {_either(needed)}" for found, needed in wanted.items())
        raise ValueError(f"{self._model} was not saved for such a call: {told}. Save it with an example like this one")


class Signature:
    """One call that an artifact serves.

    Args:
        data: as the manifest has it.
        make: makes its graph, at its first call: a file for many sizes is loaded as soon as one for few.
        states: how the model's tensors that it takes lie, and where they are kept.
        device: gives the device to use in place of one by name.
    """

    def __init__(
        self,
        data: Mapping[str, Any],
        make: Callable[[], Callable[..., tuple[Any, ...]]],
        states: Sequence[tuple[Expected, Place]],
        device: Callable[[str], torch.device],
    ) -> None:
        self._inputs = template_of(data["inputs"], device)
        self._outputs = template_of(data["outputs"], device)
        self._expected = tuple(Expected.read(each, device) for each in data["tensors"])
        self._parameters: tuple[str, ...] = tuple(data["parameters"])
        self._states = tuple(states)
        self._make = make
        self._call: Callable[..., tuple[Any, ...]] | None = None
        self._making = threading.Lock()
        self._written: Collection[int] = frozenset(data["written"])
        self._autocast: dict[str, Any] = data["autocast"]
        self._arity = data["arity"]
        self._fit: Any = None

    @property
    def shapes(self) -> _Shapes:
        """Those of its tensors, in the order of `_sorted`."""
        return tuple(sorted(each.meta.shape for each in self._expected))

    def serve(self, args: tuple[Any, ...]) -> Any:
        """The result for these positional arguments, or `MISSED` where more than a look at the tensors is needed."""
        if self._fit is None or len(args) != self._arity or function_modes() or forward_ad._current_level >= 0:
            return MISSED
        arguments: tuple[Any, ...] = (*(entries.get(name) for _, (entries, name) in self._states), *args)
        return self._run(arguments) if self._fit(*arguments) else MISSED

    def prepare(self) -> Callable[..., tuple[Any, ...]]:
        """The graph, which is made if it is not yet."""
        with self._making:
            if self._call is None:
                self._call = self._make()
                del self._make  # which may hold tensors
            return self._call

    def fitting(
        self, tensors: Sequence[torch.Tensor], inputs: Template, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Sequence[torch.Tensor] | None:
        """The input tensors in the order of the graph's, if this serves them."""
        found = self.arranged(tensors, inputs, args, kwargs)
        if found is None or autocast() != self._autocast:
            return None
        return found if all(each.fits(tensor) for each, tensor in zip(self._expected, found, strict=True)) else None

    def made_up(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments for a call that this serves."""
        tensors = []
        for each in self._expected:
            meta = each.meta
            like = torch.empty_strided(meta.shape, meta.strides, dtype=meta.dtype, device="meta")
            (tensor,) = measure.made_up([like], each.device)
            tensors.append(tensor if meta.dtype.is_floating_point else tensor.zero_())
        call: tuple[tuple[Any, ...], dict[str, Any]] = self._inputs.fill(tensors)
        return call

    def run_checked(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The result for what `fitting` gave; calls like it need but a look at the tensors from now on."""
        states: list[Any] = [entries.get(name) for _, (entries, name) in self._states]
        for (expected, _), tensor in zip(self._states, states, strict=True):
            if not isinstance(tensor, torch.Tensor) or not expected.fits(tensor):
                known = isinstance(tensor, torch.Tensor)
                told = ", not ".join(expected.problem(tensor)) if known else f"{expected.name} is no tensor"
                raise ArtifactError(
                    f"{told}; an artifact stays as it is: load it again, with device= for another device"
                )
        arguments = (*states, *tensors)
        result = self._run(arguments)
        self._fit = tensor_guards(arguments).check if arguments else None
        return result

    def takes(
        self, tensors: Sequence[torch.Tensor], inputs: Template, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Whether the call is as this one but for how its tensors lie."""
        return self.arranged(tensors, inputs, args, kwargs) is not None

    def problem(
        self, tensors: Sequence[torch.Tensor], inputs: Template, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[str, str]:
        """Why a call does not fit: what it has, and what was to be there."""
        found = self.arranged(tensors, inputs, args, kwargs)
        if found is None:
            called = call_text(args, kwargs, self._parameters)
            return f"it is called as {called}", template_text(self._inputs, self._parameters)
        for each, tensor in zip(self._expected, found, strict=True):
            if not each.fits(tensor):
                return each.problem(tensor)
        return f"autocast is {_told(autocast())}", _told(self._autocast)

    def arranged(
        self, tensors: Sequence[torch.Tensor], inputs: Template, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Sequence[torch.Tensor] | None:
        """The input tensors as the example has them, by position or by name; None where nesting or constants differ."""
        if self._inputs.same_form(inputs):
            return tensors
        given = dict(zip(self._parameters, args, strict=False))
        if len(args) > len(self._parameters) or given.keys() & kwargs.keys():
            return None
        given |= kwargs
        expected_args, expected_kwargs = self._inputs.structure.unflatten(self._inputs.leaves)
        names = [*self._parameters[: len(expected_args)], *expected_kwargs]
        if set(names) != given.keys() or len(names) != len(expected_args) + len(expected_kwargs):
            return None
        called = tuple(given[name] for name in names[: len(expected_args)]), {n: given[n] for n in expected_kwargs}
        found, form = Template.of_call(*called)
        return found if self._inputs.same_form(form) else None

    def _run(self, arguments: Sequence[torch.Tensor]) -> Any:
        call = self._call or self.prepare()
        if self._written:
            starts = [argument.data_ptr() for argument in arguments]
            sizes = [measure.extent(argument) * argument.dtype.itemsize for argument in arguments]
            if overlaps_written(starts, sizes, self._written):
                raise ArtifactError("memory that the model writes is shared by two tensors of the call; pass copies")
        if torch._C._is_any_autocast_enabled():  # the graph holds the casts
            with torch._C._DisableAutocast():
                return self._outputs.fill(call(*arguments))
        return self._outputs.fill(call(*arguments))


def _shapes(args: tuple[Any, ...]) -> _Shapes:
    """Those of the arguments, by which signatures for many sizes are told apart at once; None for what is no tensor."""
    return tuple([each.shape if isinstance(each, torch.Tensor) else None for each in args])


def _sorted(tensors: Sequence[torch.Tensor]) -> _Shapes:
    """Those of the tensors in some order that does not depend on whether they came by position or by name."""
    return tuple(sorted([each.shape for each in tensors]))


def _told(autocast: Mapping[str, Any]) -> str:
    return ", ".join(f"{device} {dtype}" for device, dtype in autocast.items()) or "off"


def _either(texts: Sequence[str]) -> str:
    few = list(dict.fromkeys(texts))
    return " or ".join(few[:_MOST_TOLD]) + (
        f" or one of {len(few) - _MOST_TOLD} others" if len(few) > _MOST_TOLD else ""
    )
