// Writes row i of `rows` to row `indices[i]` of a tensor of the KV store: new keys and values.
//
// `write_rows` copies rows. The element type does not matter, so rows are copied in the largest units
// of 16, 4 and 1 bytes of which a row has a whole number. Each thread block copies one row at a time;
// any grid and any block size give the same result.
//
// `write_int8` rounds each head to codes of 8 bits with a scale, to the same bits as `int8_head` in
// crates/models/kernels/src/kv_rows/rounding.rs.
//
// The file is also compiled as C++ for the host by tests/kernels.rs, which checks the arithmetic.

#include "numbers.cuh"

// Threads of a block that rounds a head. The launch in src/kv_write/cuda.rs has the same number.
#define HEAD_THREADS 32
// 1.5 * 2^23. The sum with a number between -2^22 and 2^22 has the nearest integer in its low bits.
#define ROUND_TO_INTEGER 12582912.0f
#define INFINITY_BITS 0x7f800000u
#define NAN_BITS 0x7fc00000u

template <typename Unit>
__device__ void write_rows(
    const Unit *rows,        // [count, width]
    const uint32_t *indices, // [count], each below the number of rows of the store, all different
    Unit *store,             // [rows of the store, width]
    uint32_t count,
    uint32_t width // number of units of a row
) {
    for (uint32_t row = blockIdx.x; row < count; row += gridDim.x) {
        // A store has more than 2^32 units.
        const Unit *from = rows + (uint64_t)row * width;
        Unit *to = store + (uint64_t)indices[row] * width;
        for (uint32_t unit = threadIdx.x; unit < width; unit += blockDim.x) {
            to[unit] = from[unit];
        }
    }
}

extern "C" __global__ void write_rows_16(
    const uint4 *rows, const uint32_t *indices, uint4 *store, uint32_t count, uint32_t width
) {
    write_rows(rows, indices, store, count, width);
}

extern "C" __global__ void write_rows_4(
    const uint32_t *rows, const uint32_t *indices, uint32_t *store, uint32_t count, uint32_t width
) {
    write_rows(rows, indices, store, count, width);
}

extern "C" __global__ void write_rows_1(
    const uint8_t *rows, const uint32_t *indices, uint8_t *store, uint32_t count, uint32_t width
) {
    write_rows(rows, indices, store, count, width);
}

// The largest magnitude of a head, for all threads of a block; not finite if the head has a number
// that is not.
static __device__ float largest_magnitude(const float *head, uint32_t dim) {
    __shared__ uint32_t reduced[HEAD_THREADS];
    // The bits of non-negative floats have the same order as the floats. Infinity and NaN come last.
    uint32_t largest = 0;
    for (uint32_t i = threadIdx.x; i < dim; i += HEAD_THREADS) {
        uint32_t bits = float_to_bits(head[i]) & 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    reduced[threadIdx.x] = largest;
    __syncthreads();
    for (uint32_t i = 0; i < HEAD_THREADS; i++) {
        largest = reduced[i] > largest ? reduced[i] : largest;
    }
    return bits_to_float(largest);
}

// Writes the codes of each head, the integers nearest to its values times 127 / largest. The grid is
// (rows, heads), with HEAD_THREADS threads.
extern "C" __global__ void write_int8_codes(
    const float *rows,       // [count, heads, dim]
    const uint32_t *indices, // [count], each below the number of rows of the store
    uint8_t *codes,          // [rows of the store, heads, dim]
    uint32_t dim
) {
    uint32_t head = blockIdx.y, heads = gridDim.y;
    const float *from = rows + ((uint64_t)blockIdx.x * heads + head) * dim;
    uint8_t *to = codes + ((uint64_t)indices[blockIdx.x] * heads + head) * dim;
    float largest = largest_magnitude(from, dim);
    // The inverse of a number below about 2^-120 would overflow. Such a head is stored as zeros.
    bool is_zero = largest <= 1e-36f || float_to_bits(largest) >= INFINITY_BITS;
    float inverse = is_zero ? 0.0f : 127.0f / largest;
    for (uint32_t i = threadIdx.x; i < dim; i += HEAD_THREADS) {
        // Not contracted to a fused multiply-add, which would round once only. The low byte of the
        // sum is the integer in two's complement.
        float sum = __fadd_rn(__fmul_rn(from[i], inverse), ROUND_TO_INTEGER);
        to[i] = (uint8_t)float_to_bits(sum);
    }
}

// Writes the scale of each head: the factor of its codes. A head with a number that is not finite
// has the scale NaN. The launch is that of `write_int8_codes`.
extern "C" __global__ void write_int8_scales(
    const float *rows,       // [count, heads, dim]
    const uint32_t *indices, // [count], each below the number of rows of the store
    float *scales,           // [rows of the store, heads]
    uint32_t dim
) {
    uint32_t head = blockIdx.y, heads = gridDim.y;
    float largest = largest_magnitude(rows + ((uint64_t)blockIdx.x * heads + head) * dim, dim);
    bool is_finite = float_to_bits(largest) < INFINITY_BITS;
    if (threadIdx.x == 0) {
        scales[(uint64_t)indices[blockIdx.x] * heads + head] =
            is_finite ? largest / 127.0f : bits_to_float(NAN_BITS);
    }
}
