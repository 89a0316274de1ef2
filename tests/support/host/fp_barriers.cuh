// What templates/include/fp_barriers.cuh has, for the emulation. Copies spoil what they overwrite when they begin, as early as they may,
// and take place when somebody waits for them, as late as they may.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <vector>

#include "fp_instructions.cuh"

namespace fp {

using Barrier = uint64_t;

// What there is of a barrier: arrivals of a phase, those that lack, bytes that were announced and have not begun, phases that have ended.
struct BarrierState {
    int arrivals = 0, lacking = 0;
    int64_t nbytes = 0;
    int phase = 0;
    struct LongCopy {
        void* to;
        std::vector<unsigned char> bytes;
    };
    std::vector<LongCopy> copies;
};
inline thread_local std::map<const Barrier*, BarrierState> barriers;

inline BarrierState& state_of(const Barrier* barrier) {
    const auto found = barriers.find(barrier);
    if (found == barriers.end()) emulation::fail("a barrier that nobody made");
    return found->second;
}

inline void make_barrier(Barrier* barrier, int arrivals) {
    if (reinterpret_cast<std::uintptr_t>(barrier) % sizeof(Barrier)) emulation::fail("a barrier that is not aligned");
    barriers[barrier] = {};
    barriers[barrier].arrivals = barriers[barrier].lacking = arrivals;
    *barrier = 0;  // so that whoever writes behind its memory is found out
}

inline void publish_barriers() {}

// Copies of a phase whose arrivals and bytes are all there take place, and the next phase begins.
inline void end_phase(BarrierState& state) {
    if (state.lacking > 0 || state.nbytes > 0) return;
    if (state.lacking < 0 || state.nbytes < 0) emulation::fail("more arrivals at a barrier than it was made for");
    for (const auto& copy : state.copies) std::memcpy(copy.to, copy.bytes.data(), copy.bytes.size());
    state.copies.clear();
    state.lacking = state.arrivals;
    ++state.phase;
}

inline void arrive_before(Barrier* barrier, uint32_t nbytes) {
    BarrierState& state = state_of(barrier);
    if (state.lacking == 0) end_phase(state);
    --state.lacking;
    state.nbytes += nbytes;
}

inline void arrive(Barrier* barrier) { arrive_before(barrier, 0); }

inline void await_phase(Barrier* barrier, int phase) {
    while (true) {
        BarrierState& state = state_of(barrier);
        end_phase(state);
        if ((state.phase - phase & 1) != 0) return;
        emulation::ask_again();
    }
}

inline void begin_long_copy(void* to, const void* from, uint32_t nbytes, Barrier* barrier) {
    const auto misplaced = [](const void* at) { return reinterpret_cast<std::uintptr_t>(at) % 16 != 0; };
    if (misplaced(to) || misplaced(from) || nbytes % 16 || nbytes == 0) emulation::fail("a long copy that is not aligned");
    emulation::check_read(from, nbytes);
    const auto* const begin = static_cast<const unsigned char*>(from);
    BarrierState& state = state_of(barrier);
    state.copies.push_back({to, {begin, begin + nbytes}});
    state.nbytes -= nbytes;
    std::memset(to, 0x5a, nbytes);
}

}  // namespace fp
