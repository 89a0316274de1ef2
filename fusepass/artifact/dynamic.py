"""Calls of an artifact in sizes that it was not saved for: each becomes a signature, lowered onto the libraries in the file."""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fusepass.artifact.call import Expected
from fusepass.artifact.libraries import LoadedLibraries
from fusepass.artifact.module import Place, Signature
from fusepass.artifact.sizes import OpenSizes
from fusepass.codegen import build
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.source import Source, Target
from fusepass.errors import BuildError, not_saved
from fusepass.runtime.fallbacks import FallbackCounter
from fusepass.structure import Template


@dataclass(frozen=True)
class Lowering:
    """What a graph is lowered by, at save as at load.

    Attributes:
        name: the model's.
        facts: of the device that its libraries are for.
        options: of `fusepass.config.Config`, by name: those that decide what is generated.
        fallbacks: counts what runs as the original operators.
    """

    name: str
    facts: DeviceFacts
    options: Mapping[str, Any]
    fallbacks: FallbackCounter


Lower = Callable[[Lowering, Sequence[Any], fx.GraphModule, Sequence[torch.Tensor]], Callable[..., tuple[Any, ...]]]
"""Makes of a graph what does as it for tensors like these, with libraries as `fusepass.codegen.forms.Forms.data` tells of them."""


def digest(source: Source) -> str:
    """What stands for the text of `source` in a file."""
    return hashlib.sha256(f"{source.entry}\n{source.text}".encode()).hexdigest()


def facts_data(facts: DeviceFacts) -> dict[str, Any]:
    """What `facts_of` makes `facts` of."""
    return {**vars(facts), "target": facts.target.value}


def facts_of(data: Mapping[str, Any]) -> DeviceFacts:
    """The facts of which `facts_data` made `data`."""
    return DeviceFacts(**{**data, "target": Target(data["target"])})


class Dynamic:
    """The calls that are like some of the examples but for sizes in which these differ. Threads may share it.

    Args:
        data, variant: as the manifest has it, and of its variants the one for this machine.
        example: the signature of one of those examples, as the manifest has it.
        lowering: by what its graph is lowered.
        make: makes its graph, which takes tensors of the model, other constants and those of the call.
        states: how those of the model lie, and where they are kept.
        constants: the others.
        libraries: those of its file.
        device: gives the device to use in place of one by name.
        lower: see `Lower`.
    """

    def __init__(
        self,
        data: Mapping[str, Any],
        variant: Mapping[str, Any],
        example: Mapping[str, Any],
        lowering: Lowering,
        make: Callable[[], fx.GraphModule],
        states: Sequence[tuple[Expected, Place]],
        constants: Sequence[torch.Tensor],
        libraries: LoadedLibraries,
        device: Callable[[str], torch.device],
        lower: Lower,
    ) -> None:
        self._variant, self._example = variant, example
        self._expected = [Expected.read(each, device) for each in example["tensors"]]
        self._sizes = OpenSizes(**data["sizes"])
        self._lowering, self._lower = lowering, lower
        self._graph = functools.cache(make)
        self._states, self._constants = states, constants
        self._libraries, self._device = libraries, device
        self._like = Signature(
            example, functools.partial(self._made, ()), states, device
        )  # is asked how it is called, and never made
        self._lock = threading.Lock()

    def signature(
        self, tensors: Sequence[torch.Tensor], inputs: Template, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Signature | str | None:
        """What serves such a call; why its sizes are none of those that are open; or None where it is another call.

        Args:
            tensors: those of the call, as `inputs` has them.
        """
        found = self._like.arranged(tensors, inputs, args, kwargs)
        if found is None:
            return None
        if not all(each.like(tensor) for each, tensor in zip(self._expected, found, strict=True)):
            return None
        names = [each.name for each in self._expected]
        problem = self._sizes.problem(names, [tuple(tensor.shape) for tensor in found])
        if problem is not None:
            return problem
        expected = [Expected.of(name, tensor).data() for name, tensor in zip(names, found, strict=True)]
        data = {**self._example, "tensors": expected}
        return Signature(data, functools.partial(self._made, found), self._states, self._device)

    def _made(self, tensors: Sequence[torch.Tensor]) -> Callable[..., tuple[Any, ...]]:
        """What serves `tensors`, given the model's before them."""
        states = [entries[name] for _, (entries, name) in self._states]
        count, constants = len(states), self._constants
        with self._lock, build.given(self._library):
            run = self._lower(self._lowering, self._variant["forms"], self._graph(), [*states, *constants, *tensors])
        return (lambda *given: run(*given[:count], *constants, *given[count:])) if constants else run

    def _library(self, source: Source) -> Path | BuildError:
        number = self._variant["libraries"].get(digest(source))
        if number is None:
            return BuildError(not_saved(source.name))
        return build.name(self._libraries[number], Path("artifact", digest(source)))
