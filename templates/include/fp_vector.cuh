// Vectors of neighbouring elements, moved between global memory and registers in accesses of up to 16 bytes.
#pragma once

#include "fp_half.h"

namespace fp {

template <int Bytes>
struct Chunk;
template <>
struct Chunk<1> {
    using Type = unsigned char;
};
template <>
struct Chunk<2> {
    using Type = unsigned short;
};
template <>
struct Chunk<4> {
    using Type = unsigned int;
};
template <>
struct Chunk<8> {
    using Type = uint2;
};
template <>
struct Chunk<16> {
    using Type = uint4;
};

// N elements (a power of two) in registers. In memory they stand at a multiple of their size, or of 16 bytes if that is less.
template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vec {
    T lanes[N];

    __device__ __forceinline__ T& operator[](int lane) { return lanes[lane]; }
    __device__ __forceinline__ const T& operator[](int lane) const { return lanes[lane]; }
};

// Neighbouring elements in shared memory, the first at a multiple of their size (or of 16 bytes), as one access.
template <int N, typename T>
__device__ __forceinline__ Vec<T, N>& as_vector(T& first) {
    return reinterpret_cast<Vec<T, N>&>(first);
}

// Values that wait in registers stay as they are: what the compiler made of them before would take more room.
template <typename T>
__device__ __forceinline__ void stay(T& values) {
#if defined(__CUDA_ARCH__)
    if constexpr (sizeof(T) % 4 == 0) {
        unsigned words[sizeof(T) / 4];
        memcpy(words, &values, sizeof(T));
#pragma unroll
        for (int i = 0; i < int(sizeof(T) / 4); ++i) asm volatile("" : "+r"(words[i]));
        memcpy(&values, words, sizeof(T));
    }
#endif
}

// How long a line that is read or written should stay in the caches.
enum class Reuse { normal, none, much };

// 16 bytes that the L2 cache keeps rather than others, and that the first-level cache need not have.
template <typename Unit>
__device__ __forceinline__ Unit load_to_keep(const Unit* from) {
#if defined(__CUDA_ARCH__)
    if constexpr (sizeof(Unit) == 16) {
        unsigned words[4];
        uint64_t leaves_last;
        asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(leaves_last));
        // volatile: taken out of a loop, all of them would need registers at once
        asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
                     : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                     : "l"(from), "l"(leaves_last));
        Unit result;
        memcpy(&result, words, sizeof(result));
        return result;
    }
#endif
    return __ldg(from);
}

template <Reuse reuse = Reuse::normal, typename T>
__device__ __forceinline__ T load(const T* from) {
    Vec<T, 1> result;
    using Unit = typename Chunk<sizeof(T)>::Type;
    const Unit* source = reinterpret_cast<const Unit*>(from);
    const Unit unit = reuse == Reuse::none ? __ldcs(source) : __ldg(source);
    memcpy(&result, &unit, sizeof(unit));
    return result[0];
}

template <int N, Reuse reuse = Reuse::normal, typename T>
__device__ __forceinline__ Vec<T, N> load_vector(const T* from) {
    constexpr int size = alignof(Vec<T, N>);
    constexpr int count = sizeof(Vec<T, N>) / size;
    using Unit = typename Chunk<size>::Type;
    const Unit* source = reinterpret_cast<const Unit*>(from);
    Vec<T, N> result;
    Unit units[count];
#pragma unroll
    for (int i = 0; i < count; ++i) {
        if constexpr (reuse == Reuse::much) {
            units[i] = load_to_keep(source + i);
        } else {
            units[i] = reuse == Reuse::none ? __ldcs(source + i) : __ldg(source + i);
        }
    }
    memcpy(&result, units, sizeof(result));
    return result;
}

// N neighbouring elements in registers.
template <typename T, int N>
struct Run {
    T lanes[N];

    __device__ __forceinline__ const T& operator[](int lane) const { return lanes[lane]; }
};

// The elements from `from` on, which is a multiple of the accesses of `Size` elements that load them.
template <int N, int Size, typename T>
__device__ __forceinline__ Run<T, N> load_run(const T* from) {
    Run<T, N> result;
#pragma unroll
    for (int i = 0; i < N; i += Size) {
        const auto part = load_vector<Size>(from + i);
#pragma unroll
        for (int k = 0; k < Size; ++k) result.lanes[i + k] = part[k];
    }
    return result;
}

// A vector of which only the first `left` elements may be there; zeros for the others. Both ways give whole words: of single elements the
// compiler would take vectors apart as soon as they come, and wait for each.
template <int N, Reuse reuse = Reuse::normal, typename T, typename I>
__device__ __forceinline__ Vec<T, N> load_first(const T* from, I left) {
    if (left >= N) return load_vector<N, reuse>(from);
    constexpr int count = (sizeof(Vec<T, N>) + 7) / 8;
    std::uint64_t words[count] = {};
#pragma unroll 1
    for (int i = 0; i < left; ++i) {
        std::uint64_t element = 0;
        memcpy(&element, from + i, sizeof(T));
        const int bit = i * static_cast<int>(8 * sizeof(T));
#pragma unroll
        for (int k = 0; k < count; ++k) words[k] |= bit / 64 == k ? element << (bit % 64) : 0;
    }
    Vec<T, N> result;
    memcpy(&result, words, sizeof(result));
    return result;
}

template <Reuse reuse = Reuse::normal, typename T, int N>
__device__ __forceinline__ void store_vector(T* to, const Vec<T, N>& value) {
    constexpr int size = alignof(Vec<T, N>);
    constexpr int count = sizeof(Vec<T, N>) / size;
    using Unit = typename Chunk<size>::Type;
    Unit* target = reinterpret_cast<Unit*>(to);
    Unit units[count];
    memcpy(units, &value, sizeof(value));
#pragma unroll
    for (int i = 0; i < count; ++i) {
        if constexpr (reuse == Reuse::none) {
            __stcs(target + i, units[i]);
        } else {
            target[i] = units[i];
        }
    }
}

// The first `left` elements of a vector, or all.
template <typename T, int N, typename I>
__device__ __forceinline__ void store_first(T* to, const Vec<T, N>& value, I left) {
    if (left >= N) return store_vector(to, value);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        if (i < left) to[i] = value[i];
    }
}

// Whether element `lane` of a vector that begins at column `col` is one of its row's `count`; `col` may be negative.
template <typename I>
__device__ __forceinline__ bool is_inside(int lane, I col, std::common_type_t<I> count) {
    using Positive = std::make_unsigned_t<I>;
    return static_cast<Positive>(col + lane) < static_cast<Positive>(count);
}

// What is there, if it is `wanted`.
template <typename T>
__device__ __forceinline__ T load_if(bool wanted, const T* from) {
    T result = {};
    if (wanted) result = *from;
    return result;
}

// Whether all elements of a vector are its row's; of one `within` the row that is known.
template <int N, typename I>
__device__ __forceinline__ bool is_whole(bool within, I col, std::common_type_t<I> count) {
    return within || (col >= 0 && col + N <= count);
}

// The elements of a vector that are its row's, one by one where not all are.
template <Reuse reuse = Reuse::normal, typename T, int N, typename I>
__device__ __forceinline__ void store_inside(T* to, const Vec<T, N>& value, bool within, I col, std::common_type_t<I> count) {
    if (is_whole<N>(within, col, count)) return store_vector<reuse>(to, value);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        if (is_inside(i, col, count)) to[i] = value[i];
    }
}

// Whether a state has an element that changes nothing.
template <typename State, typename = void>
inline constexpr bool has_none = false;
template <typename State>
inline constexpr bool has_none<State, std::void_t<decltype(State::none())>> = true;

// The same for what a reduction's state takes up.
template <typename State, typename T, int N, typename I>
__device__ __forceinline__ void push_inside(State& state, const T (&values)[N], bool within, I col, std::common_type_t<I> count) {
    if (within) return state.push_many(values);
    if constexpr (has_none<State>) {
        T own[N];
#pragma unroll
        for (int i = 0; i < N; ++i) own[i] = values[i];
        if (!is_whole<N>(within, col, count)) {  // two warps of a row
#pragma unroll
            for (int i = 0; i < N; ++i) own[i] = is_inside(i, col, count) ? own[i] : State::none();
        }
        state.push_many(own);
    } else {
        if (is_whole<N>(within, col, count)) return state.push_many(values);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if (is_inside(i, col, count)) state.push(values[i]);
        }
    }
}

// The same of the vectors of several steps, each with its column: at once where all of them are whole, which is less arithmetic.
template <typename State, typename T, int Steps, int N, typename I>
__device__ __forceinline__ void push_steps_inside(
    State& state, const T (&values)[Steps][N], const I (&cols)[Steps], std::common_type_t<I> count)
{
    bool whole = true;
#pragma unroll
    for (int u = 0; u < Steps; ++u) whole = whole && is_whole<N>(false, cols[u], count);
    if (whole) {
        T all[Steps * N];
#pragma unroll
        for (int i = 0; i < Steps * N; ++i) all[i] = values[i / N][i % N];
        return state.push_many(all);
    }
#pragma unroll
    for (int u = 0; u < Steps; ++u) push_inside(state, values[u], false, cols[u], count);
}

// Store at most 16 bytes if `wanted`. By a predicate and not a branch: the compiler would move what values are made of into the branch, one
// after another.
template <typename T, int N>
__device__ __forceinline__ void store_if(bool wanted, T* to, const Vec<T, N>& value) {
#if defined(__CUDA_ARCH__)
    const int condition = wanted;
    if constexpr (sizeof(value) == 16) {
        unsigned words[4];
        memcpy(words, &value, sizeof(value));
        asm volatile("{ .reg .pred p; setp.ne.s32 p, %5, 0; @p st.global.v4.b32 [%0], {%1, %2, %3, %4}; }" ::"l"(to), "r"(words[0]),
                     "r"(words[1]), "r"(words[2]), "r"(words[3]), "r"(condition) : "memory");
    } else if constexpr (sizeof(value) == 8) {
        unsigned words[2];
        memcpy(words, &value, sizeof(value));
        asm volatile("{ .reg .pred p; setp.ne.s32 p, %3, 0; @p st.global.v2.b32 [%0], {%1, %2}; }" ::"l"(to), "r"(words[0]), "r"(words[1]),
                     "r"(condition) : "memory");
    } else if constexpr (sizeof(value) == 4) {
        unsigned word;
        memcpy(&word, &value, sizeof(value));
        asm volatile("{ .reg .pred p; setp.ne.s32 p, %2, 0; @p st.global.b32 [%0], %1; }" ::"l"(to), "r"(word), "r"(condition) : "memory");
    } else if constexpr (sizeof(value) == 2) {
        unsigned short word;
        memcpy(&word, &value, sizeof(value));
        asm volatile("{ .reg .pred p; setp.ne.s32 p, %2, 0; @p st.global.b16 [%0], %1; }" ::"l"(to), "h"(word), "r"(condition) : "memory");
    } else {
        if (wanted) store_vector(to, value);
    }
#else
    if (wanted) store_vector(to, value);
#endif
}

// Store a row of N elements (a power of two) of shared memory to any place: accesses of 16 bytes at multiples of 16 bytes, and
// single elements at both ends. Each of the row's threads, numbered by `lane`, stores 16 bytes. The element's place in the row is changed
// by `turn`, bit by bit.
template <int N, typename T>
__device__ __forceinline__ void store_row(T* to, const T* row, int turn, int lane) {
    constexpr int width = 16 / sizeof(T);
    const int past = static_cast<int>(reinterpret_cast<std::uintptr_t>(to) / sizeof(T) % width);
    const int first = lane * width - past;
    Vec<T, width> value;
#pragma unroll
    for (int i = 0; i < width; ++i) value[i] = row[((first + i) & (N - 1)) ^ turn];  // the first thread has both ends
    if (first >= 0) {
        store_vector<Reuse::none>(to + first, value);  // of a plain store the compiler makes single elements here
    } else {
#pragma unroll
        for (int i = 0; i < width; ++i) to[(first + i) & (N - 1)] = value[i];
    }
}

// Store those elements of such a row that are in the first N elements' worth of sectors which begin in it: whole sectors of S elements.
// `index` is that of the row's first element, from the buffer's.
template <int N, int S, typename T>
__device__ __forceinline__ void store_sectors(T* to, const T* row, int turn, int lane, unsigned index) {
    constexpr int width = 16 / sizeof(T);
    const int first = static_cast<int>(-index % S) + lane * width;
    Vec<T, width> value;
    if (lane * width < N) {
#pragma unroll
        for (int i = 0; i < width; ++i) value[i] = row[(first + i) ^ turn];
        store_vector<Reuse::none>(to + first, value);
    }
}

}  // namespace fp
