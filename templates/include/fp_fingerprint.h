// A fingerprint of 128 bits of memory, at the rate at which memory is read: other contents have another one but by a chance of one in 2^128.
//
// Each chunk goes through eight lanes of 64 bits, as in XXH3 (Yann Collet): a lane takes a word as it is, and the product of the halves of its
// neighbour's word, whitened; after some rounds it is scrambled. Lanes are then mixed, with the chunk's place, so that chunks may be added up.
#pragma once

#include <cstdint>
#include <cstring>

namespace fp {

constexpr int64_t kChunk = 32768;  // bytes
constexpr int kWords = 8, kScrambled = 16;

inline uint64_t mixed(uint64_t value) {  // splitmix64's finaliser: a bijection
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
    return value ^ (value >> 31);
}

struct Words {
    uint64_t lane[kWords], key[kWords];

    explicit Words(uint64_t seed) {
        for (int i = 0; i < kWords; ++i) {
            lane[i] = mixed(seed + i);
            key[i] = mixed(~seed - 0x9e3779b97f4a7c15u * (i + 1));
        }
    }

    void take(const char* from) {
        uint64_t word[kWords], whitened[kWords];
        std::memcpy(word, from, sizeof word);
        for (int i = 0; i < kWords; ++i) whitened[i] = word[i] ^ key[i];
        for (int i = 0; i < kWords; ++i) lane[i] += word[i ^ 1] + (whitened[i] & 0xffffffffu) * (whitened[i] >> 32);
        for (int i = 0; i < kWords; ++i) key[i] += 0x9e3779b97f4a7c15u;
    }

    void scramble() {
        for (int i = 0; i < kWords; ++i) lane[i] = (lane[i] ^ (lane[i] >> 47) ^ key[i]) * 0x9e3779b1u;
    }

    uint64_t end(uint64_t seed) const {
        for (uint64_t each : lane) seed = mixed(seed ^ each) + 0x9e3779b97f4a7c15u;
        return seed;
    }
};

// Adds to `sums` the fingerprint of `bytes` bytes, at most a chunk, that are the chunk of that number.
inline void add_chunk(const char* from, int64_t bytes, uint64_t number, uint64_t* sums) {
    Words words(number);
    constexpr int64_t kStripe = 8 * kWords;
    int64_t at = 0;
    for (int round = 1; at + kStripe <= bytes; at += kStripe, ++round) {
        words.take(from + at);
        if (round % kScrambled == 0) words.scramble();
    }
    char rest[kStripe] = {};
    std::memcpy(rest, from + at, bytes - at);
    words.take(rest);
    words.scramble();
    sums[0] += words.end(static_cast<uint64_t>(bytes));
    sums[1] += words.end(~number);
}

// The fingerprint of `count` pieces of memory, together; `first[i]` is the number of chunks before piece i, `first[count]` that of all.
inline void fingerprint(
    const char* const* pieces, const int64_t* bytes, const int64_t* first, int64_t count, uint64_t* sums)
{
    uint64_t low = 0, high = 0;
#pragma omp parallel for if (first[count] > 8) schedule(static) reduction(+ : low, high)
    for (int64_t piece = 0; piece < first[count]; ++piece) {
        int64_t left = 0, right = count;  // the last piece that begins with this chunk or before it
        while (right - left > 1) {
            const int64_t middle = (left + right) / 2;
            (first[middle] <= piece ? left : right) = middle;
        }
        const int64_t at = (piece - first[left]) * kChunk;
        uint64_t own[2] = {0, 0};
        add_chunk(pieces[left] + at, bytes[left] - at < kChunk ? bytes[left] - at : kChunk, piece, own);
        low += own[0];
        high += own[1];
    }
    sums[0] = low;
    sums[1] = high;
}

}  // namespace fp
