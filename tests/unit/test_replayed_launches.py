"""Launches that are replayed as a graph, on a stand-in for CUDA that counts: when one is made, given other pointers, and done without."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from fusepass.codegen.toolchain import include_directory

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

_STAND_IN = r"""
#include <cstddef>
#include <map>
#include <vector>

using cudaError_t = int;
constexpr int cudaSuccess = 0, cudaErrorCooperativeLaunchTooLarge = 720;
enum { cudaFuncAttributeMaxDynamicSharedMemorySize, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared,
       cudaDevAttrMultiProcessorCount, cudaLaunchAttributeCooperative };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeRelaxed };
struct dim3 { unsigned x = 1, y = 1, z = 1; explicit dim3(unsigned x = 1) : x(x) {} };
struct Value { int cooperative; };
struct cudaLaunchAttribute { int id; Value val; };
struct cudaLaunchConfig_t { dim3 gridDim, blockDim; std::size_t dynamicSmemBytes; struct Stream* stream; cudaLaunchAttribute* attrs; unsigned numAttrs; };
struct cudaKernelNodeParams { void* func; dim3 gridDim, blockDim; unsigned sharedMemBytes; void** kernelParams; void** extra; };
struct cudaMemsetParams { void* dst; unsigned elementSize; std::size_t pitch; unsigned value; std::size_t width, height; };

using Pointers = std::vector<const void*>;
struct Node { void* kernel; Pointers arguments; std::size_t size; int attributes; };
struct Nodes_ { std::vector<Node> nodes; };
using cudaStream_t = struct Stream*;
using cudaGraph_t = Nodes_*;
using cudaGraphExec_t = Nodes_*;
using cudaGraphNode_t = std::size_t*;

extern "C" {
int launched, replayed, made, updated, destroyed, capturing, refuses_graphs, refuses_updates, refuses_launches, mode_of_thread, reenters, device;
int wrong_order;
}
static Pointers wanted;  // what the kernels of the call should get, one after the other
static Pointers got;

static int arguments_of(void* kernel);

int cudaGetLastError() { return 0; }
int cudaGetDevice(int* number) { *number = device; return 0; }
int cudaFuncSetAttribute(void*, int, int) { return 0; }
int cudaDeviceGetAttribute(int* value, int, int) { *value = 2; return 0; }
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* value, void*, int, int) { *value = 2; return 0; }
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
int cudaLaunchKernelExC(cudaLaunchConfig_t*, void* kernel, void** arguments) {
    for (int i = 0; i < arguments_of(kernel); ++i) got.push_back(*static_cast<void**>(arguments[i]));
    ++launched;
    return 0;
}
int cudaMemsetAsync(void* memory, int, std::size_t, cudaStream_t) { got.push_back(memory); ++launched; return 0; }
int cudaGraphCreate(cudaGraph_t* graph, int) { *graph = new Nodes_; return 0; }
int cudaGraphDestroy(cudaGraph_t graph) { delete graph; return 0; }
int added(cudaGraphNode_t* at, cudaGraph_t graph, const cudaGraphNode_t* before, std::size_t count, Node node) {
    const std::size_t number = graph->nodes.size();
    if (count != (number > 0) || (count > 0 && **before != number - 1)) ++wrong_order;
    graph->nodes.push_back(node);
    *at = new std::size_t(number);
    return 0;
}
Node node_of(const cudaKernelNodeParams* from) {
    Node node{from->func, {}, 0, 0};
    for (int i = 0; i < arguments_of(from->func); ++i) node.arguments.push_back(*static_cast<void**>(from->kernelParams[i]));
    return node;
}
Node node_of(const cudaMemsetParams* from) { return {nullptr, {from->dst}, from->width * from->elementSize, 0}; }
int cudaGraphAddKernelNode(cudaGraphNode_t* at, cudaGraph_t graph, const cudaGraphNode_t* before, std::size_t count, const cudaKernelNodeParams* node) {
    return added(at, graph, before, count, node_of(node));
}
int cudaGraphAddMemsetNode(cudaGraphNode_t* at, cudaGraph_t graph, const cudaGraphNode_t* before, std::size_t count, const cudaMemsetParams* node) {
    return added(at, graph, before, count, node_of(node));
}
static cudaGraph_t last_graph;
int cudaGraphKernelNodeSetAttribute(cudaGraphNode_t, int id, const Value*) { return id == cudaLaunchAttributeCooperative ? 0 : 1; }
int cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, int) {
    if (refuses_graphs) return 1;
    ++made;
    *exec = new Nodes_(*graph);
    return 0;
}
int cudaGraphExecDestroy(cudaGraphExec_t exec) { ++destroyed; delete exec; return 0; }
int set(cudaGraphExec_t exec, cudaGraphNode_t at, Node node) {
    if (refuses_updates) return 1;
    ++updated;
    exec->nodes[*at] = node;
    return 0;
}
int cudaGraphExecKernelNodeSetParams(cudaGraphExec_t exec, cudaGraphNode_t at, const cudaKernelNodeParams* node) { return set(exec, at, node_of(node)); }
int cudaGraphExecMemsetNodeSetParams(cudaGraphExec_t exec, cudaGraphNode_t at, const cudaMemsetParams* node) { return set(exec, at, node_of(node)); }
int cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t) {
    if (refuses_launches) return 1;
    for (const Node& node : exec->nodes) {
        got.insert(got.end(), node.arguments.begin(), node.arguments.end());
        ++replayed;
    }
    return 0;
}

#include "fp_launch.cuh"
#include "fp_replay.cuh"

void first(const char*) {}
void second(const char*, char*) {}
void team(char*, char*) {}
static int arguments_of(void* kernel) { return kernel == reinterpret_cast<void*>(first) ? 1 : 2; }

template <typename Stream>
int launches(char* a, char* b, char* exchange, Stream stream) {
    fp::launch<first>(1, 32, 0, stream, static_cast<const char*>(a));
    fp::launch<second>(1, 32, 0, stream, static_cast<const char*>(a), b);
    const int error = fp::launch_teams<team>(1, 1, 32, 0, exchange, 64, stream, exchange, b);
    if (error != 0) return error;
    return cudaGetLastError();
}

static fp::Replayed<3, 4, 6> calls;

extern "C" int call(char* a, char* b, void* stream) {
    got.clear();
    const int status = calls.run({a, b, b + 1}, stream, [=](auto where) {
        if (reenters) {  // as another thread would, while this one launches
            reenters = 0;
            calls.run({a, b, b + 1}, stream, [=](auto inner) { return launches(a, b, b + 1, inner); });
            got.clear();
        }
        return launches(a, b, b + 1, where);
    });
    return status != 0 || got != Pointers{a, a, b, b + 1, b + 1, b};
}
"""


ROOM = 8  # graphs of a stream


class Calls:
    """A library of its own: counts of launches, single and in graphs; each call checks what its kernels got."""

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

    def run(self, *pointers: tuple[int, int], stream: int = 7) -> tuple[int, int]:
        """Launches one by one and replayed ones, of calls with these pointers."""
        before = self["launched"], self["replayed"]
        for a, b in pointers:
            assert self._library.call(*map(ctypes.c_void_p, (a, b, stream))) == 0
        assert not self["wrong_order"]
        return self["launched"] - before[0], self["replayed"] - before[1]


@pytest.fixture
def calls(tmp_path: Path) -> Calls:
    return Calls(tmp_path)


def test_the_second_call_is_a_graph(calls: Calls) -> None:
    assert calls.run((1, 20)) == (4, 0)
    assert calls.run((1, 20), (1, 20)) == (0, 8)
    assert (calls["made"], calls["updated"]) == (1, 0)
    assert calls["mode_of_thread"] == 0  # as before


def test_each_set_of_pointers_has_its_graph(calls: Calls) -> None:
    iterations = [(1, 20), (1, 30), (2, 20)]
    calls.run(*iterations)
    assert calls.run(*iterations * 3) == (0, 36)
    assert (calls["made"], calls["updated"]) == (3, 0)


def test_without_room_the_graph_used_least_recently_gets_the_pointers(calls: Calls) -> None:
    calls.run(*[(1, 20)] * 2, *[(1, 20 + 2 * number) for number in range(1, ROOM)])
    assert (calls["made"], calls["updated"]) == (ROOM, 0)
    calls.run((1, 20))
    assert calls.run((1, 50)) == (0, 4)
    assert calls["updated"] == 3  # all nodes but the first, which reads what it read before
    assert calls.run((2, 50)) == (0, 4)
    assert calls["updated"] == 3 + 4  # another graph
    assert calls.run((1, 20), (1, 50)) == (0, 8)
    assert calls["updated"] == 3 + 4
    assert calls.run(*[(number, 60 + number) for number in range(3, 100)]) == (0, 4 * 97)
    assert (calls["made"], calls["destroyed"]) == (ROOM, 0)


def test_each_stream_has_its_graph(calls: Calls) -> None:
    for stream in (7, 8, 7, 8, 9, 7, 8, 9):
        calls.run((1, 20 + stream), stream=stream)
    assert (calls["made"], calls["updated"]) == (3, 0)
    calls["device"] = 1
    assert calls.run(*[(1, 20)] * 2) == (4, 4)
    assert calls["made"] == 4


def test_streams_that_never_come_again_leave_graphs_in_use_alone(calls: Calls) -> None:
    calls.run(*[(1, 20)] * 2)
    for number in range(100):
        assert calls.run((1, 20), stream=100 + number) == (4, 0)
        assert calls.run((1, 20)) == (0, 4)
    assert (calls["made"], calls["destroyed"]) == (1, 0)


def test_graphs_that_nobody_uses_give_way(calls: Calls) -> None:
    for stream in range(4):
        calls.run(*[(1, 20)] * 20, stream=stream)
    assert calls.run(*[(1, 20)] * 4, stream=90)[1] == 0  # all places are taken
    assert calls.run(*[(1, 20)] * 4, stream=90)[1] > 0
    assert (calls["made"], calls["destroyed"]) == (5, 1)


def test_there_is_an_end_to_making_graphs(calls: Calls) -> None:
    for stream in range(200):
        calls.run(*[(1, 20)] * 70, stream=stream)
    assert calls["made"] == 64
    assert calls["destroyed"] >= 60


def test_a_captured_stream_gets_the_launches_themselves(calls: Calls) -> None:
    calls.run(*[(1, 20)] * 3)
    calls["capturing"] = 1
    assert calls.run((1, 30)) == (4, 0)
    calls["capturing"] = 0
    assert calls.run((1, 20)) == (0, 4)
    assert (calls["made"], calls["updated"]) == (1, 0)


def test_what_cannot_be_a_graph_is_launched_as_it_is(calls: Calls) -> None:
    calls["refuses_graphs"] = 1
    assert calls.run(*[(1, 20)] * 70) == (280, 0)
    calls["refuses_graphs"] = 0
    assert calls.run(*[(1, 20)] * 10) == (40, 0)  # it was tried often enough


@pytest.mark.parametrize("refusal", ["refuses_updates", "refuses_launches"])
def test_a_graph_that_fails_is_forgotten(calls: Calls, refusal: str) -> None:
    calls.run(*[(1, 20 + 2 * number) for number in range(ROOM + 1)])
    calls[refusal] = 1
    assert calls.run((1, 50)) == (4, 0)
    assert (calls["made"], calls["destroyed"]) == (ROOM, 1)
    calls[refusal] = 0
    assert calls.run((1, 50)) == (0, 4)
    assert calls["made"] == ROOM + 1


def test_a_second_thread_does_not_wait(calls: Calls) -> None:
    calls.run(*[(1, 20)] * 2)
    calls["reenters"] = 1
    assert calls.run((1, 30)) == (4, 4)
