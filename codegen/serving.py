"""What runs in a process of `fusepass.codegen.workers`: it does the tasks that come through a socket, and ends with that, in the midst of a task too.

Run as a file, which takes a third of the time that the package takes to import: what a task needs of that it imports itself.
"""

from __future__ import annotations

import importlib
import os
import resource
import runpy
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import SimpleQueue

GOOD = b"\0"
"""Before an answer; no other text begins with it."""


def serve(socket: int, niceness: int, memory: int, function: str) -> None:
    """Answer tasks by `function`, which is ``module:name`` or ``file.py:name``.

    Args:
        socket: the descriptor of one end.
        niceness: added to what the process that started this one has.
        memory: bytes of address space that there may be; 0 for as many as that process may have.
        function: takes a task and gives its answer, both in bytes. If it raises, the answer is what it raised, in words.
    """
    os.nice(niceness)
    if memory:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    where, _, name = function.rpartition(":")
    found = runpy.run_path(where) if where.endswith(".py") else vars(importlib.import_module(where))
    answer: Callable[[bytes], bytes] = found[name]
    connection, tasks = Connection(socket), SimpleQueue[bytes]()
    threading.Thread(target=_read, args=(connection, tasks), daemon=True).start()
    connection.send_bytes(GOOD)
    while True:
        try:
            said = GOOD + answer(tasks.get())
        except Exception as error:
            said = f"{type(error).__name__}: {error}".encode()
        connection.send_bytes(said)


def _read(connection: Connection, tasks: SimpleQueue[bytes]) -> None:
    try:
        while True:
            tasks.put(connection.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)


if __name__ == "__main__":
    _, _socket, _niceness, _memory, _function, *sys.path[:] = sys.argv
    serve(int(_socket), int(_niceness), int(_memory), _function)
