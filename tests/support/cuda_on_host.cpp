// Runs the threads of emulated CUDA kernels; cuda_on_host.h says how. A thread goes on by `_longjmp`: `swapcontext` asks the kernel of the
// host each time for the mask of signals.

#include "cuda_on_host.h"

#include <setjmp.h>
#include <time.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

namespace emulation {

__thread Dim thread_index, block_index, block_size, grid_size;
__thread unsigned* exchanged;

namespace {

constexpr std::size_t guard_bytes = 1 << 12;  // behind dynamic shared memory
constexpr std::size_t pool_alignment = 1 << 10;  // of dynamic shared memory

constexpr std::size_t stack_bytes = 1 << 16;

struct Thread {
    std::unique_ptr<char[]> stack;  // once it has begun
    jmp_buf place;
    State state;
};

struct Kernel {
    void (*thread)(const void*);
    const void* arguments;
};

// Of the block that a thread of the host runs.
thread_local std::vector<Thread> threads;
thread_local std::vector<unsigned> words;
thread_local std::vector<unsigned char> pool;
thread_local jmp_buf scheduler;
thread_local Kernel running;

// Buffers in memory, begin and end; asynchronous copies read nothing else.
std::vector<std::pair<const char*, const char*>> buffers;

// Back to `go_on`, until it is called again for this thread.
void leave() {
    if (_setjmp(threads[thread_index.x].place) == 0) _longjmp(scheduler, 1);
}

// A thread of one block after the other.
void run_threads() {
    while (true) {
        running.thread(running.arguments);
        threads[thread_index.x].state = State::finished;
        leave();
    }
}

void go_on(Thread& thread) {
    if (_setjmp(scheduler) != 0) return;
    if (thread.stack) _longjmp(thread.place, 1);
    thread.stack.reset(new char[stack_bytes]);
    ucontext_t start;
    getcontext(&start);
    start.uc_stack.ss_sp = thread.stack.get();
    start.uc_stack.ss_size = stack_bytes;
    start.uc_link = nullptr;
    makecontext(&start, run_threads, 0);
    setcontext(&start);
}

// Lets the threads from `first` to `last` go on if they all stand at `at`.
bool release(unsigned first, unsigned last, State at) {
    for (unsigned i = first; i < last; ++i) {
        if (threads[i].state != at) return false;
    }
    for (unsigned i = first; i < last; ++i) threads[i].state = State::running;
    return true;
}

void run_block(unsigned count) {
    words.assign(count, 0);
    exchanged = words.data();
    for (Thread& thread : threads) thread.state = State::running;
    constexpr int most_rounds = 1000;  // in which threads do nothing but ask
    int rounds = 0;
    while (true) {
        bool moved = false, only_asked = true;
        for (unsigned i = 0; i < count; ++i) {
            const bool asked = threads[i].state == State::asking;
            if (threads[i].state != State::running && !asked) continue;
            thread_index.x = i;
            threads[i].state = State::running;
            go_on(threads[i]);
            const bool asks = threads[i].state == State::asking;
            moved |= asks || threads[i].state == State::running;
            only_asked &= asked && asks;
        }
        rounds = only_asked ? rounds + 1 : 0;
        if (rounds > most_rounds) fail("threads wait for each other for ever");
        for (unsigned warp = 0; warp + 32 <= count; warp += 32) moved |= release(warp, warp + 32, State::at_warp);
        for (unsigned group = 0; group + 128 <= count; group += 128) moved |= release(group, group + 128, State::at_group);
        if (moved || release(0, count, State::at_block)) continue;
        for (const Thread& thread : threads) {
            if (thread.state != State::finished) fail("not all threads reach a barrier or a shuffle");
        }
        return;
    }
}

void prepare(unsigned blocks, unsigned count, std::size_t shared, Kernel kernel) {
    running = kernel;
    threads = std::vector<Thread>(count);
    pool.assign(shared + pool_alignment + guard_bytes, 0xff);
    block_size.x = count;
    grid_size.x = blocks;
}

// Fails where something was written behind the block's dynamic shared memory.
void finish(std::size_t shared) {
    const unsigned char* const end = dynamic_shared() + shared;
    for (std::size_t i = 0; i < guard_bytes; ++i) {
        if (end[i] != 0xff) fail("a write behind dynamic shared memory");
    }
    threads.clear();
}

}  // namespace

void fail(const char* what) {
    std::fprintf(stderr, "emulation: %s\n", what);
    std::abort();
}

void check_read(const void* from, std::size_t count) {
    const auto* const begin = static_cast<const char*>(from);
    for (const auto& [first, last] : buffers) {
        if (count == 0 || (first <= begin && begin + count <= last)) return;
    }
    fail("a copy from outside of every buffer");
}

void wait(State at) {
    threads[thread_index.x].state = at;
    leave();
}

void ask_again() { wait(State::asking); }

// A minute of the processor, however busy it is, is a wait for ever.
void give_way() {
    const auto spent = [] {
        timespec time;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
        return time.tv_sec;
    };
    thread_local const auto start = spent();
    if (spent() - start > 60) fail("blocks wait for each other for ever");
    std::this_thread::yield();
    wait(State::running);
}

unsigned char* dynamic_shared() {
    const auto address = reinterpret_cast<std::uintptr_t>(pool.data());
    return pool.data() + (pool_alignment - address % pool_alignment) % pool_alignment;
}

void launch_blocks(
    unsigned blocks, unsigned count, std::size_t shared, void (*thread)(const void*), const void* kernel, bool together
) {
    if (blocks == 0 || count == 0 || count > 1024) fail("a launch of an impossible shape");
    if (!together) {
        prepare(blocks, count, shared, {thread, kernel});
        // Neighbours run in both orders, so that nothing that one does wrong to the other is put right behind it.
        for (unsigned first : {1u, 0u}) {
            for (block_index.x = first; block_index.x < blocks; block_index.x += 2) run_block(count);
        }
        finish(shared);
        return;
    }
    std::vector<std::thread> workers;
    for (unsigned block = 0; block < blocks; ++block) {
        workers.emplace_back([=] {
            prepare(blocks, count, shared, {thread, kernel});
            block_index.x = block;
            run_block(count);
            finish(shared);
        });
    }
    for (std::thread& each : workers) each.join();
}

}  // namespace emulation

extern "C" void emulation_buffer(const char* begin, const char* end) { emulation::buffers.emplace_back(begin, end); }
extern "C" void emulation_no_buffers() { emulation::buffers.clear(); }
