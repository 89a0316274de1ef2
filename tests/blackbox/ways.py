"""The three ways in which a case is run, and what is wrong with one: optimised, compiled, compiled with backward."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fusepass
from fusepass.config import override
from fusepass.errors import FusepassWarning
from fusepass.numerics.check import Comparison, check, compare, observe
from fusepass.training.backend import Backend
from tests.blackbox.case import Case
from tests.fuzz.chunk import sharing

WAYS = ("optimize", "compile", "backward")

Layout = list[tuple[Any, ...]]
FAULTS = ("internal error", "bug")
"""Words of warnings that tell of a fault of fusepass, not of a limit."""


class Plain(nn.Module):
    """Calls what it is given, and gives the results without their strides, which `seen` keeps."""

    def __init__(self, module: nn.Module, call: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.module = module
        self.calls = (call,)  # in a tuple, it is no submodule
        self.seen: Layout = []

    def forward(self, *inputs: Any) -> Any:
        with torch.no_grad():
            return self.laid(self.run(*inputs))

    def run(self, *inputs: Any) -> Any:
        """What is called, whatever it is."""
        (call,) = self.calls
        return (self.module if call is None else call)(*inputs)

    def laid(self, results: Any) -> Any:
        """`results` by themselves and contiguous."""
        leaves = pytree.tree_leaves(results)
        self.seen = [_layout(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        return pytree.tree_map_only(
            Tensor, lambda leaf: leaf.detach().clone(memory_format=torch.contiguous_format), results
        )


class Step(Plain):
    """Results, and the gradients of inputs and parameters of a sum of them weighted at random.

    Args:
        module: what is trained.
        call: what runs instead of it, with the same parameters.
        writes: inputs may be written, and are given as results of another operator.
        wanted: which of the floating-point inputs have gradients, by their places among these; all, if it is None.
    """

    def __init__(
        self,
        module: nn.Module,
        call: Callable[..., Any] | None = None,
        *,
        writes: bool = False,
        wanted: Sequence[int] | None = None,
    ) -> None:
        super().__init__(module, call)
        self.writes, self.wanted = writes, wanted

    def forward(self, *inputs: Any) -> Any:
        leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        wanted = range(len(leaves)) if self.wanted is None else self.wanted
        given = [leaf.detach() for leaf in leaves]
        asked = [given[number].requires_grad_() for number in wanted if number < len(given)]
        with torch.enable_grad():
            places = {id(leaf): self._passed(value) for leaf, value in zip(leaves, given, strict=True)}
            arguments = pytree.tree_map_only(Tensor, lambda leaf: places.get(id(leaf), leaf), inputs)
            results = self.run(*arguments)
            asked += [parameter for parameter in self.module.parameters() if parameter.requires_grad]
            roots = [each for each in pytree.tree_leaves(results) if isinstance(each, Tensor) and each.requires_grad]
            chance = torch.Generator().manual_seed(5)
            weights = [torch.randn(root.shape, generator=chance).to(root) for root in roots]
            found = torch.autograd.grad(roots, asked, weights, allow_unused=True) if roots and asked else ()
        gradients = [
            torch.zeros_like(leaf) if gradient is None else gradient.detach()
            for leaf, gradient in zip(asked, found, strict=bool(found))
        ]
        with torch.no_grad():
            plain = pytree.tree_map_only(Tensor, lambda each: each.contiguous(), gradients)
            return {"results": self.laid(results), "gradients": plain}

    def _passed(self, value: Tensor) -> Tensor:
        return value.clone() if self.writes and value.requires_grad else value


def problem(case: Case, way: str) -> str:
    """What is wrong with `case`; empty where nothing is. A first word in brackets says that PyTorch's own tracing fails as well."""
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as told, override(tune="off"):
        warnings.simplefilter("always")
        found = _optimised(case) if way == "optimize" else _compiled(case, backward=way == "backward")
    faults = [
        str(each.message)
        for each in told
        if issubclass(each.category, FusepassWarning) and any(word in str(each.message) for word in FAULTS)
    ]
    return found or (f"warns: {faults[0][:300]}" if faults else "")


def _optimised(case: Case) -> str:
    module, inputs = case.make()
    expected = _raised(copy.deepcopy(module), inputs)
    made = fusepass.optimize(module)
    if (raised := _raised(made, inputs, module)) or expected:
        return _same_error(raised, expected)
    for number in ("first", "second"):  # the second may take a shorter way
        outcome = _checked(case, module, made, inputs)
        if not outcome.ok:
            return f"{number} call: {outcome.explain()}"
    eager, actual = (sharing(call, module, inputs) for call in (module, made))
    return "" if eager == actual else f"memory is shared otherwise: {actual} instead of {eager}"


def _compiled(case: Case, *, backward: bool) -> str:
    module, inputs = case.make()

    def wrapped(call: Callable[..., Any] | None = None) -> Plain:
        return Step(module, call, writes=case.writes) if backward else Plain(module, call)

    eager = wrapped()
    expected = _raised(copy.deepcopy(eager), inputs)
    ours = wrapped(torch.compile(module, backend=Backend("graph", {"tune": "off"}), dynamic=False))
    raised = _raised(ours, inputs)
    traced = wrapped(torch.compile(copy.deepcopy(module), backend="aot_eager", dynamic=False))
    if raised or expected:
        also = _raised(traced, inputs)
        found = _same_error(raised, expected)
        return f"[as aot_eager] {found}" if found and _same_error(raised, also) == "" else found
    outcome = _checked(case, eager, ours, inputs)
    if not outcome.ok:
        found = outcome.explain()
        if _raised(traced, inputs) or not _checked(case, eager, traced, inputs).ok:
            return f"[as aot_eager] {found}"
        return found
    if _raised(traced, inputs) is None and ours.seen != traced.seen:
        return f"layout {ours.seen} instead of {traced.seen}"
    return ""


def _checked(case: Case, module: nn.Module, candidate: Any, inputs: Sequence[Any]) -> Comparison:
    if not case.is_random:
        return check(module, candidate, inputs)
    actual, eager = observe(candidate, inputs, state=module), observe(module, inputs)
    return compare(actual, eager, pytree.tree_map_only(Tensor, _wide, eager))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _raised(call: Callable[..., Any], inputs: Sequence[Any], state: nn.Module | None = None) -> Exception | None:
    try:
        observe(call, inputs, state=state)
    except Exception as error:  # whatever it is
        return error
    return None


def _same_error(raised: Exception | None, expected: Exception | None) -> str:
    """What eager has no kernel for may be generated; Dynamo wraps what it meets while it traces in a type of its own."""
    if type(raised) is type(expected) or (raised is None and isinstance(expected, NotImplementedError)):
        return ""
    if raised is not None and expected is not None and isinstance(raised, torch._dynamo.exc.TorchDynamoException):
        return ""
    told = f"raises {type(raised).__name__}: {str(raised)[:300]}" if raised is not None else "raises nothing"
    return told if expected is None else f"{told} where eager raises {type(expected).__name__}: {str(expected)[:200]}"


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    """Type, shape, and the strides that address memory."""
    if not tensor.numel() or tensor.layout is not torch.strided:
        return tensor.dtype, tuple(tensor.shape), ()
    strides = tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    return tensor.dtype, tuple(tensor.shape), strides
