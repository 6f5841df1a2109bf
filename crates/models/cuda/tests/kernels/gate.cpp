// Runs the kernels of kernels/gate.cu on the host.
//
// usage: gate TYPE KIND ROWS WIDTH COLUMN_BLOCKS ROW_BLOCKS THREADS
// TYPE is f32, f16 or bf16. Reads alpha and limit in f32, then [rows, 2 * width] elements from
// standard input, and writes [rows, width] elements to standard output.

#include "host.h"
//
#include "../../kernels/gate.cu"

static const char *type;
static const void *x;
static void *output;
static uint32_t rows, width, kind;
static float alpha, limit;

static void gate() {
    if (strcmp(type, "f32") == 0) {
        gate_f32((const float *)x, (float *)output, rows, width, kind, alpha, limit);
    } else if (strcmp(type, "f16") == 0) {
        gate_f16((const uint16_t *)x, (uint16_t *)output, rows, width, kind, alpha, limit);
    } else {
        gate_bf16((const uint16_t *)x, (uint16_t *)output, rows, width, kind, alpha, limit);
    }
}

int main(int argc, char **argv) {
    if (argc != 8) {
        return 2;
    }
    type = argv[1];
    kind = strtoul(argv[2], NULL, 10);
    rows = strtoul(argv[3], NULL, 10);
    width = strtoul(argv[4], NULL, 10);
    Index grid = {(uint32_t)strtoul(argv[5], NULL, 10), (uint32_t)strtoul(argv[6], NULL, 10)};
    uint32_t threads = strtoul(argv[7], NULL, 10);
    const float *factors = (const float *)read_array(2 * sizeof(float));
    alpha = factors[0];
    limit = factors[1];
    uint64_t element = strcmp(type, "f32") == 0 ? 4 : 2, count = (uint64_t)rows * width;
    x = read_array(2 * count * element);
    // One element more, which must not be written.
    output = calloc(count + 1, element);
    launch(grid, threads, false, gate);
    fwrite(output, element, count + 1, stdout);
    return 0;
}
