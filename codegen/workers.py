"""Processes beside this one that generate code, or compile it: started when there is work for them, gone when there is none or this process ends.

`concurrent.futures.ProcessPoolExecutor` serves neither way that it starts processes: a fork copies CUDA and locks that other threads hold, and a
spawned process imports the user's `__main__`, whether that has a guard or not. These run `fusepass.codegen.serving`, have no torch, and have one end
of a socket; when the other end closes, they end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO

from fusepass import background
from fusepass.codegen.serving import GOOD

_log = logging.getLogger(__name__)

IDLE = 15.0
"""Seconds without work after which a worker ends."""

PATIENCE = 20.0
"""Seconds that a worker may take to start, and for a task whose time is bounded: else it is ended. Most take a tenth of a second."""

MEMORY = 2 << 30
"""Bytes of address space that a worker may have whose tasks are bounded."""

MOST_FAILURES = 4
"""Workers that may fail to start, or be lost with a bounded task, until none is started any more."""

_LOOK = 0.5  # seconds
_SOON = 0.1  # seconds
_NICENESS = 10  # of those that work beside the program, as of compilers
_PROGRAM = str(Path(__file__).with_name("serving.py"))


@dataclass(frozen=True)
class Kind:
    """What workers do.

    Attributes:
        function: what answers a task, see `fusepass.codegen.serving.serve`.
        bounded: whether a task has `PATIENCE` and `MEMORY`, and not what it needs.
    """

    function: str
    bounded: bool = True


class Lost(Exception):
    """A worker ended, hangs, or did not start; the text says which."""


class Unavailable(Exception):
    """No worker can be started; the text says why."""


class Failed(Exception):
    """A task failed in its worker; the text says why."""


class Workers:
    """Some processes and their tasks. Threads may share it.

    Args:
        kind: what they do.
        niceness: of the processes.
    """

    def __init__(self, kind: Kind, niceness: int) -> None:
        self._kind, self._niceness = kind, niceness
        self._tasks: SimpleQueue[tuple[Future[bytes], bytes] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._serving = self._asking = 0
        self._failures = 0
        self._trouble: str | None = None

    def start(self, most: int) -> None:
        """Have up to `most` processes, so that they are there when tasks come."""
        with self._lock:
            while self._serving < most and self._failures < MOST_FAILURES:
                try:
                    background.start_thread(threading.Thread(target=self._serve, name="fusepass worker", daemon=True))
                except RuntimeError as error:  # there are too many, or the process ends
                    self._failures, self._trouble = MOST_FAILURES, f"a worker cannot be started: {error}"
                    return
                self._serving += 1

    def submit(self, task: bytes, most: int) -> Future[bytes]:
        """Have a worker do `task`, of `most` workers; until one has begun, that can be cancelled.

        Waiting for the result raises `Lost` or `Failed`. There may be no worker at all, then nobody begins.
        """
        future: Future[bytes] = Future()
        self._tasks.put((future, task))
        self.start(most)
        return future

    def ask(self, task: bytes) -> bytes:
        """What a worker makes of `task`, of as many as are asked at the same time. Waits for it.

        Raises:
            Lost: the worker ended.
            Unavailable: there is none.
            Failed: the task fails.
            Stopped: the process ends, with jobs beside the program (`fusepass.background`).
        """
        with self._lock:
            self._asking += 1
        try:
            future = self.submit(task, self._asking)
            while True:
                with contextlib.suppress(TimeoutError):
                    return future.result(_SOON)
                if background.ending():
                    raise background.Stopped
                self.start(self._asking)  # one that was there may just have ended, with nothing to do
                if not self._serving and future.cancel():
                    raise Unavailable(self.told_trouble() or "no worker is started any more")
        finally:
            with self._lock:
                self._asking -= 1

    def end(self) -> None:
        """Have the processes end behind what they were given."""
        with self._lock:
            for _ in range(self._serving):
                self._tasks.put(None)

    def told_trouble(self) -> str | None:
        """Why a worker ended in between, or did not start, if that was not told yet."""
        told, self._trouble = self._trouble, None
        return told

    def _serve(self) -> None:
        """Start a worker and give it tasks, in a thread of its own."""
        worker: _Worker | None = None
        asked: Future[bytes] | None = None
        try:
            worker = _Worker(self._kind, self._niceness)
            while True:
                given = self._tasks.get(timeout=IDLE)
                if given is None:
                    return
                future, task = given
                if future.set_running_or_notify_cancel():
                    asked = future
                    try:
                        future.set_result(worker.ask(task))
                    except Failed as failed:
                        future.set_exception(failed)
                    asked = None
        except Empty:
            pass
        except Exception as error:
            reason = str(error) if isinstance(error, Lost) else f"a worker cannot be started: {error}"
            _log.info("%s", reason)
            with self._lock:
                self._failures += worker is None or self._kind.bounded
            if asked is not None:
                asked.set_exception(Lost(reason))
            else:
                self._trouble = reason
        finally:
            with self._lock:
                self._serving -= 1
            if worker is not None:
                worker.end()


class _Worker:
    """One process, ready to work.

    Raises:
        Lost: it does not start.
        OSError: it cannot be.
    """

    def __init__(self, kind: Kind, niceness: int) -> None:
        self._kind = kind
        self._words: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115, closed by `end`
        self._socket, theirs = Pipe()
        _sockets.update((self._socket, theirs))
        path = [str(Path(__file__).parents[2]), *map(os.path.abspath, sys.path)]
        how = [theirs.fileno(), niceness, MEMORY if kind.bounded else 0, kind.function]
        command = [sys.executable, "-S", "-P", _PROGRAM, *map(str, how), *path]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._words, cwd="/",
                pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip
        except BaseException:
            self._close()
            raise
        finally:
            theirs.close()
            _sockets.discard(theirs)
        try:
            self.ask(None)
        except BaseException:
            self.end()
            raise

    def ask(self, task: bytes | None) -> bytes:
        """What it makes of `task`; if that is None, it says when it is ready.

        Raises:
            Lost: it ended, or takes too long.
            Failed: the task fails.
        """
        bounded = task is None or self._kind.bounded
        until, what = time.monotonic() + PATIENCE, "start" if task is None else "work"
        try:
            if task is not None:
                self._socket.send_bytes(task)
            while not self._socket.poll(_LOOK):
                if self._process.poll() is not None:
                    raise EOFError
                if bounded and time.monotonic() > until:
                    raise Lost(f"a worker took more than {PATIENCE:g} s to {what}")
            answer = self._socket.recv_bytes()
        except (EOFError, OSError):
            raise Lost(f"a worker that was to {what} {self._last_words()}") from None
        if answer[:1] != GOOD:
            raise Failed(answer.decode())
        return answer[1:]

    def end(self) -> None:
        """End the process, if it has not, so that nothing is left of it."""
        self._close()
        self._process.kill()
        self._process.wait()

    def _close(self) -> None:
        _sockets.discard(self._socket)
        self._socket.close()
        self._words.close()

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LOOK)
        self._words.seek(0)
        said = self._words.read().decode(errors="replace").strip().rpartition("\n")[2]
        return f"ended with status {self._process.returncode}{': ' if said else ''}{said}"


_pools: dict[tuple[Kind, bool], Workers] = {}
_sockets: set[Connection] = set()
_pools_lock = threading.Lock()


def workers(kind: Kind) -> Workers:
    """Those of this process; others for what is compiled beside the program, which give way to it."""
    beside = background.active()
    with _pools_lock:
        return _pools.setdefault((kind, beside), Workers(kind, _NICENESS if beside else 0))


def can_start() -> bool:
    """Whether this program's interpreter is there to start others: a frozen program, or one that embeds Python, would start itself."""
    return not getattr(sys, "frozen", False) and "python" in Path(sys.executable or "").name


def _forget() -> None:
    """In a process that was forked: the workers are the other one's, and must see that end."""
    global _pools_lock
    _pools_lock = threading.Lock()
    _pools.clear()
    for each in _sockets:
        with contextlib.suppress(OSError):
            each.close()
    _sockets.clear()


os.register_at_fork(after_in_child=_forget)
