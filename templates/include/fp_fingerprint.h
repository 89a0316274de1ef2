// A fingerprint of 128 bits of memory, at about the rate at which memory is read: by chance, one in 2^128 other contents has the same.
//
// Each chunk goes through eight lanes of 64 bits, as in XXH3 (Yann Collet): a lane adds up the words as they are, and the products of the halves of
// each word, whitened by a key that is another one for each; after some words both sums are scrambled. Then lanes are mixed, with the chunk's
// number, so that the chunks may be added up in any order.
#pragma once

#include <cstdint>
#include <cstring>

namespace fp {

constexpr int64_t kChunk = 32768;  // bytes
constexpr int kStripe = 64;        // bytes: a word for each lane
constexpr int kScrambled = 16;     // stripes
constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;

typedef uint64_t Stripe __attribute__((vector_size(kStripe)));

inline uint64_t mixed(uint64_t value) {  // splitmix64's finaliser: a bijection
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
    return value ^ (value >> 31);
}

// Adds to `sums` the fingerprint of `bytes` bytes, at most a chunk, that are the chunk of that number.
inline void add_chunk(const char* from, int64_t bytes, uint64_t number, uint64_t* sums) {
    Stripe plain = {}, products = {}, key = {};
    for (int lane = 0; lane < kStripe / 8; ++lane) key[lane] = mixed(number + kGolden * (lane + 1));
    const auto take = [&](const char* at) {
        Stripe words;
        std::memcpy(&words, at, kStripe);
        const Stripe white = words ^ key;
        plain += words;
        products += (white & 0xffffffffu) * (white >> 32);
        key += kGolden;
    };
    const auto scramble = [&] {
        plain = (plain ^ (plain >> 29)) * kGolden;
        products = (products ^ (products >> 47) ^ key) * kGolden;
    };
    int64_t at = 0;
    for (; at + kScrambled * kStripe <= bytes; at += kScrambled * kStripe) {
        for (int stripe = 0; stripe < kScrambled; ++stripe) take(from + at + stripe * kStripe);
        scramble();
    }
    for (; at + kStripe <= bytes; at += kStripe) take(from + at);
    char rest[kStripe] = {};
    std::memcpy(rest, from + at, bytes - at);
    take(rest);
    scramble();
    uint64_t low = static_cast<uint64_t>(bytes), high = ~number;
    for (int lane = 0; lane < kStripe / 8; ++lane) {
        low = mixed(low ^ plain[lane]) + mixed(products[lane] + kGolden);
        high = mixed(high ^ products[lane]) + mixed(plain[lane] ^ kGolden);
    }
    sums[0] += mixed(low);
    sums[1] += mixed(high);
}

// The fingerprint of `count` pieces of memory, together; `first[i]` is the number of chunks before piece i, `first[count]` that of all.
inline void fingerprint(
    const char* const* pieces, const int64_t* bytes, const int64_t* first, int64_t count, uint64_t* sums)
{
    uint64_t low = 0, high = 0;
#pragma omp parallel for if (first[count] > 8) schedule(static) reduction(+ : low, high)
    for (int64_t chunk = 0; chunk < first[count]; ++chunk) {
        int64_t left = 0, right = count;  // the last piece that begins with this chunk or before it
        while (right - left > 1) {
            const int64_t middle = (left + right) / 2;
            (first[middle] <= chunk ? left : right) = middle;
        }
        const int64_t at = (chunk - first[left]) * kChunk;
        uint64_t own[2] = {0, 0};
        add_chunk(pieces[left] + at, bytes[left] - at < kChunk ? bytes[left] - at : kChunk, chunk, own);
        low += own[0];
        high += own[1];
    }
    sums[0] = low;
    sums[1] = high;
}

}  // namespace fp
