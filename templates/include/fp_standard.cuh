// The part of C++'s standard library that kernels use, for NVRTC, which has none: it stands for each of the standard headers.
#pragma once

#define INFINITY __builtin_bit_cast(float, 0x7f800000)
#define NAN __builtin_bit_cast(float, 0x7fc00000)

using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned;
using int64_t = long;
using uint64_t = unsigned long;
using intptr_t = long;
using uintptr_t = unsigned long;

namespace std {

using ::int8_t, ::int16_t, ::int32_t, ::int64_t, ::uint8_t, ::uint16_t, ::uint32_t, ::uint64_t, ::intptr_t, ::uintptr_t;
using size_t = decltype(sizeof 0);
using ::exp, ::memcpy;

template <typename T, T Value>
struct integral_constant {
    static constexpr T value = Value;
};
using true_type = integral_constant<bool, true>;
using false_type = integral_constant<bool, false>;

template <typename T, typename Other>
inline constexpr bool is_same_v = false;
template <typename T>
inline constexpr bool is_same_v<T, T> = true;

template <typename T, typename... Others>
inline constexpr bool is_one_of = (is_same_v<T, Others> || ...);
template <typename T>
inline constexpr bool is_void_v = is_same_v<T, void>;
template <typename T>
inline constexpr bool is_floating_point_v = is_one_of<T, float, double>;
template <typename T>
inline constexpr bool is_integral_v = is_one_of<T, bool, char, signed char, unsigned char, short, unsigned short, int, unsigned, long, unsigned long, long long, unsigned long long>;
template <typename T>
inline constexpr bool is_signed_v = is_floating_point_v<T> || (is_integral_v<T> && T(-1) < T(0));
template <typename T>
inline constexpr bool is_unsigned_v = is_integral_v<T> && !is_signed_v<T>;

template <bool Test, typename Then = void>
struct enable_if {};
template <typename Then>
struct enable_if<true, Then> {
    using type = Then;
};
template <bool Test, typename Then = void>
using enable_if_t = typename enable_if<Test, Then>::type;

template <bool Test, typename Then, typename Else>
struct conditional {
    using type = Then;
};
template <typename Then, typename Else>
struct conditional<false, Then, Else> {
    using type = Else;
};
template <bool Test, typename Then, typename Else>
using conditional_t = typename conditional<Test, Then, Else>::type;

template <typename T>
struct common_type {
    using type = T;
};
template <typename T>
using common_type_t = typename common_type<T>::type;  // of one alone: what takes no part in deduction
template <typename...>
using void_t = void;

template <typename T>
using make_unsigned_t = conditional_t<sizeof(T) == 1, unsigned char, conditional_t<sizeof(T) == 2, unsigned short, conditional_t<sizeof(T) == 4, unsigned, unsigned long>>>;

template <typename T>
struct numeric_limits {
    static constexpr bool has_infinity = false;
    __host__ __device__ static constexpr T min() { return is_signed_v<T> ? T(make_unsigned_t<T>(1) << (8 * sizeof(T) - 1)) : T(0); }
    __host__ __device__ static constexpr T lowest() { return min(); }
    __host__ __device__ static constexpr T max() { return T(~make_unsigned_t<T>(min())); }
    __host__ __device__ static constexpr T infinity() { return T(0); }
};
template <>
struct numeric_limits<float> {
    static constexpr bool has_infinity = true;
    __host__ __device__ static constexpr float lowest() { return -3.402823466e+38f; }
    __host__ __device__ static constexpr float max() { return 3.402823466e+38f; }
    __host__ __device__ static constexpr float infinity() { return INFINITY; }
    __host__ __device__ static constexpr float quiet_NaN() { return NAN; }
};
template <>
struct numeric_limits<double> {
    static constexpr bool has_infinity = true;
    __host__ __device__ static constexpr double lowest() { return -1.7976931348623157e+308; }
    __host__ __device__ static constexpr double max() { return 1.7976931348623157e+308; }
    __host__ __device__ static constexpr double infinity() { return __builtin_bit_cast(double, 0x7ff0000000000000); }
    __host__ __device__ static constexpr double quiet_NaN() { return __builtin_bit_cast(double, 0x7ff8000000000000); }
};

template <size_t... Numbers>
struct index_sequence {};
template <size_t Count, size_t... Numbers>
struct counted : counted<Count - 1, Count - 1, Numbers...> {};
template <size_t... Numbers>
struct counted<0, Numbers...> {
    using type = index_sequence<Numbers...>;
};
template <size_t Count>
using make_index_sequence = typename counted<Count>::type;

}  // namespace std
