// fp::cast<To>(value): conversion between element types as PyTorch's Tensor.to does it.
#pragma once

#include "fp_common.h"

namespace fp {

// Floating point to a narrow integer goes through a wider one, so that values beyond the narrow range wrap.
// A float beyond int32 is a multiple of 256: on x86 int32 gives the same low bits as int64, and vectorises.
#if defined(__CUDA_ARCH__) || !defined(__x86_64__)
template <typename From>
using WideInt = std::int64_t;
#else
template <typename From>
using WideInt = std::conditional_t<sizeof(From) == 4, std::int32_t, std::int64_t>;
#endif

template <typename To, typename From>
struct Cast {
    static FP_FN To convert(From value) {
        if constexpr (std::is_same_v<To, bool>) {
            return value != From(0);
        } else if constexpr (std::is_same_v<From, bool>) {
            return value ? To(1) : To(0);  // GCC vectorises this, but no conversion of bool
        } else if constexpr (std::is_floating_point_v<From> && std::is_integral_v<To> && sizeof(To) < 4) {
            return static_cast<To>(static_cast<WideInt<From>>(value));
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
