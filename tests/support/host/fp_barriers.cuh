// What templates/include/fp_barriers.cuh has, for the emulation. Copies spoil what they overwrite when they begin, as early as they may,
// and take place when somebody waits for them, as late as they may.
#pragma once

#include <cstdint>

#include "fp_instructions.cuh"
#include "fp_tensor_map.cuh"

namespace fp {

using Barrier = uint64_t;

void make_barrier(Barrier* barrier, int arrivals);
inline void publish_barriers() {}
void arrive_before(Barrier* barrier, uint32_t nbytes);
inline void arrive(Barrier* barrier) { arrive_before(barrier, 0); }
void await_phase(Barrier* barrier, int phase);
void begin_long_copy(void* to, const void* from, uint32_t nbytes, Barrier* barrier);
void begin_box_copy(void* to, const TensorMap& map, int x, int y, int z, Barrier* barrier);

}  // namespace fp
