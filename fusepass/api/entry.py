"""`optimize` and `explain` behind the light import: checks what users pass, and says what to pass instead."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fusepass import background
from fusepass.api.module import OptimizedModule, optimized
from fusepass.capture.trace import CaptureFailure
from fusepass.config import override
from fusepass.dispatch.specialise import Specialiser
from fusepass.report.report import Report
from fusepass.structure import Template
from fusepass.supported import check_versions

_ADVICE = "pass a tuple of positional arguments, a dict of keyword arguments, or one tensor"


def optimize(model: nn.Module, example_inputs: Any, options: Mapping[str, Any]) -> OptimizedModule:
    """See `fusepass.optimize`."""
    check_versions()
    original = module_of(model, "optimize")
    with override(**options) as config:  # says what is wrong with them
        if config.compile == "background":
            background.prepare()
    optimised = optimized(original, options)
    if example_inputs is not None:
        args, kwargs = arguments_of(example_inputs)
        _prepare(optimised._specialiser, original, args, kwargs)
    return optimised


def explain(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Report:
    """See `fusepass.explain`."""
    check_versions()
    original = module_of(model, "explain")
    specialiser = Specialiser(original, {})
    traced = _prepare(specialiser, original, args, kwargs)
    trial = None if traced else _copy(specialiser, original)
    if trial is not None:
        specialiser = Specialiser(trial, {})
        with torch.no_grad(), torch.random.fork_rng():
            specialiser(*_copied_inputs(args, kwargs))
    return specialiser.report()


def module_of(model: object, function: str) -> nn.Module:
    """The module that `function` is to work on.

    Raises:
        TypeError: `model` is none; the text says what to pass instead.
    """
    if isinstance(model, OptimizedModule):
        return model.original
    if isinstance(model, nn.Module):
        return model
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise TypeError(f"fusepass.{function} takes an instance of {model.__name__}, not the class; call it first")
    raise TypeError(f"fusepass.{function} takes a torch.nn.Module, not a {type(model).__name__}; {_instead(model)}")


def _instead(other: object) -> str:
    """What to pass in place of something that is no module."""
    if callable(getattr(other, "module", None)):  # as torch.export's programs have
        return "pass its .module()"
    if isinstance(getattr(other, "__self__", None), nn.Module):
        return "pass the module that it is a method of"
    if isinstance(other, list | tuple):
        return "put several into one, such as torch.nn.Sequential"
    return "put a function into the forward method of a module"


def arguments_of(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of the call that `example_inputs` stands for.

    Raises:
        TypeError: it stands for none.
    """
    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, tuple):
        return example_inputs, {}
    if isinstance(example_inputs, dict) and all(isinstance(name, str) for name in example_inputs):
        return (), example_inputs
    raise TypeError(f"example_inputs is a {type(example_inputs).__name__}; {_ADVICE}")


def _prepare(specialiser: Specialiser, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Specialise for a call without gradients, and say whether that was possible.

    Raises:
        ValueError: the model itself rejects the inputs.
    """
    made = specialiser.prepare(args, kwargs)
    if not isinstance(made, CaptureFailure):
        return True
    trial = _copy(specialiser, model) if made.error is not None else None
    if trial is not None:
        args, kwargs = _copied_inputs(args, kwargs)
        try:
            with torch.no_grad(), torch.random.fork_rng():
                trial(*args, **kwargs)
        except Exception as error:
            raise ValueError(
                f"{type(model).__name__} rejects these inputs with {type(error).__name__}: {error}; {_ADVICE}, "
                "as a call of the model takes them"
            ) from error
    specialiser.refuse("trace", made.reason)
    return False


def _copied_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    tensors, form = Template.of_call(args, kwargs)
    copied: tuple[tuple[Any, ...], dict[str, Any]] = form.fill([tensor.detach().clone() for tensor in tensors])
    return copied


def _copy(specialiser: Specialiser, model: nn.Module) -> nn.Module | None:
    """A copy of `model` to try something with; None where it cannot be copied, which the report of `specialiser` says then."""
    try:
        return copy.deepcopy(model)
    except Exception as error:  # a user's __deepcopy__, or an attribute such as a lock
        text = next(iter(str(error).splitlines()), "")
        specialiser.refuse("copy", f"it cannot be copied for a trial call, {type(error).__name__}: {text}")
        return None
