"""What a call of an artifact looks like: how its arguments are nested, which constants are among them, how its tensors lie."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fusepass.codegen.plain import decode, encode
from fusepass.errors import ArtifactError
from fusepass.runtime.memory import unusual
from fusepass.runtime.meta import Meta
from fusepass.structure import Structure, Template, is_plain, plain_key


@dataclass(frozen=True)
class Expected:
    """How a tensor lies, and what it is called."""

    name: str
    meta: Meta
    device: torch.device

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Expected:
        return cls(name, Meta.of(tensor), tensor.device)

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is like this, and plain elements in memory."""
        return Meta.of(tensor) == self.meta and tensor.device == self.device and unusual(tensor) is None

    def like(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is like this but for its sizes and strides."""
        kind = tensor.dtype, tensor.dim(), tensor.device
        return kind == (self.meta.dtype, len(self.meta.shape), self.device)

    def problem(self, tensor: torch.Tensor) -> tuple[str, str]:
        """Why `tensor` does not fit: what it is, and what it was to be."""
        found, wanted = _described(Meta.of(tensor), tensor.device), _described(self.meta, self.device)
        return f"{self.name} is {found}{f' ({unusual(tensor)})' if found == wanted else ''}", wanted

    def data(self) -> list[Any]:
        """As JSON holds it."""
        shape, strides = list(self.meta.shape), list(self.meta.strides)
        return [self.name, shape, strides, encode(self.meta.dtype), str(self.device)]

    @classmethod
    def read(cls, data: Sequence[Any], device: Callable[[str], torch.device]) -> Expected:
        """What `data` gave; `device` gives the device to use in place of one by name."""
        name, shape, strides, dtype, where = data
        return cls(name, Meta(tuple(shape), tuple(strides), decode(dtype)), device(where))


def _described(meta: Meta, device: torch.device) -> str:
    dtype = str(meta.dtype).removeprefix("torch.")
    return f"{dtype}{list(meta.shape)} with strides {meta.strides} on {device}"


class _Tensor:
    """Stands for a tensor in what is told of a call."""


def call_text(args: tuple[Any, ...], kwargs: Mapping[str, Any], parameters: Sequence[str]) -> str:
    """How a call looks but for its tensors, such as ``(x=tensor, power=2.0)``; `parameters` are the names of those given by position."""
    names = [*parameters[: len(args)], *(f"argument {n}" for n in range(len(parameters) + 1, len(args) + 1))]
    given = [*zip(names, args, strict=True), *kwargs.items()]
    return shorten(f"({', '.join(f'{name}={_outline(value)}' for name, value in given)})", 200, placeholder=" ...)")


def template_text(template: Template, parameters: Sequence[str]) -> str:
    """The call that `template` is of, as `call_text` tells it."""
    args, kwargs = template.fill([_Tensor()] * len(template.holes))
    return call_text(args, kwargs, parameters)


def _outline(value: Any) -> str:
    if isinstance(value, torch.Tensor | _Tensor):
        return "tensor"
    if type(value) in (list, tuple):
        inner = ", ".join(map(_outline, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner},)" if len(value) == 1 else f"({inner})"
    if type(value) is dict:
        return f"{{{', '.join(f'{key!r}: {_outline(each)}' for key, each in value.items())}}}"
    return repr(value) if is_plain(value) else type(value).__name__


def template_data(template: Template) -> dict[str, Any]:
    """`template` as JSON holds it.

    Raises:
        ArtifactError: it has nested values that pytree cannot name, or constants that are not plain.
    """
    records = template.structure.records
    if records:
        kind = records[0].type.__qualname__
        raise ArtifactError(
            f"{kind} is a dataclass that pytree does not know; register it: torch.utils._pytree.register_dataclass({kind})"
        )
    try:
        nesting = pytree.treespec_dumps(template.structure.spec)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise ArtifactError(f"the nesting of inputs or results cannot be written: {error}") from error
    return {
        "nesting": json.loads(nesting),
        "leaves": [encode(leaf) for leaf in template.leaves],
        "holes": list(template.holes),
        "again": [list(pair) for pair in template.again],
    }


def template_of(data: Any, device: Callable[[str], torch.device]) -> Template:
    """The template of which `template_data` made `data`; `device` gives the device to use in place of one by name.

    Raises:
        ArtifactError: a type in it is not registered with pytree in this process.
    """
    try:
        spec = pytree.treespec_loads(json.dumps(data["nesting"]))
    except (NotImplementedError, KeyError) as error:
        raise ArtifactError(
            f"inputs or results have a type that pytree does not know here ({error}); import what defines it first"
        ) from error
    leaves = tuple(decode(leaf, device=device) for leaf in data["leaves"])
    holes = tuple(data["holes"])
    again = tuple((position, number) for position, number in data["again"])
    every = tuple(sorted((*holes, *(position for position, _ in again))))
    key: object = every, tuple(map(plain_key, leaves))
    return Template(Structure(spec), leaves, holes, (key, again) if again else key, again)
