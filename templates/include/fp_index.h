// Index arithmetic of generated kernels: quotients and remainders of indices that are never negative, by positive constants.
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

}  // namespace fp
