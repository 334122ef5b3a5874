// Softmax summaries over the threads of a block. Blocks are whole warps, at most 32.
#pragma once

#include "scores.cuh"

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int NO_INDEX = 0x7fffffff;

__device__ __forceinline__ int lane_number() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp_number() { return threadIdx.x / 32; }
__device__ __forceinline__ int warp_count() { return blockDim.x / 32; }

// What one pass over logits needs to keep: their softmax's largest value is 1 / sum.
struct Summary {
    float largest;  // NaN if there is one, as numpy's argmax has it
    int first;      // index of the first that is the largest
    float sum;      // of exp(logit − largest); meaningless if largest is no finite number
};

__device__ __forceinline__ Summary nothing_seen() { return {-infinity(), NO_INDEX, 0.0f}; }

// A total order (largest first, then lowest index), so that the result is the same in whichever
// order threads meet.
__device__ __forceinline__ bool precedes(const Summary& left, const Summary& right) {
    const bool left_nan = is_nan(left.largest);
    const bool right_nan = is_nan(right.largest);
    if (left_nan != right_nan) return left_nan;
    if (left_nan || left.largest == right.largest) return left.first < right.first;
    return left.largest > right.largest;
}

__device__ __forceinline__ Summary merged(const Summary left, const Summary right) {
    const bool in_order = precedes(left, right);
    const float largest = in_order ? left.largest : right.largest;
    const float other = in_order ? right.largest : left.largest;
    // Equal ones need no exp, and −∞ − −∞ would be no number.
    const float scale = other == largest ? 1.0f : expf(other - largest);
    const float sum = in_order ? left.sum + right.sum * scale : right.sum + left.sum * scale;
    return {largest, in_order ? left.first : right.first, sum};
}

__device__ __forceinline__ Summary of_lane(const Summary& value, int distance) {
    return {__shfl_xor_sync(ALL_LANES, value.largest, distance),
            __shfl_xor_sync(ALL_LANES, value.first, distance),
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
