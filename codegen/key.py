"""The key of a source in the cache: a hash of everything that decides which library it becomes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence

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
    key = source_key(source)
    try:
        return f"{key}{COMPILERS}{_digest(_translation(source))[:_COMPILERS]}"
    except BuildError:
        return key


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
            "headers": _headers(source.name, source.headers, source.text),
            "flags": [*toolchain.flags(source.target, source.arch), *toolchain.link_flags(source.target)],
            "cpu": toolchain.cpu_identity() if source.arch == NATIVE else "",
        }
    )


def _translation(source: Source) -> dict[str, object]:
    """What translates `source`: compilers and their environment, and what NVRTC is told and includes where it is one of them.

    Raises:
        BuildError: a compiler is not installed, or a header cannot be read.
    """
    made_of: dict[str, object] = {"identity": toolchain.identity(source.target)}
    if source.target is Target.CUDA and toolchain.cuda_compiler().is_nvrtc:
        made_of["flags"] = [*toolchain.nvrtc_flags(source.arch), *toolchain.LAUNCHER_FLAGS]
        made_of["headers"] = _headers("NVRTC", toolchain.NVRTC_HEADERS, "")
    return made_of


def _digest(made_of: object) -> str:
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()


def _headers(whose: str, named: Sequence[str], text: str) -> dict[str, str]:
    """Contents of the headers that are `named` or included by `text`, and of those they include, by name."""
    folder = toolchain.include_directory()
    found: dict[str, str] = {}

    def included(text: str) -> Iterator[str]:
        return (name for name in _INCLUDE.findall(text) if (folder / name).is_file())

    pending = [*named, *included(text)]
    while pending:
        name = pending.pop()
        if name in found:
            continue
        try:
            found[name] = (folder / name).read_text()
        except OSError as error:
            raise BuildError(f"{whose} includes a header that cannot be read: {error}") from error
        pending += included(found[name])
    return found
