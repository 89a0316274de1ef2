"""Built libraries on disk under the hash of all that made them: atomic, locked across processes, verified.

Layout, below `Config.cache_dir`::

    v1/<first two digits of key>/<key>/  lib.so, source.cu or source.cpp, meta.json
    v1/<first two digits of key>/<key>.lock
    v1/shared/                           libraries that several sources share: `fusepass.codegen.units`
    v1/tmp-*/                            builds under way
    v1/failed/                           sources that did not compile
    v1/choices/                          what `fusepass.codegen.choices` keeps
    v1/regions/                          what `fusepass.autotune.recorded` keeps
    v1/graphs/                           what `fusepass.compile.recalled` keeps
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from fusepass.codegen import cache_entry, cache_limit, cache_uses, locks
from fusepass.codegen import cache_folders as folders
from fusepass.codegen.cache_entry import UNREADABLE as UNREADABLE
from fusepass.codegen.cache_entry import CacheEntry as CacheEntry
from fusepass.codegen.source import Source
from fusepass.config import current
from fusepass.errors import BuildError, warn

PATIENCE = 60.0
"""Seconds to wait for a lock: most builds take less, and to build what another process builds as well does no harm."""

_SHORT_PATIENCE = 1.0  # seconds to wait in the minute after a wait in vain: who was stopped with one lock holds others
_trimmed = float("-inf")  # when the cache was last looked through, by the monotonic clock
_in_vain = float("-inf")  # when a wait last was in vain, by the monotonic clock

_TRIES = 5
_STALE_SECONDS = 3600.0  # no build takes that long: its process has died


def lookup(key: str) -> Path | None:
    """The library kept under `key`, if it is there and intact; of a key without compilers, what any of them made.

    The path is for `cache_entry.opened`: the file itself is elsewhere where several entries share it. Nothing is written but the time of
    its use, where that can be.
    """
    found = (cache_entry.serving(top, key) for top in folders.directories())
    serving = next((each for each in found if each is not None), None)
    if serving is None:
        return None
    path, library = serving
    cache_entry.used(path, library)
    _tell(path.name, library)
    return path / cache_entry.LIBRARY


def store(key: str, source: Source, compile: Callable[[Path], Path]) -> Path:
    """Build `source` and keep it under `key`, unless another thread or process has done so meanwhile.

    `compile` writes into the directory it is given and returns the library. A damaged entry is replaced,
    with a warning. Where the cache directory cannot be written, a directory of this process serves instead,
    with one warning. Who has held the lock for `PATIENCE` seconds is not waited for any longer, with a warning.

    Raises:
        BuildError: `compile` raised it, and now its `path` names a copy of the source; or nothing can be
            written.
    """
    library = _stored(key, source, compile)
    _tell(key, cache_entry.library_of(library.parent) or library)
    return library


def store_together(
    sources: Mapping[str, Source], compile: Callable[[Mapping[str, Source], Path], Path]
) -> dict[str, Path]:
    """Build `sources` as one library and keep that under the key of each; those that are there, or that somebody builds just now, are left out.

    `compile` gets the others, and is otherwise as for `store`.

    Raises:
        BuildError: `compile` raised it; nothing is kept.
        OSError, NotImplementedError: the cache directory cannot be written, or nothing be locked there.
    """
    top = folders.writable()
    with contextlib.ExitStack() as stack:
        held = [key for key in sources if stack.enter_context(locks.held(_lock(top, key), 0))]
        paths = {key: cache_entry.path_of(top, key) for key in held}
        ours = {key: sources[key] for key, path in paths.items() if not cache_entry.intact(path)}
        if not ours:
            return {}
        stage = stack.enter_context(folders.stage(folders.root(top), folders.STAGE))
        made, entries = cache_entry.make_several(stage, ours, lambda directory: compile(ours, directory))
        library = made.rename(folders.level(top, folders.SHARED) / made.name)
        for key, entry in entries.items():
            _remove_damaged(paths[key])
            entry.rename(paths[key])
        os.utime(library)  # which is removed behind those that share it
        for key in ours:
            _tell(key, library)
        return {key: paths[key] / cache_entry.LIBRARY for key in ours}


def trim() -> int:
    """Remove what was not used for longest if the cache has become larger than `Config.cache_size`; says how many bytes that frees.

    It looks at the first call, and then at most once in a while.
    """
    global _trimmed
    now = time.monotonic()
    if now - _trimmed < folders.RECENT:
        return 0
    _trimmed = now
    with contextlib.suppress(OSError):
        return cache_limit.trim(folders.writable(), current().cache_size)
    return 0


def entries() -> list[CacheEntry]:
    """All entries, in the order of their keys."""
    found = []
    for path in (path for root in _roots() for path in sorted(root.glob("??/*")) if not _is_lock(path)):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            found.append(cache_entry.read(path))
    return found


def verify() -> list[CacheEntry]:
    """The damaged entries. Each is built anew when it is next asked for."""
    return [entry for entry in entries() if not entry.intact]


def clear() -> int:
    """Remove all entries, locks that nobody holds and what dead builds left; builds under way are not disturbed.

    Returns:
        How many bytes were freed.
    """
    freed = sum(map(_freed, _abandoned()))
    for root in _roots():
        freed += _emptied(root) if _is_folder(root) else _freed(root)
        for lock in root.glob(f"??/*{folders.LOCK}"):
            locks.discard(lock)
        for folder in (*root.glob("??"), root):
            with contextlib.suppress(OSError):  # a build under way has something in it
                folder.rmdir()
    return freed


def _tell(key: str, library: Path) -> None:
    """Say that the entry of `key` is used, and before it the library, where that is not in the entry."""
    if library.name != cache_entry.LIBRARY:
        cache_uses.tell(folders.SHARED, library.stem)
    cache_uses.tell(folders.LIBRARIES, key)


def _stored(key: str, source: Source, compile: Callable[[Path], Path]) -> Path:
    problem = ""
    for _ in range(_TRIES):
        try:
            return _store(folders.writable(), key, source, compile)
        except FileNotFoundError as error:  # another process's `clear` removed a folder that was empty for a moment
            problem = str(error)
        except (OSError, NotImplementedError) as error:  # filelock raises the latter where files cannot be locked
            problem = str(error)
            break
    try:
        return _store(folders.fall_back(problem), key, source, compile)
    except OSError as error:
        raise BuildError(f"a build cannot be written: {error}") from error


def _store(top: Path, key: str, source: Source, compile: Callable[[Path], Path]) -> Path:
    global _in_vain
    path, lock = cache_entry.path_of(top, key), _lock(top, key)
    with locks.held(lock, _patience()) as held:
        if cache_entry.intact(path):
            return path / cache_entry.LIBRARY
        if not held:
            _in_vain = time.monotonic()
            warn(f"{source.name} is built without its lock, {lock}, which another process or thread does not release")
        _remove_damaged(path)
        with folders.stage(folders.root(top), folders.STAGE) as stage:
            try:
                _publish(cache_entry.make(stage, key, source, compile), path)
            except BuildError as error:
                error.path = _keep_failed(top, key, source)
                raise
    return path / cache_entry.LIBRARY


def _lock(top: Path, key: str) -> Path:
    return folders.level(top, key[:2]) / f"{key}{folders.LOCK}"


def _remove_damaged(path: Path) -> None:
    if os.path.lexists(path):
        warn(f"the cache entry {path} is damaged; it is built anew")
        folders.remove(path)


def _patience() -> float:
    return _SHORT_PATIENCE if time.monotonic() - _in_vain < PATIENCE else PATIENCE


def _publish(entry: Path, path: Path) -> None:
    """Move a complete entry to its place; one that was built without the lock and came first serves as well."""
    try:
        entry.rename(path)
    except OSError:
        if not cache_entry.intact(path):
            raise


def _keep_failed(top: Path, key: str, source: Source) -> Path:
    path = folders.level(top, folders.FAILED) / f"{source.name}-{key[:16]}{cache_entry.suffix(source)}"
    path.write_text(source.text)
    return path


def _roots() -> list[Path]:
    folders.directory()  # says what is wrong with the configured one
    return list(map(folders.root, folders.directories()))


def _emptied(root: Path) -> int:
    """Move what can be removed aside, so that nobody finds half an entry, and then remove it; says how many bytes that frees."""
    freed = 0
    with contextlib.suppress(OSError), folders.stage(root, folders.STAGE) as aside:
        for number, path in enumerate(_removable(root)):
            with contextlib.suppress(OSError):
                nbytes = folders.nbytes(path)
                path.rename(aside / str(number))
                freed += nbytes
    return freed


def _removable(root: Path) -> Iterator[Path]:
    """What is kept in `root` or was left there: all but locks and builds under way. Links are not followed."""
    yield from (path for path in root.glob(f"{folders.STAGE}*") if _is_dead(path))
    others = (root / name for name in (*folders.RECORDS, folders.FAILED, folders.SHARED))
    yield from (path for path in others if os.path.lexists(path))
    for level in root.glob("??"):
        if _is_folder(level):
            yield from (path for path in level.iterdir() if not _is_lock(path))
        else:
            yield level


def _abandoned() -> Iterator[Path]:
    """What processes of this user that have ended left in the system's temporary directory."""
    for path in Path(tempfile.gettempdir()).glob(f"{folders.OWN}*"):
        with contextlib.suppress(OSError):
            if _is_folder(path) and path.lstat().st_uid == os.getuid() and locks.abandoned(path):
                yield path


def _freed(path: Path) -> int:
    """Remove what is at `path`, if that can be, and say how many bytes that frees."""
    try:
        nbytes = folders.nbytes(path)
        folders.remove(path)
        return nbytes
    except OSError:
        return 0


def _is_lock(path: Path) -> bool:
    return path.suffix == folders.LOCK and path.is_file() and not path.is_symlink()


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_dead(stage: Path) -> bool:
    """Whether what was built in `stage` never will be."""
    try:
        return locks.abandoned(stage) or time.time() - stage.lstat().st_mtime > _STALE_SECONDS
    except FileNotFoundError:
        return False
