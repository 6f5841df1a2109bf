// The gate of an MLP: activation(gate) * up, of rows in which both halves lie next to each other.
// It is computed in f32 for every type of elements.
//
// Each thread computes an element at a time; any grid and any block size give the same result. The
// file is also compiled as C++ for the host by tests/kernels.rs.

#include "numbers.cuh"

// The launch in src/gate/cuda.rs has the same numbers.
#define SILU 0
#define GELU_TANH 1
#define CLAMPED_SWIGLU 2

// How elements are read and written. Results are rounded to the nearest element, and to an even one
// of two that are equally near.
struct F32 {
    typedef float Stored;
    static __device__ float read(float value) { return value; }
    static __device__ float write(float value) { return value; }
};

struct F16 {
    typedef uint16_t Stored;
    static __device__ float read(uint16_t bits) { return half_to_float(bits); }
    static __device__ uint16_t write(float value) { return float_to_half(value); }
};

struct Bf16 {
    typedef uint16_t Stored;
    static __device__ float read(uint16_t bits) { return bits_to_float((uint32_t)bits << 16); }
    static __device__ uint16_t write(float value) {
        uint32_t bits = float_to_bits(value);
        // NaN must not be rounded to infinity.
        return value == value ? (bits + 0x7fffu + (bits >> 16 & 1)) >> 16 : 0x7fff;
    }
};

// The functions of stolon_model::Activation. A NaN stays a NaN.
static __device__ float gated(uint32_t kind, float gate, float up, float alpha, float limit) {
    if (kind == SILU) {
        return gate / (1.0f + expf(-gate)) * up;
    }
    if (kind == GELU_TANH) {
        float inner = 0.79788456f * (gate + 0.044715f * gate * gate * gate); // sqrt(2 / pi)
        return 0.5f * gate * (1.0f + tanhf(inner)) * up;
    }
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
    return gate / (1.0f + expf(-alpha * gate)) * (up + 1.0f);
}

template <typename Element>
static __device__ void gate_rows(
    const typename Element::Stored *x, // [rows, 2 * width]: gate, then up
    typename Element::Stored *output,  // [rows, width]
    uint32_t rows,
    uint32_t width,
    uint32_t kind,
    float alpha, // of CLAMPED_SWIGLU, as is `limit`
    float limit
) {
    for (uint32_t row = blockIdx.y; row < rows; row += gridDim.y) {
        const typename Element::Stored *gate = x + (uint64_t)row * 2 * width, *up = gate + width;
        typename Element::Stored *to = output + (uint64_t)row * width;
        for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < width;
             i += gridDim.x * blockDim.x) {
            float value = gated(kind, Element::read(gate[i]), Element::read(up[i]), alpha, limit);
            to[i] = Element::write(value);
        }
    }
}

#define GATE_ROWS(name, Element)                                                                   \
    extern "C" __global__ void name(                                                               \
        const Element::Stored *x, Element::Stored *output, uint32_t rows, uint32_t width,          \
        uint32_t kind, float alpha, float limit                                                    \
    ) {                                                                                            \
        gate_rows<Element>(x, output, rows, width, kind, alpha, limit);                            \
    }

GATE_ROWS(gate_f32, F32)
GATE_ROWS(gate_f16, F16)
GATE_ROWS(gate_bf16, Bf16)
