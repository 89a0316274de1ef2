"""Measures in a process of its own, so that a crash or a hang costs one workload and not the run."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
from multiprocessing.connection import Connection

import torch

from benchmarks.case import Row, Settings, measure_workload
from benchmarks.layers import Workload
from benchmarks.workloads import by_name
from fusepass.runtime import fast_path

_FIRST = "gelu_small"
"""The workload that a process measures for nothing: behind the first calls libraries are still being built."""

_CONTEXT = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA


class Worker:
    """A process that measures one workload after another. It is started when needed, also again."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection | None = None

    def measure(self, workload: Workload, timeout_s: float) -> Row:
        """The row of `workload`; with an `error` where the process died or took over `timeout_s` seconds."""
        connection = self._started()
        connection.send(workload.name)
        if not connection.poll(timeout_s):
            self.stop()
            return Row(workload.name, workload.group.value, error=f"stopped after {timeout_s:.0f} s")
        try:
            row, healthy = connection.recv()
        except EOFError:
            code = self.stop()
            return Row(workload.name, workload.group.value, error=f"the process died with exit code {code}")
        if not healthy:
            self.stop()
        return row

    def stop(self) -> int | None:
        """Ends the process, if there is one, and says its exit code."""
        if self._process is None or self._connection is None:
            return None
        self._connection.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join()
        code = self._process.exitcode
        self._process = self._connection = None
        return code

    def _started(self) -> Connection:
        if self._connection is None:
            self._connection, theirs = _CONTEXT.Pipe()
            self._process = _CONTEXT.Process(target=_serve, args=(theirs, self._settings))
            self._process.start()
            theirs.close()
        return self._connection


def _serve(connection: Connection, settings: Settings) -> None:
    if settings.device.startswith("cuda"):
        torch.cuda.set_device(torch.device(settings.device).index or 0)  # events are recorded on the current device
        with contextlib.suppress(Exception):  # what is built once for all calls is there before the first one is timed
            measure_workload(by_name(_FIRST), settings)
        fast_path.wait()
    healthy = True
    while healthy:
        try:
            workload = by_name(connection.recv())
        except EOFError:
            return
        try:
            row = measure_workload(workload, settings)
        except Exception as error:
            text = " ".join(str(error).split())
            row = Row(workload.name, workload.group.value, error=f"{type(error).__name__}: {text:.300}")
        healthy = _clean_up(settings.device)
        connection.send((row, healthy))


def _clean_up(device: str) -> bool:
    """Gives memory back. False where CUDA no longer works, as after an access out of bounds."""
    gc.collect()
    if not device.startswith("cuda"):
        return True
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True
