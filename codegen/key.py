"""The key of a source in the cache: a hash of everything that decides which library it becomes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence

import torch

from fusepass.codegen import toolchain
from fusepass.codegen.source import Source, Target
from fusepass.errors import BuildError

_FORMAT = 2  # of a library's description in the cache; since the second, it names the key
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def cache_key(source: Source) -> str:
    """Hash of `source` but for its name, its headers, flags, compilers, CPU and torch, in hexadecimal.

    Runs no program; takes well under 5 ms.

    Raises:
        BuildError: a compiler is not installed, or a header cannot be read.
    """
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
