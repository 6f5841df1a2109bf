// The bits of numbers. On the host, tests/kernels/host.h takes the place of these functions.

#pragma once

#include <stdint.h>
#ifdef __CUDACC__
#include <cuda_fp16.h>

static __device__ inline float half_to_float(uint16_t bits) {
    return __half2float(__ushort_as_half(bits));
}
static __device__ inline uint16_t float_to_half(float value) {
    return __half_as_ushort(__float2half_rn(value));
}
static __device__ inline float bits_to_float(uint32_t bits) {
    return __uint_as_float(bits);
}
static __device__ inline uint32_t float_to_bits(float value) {
    return __float_as_uint(value);
}
static __device__ inline double bits_to_double(uint32_t low, uint32_t high) {
    return __hiloint2double((int)high, (int)low);
}
#endif
