// Copies row i of `rows` to row `indices[i]` of `store`: new keys and values to the KV store.
//
// The element type does not matter, so rows are copied in units of 16 bytes, or of 4 where the size
// of a row is not a multiple of 16 bytes. Each thread block copies one row at a time; any grid and
// any block size give the same result. The file is also compiled as C++ for the host by
// tests/kernels.rs, which checks the arithmetic of the indices.

#include <stdint.h>

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
