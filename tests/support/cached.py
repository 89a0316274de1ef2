"""Stand-ins for the cache's tests: a compiler that writes some bytes, keys, and what a planted entry looks like."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from fusepass.codegen import cache
from fusepass.codegen.source import Source, Target

SOURCE = Source("region", "run", Target.CPU, "int one();\n", (), "native")
KEY, OTHER = "ab" + 62 * "0", "ab" + 62 * "1"
GOOD, PLANTED = b"a library", b"planted"
STRANGER = 54321  # a user that is neither root nor who runs the tests


class Compiler:
    """Writes what a library might be, and counts how often."""

    def __init__(self, content: bytes = GOOD) -> None:
        self.content = content
        self.runs = 0

    def __call__(self, directory: Path) -> Path:
        self.runs += 1
        (directory / "build.ninja").write_text("rules")
        library = directory / "out.so"
        library.write_bytes(self.content)
        return library


def stored(key: str = KEY, content: bytes = GOOD) -> Path:
    """The folder of an entry that was just stored."""
    return cache.store(key, SOURCE, Compiler(content)).parent


def plant(entry: Path) -> None:
    """Another library, and a description that says that it is the right one."""
    described = json.loads((entry / "meta.json").read_text())
    described["sha256"] = hashlib.sha256(PLANTED).hexdigest()
    (entry / "lib.so").write_bytes(PLANTED)
    (entry / "meta.json").write_text(json.dumps(described))


def as_user(user: int, action: Callable[[], bool]) -> bool:
    """Whether `action` says yes in a process of `user`."""
    child = os.fork()
    if child == 0:
        status = 2
        try:
            if os.getuid() == 0:
                os.setuid(user)
            status = 0 if action() else 1
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0
