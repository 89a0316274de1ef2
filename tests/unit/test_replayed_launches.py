"""Launches that are replayed as a graph, on a stand-in for CUDA that counts: when one is made, used, forgotten and done without."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from fusepass.codegen.toolchain import include_directory

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

_STAND_IN = r"""
using cudaError_t = int;
constexpr int cudaSuccess = 0, cudaStreamNonBlocking = 1;
using cudaStream_t = struct Stream*;
using cudaGraph_t = struct Graph*;
using cudaGraphExec_t = struct Exec*;
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeRelaxed };

extern "C" {
int launched, replayed, made, destroyed, captured, capturing, refuses_graphs, refuses_launches, mode_of_thread, reenters;
}
struct Stream { bool records; };
struct Exec { int launches; };
static int recorded;

int cudaGetLastError() { return 0; }
int cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
    *status = capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return 0;
}
int cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
    const int before = mode_of_thread;
    mode_of_thread = *mode;
    *mode = cudaStreamCaptureMode(before);
    return 0;
}
int cudaStreamCreateWithFlags(cudaStream_t* stream, int) { *stream = new Stream{false}; return 0; }
int cudaStreamDestroy(cudaStream_t stream) { delete stream; return 0; }
int cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) { stream->records = true; recorded = 0; return 0; }
int cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) { ++captured; *graph = reinterpret_cast<cudaGraph_t>(&recorded); return 0; }
int cudaGraphDestroy(cudaGraph_t) { return 0; }
int cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t, int) {
    if (refuses_graphs) return 1;
    ++made;
    *exec = new Exec{recorded};
    return 0;
}
int cudaGraphExecDestroy(cudaGraphExec_t exec) { ++destroyed; delete exec; return 0; }
int cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t) {
    if (refuses_launches) return 1;
    replayed += exec->launches;
    return 0;
}

#include "fp_replay.cuh"

static fp::Replayed<2> calls;

extern "C" int call(void* a, void* b) {
    return calls.run({a, b}, nullptr, [=](void* where) {
        for (int i = 0; i < 3; ++i) ++(where != nullptr ? recorded : launched);
        if (where != nullptr && reenters) {  // as another thread would, while a graph is made
            reenters = 0;
            calls.run({a, b}, nullptr, [](void*) { launched += 100; return 0; });
        }
        return 0;
    });
}
"""


class Calls:
    """A library of its own: counts of launches, single and in graphs."""

    def __init__(self, folder: Path) -> None:
        source, library = folder / "calls.cpp", folder / "calls.so"
        source.write_text(_STAND_IN)
        command = ["g++", "-std=c++17", "-shared", "-fPIC", f"-I{include_directory()}", str(source), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        self._library = ctypes.CDLL(str(library))

    def __getitem__(self, name: str) -> int:
        return int(ctypes.c_int.in_dll(self._library, name).value)

    def __setitem__(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(self._library, name).value = value

    def run(self, *pointers: Sequence[int]) -> tuple[int, int]:
        """Launches one by one and replayed ones, of calls with these pointers."""
        before = self["launched"], self["replayed"]
        for a, b in pointers:
            assert self._library.call(ctypes.c_void_p(a), ctypes.c_void_p(b)) == 0
        return self["launched"] - before[0], self["replayed"] - before[1]


@pytest.fixture
def calls(tmp_path: Path) -> Calls:
    return Calls(tmp_path)


def test_the_second_call_with_the_same_pointers_is_a_graph(calls: Calls) -> None:
    assert calls.run((1, 2)) == (3, 0)
    assert calls.run((1, 2), (1, 2)) == (0, 6)
    assert calls["made"] == 1
    assert calls["mode_of_thread"] == 0  # as before


def test_each_set_of_pointers_has_its_graph(calls: Calls) -> None:
    turns = [(1, 2), (1, 3)]
    assert calls.run(*turns) == (6, 0)
    assert calls.run(*turns * 3) == (0, 18)
    assert calls["made"] == 2


def test_pointers_that_never_come_again_leave_graphs_in_use_alone(calls: Calls) -> None:
    calls.run(*[(1, 2)] * 3)
    for number in range(100):
        assert calls.run((7, number), (1, 2)) == (3, 3)
    assert (calls["made"], calls["destroyed"]) == (1, 0)


def test_graphs_that_nobody_uses_give_way(calls: Calls) -> None:
    calls.run(*[(number, number) for number in range(8) for _ in range(3)])
    assert calls.run(*[(90, 90)] * 40)[1] == 0  # all places are taken
    assert calls.run(*[(90, 90)] * 50)[1] > 0
    assert (calls["made"], calls["destroyed"]) == (9, 1)


def test_there_is_an_end_to_making_graphs(calls: Calls) -> None:
    for number in range(100):
        calls.run(*[(number, number)] * 100)
    assert calls["made"] == 32
    assert calls["destroyed"] >= 24


def test_a_captured_stream_gets_the_launches_themselves(calls: Calls) -> None:
    calls.run(*[(1, 2)] * 3)
    calls["capturing"] = 1
    assert calls.run((1, 2)) == (3, 0)
    calls["capturing"] = 0
    assert calls.run((1, 2)) == (0, 3)


def test_what_cannot_be_a_graph_is_launched_as_it_is(calls: Calls) -> None:
    calls["refuses_graphs"] = 1
    assert calls.run(*[(1, 2)] * 10) == (30, 0)
    assert calls["captured"] == 1  # it is not tried again


def test_a_graph_that_cannot_be_launched_is_forgotten(calls: Calls) -> None:
    calls.run(*[(1, 2)] * 3)
    calls["refuses_launches"] = 1
    assert calls.run(*[(1, 2)] * 5) == (15, 0)
    assert (calls["made"], calls["destroyed"]) == (1, 1)


def test_a_second_thread_does_not_wait(calls: Calls) -> None:
    calls["reenters"] = 1
    assert calls.run(*[(1, 2)] * 3) == (3 + 100, 6)
