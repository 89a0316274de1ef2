"""A random model as the text of a script, and what can be made of it."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TypeVar

import torch
from torch import Tensor, nn

FORMS = ("tuple", "tuple", "tuple", "dict", "nested")

Name = TypeVar("Name", bound=Hashable)


@dataclass
class Model:
    """A drawn model.

    Attributes:
        inputs: how to make each input, as expressions.
        layers: constructor expressions of its submodules, by name.
        lines: the body of forward.
        results: the names that it returns.
        marks: statements about inputs, which follow them.
        form: of the result, one of `FORMS`.
    """

    dtype: torch.dtype
    seed: int
    training: bool
    channels_last: bool
    inputs: list[str] = field(default_factory=list)
    layers: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    marks: list[str] = field(default_factory=list)
    form: str = "tuple"

    @property
    def aliased(self) -> bool:
        """Whether inputs share memory."""
        return any("x0" in made for made in self.inputs)

    @property
    def coarsest(self) -> torch.dtype:
        """The type of the fewest digits that is named: what comes of it is no better."""
        spelled = {torch.bfloat16: ".bfloat16()", torch.float16: ".half()", torch.float32: ".float()"}
        named = [dtype for dtype, cast in spelled.items() if str(dtype) in self.text or cast in self.text]
        return named[0] if named else self.dtype

    @property
    def returned(self) -> str:
        """The result's expression."""
        listed = ", ".join(self.results)
        match self.form:
            case "dict":
                return "{" + ", ".join(f"'r{number}': {name}" for number, name in enumerate(self.results)) + "}"
            case "nested":
                return f"[{self.results[0]}, {{'all': ({listed},), 'number': 2, 'nothing': None}}]"
        return f"{listed},"

    @property
    def text(self) -> str:
        """A script that defines ``Model`` and ``inputs``."""
        names = ", ".join(f"x{i}" for i in range(len(self.inputs)))
        body = "\n".join(f"        {line}" for line in self.lines)
        layers = "\n".join(f"        self.{name} = {made}" for name, made in self.layers.items())
        values = "\n".join([*(f"x{i} = {made}" for i, made in enumerate(self.inputs)), *self.marks])
        return (
            f"import torch, torch.nn.functional as F\nfrom torch import nn\n\n\nclass Model(nn.Module):\n"
            f"    def __init__(self):\n        super().__init__()\n{layers}\n\n    def forward(self, {names}):\n{body}\n"
            f"        return {self.returned}\n\n\ntorch.default_generator.manual_seed({self.seed})\n"
            f"model = Model().to({self.dtype}).train({self.training})\n{values}\ninputs = ({names},)\n"
        )

    def make(self, device: str = "cpu") -> tuple[nn.Module, tuple[Tensor, ...]]:
        """The module and its inputs; the same numbers each time and on every device."""
        scope = vars(sys.modules.setdefault("drawn", ModuleType("drawn")))  # Dynamo asks for the module of a class
        exec(compile(self.text, "<drawn>", "exec"), scope)
        model: nn.Module = scope["model"]
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "weight" in name:  # tell channels apart
                parameter.data += torch.linspace(-0.3, 0.3, parameter.numel()).to(parameter.dtype)
            if parameter.dim() == 4 and self.channels_last:
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        inputs = copies(dict(enumerate(scope["inputs"])), device)
        return model.to(device), tuple(inputs.values())

    def __repr__(self) -> str:
        return f"\n{self.text}"


def copies(values: Mapping[Name, Tensor], device: str = "cpu") -> dict[Name, Tensor]:
    """Copies with the same strides, which share memory with each other where the originals do."""
    storages: dict[int, Tensor] = {}
    made = {}
    for name, value in values.items():
        base = torch.empty(0, dtype=value.dtype, device=value.device).set_(value.untyped_storage())  # type: ignore[call-overload]
        copy = storages.setdefault(value.untyped_storage()._cdata, base.clone().to(device))
        made[name] = copy.as_strided(value.shape, value.stride(), value.storage_offset())
    return made
