// What kernels need to run on the host. The threads of a block are contexts that take turns at each
// barrier, so that every barrier matters, in ascending or descending order.

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define __global__
#define __device__
// One block runs at a time.
#define __shared__ static

struct Index {
    uint32_t x, y;
};
struct uint2 {
    uint32_t x, y;
};
struct uint4 {
    uint32_t x, y, z, w;
};
struct float4 {
    float x, y, z, w;
};

static Index gridDim, blockDim, blockIdx, threadIdx;

static const uint32_t THREADS_MAX = 1024;
static const size_t STACK_BYTES = 32 * 1024;
static ucontext_t scheduler, threads[THREADS_MAX];
static char stacks[THREADS_MAX][STACK_BYTES];
static bool ended[THREADS_MAX];
static void (*kernel)();

[[maybe_unused]] static void __syncthreads() {
    swapcontext(&threads[threadIdx.x], &scheduler);
}

[[maybe_unused]] static uint32_t atomicAdd(uint32_t *to, uint32_t value) {
    uint32_t before = *to;
    *to += value;
    return before;
}

[[maybe_unused]] static float bits_to_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

[[maybe_unused]] static uint32_t float_to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

[[maybe_unused]] static double bits_to_double(uint32_t low, uint32_t high) {
    uint64_t bits = (uint64_t)high << 32 | low;
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// Arithmetic that is not contracted to fused multiply-add. The host's compiler is told not to.
[[maybe_unused]] static float __fadd_rn(float a, float b) { return a + b; }
[[maybe_unused]] static float __fmul_rn(float a, float b) { return a * b; }
[[maybe_unused]] static double __dmul_rn(double a, double b) { return a * b; }

[[maybe_unused]] static float half_to_float(uint16_t bits) {
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float value = exponent == 0    ? ldexpf((float)fraction, -24)
                  : exponent == 31 ? (fraction ? NAN : INFINITY)
                                   : ldexpf((float)(1024 + fraction), exponent - 25);
    return bits >> 15 ? -value : value;
}

// Rounds to the nearest number, and to an even one of two that are equally near.
[[maybe_unused]] static uint16_t float_to_half(float value) {
    uint16_t sign = float_to_bits(value) >> 16 & 0x8000;
    float magnitude = fabsf(value);
    if (isnan(value)) {
        return 0x7fff;
    }
    if (magnitude >= 65520.0f) {
        return sign | 0x7c00;
    }
    if (magnitude == 0) {
        return sign;
    }
    int exponent;
    frexpf(magnitude, &exponent);
    // All numbers below 2^-14 have the same distance to the next one. A carry goes to the exponent.
    exponent = exponent < -13 ? -13 : exponent;
    uint16_t fraction = (uint16_t)nearbyintf(ldexpf(magnitude, 11 - exponent));
    return sign | (uint16_t)(((exponent + 13) << 10) + fraction);
}

static void run_thread() {
    uint32_t thread = threadIdx.x;
    kernel();
    ended[thread] = true;
}

static void run_block(bool descending) {
    for (uint32_t thread = 0; thread < blockDim.x; thread++) {
        getcontext(&threads[thread]);
        threads[thread].uc_stack.ss_sp = stacks[thread];
        threads[thread].uc_stack.ss_size = STACK_BYTES;
        threads[thread].uc_link = &scheduler;
        makecontext(&threads[thread], run_thread, 0);
        ended[thread] = false;
    }
    while (true) {
        uint32_t running = 0;
        for (uint32_t turn = 0; turn < blockDim.x; turn++) {
            uint32_t thread = descending ? blockDim.x - 1 - turn : turn;
            threadIdx.x = thread;
            swapcontext(&scheduler, &threads[thread]);
            running += !ended[thread];
        }
        if (running == 0) {
            return;
        }
        if (running != blockDim.x) {
            fprintf(stderr, "some threads ended while others wait at a barrier\n");
            exit(1);
        }
    }
}

// Runs `body`, which calls a kernel, in each thread of each block.
static void launch(Index grid, uint32_t block, bool descending, void (*body)()) {
    gridDim = grid;
    blockDim.x = block;
    kernel = body;
    for (blockIdx.y = 0; blockIdx.y < grid.y; blockIdx.y++) {
        for (blockIdx.x = 0; blockIdx.x < grid.x; blockIdx.x++) {
            run_block(descending);
        }
    }
}

// Reads an array of `bytes` bytes from standard input.
static void *read_array(uint64_t bytes) {
    void *array = malloc(bytes ? bytes : 1);
    if (array == NULL || fread(array, 1, bytes, stdin) != bytes) {
        fprintf(stderr, "expected %llu more bytes\n", (unsigned long long)bytes);
        exit(1);
    }
    return array;
}
