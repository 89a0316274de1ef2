// A program around one generated library: reads buffers from a file, runs the kernels, checks their results, takes the time.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#endif

namespace fp::standalone {

enum class Kind { b8, u8, i8, i16, i32, i64, f16, bf16, f32, f64 };

// A buffer of the library. Places in the file are in bytes, -1 for none.
struct Buffer {
    const char* name;
    Kind kind;
    std::size_t nbytes;
    std::int64_t contents;               // what it holds before the run
    std::int64_t expected;               // of a result: doubles, or int64 for whole numbers, in the order of its axes
    std::vector<std::int64_t> shape;
    std::vector<std::int64_t> strides;   // in elements
    double largest;                      // error of one value that is allowed
    double l2;                           // and of all together, relative to their norm
    double eager;                        // the latter of PyTorch's operators
};

[[noreturn]] inline void fail(const std::string& what) {
    std::fprintf(stderr, "%s\n", what.c_str());
    std::exit(2);
}

#if defined(__CUDACC__)
inline void must(cudaError_t status) {
    if (status != cudaSuccess) fail(cudaGetErrorString(status));
}
#endif

template <typename T>
T read(const char* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

inline float from_bits(std::uint32_t bits) { return read<float>(reinterpret_cast<const char*>(&bits)); }

// A float16: subnormal numbers are multiples of 2^-24.
inline double half(std::uint16_t bits) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const double size = exponent == 31 ? (mantissa ? std::nan("") : HUGE_VAL)
                        : exponent     ? std::ldexp(1024 + mantissa, exponent - 25)
                                       : std::ldexp(mantissa, -24);
    return bits >> 15 ? -size : size;
}

inline bool is_whole(Kind kind) { return kind < Kind::f16; }

inline double number(Kind kind, const char* data, std::int64_t at) {
    switch (kind) {
        case Kind::f16: return half(read<std::uint16_t>(data + 2 * at));
        case Kind::bf16: return from_bits(std::uint32_t(read<std::uint16_t>(data + 2 * at)) << 16);
        case Kind::f32: return read<float>(data + 4 * at);
        default: return read<double>(data + 8 * at);
    }
}

inline std::int64_t whole(Kind kind, const char* data, std::int64_t at) {
    switch (kind) {
        case Kind::b8: return read<std::uint8_t>(data + at) != 0;
        case Kind::u8: return read<std::uint8_t>(data + at);
        case Kind::i8: return read<std::int8_t>(data + at);
        case Kind::i16: return read<std::int16_t>(data + 2 * at);
        case Kind::i32: return read<std::int32_t>(data + 4 * at);
        default: return read<std::int64_t>(data + 8 * at);
    }
}

class Region {
  public:
    Region(const char* name, int count, char** arguments) : runs_(count > 1 ? std::atoi(arguments[1]) : 100) {
        if (runs_ < 1) fail("RUNS is a whole number from 1 on");
        const std::string self = arguments[0];
        const std::size_t slash = self.rfind('/');
        const std::string path = (slash == std::string::npos ? "" : self.substr(0, slash + 1)) + name + ".bin";
        std::FILE* const file = std::fopen(path.c_str(), "rb");
        if (file == nullptr) fail("there is no " + path);
        std::fseek(file, 0, SEEK_END);
        data_.resize(std::size_t(std::ftell(file)));
        std::rewind(file);
        if (std::fread(data_.data(), 1, data_.size(), file) != data_.size()) fail("cannot read " + path);
        std::fclose(file);
    }

    void add(Buffer buffer) {
        const char* const contents = buffer.contents < 0 ? nullptr : data_.data() + buffer.contents;
        pointers_.push_back(memory(buffer.nbytes, contents));
        buffers_.push_back(std::move(buffer));
    }

    void* const* pointers() const { return pointers_.data(); }

    // Bytes of the file, where the entry may read them.
    void* on_host(std::int64_t at, std::size_t) { return data_.data() + at; }

    // Runs `entry`, which moves so many bytes, and gives the program's exit status.
    template <typename Entry>
    int run(double moved, Entry entry) {
        const int status = entry(nullptr);
        if (status != 0) fail("the kernels return " + std::to_string(status));
        bool right = true;
        for (std::size_t i = 0; i < buffers_.size(); ++i) {
            if (buffers_[i].expected >= 0) right &= is_right(buffers_[i], pointers_[i]);
        }
        std::vector<double> seconds;
        for (int i = 0; i < runs_; ++i) seconds.push_back(timed(entry));
        std::sort(seconds.begin(), seconds.end());
        const double median = seconds[seconds.size() / 2];
        std::printf("time: median %.3f us, least %.3f us of %d runs; %.1f GB/s\n", 1e6 * median, 1e6 * seconds[0], runs_,
                    moved / median / 1e9);
        return right ? 0 : 1;
    }

  private:
    static void* memory(std::size_t nbytes, const char* contents) {
        const std::size_t room = std::max<std::size_t>((nbytes + 255) / 256 * 256, 256);
#if defined(__CUDACC__)
        void* made = nullptr;
        must(cudaMalloc(&made, room));
        must(cudaMemset(made, 0xff, room));  // NaN, should a kernel write nothing
        if (contents != nullptr) must(cudaMemcpy(made, contents, nbytes, cudaMemcpyHostToDevice));
#else
        void* const made = std::aligned_alloc(256, room);
        if (made == nullptr) fail("out of memory");
        std::memset(made, 0xff, room);
        if (contents != nullptr) std::memcpy(made, contents, nbytes);
#endif
        return made;
    }

    bool is_right(const Buffer& buffer, const void* from) const {
        std::vector<char> results(buffer.nbytes);
#if defined(__CUDACC__)
        must(cudaDeviceSynchronize());
        must(cudaMemcpy(results.data(), from, buffer.nbytes, cudaMemcpyDeviceToHost));
#else
        std::memcpy(results.data(), from, buffer.nbytes);
#endif
        std::int64_t count = 1, wrong = 0;
        for (const std::int64_t size : buffer.shape) count *= size;
        double largest = 0, squares = 0, norm = 0;
        for (std::int64_t i = 0; i < count; ++i) {
            std::int64_t at = 0, rest = i;
            for (std::size_t axis = buffer.shape.size(); axis-- > 0; rest /= buffer.shape[axis]) {
                at += rest % buffer.shape[axis] * buffer.strides[axis];
            }
            const char* const expected = data_.data() + buffer.expected + 8 * i;
            if (is_whole(buffer.kind)) {
                wrong += whole(buffer.kind, results.data(), at) != read<std::int64_t>(expected);
                continue;
            }
            const double value = number(buffer.kind, results.data(), at), truth = read<double>(expected);
            if (!std::isfinite(truth) || !std::isfinite(value)) {
                wrong += !(value == truth || (std::isnan(value) && std::isnan(truth)));
                continue;
            }
            largest = std::max(largest, std::abs(value - truth));
            squares += (value - truth) * (value - truth);
            norm += truth * truth;
        }
        const double l2 = std::sqrt(squares) / (norm > 0 ? std::sqrt(norm) : 1.0);
        const bool right = wrong == 0 && largest <= buffer.largest && l2 <= buffer.l2;
        if (is_whole(buffer.kind)) {
            std::printf("%s: %lld of %lld values differ: %s\n", buffer.name, (long long)wrong, (long long)count, right ? "right" : "WRONG");
        } else {
            std::printf("%s: error %.2e of one value (allowed %.2e), %.2e of all (allowed %.2e, eager %.2e), %lld out of place: %s\n",
                        buffer.name, largest, buffer.largest, l2, buffer.l2, buffer.eager, (long long)wrong, right ? "right" : "WRONG");
        }
        return right;
    }

    template <typename Entry>
    static double timed(Entry entry) {
#if defined(__CUDACC__)
        static const Flush flush;
        flush();
        cudaEvent_t start, end;
        must(cudaEventCreate(&start));
        must(cudaEventCreate(&end));
        must(cudaEventRecord(start));
        entry(nullptr);
        must(cudaEventRecord(end));
        must(cudaEventSynchronize(end));
        float milliseconds = 0;
        must(cudaEventElapsedTime(&milliseconds, start, end));
        must(cudaEventDestroy(start));
        must(cudaEventDestroy(end));
        return 1e-3 * milliseconds;
#else
        const auto start = std::chrono::steady_clock::now();
        entry(nullptr);
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
#endif
    }

#if defined(__CUDACC__)
    // Writes twice the L2 cache, so that a run reads its inputs from memory and its launches are queued meanwhile.
    struct Flush {
        void* memory = nullptr;
        std::size_t nbytes = 0;

        Flush() {
            int device = 0, size = 0;
            must(cudaGetDevice(&device));
            must(cudaDeviceGetAttribute(&size, cudaDevAttrL2CacheSize, device));
            nbytes = 2 * std::size_t(size);
            must(cudaMalloc(&memory, nbytes));
        }

        void operator()() const { must(cudaMemsetAsync(memory, 0, nbytes)); }
    };
#endif

    int runs_;
    std::vector<char> data_;
    std::vector<Buffer> buffers_;
    std::vector<void*> pointers_;
};

}  // namespace fp::standalone
