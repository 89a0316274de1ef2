// Copies and products that have begun: what the headers beside this file declare. It stands here, compiled once, because no kernel's own
// compilation should have to make the containers.

#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda_on_host.h"
#include "fp_barriers.cuh"
#include "fp_instructions.cuh"
#include "fp_wgmma.cuh"

namespace fp {

namespace {

struct Copy {
    void* to;
    unsigned char bytes[16];
    int count;
};

// For each thread the groups under way; the last is open.
template <typename T>
using Groups = std::vector<std::vector<T>>;
thread_local Groups<Copy> copies[1024];
thread_local Groups<std::function<void()>> products[1024];

template <typename T>
std::vector<T>& open_group(Groups<T>& groups) {
    if (groups.empty()) groups.emplace_back();
    return groups.back();
}

// Ends the oldest groups, so that `left` and the open one remain.
template <typename T, typename End>
void await(Groups<T>& groups, unsigned left, const End& end) {
    while (groups.size() > left + 1) {
        for (const T& each : groups.front()) end(each);
        groups.erase(groups.begin());
    }
}

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
std::map<const Barrier*, BarrierState> barriers;  // of all blocks
std::mutex at_barriers;
using Lock = std::lock_guard<std::mutex>;

BarrierState& state_of(const Barrier* barrier) {
    const auto found = barriers.find(barrier);
    if (found == barriers.end()) emulation::fail("a barrier that nobody made");
    return found->second;
}

// Copies of a phase whose arrivals and bytes are all there take place, and the next phase begins.
void end_phase(BarrierState& state) {
    if (state.lacking > 0 || state.nbytes > 0) return;
    if (state.lacking < 0 || state.nbytes < 0) emulation::fail("more arrivals at a barrier than it was made for");
    for (const auto& copy : state.copies) std::memcpy(copy.to, copy.bytes.data(), copy.bytes.size());
    state.copies.clear();
    state.lacking = state.arrivals;
    ++state.phase;
}

}  // namespace

void begin_copy_of(void* to, const void* from, int real, int bytes) {
    emulation::check_read(from, real);
    Copy copy{to, {}, bytes};
    std::memcpy(copy.bytes, from, real);
    std::memset(to, 0x5a, bytes);
    open_group(copies[threadIdx.x]).push_back(copy);
}

void end_copies() { copies[threadIdx.x].emplace_back(); }

void await_copies_but(unsigned groups) {
    await(copies[threadIdx.x], groups, [](const Copy& copy) { std::memcpy(copy.to, copy.bytes, copy.count); });
}

void put_product_off(std::function<void()> product) { open_group(products[threadIdx.x]).push_back(std::move(product)); }

void end_products() { products[threadIdx.x].emplace_back(); }

void await_products_but(unsigned groups) {
    await(products[threadIdx.x], groups, [](const std::function<void()>& product) { product(); });
}

void make_barrier(Barrier* barrier, int arrivals) {
    if (reinterpret_cast<std::uintptr_t>(barrier) % sizeof(Barrier)) emulation::fail("a barrier that is not aligned");
    const Lock lock(at_barriers);
    barriers[barrier] = {};
    barriers[barrier].arrivals = barriers[barrier].lacking = arrivals;
    *barrier = 0;  // so that whoever writes behind its memory is found out
}

void arrive_before(Barrier* barrier, uint32_t nbytes) {
    const Lock lock(at_barriers);
    BarrierState& state = state_of(barrier);
    if (state.lacking == 0) end_phase(state);
    --state.lacking;
    state.nbytes += nbytes;
}

void await_phase(Barrier* barrier, int phase) {
    const auto ended = [=] {
        const Lock lock(at_barriers);
        BarrierState& state = state_of(barrier);
        end_phase(state);
        return (state.phase - phase & 1) != 0;
    };
    while (!ended()) emulation::ask_again();
}

namespace {

// A copy that is there when the phase of `barrier` ends.
void begin(void* to, std::vector<unsigned char> bytes, Barrier* barrier) {
    const Lock lock(at_barriers);
    BarrierState& state = state_of(barrier);
    if (state.lacking == 0 && state.nbytes == 0) end_phase(state);
    state.nbytes -= bytes.size();
    std::memset(to, 0x5a, bytes.size());
    state.copies.push_back({to, std::move(bytes)});
}

}  // namespace

void begin_long_copy(void* to, const void* from, uint32_t nbytes, Barrier* barrier) {
    const auto misplaced = [](const void* at) { return reinterpret_cast<std::uintptr_t>(at) % 16 != 0; };
    if (misplaced(to) || misplaced(from) || nbytes % 16 || nbytes == 0) emulation::fail("a long copy that is not aligned");
    emulation::check_read(from, nbytes);
    const auto* const first = static_cast<const unsigned char*>(from);
    begin(to, {first, first + nbytes}, barrier);
}

void begin_box_copy(void* to, const TensorMap& map, int x, int y, int z, Barrier* barrier) {
    if (reinterpret_cast<std::uintptr_t>(to) % 1024) emulation::fail("a box that is not aligned");
    std::vector<unsigned char> bytes(map.box[1] * 128);
    for (unsigned row = 0; row < map.box[1]; ++row) {
        for (unsigned column = 0; column < 64; ++column) {
            const uint64_t at[] = {x + column, y + row, uint64_t(z)};
            if (at[0] >= map.sizes[0] || at[1] >= map.sizes[1] || at[2] >= map.sizes[2]) continue;  // they are zeros
            const auto* const from = static_cast<const uint16_t*>(map.base) + at[0] + at[1] * map.strides[1] + at[2] * map.strides[2];
            emulation::check_read(from, 2);
            std::memcpy(&bytes[row * 128 + (column / 8 ^ row % 8) * 16 + column % 8 * 2], from, 2);
        }
    }
    begin(to, std::move(bytes), barrier);
}

}  // namespace fp
