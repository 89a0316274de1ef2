"""A case of the black-box suites: a line of PyTorch, what it is given, and the model that both make."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Table = Mapping[str, Sequence[str]]
"""Inputs, and the lines that take them as ``a``, ``b``...; behind ``@`` the layer ``m``, if there is one."""

RANDOM = ("rand", "dropout", "bernoulli", "multinomial")
"""Words of cases whose numbers float64 would draw differently."""


@dataclass(frozen=True)
class Case:
    """One model.

    Attributes:
        group: the table that it is from.
        given: expressions of its inputs, and of a layer behind ``@``.
        body: an expression, or statements that end in a return.
        dtype: of the inputs that `r` draws, and of the layer.
    """

    group: str
    given: str
    body: str
    dtype: torch.dtype = torch.float32

    @property
    def name(self) -> str:
        return f"{self.group}: {self.body}  <-  {self.given} [{str(self.dtype).removeprefix('torch.')}]"

    @property
    def is_random(self) -> bool:
        return any(word in self.body or word.title() in self.given for word in RANDOM)

    @property
    def writes(self) -> bool:
        """Whether an input may be written, which autograd forbids of a leaf."""
        return "_(" in self.body or "] =" in self.body or "= " in self.body or "inplace" in self.given

    def make(self) -> tuple[nn.Module, tuple[Any, ...]]:
        """The module and its inputs; the same numbers each time."""
        torch.manual_seed(len(self.given))
        values, _, layer = self.given.partition(" @ ")
        scope = vars(
            sys.modules.setdefault("blackbox", ModuleType("blackbox"))
        )  # Dynamo asks for the module of a class
        scope |= {"torch": torch, "nn": nn, "F": F, "aten": torch.ops.aten}
        inputs = eval(f"({values},)", scope | _makers(self.dtype))
        names = ", ".join("abcdefg"[: len(inputs)])
        lines = self.body.split("; ") if "return " in self.body else [f"return {self.body}"]
        body = "\n".join(f"        {line}" for line in ["m = self.m", *lines])
        text = f"class Model(nn.Module):\n    def forward(self, {names}):\n{body}\n"
        exec(compile(text, "<blackbox>", "exec"), scope)
        model: nn.Module = scope["Model"]()
        model.m = eval(layer, scope) if layer else None
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "weight" in name:  # tell channels apart
                parameter.data += torch.linspace(-0.3, 0.3, parameter.numel())
        return model.to(self.dtype), inputs


def _makers(dtype: torch.dtype) -> dict[str, Any]:
    """What inputs are drawn with: `r` normal, `p` positive, `u` in (-1, 1), `i` whole numbers, `k` places below a number, `b` truths."""
    return {
        "r": lambda *shape: torch.randn(shape).to(dtype),
        "p": lambda *shape: (torch.rand(shape) + 0.1).to(dtype),
        "u": lambda *shape: (torch.rand(shape) * 1.8 - 0.9).to(dtype),
        "i": lambda *shape, to=torch.int64: torch.randint(-9, 10, shape).to(to),
        "k": lambda below, *shape: torch.randint(0, below, shape),
        "b": lambda *shape: torch.rand(shape) < 0.5,
        "cl": lambda tensor: tensor.contiguous(memory_format=torch.channels_last),
        "odd": lambda: torch.tensor(
            [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.5, 1e-40, 1e4, -6e4, torch.inf, -torch.inf, torch.nan]
        ).to(dtype),
    }


def cases(group: str, table: Table, dtypes: Sequence[torch.dtype] = (torch.float32,)) -> Iterator[Case]:
    """Every line of `table` in each type."""
    for given, bodies in table.items():
        for body in bodies:
            for dtype in dtypes:
                yield Case(group, given, body, dtype)
