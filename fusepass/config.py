"""The options of fusepass: one frozen value, set by argument, by `override` or by environment."""

from __future__ import annotations

import contextlib
import enum
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypedDict, Unpack

ALL = "all"
"""In `Config.disable`: never fuse."""

EFFORTS = ("off", "fast", "max")
"""What `Config.tune` may be."""

TRAINING = ("fused", "eager")
"""What `Config.training` may be."""

CUDA_COMPILERS = ("auto", "nvcc", "nvrtc")
"""What `Config.cuda_compiler` may be."""


COMPILE = ("first", "background")
"""What `Config.compile` may be."""

METHODS = ("original", "fused")
"""What `Config.methods` may be."""


class Algebra(enum.StrEnum):
    """Which rewrite rules may be applied; each level takes in those before it."""

    OFF = "off"  # none, and equal operators are not shared either
    SAFE = "safe"  # those that keep NaN and infinities where eager has them, but for what docs/limits.md names
    FINITE = "finite"  # also those that are right only where no value is NaN or infinite, such as x - x = 0

    def takes_in(self, level: Algebra) -> bool:
        """Whether what needs `level` may be applied at this one."""
        levels = list(Algebra)
        return levels.index(level) <= levels.index(self)


class Rounding(enum.StrEnum):
    """Where what fused operators hand to each other in 16 bits is rounded."""

    FUSED = "fused"  # where it is stored, and where something decides by it, such as a comparison; elsewhere it stays in float32
    EAGER = "eager"  # behind each operator, as eager does


def _user_cache() -> Path:
    """Where the XDG base directory specification puts a user's cached files; a relative path is to be ignored, it says.

    platformdirs would give the same: Linux is the only system that is supported.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    return Path(named if os.path.isabs(named) else "~/.cache", "fusepass")


@dataclass(frozen=True)
class Config:
    """Every option of fusepass.

    `current()` gives the options in force. For each of them `override` goes before the environment variable
    named here, and that before the default. The environment is read when `current` is called.

    Attributes:
        debug: verify the kernel IR after each pass, and say more in errors (``FUSEPASS_DEBUG``).
        dump: directory that receives the IR after each pass, and the source; None writes nothing
            (``FUSEPASS_DUMP``).
        disable: names of the rules and patterns that are not applied, or such a text as the variable holds; `teams`
            among them: no blocks share rows; `chunks`: no matrix product is made in chunks of rows;
            `ALL` among them means never to fuse (``FUSEPASS_DISABLE``, with commas; ``1`` is ``all``).
        algebra: which rewrite rules may be applied: ``"safe"``, ``"finite"`` or ``"off"``, see `Algebra`
            (``FUSEPASS_ALGEBRA``).
        rounding: where float16 and bfloat16 are rounded between fused operators: ``"fused"`` or ``"eager"``, see `Rounding`
            (``FUSEPASS_ROUNDING``).
        cache_dir: where built libraries are kept, by default ``fusepass`` in the user's cache directory
            (``FUSEPASS_CACHE_DIR``).
        cuda_compiler: what translates CUDA sources: ``"auto"`` is NVRTC where its machine code is nvcc's, from CUDA 13.1 on, else nvcc, or NVRTC
            where that is not found; ``"nvcc"``, or NVRTC where that is not found; ``"nvrtc"``, or nvcc (``FUSEPASS_CUDA_COMPILER``).
        cache_size: bytes that the cache directory may have, at least 1; from there on what was not used for longest is removed
            (``FUSEPASS_CACHE_SIZE``, such as ``500M`` or ``2G``).
        jobs: compilers that run at once, at least 1, by default the CPUs of this process (``FUSEPASS_JOBS``).
        workers: processes beside this one that generate code, from 0 on; None: half as many as `jobs`, at most 4, where there are at least 4
            and a graph has enough regions (``FUSEPASS_WORKERS``, a number or ``auto``).
        max_signatures: signatures of one module that are remembered, at least 1; the one that was not called for
            longest is forgotten.
        max_builds: libraries built for one region for different sizes, at least 1; sizes that none of them fits run
            the region's own operators.
        tune: how much is tried to find out, for each region, whether generated code is right and faster than its own
            operators, and in which form: ``"off"`` nothing, ``"fast"`` some 30 ms a region, ``"max"`` a second
            (``FUSEPASS_TUNE``).
        tune_budget: seconds that other candidates than each region's first one may add to the first call of a graph, by an estimate of
            what generating and building them takes, so that the same ones are built on a busy machine; spent where operators take most
            time. None: 5 at ``tune="fast"``, no limit at ``"max"`` (``FUSEPASS_TUNE_BUDGET``).
        cuda_graphs: whether the calls of a specialisation are captured in a CUDA graph and replayed: ``"auto"`` where its
            first calls show that this is faster, True from the second call on, False never. Where it cannot be, nothing
            changes and the report says why (``FUSEPASS_CUDA_GRAPHS``).
        training: what a call of an optimised model that needs gradients runs: ``"fused"``, generated kernels forward and backward,
            or ``"eager"``, the original operators (``FUSEPASS_TRAINING``).
        methods: which forward methods of an optimised model run that call it, such as ``generate``: ``"fused"``, the optimised one, or
            ``"original"``, the model's own, with a warning (``FUSEPASS_METHODS``).
        memory_budget: the share, from 0 to 1, of what forward would save for backward that it may: the smaller, the more is computed again.
            As ``torch._functorch.config.activation_memory_budget``; of both, the smaller one counts (``FUSEPASS_MEMORY_BUDGET``).
        compile: when a call of a new signature is compiled: ``"first"``, before that call, which waits for it, or ``"background"``, beside the
            program, whose calls run the original operators until it is done (``FUSEPASS_COMPILE``).
        progress: show on stderr how far a compilation is that takes long; None does so where stderr is a terminal.

    Raises:
        ValueError: an option is out of range.
    """

    debug: bool = False
    dump: Path | None = None
    disable: frozenset[str] = frozenset()
    algebra: Algebra = Algebra.SAFE
    rounding: Rounding = Rounding.FUSED
    cache_dir: Path = field(default_factory=_user_cache)
    cuda_compiler: str = "auto"
    cache_size: int = 2 << 30
    jobs: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    workers: int | None = None
    max_signatures: int = 512
    max_builds: int = 16
    tune: str = "fast"
    tune_budget: float | None = None
    cuda_graphs: bool | str = "auto"
    training: str = "fused"
    methods: str = "fused"
    memory_budget: float = 1.0
    compile: str = "first"
    progress: bool | None = None

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "disable", _names(self.disable))
        except ValueError as wrong:
            raise ValueError(f"disable is {self.disable!r}; allowed is: {wrong}") from None
        for option, needed in (("cache_dir", True), ("dump", False)):
            value = getattr(self, option)
            if not isinstance(value, str | os.PathLike) and (needed or value is not None):
                raise ValueError(f"{option} is {value!r}; allowed is a path{'' if needed else ', or None'}")
        for option, levels in (("algebra", Algebra), ("rounding", Rounding)):
            value = getattr(self, option)
            if value not in list(levels):
                raise ValueError(f"{option} is {value!r}; allowed is one of {', '.join(levels)}")
            object.__setattr__(self, option, levels(value))
        object.__setattr__(self, "cache_dir", _absolute(self.cache_dir))
        if self.dump is not None:
            object.__setattr__(self, "dump", _absolute(self.dump))
        for option in ("cache_size", "jobs", "max_signatures", "max_builds"):
            value = getattr(self, option)
            if type(value) is not int or value < 1:
                raise ValueError(f"{option} is {value!r}; allowed is a whole number from 1 on")
        if self.workers is not None and (type(self.workers) is not int or self.workers < 0):
            raise ValueError(f"workers is {self.workers!r}; allowed is a whole number from 0 on, or None")
        if type(self.memory_budget) not in (int, float) or not 0 <= self.memory_budget <= 1:
            raise ValueError(f"memory_budget is {self.memory_budget!r}; allowed is a number from 0 to 1")
        budget = self.tune_budget
        if budget is not None and (type(budget) not in (int, float) or not budget >= 0):
            raise ValueError(f"tune_budget is {budget!r}; allowed is a number of seconds from 0 on, inf, or None")
        for option, allowed in (
            ("debug", (True, False)),
            ("cuda_graphs", (True, False, "auto")),
            ("progress", (True, False, None)),
        ):
            if not any(
                type(getattr(self, option)) is type(value) and getattr(self, option) == value for value in allowed
            ):
                names = ", ".join(map(str, allowed))
                raise ValueError(f"{option} is {getattr(self, option)!r}; allowed is one of {names}")
        texts_of = (
            ("tune", EFFORTS),
            ("training", TRAINING),
            ("methods", METHODS),
            ("cuda_compiler", CUDA_COMPILERS),
            ("compile", COMPILE),
        )
        for option, texts in texts_of:
            if getattr(self, option) not in texts:
                raise ValueError(f"{option} is {getattr(self, option)!r}; allowed is one of {', '.join(texts)}")

    @property
    def fuses(self) -> bool:
        """Whether anything may be fused at all."""
        return ALL not in self.disable

    def allows(self, name: str) -> bool:
        """Whether the rule or pattern called `name` may be applied."""
        return self.fuses and name not in self.disable


class Options(TypedDict, total=False):
    """The fields of `Config` as keyword arguments, so that type checkers know their names and values."""

    debug: bool
    dump: str | os.PathLike[str] | None
    disable: str | Collection[str]
    algebra: Literal["off", "safe", "finite"]
    rounding: Literal["fused", "eager"]
    cache_dir: str | os.PathLike[str]
    cuda_compiler: Literal["auto", "nvcc", "nvrtc"]
    cache_size: int
    jobs: int
    workers: int | None
    max_signatures: int
    max_builds: int
    tune: Literal["off", "fast", "max"]
    tune_budget: float | None
    cuda_graphs: bool | Literal["auto"]
    training: Literal["fused", "eager"]
    methods: Literal["original", "fused"]
    memory_budget: float
    compile: Literal["first", "background"]
    progress: bool | None


def current() -> Config:
    """The options in force here and now.

    Raises:
        ValueError: an environment variable that is not overridden has a value that is not allowed; the text
            names the variable and what is allowed.
    """
    overridden = _overrides.get()
    return Config(**(_from_environment(skip=overridden) | dict(overridden)))


def debugging() -> bool:
    """`current().debug`, where it is asked so often that reading all options would take longer than what is checked."""
    overridden = _overrides.get()
    return bool(overridden["debug"] if "debug" in overridden else _environment("debug") or Config.debug)


def cache_directory() -> Path:
    """`current().cache_dir`, which is asked for with each library and each choice that is looked up."""
    overridden = _overrides.get()
    named = overridden["cache_dir"] if "cache_dir" in overridden else _environment("cache_dir")
    return _absolute(named or _user_cache())


@contextlib.contextmanager
def override(**options: Unpack[Options]) -> Iterator[Config]:
    """Set `options`, named as the fields of `Config`, in this context (thread, task) until the block ends.

    Yields:
        The options then in force.

    Raises:
        TypeError: an option is unknown.
        ValueError: an option is out of range.
    """
    valid = [option.name for option in fields(Config)]
    unknown = [name for name in options if name not in valid]
    if unknown:
        raise TypeError(f"unknown option {', '.join(unknown)}; the options are {', '.join(valid)}")
    token = _overrides.set(MappingProxyType({**_overrides.get(), **options}))
    try:
        yield current()
    finally:
        _overrides.reset(token)


def _absolute(path: str | os.PathLike[str]) -> Path:
    return Path(path).expanduser().absolute()


_overrides: ContextVar[Mapping[str, Any]] = ContextVar("fusepass_options", default=MappingProxyType({}))

_YES = ("1", "true", "yes", "on")
_FACTORS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_NO = ("0", "false", "no", "off")


def _flag(text: str) -> bool:
    if text.lower() not in (*_YES, *_NO):
        raise ValueError("1, true, yes, on, 0, false, no, off")
    return text.lower() in _YES


def _auto(text: str) -> bool | str:
    try:
        return "auto" if text.lower() == "auto" else _flag(text)
    except ValueError as allowed:
        raise ValueError(f"auto, {allowed}") from None


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("a whole number from 1 on")
    return int(text)


def _workers(text: str) -> int | None:
    if text.lower() == "auto":
        return None
    if not text.isdecimal():
        raise ValueError("a whole number from 0 on, or auto")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise ValueError("a number of seconds from 0 on, or inf")
    return seconds


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 1:
        raise ValueError("a number from 0 to 1")
    return share


def _bytes(text: str) -> int:
    number, factor = (text[:-1], _FACTORS[text[-1].upper()]) if text[-1:].upper() in _FACTORS else (text, 1)
    if not number.isdecimal() or int(number) < 1:
        raise ValueError("a whole number from 1 on, in bytes, or with K, M, G or T behind it in units of 1024")
    return int(number) * factor


def _among(allowed: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in allowed:
            raise ValueError(f"one of {', '.join(allowed)}")
        return text.lower()

    return parse


def _names(names: str | Collection[str]) -> frozenset[str]:
    """The set of `names`, given as such or separated by commas; on and off as for a flag."""
    if not isinstance(names, str):
        if not isinstance(names, Collection) or not all(isinstance(name, str) for name in names):
            raise ValueError("names of rules and patterns: one text, or several in a set or list")
        return frozenset(names)
    if names.lower() in _NO:
        return frozenset()
    if names.lower() in (*_YES, ALL):
        return frozenset({ALL})
    parts = [part.strip() for part in names.split(",")]
    if not all(parts):
        raise ValueError("1, all, 0, or names of rules and patterns separated by commas")
    return frozenset(parts)


def _one_of(levels: type[enum.StrEnum]) -> Callable[[str], enum.StrEnum]:
    def parse(text: str) -> enum.StrEnum:
        if text.lower() not in list(levels):
            raise ValueError(f"one of {', '.join(levels)}")
        return levels(text.lower())

    return parse


_VARIABLES: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "debug": ("FUSEPASS_DEBUG", _flag),
    "dump": ("FUSEPASS_DUMP", Path),
    "disable": ("FUSEPASS_DISABLE", _names),
    "algebra": ("FUSEPASS_ALGEBRA", _one_of(Algebra)),
    "rounding": ("FUSEPASS_ROUNDING", _one_of(Rounding)),
    "cache_dir": ("FUSEPASS_CACHE_DIR", Path),
    "cuda_compiler": ("FUSEPASS_CUDA_COMPILER", _among(CUDA_COMPILERS)),
    "cache_size": ("FUSEPASS_CACHE_SIZE", _bytes),
    "jobs": ("FUSEPASS_JOBS", _count),
    "workers": ("FUSEPASS_WORKERS", _workers),
    "tune": ("FUSEPASS_TUNE", _among(EFFORTS)),
    "tune_budget": ("FUSEPASS_TUNE_BUDGET", _seconds),
    "cuda_graphs": ("FUSEPASS_CUDA_GRAPHS", _auto),
    "training": ("FUSEPASS_TRAINING", _among(TRAINING)),
    "methods": ("FUSEPASS_METHODS", _among(METHODS)),
    "memory_budget": ("FUSEPASS_MEMORY_BUDGET", _share),
    "compile": ("FUSEPASS_COMPILE", _among(COMPILE)),
}


def _from_environment(skip: Collection[str]) -> dict[str, Any]:
    """Options whose variable is set and not empty, but those in `skip`."""
    options = {option: _environment(option) for option in _VARIABLES if option not in skip}
    return {option: value for option, value in options.items() if value is not None}


def _environment(option: str) -> Any:
    """What the environment says of an option; None if its variable is not set, or empty."""
    variable, parse = _VARIABLES[option]
    text = os.environ.get(variable, "").strip()
    try:
        return parse(text) if text else None
    except ValueError as allowed:
        raise ValueError(f"{variable} is {text!r}; allowed is: {allowed}") from None
