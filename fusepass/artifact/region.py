"""A fused region as data and back: what its call needs to know of program and source, and the number of its library."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from fusepass.artifact.graph import Constants, graph_data, graph_of
from fusepass.codegen.ir.program import Program
from fusepass.codegen.outlines import outline_data, outline_of, source_data, source_of
from fusepass.codegen.plain import decode, encode
from fusepass.codegen.source import Source
from fusepass.errors import BuildError
from fusepass.runtime.fallbacks import FallbackCounter
from fusepass.runtime.meta import Meta, as_seen, with_strides
from fusepass.runtime.ops import Operators
from fusepass.runtime.region import Code, FusedRegion, Result

Device = Callable[[str], torch.device]


class Libraries(Protocol):
    """Where built libraries are put."""

    def number(self, file: Path, source: Source) -> int:
        """That by which the library in `file` is found, which was built of `source`, maybe among others."""

    def unaligned(self, code: Code, library: Path) -> tuple[Source, Path] | None:
        """What serves inputs that are not aligned, beside the `library` of `code`; None where there is nothing."""


class Taken(Protocol):
    """Where they are found again."""

    def __getitem__(self, number: int) -> Any:
        """The library of this number, as `fusepass.codegen.build.load` takes it."""


@dataclass(frozen=True)
class _Built:
    """What is left of a program and its sources once they are compiled.

    Attributes:
        other: the source for inputs that are not aligned.
        again: gives the region with its program, which makes what is not here.
    """

    outline: Program
    source: Source
    other: Source | None
    again: Callable[[], FusedRegion] | None

    def unaligned(self) -> Source:
        if self.other is not None:
            return self.other
        if self.again is not None:
            return self.again().generated.unaligned()
        raise BuildError(f"{self.outline.name} was saved without a library for inputs that are not aligned")


def region_data(
    region: FusedRegion, operators: Operators, libraries: Libraries, constants: Constants
) -> dict[str, Any]:
    """What `region_of` makes a region of that computes the same."""
    return {
        "name": region.name,
        "device": str(region.device),
        "inputs": _metas(region.inputs),
        "outputs": _metas(region.outputs),
        "used": list(region.used),
        "exact": sorted(region.exact),
        "written": sorted(region.written.items()),
        "code": _code(region.generated, region.library, libraries),
        "conversions": {
            name: {"inputs": _metas(each.inputs), "code": _code(each.generated, each.library, libraries)}
            for name, each in region.conversions.items()
        },
        "operators": {
            "graph": graph_data(operators.graph, {}, constants),
            "constants": [[place, constants.name(value)] for place, value in operators.constants.items()],
            "inputs": _metas(operators.inputs),
            "outputs": _metas(operators.outputs),
        },
    }


def libraries_of(data: Mapping[str, Any]) -> set[int]:
    """The numbers of the libraries that `region_of` takes for `data`."""
    codes = [data["code"], *(each["code"] for each in data["conversions"].values())]
    return {each["library"] for each in codes} | {each["unaligned"][1] for each in codes if each["unaligned"]}


def region_of(
    data: Mapping[str, Any],
    libraries: Taken,
    constants: Mapping[str, torch.Tensor],
    device: Device,
    fallbacks: FallbackCounter,
    again: Callable[[], FusedRegion] | None = None,
) -> FusedRegion:
    """The region of which `region_data` made `data`.

    Args:
        libraries: by number.
        constants: by name.
        device: gives the device to use in place of one by name.
        fallbacks: counts calls that run its own operators.
        again: gives the same region with its program, for what `data` lacks; None where there is none.
    """
    where = device(data["device"])
    generated, library, unaligned = _generated(data["code"], libraries, again)
    given, results = _metas_of(data["inputs"]), _metas_of(data["outputs"])
    written = dict(data["written"])
    conversions = {
        name: _conversion(name, each, generated.outline, libraries, where, fallbacks, again)
        for name, each in data["conversions"].items()
    }
    return FusedRegion(
        data["name"], generated, library, given, data["used"], where,
        _original(data["operators"], results, written, constants, device), fallbacks, conversions, data["exact"], results, written,
        unaligned=unaligned,
    )  # fmt: skip


def _conversion(
    name: str,
    data: Mapping[str, Any],
    program: Program,
    libraries: Taken,
    device: torch.device,
    fallbacks: FallbackCounter,
    again: Callable[[], FusedRegion] | None,
) -> FusedRegion:
    """What changes a layout for the library."""
    code = again and (lambda: again().conversions[name])
    generated, library, unaligned = _generated(data["code"], libraries, code)
    call = next(call for call in program.calls if call.result == name)
    original = functools.partial(torch.ops.aten.clone.default, **dict(call.kwargs))
    title, given = generated.outline.name, _metas_of(data["inputs"])
    return FusedRegion(title, generated, library, given, [0], device, original, fallbacks, unaligned=unaligned)


def _original(
    data: Mapping[str, Any],
    results: Sequence[Meta],
    written: Mapping[int, int],
    constants: Mapping[str, torch.Tensor],
    device: Device,
) -> Callable[..., Result]:
    """The region's own operators, as a function of the fused call's arguments; few are ever called, so that their graph is made then."""
    graph = functools.cache(lambda: graph_of(data["graph"], (), constants, device))
    given, lie = _metas_of(data["inputs"]), _metas_of(data["outputs"])
    fixed = {place: constants[name] for place, name in data["constants"]}
    count = len(given) + len(fixed)

    def run(*arguments: torch.Tensor) -> Result:
        rest = iter(map(as_seen, arguments, given))
        made = graph()(*(fixed[place] if place in fixed else next(rest) for place in range(count)))
        outputs = tuple(map(as_seen, map(with_strides, made, lie), results))
        for output, argument in written.items():
            arguments[argument].copy_(outputs[output])
        kept = tuple(each for number, each in enumerate(outputs) if number not in written)
        return kept if len(kept) != 1 else kept[0]

    return run


def _code(generated: Code, library: Path, libraries: Libraries) -> dict[str, Any]:
    source = generated.source
    data = {
        **outline_data(generated.outline),
        "source": source_data(source),
        "library": libraries.number(library, source),
    }
    unaligned = libraries.unaligned(generated, library)
    data["unaligned"] = unaligned and [source_data(unaligned[0]), libraries.number(unaligned[1], unaligned[0])]
    return data


def _generated(
    data: Mapping[str, Any], libraries: Taken, again: Callable[[], FusedRegion] | None
) -> tuple[_Built, Any, Any]:
    """What is known of compiled code, its library, and the one for inputs that are aligned to nothing."""
    outline, source, library = outline_of(data), source_of(data["source"]), libraries[data["library"]]
    if data["unaligned"] is None:
        return _Built(outline, source, None, again), library, None
    unaligned, number = data["unaligned"]
    return _Built(outline, source, source_of(unaligned), again), library, libraries[number]


def _metas(metas: Sequence[Meta]) -> list[Any]:
    return [[list(each.shape), list(each.strides), encode(each.dtype)] for each in metas]


def _metas_of(data: Sequence[Any]) -> tuple[Meta, ...]:
    return tuple(Meta(tuple(shape), tuple(strides), decode(dtype)) for shape, strides, dtype in data)
