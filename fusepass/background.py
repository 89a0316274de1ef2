"""Jobs beside the calls of a program: one thread takes them one by one, pauses while the process forks and stops when it ends."""

from __future__ import annotations

import atexit
import contextvars
import ctypes
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

from fusepass.errors import place_of_user, said_at, warn
from fusepass.progress import Progress, followed

_log = logging.getLogger(__name__)
_FORK_PATIENCE = 1.0  # seconds that a fork waits for the job under way to come to a checkpoint
_SOON = 1e-4  # seconds until a thread that waits for the interpreter is let in
_EXIT_PATIENCE = 5.0  # seconds that the end of the process waits for it to stop


class Stopped(BaseException):
    """The process ends: raised in the thread of the jobs, through whatever it is doing."""


class Job:
    """Something to do beside, in the context (options) of the one who asks for it.

    An exception ends it, and is warned of and logged.

    Args:
        name: what reports call it.
        work: what is to be done.

    Attributes:
        progress: how far it is.
        error: what ended it, in words; None where it was done.
    """

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self.progress = Progress(name, checkpoint)
        self.error: str | None = None
        self._work: Callable[[], None] | None = work
        self._context = contextvars.copy_context()
        self._place = place_of_user()
        self._process = os.getpid()
        self._over = threading.Event()

    @property
    def over(self) -> bool:
        """Whether it is done, failed, or was left behind in the process that this one was forked from."""
        return self._over.is_set() or self._process != os.getpid()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is over, at most `timeout` seconds; says whether it is."""
        return self.over or self._over.wait(timeout)

    def __str__(self) -> str:
        if self.error:
            return f"{self.progress.name}: failed with {self.error}"
        return str(self.progress) if self.progress.step is not None else f"{self.progress.name}: waits for its turn"

    def run(self) -> None:
        """Do it, in the thread of the jobs."""
        try:
            self._context.run(self._run)
        finally:
            self.drop()

    def drop(self) -> None:
        """Let go of what it holds (inputs, the model) and of those who wait for it."""
        self._work = None
        self._over.set()

    def _run(self) -> None:
        _active.set(True)
        work = self._work
        assert work is not None
        with followed(self.progress), said_at(self._place), threads_soon():
            try:
                work()
            except Exception as bug:  # nobody else would see it
                self.error = f"{type(bug).__name__}: {next(iter(str(bug).splitlines()), '')}"
                _log.info("%s failed beside the calls", self.progress.name, exc_info=True)
                warn(
                    f"{self.progress.name} runs as the original operators: compiling it beside failed with {self.error}"
                )


_active: ContextVar[bool] = ContextVar("fusepass_beside", default=False)
_changed = threading.Condition(threading.Lock())
_jobs: deque[Job] = deque()
_thread: threading.Thread | None = None
_moving = threading.Lock()  # held by the thread of the jobs, but for its checkpoints
_forking = threading.Event()
_resumed = threading.Event()
_holds_up = False  # whether a fork does, which holds `_moving`
_hasty = 0  # how many want threads to have the interpreter soon
_usual_interval = 0.0
_hasty_lock = threading.Lock()
_births = threading.Lock()  # held while a thread is started
_used = False  # whether there ever was a job in this process
_ending = False
_at_stop: list[Callable[[], None]] = []


def active() -> bool:
    """Whether what runs now belongs to a job."""
    return _active.get()


def start(job: Job) -> None:
    """Have `job` done after those that were started before."""
    global _used
    prepare()
    with _changed:
        if _ending:
            job.drop()
            return
        _used = True
        _jobs.append(job)
        _changed.notify()


def prepare() -> None:
    """Start the thread of the jobs: to wait until it runs takes longer than to give it a job."""
    global _thread
    with _changed:
        if _thread is None and not _ending:
            _thread = threading.Thread(target=_work, name="fusepass", daemon=True)
            _thread.start()


def checkpoint() -> None:
    """A moment, between two steps of a job, at which its thread holds nothing that others may wait for."""
    if threading.current_thread() is not _thread:
        return
    if _ending:
        raise Stopped
    if _forking.is_set():
        _moving.release()
        try:
            _resumed.wait()
        finally:
            _moving.acquire()


def start_thread(thread: threading.Thread) -> None:
    """Start a thread, from a job or elsewhere: until it runs, CPython takes it for the one that starts it, which `stop` is to hit."""
    with _births:
        thread.start()


def on_stop(function: Callable[[], None]) -> None:
    """Have `function` called when the process ends with a job under way: it is to end what a job waits for."""
    _at_stop.append(function)


def ending() -> bool:
    """Whether the process ends, and no job is begun any more."""
    return _ending


def stop() -> None:
    """Drop all jobs, if there ever was one; that under way ends at once.

    For the end of the process, at which the thread may not be inside of PyTorch: it would take the process down.
    """
    global _ending
    with _changed:
        if not _used or _ending:
            return
        _ending, thread = True, _thread
        while _jobs:
            _jobs.popleft().drop()
        _changed.notify()
    if thread is not None:
        with _births:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Stopped))
    for function in _at_stop:
        function()
    if thread is not None:
        thread.join(_EXIT_PATIENCE)


def _work() -> None:
    with suppress(Stopped):
        while True:
            with _changed:
                while not (_jobs or _ending):
                    _changed.wait()
                if _ending:
                    return
                job = _jobs.popleft()
            with _moving:
                job.run()
            del job


@contextmanager
def threads_soon() -> Iterator[None]:
    """Let other threads have the interpreter soon: each time one was outside of it, it would wait for 5 ms.

    A call of a model is outside once for each operator, and a thread that starts a compiler a hundred times.
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


def _before_fork() -> None:
    """Wait until the job under way is at a checkpoint, so that the child inherits no lock that it holds."""
    global _holds_up
    if _thread is not None:
        _resumed.clear()
        _forking.set()
        _holds_up = _moving.acquire(timeout=_FORK_PATIENCE)


def _in_parent() -> None:
    global _holds_up
    if _holds_up:
        _moving.release()
    _holds_up = False
    _forking.clear()
    _resumed.set()


def _in_child() -> None:
    """The thread is not there, and what it was to do is asked for again by calls in this process."""
    global _thread, _changed, _moving, _used, _hasty, _hasty_lock, _births, _holds_up
    _thread, _changed, _moving, _used = None, threading.Condition(threading.Lock()), threading.Lock(), False
    if _hasty:
        sys.setswitchinterval(_usual_interval)
    _hasty, _hasty_lock, _births = 0, threading.Lock(), threading.Lock()
    _holds_up = False
    _jobs.clear()
    _in_parent()


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
atexit.register(stop)
