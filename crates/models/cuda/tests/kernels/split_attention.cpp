// Runs the kernels of kernels/split_attention.cu on the host.
//
// usage: split_attention ORDER TYPE ROWS HEADS KV_HEADS DIM SLOTS BLOCK_SIZE TABLE_LEN PARTS WINDOW
//                        HAS_SINKS SCALE SOFTCAP
// ORDER is 0 for ascending; TYPE is 0 for f32, 1 for f16, 2 for bf16 and 3 for int8.
// Reads queries, keys, values, in int8 the scales of keys and of values, tables, contexts, rows of
// the parts, starts of the rows' parts, and sinks from standard input, and writes the attention to
// standard output.

#include "host.h"
//
#include "../../kernels/split_attention.cu"

static uint32_t type, heads, kv_heads, dim, block_size, table_len, window;
static float scale, softcap;
static const float4 *q;
static const void *keys, *values;
static const float *key_scales, *value_scales;
static const uint32_t *tables, *lengths, *part_rows, *part_starts;
static float *partials, *sinks, *output;

static void attend() {
    auto function = type == 0   ? attend_parts_f32
                    : type == 1 ? attend_parts_f16
                    : type == 2 ? attend_parts_bf16
                                : attend_parts_int8;
    function(
        q, keys, values, key_scales, value_scales, tables, lengths, part_rows, part_starts,
        partials, heads, kv_heads, dim, block_size, table_len, window, scale, softcap
    );
}

static void merge() { merge_parts(partials, lengths, part_starts, sinks, output, dim, window); }

int main(int argc, char **argv) {
    if (argc != 15) {
        return 2;
    }
    uint32_t numbers[13];
    for (int i = 1; i < 13; i++) {
        numbers[i] = strtoul(argv[i], NULL, 10);
    }
    bool descending = numbers[1] != 0;
    type = numbers[2];
    uint64_t rows = numbers[3];
    heads = numbers[4];
    kv_heads = numbers[5];
    dim = numbers[6];
    uint64_t slots = numbers[7];
    block_size = numbers[8];
    table_len = numbers[9];
    uint64_t parts = numbers[10];
    window = numbers[11];
    bool has_sinks = numbers[12] != 0;
    scale = strtof(argv[13], NULL);
    softcap = strtof(argv[14], NULL);

    static const uint64_t element_bytes[] = {4, 2, 2, 1};
    uint64_t kv_bytes = slots * kv_heads * dim * element_bytes[type];
    q = (float4 *)read_array(rows * heads * dim * sizeof(float));
    keys = read_array(kv_bytes);
    values = read_array(kv_bytes);
    if (type == 3) {
        key_scales = (float *)read_array(slots * kv_heads * sizeof(float));
        value_scales = (float *)read_array(slots * kv_heads * sizeof(float));
    }
    tables = (uint32_t *)read_array(rows * table_len * sizeof(uint32_t));
    lengths = (uint32_t *)read_array(rows * sizeof(uint32_t));
    part_rows = (uint32_t *)read_array(parts * sizeof(uint32_t));
    part_starts = (uint32_t *)read_array((rows + 1) * sizeof(uint32_t));
    sinks = has_sinks ? (float *)read_array(heads * sizeof(float)) : NULL;
    uint64_t partial_count = parts * heads * (dim + 2);
    partials = (float *)malloc(partial_count * sizeof(float));
    // What is not written must not be read.
    for (uint64_t i = 0; i < partial_count; i++) {
        partials[i] = NAN;
    }
    output = (float *)malloc(rows * heads * dim * sizeof(float));

    uint32_t chunks = (heads / kv_heads + HEADS - 1) / HEADS;
    launch({(uint32_t)parts, kv_heads * chunks}, THREADS, descending, attend);
    launch({heads, (uint32_t)rows}, 32, descending, merge);
    fwrite(output, sizeof(float), rows * heads * dim, stdout);
    return 0;
}
