// The k largest logits of each row, in order of decreasing logit and, for equal logits, increasing
// token: what sampling with top-k needs of a row, so that only these are copied from the device.
//
// Each thread finds the largest of its share of the row. The k-th largest of these is a lower bound of
// the k-th largest of the row, and only few logits are above it: they are the candidates, which are
// ordered by counting how many are larger. The file is also compiled as C++ for the host by
// tests/kernels.rs.

#include "numbers.cuh"

// The launch in src/top_logits/cuda.rs has the same numbers.
#define THREADS 512          // at least the largest k
#define UNUSABLE 0xffffffffu // count of a row that the host has to look at

// Most candidates of a row. There are more only if the largest logits are badly distributed.
#define CANDIDATES 2048

// A number that is unique in the row, and larger for a larger logit or an equal one of a lower token.
// It is above 0.
static __device__ uint64_t order(float logit, uint32_t token) {
    // The sum turns -0 into 0.
    uint32_t bits = float_to_bits(logit + 0.0f);
    bits = bits >> 31 ? ~bits : bits | 0x80000000u;
    return (uint64_t)bits << 32 | (0xffffffffu - token);
}

// The grid is (rows), with THREADS threads. A row with a NaN or +infinity, or with too many candidates,
// is unusable.
extern "C" __global__ void top_logits(
    const float *logits, // [rows, vocab_size]
    const uint32_t *ks,  // [rows]: how many of each row, 1 to THREADS
    uint32_t *output,    // [rows, 1 + 2 * k_max]: the count, then tokens with the bits of their logits
    uint32_t vocab_size,
    uint32_t k_max // at least all of `ks`
) {
    __shared__ uint64_t largest[THREADS];
    __shared__ uint64_t candidates[CANDIDATES];
    __shared__ uint64_t threshold;
    __shared__ uint32_t count, unusable;

    uint32_t thread = threadIdx.x, row = blockIdx.x;
    const float *values = logits + (uint64_t)row * vocab_size;
    uint32_t k = ks[row] < vocab_size ? ks[row] : vocab_size;
    if (thread == 0) {
        count = 0;
        unusable = 0;
    }
    __syncthreads();

    uint64_t own = 0;
    bool usable = true;
#pragma unroll 4
    for (uint32_t i = thread; i < vocab_size; i += THREADS) {
        float value = values[i];
        // A comparison with NaN is false.
        usable &= value < INFINITY;
        uint64_t place = order(value, i);
        own = place > own ? place : own;
    }
    largest[thread] = own;
    if (!usable) {
        unusable = 1;
    }
    __syncthreads();

    uint32_t larger = 0;
    for (uint32_t i = 0; i < THREADS; i++) {
        larger += largest[i] > own;
    }
    if (larger == k - 1) {
        threshold = own;
    }
    __syncthreads();

    uint64_t least = threshold;
    if (own >= least) {
#pragma unroll 4
        for (uint32_t i = thread; i < vocab_size; i += THREADS) {
            uint64_t place = order(values[i], i);
            if (place >= least) {
                uint32_t at = atomicAdd(&count, 1u);
                if (at < CANDIDATES) {
                    candidates[at] = place;
                }
            }
        }
    }
    __syncthreads();

    uint32_t *to = output + (uint64_t)row * (1 + 2 * k_max);
    if (unusable || count > CANDIDATES) {
        if (thread == 0) {
            to[0] = UNUSABLE;
        }
        return;
    }
    if (thread == 0) {
        to[0] = k;
    }
    for (uint32_t i = thread; i < count; i += THREADS) {
        uint64_t place = candidates[i];
        uint32_t rank = 0;
        for (uint32_t other = 0; other < count; other++) {
            rank += candidates[other] > place;
        }
        if (rank < k) {
            uint32_t token = 0xffffffffu - (uint32_t)place;
            to[1 + 2 * rank] = token;
            to[2 + 2 * rank] = float_to_bits(values[token]);
        }
    }
}
