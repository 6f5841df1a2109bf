// Runs the kernel of kernels/draw.cu on the host.
//
// usage: draw ORDER ROWS VOCAB_SIZE
// ORDER is 0 for ascending. Reads the logits and the draw of each row from standard input, and
// writes a token of 32 bits for each row to standard output.

#include "host.h"
//
#include "../../kernels/draw.cu"

static uint32_t vocab_size;
static const float *logits;
static const uint32_t *draws;
static uint32_t *tokens;

static void run() { draw(logits, draws, tokens, vocab_size); }

int main(int argc, char **argv) {
    if (argc != 4) {
        return 2;
    }
    bool descending = strtoul(argv[1], NULL, 10) != 0;
    uint32_t rows = strtoul(argv[2], NULL, 10);
    vocab_size = strtoul(argv[3], NULL, 10);
    logits = (float *)read_array((uint64_t)rows * vocab_size * sizeof(float));
    draws = (uint32_t *)read_array((uint64_t)rows * 6 * sizeof(uint32_t));
    tokens = (uint32_t *)calloc(rows, sizeof(uint32_t));
    launch({rows, 1}, THREADS, descending, run);
    fwrite(tokens, sizeof(uint32_t), rows, stdout);
    return 0;
}
