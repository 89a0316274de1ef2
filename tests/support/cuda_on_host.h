// What generated CUDA kernels need of CUDA on the host, where every thread of a block is a coroutine, so that their indices,
// barriers and tails can be tested without a GPU. Slow, and strict: a barrier or shuffle that not all threads reach ends the
// process. Blocks run one after the other; those of a launch whose blocks wait for each other run side by side, each in a
// thread of the host. What runs them is in cuda_on_host.cpp, which is compiled once.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
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
    unsigned x, y;
};
enum class State { running, asking, at_warp, at_group, at_block, finished };

// Of the block that a thread of the host runs.
extern __thread Dim thread_index, block_index, block_size, grid_size;
extern __thread unsigned* exchanged;  // a word for each of its threads

[[noreturn]] void fail(const char* what);

// Fails where `count` bytes from `from` on are not inside of one buffer.
void check_read(const void* from, std::size_t count);

// Lets other threads go on until all of those that `at` speaks of wait there.
void wait(State at);

// Lets another block go on, and other threads of this one.
void give_way();

// Lets other threads of the block go on, before this one asks again whether what it waits for is there.
void ask_again();

// The block's dynamic shared memory.
unsigned char* dynamic_shared();

// Runs a kernel of `count` threads in each of `blocks`: one block after the other, or all side by side.
void launch_blocks(unsigned blocks, unsigned count, std::size_t shared, void (*thread)(const void*), const void* kernel, bool together);

template <typename Kernel>
void launch(unsigned blocks, unsigned count, std::size_t shared, const Kernel& kernel, bool together = false) {
    launch_blocks(blocks, count, shared, [](const void* k) { (*static_cast<const Kernel*>(k))(); }, &kernel, together);
}

}  // namespace emulation

#define threadIdx emulation::thread_index
#define blockIdx emulation::block_index
#define blockDim emulation::block_size
#define gridDim emulation::grid_size

inline void __nanosleep(unsigned) { emulation::give_way(); }

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
    unsigned largest = 0;
    for (unsigned i = first; i < first + 32; ++i) largest = emulation::exchanged[i] > largest ? emulation::exchanged[i] : largest;
    emulation::wait(emulation::State::at_warp);
    return largest;
}

// The threads of a block take turns.
inline unsigned atomicMax(unsigned* at, unsigned value) {
    const unsigned before = *at;
    *at = before > value ? before : value;
    return before;
}

inline float __fdividef(float a, float b) { return a / b; }

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

template <typename T>
T __shfl_sync(unsigned members, T value, int from) {
    static_assert(sizeof(T) == sizeof(unsigned));
    if (members != 0xffffffffu) emulation::fail("a shuffle among part of a warp");
    const unsigned self = emulation::thread_index.x;
    std::memcpy(&emulation::exchanged[self], &value, sizeof(value));
    emulation::wait(emulation::State::at_warp);
    T other;
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
