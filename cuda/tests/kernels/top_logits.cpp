// Runs the kernel of kernels/top_logits.cu on the host.
//
// usage: top_logits ORDER ROWS VOCAB_SIZE K_MAX
// ORDER is 0 for ascending. Reads the logits and how many of each row are wanted from standard input,
// and writes [rows, 1 + 2 * k_max] numbers of 32 bits to standard output.

#include "host.h"
//
#include "../../kernels/top_logits.cu"

static uint32_t vocab_size, k_max;
static const float *logits;
static const uint32_t *ks;
static uint32_t *output;

static void find() { top_logits(logits, ks, output, vocab_size, k_max); }

int main(int argc, char **argv) {
    if (argc != 5) {
        return 2;
    }
    bool descending = strtoul(argv[1], NULL, 10) != 0;
    uint32_t rows = strtoul(argv[2], NULL, 10);
    vocab_size = strtoul(argv[3], NULL, 10);
    k_max = strtoul(argv[4], NULL, 10);
    logits = (float *)read_array((uint64_t)rows * vocab_size * sizeof(float));
    ks = (uint32_t *)read_array(rows * sizeof(uint32_t));
    uint64_t count = rows * (1 + 2 * (uint64_t)k_max);
    output = (uint32_t *)calloc(count, sizeof(uint32_t));
    launch({rows, 1}, THREADS, descending, find);
    fwrite(output, sizeof(uint32_t), count, stdout);
    return 0;
}
