"""Keeps the cache directory below a size: what was not used for longest is removed first."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from fusepass.codegen import cache_folders as folders

_LEFT = 0.9  # of the size, so that not every further library calls for another look at all of them
_OF_LIBRARIES = "[0-9a-f][0-9a-f]"


def trim(top: Path, most: int) -> int:
    """Remove what was not used for longest from the cache directory `top` if it has more than `most` bytes; says how many that frees.

    What was used a moment ago stays. As with `fusepass.codegen.cache.clear`, nobody finds half an entry.

    Raises:
        OSError: the directory cannot be written.
    """
    root = folders.root(top)
    kept = sorted(_kept(root))
    total = sum(nbytes for _, nbytes, _ in kept)
    if total <= most:
        return 0
    freed, recent = 0, time.time() - folders.RECENT
    with folders.stage(root, folders.STAGE) as aside:
        for number, (used, nbytes, path) in enumerate(kept):
            if total - freed <= _LEFT * most or used > recent:
                break
            with contextlib.suppress(OSError):  # another process was faster
                Path(path).rename(aside / str(number))
                freed += nbytes
    return freed


def _kept(root: Path) -> Iterator[tuple[float, int, str]]:
    """Libraries, records and failed sources: when they were used last, their size in bytes, where they are."""
    others = (root / name for name in (*folders.RECORDS, folders.FAILED, folders.SHARED))
    for folder in (*root.glob(_OF_LIBRARIES), *others):
        if folder.is_symlink():  # which the cache does not use either
            continue
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if not entry.name.endswith(folders.LOCK):
                    with contextlib.suppress(OSError):
                        yield entry.stat(follow_symlinks=False).st_mtime, folders.nbytes(Path(entry.path)), entry.path
