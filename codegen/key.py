"""The key of a source in the cache: a hash of everything that decides which library it becomes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence

import torch

from fusepass.codegen import toolchain
<<<<<<< HEAD
from fusepass.codegen.cache_entry import COMPILERS
from fusepass.codegen.instructions import NATIVE
from fusepass.codegen.source import Source
=======
from fusepass.codegen.source import Source, Target
>>>>>>> pipway
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
<<<<<<< HEAD
    key = source_key(source)
    try:
        return f"{key}{COMPILERS}{_digest(toolchain.identity(source.target))[:_COMPILERS]}"
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
            "headers": _headers(source),
            "flags": [*toolchain.flags(source.target, source.arch), *toolchain.link_flags(source.target)],
            "cpu": toolchain.cpu_identity() if source.arch == NATIVE else "",
        }
    )


def _digest(made_of: object) -> str:
=======
    by_nvrtc = source.target is Target.CUDA and toolchain.cuda_compiler().is_nvrtc
    more = [*toolchain.nvrtc_flags(source.arch), *toolchain.LAUNCHER_FLAGS] if by_nvrtc else []
    made_of = {
        "format": _FORMAT,
        "torch": torch.__version__,
        "target": source.target.value,
        "arch": source.arch,
        "entry": source.entry,
        "text": source.text,
        "headers": _headers(source, toolchain.NVRTC_HEADERS if by_nvrtc else ()),
        "flags": [*more, *toolchain.flags(source.target, source.arch), *toolchain.link_flags(source.target)],
        "identity": toolchain.identity(source.target),
    }
>>>>>>> pipway
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()


def _headers(source: Source, more: Sequence[str]) -> dict[str, str]:
    """Contents of the headers `source` includes, of `more`, and of those they include, by name."""
    folder = toolchain.include_directory()
    found: dict[str, str] = {}

    def included(text: str) -> Iterator[str]:
        return (name for name in _INCLUDE.findall(text) if (folder / name).is_file())

    pending = [*source.headers, *more, *included(source.text)]
    while pending:
        name = pending.pop()
        if name in found:
            continue
        try:
            found[name] = (folder / name).read_text()
        except OSError as error:
            raise BuildError(f"{source.name} includes a header that cannot be read: {error}") from error
        pending += included(found[name])
    return found
