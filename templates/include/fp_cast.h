// fp::cast<To>(value): conversion between element types as PyTorch's Tensor.to does it.
#pragma once

#include "fp_common.h"

namespace fp {

// What a number is that an integer of type To cannot hold, and NaN: whatever the processor's instruction gives, as in PyTorch. That
// is undefined in C++, so a CPU kernel says it: as a choice of bits, because GCC makes `trunc` of a conversion there and back, through a
// condition, too, and then -0.5 becomes -0.
template <typename To, typename From>
FP_FN To whole(From value) {
#if defined(__CUDA_ARCH__)
    return static_cast<To>(value);  // one instruction, which saturates
#else
    using Numbers = std::numeric_limits<To>;
    constexpr From beyond = -static_cast<From>(Numbers::min());
    const bool inside = (value >= -beyond) & (value < beyond);
#if defined(__x86_64__)
    constexpr To outside = Numbers::min();
#else
    const To outside = value >= beyond ? Numbers::max() : value < -beyond ? Numbers::min() : To(0);
#endif
    const To kept = -To(inside);
    return (static_cast<To>(value) & kept) | (outside & ~kept);
#endif
}

// PyTorch converts floating point to a narrow integer through a wider one, whose low bits stay: a signed one through int, an unsigned
// one through int64. A float beyond int is a multiple of 256: on x86 int gives a byte the same low bits as int64, and vectorises.
#if defined(__CUDA_ARCH__) || !defined(__x86_64__)
template <typename To, typename From>
using WideInt = std::conditional_t<sizeof(To) == 8 || std::is_unsigned_v<To>, std::int64_t, std::int32_t>;
#else
template <typename To, typename From>
using WideInt =
    std::conditional_t<sizeof(To) == 8 || (std::is_unsigned_v<To> && sizeof(From) == 8), std::int64_t, std::int32_t>;
#endif

template <typename To, typename From>
struct Cast {
    static FP_FN To convert(From value) {
        if constexpr (std::is_same_v<To, bool>) {
            return value != From(0);
        } else if constexpr (std::is_same_v<From, bool>) {
            return value ? To(1) : To(0);  // GCC vectorises this, but no conversion of bool
        } else if constexpr (std::is_floating_point_v<From> && std::is_integral_v<To>) {
            return static_cast<To>(whole<WideInt<To, From>>(value));
        } else {
            return static_cast<To>(value);
        }
    }
};

template <typename To, typename From>
FP_FN To cast(From value) {
    return Cast<To, From>::convert(value);
}

}  // namespace fp
