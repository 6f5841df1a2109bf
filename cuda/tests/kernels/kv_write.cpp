// Runs the kernels of kernels/kv_write.cu on the host: one thread after the other.
//
// usage: host UNIT_BYTES GRID BLOCK COUNT WIDTH LEN
// Reads the rows, the indices and the store from standard input, and writes the store to standard
// output.

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define __global__
#define __device__

struct Index {
    uint32_t x;
};
struct uint4 {
    uint32_t x, y, z, w;
};

static Index gridDim, blockDim, blockIdx, threadIdx;

#include "../../kernels/kv_write.cu"

static void *read_array(uint64_t bytes) {
    void *array = malloc(bytes ? bytes : 1);
    if (array == NULL || fread(array, 1, bytes, stdin) != bytes) {
        fprintf(stderr, "expected %llu more bytes\n", (unsigned long long)bytes);
        exit(1);
    }
    return array;
}

int main(int argc, char **argv) {
    if (argc != 7) {
        return 2;
    }
    uint64_t numbers[6];
    for (int i = 0; i < 6; i++) {
        numbers[i] = strtoull(argv[i + 1], NULL, 10);
    }
    uint64_t unit_bytes = numbers[0], count = numbers[3], width = numbers[4], len = numbers[5];
    gridDim.x = numbers[1];
    blockDim.x = numbers[2];
    void *rows = read_array(count * width * unit_bytes);
    uint32_t *indices = (uint32_t *)read_array(count * sizeof(uint32_t));
    void *store = read_array(len * width * unit_bytes);
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++) {
        for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++) {
            if (unit_bytes == 16) {
                write_rows_16((uint4 *)rows, indices, (uint4 *)store, count, width);
            } else {
                write_rows_4((uint32_t *)rows, indices, (uint32_t *)store, count, width);
            }
        }
    }
    fwrite(store, 1, len * width * unit_bytes, stdout);
    return 0;
}
