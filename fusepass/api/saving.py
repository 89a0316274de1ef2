"""Writes what an optimised model became for some calls as an artifact: one file that needs no compiler and no capture."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fusepass.api.entry import arguments_of
from fusepass.api.module import OptimizedModule, UnusualModule
from fusepass.artifact import container, machine, versions
from fusepass.artifact.call import Expected, template_data
from fusepass.artifact.graph import Constants, graph_data
from fusepass.artifact.libraries import Libraries
from fusepass.artifact.region import region_data
from fusepass.artifact.tensors import CONSTANTS, WEIGHTS, packed
from fusepass.capture.naming import input_text, positional_names
from fusepass.capture.trace import Captured, CaptureFailure, capture
from fusepass.codegen import build, instructions
from fusepass.codegen.detect import device_facts, taken_for
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.machine import ARCHITECTURES
from fusepass.compile.chunked import Chunked
from fusepass.compile.chunks import CHUNKS
from fusepass.compile.pipeline import CompiledGraph, compile_graph, operators_of
from fusepass.config import override
from fusepass.errors import ArtifactError, BuildError, CaptureError
from fusepass.guards.tensors import LiveTensors, Slot
from fusepass.runtime.region import Code
from fusepass.structure import Template

_Call = tuple[tuple[Any, ...], dict[str, Any]]


def save(
    optimised: OptimizedModule,
    path: Path,
    examples: Any,
    architectures: Sequence[str] | None,
    *,
    weights: bool,
    dynamic: bool,
) -> None:
    """See `fusepass.save`."""
    if not isinstance(optimised, OptimizedModule):
        raise TypeError(f"fusepass.save takes what fusepass.optimize gave back, not a {type(optimised).__name__}")
    model = optimised.original
    _check(optimised)
    calls = [arguments_of(example) for example in (examples if isinstance(examples, list) else [examples])]
    if not calls:
        raise ValueError("examples is empty; give an example of each call that the artifact is to serve")
    live, device = LiveTensors(model), _device(model, calls)
    wanted = _facts(device, architectures)
    libraries, constants = Libraries(), Constants()
    signatures = [_signature(optimised, call, wanted, libraries, constants) for call in calls]
    kinds = {slot.dotted: _kind(model, slot) for slot in live.slots}
    ties = [(slot.dotted, live.slots[index].dotted) for slot, index in live.ties]
    if len(kinds) < len(live.slots):
        raise ArtifactError(f"{type(model).__name__} has two tensors of one name")
    states = dict(zip(kinds, live.tensors, strict=True))
    further = []
    if dynamic:
        from fusepass.api.dynamic import further_sizes  # imports Dynamo

        known = {name: name for name in kinds} | dict(ties)
        described = [facts or device_facts(device) for facts in wanted]
        further = further_sizes(optimised, signatures, calls, known, states, described, libraries, constants)
    inside = {name: tensor for name, tensor in states.items() if weights or kinds[name] in ("plain", "unsaved")}
    always = {name: tensor for name, tensor in inside.items() if kinds[name] in ("plain", "unsaved")}
    files = {
        CONSTANTS: packed({**always, **constants.tensors}),
        **({WEIGHTS: packed({n: t for n, t in inside.items() if n not in always})} if weights else {}),
    }
    names, built = libraries.entries()
    files |= built
    manifest = {
        "model": type(model).__name__,
        **versions.described({str(tensor.device) for tensor in live.tensors} | {str(device)}),
        "weights": weights,
        "states": [Expected.of(name, tensor).data() for name, tensor in states.items()],
        "kinds": kinds,
        "ties": ties,
        "constants": {name: str(tensor.device) for name, tensor in constants.tensors.items()},
        "libraries": names,
        "signatures": signatures,
        "dynamic": further,
        "report": str(optimised.report()),
    }
    container.write(path, manifest, files)


def _check(optimised: OptimizedModule) -> None:
    model = optimised.original
    what = None
    if isinstance(optimised, UnusualModule):
        what = "its class has a __call__ of its own"
    elif model._forward_hooks or model._forward_pre_hooks:
        what = "it has forward hooks"
    if what is not None:
        raise ArtifactError(
            f"{type(model).__name__} cannot be saved: {what}, and an artifact runs no Python of the model's"
        )


def _device(model: nn.Module, calls: Sequence[_Call]) -> torch.device:
    """The one device, beside the CPU, where the model and its inputs are."""
    tensors = [*LiveTensors(model).tensors, *(tensor for call in calls for tensor in Template.of_call(*call)[0])]
    devices = {tensor.device for tensor in tensors} - {torch.device("cpu")}
    if len(devices) > 1:
        raise ArtifactError(f"an artifact runs on one device, not on {' and '.join(sorted(map(str, devices)))}")
    return next(iter(devices), torch.device("cpu"))


def _facts(device: torch.device, architectures: Sequence[str] | None) -> list[DeviceFacts | None]:
    """What to generate code for; None for the device at hand, where candidates are measured."""
    own = device_facts(device)
    if architectures is None:
        return [None]
    if isinstance(architectures, str) or not architectures:
        raise ValueError(f"architectures is {architectures!r}; give a list such as {[own.arch]!r}")
    return [None if arch == own.arch else _described(device, arch) for arch in dict.fromkeys(architectures)]


def _described(device: torch.device, arch: str) -> DeviceFacts:
    if device.type == "cpu":
        instructions.needed(arch)  # says which there are
        return DeviceFacts.cpu(arch=arch)
    if arch not in ARCHITECTURES:
        raise ValueError(
            f"{arch!r} is no architecture that code is generated for; there are {', '.join(ARCHITECTURES)}"
        )
    return DeviceFacts.described(arch)


def _signature(
    optimised: OptimizedModule,
    call: _Call,
    wanted: Sequence[DeviceFacts | None],
    libraries: Libraries,
    constants: Constants,
) -> dict[str, Any]:
    args, kwargs = call
    model = optimised.original
    made = optimised._specialiser.prepare(args, kwargs)
    if isinstance(made, CaptureFailure):
        raise CaptureError(f"{type(model).__name__} has no single graph: {made.reason}") from made.error
    captured = made.captured
    if captured.conditions:
        raise ArtifactError(f"{type(model).__name__} branches on values of tensors, which an artifact cannot")
    whole = not any(isinstance(node.target, Chunked) for node in made.compiled.before.graph.nodes)
    compiled = [
        made.compiled if facts is None and whole else _compiled_again(optimised, call, captured, facts)
        for facts in wanted
    ]
    tensors, _ = Template.of_call(args, kwargs)
    forward = optimised._specialiser.original
    positional = positional_names(forward, len(args))
    names = [input_text(captured.paths[hole], positional) for hole in captured.inputs.holes]
    return {
        "inputs": template_data(captured.inputs),
        "outputs": template_data(captured.outputs),
        "tensors": [Expected.of(name, tensor).data() for name, tensor in zip(names, tensors, strict=True)],
        "parameters": _parameters(forward),
        "arity": made.arity,
        "states": list(captured.state_indices),
        "written": sorted(made.written),
        "autocast": versions.autocast(),
        "variants": [_variant(each, libraries, constants) for each in compiled],
    }


def _parameters(forward: Any) -> list[str]:
    """Names of the parameters that may be given by position or by name."""
    found = inspect.signature(forward).parameters.values()
    return [each.name for each in found if each.kind is each.POSITIONAL_OR_KEYWORD]


def _compiled_again(
    optimised: OptimizedModule, call: _Call, captured: Captured, facts: DeviceFacts | None
) -> CompiledGraph:
    """The same call without products in chunks, which a file has no form for; with `facts` for another architecture, on which nothing can be
    measured."""
    model, (args, kwargs) = optimised.original, call
    with contextlib.ExitStack() as stack:
        config = stack.enter_context(override(**optimised._options))
        stack.enter_context(override(disable=config.disable | {CHUNKS}))
        if facts is not None:
            stack.enter_context(override(tune="off"))
            stack.enter_context(taken_for(facts))
        stack.enter_context(torch.no_grad())
        again = capture(model, args, kwargs)
        if isinstance(again, CaptureFailure) or again.state_indices != captured.state_indices:
            raise CaptureError(f"{type(model).__name__} is captured otherwise the second time")
        compiled = compile_graph(again.graph, name=type(model).__name__, exact_inputs=True)
    lost = [f"{work.region.name}: {reason}" for work in compiled.works for reason in work.lost.values()]
    if lost and facts is not None:
        raise ArtifactError(f"{type(model).__name__} cannot be built for {facts.arch}: {'; '.join(lost)}")
    return compiled


def _variant(compiled: CompiledGraph, libraries: Libraries, constants: Constants) -> dict[str, Any]:
    """The graph for one architecture, with its regions."""
    works = {work.region.name: work for work in compiled.works}
    called = list(compiled.called.items())
    calls = {region.run: number for number, (_, region) in enumerate(called)}
    graph = graph_data(compiled.rewritten(), calls, constants)
    _build_unaligned(compiled)
    regions = [
        region_data(region, operators_of(compiled.before, works[name]), libraries, constants) for name, region in called
    ]
    requires = {str(each): each for each in (machine.requirement(code.source) for code in _codes(compiled))}
    return {"requires": list(requires.values()), "graph": graph, "regions": regions}


def _build_unaligned(compiled: CompiledGraph) -> None:
    """Build what serves inputs that are not aligned, side by side."""
    sources = []
    for code in _codes(compiled):
        with contextlib.suppress(BuildError):  # what cannot be had is left out of the file
            sources.append(code.unaligned())
    build.build_all(sources)


def _codes(compiled: CompiledGraph) -> list[Code]:
    regions = compiled.called.values()
    return [each.generated for region in regions for each in (region, *region.conversions.values())]


def _kind(model: nn.Module, slot: Slot) -> str:
    module = next(each for number, each in enumerate(model.modules()) if number == slot.index)
    if module._parameters.get(slot.name) is not None:
        return "parameter"
    if module._buffers.get(slot.name) is None:
        return "plain"
    return "unsaved" if slot.name in module._non_persistent_buffers_set else "buffer"
