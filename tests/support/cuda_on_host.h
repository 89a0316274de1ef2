// Runs generated CUDA kernels on the host, every thread of a block as a coroutine, so that their indices, barriers and tails
// can be tested without a GPU. Slow, and strict: a barrier or shuffle that not all threads reach ends the process. Blocks run
// one after the other; those of a launch whose blocks wait for each other run side by side, each in a thread of the host.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static thread_local
#define __constant__ static const
#define __align__(bytes) alignas(bytes)

struct uint2 {
    alignas(8) unsigned x;
    unsigned y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

using cudaStream_t = void*;
using cudaError_t = int;
constexpr int cudaSuccess = 0;
constexpr int cudaErrorCooperativeLaunchTooLarge = 720;
constexpr int cudaFuncAttributeMaxDynamicSharedMemorySize = 0;
template <typename Kernel>
int cudaFuncSetAttribute(Kernel, int, int) {
    return cudaSuccess;
}
inline int cudaGetLastError() { return cudaSuccess; }

template <typename T>
T __ldg(const T* from) {
    return *from;
}
template <typename T>
T __ldcs(const T* from) {
    return *from;
}
template <typename T>
void __stcs(T* to, T value) {
    *to = value;
}
inline void atomicAdd(unsigned* to, unsigned value) { __atomic_fetch_add(to, value, __ATOMIC_RELAXED); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

namespace emulation {

struct Dim {
    unsigned x = 0;
};
constexpr std::size_t guard_bytes = 1 << 12;  // behind dynamic shared memory
constexpr std::size_t pool_alignment = 1 << 10;  // of dynamic shared memory
enum class State { running, at_warp, at_group, at_block, finished };

struct Thread {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    State state = State::running;
};

// Of the block that a thread of the host runs.
inline thread_local Dim thread_index, block_index, block_size, grid_size;
inline thread_local std::vector<Thread> threads;
inline thread_local std::vector<unsigned> exchanged;
inline thread_local std::vector<unsigned char> pool;
inline thread_local ucontext_t scheduler;
inline thread_local const std::function<void()>* body;

[[noreturn]] inline void fail(const char* what) {
    std::fprintf(stderr, "emulation: %s\n", what);
    std::abort();
}

// Buffers in memory, begin and end; asynchronous copies read nothing else.
inline std::vector<std::pair<const char*, const char*>> buffers;

inline void check_read(const void* from, std::size_t count) {
    const auto* const begin = static_cast<const char*>(from);
    for (const auto& [first, last] : buffers) {
        if (count == 0 || (first <= begin && begin + count <= last)) return;
    }
    fail("a copy from outside of every buffer");
}

inline void wait(State at) {
    const unsigned self = thread_index.x;
    threads[self].state = at;
    swapcontext(&threads[self].context, &scheduler);
}

inline void run_thread() {
    (*body)();
    threads[thread_index.x].state = State::finished;
}

// Lets the threads from `first` to `last` go on if they all stand at `at`.
inline bool release(unsigned first, unsigned last, State at) {
    for (unsigned i = first; i < last; ++i) {
        if (threads[i].state != at) return false;
    }
    for (unsigned i = first; i < last; ++i) threads[i].state = State::running;
    return true;
}

inline void run_block(unsigned count) {
    constexpr std::size_t stack_bytes = 1 << 16;
    threads.resize(count);
    exchanged.assign(count, 0);
    for (unsigned i = 0; i < count; ++i) {
        Thread& thread = threads[i];
        if (!thread.stack) thread.stack = std::make_unique<char[]>(stack_bytes);
        thread.state = State::running;
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.get();
        thread.context.uc_stack.ss_size = stack_bytes;
        thread.context.uc_link = &scheduler;
        makecontext(&thread.context, run_thread, 0);
    }
    while (true) {
        for (unsigned i = 0; i < count; ++i) {
            if (threads[i].state != State::running) continue;
            thread_index.x = i;
            swapcontext(&scheduler, &threads[i].context);
        }
        bool moved = false;
        for (unsigned warp = 0; warp + 32 <= count; warp += 32) moved |= release(warp, warp + 32, State::at_warp);
        for (unsigned group = 0; group + 128 <= count; group += 128) moved |= release(group, group + 128, State::at_group);
        if (moved || release(0, count, State::at_block)) continue;
        for (const Thread& thread : threads) {
            if (thread.state != State::finished) fail("not all threads reach a barrier or a shuffle");
        }
        return;
    }
}

inline unsigned char* dynamic_shared() {
    const auto address = reinterpret_cast<std::uintptr_t>(pool.data());
    return pool.data() + (pool_alignment - address % pool_alignment) % pool_alignment;
}

inline void prepare(unsigned blocks, unsigned count, std::size_t shared, const std::function<void()>& kernel) {
    if (blocks == 0 || count == 0 || count > 1024) fail("a launch of an impossible shape");
    body = &kernel;
    threads.clear();
    pool.assign(shared + pool_alignment + guard_bytes, 0xff);
    block_size.x = count;
    grid_size.x = blocks;
}

inline void launch_together(unsigned blocks, unsigned count, std::size_t shared, const std::function<void()>& kernel) {
    std::vector<std::thread> running;
    for (unsigned block = 0; block < blocks; ++block) {
        running.emplace_back([&, block] {
            prepare(blocks, count, shared, kernel);
            block_index.x = block;
            run_block(count);
        });
    }
    for (std::thread& each : running) each.join();
}

inline void launch(unsigned blocks, unsigned count, std::size_t shared, const std::function<void()>& kernel) {
    prepare(blocks, count, shared, kernel);
    for (block_index.x = 0; block_index.x < blocks; ++block_index.x) run_block(count);
    const unsigned char* const end = dynamic_shared() + shared;
    for (std::size_t i = 0; i < guard_bytes; ++i) {
        if (end[i] != 0xff) fail("a write behind dynamic shared memory");
    }
}

}  // namespace emulation

extern "C" void emulation_buffer(const char* begin, const char* end) { emulation::buffers.emplace_back(begin, end); }
extern "C" void emulation_no_buffers() { emulation::buffers.clear(); }

#define threadIdx emulation::thread_index
#define blockIdx emulation::block_index
#define blockDim emulation::block_size
#define gridDim emulation::grid_size

// Lets another block go on; a wait of a minute is one for ever.
inline void __nanosleep(unsigned) {
    thread_local const auto start = std::chrono::steady_clock::now();
    if (std::chrono::steady_clock::now() - start > std::chrono::minutes(1)) emulation::fail("blocks wait for each other for ever");
    std::this_thread::yield();
}

inline void __syncthreads() { emulation::wait(emulation::State::at_block); }

inline void __syncwarp() { emulation::wait(emulation::State::at_warp); }

inline bool __any_sync(unsigned members, bool value) {
    if (members != 0xffffffffu) emulation::fail("a vote of part of a warp");
    const unsigned self = emulation::thread_index.x, first = self / 32 * 32;
    emulation::exchanged[self] = value;
    emulation::wait(emulation::State::at_warp);
    bool any = false;
    for (unsigned i = first; i < first + 32; ++i) any |= emulation::exchanged[i] != 0;
    emulation::wait(emulation::State::at_warp);
    return any;
}

inline unsigned __ballot_sync(unsigned members, bool value) {
    if (members != 0xffffffffu) emulation::fail("a vote of part of a warp");
    const unsigned self = emulation::thread_index.x, first = self / 32 * 32;
    emulation::exchanged[self] = value;
    emulation::wait(emulation::State::at_warp);
    unsigned votes = 0;
    for (unsigned i = 0; i < 32; ++i) votes |= (emulation::exchanged[first + i] != 0) << i;
    emulation::wait(emulation::State::at_warp);
    return votes;
}

inline unsigned __reduce_max_sync(unsigned members, unsigned value) {
    if (members != 0xffffffffu) emulation::fail("a reduction of part of a warp");
    const unsigned self = emulation::thread_index.x, first = self / 32 * 32;
    emulation::exchanged[self] = value;
    emulation::wait(emulation::State::at_warp);
    const unsigned largest = *std::max_element(&emulation::exchanged[first], &emulation::exchanged[first] + 32);
    emulation::wait(emulation::State::at_warp);
    return largest;
}

// The threads of a block take turns.
inline unsigned atomicMax(unsigned* at, unsigned value) {
    const unsigned before = *at;
    *at = std::max(before, value);
    return before;
}

inline float __fdividef(float a, float b) { return a / b; }

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

inline float __shfl_sync(unsigned members, float value, int from) {
    if (members != 0xffffffffu) emulation::fail("a shuffle among part of a warp");
    const unsigned self = emulation::thread_index.x;
    std::memcpy(&emulation::exchanged[self], &value, sizeof(value));
    emulation::wait(emulation::State::at_warp);
    float other;
    std::memcpy(&other, &emulation::exchanged[self / 32 * 32 + static_cast<unsigned>(from) % 32], sizeof(other));
    emulation::wait(emulation::State::at_warp);
    return other;
}

inline unsigned __shfl_xor_sync(unsigned members, unsigned value, int mask) {
    if (members != 0xffffffffu) emulation::fail("a shuffle among part of a warp");
    const unsigned self = emulation::thread_index.x;
    emulation::exchanged[self] = value;
    emulation::wait(emulation::State::at_warp);
    const unsigned other = emulation::exchanged[self ^ static_cast<unsigned>(mask)];
    emulation::wait(emulation::State::at_warp);
    return other;
}
