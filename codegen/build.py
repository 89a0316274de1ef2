"""Turns sources into shared libraries with `load_inline`, several at once, and loads their entry points."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import errno
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from fusepass.codegen import cache, cache_entry, cache_folders, toolchain
from fusepass.codegen.key import cache_keys
from fusepass.codegen.source import Source, Target
from fusepass.config import current
from fusepass.errors import BuildError

_log = logging.getLogger(__name__)
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
_PROGRESS_AFTER = 1.0  # seconds
_PLAIN = re.compile(r"[\w./+@%=,-]+", re.ASCII)  # paths that mean themselves to ninja, shells and linkers
_UNUSED = "unused"  # a folder where a library is built
_SOON = 1e-4  # seconds until a thread that waits for the interpreter is let in
_hasty = 0  # how many want it so
_usual_interval = 0.0
_hasty_lock = threading.Lock()
_begun: dict[str, threading.Thread] = {}  # those of `begin` that run, by key
_loaded: dict[Path, ctypes.CDLL] = {}


def build(source: Source) -> Path:
    """The shared library of `source`, from the cache where it is there.

    Raises:
        BuildError: no compiler, or it failed; with command, path of the source and what it said.
    """
    (result,) = build_all([source])
    if isinstance(result, BuildError):
        raise result
    return result


def build_all(sources: Sequence[Source]) -> list[Path | BuildError]:
    """The shared library of each source, or why there is none; `Config.jobs` are built at once.

    Sources that differ in nothing but their name are built once.
    """
    keys = cache_keys(sources)
    wanted = {key: source for key, source in zip(keys, sources, strict=True) if isinstance(key, str)}
    results: dict[str, Path | BuildError] = {
        key: library for key in wanted if (library := cache.lookup(key)) is not None
    }
    results |= _build_missing({key: source for key, source in wanted.items() if key not in results})
    return [key if isinstance(key, BuildError) else results[key] for key in keys]


def begin(source: Source) -> None:
    """Start to build `source` beside what else is done, unless as many builds are under way as may be.

    `build_all` waits for it, and says what failed.
    """
    (key,) = cache_keys([source])
    try:
        if isinstance(key, BuildError) or cache.lookup(key) is not None or _no_compiler(source) is not None:
            return
        if toolchain.environment():
            return
    except (BuildError, OSError):
        return
    import filelock  # noqa: F401, here rather than in a thread that shares the interpreter
    import torch.utils.cpp_extension  # noqa: F401, as in `_build_missing`

    def run() -> None:
        with contextlib.suppress(OSError):
            _build_one(key, source)
        del _begun[key]

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True)
    if key not in _begun and len(_begun) < current().jobs - 1:
        _begun[key] = thread
        thread.start()


@contextlib.contextmanager
def threads_soon() -> Iterator[None]:
    """Let the threads of `begin` have the interpreter soon: each time one was outside of it, it would wait for 5 ms.

    Before a compiler runs they are outside a hundred times, so that it would start when all that is done beside it is over.
    """
    global _usual_interval, _hasty
    with _hasty_lock:
        if _hasty == 0:
            _usual_interval = sys.getswitchinterval()
            sys.setswitchinterval(min(_usual_interval, _SOON))
        _hasty += 1
    try:
        yield
    finally:
        with _hasty_lock:
            _hasty -= 1
            if _hasty == 0:
                sys.setswitchinterval(_usual_interval)


def load(library: Path | ctypes.CDLL, entry: str, arguments: int) -> Callable[..., int]:
    """The function `entry` of `library`, which may be loaded already: takes `arguments` pointers and the stream, returns a status.

    All are passed as integers, 0 or None for none. The call releases the interpreter lock.

    Raises:
        BuildError: the library cannot be loaded or has no such function.
    """
    try:
        function = loaded(library)[entry]
    except (OSError, AttributeError) as error:
        path = library if isinstance(library, Path) else None
        raise BuildError(f"a built library cannot be loaded: {path or library}: {error}", path=path) from error
    function.argtypes = (ctypes.c_void_p,) * (arguments + 1)
    function.restype = ctypes.c_int
    return function


def loaded(library: Path | ctypes.CDLL) -> ctypes.CDLL:
    """The library itself, which this process loads once: it is there to stay, whatever becomes of its file.

    Raises:
        OSError: it is not there, damaged, may be from somebody else, or is no library.
    """
    if not isinstance(library, Path):
        return library
    if library not in _loaded:
        with cache_entry.opened(library) as path:
            _loaded[library] = ctypes.CDLL(path)
    return _loaded[library]


def _no_compiler(source: Source) -> BuildError | None:
    """Why `source` cannot be built at all; None where there is a compiler for it."""
    try:
        toolchain.identity(source.target)
    except BuildError as error:
        return error
    return None


def _build_missing(missing: Mapping[str, Source]) -> dict[str, Path | BuildError]:
    hopeless: dict[str, Path | BuildError]
    hopeless = {key: error for key, source in missing.items() if (error := _no_compiler(source)) is not None}
    missing = {key: source for key, source in missing.items() if key not in hopeless}
    if not missing:
        return hopeless
    try:
        lacking = toolchain.environment()
    except BuildError as error:
        return hopeless | dict.fromkeys(missing, error)
    # Only now, because it takes a while; and here, because not all it imports may be imported by two threads.
    import torch.utils.cpp_extension  # noqa: F401

    jobs = min(current().jobs, len(missing))
    with contextlib.ExitStack() as stack:
        stack.callback(cache.trim)
        stack.enter_context(_progress(len(missing)))
        stack.enter_context(_variables(lacking))
        if jobs == 1:
            # In this thread: as the interpreter ends, no pool takes anything, and `quick` waits for its library.
            return hopeless | {key: _build_one(key, source) for key, source in missing.items()}
        with ThreadPoolExecutor(jobs) as pool:
            built = {
                key: pool.submit(contextvars.copy_context().run, _build_one, key, source)
                for key, source in missing.items()
            }
            return hopeless | {key: future.result() for key, future in built.items()}


def _build_one(key: str, source: Source) -> Path | BuildError:
    begun = _begun.get(key)
    if begun is not None and begun is not threading.current_thread():
        begun.join()
    start = time.perf_counter()
    try:
        library = cache.store(key, source, lambda directory: _load_inline(source, key, directory))
    except BuildError as error:
        _log.info("%s: %s", source.name, error.args[0])
        return error
    _log.debug("%s: built for %s in %.2f s: %s", source.name, source.arch, time.perf_counter() - start, library)
    return library


def _load_inline(source: Source, key: str, directory: Path) -> Path:
    """Build `source` in `directory`, whatever that is called. OSError means that the disk is full or read-only."""
    if _PLAIN.fullmatch(str(directory)):
        return _load_inline_in(source, key, directory)
    usual = tempfile.gettempdir()
    with cache_folders.stage(Path(usual if _PLAIN.fullmatch(usual) else "/tmp"), cache_folders.OWN) as plain:
        library = _load_inline_in(source, key, plain)
        return Path(shutil.move(library, directory / library.name))


def _load_inline_in(source: Source, key: str, directory: Path) -> Path:
    from torch.utils import cpp_extension

    cuda = source.target is Target.CUDA
    if cuda and torch.version.cuda is None:
        raise BuildError(f"{source.name} needs CUDA, and this PyTorch ({torch.__version__}) has none")
    (directory / _UNUSED).mkdir()
    for name in toolchain.UNUSED_LIBRARIES:
        (directory / _UNUSED / f"lib{name}.a").write_text("!<arch>\n")  # an archive of nothing
    try:
        library = cpp_extension.load_inline(
            name=f"fusepass_{key[:16]}",
            build_directory=str(directory),
            is_python_module=False,
            no_implicit_headers=True,
            **(_cuda_inputs(source, directory) if cuda else _cpu_inputs(source)),
        )
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise
        raise BuildError(f"{source.name} could not be built: {error}") from error
    except (RuntimeError, subprocess.SubprocessError) as error:  # the latter where asking the compiler's version fails
        raise _failure(source, str(error)) from error
    return Path(library)


def _cpu_inputs(source: Source) -> dict[str, Any]:
    """What load_inline is to compile, and how."""
    return {
        "cpp_sources": source.text,
        "extra_cflags": [*toolchain.flags(source.target, source.arch)],
        "extra_ldflags": [f"-L{_UNUSED}", *toolchain.link_flags(source.target)],
        "extra_include_paths": [str(toolchain.include_directory())],
    }


def _cuda_inputs(source: Source, directory: Path) -> dict[str, Any]:
    """The same: a source for nvcc, or one in C++ that launches what NVRTC compiles here and now."""
    home, inputs = toolchain.cuda_home(), _cpu_inputs(source)
    if (library := toolchain.versioned_cudart(home)) is not None:
        (directory / _UNUSED / "libcudart.so").symlink_to(library)
    if toolchain.cuda_compiler().is_nvrtc:
        from fusepass.codegen import nvrtc

        inputs["cpp_sources"] = nvrtc.compiled(source, directory)
        inputs["extra_cflags"] = [*toolchain.LAUNCHER_FLAGS]
        inputs["extra_ldflags"] += [f"-L{home}/lib64", f"-L{home}/lib", "-lcudart"]
        inputs["extra_include_paths"] += [str(home / "include"), str(directory)]
        return inputs
    from torch.utils import cpp_extension

    cpp_extension.CUDA_HOME = str(home)  # which PyTorch looked for as the module was imported, and not everywhere
    inputs["cpp_sources"], inputs["cuda_sources"] = "", inputs["cpp_sources"]
    inputs["extra_cuda_cflags"] = inputs.pop("extra_cflags")
    return inputs


def _failure(source: Source, text: str) -> BuildError | OSError:
    """The error that `text`, which load_inline raised with ninja's output in it, stands for."""
    if os.strerror(errno.ENOSPC) in text:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    failed = re.search(r"^FAILED:.*\n(?P<command>.*)\n(?P<said>(?:.*\n?)*)", text, re.MULTILINE)
    if failed is None:
        return BuildError(f"{source.name} could not be built: {text.partition(chr(10))[0]}", stderr=text)
    said = re.split(r"^(?:\[\d+/\d+\] |ninja: )", failed["said"], maxsplit=1, flags=re.MULTILINE)[0]
    return BuildError(
        f"{source.name} does not compile for {source.arch}", command=failed["command"].split(), stderr=said
    )


_variables_lock = threading.Lock()


@contextlib.contextmanager
def _variables(changes: Mapping[str, str]) -> Iterator[None]:
    """`changes` in os.environ, which all threads share: one thread at a time, and only where it must be."""
    if not changes:
        yield
        return
    with _variables_lock:
        before = {name: os.environ.get(name) for name in changes}
        os.environ.update(changes)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


@contextlib.contextmanager
def _progress(count: int) -> Iterator[None]:
    """A line on stderr that says how long `count` builds take; not for short ones, erased at the end."""
    wanted = current().progress
    if wanted is False or (wanted is None and not sys.stderr.isatty()):
        yield
        return
    done = threading.Event()

    def show() -> None:
        start = time.monotonic()
        if done.wait(_PROGRESS_AFTER):
            return
        while not done.wait(0.1):
            what = f"{count} kernel{'s' if count > 1 else ''}"
            passed = time.monotonic() - start
            print(f"\rfusepass: compiling {what} ... {passed:.1f} s", end="", file=sys.stderr, flush=True)
        print("\r\033[K", end="", file=sys.stderr, flush=True)

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
