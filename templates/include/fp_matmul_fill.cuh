// The right operand of a product of `TurnMultiplier`, made of a float32 tensor: four warps load its numbers and lay them out as scaled halves,
// while others multiply. Goes before fp_matmul_turns.cuh.
#pragma once

#include <cstdint>

namespace fp {

// An image within a border, axes slowest first: of each the size, the places before it, and all places. Elements and places are numbered in
// memory order, so that an image's elements stand one behind the other with gaps between them.
template <int Size, int Before, int Places, int... Rest>
struct BorderedImage {
    using Inner = BorderedImage<Rest...>;
    static constexpr int elements = Size * Inner::elements, places = Places * Inner::places, row = Inner::row;

    static __device__ __forceinline__ bool has(int place) {
        return unsigned(place / Inner::places - Before) < unsigned(Size) && Inner::has(place % Inner::places);
    }
    static __device__ __forceinline__ int place_of(int element) {
        return (element / Inner::elements + Before) * Inner::places + Inner::place_of(element % Inner::elements);
    }
    // The first element that stands at `place` or behind it; `elements` where there is none.
    static __device__ __forceinline__ int element_from(int place) {
        const int at = place / Inner::places - Before;
        return at < 0 ? 0 : at >= Size ? elements : at * Inner::elements + Inner::element_from(place % Inner::places);
    }
};

template <int Size, int Before, int Places>
struct BorderedImage<Size, Before, Places> {
    static constexpr int elements = Size, places = Places, row = Size;

    static __device__ __forceinline__ bool has(int place) { return unsigned(place - Before) < unsigned(Size); }
    static __device__ __forceinline__ int place_of(int element) { return element + Before; }
    static __device__ __forceinline__ int element_from(int place) {
        return place < Before ? 0 : place - Before < Size ? place - Before : Size;
    }
};

// What the operand is made of: images, `Sample` and `Channel` numbers apart, that start at a multiple of 16 bytes if `Aligned`; factors of
// both; and the first number of a buffer, which becomes 1 where a half becomes an infinity.
template <typename Image, int64_t Sample, int64_t Channel, bool Aligned>
struct Filling {
    using Places = Image;
    static constexpr int64_t sample = Sample, channel = Channel;
    static constexpr bool aligned = Aligned;
    const float* source;
    const float* by_sample;
    const float* by_channel;
    float* alarm;
};

// Makes segments of `Chunks` planes, which are so many `Columns` and what tiles read behind them, `Width` places, by the 128 threads of a
// group. A warp has every fourth chunk of eight channels. A thread takes four neighbours of a chunk at a time, and has loads for the next
// two times on the way, those of the segment behind among them; what is behind the columns, place by place.
template <typename From, int Chunks, int Columns, int Width>
struct SegmentFiller {
    using Image = typename From::Places;
    static constexpr int quad = 4, own = (Chunks + 3) / 4, rounds = own * Columns / (32 * quad), ahead = 2;
    static constexpr int behind = Width - Columns + quad - 1, rest = own * behind;  // elements of a plane behind those of its rounds
    static_assert(Columns % (32 * quad) == 0 && rounds % ahead == 0);
    static_assert(Image::row % quad == 0 && From::sample % quad == 0 && From::channel % quad == 0);  // neighbours are in one row

    // The places from `first` on of a sample, and the elements that stand there: from `begin`, which a quad begins with, up to `end`.
    struct Segment {
        int sample, first, begin, end;
    };

    // `factors` has room for one of each channel.
    __device__ __forceinline__ SegmentFiller(const From& from, float* factors)
        : from(from), factors(factors), most(0), scaled(-1), beyond(false)
    {}

    static __device__ __forceinline__ Segment segment(int sample, int first) {
        return {sample, first, Image::element_from(first) / quad * quad, Image::element_from(first + Width)};
    }

    // Begins to load what comes first of a segment.
    __device__ __forceinline__ void begin(const Segment& next) {
#pragma unroll
        for (int round = 0; round < ahead; ++round) load(numbers[round], next, round);
    }

    // Lays out planes of a segment that was begun, Width places apart, and begins the next one.
    __device__ __forceinline__ void lay_out(unsigned char* to, const Segment& now, const Segment& next) {
        if (now.sample != scaled) find_factors(now.sample);
#pragma unroll
        for (int round = 0; round < rounds; ++round) {
            make(to, numbers[round % ahead], now, round);
            const bool here = round + ahead < rounds;
            load(numbers[round % ahead], here ? now : next, (round + ahead) % rounds);
        }
#pragma unroll 1
        for (int i = threadIdx.x % 32; i < rest; i += 32) make_one(to, now, chunk_of(i / behind), now.begin + Columns + i % behind);
#pragma unroll 1
        for (int i = threadIdx.x % 128; i < Width; i += 128) {
            if (!Image::has(now.first + i)) {
#pragma unroll
                for (int chunk = 0; chunk < Chunks; ++chunk) *reinterpret_cast<uint4*>(to + (chunk * Width + i) * 16) = uint4{};
            }
        }
    }

    __device__ __forceinline__ void end() const {
        if (has_infinity(most)) from.alarm[0] = 1.0f;
    }

private:
    const From from;
    float* const factors;
    float numbers[ahead][8][quad];
    uint32_t most;  // the largest halves
    int scaled;     // the sample whose factors there are
    bool beyond;    // whether one of those of the warp's chunks would not be finite: it is 0 then, and a number for it an alarm

    __device__ __forceinline__ int chunk_of(int number) const { return threadIdx.x / 32 % 4 + number * 4; }

    __device__ __forceinline__ void find_factors(int sample) {
        const float scale = from.by_sample[sample];
        bool infinite = false;
        __syncwarp();
        for (int i = threadIdx.x % 32; i < own * 8; i += 32) {
            const int channel = chunk_of(i / 8) * 8 + i % 8;
            if (channel < Chunks * 8) {
                const float factor = from.by_channel[channel] * scale;
                infinite = infinite || !(factor <= 0x1p127f);
                factors[channel] = factor <= 0x1p127f ? factor : 0.0f;
            }
        }
        beyond = __any_sync(0xffffffffu, infinite);
        scaled = sample;
        __syncwarp();
    }

    __device__ __forceinline__ int chunk_at(int round) const { return chunk_of(round * 32 * quad / Columns); }
    __device__ __forceinline__ int element_at(const Segment& segment, int round) const {
        return segment.begin + (round * 32 * quad) % Columns + threadIdx.x % 32 * quad;
    }

    __device__ __forceinline__ void load(float (&into)[8][quad], const Segment& segment, int round) const {
        const int chunk = chunk_at(round), at = element_at(segment, round);
        const bool real = chunk < Chunks && at < segment.end;
        const float* const source = from.source + segment.sample * From::sample + (real ? chunk * 8 * From::channel + at : 0);
#pragma unroll
        for (int c = 0; c < 8; ++c) load_quad<From::aligned>(into[c], source + c * From::channel);
    }

    __device__ __forceinline__ void make(unsigned char* to, const float (&made_of)[8][quad], const Segment& segment, int round) {
        const int chunk = chunk_at(round), at = element_at(segment, round);
        if (chunk >= Chunks) return;  // the warp has no factors of it, either
        const bool real = at < segment.end;
        const int place = Image::place_of(at) - segment.first;
        const Vec<float, 8> by = factors_of(chunk);
        if (beyond && real) {
#pragma unroll
            for (int i = 0; i < quad; ++i) {
                const float values[8] = {made_of[0][i], made_of[1][i], made_of[2][i], made_of[3][i], made_of[4][i], made_of[5][i], made_of[6][i], made_of[7][i]};
                check(values, by);
            }
        }
#pragma unroll
        for (int i = 0; i < quad; ++i) {
            float values[8];
#pragma unroll
            for (int c = 0; c < 8; ++c) values[c] = made_of[c][i];
            const uint4 halves = scaled_halves(values, by);
            if (real && unsigned(place + i) < unsigned(Width)) *reinterpret_cast<uint4*>(to + (chunk * Width + place + i) * 16) = halves;
        }
    }

    __device__ __forceinline__ void make_one(unsigned char* to, const Segment& segment, int chunk, int at) {
        if (chunk >= Chunks || at >= segment.end) return;
        const float* const source = from.source + segment.sample * From::sample + chunk * 8 * From::channel + at;
        float values[8];
#pragma unroll
        for (int c = 0; c < 8; ++c) values[c] = source[c * From::channel];
        const int place = Image::place_of(at) - segment.first;
        const Vec<float, 8> by = factors_of(chunk);
        if (beyond) check(values, by);
        const uint4 halves = scaled_halves(values, by);
        *reinterpret_cast<uint4*>(to + (chunk * Width + place) * 16) = halves;
    }

    __device__ __forceinline__ Vec<float, 8> factors_of(int chunk) const { return *reinterpret_cast<const Vec<float, 8>*>(factors + chunk * 8); }

    __device__ __forceinline__ void check(const float (&values)[8], const Vec<float, 8>& by) {
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            if (by[c] == 0.0f && values[c] != 0.0f) most = infinite_half;
        }
    }

    __device__ __forceinline__ uint4 scaled_halves(const float (&values)[8], const Vec<float, 8>& by) {
        uint32_t halves[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            halves[c] = pack_halves(values[2 * c] * by[2 * c], values[2 * c + 1] * by[2 * c + 1]);
            most = largest_halves(most, halves[c]);
        }
        return {halves[0], halves[1], halves[2], halves[3]};
    }
};

}  // namespace fp
