// Reduction states, one per ReduceOp of the kernel IR. A default-constructed state is the identity of `merge`; `push` takes one
// element, `push_many` a few at once with less arithmetic and error than as many pushes, `merge` another state;
// `part<I>()` is the result's I-th number, `none()` an element that changes nothing, `of` the state of one element. All of them are exact about NaN and infinities as PyTorch's reductions are.
#pragma once

#include "fp_functions.h"
#include "fp_random.h"

namespace fp {

// What many partial results of type T are collected in.
template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, float>, double, T>;

template <typename T>
struct Sum {
    T total = T(0);

    static FP_FN T none() { return T(0); }

    static FP_FN Sum of(T element) {
        Sum one;
        one.total = element;
        return one;
    }

    FP_FN void push(T value) { total += value; }

    FP_FN void push_product(T a, T b) { total = fma(a, b, total); }  // rounds once

    template <int N>
    FP_FN void push_many(const T (&values)[N]) {
        T sum = values[0];
        for (int i = 1; i < N; ++i) sum += values[i];
        total += sum;
    }

    FP_FN void merge(const Sum& other) { total += other.total; }

    template <int I>
    FP_FN T part() const {
        return total;
    }
};

// A sum of many numbers, with what its roundings lost kept beside it (Kahan 1965). Equal numbers are rounded to the same side,
// addition by addition, in all threads alike, so that errors do not average.
template <typename T>
struct LongSum {
    T total = T(0);
    T lost = T(0);

    static FP_FN T none() { return T(0); }

    FP_FN void push_product(T a, T b) { push(a * b); }

    FP_FN void push(T value) {
        const T corrected = value - lost;
        const T next = total + corrected;
        const T off = (next - total) - corrected;
        lost = off - off == T(0) ? off : T(0);  // infinities lose nothing
        total = next;
    }

    template <int N>
    FP_FN void push_many(const T (&values)[N]) {
        T sum = values[0];
        for (int i = 1; i < N; ++i) sum += values[i];
        push(sum);
    }

    FP_FN void merge(const LongSum& other) {
        push(other.total);
        push(-other.lost);
    }

    template <int I>
    FP_FN T part() const {
        return total;
    }
};

// A sum of up to twice as many numbers as a plain one should have: two partial sums by turns.
template <typename T>
struct PairedSum {
    T total = T(0);
    T other = T(0);

    static FP_FN T none() { return T(0); }

    FP_FN void push(T value) { step(other + value); }

    FP_FN void push_product(T a, T b) { step(fma(a, b, other)); }

    template <int N>
    FP_FN void push_many(const T (&values)[N]) {
        T sum = values[0];
        for (int i = 1; i < N; ++i) sum += values[i];
        push(sum);
    }

    FP_FN void merge(const PairedSum& from) {
        total += from.total;
        other += from.other;
    }

    template <int I>
    FP_FN T part() const {
        return total + other;
    }

private:
    FP_FN void step(T next) {
        other = total;
        total = next;
    }
};

template <typename T>
struct Prod {
    T total = T(1);

    static FP_FN T none() { return T(1); }

    static FP_FN Prod of(T element) {
        Prod one;
        one.total = element;
        return one;
    }

    FP_FN void push(T value) { total *= value; }

    template <int N>
    FP_FN void push_many(const T (&values)[N]) {
        for (int i = 0; i < N; ++i) total *= values[i];
    }

    FP_FN void merge(const Prod& other) { total *= other.total; }

    template <int I>
    FP_FN T part() const {
        return total;
    }
};

template <bool Greatest, typename T>
FP_FN T extreme_of_two(T a, T b) {
    return Greatest ? maximum(a, b) : minimum(a, b);
}

// The extreme of an even number of 16-bit numbers, NaN where one is; a GPU compares two pairs in one instruction.
template <bool Greatest, typename H, int N>
FP_FN float extreme_of_halves(const H (&values)[N]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    unsigned pairs[N / 2];
    memcpy(pairs, values, sizeof pairs);
    for (int i = 1; i < N / 2; ++i) {
        if constexpr (Greatest) {
            raise_pair(pairs[0], pairs[i], H());
        } else {
            lower_pair(pairs[0], pairs[i], H());
        }
    }
    H last[2];
    memcpy(last, pairs, sizeof last);
    return extreme_of_two<Greatest>(to_float(last[0]), to_float(last[1]));
#else
    float result = to_float(values[0]);
    for (int i = 1; i < N; ++i) result = extreme_of_two<Greatest>(result, to_float(values[i]));
    return result;
#endif
}

template <typename T, bool Greatest>
struct Extreme {
    T value = Greatest ? Limits<T>::lowest : Limits<T>::highest;

    static FP_FN T none() { return Greatest ? Limits<T>::lowest : Limits<T>::highest; }

    static FP_FN Extreme of(T element) {
        Extreme one;
        one.value = element;
        return one;
    }

    FP_FN void push(T other) { value = extreme_of_two<Greatest>(value, other); }

    template <int N>
    FP_FN void push_many(const T (&values)[N]) {
        for (int i = 0; i < N; ++i) push(values[i]);
    }

    template <typename H, int N>
    FP_FN void push_many(const H (&values)[N]) {  // of 16 bits each
        push(extreme_of_halves<Greatest>(values));
    }

    FP_FN void merge(const Extreme& other) { push(other.value); }

    template <int I>
    FP_FN T part() const {
        return value;
    }
};

template <typename T>
using Max = Extreme<T, true>;
template <typename T>
using Min = Extreme<T, false>;

// The sum of values[First .. First + N), by halves: of 2^k equal numbers it is exact.
template <int First, int N, typename T, int Size>
FP_FN T sum_by_halves(const T (&values)[Size]) {
    if constexpr (N == 1) {
        return values[First];
    } else {
        return sum_by_halves<First, N / 2>(values) + sum_by_halves<First + N / 2, N - N / 2>(values);
    }
}

// Mean and sum of squared differences from it. Elements one by one: Welford 1962; merging: Chan, Golub and LeVeque 1979.
// Equal numbers, in vectors of a power of two, have exactly their mean: a normalisation magnifies what is off.
template <typename T>
struct Moments {
    T count = T(0);
    T mean = T(0);
    T m2 = T(0);

    FP_FN void push(T value) {
        count += T(1);
        const T difference = value - mean;
        mean += difference / count;
        m2 = fma(difference, value - mean, m2);
    }

    template <int N>
    FP_FN void push_many(const T (&values)[N]) {
        Moments block;
        block.count = T(N);
        block.mean = sum_by_halves<0, N>(values) * (T(1) / T(N));
        for (int i = 0; i < N; ++i) block.m2 = fma(values[i] - block.mean, values[i] - block.mean, block.m2);
        merge(block);
    }

    FP_FN void merge(const Moments& other) {
        const T all = count + other.count;
        const T difference = other.mean - mean;
        const T step = difference * (all > T(0) ? other.count / all : T(0));
        m2 += fma(difference * count, step, other.m2);  // in this order nothing overflows before it is scaled down
        mean += step;
        count = all;
    }

    // The third part is the number of values, for who merges the result with others.
    template <int I>
    FP_FN T part() const {
        return I == 0 ? mean : I == 1 ? m2 : count;
    }
};

#if !defined(__CUDACC__)

// The moments of `count` floats that lie `stride` apart, one by one: of those whose squares a float cannot hold, or that are not all
// finite.
template <typename T>
__attribute__((noinline, cold)) Moments<double> moments_in_double(std::int64_t count, const T* values, std::int64_t stride) {
    Moments<double> state;
    for (std::int64_t i = 0; i < count; ++i) state.push(double(values[i * stride]));
    return state;
}

#endif

// In double: a mean that is merged in float is off by a rounding for each piece, and whoever subtracts another mean magnifies that.
template <typename T>
struct MergeMoments {
    Moments<double> moments;

    FP_FN void push(T count, T mean, T m2) {
        Moments<double> other;
        other.count = count;
        other.mean = mean;
        other.m2 = m2;
        moments.merge(other);
    }

    FP_FN void merge(const MergeMoments& other) { moments.merge(other.moments); }

    template <int I>
    FP_FN T part() const {
        return T(moments.template part<I>());
    }
};

// Maximum and sum of exp(x - maximum) in one sweep: Milakov and Gimelshein 2018. A row of -inf only gives (-inf, 0); +inf and
// NaN give a NaN sum.
template <typename T, bool FewDigits = false>
struct Softmax {
    T value = Limits<T>::lowest;
    T total = T(0);

    // Of an element, whose difference from `value` is at most 0.
    static FP_FN T power(T difference) {
        if constexpr (FewDigits) {
            return exp_few(difference);
        } else {
            return exp(difference);
        }
    }

    // What to subtract before exp: the maximum, but never -inf from -inf.
    static FP_FN T shift(T value) { return value == Limits<T>::lowest ? T(0) : value; }

    static FP_FN Softmax of(T element) {
        Softmax one;
        one.value = element;
        one.total = element == Limits<T>::lowest ? T(0) : T(1);
        return one;
    }

    FP_FN void raise(T bound) {
        const T value_before = value;
        value = maximum(value, bound);
        total *= exp(value_before - shift(value));
    }

    FP_FN void push(T element) {
        raise(element);
        total += power(element - shift(value));
    }

    template <int N>
    FP_FN void push_many(const T (&elements)[N]) {
        T bound = elements[0];
        for (int i = 1; i < N; ++i) bound = maximum(bound, elements[i]);
        raise(bound);
        const T subtracted = shift(value);
        T sum = T(0);
        for (int i = 0; i < N; ++i) sum += power(elements[i] - subtracted);
        total += sum;
    }

    FP_FN void merge(const Softmax& other) {
        raise(other.value);
        total = fma(other.total, exp(other.value - shift(value)), total);
    }

    template <int I>
    FP_FN T part() const {
        return I == 0 ? value : total;
    }
};

template <typename T>
struct MergeSoftmax {
    Softmax<T> softmax;

    static FP_FN MergeSoftmax of(T value, T total) {
        MergeSoftmax one;
        one.softmax.value = value;
        one.softmax.total = total;
        return one;
    }

    FP_FN void push(T value, T total) { softmax.merge(of(value, total).softmax); }

    FP_FN void merge(const MergeSoftmax& other) { softmax.merge(other.softmax); }

    template <int I>
    FP_FN T part() const {
        return softmax.template part<I>();
    }
};

// The extreme value and where it stands first, or Last; NaN counts as the extreme.
template <typename T, bool Greatest, typename P, bool Last = false>
struct ArgExtreme {
    T value = Greatest ? Limits<T>::lowest : Limits<T>::highest;
    P position = Last ? P(-1) : Limits<P>::highest;

    static FP_FN ArgExtreme of(T element, P at) {
        ArgExtreme one;
        one.value = element;
        one.position = at;
        return one;
    }

    FP_FN void push(T other, P at) {
        const bool beyond = Greatest ? other > value : other < value;
        const bool first_nan = isnan(other) & !isnan(value);
        const bool same = (other == value) | (isnan(other) & isnan(value));
        const bool better = beyond | first_nan | (same & (Last ? at > position : at < position));
        value = better ? other : value;
        position = better ? at : position;
    }

    // What stands behind all that came before: so what is merely equal counts only if the last place does, not even if that is the value at first.
    FP_FN void push_behind(T other, P at) {
        bool better;
        if constexpr (Last) {
            better = (Greatest ? other >= value : other <= value) | isnan(other);
        } else {
            better = !(Greatest ? other <= value : other >= value) & !isnan(value);
        }
        value = better ? other : value;
        position = better ? at : position;
    }

    FP_FN void merge(const ArgExtreme& other) { push(other.value, other.position); }

    template <int I>
    FP_FN auto part() const {
        if constexpr (I == 0) {
            return value;
        } else if constexpr (Last) {
            return position;
        } else {
            return value == (Greatest ? Limits<T>::lowest : Limits<T>::highest) ? P(0) : position;  // all elements are that
        }
    }
};

template <typename T, typename P = std::int64_t>
using ArgMax = ArgExtreme<T, true, P>;
template <typename T, typename P = std::int64_t>
using ArgMin = ArgExtreme<T, false, P>;
template <typename T, typename P = std::int64_t>
using LastArgMax = ArgExtreme<T, true, P, true>;
template <typename T, typename P = std::int64_t>
using LastArgMin = ArgExtreme<T, false, P, true>;

}  // namespace fp
