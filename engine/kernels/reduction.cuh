// Softmax summaries over the threads of a block. Blocks are whole warps, at most 32.
#pragma once

#include "scores.cuh"

constexpr unsigned ALL_LANES = 0xffffffffu;

__device__ __forceinline__ int lane_number() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp_number() { return threadIdx.x / 32; }
__device__ __forceinline__ int warp_count() { return blockDim.x / 32; }

// What one pass over logits needs to keep: their softmax's largest value is 1 / sum.
struct Summary {
    float largest;  // NaN if there is one, as numpy's maximum has it
    float sum;      // of exp(logit − largest); meaningless if largest is no finite number
};

__device__ __forceinline__ Summary nothing_seen() { return {-infinity(), 0.0f}; }

__device__ __forceinline__ Summary merged(const Summary left, const Summary right) {
    const bool in_order = is_nan(left.largest) || left.largest >= right.largest;
    const float largest = in_order ? left.largest : right.largest;
    const float other = in_order ? right.largest : left.largest;
    // Equal ones need no exp, and −∞ − −∞ would be no number.
    const float scale = other == largest ? 1.0f : expf(other - largest);
    const float sum = in_order ? left.sum + right.sum * scale : right.sum + left.sum * scale;
    return {largest, sum};
}

__device__ __forceinline__ Summary of_lane(const Summary& value, int distance) {
    return {__shfl_xor_sync(ALL_LANES, value.largest, distance),
            __shfl_xor_sync(ALL_LANES, value.sum, distance)};
}

__device__ __forceinline__ Summary over_warp(Summary value) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        value = merged(value, of_lane(value, distance));
    }
    return value;
}

// Merges the values of all threads; every thread gets the result. `of_warps` is shared, for 32.
__device__ __forceinline__ Summary over_block(Summary value, Summary* of_warps) {
    value = over_warp(value);
    if (lane_number() == 0) of_warps[warp_number()] = value;
    __syncthreads();
    value = over_warp(lane_number() < warp_count() ? of_warps[lane_number()] : nothing_seen());
    __syncthreads();  // before the next call writes of_warps
    return value;
}
