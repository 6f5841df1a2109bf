// Runs the kernels of kernels/kv_write.cu on the host.
//
// usage: kv_write UNIT_BYTES GRID BLOCK COUNT WIDTH LEN
// Reads the rows, the indices and the store from standard input, and writes the store to standard
// output.
//
// usage: kv_write ORDER COUNT HEADS DIM LEN
// ORDER is 0 for ascending. Reads the rows in f32, the indices, the codes and the scales from
// standard input, and writes the codes and the scales to standard output.

#include "host.h"
//
#include "../../kernels/kv_write.cu"

static uint64_t unit_bytes, count, width;
static void *rows, *store;
static uint32_t *indices;

static void write_all() {
    if (unit_bytes == 16) {
        write_rows_16((uint4 *)rows, indices, (uint4 *)store, count, width);
    } else if (unit_bytes == 4) {
        write_rows_4((uint32_t *)rows, indices, (uint32_t *)store, count, width);
    } else {
        write_rows_1((uint8_t *)rows, indices, (uint8_t *)store, count, width);
    }
}

static uint32_t dim;
static float *scales;

static void write_codes() { write_int8_codes((float *)rows, indices, (uint8_t *)store, dim); }

static void write_scales() { write_int8_scales((float *)rows, indices, scales, dim); }

static int write_heads(char **argv) {
    bool descending = strtoul(argv[1], NULL, 10) != 0;
    count = strtoull(argv[2], NULL, 10);
    uint64_t heads = strtoull(argv[3], NULL, 10);
    dim = strtoul(argv[4], NULL, 10);
    uint64_t len = strtoull(argv[5], NULL, 10);
    rows = read_array(count * heads * dim * sizeof(float));
    indices = (uint32_t *)read_array(count * sizeof(uint32_t));
    store = read_array(len * heads * dim);
    scales = (float *)read_array(len * heads * sizeof(float));
    Index grid = {(uint32_t)count, (uint32_t)heads};
    launch(grid, HEAD_THREADS, descending, write_codes);
    launch(grid, HEAD_THREADS, descending, write_scales);
    fwrite(store, 1, len * heads * dim, stdout);
    fwrite(scales, sizeof(float), len * heads, stdout);
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 6) {
        return write_heads(argv);
    }
    if (argc != 7) {
        return 2;
    }
    uint64_t numbers[6];
    for (int i = 0; i < 6; i++) {
        numbers[i] = strtoull(argv[i + 1], NULL, 10);
    }
    unit_bytes = numbers[0];
    count = numbers[3];
    width = numbers[4];
    uint64_t len = numbers[5];
    rows = read_array(count * width * unit_bytes);
    indices = (uint32_t *)read_array(count * sizeof(uint32_t));
    store = read_array(len * width * unit_bytes);
    launch({(uint32_t)numbers[1], 1}, numbers[2], false, write_all);
    fwrite(store, 1, len * width * unit_bytes, stdout);
    return 0;
}
