// CUDA on a CPU, as much of it as our kernels use; included before their sources.
//
// Threads are fibres. A fibre runs until it must wait (barrier, warp exchange, sleep), then another
// one runs, in an order drawn from a seed: what lacks a barrier gives other results under other
// seeds. Some blocks are resident together and take turns too; they begin in a drawn order. Shared
// memory begins as noise and is swapped when another block runs.
//
// What this cannot show: missing memory fences, and races within a stretch without any wait.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static __attribute__((section("cuda_shared")))

struct Dim3 {
    unsigned x, y, z;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

extern Dim3 threadIdx, blockIdx, blockDim, gridDim;

using std::max;
using std::min;

namespace shim {

void barrier();                                   // of the block
void sleep();                                     // lets others run
const std::uint32_t* exchange(std::uint32_t bits);  // of the warp: what all lanes brought

template <class To, class From>
To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "");
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

}  // namespace shim

inline float __uint_as_float(unsigned bits) { return shim::same_bits<float>(bits); }
inline unsigned __float_as_uint(float value) { return shim::same_bits<unsigned>(value); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

inline void __syncthreads() { shim::barrier(); }
inline void __threadfence() {}
inline void __nanosleep(unsigned) { shim::sleep(); }

template <class Value>
Value __shfl_xor_sync(unsigned, Value value, int distance) {
    const auto* lanes = shim::exchange(shim::same_bits<std::uint32_t>(value));
    return shim::same_bits<Value>(lanes[(threadIdx.x % 32) ^ distance]);
}

inline unsigned __ballot_sync(unsigned, bool set) {
    const auto* lanes = shim::exchange(set);
    unsigned ballot = 0;
    for (int lane = 0; lane < 32; ++lane) ballot |= lanes[lane] << lane;
    return ballot;
}

template <class Value>
Value atomicAdd(Value* address, Value value) {
    const Value before = *address;
    *address = before + value;
    return before;
}

template <class Value>
Value atomicExch(Value* address, Value value) {
    const Value before = *address;
    *address = value;
    return before;
}

template <class Value>
Value __ldcs(const Value* address) {
    return *address;
}
