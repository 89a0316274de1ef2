"""Which instruction sets this machine's CPU has, and which code that was compiled for some architecture may use."""

from __future__ import annotations

import functools
import platform
import re

NATIVE = "native"
"""The architecture of code for the CPU that it was built on."""

_V2 = ("cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3")
_V3 = (*_V2, "abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe")
LEVELS: dict[str, tuple[str, ...]] = {
    "x86-64": (),
    "x86-64-v2": _V2,
    "x86-64-v3": _V3,
    "x86-64-v4": (*_V3, "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"),
}
"""The levels of the x86-64 psABI, and what Linux calls the instruction sets that each adds."""

# Of x86: what -march=native may switch on. Others have few flags, all of which count.
_SETS = re.compile(
    r"(v?aes|sse|ssse|avx|amx|fma|f16c|bmi|abm|lahf_lm|popcnt|movbe|adx|cx16|gfni|sha|v?pclmulqdq|rdrand|rdseed|rdpid|xsave|clwb"
    r"|clflushopt|fsgsbase|3dnow|xop|tbm|lwp|serialize|movdir|cldemote|waitpkg|enqcmd|hle|rtm|pku|prefetchw|mwaitx|clzero|ptwrite)"
)
_X86 = ("x86_64", "AMD64")


@functools.cache
def available() -> frozenset[str]:
    """The instruction sets of this machine's CPU, as Linux calls them; empty where it does not say."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = (line.partition(":") for line in file)
            told = next((words for name, _, words in lines if name.strip() in ("flags", "Features")), "")
    except OSError:
        return frozenset()
    x86 = platform.machine() in _X86
    return frozenset(word for word in told.split() if not x86 or _SETS.match(word))


def needed(arch: str) -> frozenset[str]:
    """The instruction sets that code built here for the CPU architecture `arch` may use.

    Raises:
        ValueError: there is no such architecture.
    """
    if arch == NATIVE:
        return available()
    if arch not in LEVELS or platform.machine() not in _X86:
        known = (NATIVE, *(LEVELS if platform.machine() in _X86 else ()))
        raise ValueError(f"{arch!r} is no architecture of this CPU; there are {', '.join(known)}")
    return frozenset(LEVELS[arch])
