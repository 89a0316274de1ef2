// fp::Lanes<State, Width>: the reductions of Width rows side by side on a CPU, fed with panels of `count` elements of each row, so
// that loops over the rows vectorise. A panel is reduced first and merged once, floats in double: the error grows
// with the length of a panel, not of the rows.
#pragma once

#include "fp_states.h"

namespace fp {

template <typename State, int Width>
struct Lanes {  // any state, one element at a time
    State states[Width];

    template <typename... T>
    FP_FN void push(std::int64_t count, const T (*... panels)[Width]) {
        for (std::int64_t i = 0; i < count; ++i) {
            for (int lane = 0; lane < Width; ++lane) states[lane].push(panels[i][lane]...);
        }
    }

    template <int I>
    FP_FN auto part(std::int64_t lane) const {
        return states[lane].template part<I>();
    }
};

template <typename T, int Width>
struct Lanes<Sum<T>, Width> {
    alignas(64) Wide<T> total[Width] = {};
    alignas(64) Wide<T> recent[Width] = {};  // of the last panels: a double has nothing wider, so few are added in a row
    int panels = 0;

    FP_FN void push(std::int64_t count, const T (*panel)[Width]) {
        alignas(64) T sum[Width] = {};
        for (std::int64_t i = 0; i < count; ++i) {
#pragma omp simd
            for (int lane = 0; lane < Width; ++lane) sum[lane] += panel[i][lane];
        }
#pragma omp simd
        for (int lane = 0; lane < Width; ++lane) recent[lane] += sum[lane];
        if (++panels < 64) return;
        panels = 0;
#pragma omp simd
        for (int lane = 0; lane < Width; ++lane) {
            total[lane] += recent[lane];
            recent[lane] = 0;
        }
    }

    template <int I>
    FP_FN T part(std::int64_t lane) const {
        return T(total[lane] + recent[lane]);
    }
};

// States whose push is one operation: what they hold per lane, and how it takes an element.
template <typename T, int Width, typename Combine>
struct SimpleLanes {
    alignas(64) T value[Width];

    FP_FN explicit SimpleLanes(T identity) {
        for (int lane = 0; lane < Width; ++lane) value[lane] = identity;
    }

    FP_FN void push(std::int64_t count, const T (*panel)[Width]) {
        for (std::int64_t i = 0; i < count; ++i) {
#pragma omp simd
            for (int lane = 0; lane < Width; ++lane) value[lane] = Combine::apply(value[lane], panel[i][lane]);
        }
    }

    template <int I>
    FP_FN T part(std::int64_t lane) const {
        return value[lane];
    }
};

template <typename T>
struct Multiply {
    static FP_FN T apply(T a, T b) { return T(a * b); }
};
template <typename T>
struct Greater {
    static FP_FN T apply(T a, T b) { return maximum(a, b); }
};
template <typename T>
struct Less {
    static FP_FN T apply(T a, T b) { return minimum(a, b); }
};

template <typename T, int Width>
struct Lanes<Prod<T>, Width> : SimpleLanes<T, Width, Multiply<T>> {
    FP_FN Lanes() : SimpleLanes<T, Width, Multiply<T>>(T(1)) {}
};
template <typename T, int Width>
struct Lanes<Max<T>, Width> : SimpleLanes<T, Width, Greater<T>> {
    FP_FN Lanes() : SimpleLanes<T, Width, Greater<T>>(Limits<T>::lowest) {}
};
template <typename T, int Width>
struct Lanes<Min<T>, Width> : SimpleLanes<T, Width, Less<T>> {
    FP_FN Lanes() : SimpleLanes<T, Width, Less<T>>(Limits<T>::highest) {}
};

template <typename T, int Width>
struct Lanes<Moments<T>, Width> {
    std::int64_t seen = 0;
    alignas(64) Wide<T> mean[Width] = {};
    alignas(64) Wide<T> m2[Width] = {};

    template <typename E>  // moments of doubles take floats, too
    FP_FN void push(std::int64_t count, const E (*panel)[Width]) {
        const E share = E(1) / E(count);
        // All lanes have the same counts, so the quotients of Moments::merge are the same, too.
        const Wide<T> ratio = Wide<T>(count) / Wide<T>(seen + count);
        const Wide<T> before = Wide<T>(seen);
        alignas(64) E center[Width] = {};
        alignas(64) E spread[Width] = {};
        alignas(64) E off[Width] = {};
        alignas(64) Wide<T> middle[Width];
        alignas(64) Wide<T> squares[Width];
        for (std::int64_t i = 1; i < count - 1; ++i) {  // from the first on: equal numbers have exactly their mean
#pragma omp simd
            for (int lane = 0; lane < Width; ++lane) center[lane] += panel[i][lane] - panel[0][lane];
        }
#pragma omp simd
        for (int lane = 0; lane < Width; ++lane) {
            const E others = center[lane];  // an infinity among them makes NaN, as in PyTorch, whose mean moves on from it
            const E all = count > 1 ? others + (panel[count - 1][lane] - panel[0][lane]) : E(0);
            center[lane] = panel[0][lane] + (all * share + (others - others));
        }
        for (std::int64_t i = 0; i < count; ++i) {
#pragma omp simd
            for (int lane = 0; lane < Width; ++lane) {
                const E difference = panel[i][lane] - center[lane];
                off[lane] += difference;
                spread[lane] = fma(difference, difference, spread[lane]);
            }
        }
        // Chan, Golub and LeVeque 1983: the sum of the differences from a rounded mean says how far off it is.
#pragma omp simd
        for (int lane = 0; lane < Width; ++lane) {
            const Wide<T> beside = Wide<T>(off[lane]) / Wide<T>(count);
            middle[lane] = Wide<T>(center[lane]) + (beside - beside == 0 ? beside : Wide<T>(0));
            squares[lane] = Wide<T>(spread[lane]) - Wide<T>(off[lane]) * beside;
        }
        if constexpr (sizeof(E) < sizeof(T)) {
            for (int lane = 0; lane < Width; ++lane) {
                if (spread[lane] - spread[lane] == 0) continue;
                const Moments<double> exact = moments_in_double(count, panel[0] + lane, Width);
                middle[lane] = exact.mean;
                squares[lane] = exact.m2;
            }
        }
#pragma omp simd
        for (int lane = 0; lane < Width; ++lane) {
            const Wide<T> difference = middle[lane] - mean[lane];
            const Wide<T> step = difference * ratio;
            mean[lane] += step;
            m2[lane] += squares[lane] + (difference * before) * step;
        }
        seen += count;
    }

    template <int I>
    FP_FN T part(std::int64_t lane) const {
        return T(I == 0 ? mean[lane] : m2[lane]);
    }
};

template <typename T, int Width>
struct Lanes<Softmax<T>, Width> {
    alignas(64) T value[Width];
    alignas(64) Wide<T> total[Width] = {};

    FP_FN Lanes() {
        for (int lane = 0; lane < Width; ++lane) value[lane] = Limits<T>::lowest;
    }

    FP_FN void push(std::int64_t count, const T (*panel)[Width]) {
        alignas(64) T bound[Width];
        alignas(64) T shift[Width];
        alignas(64) T sum[Width] = {};
        for (int lane = 0; lane < Width; ++lane) bound[lane] = value[lane];
        for (std::int64_t i = 0; i < count; ++i) {
#pragma omp simd
            for (int lane = 0; lane < Width; ++lane) bound[lane] = maximum(bound[lane], panel[i][lane]);
        }
#pragma omp simd
        for (int lane = 0; lane < Width; ++lane) shift[lane] = where(bound[lane] == Limits<T>::lowest, T(0), bound[lane]);
        for (std::int64_t i = 0; i < count; ++i) {
#pragma omp simd
            for (int lane = 0; lane < Width; ++lane) sum[lane] += exp(panel[i][lane] - shift[lane]);
        }
#pragma omp simd
        for (int lane = 0; lane < Width; ++lane) total[lane] = total[lane] * exp(value[lane] - shift[lane]) + sum[lane];
        for (int lane = 0; lane < Width; ++lane) value[lane] = bound[lane];
    }

    template <int I>
    FP_FN T part(std::int64_t lane) const {
        return I == 0 ? value[lane] : T(total[lane]);
    }
};

}  // namespace fp
