// Products with many columns: all panels of a block's rows stay in shared memory, and each of its teams, a group of four warps,
// takes tiles of columns of its own, one after another. So rows are read once for a block, and one team multiplies while another stores.
// Goes behind fp_matmul_group.cuh.
#pragma once

namespace fp {

// The tile of a team: 64 rows by 8 N columns of numbers of 16 bits, Stages panels of its columns on their way. In shared memory lie the
// rows' panels, then what each team has of its own: its stages, in which it lays results out afterwards.
template <typename L, typename R, int Teams, int N, int Stages>
struct TeamMultiplier {
    using T = typename L::Type;
    static constexpr int rows = 64, columns = N * 8, threads = 128;
    using DownPanel = Panel<L, rows, true>;
    using AcrossPanel = Panel<R, columns, true>;
    static constexpr int depth = DownPanel::depth, slices = DownPanel::slices;
    static constexpr int panels = int((L::inner + depth - 1) / depth);
    static constexpr int room_pitch = columns + 8;  // floats
    static constexpr int kept_bytes = panels * DownPanel::bytes, stage_bytes = AcrossPanel::bytes;
    static constexpr int room_bytes = rows * room_pitch * 4;
    static constexpr int own_bytes = ((Stages * stage_bytes > room_bytes ? Stages * stage_bytes : room_bytes) + 1023) / 1024 * 1024;
    static_assert(sizeof(T) == 2 && DownPanel::bytes % 1024 == 0 && stage_bytes % 1024 == 0);

    static __device__ __forceinline__ int warp_row() { return threadIdx.x / 32 % 4 * 16; }
    static __device__ __forceinline__ int warp_column() { return 0; }

    // Brings all panels of the rows from `row` on; the block meets at its end.
    static __device__ __forceinline__ void keep(unsigned char* pool, const T* left, int64_t row) {
        const typename DownPanel::template Begin<threads> begin(row);
#pragma unroll 1
        for (int number = threadIdx.x / threads; number < panels; number += Teams) {
            auto* const to = reinterpret_cast<T*>(pool + number * DownPanel::bytes);
            DownPanel::template fetch<threads>(to, left, begin, row, int64_t(number) * depth, L::inner);
        }
        end_copies();
        await_copies<0>();
        publish_to_products();
        __syncthreads();
    }

    // The sums of the tile from `column` on, as `GroupMultiplier::run` has them. The team meets before its stages are written.
    static __device__ __forceinline__ void run(float (&sums)[1][N][4], const unsigned char* pool, unsigned char* own, const T* right, int64_t column) {
        const typename AcrossPanel::template Begin<threads> begin(column);
        const auto fetch = [&](int number, int slot) {
            if (number < panels) {
                auto* const to = reinterpret_cast<T*>(own + slot * stage_bytes);
                AcrossPanel::template fetch<threads>(to, right, begin, column, int64_t(number) * depth, L::inner);
            }
            end_copies();
        };
        float total[N * 4] = {};
        meet_group();  // all are done with the results of the last tile
#pragma unroll
        for (int number = 0; number < Stages - 2; ++number) fetch(number, number);
        const uint64_t kept = row_descriptor(pool), stages = row_descriptor(own);
        int slot = 0, free_slot = Stages - 2;
#pragma unroll 1
        for (int number = 0; number < panels; ++number) {
            await_copies<Stages - 3>();
            publish_to_products();
            meet_group();  // this panel is there for the team, and all of it are done with the last but one
            const uint64_t down = kept + number * (DownPanel::bytes / 16), across = stages + slot * (stage_bytes / 16);
            begin_products();
#pragma unroll
            for (int slice = 0; slice < slices; ++slice) {
                RowProduct<T, columns>::template begin<!L::inner_first, !R::inner_first>(
                    total, down + slice * step<L>, across + slice * step<R>);
            }
            end_products();
            fetch(number + Stages - 2, free_slot);
            await_products<1>();
            slot = slot + 1 == Stages ? 0 : slot + 1;
            free_slot = free_slot + 1 == Stages ? 0 : free_slot + 1;
        }
        await_products<0>();
        await_copies<0>();
        meet_group();
        memcpy(sums, total, sizeof(total));
    }

    // Lays the sums of a warp out in its `room`.
    static __device__ __forceinline__ void lay_out(float* room, const float (&sums)[1][N][4]) { stage<1, room_pitch>(room, sums[0], 0); }

private:
    template <typename Which>
    static constexpr int step = Which::inner_first ? 32 / 16 : 16 * 128 / 16;
};

}  // namespace fp
