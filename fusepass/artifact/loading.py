"""Reads an artifact: no capture, no compiler, nothing but the file and this process's PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fusepass.artifact.call import Expected
from fusepass.artifact.container import Reader
from fusepass.artifact.dynamic import Dynamic, Lower, Lowering, facts_of
from fusepass.artifact.graph import graph_of
from fusepass.artifact.libraries import LoadedLibraries
from fusepass.artifact.machine import Devices, runnable
from fusepass.artifact.module import LoadedModule, Place, Signature
from fusepass.artifact.region import libraries_of, region_of
from fusepass.artifact.tensors import CONSTANTS, WEIGHTS, unpacked
from fusepass.artifact.versions import check
from fusepass.errors import ArtifactError
from fusepass.runtime.fallbacks import FallbackCounter
from fusepass.runtime.meta import with_strides


def load(
    path: Path, device: torch.device | None, state_dict: Mapping[str, torch.Tensor] | None, lower: Lower
) -> LoadedModule:
    """See `fusepass.load`; `lower` is for sizes that were not saved."""
    with Reader(path) as reader:
        reader.check_kind("signatures", "fusepass.load_operators")
        reader.understood(lambda: check(reader.manifest, path))
        devices: Devices = reader.understood(lambda: Devices(reader.manifest["devices"], device))
        tensors = unpacked(reader.read(CONSTANTS))
        inside = reader.manifest["weights"]
        if inside:
            tensors |= unpacked(reader.read(WEIGHTS))
        states = reader.understood(lambda: [Expected.read(each, devices) for each in reader.manifest["states"]])
        lacking = [each.name for each in states if each.name not in tensors]
        if state_dict is None and lacking:
            raise ArtifactError(
                f"{path} holds no weights: give them as state_dict=, the one of the model that was saved"
            )
        if state_dict is not None:
            kinds = reader.manifest["kinds"]
            tensors |= _supplied([each for each in states if kinds[each.name] in ("parameter", "buffer")], state_dict)
        placed = {each.name: with_strides(tensors[each.name].to(each.device), each.meta) for each in states}
        module = LoadedModule(reader.manifest["model"])
        reader.understood(lambda: _fill(module, reader, states, placed, tensors, devices, lower))
    return module


def _supplied(wanted: Sequence[Expected], state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of those of `state_dict` that take the place of what is in the file.

    Raises:
        ValueError: one is missing, or has another shape or type.
    """
    missing = [each.name for each in wanted if each.name not in state_dict]
    wrong = [
        f"{each.name} is {tensor.dtype}{list(tensor.shape)}, not {each.meta.dtype}{list(each.meta.shape)}"
        for each in wanted
        if (tensor := state_dict.get(each.name)) is not None
        and (tuple(tensor.shape) != each.meta.shape or tensor.dtype != each.meta.dtype)
    ]
    if missing or wrong:
        told = [f"it lacks {', '.join(missing)}"] if missing else []
        raise ValueError(f"state_dict does not fit the artifact: {'; '.join([*told, *wrong])}")
    return {each.name: state_dict[each.name].detach().clone() for each in wanted}


def _fill(
    module: LoadedModule,
    reader: Reader,
    states: Sequence[Expected],
    placed: Mapping[str, torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    devices: Devices,
    lower: Lower,
) -> None:
    manifest = reader.manifest
    places = {each.name: _put(module, each.name, manifest["kinds"][each.name], placed[each.name]) for each in states}
    for name, first in manifest["ties"]:
        entries, key = places[first]
        _put(module, name, manifest["kinds"][first], entries[key])
    held = {
        name: tensor.to(devices(manifest["constants"][name])) for name, tensor in tensors.items() if name not in placed
    }
    loaded = LoadedLibraries(reader)
    fallbacks = FallbackCounter()

    def made(variant: Mapping[str, Any]) -> Callable[..., tuple[Any, ...]]:
        regions = [region_of(each, loaded, held, devices, fallbacks) for each in variant["regions"]]
        graph = graph_of(variant["graph"], [region.run for region in regions], held, devices)
        for region in regions:
            region.stay()
        return graph.forward

    by_name = {each.name: each for each in states}
    for data in manifest["signatures"]:
        variant = runnable(data["variants"], devices.gpu)
        loaded.take({number for region in variant["regions"] for number in libraries_of(region)})
        takes = [(states[number], places[states[number].name]) for number in data["states"]]
        module._add(Signature(data, functools.partial(made, variant), takes, devices))
    for data in manifest.get("dynamic", ()):
        variant = runnable(data["variants"], devices.gpu)
        loaded.take(variant["libraries"].values())
        lowering = Lowering(manifest["model"], facts_of(variant["facts"]), data["options"], fallbacks)
        dynamic = Dynamic(
            data,
            variant,
            manifest["signatures"][data["signature"]],
            lowering,
            functools.partial(graph_of, data["graph"], (), held, devices),
            [(by_name[name], places[name]) for name in data["states"]],
            [held[name] for name in data["constants"]],
            loaded,
            devices,
            lower,
        )
        module._further.append(dynamic.signature)
    module._signatures[0].prepare()
    module._report = manifest["report"]


def _put(root: LoadedModule, dotted: str, kind: str, tensor: torch.Tensor) -> Place:
    """Give `root` a tensor under a dotted name; says which dict has it."""
    if kind == "plain":
        root._plain[dotted] = tensor
        return root._plain, dotted
    *path, name = dotted.split(".")
    module: nn.Module = root
    for part in path:
        inner = module._modules.get(part)
        if inner is None:
            module._modules[part] = inner = nn.Module().eval()
        module = inner
    if kind == "parameter":
        entries: dict[str, Any] = module._parameters
        entries[name] = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
        return entries, name
    if kind == "unsaved":
        module._non_persistent_buffers_set.add(name)
    module._buffers[name] = tensor
    return module._buffers, name
