// What templates/include/fp_tensor_map.cuh has, for the emulation.
#pragma once

#include <cstdint>

namespace fp {

struct TensorMap {
    const void* base;
    uint64_t sizes[3], strides[3];  // in elements
    uint32_t box[2];
};

inline int describe(TensorMap& map, const void* base, const uint64_t (&sizes)[3], const uint64_t (&strides)[2], const uint32_t (&box)[2]) {
    if (reinterpret_cast<std::uintptr_t>(base) % 16 || strides[0] % 8 || strides[1] % 8) emulation::fail("a matrix that is not aligned");
    if (box[0] != 64 || box[1] == 0 || box[1] > 256) emulation::fail("a box that the copy engine does not have");
    map = {base, {sizes[0], sizes[1], sizes[2]}, {1, strides[0], strides[1]}, {box[0], box[1]}};
    return 0;
}

}  // namespace fp
