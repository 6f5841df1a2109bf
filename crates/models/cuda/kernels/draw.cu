// Draws a token from each row of logits, so that no row is copied from the device. It does what
// `Draw::of` of stolon-backend does, with the same operations in the same order where they round,
// so that both choose the same tokens.
//
// With top-k or top-p, the most likely tokens are ordered: Each thread finds the largest of its
// share of the row. The k-th largest of these is a lower bound of the k-th largest of the row, and
// only few logits are above it: they are the candidates, which are ordered by counting how many are
// larger. The file is also compiled as C++ for the host by tests/kernels.rs.

#include "numbers.cuh"

// The launch in src/draw/cuda.rs has the same numbers.
#define THREADS 512
#define UNUSABLE 0xffffffffu // instead of a token: the host has to look at the row
#define LEN_MAX (1u << 20)   // largest vocabulary

// Most tokens that are ordered: Draw::TOP_P_FIRST. At most THREADS.
#define TOP_MAX 256
// Most candidates of a row. There are more only if the largest logits are badly distributed.
#define CANDIDATES 2048
// As in stolon-backend: number of weights that are summed as one block, and of sums in a block.
#define BLOCK 1024
#define LANES 16

// A number that is unique in the row, and larger for a larger logit or an equal one of a lower
// token. It is above 0.
static __device__ uint64_t order(float logit, uint32_t token) {
    // The sum turns -0 into 0.
    uint32_t bits = float_to_bits(logit + 0.0f);
    bits = bits >> 31 ? ~bits : bits | 0x80000000u;
    return (uint64_t)bits << 32 | (0xffffffffu - token);
}

static __device__ uint32_t token_of(uint64_t order) { return 0xffffffffu - (uint32_t)order; }

// e^x for x <= 0: `exp_at_most_one` of stolon-backend, without fused multiply-add.
static __device__ float exp_at_most_one(float x) {
    const float round = 12582912.0f; // 1.5 * 2^23
    float clamped = x > -87.0f ? x : -87.0f;
    float shifted = __fadd_rn(__fmul_rn(clamped, 1.44269504088896340736f), round);
    float whole = __fadd_rn(shifted, -round);
    float rest = __fadd_rn(clamped, -__fmul_rn(whole, 0.6933594f));
    rest = __fadd_rn(rest, -__fmul_rn(whole, -2.1219444e-4f));
    const float factors[] = {1.0f / 720.0f, 1.0f / 120.0f, 1.0f / 24.0f, 1.0f / 6.0f, 0.5f, 1.0f,
                             1.0f};
    float sum = 1.0f / 5040.0f;
#pragma unroll
    for (uint32_t i = 0; i < 7; i++) {
        sum = __fadd_rn(__fmul_rn(sum, rest), factors[i]);
    }
    uint32_t exponent = (float_to_bits(shifted) - float_to_bits(round) + 127u) << 23;
    return x >= -87.0f ? __fmul_rn(sum, bits_to_float(exponent)) : 0.0f;
}

// How a token is drawn from a row, and the weights of its logits.
struct Draw {
    float temperature, top_p, min_p, largest;
    uint32_t top_k; // 0 for all
    double uniform;

    __device__ float weight(float logit) const {
        return exp_at_most_one((logit - largest) / temperature);
    }
    // 0 for a weight that min-p excludes, if it applies to the whole row.
    __device__ float kept(float logit, bool with_min_p) const {
        float value = weight(logit);
        return with_min_p && !(value >= min_p) ? 0.0f : value;
    }
};

// Draws one of `count` weights in decreasing order, the first of which is 1. Returns its index.
static __device__ uint32_t draw_of_candidates(
    const float *weights, uint32_t count, float min_p, double uniform
) {
    double total = 0.0;
    uint32_t likely = 0;
    while (likely < count && (double)weights[likely] >= (double)min_p) {
        total += (double)weights[likely++];
    }
    double left = __dmul_rn(uniform, total);
    uint32_t last = 0;
    for (uint32_t i = 0; i < likely; i++) {
        left -= (double)weights[i];
        if (left < 0.0) {
            return i;
        }
        last = weights[i] > 0.0f ? i : last;
    }
    return last;
}

// How many of `count` weights in decreasing order have a total of at least `needed`; 0 if all of
// them have less.
static __device__ uint32_t nucleus_len(const float *weights, uint32_t count, double needed) {
    double sum = 0.0;
    for (uint32_t i = 0; i < count; i++) {
        sum += (double)weights[i];
        if (sum >= needed) {
            return i + 1;
        }
    }
    return 0;
}

// The grid is (rows), with THREADS threads. A row with a NaN or +infinity or with nothing else than
// -infinity, with too many candidates, or from which more than TOP_MAX tokens are needed, is
// unusable.
extern "C" __global__ void draw(
    const float *logits,   // [rows, vocab_size]
    const uint32_t *draws, // [rows, 6]: bits of temperature, top-p, min-p, top-k or 0, and bits of the
                           // random number, low ones first
    uint32_t *tokens,      // [rows]
    uint32_t vocab_size    // 1 to LEN_MAX
) {
    __shared__ uint64_t largest[THREADS];
    __shared__ uint64_t candidates[CANDIDATES];
    __shared__ double sums[LEN_MAX / BLOCK];
    __shared__ float weights[BLOCK];
    __shared__ uint64_t threshold;
    __shared__ double left;
    __shared__ uint32_t best, count, unusable, block;

    uint32_t thread = threadIdx.x, row = blockIdx.x;
    const float *values = logits + (uint64_t)row * vocab_size;
    const uint32_t *bits = draws + 6 * (uint64_t)row;
    Draw draw;
    draw.temperature = bits_to_float(bits[0]);
    draw.top_p = bits_to_float(bits[1]);
    draw.min_p = bits_to_float(bits[2]);
    draw.top_k = bits[3] < vocab_size ? bits[3] : 0;
    draw.uniform = bits_to_double(bits[4], bits[5]);
    bool is_greedy = draw.temperature == 0.0f, has_top_p = draw.top_p < 1.0f;
    // The number of tokens to be ordered.
    uint32_t k = draw.top_k ? draw.top_k : TOP_MAX < vocab_size ? TOP_MAX : vocab_size;
    if (thread == 0) {
        count = 0;
        unusable = k > TOP_MAX;
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
    if (own != 0 && larger == 0) {
        best = token_of(own);
    }
    if (larger == k - 1) {
        threshold = own;
    }
    __syncthreads();

    draw.largest = values[best];
    if (unusable || draw.largest == -INFINITY || is_greedy) {
        if (thread == 0) {
            tokens[row] = unusable || draw.largest == -INFINITY ? UNUSABLE : best;
        }
        return;
    }

    bool is_ordered = draw.top_k || has_top_p;
    if (is_ordered) {
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
        if (count > CANDIDATES) {
            if (thread == 0) {
                tokens[row] = UNUSABLE;
            }
            return;
        }
        // From here on, the k largest in order.
        for (uint32_t i = thread; i < count; i += THREADS) {
            uint64_t place = candidates[i];
            uint32_t rank = 0;
            for (uint32_t other = 0; other < count; other++) {
                rank += candidates[other] > place;
            }
            if (rank < k) {
                largest[rank] = place;
            }
        }
        __syncthreads();
    }

    // The sums of the weights of all blocks, some blocks at a time. With top-k, the row's are not
    // needed.
    uint32_t blocks = draw.top_k ? 0 : (vocab_size + BLOCK - 1) / BLOCK;
    for (uint32_t first = 0; first < blocks; first += THREADS / LANES) {
        uint32_t own_block = first + thread / LANES, start = own_block * BLOCK;
        uint32_t end = start + BLOCK < vocab_size ? start + BLOCK : vocab_size;
        float sum = 0.0f;
        if (own_block < blocks) {
            uint32_t whole = start + (end - start) / LANES * LANES;
            for (uint32_t i = start + thread % LANES; i < whole; i += LANES) {
                sum = __fadd_rn(sum, draw.kept(values[i], !is_ordered));
            }
        }
        weights[thread] = sum;
        __syncthreads();
        if (own_block < blocks && thread % LANES == 0) {
            double total = 0.0, others = 0.0;
            for (uint32_t lane = 0; lane < LANES; lane++) {
                total += (double)weights[thread + lane];
            }
            for (uint32_t i = start + (end - start) / LANES * LANES; i < end; i++) {
                others += (double)draw.kept(values[i], !is_ordered);
            }
            sums[own_block] = total + others;
        }
        __syncthreads();
    }

    if (is_ordered) {
        if (thread < k) {
            weights[thread] = draw.weight(values[token_of(largest[thread])]);
        }
        __syncthreads();
        if (thread == 0) {
            uint32_t kept = k;
            if (has_top_p) {
                // The sum of the weights that top-k keeps, or of the whole row.
                double total = 0.0;
                for (uint32_t i = 0; i < draw.top_k; i++) {
                    total += (double)weights[i];
                }
                for (uint32_t i = 0; i < blocks; i++) {
                    total += sums[i];
                }
                kept = nucleus_len(weights, k, __dmul_rn((double)draw.top_p, total));
            }
            // The nucleus of a row may have more tokens than were ordered.
            bool is_short = kept == 0 && draw.top_k == 0 && k < vocab_size;
            kept = kept ? kept : k;
            uint32_t at = draw_of_candidates(weights, kept, draw.min_p, draw.uniform);
            tokens[row] = is_short ? UNUSABLE : token_of(largest[at]);
        }
        return;
    }

    if (thread == 0) {
        double total = 0.0;
        for (uint32_t i = 0; i < blocks; i++) {
            total += sums[i];
        }
        left = __dmul_rn(draw.uniform, total);
        for (uint32_t i = 0; i < blocks; i++) {
            if (sums[i] > 0.0) {
                block = i;
                if (left < sums[i]) {
                    break;
                }
                left -= sums[i];
            }
        }
    }
    __syncthreads();
    uint32_t start = block * BLOCK;
    for (uint32_t i = thread; i < BLOCK && start + i < vocab_size; i += THREADS) {
        weights[i] = draw.kept(values[start + i], true);
    }
    __syncthreads();
    if (thread == 0) {
        uint32_t token = best;
        for (uint32_t i = 0; i < BLOCK && start + i < vocab_size; i++) {
            if (weights[i] > 0.0f) {
                token = start + i;
                left -= (double)weights[i];
                if (left < 0.0) {
                    break;
                }
            }
        }
        tokens[row] = token;
    }
}
