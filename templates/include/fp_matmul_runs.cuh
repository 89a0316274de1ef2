// A block's tile of a matrix product of 16-bit numbers whose columns are neighbours in memory, by groups of four warps (wgmma). Goes
// behind fp_matmul_group.cuh.
#pragma once

namespace fp {

// As `Whole`, an operand whose column c and term ((r Taps + t) Chunks + chunk) 8 + i stand at place c + Outer::place(r) + t Apart of
// plane `chunk`, number i; a place has 8 numbers, a plane Plane places. What Outer::place has of whole planes leads to other channels.
template <typename Whole, int Chunks, int64_t Plane, int Taps, int Apart, typename Outer>
struct RunOperand : Whole {
    static constexpr int chunks = Chunks, taps = Taps, apart = Apart;
    static constexpr int64_t plane = Plane;
    static_assert(sizeof(typename Whole::Type) == 2 && Chunks % 2 == 0);

    static __device__ __forceinline__ typename Whole::Place run_place(int r) { return typename Whole::Place(Outer::place(r)); }
};

// As `GroupMultiplier` with one row of tiles a warp, where R is such an operand. What the columns of a tile read for the Taps terms of a
// *run* r are places beside each other, which come to shared memory once for all of these, `Slots` runs at a time. The rows' panels come
// as they do there.
template <typename L, typename R, int WarpRows, int WarpColumns, int N, int Stages, int Slots>
struct RunMultiplier : GroupMultiplier<Arithmetic::halves, L, R, false, WarpRows, WarpColumns, 1, N, Stages> {
    using Base = GroupMultiplier<Arithmetic::halves, L, R, false, WarpRows, WarpColumns, 1, N, Stages>;
    using typename Base::T;
    using Base::columns, Base::threads;
    using Panel = typename Base::DownPanel;
    static constexpr int depth = Panel::depth, slices = Panel::slices, step = depth / slices;  // terms of a panel, and of a product
    static constexpr int terms = int(L::inner), panels = (terms + depth - 1) / depth;
    static constexpr int channels = R::chunks * 8, run_terms = R::taps * channels, runs = terms / run_terms;
    static constexpr int width = columns + (R::taps - 1) * R::apart;  // places of a plane
    static constexpr int slot_places = R::chunks * width;
    static_assert(L::inner_first && terms % run_terms == 0 && channels % step == 0 && Stages >= 3);
    // A run is fetched with the panel that is the first to need it, Stages - 2 panels ahead. All threads are then done with panels up to
    // Stages before that one.
    static constexpr bool are_free() {
        for (int r = Slots; r < runs; ++r) {
            if (((r - Slots + 1) * run_terms - 1) / depth + Stages > r * run_terms / depth) return false;
        }
        return true;
    }
    static_assert(are_free());

    // As `GroupMultiplier::run`, for all terms: `first` is 0. `pool` has Stages panels, and Slots x slot_places places behind them.
    static __device__ __forceinline__ bool run(
        float (&sums)[1][N][4], unsigned char* pool, const T* left, const T* right, int64_t row, int64_t column, int64_t, int64_t last)
    {
        const typename Panel::template Begin<threads> rows(row);
        unsigned char* const slots = pool + Stages * Panel::bytes;
        const auto fetch = [&](int number, int stage) {
            if (number < panels) {
                Panel::template fetch<threads>(
                    reinterpret_cast<T*>(pool + stage * Panel::bytes), left, rows, row, int64_t(number) * depth, last);
#pragma unroll 1
                for (int r = (number * depth + run_terms - 1) / run_terms; r < runs && r * run_terms < (number + 1) * depth; ++r) {
                    fetch_run(slots + r % Slots * (slot_places * 16), right, column, r);
                }
            }
            end_copies();
        };
#pragma unroll
        for (int number = 0; number < Stages - 2; ++number) fetch(number, number);
        float total[N * 4] = {};
        const uint64_t down = row_descriptor(pool) + threadIdx.x / 128 / WarpColumns * (64 * 128 / 16);
        const uint64_t across = run_descriptor(slots, width) + Base::column_of_warp();
        int stage = 0, free_stage = Stages - 2;
#pragma unroll 1
        for (int number = 0; number < terms / depth; ++number) {
            await_copies<Stages - 3>();
            publish_to_products();
            __syncthreads();  // this panel is there for all, and all are done with the last but one
            multiply<slices>(total, down + stage * (Panel::bytes / 16), across, number);
            fetch(number + Stages - 2, free_stage);
            await_products<1>();
            stage = Base::next(stage);
            free_stage = Base::next(free_stage);
        }
        if constexpr (terms % depth != 0) {
            await_copies<0>();
            publish_to_products();
            __syncthreads();
            multiply<terms % depth / step>(total, down + stage * (Panel::bytes / 16), across, terms / depth);
        }
        await_products<0>();
        await_copies<0>();
        __syncthreads();
        memcpy(sums, total, sizeof(total));
        return true;
    }

private:
    // Begins to copy the places of run `r` that the columns from `column` on read, zeros beyond the plane.
    static __device__ __forceinline__ void fetch_run(unsigned char* to, const T* right, int64_t column, int r) {
        using Place = typename R::Place;
        const Place plane = Place(R::plane), inside = Place(column) + R::run_place(r) % plane, before = R::run_place(r) / plane * plane;
#pragma unroll
        for (int i = 0; i < (slot_places + threads - 1) / threads; ++i) {
            const unsigned at = threadIdx.x + i * threads, chunk = at / width;
            const Place place = inside + Place(at % width);
            const bool real = place < plane;
            if (slot_places % threads == 0 || at < slot_places) {
                begin_copy_bytes<16>(to + at * 16, right + (before + Place(chunk) * plane + (real ? place : 0)) * 8, real ? 16 : 0);
            }
        }
    }

    // Begins the products of the first `Count` slices of panel `number`, as one group.
    template <int Count>
    static __device__ __forceinline__ void multiply(float (&total)[N * 4], uint64_t down, uint64_t across, int number) {
        begin_products();
#pragma unroll
        for (int slice = 0; slice < Count; ++slice) {
            const int term = number * depth + slice * step, tap = term / channels;
            const int slot = tap / R::taps % Slots, chunk = term % channels / 8;
            const int at = slot * slot_places + chunk * width + tap % R::taps * R::apart;
            RunProduct<T, N * 8>::begin(total, down + slice * 2, across + at);
        }
        end_products();
    }
};

}  // namespace fp
