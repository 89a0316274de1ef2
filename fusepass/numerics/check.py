"""A check of a model against the numeric policy (`fusepass.numerics.comparison`): runs in float64, everything observed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fusepass.numerics.comparison import Comparison, compare

__all__ = [
    "Comparison",
    "check",
    "compare",
    "exact",
    "in_float64",
    "nudged",
    "nudged_results",
    "observe",
    "reference",
    "settled",
]

_NUDGED_RUNS = 3


def check(model: nn.Module, candidate: Callable[..., Any], inputs: Sequence[Any]) -> Comparison:
    """Runs `candidate`, `model`, and `model` in float64; compares outputs, buffers and inputs after the call.

    `candidate` is an optimised module or any callable that stands for `model`. Buffers are put back as they
    were, so running statistics do not move, and all three runs see the same random numbers. Gradients are
    off.

    Where a result is ill-conditioned (a normalisation of five nearly equal numbers, say), one eager run may be right by luck. So before
    a value counts as wrong it is held to the error of eager on inputs and parameters that differ by one rounding, as do
    results of casts to narrower types, which autocast makes, too.
    """
    oracle = exact(model, inputs)
    actual = observe(candidate, inputs, state=model)
    comparison = compare(actual, observe(copy.deepcopy(model), inputs), oracle)
    return settled(comparison, actual, nudged_results(model, inputs, observe), oracle)


def settled(comparison: Comparison, actual: Any, others: Iterable[Any], oracle: Any) -> Comparison:
    """`comparison` with what it rejects held to `others` as well: results of eager for inputs that differ by one rounding."""
    for other in others if not comparison.ok else ():
        leaves = zip(comparison.leaves, compare(actual, other, oracle).leaves, strict=True)
        comparison = Comparison(tuple(again if leaf.problem and not again.problem else leaf for leaf, again in leaves))
        if comparison.ok:
            break
    return comparison


def nudged_results(
    model: nn.Module, inputs: Sequence[Any], results: Callable[[nn.Module, Sequence[Any]], Any]
) -> Iterator[Any]:
    """What `results` gives for copies of both in which every floating-point number, and what is cast to fewer digits, is one rounding off."""
    for seed in range(_NUDGED_RUNS):
        generator = torch.Generator().manual_seed(seed)
        others = _nudged(model, inputs, generator)
        with _NudgedCasts(generator):
            yield results(*others)


class _NudgedCasts(TorchDispatchMode):
    """What is cast to a floating-point type of fewer digits is one rounding of that type off."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and _narrower(args[0].dtype, result.dtype):
            return nudged(result, self._generator)
        return result


def _narrower(dtype: torch.dtype, other: torch.dtype) -> bool:
    both = dtype.is_floating_point and other.is_floating_point
    return both and torch.finfo(other).eps > torch.finfo(dtype).eps


def _nudged(model: nn.Module, inputs: Sequence[Any], generator: torch.Generator) -> tuple[nn.Module, tuple[Any, ...]]:
    """Copies of both in which every floating-point number is one rounding off."""
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        parameter.data = nudged(parameter.data, generator)
    return copied, pytree.tree_map_only(Tensor, lambda tensor: nudged(tensor.detach(), generator), tuple(inputs))


def nudged(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """A copy of `tensor` in which every floating-point number is about one rounding off, up or down at random.

    What is one number in memory, as in an expanded tensor, stays one.
    """
    if not tensor.is_floating_point():
        return tensor
    step = torch.finfo(tensor.dtype).eps
    held = tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]
    up = torch.rand(held.shape, generator=generator, device=generator.device).to(tensor.device) < 0.5
    return (
        torch.empty_like(held).copy_(held * torch.where(up, 1 + step, 1 - step).to(tensor.dtype)).expand(tensor.shape)
    )


def reference(model: nn.Module, inputs: Sequence[Any]) -> Any:
    """What `model(*inputs)` gives in float64, on the same device and with the same training flags."""
    return exact(model, inputs)["output"]


def exact(
    model: nn.Module, inputs: Sequence[Any], mode: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> dict[str, Any]:
    """Everything that `model(*inputs)` does in float64, under `mode`.

    What forward makes of integers (`x.tanh()`) has the default type, and becomes float64 where it may not meet another type.
    """
    wide = in_float64(model, inputs)
    try:
        with mode():
            return observe(*wide)
    except RuntimeError:
        with _default_type(torch.float64), mode():
            return observe(*wide)


@contextmanager
def _default_type(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def in_float64(model: nn.Module, inputs: Sequence[Any]) -> tuple[nn.Module, tuple[Any, ...]]:
    """Copies of both: parameters, buffers, tensor attributes and inputs widened to float64 or complex128.

    Integers stay, and so does what `forward` itself creates, such as a 0-dimensional CPU tensor.
    """
    wide = copy.deepcopy(model)
    for parameter in wide.parameters():
        parameter.data = _widen(parameter.data)
    for module in wide.modules():
        for owner in (module._buffers, vars(module)):
            owner.update({name: _widen(value) for name, value in owner.items() if isinstance(value, Tensor)})
    return wide, pytree.tree_map_only(Tensor, lambda tensor: _widen(tensor.detach()), tuple(inputs))


def observe(call: Callable[..., Any], inputs: Sequence[Any], state: nn.Module | None = None) -> dict[str, Any]:
    """Everything that `call(*inputs)` does: its output, the inputs after it, and the buffers after it.

    Buffers are those of `call`, or of `state` where `call` is no module; they are restored. `inputs` are
    copied.
    """
    owner = call if isinstance(call, nn.Module) else nn.Module() if state is None else state
    # A forward may write a buffer, or put another tensor in its place.
    kept = [(module._buffers, dict(module._buffers)) for module in owner.modules()]
    before = [(buffer, buffer.detach().clone()) for buffer in owner.buffers()]
    arguments = copy.deepcopy(pytree.tree_map_only(Tensor, Tensor.detach, tuple(inputs)))
    with torch.no_grad(), torch.random.fork_rng(range(torch.cuda.device_count())):
        output = call(*arguments)
        after = {name.removeprefix("_orig_mod."): buffer.clone() for name, buffer in owner.named_buffers()}
        for buffers, entries in kept:
            buffers.clear()
            buffers.update(entries)
        for buffer, values in before:
            buffer.copy_(values)
    return {"output": output, "inputs": arguments, "buffers": after}


def _widen(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor
