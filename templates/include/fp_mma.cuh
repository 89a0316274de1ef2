// One tensor core instruction: a 16 x 8 tile times an 8 x 8 tile in TF32, as the threads of a warp hold them (PTX ISA, mma.m16n8k8).
#pragma once

#include <cstdint>

namespace fp {

// sum += a b, of which the tensor core takes 10 bits of mantissa. Thread t holds a[t/4 + 8 (i%2)][t%4 + 4 (i/2)], b[t%4 + 4 i][t/4] and sum[t/4 + 8 (i/2)][2 (t%4) + i%2].
__device__ __forceinline__ void multiply_tile(float (&sum)[4], const float (&a)[4], const float (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
          "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
}

}  // namespace fp
