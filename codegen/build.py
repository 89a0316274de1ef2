"""Turns sources into shared libraries with `load_inline`, several in one and several at once, and loads their entry points."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import errno
import functools
import logging
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch

from fusepass import background
from fusepass.codegen import cache, cache_entry, cache_folders, cubins, toolchain
from fusepass.codegen.key import cache_keys
from fusepass.codegen.source import Source, Target
from fusepass.codegen.units import Queue, joined
from fusepass.config import Config, current
from fusepass.errors import BuildError
from fusepass.progress import shown, tell

_log = logging.getLogger(__name__)
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
_PLAIN = re.compile(r"[\w./+@%=,-]+", re.ASCII)  # paths that mean themselves to ninja, shells and linkers
_UNUSED = "unused"  # a folder where a library is built
_queues: dict[
    tuple[Config, bool], Queue
] = {}  # what was begun and waits, by the options and whether that is beside the program
_LOOK = 0.1  # seconds
_PATIENCE = 2.0  # seconds that compilers have to end in
_under_way: dict[str, threading.Event] = {}  # what is built, by key: set when that is over
_compiling: set[str] = set()  # folders in which compilers run
_NICENESS = 10  # of compilers beside the program: they have a tenth of the time of a processor that it wants as well
_loaded: dict[Path, ctypes.CDLL] = {}
_given: contextvars.ContextVar[Callable[[Source], Path | BuildError] | None]
_given = contextvars.ContextVar("fusepass_given", default=None)  # what is asked in place of cache and compilers


@contextlib.contextmanager
def given(libraries: Callable[[Source], Path | BuildError]) -> Iterator[None]:
    """Take what is built from `libraries` until the block ends, and run no compiler."""
    token = _given.set(libraries)
    try:
        yield
    finally:
        _given.reset(token)


def is_given() -> bool:
    """Whether no compiler runs, as `given` says."""
    return _given.get() is not None


def name(library: ctypes.CDLL, path: Path) -> Path:
    """Have `path`, where no file need be, stand for a library that is loaded already."""
    _loaded[path] = library
    return path


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
    """The shared library of each source, or why there is none; see `build_each`."""
    results = dict(build_each(sources))
    return [results[number] for number in range(len(sources))]


def build_each(sources: Sequence[Source]) -> Iterator[tuple[int, Path | BuildError]]:
    """The number of each source with its shared library, or why there is none, as soon as that is known; `Config.jobs` are built at once.

    Sources that differ in nothing but their name are built once.
    """
    libraries = _given.get()
    if libraries is not None:
        yield from ((number, libraries(source)) for number, source in enumerate(sources))
        return
    keys = cache_keys(sources)
    numbers: dict[str, list[int]] = defaultdict(list)
    for number, key in enumerate(keys):
        if isinstance(key, BuildError):
            yield number, key
        else:
            numbers[key].append(number)
    missing: dict[str, Source] = {}
    for key, (first, *_) in numbers.items():
        library = cache.lookup(key)
        if library is None:
            missing[key] = sources[first]
        else:
            yield from ((number, library) for number in numbers[key])
    for key, result in _build_missing(missing):
        yield from ((number, result) for number in numbers[key])


def begin(source: Source) -> None:
    """Start to build `source` beside what else is done, once fewer builds are under way than may be.

    `build_all` waits for what is under way, builds what is not, and says what failed.
    """
    if is_given():
        return
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

    config = current()
    if key in _under_way or config.jobs == 1:
        return
    queue = _queues.setdefault((config, background.active()), Queue(config.jobs - 1))
    queue.add(key, source)

    def run() -> None:
        _give_way()
        for taken in queue.units():
            with contextlib.suppress(OSError, background.Stopped):
                _build_together(taken)

    if queue.begin():
        thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True)
        background.start_thread(thread)


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


def _build_missing(missing: Mapping[str, Source]) -> Iterator[tuple[str, Path | BuildError]]:
    hopeless: dict[str, BuildError]
    hopeless = {key: error for key, source in missing.items() if (error := _no_compiler(source)) is not None}
    yield from hopeless.items()
    missing = {key: source for key, source in missing.items() if key not in hopeless}
    if not missing:
        return
    try:
        lacking = toolchain.environment()
    except BuildError as error:
        yield from dict.fromkeys(missing, error).items()
        return
    # Only now, because it takes a while; and here, because not all it imports may be imported by two threads.
    import torch.utils.cpp_extension  # noqa: F401

    jobs = min(current().jobs, len(missing))
    with contextlib.ExitStack() as stack:
        stack.callback(cache.trim)
        stack.enter_context(shown("a library" if len(missing) == 1 else f"{len(missing)} libraries"))
        stack.enter_context(_variables(lacking))
        results: Iterator[tuple[str, Path | BuildError]]
        for begun in list(_queues.values()):
            begun.remove(missing)
        later = {key: source for key, source in missing.items() if key in _under_way}
        waiting = {key: source for key, source in missing.items() if key not in later}
        queue = Queue(jobs, waiting)
        if jobs == 1 and not background.active():
            # In this thread: as the interpreter ends no other one starts, and `quick` waits for its library.
            queue.begin()
            results = _taken(queue, later)
        else:
            results = _in_threads(queue, later, len(missing))
        tell("build", 0, len(missing))
        for number, (key, result) in enumerate(results, 1):
            tell("build", number, len(missing), missing[key].name)
            yield key, result


def _taken(queue: Queue, later: dict[str, Source]) -> Iterator[tuple[str, Path | BuildError]]:
    """The libraries of what one compiler takes from `queue`; then of what somebody else builds meanwhile, and `later` names."""
    for taken in queue.units():
        yield from _build_together(taken).items()
    while later:
        with contextlib.suppress(KeyError):  # another thread was quicker
            key, source = later.popitem()
            yield key, _build_one(key, source)


def _in_threads(queue: Queue, later: dict[str, Source], count: int) -> Iterator[tuple[str, Path | BuildError]]:
    """The `count` libraries of `queue` and `later` as they are built.

    Nobody waits for a build when this is left early, nor as the process ends.
    """
    made: SimpleQueue[tuple[str, Path | BuildError | BaseException]] = SimpleQueue()

    def run() -> None:
        _give_way()
        try:
            for result in _taken(queue, later):
                made.put(result)
        except BaseException as error:
            made.put(("", error))

    for _ in range(queue.jobs):
        queue.begin()
        background.start_thread(threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True))
    try:
        for _ in range(count):
            key, result = _next(made)
            if isinstance(result, BaseException) and not isinstance(result, BuildError):
                raise result
            yield key, result
    finally:
        queue.clear()
        later.clear()


def _next(made: SimpleQueue[Any]) -> Any:
    """The next of what is `made`; a job beside the program looks meanwhile whether it has to stop or pause."""
    while background.active():
        try:
            return made.get(timeout=_LOOK)
        except Empty:
            background.checkpoint()
    return made.get()


def _give_way() -> None:
    """Let compilers that this thread starts have what time others leave, if they run beside the program."""
    if background.active():
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _stop_builds() -> None:
    """End the compilers that run, and wait a little until builds have tidied up: ninja passes a signal on to those that it has started."""
    until = time.monotonic() + _PATIENCE
    while _under_way and time.monotonic() < until:
        for children in Path("/proc/self/task").glob("*/children"):
            with contextlib.suppress(OSError):
                for child in children.read_text().split():
                    if os.readlink(f"/proc/{child}/cwd") in _compiling:
                        os.kill(int(child), signal.SIGTERM)
        time.sleep(_LOOK / 10)


background.on_stop(_stop_builds)


def _forget_builds() -> None:
    """In a process that was forked: what was under way is in the other one alone."""
    _queues.clear()
    _under_way.clear()
    _compiling.clear()


os.register_at_fork(after_in_child=_forget_builds)


@contextlib.contextmanager
def _building(keys: Collection[str]) -> Iterator[None]:
    """Tell others that these are built here; waits for those that others build."""
    for key in keys:
        if (other := _under_way.get(key)) is not None:
            other.wait()
    if background.ending():
        raise background.Stopped
    over = threading.Event()
    _under_way.update(dict.fromkeys(keys, over))
    try:
        yield
    finally:
        for key in keys:
            _under_way.pop(key, None)
        over.set()


def _build_one(key: str, source: Source) -> Path | BuildError:
    start = time.perf_counter()
    try:
        with _building([key]):
            library = cache.store(key, source, lambda directory: _load_inline([source], key, directory))
    except BuildError as error:
        _log.info("%s: %s", source.name, error.args[0])
        return error
    _log.debug("%s: built for %s in %.2f s: %s", source.name, source.arch, time.perf_counter() - start, library)
    return library


def _build_together(sources: Mapping[str, Source]) -> dict[str, Path | BuildError]:
    """The libraries of `sources`, by key: one for all of them, if that can be. What does not compile is found by halves."""
    made: dict[str, Path | BuildError] = {}
    if len(sources) > 1:
        start = time.perf_counter()
        try:
            with _building(sources):
                made |= cache.store_together(sources, _load_together)
        except BuildError:
            pairs = list(sources.items())
            halves = pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]
            return {key: result for half in halves for key, result in _build_together(dict(half)).items()}
        except (OSError, NotImplementedError) as error:  # which `_build_one` has an answer for
            _log.debug("%d sources are built one by one: %s", len(sources), error)
        _log.debug("%d sources together: built in %.2f s", len(made), time.perf_counter() - start)
    return made | {key: _build_one(key, source) for key, source in sources.items() if key not in made}


def _load_together(sources: Mapping[str, Source], directory: Path) -> Path:
    return _load_inline(list(sources.values()), next(iter(sources)), directory)


def _load_inline(sources: Sequence[Source], key: str, directory: Path) -> Path:
    """Build `sources` as one library in `directory`, whatever that is called. OSError means that the disk is full or read-only."""
    if _PLAIN.fullmatch(str(directory)):
        return _load_inline_in(sources, key, directory)
    usual = tempfile.gettempdir()
    with cache_folders.stage(Path(usual if _PLAIN.fullmatch(usual) else "/tmp"), cache_folders.OWN) as plain:
        library = _load_inline_in(sources, key, plain)
        return Path(shutil.move(library, directory / library.name))


def _load_inline_in(sources: Sequence[Source], key: str, directory: Path) -> Path:
    cpp_extension, source = _cpp_extension(), joined(sources)
    cuda = source.target is Target.CUDA
    if cuda and torch.version.cuda is None:
        raise BuildError(f"{source.name} needs CUDA, and this PyTorch ({torch.__version__}) has none")
    folder = str(directory.resolve())
    (directory / _UNUSED).mkdir()
    for name in toolchain.UNUSED_LIBRARIES:
        (directory / _UNUSED / f"lib{name}.a").write_text("!<arch>\n")  # an archive of nothing
    _compiling.add(folder)
    try:
        library = cpp_extension.load_inline(
            name=f"fusepass_{key[:16]}",
            build_directory=str(directory),
            is_python_module=False,
            no_implicit_headers=True,
            **(_cuda_inputs(source, sources, directory) if cuda else _cpu_inputs(source)),
        )
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise
        raise BuildError(f"{source.name} could not be built: {error}") from error
    # The last one where asking the compiler's version fails.
    except (BuildError, RuntimeError, subprocess.SubprocessError) as error:
        if background.ending():
            raise background.Stopped from None
        said = error.stderr if isinstance(error, BuildError) else str(error)
        if os.strerror(errno.ENOSPC) in said:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        if isinstance(error, BuildError):  # of a cubin
            raise
        raise _failure(source, said) from error
    finally:
        _compiling.discard(folder)
    return Path(library)


@functools.cache
def _cpp_extension() -> Any:
    """PyTorch's module for builds. It runs ninja and the compiler before each of them to ask for versions; from now on once."""
    from torch.utils import cpp_extension

    for name in ("is_ninja_available", "get_compiler_abi_compatibility_and_version"):
        setattr(cpp_extension, name, functools.cache(getattr(cpp_extension, name)))
    return cpp_extension


def _cpu_inputs(source: Source) -> dict[str, Any]:
    """What load_inline is to compile, and how."""
    return {
        "cpp_sources": source.text,
        "extra_cflags": [*toolchain.flags(source.target, source.arch)],
        "extra_ldflags": [f"-L{_UNUSED}", *toolchain.link_flags(source.target)],
        "extra_include_paths": [str(toolchain.include_directory())],
    }


def _cuda_inputs(source: Source, sources: Sequence[Source], directory: Path) -> dict[str, Any]:
    """The same for `source`, which is all `sources` joined: one in C++ that launches a cubin, which is compiled here and now, or one for nvcc."""
    home, inputs = toolchain.cuda_home(), _cpu_inputs(source)
    if (library := toolchain.versioned_cudart(home)) is not None:
        (directory / _UNUSED / "libcudart.so").symlink_to(library)
    if toolchain.launches_cubins():
        inputs["cpp_sources"] = cubins.compiled(sources, directory)
        inputs["extra_cflags"] = [*toolchain.LAUNCHER_FLAGS]
        inputs["extra_ldflags"] += [f"-L{home}/lib64", f"-L{home}/lib", *toolchain.LAUNCHER_LINK_FLAGS]
        inputs["extra_include_paths"] += [str(home / "include"), str(directory)]
        return inputs
    cpp_extension = _cpp_extension()
    cpp_extension.CUDA_HOME = str(home)  # which PyTorch looked for as the module was imported, and not everywhere
    inputs["cpp_sources"], inputs["cuda_sources"] = "", inputs["cpp_sources"]
    inputs["extra_cuda_cflags"] = inputs.pop("extra_cflags")
    return inputs


def _failure(source: Source, text: str) -> BuildError:
    """The error that `text`, which load_inline raised with ninja's output in it, stands for."""
    failed = re.search(r"^FAILED:.*\n(?P<command>.*)\n(?P<said>(?:.*\n?)*)", text, re.MULTILINE)
    if failed is None:
        return BuildError(f"{source.name} could not be built: {text.partition(chr(10))[0]}", stderr=text)
    said = re.split(r"^(?:\[\d+/\d+\] |ninja: )", failed["said"], maxsplit=1, flags=re.MULTILINE)[0]
    return BuildError(
        f"{source.name} does not compile for {source.arch}", command=failed["command"].split(), stderr=said
    )


_variables_lock = threading.RLock()  # what runs between two libraries of a build may build, too


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
