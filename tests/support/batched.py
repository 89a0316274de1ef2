"""Compiles the C++ of many regions as few translation units: hundreds of small models cost one compiler's start each else."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from fusepass.codegen import build
from fusepass.codegen.ir.program import Role
from fusepass.codegen.source import Source
from fusepass.errors import BuildError
from fusepass.runtime.operators import EMPTY

_REGIONS = 24  # in one translation unit

_BUFFER = re.compile(rf"^//   (?:{'|'.join(role.value for role in Role)}) (\w+): ", re.MULTILINE)
_COMMENT = re.compile(r"//.*$", re.MULTILINE)


class Batch:
    """The sources of regions whose models are optimised while `batched` is open; `compile` makes them callable."""

    def __init__(self) -> None:
        self._build_each, self._load = build.build_each, build.load
        self._sources: dict[Path, Source] = {}
        self._paths: dict[object, Path] = {}
        self._functions: dict[tuple[Path, str | None], str | None] = {}
        self._wanted: list[tuple[Path, str, int]] = []
        self._entries: dict[tuple[Path, str], Callable[..., int]] = {}
        self._dry = False

    @contextlib.contextmanager
    def dry(self) -> Iterator[None]:
        """While open, regions give zeros. A call then asks for what only a call asks for, and it is compiled with the rest."""
        self._dry = True
        try:
            yield
        finally:
            self._dry = False

    def compile(self) -> None:
        """Build and load what was asked for and is not yet there. What does not compile raises when it is called."""
        wanted = [each for each in dict.fromkeys(self._wanted) if each[:2] not in self._entries]
        paths = list(dict.fromkeys(path for path, _, _ in wanted))
        groups = [paths[start : start + _REGIONS] for start in range(0, len(paths), _REGIONS)]
        joined = [_joined([self._sources[path] for path in group]) for group in groups]
        for place, library in self._build_each(joined):
            for number, path in enumerate(groups[place]):
                alone = dict(self._build_each([self._sources[path]]))[0] if isinstance(library, BuildError) else None
                for entry, arguments in (each[1:] for each in wanted if each[0] == path):
                    if isinstance(alone, BuildError):
                        self._entries[path, entry] = _raising(alone)
                    elif alone is not None:
                        self._entries[path, entry] = self._load(alone, entry, arguments)
                    else:
                        self._entries[path, entry] = self._load(library, f"{entry}_{number}", arguments)

    def name(self, source: Source) -> Path:
        """A name for the library that `source` would become: one for all that differ in nothing but names."""
        path = self._paths.setdefault(_meaning(source), Path(f"{len(self._sources)}"))
        first = self._sources.setdefault(path, source)
        self._functions |= {(path, source.entry): first.entry, (path, source.replay): first.replay}
        return path

    def load(self, library: Path, entry: str, arguments: int) -> Callable[..., int]:
        """Calls the entry, which is compiled by then or at the call: some are asked for while a model runs."""
        function = self._functions[library, entry]
        assert function is not None
        self._wanted.append((library, function, arguments))

        def call(*pointers: int | None) -> int:
            if self._dry:
                return 0
            if (library, function) not in self._entries:
                self.compile()
            return self._entries[library, function](*pointers)

        return call

    def empty(self, device: str) -> Callable[..., torch.Tensor]:
        """What allocates the results of regions: zeros where nothing computes them, which are valid places everywhere."""
        allocate = EMPTY[device]

        def allocated(*arguments: Any) -> torch.Tensor:
            result: torch.Tensor = allocate(*arguments)
            return result.zero_() if self._dry else result

        return allocated

    def names(self, sources: Sequence[Source]) -> Iterator[tuple[int, Path]]:
        return enumerate(map(self.name, sources))


@contextlib.contextmanager
def batched() -> Iterator[Batch]:
    """While open, building a region waits for `Batch.compile`; calls of an optimised model must come after it."""
    batch = Batch()
    with (
        mock.patch.object(build, "build_each", batch.names),
        mock.patch.object(build, "build", batch.name),
        mock.patch.object(build, "load", batch.load),
        mock.patch.dict(EMPTY, {device: batch.empty(device) for device in EMPTY}),
    ):
        yield batch


def _meaning(source: Source) -> tuple[object, ...]:
    """What two sources have in common if they differ in nothing but the names of the region and of its buffers."""
    text = source.text
    buffers = {name: f"buffer{number}" for number, name in enumerate(dict.fromkeys(_BUFFER.findall(text)))}
    text = _COMMENT.sub("", text)
    own = filter(None, (source.replay, source.entry, source.name))
    names = buffers | {name: f"region{number}" for number, name in enumerate(own)}
    words = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    text = re.sub(rf"\b({words})((?:_\d+)*)\b", lambda found: names[found[1]] + found[2], text)
    return text, source.target, source.arch, source.headers


def _raising(error: BuildError) -> Callable[..., int]:
    def call(*pointers: int | None) -> int:
        raise error

    return call


def _joined(sources: Sequence[Source]) -> Source:
    """One source with the kernels of all, each in a namespace of its own and its entries numbered."""
    includes = dict.fromkeys(line for s in sources for line in s.text.splitlines() if line.startswith("#include"))
    parts = []
    for number, source in enumerate(sources):
        body = "\n".join(line for line in source.text.splitlines() if not line.startswith("#include"))
        for entry in filter(None, (source.entry, source.replay)):
            body = re.sub(rf"\b{entry}\b", f"{entry}_{number}", body)
        parts.append(f"namespace batch_{number} {{\n{body}\n}}")
    return replace(sources[0], name="batch", text="\n".join([*includes, *parts]) + "\n")
