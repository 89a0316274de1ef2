// Tiles of a matrix product of 16-bit numbers whose columns are neighbours in memory, by groups of four warps that take turns: one
// multiplies while others work on what follows their sums. Blocks stay. Goes behind fp_barriers.cuh and fp_matmul_runs.cuh.
#pragma once

namespace fp {

// Which tiles there are: `High` rows of `Long` tiles, for each of `Batches` matrices, whose right operands are `Apart` numbers apart. A block
// has a row of tiles, and of its tiles every so many; with a `Depth`, so many neighbours. Then what two of them read of the same places comes
// once: a tile takes runs from segments, each of which begins where a tile does, `Depth` of them, and has `More` places than a run.
template <int High, int Long, int Batches, int64_t Apart, int Depth = 0, int More = 0>
struct TurnTiles {
    static constexpr int high = High, long_ = Long, count = Long * Batches, depth = Depth, more = More;
    static constexpr int64_t apart = Apart;
    static constexpr bool chained = Depth > 0;

    static __device__ __forceinline__ int row() { return blockIdx.x % High; }
    static __device__ __forceinline__ int first() { return chained ? share(blockIdx.x / High) : blockIdx.x / High; }
    static __device__ __forceinline__ int end() { return chained ? share(blockIdx.x / High + 1) : count; }
    static __device__ __forceinline__ int step() { return chained ? 1 : gridDim.x / High; }

private:
    static __device__ __forceinline__ int share(int block) { return int(int64_t(block) * count / int(gridDim.x / High)); }
};

// The tile of a group has 64 rows and 8 N columns; R is a `RunOperand`. The rows' numbers stay in shared memory, chunks of 8 terms below each
// other. Segments, which are runs where tiles are not chained, come in the order in which tiles are multiplied, Slots of them at a time, a
// plane's places as one copy. Sums are laid out in strips of Strip columns.
//
// Barriers: `full` of a slot ends a phase when a segment has come, `empty` when the four warps that multiplied with it last are done; then
// the first of these fetches what comes there next. `turn` of a group ends a phase when the group before has begun its last products, `done`
// when its own of a tile have ended.
//
// With a `Source`, which is a `Filling`, segments are made of that by four warps behind the groups, which take registers from these.
template <typename L, typename R, typename Tiles, int N, int Groups, int Slots, int Strip, typename Source = void>
struct TurnMultiplier {
    using T = typename L::Type;
    static constexpr bool filled = !std::is_void_v<Source>;
    static constexpr int rows = 64, columns = N * 8, strip = Strip, threads = (Groups + filled) * 128;
    static constexpr int terms = int(L::inner), channels = R::chunks * 8, run_terms = R::taps * channels, runs = terms / run_terms;
    static constexpr int depth = Tiles::chained ? Tiles::depth : runs;         // segments of a tile
    static constexpr int advance = Tiles::chained ? 1 : runs;                  // from a tile's first one to the next tile's
    static constexpr int portion = (Tiles::long_ - 1) * advance + depth;       // segments of a matrix
    static constexpr int width = columns + (R::taps - 1) * R::apart + Tiles::more;  // places of a plane
    static constexpr int left_bytes = rows * terms * 2, slot_bytes = R::chunks * width * 16;
    static constexpr int room_pitch = Strip + 8, room_bytes = 16 * room_pitch * 4;  // of a warp
    static constexpr int rooms_at = left_bytes + Slots * slot_bytes, factors_at = rooms_at + Groups * 4 * room_bytes;
    static constexpr int barriers_at = factors_at + (filled ? channels * 4 : 0);
    static constexpr int registers = 65536 / threads / 8 * 8, of_filler = 104, of_others = (threads * registers / 128 - of_filler) / Groups / 8 * 8;
    static_assert(L::inner_first && L::vector == 8 && terms % run_terms == 0 && R::chunks <= 32);
    static_assert(columns % Strip == 0 && Strip % 32 == 0);
    static_assert(Slots >= 2);  // a group may wait for what takes the place of a segment that it multiplied with before
    static_assert(!Tiles::chained || Slots > depth);

    // By all threads of the block: brings the rows' numbers, and begins to fetch the first runs.
    __device__ __forceinline__ TurnMultiplier(unsigned char* pool, const T* left, const T* right = nullptr)
        : pool(pool), right(right), group(threadIdx.x / 128), tile(0)
    {
        if (threadIdx.x == 0) {
#pragma unroll
            for (int slot = 0; slot < Slots; ++slot) {
                make_barrier(full() + slot, filled ? 4 : 1);
                make_barrier(empty() + slot, 4);
            }
#pragma unroll
            for (int i = 0; i < Groups; ++i) {
                make_barrier(turn() + i, 4);
                make_barrier(done() + i, 4);
            }
            publish_barriers();
        }
        fetch_left(left);
        await_copies<0>();
        publish_to_products();
        __syncthreads();
        if (!filled && threadIdx.x < 32) {
#pragma unroll 1
            for (int i = 0; i < Slots; ++i) fetch(i);
        }
    }

    // Whether this thread is one of those that fill; each other one goes on with `take_registers`.
    __device__ __forceinline__ bool fills() const { return threadIdx.x >= Groups * 128; }
    static __device__ __forceinline__ void take_registers() { fp::take_registers<of_others>(); }

    // Makes all segments of the block's tiles of `source`, a `Source`.
    template <typename From>
    __device__ __forceinline__ void fill(const From& source) const {
        using Filler = SegmentFiller<From, R::chunks, columns, width>;
        leave_registers<of_filler>();
        Filler filler(source, reinterpret_cast<float*>(pool + factors_at));
        typename Filler::Segment next;
        const auto find = [&](int number) {
            int matrix;
            int64_t first;
            const bool found = locate(number, matrix, first);
            if (found) next = Filler::segment(matrix, int(first));
            return found;
        };
        if (!find(0)) return;
        filler.begin(next);
#pragma unroll 1
        for (int number = 0, more = true; more; ++number) {
            const auto now = next;
            const int slot = number % Slots;
            more = find(number + 1);
            if (number >= Slots) await_phase(empty() + slot, number / Slots - 1);
            filler.lay_out(pool + left_bytes + slot * slot_bytes, now, next);
            publish_to_products();
            __syncwarp();
            if (threadIdx.x % 32 == 0) arrive(full() + slot);
        }
        filler.end();
    }

    static __device__ __forceinline__ int64_t first_row() { return Tiles::row() * rows; }
    static __device__ __forceinline__ int warp_row() { return threadIdx.x / 32 % 4 * 16; }
    static __device__ __forceinline__ int warp_column() { return 0; }

    // The group's tiles are `first`, and every `next` one behind it before `end`.
    __device__ __forceinline__ int first() const { return Tiles::first() + group * Tiles::step(); }
    static __device__ __forceinline__ int end() { return Tiles::end(); }
    static __device__ __forceinline__ int next() { return Groups * Tiles::step(); }

    // The room of a warp's strip.
    __device__ __forceinline__ float* room() const { return reinterpret_cast<float*>(pool + rooms_at + threadIdx.x / 32 * room_bytes); }

    // The sums of the group's next tile, as `multiply_group` has them. By all threads of a group.
    __device__ __forceinline__ void run(float (&sums)[1][N][4]) {
        const uint64_t down = run_descriptor(pool, rows), across = run_descriptor(pool + left_bytes, width);
        const int number = tile * Groups + group, which = Tiles::first() + number * Tiles::step(), at = first_segment(number, which);
        float total[N * 4] = {};
        await_phase(turn() + group, group == 0 ? tile - 1 : tile);  // the first group's first turn comes by itself
#pragma unroll
        for (int r = 0; r < runs; ++r) {
            const int next = at + segment_of(r), slot = next % Slots;
            await_phase(full() + slot, next / Slots);
            multiply(total, down + r * (run_terms / 8 * rows), across + slot * (slot_bytes / 16) + run_start(r));
            if (r > 0) {
                await_products<1>();
                if (segment_of(r) != segment_of(r - 1) && (!Tiles::chained || segment_of(r - 1) == 0)) {
                    if (Tiles::chained) await_before(number);
                    leave(at + segment_of(r - 1));
                }
            }
        }
        if (threadIdx.x % 32 == 0) arrive(turn() + (group + 1) % Groups);
        await_products<0>();
        if (Tiles::chained && threadIdx.x % 32 == 0) arrive(done() + group);
        if (!Tiles::chained || depth == 1) {
            leave(at + depth - 1);
        } else if (which % Tiles::long_ == Tiles::long_ - 1 || which == Tiles::end() - 1) {
#pragma unroll 1
            for (int i = 1; i < depth; ++i) leave(at + i);  // no tile behind has these segments
        }
        ++tile;
        memcpy(sums, total, sizeof(total));
    }

    // Lays the sums of columns `first` to `first` + Strip of a warp out in `room`, rows `room_pitch` floats apart.
    static __device__ __forceinline__ void lay_out(float* room, const float (&sums)[1][N][4], int first) {
        lay_out_strip<Strip, room_pitch>(room, sums[0], first);
    }

private:
    unsigned char* const pool;
    const T* const right;
    const int group;
    int tile;  // how many tiles it has done

    __device__ __forceinline__ Barrier* full() const { return reinterpret_cast<Barrier*>(pool + barriers_at); }
    __device__ __forceinline__ Barrier* empty() const { return full() + Slots; }
    __device__ __forceinline__ Barrier* turn() const { return empty() + Slots; }
    __device__ __forceinline__ Barrier* done() const { return turn() + Groups; }

    // Run r of a tile lies in this one of its segments, from this place on.
    static __device__ __forceinline__ int segment_of(int r) { return Tiles::chained ? int(R::run_place(r)) / columns : r; }
    static __device__ __forceinline__ int run_start(int r) { return Tiles::chained ? int(R::run_place(r)) % columns : 0; }

    // The number, of all segments of the block, of the first one of its tile `number`, which is tile `which` of all. Chains end with a matrix.
    static __device__ __forceinline__ int first_segment(int number, int which) {
        if (!Tiles::chained) return number * runs;
        return number + (which / Tiles::long_ - Tiles::first() / Tiles::long_) * (depth - 1);
    }

    __device__ __forceinline__ void fetch_left(const T* left) const {
        constexpr int chunks = terms / 8;
#pragma unroll 4
        for (int i = threadIdx.x; i < rows * chunks; i += threads) {
            const int row = i % rows, chunk = i / rows;
            const bool real = first_row() + row < L::count;
            begin_copy_bytes<16>(pool + i * 16, real ? left + L::place(first_row() + row, chunk * 8) : left, real ? 16 : 0);
        }
        end_copies();
    }

    // Which matrix segment `number` of the block is of, and its first place; false where there is no such segment.
    static __device__ __forceinline__ bool locate(int number, int& matrix, int64_t& first) {
        if (Tiles::chained) {
            const int begin = Tiles::first(), last = Tiles::end() - 1;
            if (number >= first_segment(last - begin, last) + depth) return false;
            const int place = begin % Tiles::long_ + number;
            matrix = begin / Tiles::long_ + place / portion;
            first = int64_t(place % portion) * columns;
        } else {
            const int which = Tiles::first() + number / runs * Tiles::step();
            if (which >= Tiles::count) return false;
            matrix = which / Tiles::long_;
            first = int64_t(which % Tiles::long_) * columns + R::run_place(number % runs);
        }
        return true;
    }

    // Begins to fetch segment `number` of the block, if there is one. Places beyond a plane, which no column that exists reads, stay what they are.
    __device__ __forceinline__ void fetch(int number) const {
        int matrix;
        int64_t first;
        if (!locate(number, matrix, first)) return;
        const int slot = number % Slots, lane = threadIdx.x % 32;
        const int64_t left = R::plane - first;
        const uint32_t nbytes = left < 0 ? 0 : uint32_t(left < width ? left : width) * 16;
        if (lane == 0) arrive_before(full() + slot, nbytes * R::chunks);
        __syncwarp();
        if (lane < R::chunks && nbytes != 0) {
            const T* const from = right + matrix * Tiles::apart + (lane * R::plane + first) * 8;
            begin_long_copy(pool + left_bytes + slot * slot_bytes + lane * width * 16, from, nbytes, full() + slot);
        }
    }

    // This warp is done with segment `number`, and so are all groups before. When all four are, the first fetches what takes its place, unless
    // others fill.
    __device__ __forceinline__ void leave(int number) const {
        Barrier* const left = empty() + number % Slots;
        if (threadIdx.x % 32 == 0) arrive(left);
        if (!filled && threadIdx.x / 32 % 4 == 0) {
            await_phase(left, number / Slots);
            fetch(number + Slots);
        }
    }

    // Waits in the warp that fetches until the products of the tile before tile `number` of the block have ended, if there is one. That group's
    // next tile begins behind this group's last products, so the phase is the one at hand or the one before.
    __device__ __forceinline__ void await_before(int number) const {
        if (threadIdx.x / 32 % 4 == 0 && number > 0) await_phase(done() + (number - 1) % Groups, (number - 1) / Groups);
    }

    // Begins the products of a run as one group.
    static __device__ __forceinline__ void multiply(float (&total)[N * 4], uint64_t down, uint64_t across) {
        begin_products();
#pragma unroll
        for (int tap = 0; tap < R::taps; ++tap) {
#pragma unroll
            for (int chunk = 0; chunk < R::chunks; chunk += 2) {
                ChunkProduct<T, N * 8>::begin(total, down + (tap * R::chunks + chunk) * rows, across + chunk * width + tap * R::apart);
            }
        }
        end_products();
    }
};

}  // namespace fp
