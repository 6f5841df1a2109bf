// Runs the kernel of kernels/recurrence.cu on the host.
//
// usage: recurrence THREADS ROWS SLICES HEADS KEY_DIM VALUE_DIM CHANNELS WIDTH QUERY KEY VALUE
//     KEY_HEADS GROUPED DECAYS DELTA PARTS SEGMENTS
// Reads the states, the rows and the segments from standard input, and writes the outputs and the
// states to standard output, followed by one element more.

#include "host.h"
//
#include "../../kernels/recurrence.cu"

static uint32_t numbers[17];
static const float *states, *rows;
static const uint32_t *segments;
static float *results;

static void recur() {
    const uint32_t *n = numbers + 1;
    recurrence(states, rows, segments, results, n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8],
               n[9], n[10], n[11], n[12], n[13], n[14]);
}

int main(int argc, char **argv) {
    if (argc != 18) {
        return 2;
    }
    for (int i = 0; i < 17; i++) {
        numbers[i] = strtoul(argv[i + 1], NULL, 10);
    }
    uint64_t row_count = numbers[1], slices = numbers[2], heads = numbers[3];
    uint64_t head_len = (uint64_t)numbers[4] * numbers[5], segment_count = numbers[16];
    states = (const float *)read_array(slices * heads * head_len * sizeof(float));
    rows = (const float *)read_array(row_count * numbers[7] * sizeof(float));
    segments = (const uint32_t *)read_array((slices + segment_count + 2) * sizeof(uint32_t));
    uint64_t count = row_count * heads * numbers[5] + segment_count * heads * head_len;
    // One element more, which must not be written.
    results = (float *)calloc(count + 1, sizeof(float));
    launch({(uint32_t)slices, (uint32_t)heads * numbers[15]}, numbers[0], false, recur);
    fwrite(results, sizeof(float), count + 1, stdout);
    return 0;
}
