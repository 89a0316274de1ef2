// Index arithmetic of generated kernels: quotients and remainders of indices that are never negative, by positive constants;
// places that come from data.
#pragma once

#include "fp_common.h"

namespace fp {

// Unsigned division by a constant costs less than signed division, which has to round towards zero.
template <typename Index, typename Divisor>
FP_FN Index div(Index index, Divisor divisor) {
    using Positive = std::make_unsigned_t<Index>;
    return static_cast<Index>(static_cast<Positive>(index) / static_cast<Positive>(divisor));
}

template <typename Index, typename Divisor>
FP_FN Index mod(Index index, Divisor divisor) {
    using Positive = std::make_unsigned_t<Index>;
    return static_cast<Index>(static_cast<Positive>(index) % static_cast<Positive>(divisor));
}

template <typename Index>
FP_FN Index least(Index a, std::common_type_t<Index> b) {
    return a < b ? a : b;
}

template <typename Index>
FP_FN Index greatest(Index a, std::common_type_t<Index> b) {
    return a > b ? a : b;
}

// The place itself where it lies in 0 .. size - 1. Elsewhere a CPU kernel reports a fault, for which its caller runs the
// original operators, and they raise; a GPU kernel ends the context as the original's assertion would.
#if !defined(__CUDACC__)

// Zero, but the compiler cannot know, where GCC 12 miscompiles vectors for knowing too much:
// - Where a loop is unrolled and its conditions become constants, it turns `condition ? a * b + c : d * e` into the fused
//   d * e + c: it takes the other value for a term of the sum.
// - Where a place is proven to be a truth value, x[int64_t(a[i] > b)], it gathers by the comparison's mask, in which true
//   is -1. With `place ^ zero` it gathers by the place.
inline int zero = 0;

template <typename Place>
FP_FN std::int64_t place(Place at, std::int64_t size, int* fault) {
    const bool inside = std::int64_t(at) >= 0 && std::int64_t(at) < size;
    if (!inside) __atomic_store_n(fault, 1, __ATOMIC_RELAXED);
    return inside ? std::int64_t(at) : 0;
}

#endif

template <typename Place>
FP_FN std::int64_t place(Place at, std::int64_t size) {
    if (std::int64_t(at) < 0 || std::int64_t(at) >= size) {
#if defined(__CUDA_ARCH__)
        __trap();
#else
        __builtin_trap();
#endif
    }
    return at;
}

}  // namespace fp
