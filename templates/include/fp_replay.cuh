// Launches that are made again and again with the same pointers, as one CUDA graph: to launch that takes the host as long as one kernel.
#pragma once

namespace fp {

// What a function launches for its pointers, on which alone that depends.
template <int Count>
class Replayed {
public:
    // Launches on `stream` what `launch(stream)` launches, which gives 0 or an error. From the second call with these `pointers` on
    // that is a graph, unless the stream is captured, or another thread is here.
    template <typename Launch>
    int run(const void* const (&pointers)[Count], void* stream, const Launch& launch) {
        if (__atomic_test_and_set(&busy_, __ATOMIC_ACQUIRE)) return launch(stream);
        const bool replayed = replay(pointers, static_cast<cudaStream_t>(stream), launch);
        __atomic_clear(&busy_, __ATOMIC_RELEASE);
        return replayed ? 0 : launch(stream);
    }

private:
    struct Call {
        const void* pointers[Count];
        int times;
        long long last;  // the call of all in which it was met last
        cudaGraphExec_t graph;
    };
    static constexpr int calls_ = 8, recorded_at_ = 2, most_recordings_ = 32;
    static constexpr long long forgotten_after_ = 64;

    template <typename Launch>
    bool replay(const void* const (&pointers)[Count], cudaStream_t stream, const Launch& launch) {
        cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
        if (cudaStreamIsCapturing(stream, &status) != cudaSuccess || status != cudaStreamCaptureStatusNone) {
            cudaGetLastError();
            return false;
        }
        Call* const call = find(pointers);
        if (call == nullptr) return false;
        if (call->graph == nullptr && ++call->times == recorded_at_ && recordings_ < most_recordings_) {
            ++recordings_;
            call->graph = record(launch);
        }
        if (call->graph == nullptr) return false;
        if (cudaGraphLaunch(call->graph, stream) == cudaSuccess) return true;
        cudaGetLastError();  // what is launched one by one has the same error, if it is one
        forget(*call);
        return false;
    }

    // The call with these pointers; a new one in place of the one that was met least recently; null where all are in use.
    Call* find(const void* const (&pointers)[Count]) {
        ++now_;
        unsigned long long key = 0;
        for (int i = 0; i < Count; ++i) key = key * 0x9e3779b97f4a7c15ull + reinterpret_cast<unsigned long long>(pointers[i]);
        for (int k = 0; k < calls_; ++k) {
            Call& call = known_[k];
            bool same = keys_[k] == key && call.times > 0;
            for (int i = 0; same && i < Count; ++i) same = call.pointers[i] == pointers[i];
            if (same) {
                call.last = now_;
                return &call;
            }
        }
        Call* oldest = known_;
        for (Call& call : known_) {
            if (call.last < oldest->last) oldest = &call;
        }
        if (oldest->graph != nullptr && now_ - oldest->last < forgotten_after_) return nullptr;
        forget(*oldest);
        keys_[oldest - known_] = key;
        for (int i = 0; i < Count; ++i) oldest->pointers[i] = pointers[i];
        oldest->times = 0;
        oldest->last = now_;
        return oldest;
    }

    static void forget(Call& call) {
        if (call.graph != nullptr) cudaGraphExecDestroy(call.graph);  // which waits for nothing, and takes effect when it is over
        call.graph = nullptr;
    }

    // The graph of what `launch` launches; null where that cannot be one. Other captures of the process go on.
    template <typename Launch>
    static cudaGraphExec_t record(const Launch& launch) {
        cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
        cudaThreadExchangeStreamCaptureMode(&mode);
        cudaStream_t aside = nullptr;
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t made = nullptr;
        if (cudaStreamCreateWithFlags(&aside, cudaStreamNonBlocking) == cudaSuccess) {
            if (cudaStreamBeginCapture(aside, cudaStreamCaptureModeRelaxed) == cudaSuccess) {
                const int error = launch(aside);
                const bool captured = cudaStreamEndCapture(aside, &graph) == cudaSuccess && graph != nullptr;
                if (!captured || error != 0 || cudaGraphInstantiate(&made, graph, 0) != cudaSuccess) made = nullptr;
                if (captured) cudaGraphDestroy(graph);
            }
            cudaStreamDestroy(aside);
        }
        cudaThreadExchangeStreamCaptureMode(&mode);
        cudaGetLastError();
        return made;
    }

    bool busy_ = false;
    int recordings_ = 0;
    long long now_ = 0;
    unsigned long long keys_[calls_] = {};  // of their pointers, beside each other: few lines of the processor's cache to look through
    Call known_[calls_] = {};
};

}  // namespace fp
