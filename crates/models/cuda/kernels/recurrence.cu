// Linear recurrences over the tokens of sequences: Gated DeltaNet, Kimi Delta Attention and Mamba-2.
//
// Each thread computes one column of the state of a head, token by token, with sums over the key in
// ascending order. Blocks are (slices, heads * parts), where the parts of a head share its columns;
// any number of parts and any block size give the same result. The file is also compiled as C++ for
// the host by tests/kernels.rs.

#include <stdint.h>

extern "C" __global__ void recurrence(
    const float *states,      // [slices, heads, key_dim, value_dim]: before the slices
    const float *rows,        // [row_count, width]: a token's channels, decays and strengths
    const uint32_t *segments, // [slices + 1]: first segment of each slice; then the first row of each
                              // segment, and `row_count`
    float *results,           // [row_count, heads, value_dim], then the states after all segments
    uint32_t row_count,
    uint32_t slices,
    uint32_t heads,
    uint32_t key_dim,
    uint32_t value_dim,
    uint32_t channels,
    uint32_t width,     // number of elements of a row
    uint32_t query,     // first channel of the queries
    uint32_t key,       // of the keys
    uint32_t value,     // of the values
    uint32_t key_heads, // number of keys
    uint32_t grouped,   // 1 if consecutive heads use the same key
    uint32_t decays,    // number of decays of a head: 1, or `key_dim`
    uint32_t delta,     // 1 for the delta rule, 0 to add the product of key and value
    uint32_t parts
) {
    uint32_t slice = blockIdx.x, head = blockIdx.y / parts, part = blockIdx.y % parts;
    uint32_t key_head = grouped ? head / (heads / key_heads) : head % key_heads;
    const uint32_t *first_rows = segments + slices + 1;
    uint64_t head_len = (uint64_t)key_dim * value_dim;
    float *after = results + (uint64_t)row_count * heads * value_dim;
    for (uint32_t column = part * blockDim.x + threadIdx.x; column < value_dim;
         column += parts * blockDim.x) {
        const float *before = states + ((uint64_t)slice * heads + head) * head_len + column;
        for (uint32_t segment = segments[slice]; segment < segments[slice + 1]; segment++) {
            float *state = after + ((uint64_t)segment * heads + head) * head_len + column;
            for (uint32_t i = 0; i < key_dim; i++) {
                state[(uint64_t)i * value_dim] = before[(uint64_t)i * value_dim];
            }
            for (uint32_t row = first_rows[segment]; row < first_rows[segment + 1]; row++) {
                const float *channel = rows + (uint64_t)row * width;
                const float *queries = channel + query + key_head * key_dim;
                const float *keys = channel + key + key_head * key_dim;
                const float *decay = channel + channels + head * decays;
                uint32_t step = decays == 1 ? 0 : 1;
                float memory = 0.0f;
                if (delta) {
                    for (uint32_t i = 0; i < key_dim; i++) {
                        memory += keys[i] * (decay[i * step] * state[(uint64_t)i * value_dim]);
                    }
                }
                float strength = channel[channels + heads * decays + head];
                float update = strength * (channel[value + head * value_dim + column] - memory);
                float sum = 0.0f;
                for (uint32_t i = 0; i < key_dim; i++) {
                    float *at = state + (uint64_t)i * value_dim;
                    float element = decay[i * step] * *at + keys[i] * update;
                    *at = element;
                    sum += queries[i] * element;
                }
                results[((uint64_t)row * heads + head) * value_dim + column] = sum;
            }
            before = state;
        }
    }
}
