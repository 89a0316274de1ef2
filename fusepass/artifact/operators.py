"""Fused operators apart from a model: those that a graph calls, written to a file and registered in a process that never made them."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import fx

from fusepass.artifact import container, machine, versions
from fusepass.artifact.container import Reader
from fusepass.artifact.graph import Constants
from fusepass.artifact.libraries import Libraries, LoadedLibraries
from fusepass.artifact.machine import Devices
from fusepass.artifact.region import libraries_of, region_data, region_of
from fusepass.artifact.tensors import CONSTANTS, packed, unpacked
from fusepass.errors import ArtifactError
from fusepass.runtime import ops
from fusepass.runtime.fallbacks import FallbackCounter

_Parts = tuple[dict[str, Any], dict[str, bytes]]


def write(graph: fx.Graph, path: Path) -> None:
    """See `fusepass.save_operators`."""
    container.write(path, *_parts(graph))


def packed_of(graph: fx.Graph) -> bytes:
    """What `write` would write, as bytes."""
    return container.packed(*_parts(graph))


def load(path: Path | io.BytesIO, device: torch.device | None = None) -> tuple[str, ...]:
    """See `fusepass.load_operators`."""
    with Reader(path) as reader:
        reader.check_kind("operators", "fusepass.load")
        name = path if isinstance(path, Path) else "an artifact"
        reader.understood(lambda: versions.check(reader.manifest, name))
        constants = unpacked(reader.read(CONSTANTS))
        names: tuple[str, ...] = reader.understood(lambda: _registered(reader, constants, device))
        return names


def _parts(graph: fx.Graph) -> _Parts:
    """The manifest and the entries of an artifact that holds the operators that `graph` calls."""
    libraries, constants = Libraries(), Constants()
    found = ops.called(graph)
    operators = {name: region_data(region, own, libraries, constants) for name, (region, own) in found.items()}
    sources = [part.generated.source for region, _ in found.values() for part in (region, *region.conversions.values())]
    requires = {str(each): each for each in map(machine.requirement, sources)}
    names, files = libraries.entries()
    manifest = {
        **versions.described({str(region.device) for region, _ in found.values()}),
        "operators": operators,
        "requires": list(requires.values()),
        "constants": {name: str(tensor.device) for name, tensor in constants.tensors.items()},
        "libraries": names,
    }
    return manifest, {CONSTANTS: packed(constants.tensors), **files}


def _registered(reader: Reader, constants: Mapping[str, torch.Tensor], device: torch.device | None) -> tuple[str, ...]:
    manifest = reader.manifest
    devices = Devices(manifest["devices"], device)
    machine.runnable([manifest], devices.gpu)
    held = {name: tensor.to(devices(manifest["constants"][name])) for name, tensor in constants.items()}
    libraries, fallbacks = LoadedLibraries(reader), FallbackCounter()
    for name, data in manifest["operators"].items():
        libraries.take(libraries_of(data))
        region = region_of(data, libraries, held, devices, fallbacks)
        region.stay()
        ops.register_as(name, region, _not_here)
    return tuple(manifest["operators"])


def _not_here() -> NoReturn:
    raise ArtifactError("an operator that was loaded from a file is not saved anew: copy the file")
