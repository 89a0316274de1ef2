"""What became of a whole graph, kept on disk: a later process loads libraries and rebuilds the call, and decides nothing once more.

A record is found by all that decides what becomes of a graph: its operators, what they are called with, how its values lie, the numbers
that it holds, the options, PyTorch's settings, the devices, the versions of PyTorch and of this package's own files. The values of
parameters decide nothing. It has the form that artifacts have (`fusepass.artifact`): the rewritten graph and its regions as data; of
libraries the keys. It serves as long as these are in the cache, and as the measured choices that it was made by are what they were. All else
that may be asked of a compiled graph is found by compiling it once more, when somebody asks.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import operator
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._ops import OpOverload

from fusepass.artifact.graph import Constants, graph_data, graph_of
from fusepass.artifact.region import region_data, region_of
from fusepass.autotune.kind import kind_of
from fusepass.autotune.layout import fit_twice
from fusepass.autotune.tune import precision
from fusepass.codegen import cache, choices, records, toolchain
from fusepass.codegen import cache_folders as folders
from fusepass.codegen.cache_entry import COMPILERS
from fusepass.codegen.detect import device_facts
from fusepass.codegen.generate import Generated
from fusepass.codegen.key import compilers, package_key
from fusepass.codegen.lowering.lower import is_as_shipped
from fusepass.codegen.plain import decode, encode
from fusepass.codegen.render.cuda.family import registered
from fusepass.codegen.source import Source, Target
from fusepass.config import Config, current
from fusepass.errors import ArtifactError, BuildError
from fusepass.patterns import library, naming
from fusepass.report.report import RegionReport, RegionState, Report
from fusepass.runtime.fallbacks import FallbackCounter
from fusepass.runtime.kept import Kept
from fusepass.runtime.memory import unusual
from fusepass.runtime.ops import Operators
from fusepass.runtime.packed import Packed
from fusepass.runtime.region import Code, FusedRegion

Only = tuple[Callable[..., Any], tuple[int, ...]]
"""What a graph calls and with which of its arguments, if that is all that it does."""

_ELSEWHERE = frozenset({
    "cache_dir", "cache_size", "compile", "cuda_graphs", "debug", "dump", "max_signatures", "memory_budget", "methods", "progress",
    "training", "workers",
})  # fmt: skip
"""Options that do not decide what becomes of a graph; where `debug` or `dump` is on, nothing is kept or found."""

_SETTINGS: tuple[Callable[[], object], ...] = (
    torch.get_default_dtype, torch.get_num_threads, torch.are_deterministic_algorithms_enabled, torch.get_float32_matmul_precision,
    torch._C._get_mkldnn_enabled, torch._C._get_cudnn_enabled, torch._C._get_cudnn_benchmark, torch._C._get_cudnn_deterministic,
    torch._C._get_flash_sdp_enabled, torch._C._get_mem_efficient_sdp_enabled, torch._C._get_math_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled, torch.backends.cpu.get_cpu_capability, precision,
)  # fmt: skip
"""What reads those of PyTorch's settings that may decide."""

_MOST_CONSTANTS = 8 << 20
"""Bytes of the tensors that a graph holds, above which it is not kept."""


@dataclass(frozen=True)
class Recalled:
    """A graph as an earlier process left it.

    Attributes:
        direct: the rewritten graph, which runs.
        regions: those that it calls.
        only: where one of them is all that it calls, what that is.
        saved: seconds a call that the rewrites save, by the model of costs.
        report: what became of it, without the seconds of the stages.
    """

    direct: fx.GraphModule
    regions: Sequence[FusedRegion]
    only: Only | None
    saved: float
    report: Report


def key_of(graph: fx.GraphModule, **given: object) -> str | None:
    """The key of all that decides what becomes of `graph`; None where that cannot be told, or is to be seen at work.

    Args:
        graph: as it was captured.
        given: what else the pipeline is told.
    """
    config, nodes = current(), graph.graph.nodes
    targets = {node.target for node in nodes if node.op == "call_function"} - {operator.getitem}
    known = all(isinstance(target, OpOverload) for target in targets)
    shipped = known and is_as_shipped(targets) and library.is_as_shipped() and not registered()
    values = [value for node in nodes for value in pytree.tree_leaves(node.meta.get("val"))]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    devices = {tensor.device for tensor in tensors}
    static = all(isinstance(size, int) for tensor in tensors for size in tensor.shape)
    if config.debug or config.dump is not None or not shipped or not static:
        return None
    if not {device.type for device in devices} <= {"cpu", "cuda"}:
        return None
    held = {node.name: getattr(graph, str(node.target)) for node in graph.graph.find_nodes(op="get_attr")}
    if any(not isinstance(value, torch.Tensor) or unusual(value) is not None for value in held.values()):
        return None
    constants = {name: _content(value) for name, value in held.items()}
    described = [
        [(node.name, naming.location(node), node.meta.get("partitioner_tag")) for node in nodes],
        kind_of(graph.graph, constants),
        _memory(tensors),
    ]
    return records.key_of(
        {
            "package": package_key(),
            "torch": [torch.__version__, torch.version.cuda],
            "graph": hashlib.sha256(repr(described).encode()).hexdigest(),
            "given": [[name, repr(value)] for name, value in sorted(given.items())],
            "devices": sorted(repr((device, _facts(device))) for device in devices),
            "options": _options(config),
            "settings": [repr(read()) for read in _SETTINGS],
        }
    )


def _memory(tensors: Sequence[torch.Tensor]) -> list[tuple[object, ...]]:
    """What is to be known of tensors besides shape, strides, type and device; and which share their memory."""
    numbers: dict[int, int] = {}
    return [
        (
            tensor.layout is torch.strided and numbers.setdefault(tensor.untyped_storage()._cdata, len(numbers)),
            tensor.layout is torch.strided and tensor.storage_offset(),
            tensor.requires_grad,
            tensor.is_conj(),
            tensor.is_neg(),
            tensor.is_quantized,
        )
        for tensor in tensors
    ]


def _content(value: torch.Tensor) -> str:
    """A hash of what a constant holds, with its type and layout."""
    plain = value.detach().cpu().contiguous().flatten().view(torch.uint8) if value.numel() else torch.empty(0)
    told = f"{value.dtype}{list(value.shape)}{list(value.stride())}{value.device}".encode()
    return hashlib.sha256(told + plain.numpy().tobytes()).hexdigest()


def _facts(device: torch.device) -> tuple[object, ...]:
    facts = device_facts(device)
    flags = toolchain.flags(facts.target, facts.arch), toolchain.link_flags(facts.target), toolchain.cpu_identity()
    return facts, flags, torch.backends.cudnn.version() if device.type == "cuda" else None


def _options(config: Config) -> list[list[str]]:
    """The options that may decide; sets have an order, so that every process tells them alike."""
    values = {each.name: getattr(config, each.name) for each in fields(config) if each.name not in _ELSEWHERE}
    return [
        [name, repr(sorted(value) if isinstance(value, frozenset) else value)] for name, value in sorted(values.items())
    ]


class _Files:
    """The libraries that regions of a record have, by number: their keys in the cache, and what kind they are of."""

    def __init__(self) -> None:
        self.keys: list[list[str]] = []

    def number(self, file: Path, source: Source) -> int:
        """That of the library in `file`, whose folder is named by its key."""
        entry = [file.parent.name, source.target.value, source.arch]
        if entry not in self.keys:
            self.keys.append(entry)
        return self.keys.index(entry)

    def unaligned(self, code: Code, library: Path) -> tuple[Source, Path] | None:
        """`library` itself where it takes any memory; what else there could be is generated when it is needed."""
        return (code.source, library) if isinstance(code, Generated) and code.takes_unaligned else None


def record_of(
    direct: fx.GraphModule,
    regions: Sequence[FusedRegion],
    packed: Packed | None,
    operators: Callable[[str], Operators],
    only: Only | None,
) -> dict[str, Any] | None:
    """The record of a graph but for what is told of it; None where there is something in it that cannot be written.

    Args:
        direct: the rewritten graph; every node has ``meta["val"]``.
        regions: those that it calls.
        packed: what it keeps of parameters, if it does.
        operators: gives a region's own operators by its name.
        only: see `Recalled`.
    """
    files, constants = _Files(), Constants()
    numbers = {region.run: number for number, region in enumerate(regions)}
    kept = {packed.call: len(regions)} if packed is not None else {}
    try:
        data = {
            "graph": graph_data(direct, {**numbers, **kept}, constants),
            "packed": packed and [graph_data(packed.make, {}, constants), packed.sizes],
            "regions": [region_data(region, operators(region.name), files, constants) for region in regions],
            "only": [numbers[only[0]], *only[1]] if only is not None and only[0] in numbers else None,
            "libraries": files.keys,
            "constants": {name: _tensor_data(tensor) for name, tensor in constants.tensors.items()},
        }
    except ArtifactError:
        return None
    return data if sum(tensor.nbytes for tensor in constants.tensors.values()) <= _MOST_CONSTANTS else None


def keep(key: str, asked: choices.Asked, record: Mapping[str, Any], saved: float, report: Report) -> None:
    """Keep what `record_of` gave under `key`, unless something was decided for this process alone; nothing happens where the disk cannot be written."""
    whole = all(region.state is not RegionState.FALLBACK for region in report.regions)
    dropped = any(region.choice is not None and region.choice.dropped for region in report.regions)
    if asked.momentary or not whole or dropped:
        return
    told = {
        "choices": [[each, choices.state(each)] for each in sorted(asked.keys)],
        "saved": saved,
        "report": replace(report, seconds=(), fallbacks=()).to_json(),
    }
    with contextlib.suppress(OSError):
        records.write(folders.GRAPHS, key, {**record, **told})


def recall(
    key: str, name: str, fallbacks: FallbackCounter, again: Callable[[], Mapping[str, FusedRegion]]
) -> Recalled | None:
    """What is kept under `key`, if all is there that it needs and what it was decided by is as it was.

    Args:
        key: as `key_of` gives it.
        name: the model's.
        fallbacks: counts calls that run as the original operators.
        again: gives the regions with their programs by name, for what the record lacks.
    """
    record = records.lookup(folders.GRAPHS, key)
    if record is None or any(choices.state(each) != state for each, state in record["choices"]):
        return None
    found, packed = _libraries(record["libraries"]), record["packed"]
    if found is None or (packed is not None and not fit_twice(packed[1])):
        return None
    constants = {name: _tensor_of(data) for name, data in record["constants"].items()}
    try:
        regions = [
            region_of(data, found, constants, torch.device, fallbacks, functools.partial(_of, again, data["name"]))
            for data in record["regions"]
        ]
        calls: list[Callable[..., Any]] = [region.run for region in regions]
        if packed is not None:
            calls.append(Kept(graph_of(packed[0], (), constants, torch.device).forward, packed[1]).of)
        direct = graph_of(record["graph"], calls, constants, torch.device)
        for region in regions:
            region.stay()
    except (
        ArtifactError,
        BuildError,
    ):  # a library of operators that is not imported here, or one that the loader does not take
        return None
    only = None if record["only"] is None else (regions[record["only"][0]].run, tuple(record["only"][1:]))
    paths = {entry[0]: path.parent for entry, path in zip(record["libraries"], found, strict=True)}
    return Recalled(direct, regions, only, record["saved"], _report(record["report"], name, paths))


def _of(again: Callable[[], Mapping[str, FusedRegion]], name: str) -> FusedRegion:
    return again()[name]


def _libraries(entries: Collection[Sequence[str]]) -> list[Path] | None:
    """Where the cache has the libraries, as the compilers of now would make them; None unless it has all."""
    kinds = {(target, arch) for _, target, arch in entries}
    endings = {(target, arch): compilers(Source("", "", Target(target), "", (), arch)) for target, arch in kinds}
    found = [cache.lookup(key.partition(COMPILERS)[0] + endings[target, arch]) for key, target, arch in entries]
    return None if None in found else [each for each in found if each is not None]


def _report(text: str, name: str, folders_of: Mapping[str, Path]) -> Report:
    """The report that was kept, with the files of sources where they are now."""
    report = Report.from_json(text)
    return replace(report, model=name, regions=tuple(_told(region, folders_of) for region in report.regions))


def _told(region: RegionReport, folders_of: Mapping[str, Path]) -> RegionReport:
    sources = tuple(
        each if each.path is None else replace(each, path=_now(each.path, folders_of)) for each in region.sources
    )
    choice = region.choice
    if choice is not None and (choice.seconds or choice.check):
        choice = replace(choice, recorded=True)
    return replace(region, sources=sources, choice=choice, build_seconds=0.0)


def _now(path: Path, folders_of: Mapping[str, Path]) -> Path:
    return folders_of.get(path.parent.name, path.parent) / path.name


def _tensor_data(tensor: torch.Tensor) -> list[Any]:
    """A constant as JSON holds it.

    Raises:
        ArtifactError: it is no plain tensor on the CPU.
    """
    if tensor.device.type != "cpu" or unusual(tensor) is not None:
        raise ArtifactError("a constant is no plain tensor on the CPU")
    content = tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    shape, strides = list(tensor.shape), list(tensor.stride())
    return [encode(tensor.dtype), shape, strides, base64.b64encode(zlib.compress(content, 1)).decode()]


def _tensor_of(data: Sequence[Any]) -> torch.Tensor:
    """The tensor of which `_tensor_data` made `data`."""
    dtype, shape, strides, text = data
    made = torch.empty_strided(shape, strides, dtype=decode(dtype))
    if made.numel():
        content = bytearray(zlib.decompress(base64.b64decode(text)))
        made.copy_(torch.frombuffer(content, dtype=made.dtype).view(shape))
    return made
