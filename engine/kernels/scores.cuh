// Score types. Half and bfloat16 are widened by hand, since cuda_fp16.h and cuda_bf16.h are not
// there wherever NVRTC is. All arithmetic is in float32.
#pragma once

struct Float32 {
    using Stored = float;
    static __device__ __forceinline__ float widen(Stored stored) { return stored; }
};

struct BFloat16 {
    using Stored = unsigned short;
    static __device__ __forceinline__ float widen(Stored stored) {
        return __uint_as_float(static_cast<unsigned>(stored) << 16);
    }
};

struct Float16 {
    using Stored = unsigned short;
    static __device__ __forceinline__ float widen(Stored stored) {
        const unsigned sign = (stored & 0x8000u) << 16;
        // Exponent and mantissa moved to float32's places: a number whose exponent is too small
        // by the difference of the biases, 127 − 15 = 112. The product is exact, for subnormal
        // numbers too (needs -ftz=false, the default of nvcc and NVRTC).
        const unsigned moved = (stored & 0x7fffu) << 13;
        const bool finite = (stored & 0x7c00u) != 0x7c00u;
        const float magnitude = finite ? __uint_as_float(moved) * 0x1p112f
                                       : __uint_as_float(moved | 0x7f800000u);
        return __uint_as_float(__float_as_uint(magnitude) | sign);
    }
};

__device__ __forceinline__ float infinity() {  // NVRTC has no INFINITY
    return __uint_as_float(0x7f800000u);
}

__device__ __forceinline__ bool is_nan(float value) { return value != value; }

// A probability as a confidence: NaN is none (fmaxf gives the other), and nothing reaches NEVER.
__device__ __forceinline__ float as_confidence(float probability) {
    return fminf(fmaxf(probability, 0.0f), 1.0f);
}
