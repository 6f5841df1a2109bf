// Runs the kernels of kernels/kv_write.cu on the host.
//
// usage: kv_write UNIT_BYTES GRID BLOCK COUNT WIDTH LEN
// Reads the rows, the indices and the store from standard input, and writes the store to standard
// output.

#include "host.h"
//
#include "../../kernels/kv_write.cu"

static uint64_t unit_bytes, count, width;
static void *rows, *store;
static uint32_t *indices;

static void write_all() {
    if (unit_bytes == 16) {
        write_rows_16((uint4 *)rows, indices, (uint4 *)store, count, width);
    } else {
        write_rows_4((uint32_t *)rows, indices, (uint32_t *)store, count, width);
    }
}

int main(int argc, char **argv) {
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
