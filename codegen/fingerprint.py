"""The library that tells whether memory has changed: a fingerprint of what is in it."""

from __future__ import annotations

from fusepass.codegen.source import Source, Target

CHUNK = 32768
"""Bytes that are taken together; `fp::kChunk` in ``fp_fingerprint.h``."""

ARGUMENTS = 5
"""Pointers that the entry takes: to the pieces' addresses, their bytes, the chunks before each of them and in all, how many pieces there are,
and the 16 bytes that it writes."""

_TEXT = """\
// fingerprint(pieces) -> 128 bits

#include "fp_fingerprint.h"

extern "C" int run_fingerprint(void* pieces, void* bytes, void* first, void* count, void* sums, void*)
{
    fp::fingerprint(
        static_cast<const char* const*>(pieces), static_cast<int64_t*>(bytes), static_cast<int64_t*>(first), *static_cast<int64_t*>(count),
        static_cast<uint64_t*>(sums));
    return 0;
}
"""


def source(arch: str) -> Source:
    """The library for a CPU of that architecture."""
    return Source("fingerprint", "run_fingerprint", Target.CPU, _TEXT, ("fp_fingerprint.h",), arch)
