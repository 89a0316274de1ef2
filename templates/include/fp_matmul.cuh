// A block's tile of a matrix product on tensor cores. Both operands go through shared memory in panels of 128 bytes along the inner
// dimension, several under way at a time. Goes behind fp_instructions.cuh and fp_product.cuh.
#pragma once

#include <cstring>
#include <type_traits>

#include "fp_half.h"

namespace fp {

// How a tensor core computes a product.
enum class Arithmetic {
    tf32_three,  // float32 as three products of TF32 parts
    tf32,        // float32 rounded to TF32
    halves,      // 16-bit numbers as they are
};

// Numbers for a tensor core, which drops all but 10 bits of their mantissa, so that this rounds them to nearest; as `cvt.rna` does, in
// one instruction instead of five. Some NaN become numbers: `watch` becomes NaN where a number is not finite.
template <int N>
__device__ __forceinline__ void round_to_tf32(float (&values)[N], float (&watch)[2]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        watch[i % 2] = fmaf(values[i], 0.0f, watch[i % 2]);
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof(bits));
        bits += 0x1000u;
        memcpy(&values[i], &bits, sizeof(bits));
    }
}

// An operand as it lies in memory: Count rows (of the right operand: columns) of Inner numbers, strides in elements. Vector
// neighbours along the contiguous dimension, which is the inner one where InnerFirst, stand at a multiple of their size.
template <typename T, typename Index, int64_t Count, int64_t Inner, int64_t RowStride, int64_t InnerStride, bool InnerFirst, int Vector>
struct Operand {
    using Type = T;
    using Place = Index;
    static constexpr bool inner_first = InnerFirst, nested = false, bordered = false;
    static constexpr int vector = Vector;
    static constexpr int64_t count = Count, inner = Inner, row_stride = RowStride, inner_stride = InnerStride;

    static __device__ __forceinline__ int64_t place(int64_t row, int64_t k) {
        return Index(row) * Index(RowStride) + Index(k) * Index(InnerStride);
    }
};

// A dimension made of several, slowest first: SizesAndStrides has a size and a stride, in elements, of each.
template <typename Index, int64_t... SizesAndStrides>
struct Nested {
    // Where its element `at` stands, which is no negative number; that of the slowest dimension may lie past its end.
    static __device__ __forceinline__ int64_t place(int64_t at) {
        constexpr int64_t numbers[] = {SizesAndStrides...};
        using Number = std::make_unsigned_t<Index>;
        Number rest = Number(at), found = 0;
#pragma unroll
        for (int number = sizeof...(SizesAndStrides) - 2; number > 0; number -= 2) {
            const Number size = Number(numbers[number]);
            found += rest % size * Number(numbers[number + 1]);
            rest /= size;
        }
        return Index(found + rest * Number(numbers[1]));
    }
};

// As `Operand`, with dimensions that are `Nested`: Vector neighbours lie in one run of the contiguous one.
template <typename T, typename Index, int64_t Count, int64_t Inner, typename RowSteps, typename InnerSteps, bool InnerFirst, int Vector>
struct NestedOperand {
    using Type = T;
    static constexpr bool inner_first = InnerFirst, nested = true, bordered = false;
    static constexpr int vector = Vector;
    static constexpr int64_t count = Count, inner = Inner;

    using Place = Index;
    static __device__ __forceinline__ Index row_place(int64_t row) { return Index(RowSteps::place(row)); }
    static __device__ __forceinline__ Index inner_place(int64_t k) { return Index(InnerSteps::place(k)); }
    static __device__ __forceinline__ int64_t place(int64_t row, int64_t k) { return row_place(row) + inner_place(k); }
};

// An axis of a tensor with Size places: row r and term k of an operand are at r / Below % Rows * Step + k / Deeper % Terms * Apart - Before.
template <int64_t Size, int64_t Before, int64_t Rows, int64_t Below, int64_t Step, int64_t Terms, int64_t Deeper, int64_t Apart>
struct Border {
    static constexpr int terms = Terms;

    // A bit for each of the terms with which the row is at a place that there is.
    template <typename Number>
    static __device__ __forceinline__ uint32_t of_row(Number row) {
        const int64_t at = int64_t(row / Number(Below) % Number(Rows)) * Step - Before;
        uint32_t found = 0;
#pragma unroll
        for (int term = 0; term < terms; ++term) found |= uint32_t(at + term * Apart >= 0 && at + term * Apart < Size) << term;
        return found;
    }

    // The bit of a term.
    template <typename Number>
    static __device__ __forceinline__ uint32_t of_term(Number k) { return 1u << k / Number(Deeper) % Number(Terms); }
};

// As `NestedOperand`, with zeros beyond the ends of axes, which all together have 32 terms at most.
template <typename Nested, typename... Borders>
struct BorderedOperand : Nested {
    static constexpr bool bordered = true;
    using Number = std::make_unsigned_t<typename Nested::Place>;
    static_assert((Borders::terms + ...) <= 32);

    // Bits of the terms that the row has, and of the one that k is on each axis.
    static __device__ __forceinline__ uint32_t terms_of(int64_t row) {
        uint32_t found = 0;
        int first = 0;
        ((found |= Borders::of_row(Number(row)) << first, first += Borders::terms), ...);
        return found;
    }
    static __device__ __forceinline__ uint32_t bits_of(int64_t k) {
        uint32_t found = 0;
        int first = 0;
        ((found |= Borders::of_term(Number(k)) << first, first += Borders::terms), ...);
        return found;
    }
};

// Rows rows of an operand, `depth` numbers of each, in shared memory. Inner numbers are neighbours where they are so in global memory,
// in chunks of 16 bytes whose order depends on the row; else rows are neighbours, `Blocked` by 64 as fp_wgmma_rows.cuh says. Either way no
// two threads of a warp meet in a bank.
template <typename Operand, int Rows, bool Blocked = false>
struct Panel {
    using T = typename Operand::Type;
    static constexpr int depth = 128 / sizeof(T);
    static constexpr int chunk = 16 / sizeof(T);
    static constexpr int slices = 4;  // of 8 floats or 16 halves: what one instruction takes
    static constexpr int each = depth / slices;
    static constexpr int filled = Operand::inner < depth ? int(Operand::inner + each - 1) / each : slices;  // the others are zeros
    static constexpr int pitch = Rows + 8;
    static constexpr int size = Operand::inner_first || Blocked ? Rows * depth : depth * pitch;
    static_assert(!Blocked || (sizeof(T) == 2 && Rows % 64 == 0));
    static constexpr int bytes = size * sizeof(T);

    static __device__ __forceinline__ int place(int row, int k) {
        if constexpr (!Operand::inner_first && Blocked) return (row / 64 * depth + k) * 64 + (row % 64 / chunk ^ k % 8) * chunk + row % chunk;
        if constexpr (!Operand::inner_first) return k * pitch + row;
        return row * depth + (k / chunk ^ row % 8) * chunk + k % chunk;
    }

    // How Threads threads go over the panel together, each with `count` vectors, `size` apart along the dimension that is not contiguous.
    template <int Threads>
    struct Step {
        static constexpr int vector = Operand::vector;
        static constexpr int across = (Operand::inner_first ? depth : Rows) / vector;  // threads along the contiguous dimension
        static constexpr int size = Threads / across;
        static constexpr int count = Rows * depth / vector / Threads;
        static_assert(Threads % across == 0 && count * size == (Operand::inner_first ? Rows : depth));

        static __device__ __forceinline__ int row() { return Operand::inner_first ? threadIdx.x / across : threadIdx.x % across * vector; }
        static __device__ __forceinline__ int inner() { return Operand::inner_first ? threadIdx.x % across * vector : threadIdx.x / across; }

        // Where the vector `number` of this thread lies in a panel.
        static __device__ __forceinline__ int place(int number) {
            return Panel::place(row() + (Operand::inner_first ? number * size : 0), inner() + (Operand::inner_first ? 0 : number * size));
        }
    };

    // Where the rows of this thread's vectors begin, in panels whose first row is `row`; -1 where there is none. That is found once for
    // all panels where it takes divisions, which are those of nested dimensions.
    template <int Threads>
    struct Begin {
        static constexpr bool known = Operand::nested && Operand::inner_first;
        typename Operand::Place places[known ? Step<Threads>::count : 1];
        uint32_t terms[Operand::bordered ? Step<Threads>::count : 1];  // that are there
        static_assert(known || !Operand::bordered);

        explicit __device__ __forceinline__ Begin(int64_t row) {
            if constexpr (known) {
#pragma unroll
                for (int s = 0; s < Step<Threads>::count; ++s) {
                    const int64_t at = row + Step<Threads>::row() + s * Step<Threads>::size;
                    places[s] = at < Operand::count ? Operand::row_place(at) : -1;
                    if constexpr (Operand::bordered) terms[s] = at < Operand::count ? Operand::terms_of(at) : 0;
                }
            }
        }
    };

    // Begins to copy rows from `row` on, inner numbers from `k` to below `end`; zeros beyond. `end` is a multiple of `depth` or the
    // operand's end.
    template <int Threads>
    static __device__ __forceinline__ void fetch(T* to, const T* from, const Begin<Threads>& rows, int64_t row, int64_t k, int64_t end) {
        for_each<Threads>(from, rows, row, k, end, [&](int, int place, const T* source, int real) {
            if constexpr (Operand::vector * sizeof(T) >= 4) {
                begin_copy_bytes<Operand::vector * sizeof(T)>(to + place, source, real * int(sizeof(T)));
            } else {
                to[place] = real ? *source : cast<T>(0.0f);
            }
        });
    }

    // Calls `use` for each vector of this thread, with its number, its place in the panel, its first element in memory and how many are real.
    template <int Threads, typename Use>
    static __device__ __forceinline__ void for_each(
        const T* from, const Begin<Threads>& rows, int64_t row, int64_t k, int64_t end, const Use& use)
    {
        if constexpr (Begin<Threads>::known) {
            return for_each_known<Threads>(from, rows, k, end, use);
        } else {
            for_each_stepped<Threads>(from, row, k, end, use);
        }
    }

    // The same where the rows' places are known.
    template <int Threads, typename Use>
    static __device__ __forceinline__ void for_each_known(const T* from, const Begin<Threads>& rows, int64_t k, int64_t end, const Use& use) {
        constexpr int vector = Operand::vector;
        const int i = Step<Threads>::inner();
        int inner = vector;  // that are there
        if constexpr (Operand::inner % depth != 0) {
            const int left = int(end - k) - i;
            inner = left < 0 ? 0 : left < vector ? left : vector;
        }
        const auto deep = Operand::inner_place(k + i);
        uint32_t bits = 0;
        if constexpr (Operand::bordered) bits = Operand::bits_of(k + i);
#pragma unroll
        for (int s = 0; s < Step<Threads>::count; ++s) {
            const auto begin = rows.places[s];
            bool there = begin >= 0;
            if constexpr (Operand::bordered) there = (rows.terms[s] & bits) == bits;
            use(s, Step<Threads>::place(s), from + ((there ? begin : 0) + deep), there ? inner : 0);  // what is not real is not read
        }
    }

    // The same where all lie as far apart as the first two.
    template <int Threads, typename Use>
    static __device__ __forceinline__ void for_each_stepped(const T* from, int64_t row, int64_t k, int64_t end, const Use& use) {
        constexpr int vector = Operand::vector, step = Step<Threads>::size;
        const int r = Step<Threads>::row(), i = Step<Threads>::inner();
        const T* const mine = from + Operand::place(row + r, k + i);
#pragma unroll
        for (int s = 0; s < Step<Threads>::count; ++s) {
            const int more_rows = Operand::inner_first ? s * step : 0, deeper = Operand::inner_first ? 0 : s * step;
            int64_t rows = vector, inner = vector;  // that are there
            if constexpr (Operand::count % Rows != 0) rows = Operand::count - (row + r + more_rows);
            if constexpr (Operand::inner % depth != 0) inner = end - (k + i + deeper);
            const int64_t there = Operand::inner_first ? inner : rows;
            const int real = rows <= 0 || inner <= 0 ? 0 : there < vector ? int(there) : vector;
            const T* source = from;
            if constexpr (Operand::nested) {
                if (real) source += Operand::place(row + r + more_rows, k + i + deeper);
            } else {
                if (real) source = mine + (more_rows * Operand::row_stride + deeper * Operand::inner_stride);
            }
            use(s, Step<Threads>::place(s), source, real);
        }
    }

    // 16 rows of a slice, as `multiply_tile` takes them on the left; with `Right`, two groups of 8 columns as it takes them on the right.
    template <bool Right>
    static __device__ __forceinline__ void load(uint32_t (&words)[4], const T* panel, int row, int slice) {
        const int lane = threadIdx.x % 32;
        if constexpr (Operand::inner_first || sizeof(T) == 2) {
            const int later = Right ? lane / 16 : lane / 8 % 2;  // the second 8 rows
            const int deeper = Right ? lane / 8 % 2 : lane / 16;  // the second half of the slice
            if constexpr (Operand::inner_first) {
                load_tiles<false>(words, panel + place(row + lane % 8 + 8 * later, (slice * 2 + deeper) * chunk));
            } else {
                load_tiles<true>(words, panel + place(row + 8 * later, (slice * 2 + deeper) * chunk + lane % 8));
            }
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int later = Right ? i / 2 : i % 2, deeper = Right ? i % 2 : i / 2;
                const T number = panel[place(row + lane / 4 + 8 * later, slice * 8 + lane % 4 + 4 * deeper)];
                memcpy(&words[i], &number, sizeof(number));
            }
        }
    }
};

// A sum by plain arithmetic, over inner numbers from `first` to below `last`.
template <typename L, typename R>
__device__ __forceinline__ float plain_sum(
    const typename L::Type* left, const typename R::Type* right, int64_t row, int64_t column, int64_t first, int64_t last)
{
    float sum = 0.0f;
#pragma unroll 1
    for (int64_t k = first; k < last; ++k) sum = fma(cast<float>(left[L::place(row, k)]), cast<float>(right[R::place(column, k)]), sum);
    return sum;
}

// The tile of a block: 16 Mult x WarpRows rows times 8 Nult x WarpColumns columns, each warp M x N tiles of 16 x 8.
template <Arithmetic arithmetic, typename L, typename R, int WarpRows, int WarpColumns, int M, int N, int Stages>
struct Multiplier {
    using T = typename L::Type;
    static constexpr int rows = WarpRows * M * 16, columns = WarpColumns * N * 8, threads = WarpRows * WarpColumns * 32;
    using Left = Panel<L, rows>;
    using Right = Panel<R, columns>;
    static constexpr int stage_bytes = Left::bytes + Right::bytes;
    static constexpr int room_pitch = N * 8 + 8;  // floats

    // Where this thread's warp stands in the tile.
    static __device__ __forceinline__ int warp_row() { return threadIdx.x / 32 / WarpColumns * (M * 16); }
    static __device__ __forceinline__ int warp_column() { return threadIdx.x / 32 % WarpColumns * (N * 8); }

    // sums = left right for the tile that begins at `row` and `column`, over inner numbers from `first` to below `last`, which begin at a
    // multiple of a panel's depth and end at one, or at the operands' end. `pool` has Stages x stage_bytes. Sums lie as
    // `multiply_tile` has them. Ends with all threads behind their last read of `pool`, and says whether the thread's sums are right:
    // what is not finite has no TF32 parts.
    static __device__ __forceinline__ bool run(
        float (&sums)[M][N][4], unsigned char* pool, const T* left, const T* right, int64_t row, int64_t column, int64_t first, int64_t last)
    {
        const int panels = int((last - first + Left::depth - 1) / Left::depth);
        const typename Left::template Begin<threads> left_rows(row);
        const typename Right::template Begin<threads> right_rows(column);
        const auto fetch = [&](int number) {
            unsigned char* const to = pool + number % Stages * stage_bytes;
            const int64_t k = first + int64_t(number) * Left::depth;
            Left::template fetch<threads>(reinterpret_cast<T*>(to), left, left_rows, row, k, last);
            Right::template fetch<threads>(reinterpret_cast<T*>(to + Left::bytes), right, right_rows, column, k, last);
        };
        float watch[2] = {};
        // Each stage is one group of copies, an empty one where nothing is left to fetch, so that counting groups counts stages.
#pragma unroll
        for (int number = 0; number < Stages - 1; ++number) {
            if (number < panels) fetch(number);
            end_copies();
        }
#pragma unroll 1
        for (int number = 0; number < panels; ++number) {
            await_copies<Stages - 2>();
            __syncthreads();  // this panel is there for all, and nobody reads any more what the next fetch writes over
            if (number + Stages - 1 < panels) fetch(number + Stages - 1);
            end_copies();
            const unsigned char* const here = pool + number % Stages * stage_bytes;
            multiply(sums, watch, reinterpret_cast<const T*>(here), reinterpret_cast<const T*>(here + Left::bytes));
        }
        await_copies<0>();
        __syncthreads();
        if constexpr (arithmetic == Arithmetic::halves) return true;
        bool sound = all_finite(sums);
        if constexpr (arithmetic == Arithmetic::tf32) {
            // What one thread of the warp rounded, others have in their sums.
            unsigned odd = watch[0] + watch[1] != 0.0f;
#pragma unroll
            for (int mask = 16; mask > 0; mask /= 2) odd |= __shfl_xor_sync(0xffffffffu, odd, mask);
            sound = sound && odd == 0;
        }
        return sound;
    }

    // Lays the sums of a warp out in `room`, rows `room_pitch` floats apart. Those of a thread where `sound` is false are computed
    // again by plain arithmetic. The other arguments are those of `run`.
    static __device__ __forceinline__ void lay_out(
        float* room, bool sound, const float (&sums)[M][N][4], const T* left, const T* right, int64_t row, int64_t column, int64_t first, int64_t last)
    {
#pragma unroll
        for (int m = 0; m < M; ++m) stage<1, room_pitch>(room + m * 16 * room_pitch, sums[m], 0);
        if (sound) return;
        const int lane = threadIdx.x % 32;
#pragma unroll 1
        for (int i = 0; i < M * N * 4; ++i) {
            const int r = i / (N * 4) * 16 + i / 2 % 2 * 8 + lane / 4, c = i / 4 % N * 8 + lane % 4 * 2 + i % 2;
            const int64_t at = row + warp_row() + r, across = column + warp_column() + c;
            if (at >= L::count || across >= R::count) continue;
            room[r * room_pitch + c] = plain_sum<L, R>(left, right, at, across, first, last);
        }
    }

private:
    static __device__ __forceinline__ void load(uint32_t (&a)[M][4], uint32_t (&b)[N / 2][4], const T* left, const T* right, int slice) {
#pragma unroll
        for (int m = 0; m < M; ++m) Left::template load<false>(a[m], left, warp_row() + m * 16, slice);
#pragma unroll
        for (int n = 0; n < N / 2; ++n) Right::template load<true>(b[n], right, warp_column() + n * 16, slice);
    }

    static __device__ __forceinline__ void multiply(float (&sums)[M][N][4], float (&watch)[2], const T* left, const T* right) {
        uint32_t a[2][M][4], b[2][N / 2][4];  // a slice, and the next one on its way
        load(a[0], b[0], left, right, 0);
#pragma unroll
        for (int slice = 0; slice < Left::filled; ++slice) {
            if (slice + 1 < Left::filled) load(a[(slice + 1) % 2], b[(slice + 1) % 2], left, right, slice + 1);
            multiply_words(sums, watch, a[slice % 2], b[slice % 2]);
        }
    }

    static __device__ __forceinline__ void multiply_words(
        float (&sums)[M][N][4], float (&watch)[2], const uint32_t (&a)[M][4], const uint32_t (&b)[N / 2][4])
    {
        if constexpr (arithmetic == Arithmetic::halves) {
#pragma unroll
            for (int n = 0; n < N; ++n) {
                const uint32_t words[2] = {b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]};
#pragma unroll
                for (int m = 0; m < M; ++m) multiply_tile<T>(sums[m][n], a[m], words);
            }
        } else {
            float x[M][4], y[N][2];
            memcpy(x, a, sizeof(x));
            memcpy(y, b, sizeof(y));
            if constexpr (arithmetic == Arithmetic::tf32_three) {
                multiply_slice(sums, x, y);
            } else {
#pragma unroll
                for (int m = 0; m < M; ++m) round_to_tf32(x[m], watch);
#pragma unroll
                for (int n = 0; n < N; ++n) {
                    round_to_tf32(y[n], watch);
#pragma unroll
                    for (int m = 0; m < M; ++m) multiply_tile(sums[m][n], x[m], y[n]);
                }
            }
        }
    }
};

// The place of a tile among `Rows` x `Columns`, numbered so that those at work at one time share their operands: down groups of `High`
// rows, then along.
template <int64_t Rows, int64_t Columns, int High>
struct TilePlace {
    int64_t row, column;

    explicit __device__ __forceinline__ TilePlace(int64_t number) {
        const int64_t first = number / (High * Columns) * High;
        const int64_t high = Rows - first < High ? Rows - first : High;
        const int64_t inside = number % (High * Columns);
        row = first + inside % high;
        column = inside / high;
    }
};

}  // namespace fp
