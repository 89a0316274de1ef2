"""The key of a source in the cache: a hash of everything that decides which library it becomes."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fusepass.codegen import toolchain
from fusepass.codegen.cache_entry import COMPILERS
from fusepass.codegen.instructions import NATIVE
from fusepass.codegen.source import Source, Target
from fusepass.errors import BuildError

_FORMAT = 3  # of a library's description in the cache; since the third, compilers are a part of the key by themselves
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
_COMPILERS = 16  # digits that tell compilers apart


def cache_key(source: Source) -> str:
    """What `source` is kept under: its `source_key`, and behind a dash what compilers and their environment are.

    Where a compiler is missing there is no dash, and what any compiler made of the source serves. Runs no program; takes well
    under 5 ms.

    Raises:
        BuildError: a header cannot be read.
    """
    (key,) = cache_keys([source])
    if isinstance(key, BuildError):
        raise key
    return key


def cache_keys(sources: Sequence[Source]) -> list[str | BuildError]:
    """The `cache_key` of each of `sources`, or why it has none; compilers are looked at once for each kind of source."""
    kinds = {(source.target, source.arch): source for source in sources}
    endings = {kind: compilers(source) for kind, source in kinds.items()}
    keys: list[str | BuildError] = []
    for source in sources:
        try:
            keys.append(source_key(source) + endings[source.target, source.arch])
        except BuildError as error:
            keys.append(error)
    return keys


def compilers(source: Source) -> str:
    """What stands for the compilers of `source` at the end of a key; nothing where one is missing."""
    try:
        return f"{COMPILERS}{_digest(_translation(source))[:_COMPILERS]}"
    except BuildError:
        return ""


def source_key(source: Source) -> str:
    """Hash of `source` but for its name, its headers, flags, CPU and torch, in hexadecimal: of all but the compilers.

    Raises:
        BuildError: a header cannot be read.
    """
    return _digest(
        {
            "format": _FORMAT,
            "torch": torch.__version__,
            "target": source.target.value,
            "arch": source.arch,
            "entry": source.entry,
            "text": source.text,
            "headers": _digests(included(source.name, source.headers, source.text)),
            "flags": [*toolchain.flags(source.target, source.arch), *toolchain.link_flags(source.target)],
            "cpu": toolchain.cpu_identity() if source.arch == NATIVE else "",
        }
    )


@dataclass(frozen=True)
class Header:
    """A header of the package: its contents, their hash, and the names of those beside it that it includes."""

    text: str
    digest: str
    includes: tuple[str, ...]


def included(whose: str, named: Sequence[str], text: str) -> dict[str, Header]:
    """The headers that are `named` or included by `text`, and those they include, by name.

    Raises:
        BuildError: one cannot be read; the text says `whose`.
    """
    folder = str(toolchain.include_directory())
    found: dict[str, Header] = {}
    pending = [*named, *(name for name in _INCLUDE.findall(text) if _header(folder, name))]
    while pending:
        name = pending.pop()
        if name in found:
            continue
        header = _header(folder, name)
        if header is None:
            raise BuildError(f"{whose} includes a header that cannot be read: there is no {name} in {folder}")
        found[name] = header
        pending += header.includes
    return found


def _digests(headers: Mapping[str, Header]) -> dict[str, str]:
    return {name: header.digest for name, header in headers.items()}


@functools.cache
def package_key() -> str:
    """Hash of this package's own files, which decide what is generated of a graph. Takes some 20 ms, once."""
    top = Path(__file__).parents[1]
    files = (Path(folder, name) for folder, _, names in os.walk(top, followlinks=True) for name in names)
    made_of = hashlib.sha256()
    for path in sorted(path for path in files if path.suffix != ".pyc"):
        content = path.read_bytes()
        made_of.update(f"{path.relative_to(top)} {len(content)}\n".encode() + content)
    return made_of.hexdigest()


def _translation(source: Source) -> dict[str, object]:
    """What translates `source`: compilers and their environment, and what those of a cubin, and of what launches it, are told and include.

    Raises:
        BuildError: a compiler is not installed, or a header cannot be read.
    """
    made_of: dict[str, object] = {"identity": toolchain.identity(source.target)}
    if source.target is Target.CUDA and toolchain.launches_cubins():
        launcher = [*toolchain.LAUNCHER_FLAGS, *toolchain.LAUNCHER_LINK_FLAGS]
        made_of["flags"] = [*toolchain.nvrtc_flags(source.arch), *launcher]
        made_of["headers"] = _digests(included("what launches", toolchain.LAUNCHER_HEADERS, ""))
    return made_of


def _digest(made_of: object) -> str:
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()


def _header(folder: str, name: str) -> Header | None:
    """A header; None where there is none.

    Raises:
        BuildError: it cannot be read.
    """
    path = os.path.join(folder, name)
    try:
        status = os.stat(path)
        return _read(folder, path, status.st_mtime_ns, status.st_size)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BuildError(f"a header cannot be read: {error}") from error


@functools.cache
def _read(folder: str, path: str, _changed: int, _size: int) -> Header:
    text = Path(path).read_text()
    includes = tuple(name for name in _INCLUDE.findall(text) if os.path.isfile(os.path.join(folder, name)))
    return Header(text, _digest(text), includes)
