// A block's tile of a matrix product by groups of four warps (wgmma). Operands go through shared memory as those of `fp::Multiplier` do.
// Goes behind fp_matmul.cuh, fp_wgmma.cuh and fp_wgmma_rows.cuh.
#pragma once

#include <cstring>
#include <type_traits>

namespace fp {

// Multiplies a thread's sums of the row `down`, as `multiply_group` leaves them, by a factor that nearly all rows have as 1.
template <int N>
__device__ __forceinline__ void rescale(float (&sums)[N][4], int down, float factor) {
    if (factor == 1.0f) return;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        sums[n][down * 2] *= factor;
        sums[n][down * 2 + 1] *= factor;
    }
}

// Lays the sums of columns `first` to `first` + Strip of a warp, as `multiply_group` leaves them, out in `room`, rows Pitch floats apart. A sum's
// place in registers is known when this is compiled.
template <int Strip, int Pitch, int N>
__device__ __forceinline__ void lay_out_strip(float* room, const float (&sums)[N][4], int first) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int begin = 0; begin < N * 8; begin += Strip) {
        if (begin == first) {
#pragma unroll
            for (int n = 0; n < Strip / 8; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    room[(lane / 4 + i / 2 * 8) * Pitch + n * 8 + lane % 4 * 2 + i % 2] = sums[begin / 8 + n][i];
                }
            }
        }
    }
}

// The numbers that a thread has copied to a panel, several at a time.
template <typename T, int Count>
struct alignas(sizeof(T) * Count) Vector {
    T numbers[Count];
};

// The tile of a block: each group multiplies 64 M rows by 8 N columns, each of its warps 16 M rows of them. Where the product is `Turned`,
// these are rows and columns of its transpose. WarpRows is a multiple of 4. Inner numbers are neighbours in float32 operands; with three
// products those of the rows may lie anyhow.
template <Arithmetic arithmetic, typename L, typename R, bool Turned, int WarpRows, int WarpColumns, int M, int N, int Stages>
struct GroupMultiplier {
    using T = typename L::Type;
    static constexpr bool three = arithmetic == Arithmetic::tf32_three;
    static constexpr int high = WarpRows * M * 16, long_ = WarpColumns * N * 8, threads = WarpRows * WarpColumns * 32;
    static constexpr int rows = Turned ? long_ : high, columns = Turned ? high : long_;
    using Down = std::conditional_t<Turned, R, L>;
    using Across = std::conditional_t<Turned, L, R>;
    using DownPanel = Panel<Down, high, sizeof(T) == 2>;
    using AcrossPanel = Panel<Across, long_, sizeof(T) == 2>;
    static constexpr int depth = DownPanel::depth, slices = DownPanel::filled;
    // Of a stage: the columns' panel, the low parts of its numbers, the rows' panel.
    static constexpr int low_at = AcrossPanel::bytes, down_at = AcrossPanel::bytes * (three ? 2 : 1);
    static constexpr int stage_bytes = down_at + DownPanel::bytes;
    static constexpr int room_pitch = (Turned ? M * 16 : N * 8) + 8;  // floats
    static_assert(WarpRows % 4 == 0 && stage_bytes % 1024 == 0 && down_at % 1024 == 0);
    static_assert(Across::inner_first || sizeof(T) == 2);
    static_assert(three || (M == 1 && !Turned && (Down::inner_first || sizeof(T) == 2)));

    // Where this thread's warp stands in the tile.
    static __device__ __forceinline__ int warp_row() { return Turned ? column_of_warp() : row_of_warp(); }
    static __device__ __forceinline__ int warp_column() { return Turned ? row_of_warp() : column_of_warp(); }

    // As `Multiplier::run`; sums lie as `multiply_group` has them, each warp's 16 M rows side by side.
    static __device__ __forceinline__ bool run(
        float (&sums)[M][N][4], unsigned char* pool, const T* left, const T* right, int64_t row, int64_t column, int64_t first, int64_t last)
    {
        const int panels = int((last - first + depth - 1) / depth);
        const typename DownPanel::template Begin<threads> down_rows(Turned ? column : row);
        const typename AcrossPanel::template Begin<threads> across_rows(Turned ? row : column);
        const auto fetch = [&](int number, int slot) {
            if (number < panels) {
                unsigned char* const to = pool + slot * stage_bytes;
                const int64_t k = first + int64_t(number) * depth;
                DownPanel::template fetch<threads>(
                    reinterpret_cast<T*>(to + down_at), Turned ? right : left, down_rows, Turned ? column : row, k, last);
                AcrossPanel::template fetch<threads>(
                    reinterpret_cast<T*>(to), Turned ? left : right, across_rows, Turned ? row : column, k, last);
            }
            end_copies();
        };
        float total[M][N * 4] = {};
        float watch[2] = {};
        if constexpr (three) {
            multiply_exactly(total, pool, panels, fetch);
        } else if constexpr (arithmetic == Arithmetic::tf32) {
            multiply_rounded(total[0], watch, pool, panels, left, right, row, column, first, last);
        } else {
            multiply_chained(total[0], pool, panels, fetch);
        }
        await_copies<0>();
        __syncthreads();
        memcpy(sums, total, sizeof(total));
        if constexpr (arithmetic == Arithmetic::halves) return true;
        const bool sound = all_finite(sums);
        if constexpr (three) return sound;
        return any_of_block(pool, watch[0] + watch[1] != 0.0f) ? false : sound;
    }

    // As `Multiplier::lay_out`.
    static __device__ __forceinline__ void lay_out(
        float* room, bool sound, const float (&sums)[M][N][4], const T* left, const T* right, int64_t row, int64_t column, int64_t first, int64_t last)
    {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int m = 0; m < M; ++m) {
            if constexpr (!Turned) {
                stage<1, room_pitch>(room + m * 16 * room_pitch, sums[m], 0);
            } else {
#pragma unroll
                for (int i = 0; i < N * 4; ++i) room[across_of(i, lane) * room_pitch + down_of(m, i, lane)] = sums[m][i / 4][i % 4];
            }
        }
        if (sound) return;
#pragma unroll 1
        for (int i = 0; i < M * N * 4; ++i) {
            const int d = down_of(i / (N * 4), i % 4, lane), a = across_of(i % (N * 4), lane);
            const int r = Turned ? a : d, c = Turned ? d : a;
            const int64_t at = row + warp_row() + r, across = column + warp_column() + c;
            if (at >= L::count || across >= R::count) continue;
            room[r * room_pitch + c] = plain_sum<L, R>(left, right, at, across, first, last);
        }
    }

protected:
    static __device__ __forceinline__ int row_of_warp() {
        return (threadIdx.x / 128 / WarpColumns * 4 + threadIdx.x / 32 % 4) * (M * 16);
    }
    static __device__ __forceinline__ int column_of_warp() { return threadIdx.x / 128 % WarpColumns * (N * 8); }

    // The place of the sum `i` of tile `m` among the warp's.
    static __device__ __forceinline__ int down_of(int m, int i, int lane) { return m * 16 + i / 2 % 2 * 8 + lane / 4; }
    static __device__ __forceinline__ int across_of(int i, int lane) { return i / 4 * 8 + lane % 4 * 2 + i % 2; }

    static __device__ __forceinline__ int next(int slot) { return slot + 1 == Stages ? 0 : slot + 1; }

    // Whether `value` holds for a thread of the block, whose threads are done with `pool`.
    static __device__ __forceinline__ bool any_of_block(unsigned char* pool, bool value) {
        auto* const found = reinterpret_cast<int*>(pool);
        value = __any_sync(0xffffffffu, value);
        if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = value;
        __syncthreads();
        bool any = false;
#pragma unroll
        for (int warp = 0; warp < threads / 32; ++warp) any |= found[warp] != 0;
        __syncthreads();
        return any;
    }

    // Adds the products of the panel in stage `slot` in the tensor core, as one group.
    static __device__ __forceinline__ void multiply_panel(float (&total)[N * 4], uint64_t base, int slot) {
        const uint64_t stage = base + slot * (stage_bytes / 16);
        const uint64_t down = stage + (down_at + threadIdx.x / 128 / WarpColumns * 64 * 128) / 16, across = stage + column_of_warp() * 128 / 16;
        begin_products();
#pragma unroll
        for (int slice = 0; slice < slices; ++slice) {
            RowProduct<T, N * 8>::template begin<!Down::inner_first, !Across::inner_first>(
                total, down + slice * step<Down>, across + slice * step<Across>);
        }
        end_products();
    }

    // From one slice of an operand to the next, for descriptors.
    template <typename Which>
    static constexpr int step = Which::inner_first ? 32 / 16 : 16 * 128 / 16;

    // Sums of one product for each pair. A panel's products run on while the block meets for the next panel, so that a stage is free two
    // panels later.
    template <typename Fetch>
    static __device__ __forceinline__ void multiply_chained(float (&total)[N * 4], unsigned char* pool, int panels, const Fetch& fetch) {
#pragma unroll
        for (int number = 0; number < Stages - 2; ++number) fetch(number, number);
        const uint64_t base = row_descriptor(pool);
        int slot = 0, free_slot = Stages - 2;
#pragma unroll 1
        for (int number = 0; number < panels; ++number) {
            await_copies<Stages - 3>();
            publish_to_products();
            __syncthreads();  // this panel is there for all, and all are done with the last but one
            multiply_panel(total, base, slot);
            fetch(number + Stages - 2, free_slot);
            await_products<1>();
            slot = next(slot);
            free_slot = next(free_slot);
        }
        await_products<0>();
    }

    // The same of numbers that are rounded to TF32 on their way, which leads through registers: less of it goes through shared memory,
    // which is what limits such products.
    static __device__ __forceinline__ void multiply_rounded(
        float (&total)[N * 4], float (&watch)[2], unsigned char* pool, int panels, const T* left, const T* right, int64_t row, int64_t column,
        int64_t first, int64_t last)
    {
        Carried<DownPanel> down;
        Carried<AcrossPanel> across;
        down.read(left, row, first, last);
        across.read(right, column, first, last);
        const uint64_t base = row_descriptor(pool);
        int slot = 0;
#pragma unroll 1
        for (int number = 0; number < panels; ++number) {
            unsigned char* const here = pool + slot * stage_bytes;
            down.write(here + down_at, watch);
            across.write(here, watch);
            publish_to_products();
            __syncthreads();  // this panel is there for all, and all are done with the last but one
            multiply_panel(total, base, slot);
            if (number + 1 < panels) {
                const int64_t k = first + int64_t(number + 1) * depth;
                down.read(left, row, k, last);
                across.read(right, column, k, last);
            }
            await_products<1>();
            slot = next(slot);
        }
        await_products<0>();
    }

    // A thread's numbers of a panel between global and shared memory.
    template <typename Which>
    struct Carried {
        using Step = typename Which::template Step<threads>;
        Vector<T, Step::vector> numbers[Step::count];

        __device__ __forceinline__ void read(const T* from, int64_t row, int64_t k, int64_t end) {
            Which::template for_each_stepped<threads>(from, row, k, end, [&](int number, int, const T* source, int real) {
                if (real == Step::vector) {
                    numbers[number] = *reinterpret_cast<const Vector<T, Step::vector>*>(source);
                } else {
#pragma unroll
                    for (int i = 0; i < Step::vector; ++i) numbers[number].numbers[i] = i < real ? source[i] : 0.0f;
                }
            });
        }

        __device__ __forceinline__ void write(unsigned char* panel, float (&watch)[2]) {
#pragma unroll
            for (int number = 0; number < Step::count; ++number) {
                round_to_tf32(numbers[number].numbers, watch);
                *reinterpret_cast<Vector<T, Step::vector>*>(reinterpret_cast<T*>(panel) + Step::place(number)) = numbers[number];
            }
        }
    };

    // Splits vectors `begin` to below `end` of those that this thread has copied to the columns' panel: the high parts take their place.
    static __device__ __forceinline__ void split_copies(unsigned char* stage, int begin, int end) {
        using Step = typename AcrossPanel::template Step<threads>;
        using Numbers = Vector<float, Step::vector>;
#pragma unroll
        for (int s = begin; s < end; ++s) {
            const int place = Step::place(s);
            auto* const at = reinterpret_cast<Numbers*>(reinterpret_cast<float*>(stage) + place);
            const Numbers mine = *at;
            Numbers highs, lows;
            split(mine.numbers, highs.numbers, lows.numbers);
            *at = highs;
            *reinterpret_cast<Numbers*>(reinterpret_cast<float*>(stage + low_at) + place) = lows;
        }
    }

    static constexpr int together = 2;  // slices whose terms the tensor core adds

    static __device__ __forceinline__ void load(float (&numbers)[together][4], const unsigned char* stage, int m, int slice) {
        uint32_t words[together][4];
#pragma unroll
        for (int u = 0; u < together; ++u) {
            DownPanel::template load<false>(words[u], reinterpret_cast<const float*>(stage + down_at), row_of_warp() + m * 16, slice + u);
        }
        memcpy(numbers, words, sizeof(words));
    }

    // Sums of three products for each pair, added outside of the tensor core. While one group of products runs, numbers for the next one
    // are loaded, and the columns' numbers of the next panel are split, each by the thread that has copied it. The block meets while the
    // last products of a panel run, so that a stage is free when the next panel's first ones are done.
    template <typename Fetch>
    static __device__ __forceinline__ void multiply_exactly(float (&total)[M][N * 4], unsigned char* pool, int panels, const Fetch& fetch) {
        constexpr int groups = M * ((slices + together - 1) / together), splitting = groups / 2;
        constexpr int count = AcrossPanel::template Step<threads>::count;
#pragma unroll
        for (int number = 0; number < Stages - 1; ++number) fetch(number, number);
        await_copies<Stages - 2>();
        split_copies(pool, 0, count);
        publish_to_products();
        __syncthreads();
        const uint64_t base = row_descriptor(pool) + column_of_warp() * 128 / 16;
        float numbers[together][4];
        load(numbers, pool, 0, 0);
        int slot = 0, free_slot = Stages - 1;
#pragma unroll 1
        for (int number = 0; number < panels; ++number) {
            const uint64_t across = base + slot * (stage_bytes / 16);
            const unsigned char* const here = pool + slot * stage_bytes;
            unsigned char* const following = pool + next(slot) * stage_bytes;
#pragma unroll
            for (int group = 0; group < groups; ++group) {
                const int m = group % M, slice = group / M * together;
                float highs[together][4], lows[together][4], part[N * 4];
#pragma unroll
                for (int u = 0; u < together; ++u) split(numbers[u], highs[u], lows[u]);
                begin_products();
#pragma unroll
                for (int u = 0; u < together; ++u) {
                    multiply_columns<N * 8>(part, lows[u], across + (slice + u) * 2, u > 0);
                    multiply_columns<N * 8>(part, highs[u], across + low_at / 16 + (slice + u) * 2, true);
                }
#pragma unroll
                for (int u = 0; u < together; ++u) multiply_columns<N * 8>(part, highs[u], across + (slice + u) * 2, true);
                end_products();
                if (group >= splitting) {
                    if (group == splitting) await_copies<Stages - 3>();
                    const int turn = group - splitting, turns = groups - splitting;
                    split_copies(following, count * turn / turns, count * (turn + 1) / turns);
                }
                if (group + 1 < groups) {
                    load(numbers, here, (group + 1) % M, (group + 1) / M * together);
                } else {
                    publish_to_products();
                    __syncthreads();  // the next panel is there for all, and all are done with the last one
                    fetch(number + Stages - 1, free_slot);
                    load(numbers, following, 0, 0);
                }
                await_products<0>();
#pragma unroll
                for (int u = 0; u < together; ++u) {
                    release(highs[u]);
                    release(lows[u]);
                }
#pragma unroll
                for (int i = 0; i < N * 4; ++i) total[m][i] += part[i];
            }
            slot = next(slot);
            free_slot = next(free_slot);
        }
    }
};

}  // namespace fp
