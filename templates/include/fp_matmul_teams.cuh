// Tiles of a matrix product of 16-bit numbers by blocks that stay. The copy engine brings panels, tile after tile; teams of groups of four warps
// multiply (wgmma) and take tiles by turns, so that one multiplies while another works on what follows its sums.
// Goes behind fp_barriers.cuh and fp_matmul_group.cuh; needs sm_90a.
#pragma once

namespace fp {

// The tile of a team of Groups groups has 64 Groups rows and 8 N columns. Panels lie as those of `GroupMultiplier`, Stages of them in shared
// memory, in the order in which they are multiplied. Sums are laid out in strips of Strip columns.
//
// A thread of a group of its own tells the copy engine what to bring. Barriers: `full` of a stage ends a phase when a panel has come, `empty` when
// the warps that multiplied it are done. `turn` of a team ends one when the last panel of the tile before has come:
// phases are known by parity, so nobody waits for one that is further ahead.
template <typename L, typename R, int Teams, int Groups, int N, int Stages, int Strip>
struct TeamMultiplier {
    using T = typename L::Type;
    static constexpr int rows = Groups * 64, columns = N * 8, strip = Strip;
    static constexpr int copying = 128, threads = copying + Teams * Groups * 128;
    using Down = Panel<L, rows, true>;
    using Across = Panel<R, columns, true>;
    static constexpr int depth = Down::depth, down_at = Across::bytes, stage_bytes = down_at + Down::bytes;
    static constexpr int room_pitch = Strip + 8, room_bytes = 16 * room_pitch * 4;  // of a warp
    static constexpr int rooms_at = Stages * stage_bytes, barriers_at = rooms_at + Teams * Groups * 4 * room_bytes;
    static constexpr int registers = 65536 / threads / 8 * 8, of_copying = 32;
    static constexpr int of_others = (threads * registers / 128 - of_copying) / (Teams * Groups) / 8 * 8;
    static_assert(sizeof(T) == 2 && Stages >= 2 && columns % Strip == 0 && Strip % 32 == 0);
    static_assert(stage_bytes % 1024 == 0 && down_at % 1024 == 0 && columns % 64 == 0);

    // By all threads of the block.
    explicit __device__ __forceinline__ TeamMultiplier(unsigned char* pool)
        : pool(pool), team(threadIdx.x < copying ? -1 : (int(threadIdx.x) / 128 - 1) / Groups)
    {
        if (threadIdx.x == 0) {
#pragma unroll
            for (int slot = 0; slot < Stages; ++slot) {
                make_barrier(full() + slot, 1);
                make_barrier(empty() + slot, 4 * Groups);
            }
#pragma unroll
            for (int i = 0; i < Teams; ++i) make_barrier(turn() + i, 4 * Groups);
            publish_barriers();
        }
        __syncthreads();
    }

    // Whether this thread is one of those that copy: they `leave_registers`, and `copy` the panels of all tiles. Each other one goes on with
    // `take_registers`, and asks of each tile whether it `takes` it.
    __device__ __forceinline__ bool copies() const { return team < 0; }
    static __device__ __forceinline__ void leave_registers() { fp::leave_registers<of_copying>(); }
    static __device__ __forceinline__ void take_registers() { fp::take_registers<of_others>(); }

    // Copies the panels of the tile at `row` and `column`, of matrices number `left_batch` and `right_batch` of what `left` and `right` describe;
    // the terms are those from `first` to below `last`, as `Multiplier::run` has them.
    __device__ __forceinline__ void copy(
        const TensorMap& left, const TensorMap& right, int left_batch, int right_batch, int64_t row, int64_t column, int64_t first, int64_t last)
    {
        if (threadIdx.x != 0) return;
#pragma unroll 1
        for (int64_t k = first; k < last; k += depth) {
            const int slot = panel % Stages;
            if (panel >= Stages) await_phase(empty() + slot, panel / Stages - 1);
            unsigned char* const to = pool + slot * stage_bytes;
            arrive_before(full() + slot, stage_bytes);
            copy_boxes<L, rows>(to + down_at, left, row, int(k), left_batch, full() + slot);
            copy_boxes<R, columns>(to, right, column, int(k), right_batch, full() + slot);
            ++panel;
        }
    }

    // Whether the block's next tile, whose terms are those from `first` to below `last`, is one of this thread's team.
    __device__ __forceinline__ bool takes(int64_t first, int64_t last) {
        panels = int((last - first + depth - 1) / depth);
        const bool mine = Teams == 1 || tile % Teams == team;
        if (!mine) panel += panels;
        ++tile;
        return mine;
    }

    // The sums of the tile that it takes, as `multiply_group` has them. By all threads of the team.
    __device__ __forceinline__ void run(float (&sums)[1][N][4]) {
        const uint64_t base = row_descriptor(pool);
        float total[N * 4] = {};
        if (Teams > 1) await_phase(turn() + team, (tile - 1) / Teams - (team == 0));  // the first team's first turn comes by itself
        int before = 0;
#pragma unroll 1
        for (int i = 0; i < panels; ++i) {
            const int slot = panel % Stages;
            await_phase(full() + slot, panel / Stages);
            multiply_panel(total, base + slot * (stage_bytes / 16));
            if (i > 0) {
                await_products<1>();
                leave(before);
            }
            before = slot;
            ++panel;
        }
        if (Teams > 1 && threadIdx.x % 32 == 0) arrive(turn() + (team + 1) % Teams);
        await_products<0>();
        if (panels > 0) leave(before);
        memcpy(sums, total, sizeof(total));
    }

    static __device__ __forceinline__ int warp_row() { return (int(threadIdx.x) / 32 - 4) % (4 * Groups) * 16; }
    static __device__ __forceinline__ int warp_column() { return 0; }

    // The room of a warp's strip.
    __device__ __forceinline__ float* room() const {
        return reinterpret_cast<float*>(pool + rooms_at + (int(threadIdx.x) / 32 - 4) * room_bytes);
    }

    // Lays the sums of columns `first` to `first` + Strip of a warp out in `room`, rows `room_pitch` floats apart.
    static __device__ __forceinline__ void lay_out(float* room, const float (&sums)[1][N][4], int first) {
        lay_out_strip<Strip, room_pitch>(room, sums[0], first);
    }

private:
    unsigned char* const pool;
    const int team;
    int tile = 0;               // how many of the block's there were
    int panel = 0, panels = 0;  // the next one of the block; those of the tile

    __device__ __forceinline__ Barrier* full() const { return reinterpret_cast<Barrier*>(pool + barriers_at); }
    __device__ __forceinline__ Barrier* empty() const { return full() + Stages; }
    __device__ __forceinline__ Barrier* turn() const { return empty() + Stages; }

    // Begins to copy a panel of Count rows.
    template <typename Which, int Count>
    static __device__ __forceinline__ void copy_boxes(unsigned char* to, const TensorMap& map, int64_t row, int k, int batch, Barrier* come) {
        constexpr int high = Which::inner_first ? Count : 64;
#pragma unroll
        for (int i = 0; i < Count; i += high) {
            const int there = int(row) + i;
            begin_box_copy(to + i * 128, map, Which::inner_first ? k : there, Which::inner_first ? there : k, batch, come);
        }
    }

    // This warp's products with the panel in a stage have ended.
    __device__ __forceinline__ void leave(int slot) const {
        if (threadIdx.x % 32 == 0) arrive(empty() + slot);
    }

    // From one slice of an operand to the next, for descriptors.
    template <typename Which>
    static constexpr int step = Which::inner_first ? 32 / 16 : 16 * 128 / 16;

    // Begins the products of a panel as one group.
    static __device__ __forceinline__ void multiply_panel(float (&total)[N * 4], uint64_t across) {
        const uint64_t down = across + (down_at + (int(threadIdx.x) / 128 - 1) % Groups * 64 * 128) / 16;
        begin_products();
#pragma unroll
        for (int slice = 0; slice < Down::filled; ++slice) {
            RowProduct<T, N * 8>::template begin<!L::inner_first, !R::inner_first>(
                total, down + slice * step<L>, across + slice * step<R>);
        }
        end_products();
    }
};

}  // namespace fp
