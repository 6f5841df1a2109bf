// Attention of single queries over paged keys and values: split-KV decoding.
//
// The positions that a query reads are divided into parts of PART positions, from position 0 on, so
// that a few long contexts give work to the whole device. `attend_parts` computes a softmax over
// each part, and `merge_parts` merges those of a query by their largest scores and sums (Dao et
// al., "Flash-Decoding", 2023). The parts do not depend on the batch, nor does the order of any
// sum.
//
// Query heads that share a key head are computed together, up to HEADS of them, so that keys and
// values are read once. The file is also compiled as C++ for the host by tests/kernels.rs.

#include "numbers.cuh"

// The launch in src/attention/split/cuda.rs has the same numbers.
#define PART 256    // positions of a part
#define HEADS 8     // most query heads of a thread block
#define DIM_MAX 256 // most elements of a head
#define THREADS 128

// Threads that reduce the scores of one head together.
#define REDUCERS (THREADS / HEADS)
// Size of a tile of keys in shared memory, in 16 bytes.
#define TILE_SIZE 1536

// Elements of keys and values: the unit in which keys are read and how many elements it has, how two
// and all of them are converted, and whether each head has a scale.
struct F32 {
    enum { PER_UNIT = 4, HAS_SCALES = 0 };
    typedef uint4 Unit;
    typedef uint2 Pair;
    static __device__ void unpack_pair(Pair pair, float *to) {
        to[0] = bits_to_float(pair.x);
        to[1] = bits_to_float(pair.y);
    }
    static __device__ void unpack(uint4 unit, float *to) {
        to[0] = bits_to_float(unit.x);
        to[1] = bits_to_float(unit.y);
        to[2] = bits_to_float(unit.z);
        to[3] = bits_to_float(unit.w);
    }
};

struct F16 {
    enum { PER_UNIT = 8, HAS_SCALES = 0 };
    typedef uint4 Unit;
    typedef uint32_t Pair;
    static __device__ void unpack_pair(Pair pair, float *to) {
        to[0] = half_to_float((uint16_t)pair);
        to[1] = half_to_float((uint16_t)(pair >> 16));
    }
    static __device__ void unpack(uint4 unit, float *to) {
        unpack_pair(unit.x, to);
        unpack_pair(unit.y, to + 2);
        unpack_pair(unit.z, to + 4);
        unpack_pair(unit.w, to + 6);
    }
};

struct Bf16 {
    enum { PER_UNIT = 8, HAS_SCALES = 0 };
    typedef uint4 Unit;
    typedef uint32_t Pair;
    static __device__ void unpack_pair(Pair pair, float *to) {
        to[0] = bits_to_float(pair << 16);
        to[1] = bits_to_float(pair & 0xffff0000u);
    }
    static __device__ void unpack(uint4 unit, float *to) {
        unpack_pair(unit.x, to);
        unpack_pair(unit.y, to + 2);
        unpack_pair(unit.z, to + 4);
        unpack_pair(unit.w, to + 6);
    }
};

// Codes in two's complement, which are multiplied by the scale of their head.
struct Int8 {
    enum { PER_UNIT = 8, HAS_SCALES = 1 };
    typedef uint2 Unit;
    typedef uint16_t Pair;
    // Code `index` of `codes`, whose highest bits were flipped. 128 more than the code are the low
    // bits of 2^23 and more, because GPUs convert integers slowly.
    static __device__ float code(uint32_t codes, uint32_t index) {
        return bits_to_float(0x4b000000u | (codes >> 8 * index & 0xff)) - 8388736.0f;
    }
    static __device__ void unpack_pair(Pair pair, float *to) {
        to[0] = code(pair ^ 0x8080u, 0);
        to[1] = code(pair ^ 0x8080u, 1);
    }
    static __device__ void unpack(Unit unit, float *to) {
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            to[i] = code(unit.x ^ 0x80808080u, i);
            to[i + 4] = code(unit.y ^ 0x80808080u, i);
        }
    }
};

// The first position that a query reads.
static __device__ uint32_t oldest(uint32_t context, uint32_t window) {
    return context > window ? context - window : 0;
}

// A part of one query: softmax over its scores, without the division by the sum.
//
// The grid is (parts, key heads * chunks of HEADS query heads), with THREADS threads. Parts that a
// window leaves out are not written.
template <typename Element>
static __device__ void attend_part(
    const float4 *q,             // [rows, heads, dim]
    const void *keys,            // [slots, kv_heads, dim]
    const void *values,          // [slots, kv_heads, dim]
    const float *key_scales,     // [slots, kv_heads] if the elements have scales
    const float *value_scales,   // [slots, kv_heads] if the elements have scales
    const uint32_t *tables,      // [rows, table_len]: the blocks of each row
    const uint32_t *contexts,    // [rows]: number of positions up to the row's own
    const uint32_t *part_rows,   // [parts]: the row of each part
    const uint32_t *part_starts, // [rows + 1]: the first part of each row
    float *partials,             // [parts, heads, dim + 2]: weighted values, largest score, sum
    uint32_t heads,
    uint32_t kv_heads,
    uint32_t dim, // a multiple of 8, at most DIM_MAX
    uint32_t block_size,
    uint32_t table_len,
    uint32_t window, // number of positions that a query reads, at least 1
    float scale,
    float softcap // 0 for none
) {
    typedef typename Element::Unit Unit;
    typedef typename Element::Pair Pair;
    __shared__ float4 queries[HEADS * DIM_MAX / 4];
    __shared__ float scores[HEADS * PART];
    __shared__ uint32_t slots[PART];
    __shared__ uint4 tile_memory[TILE_SIZE];
    __shared__ float reduced[2 * THREADS];

    uint32_t thread = threadIdx.x;
    uint32_t row = part_rows[blockIdx.x];
    uint32_t context = contexts[row];
    uint32_t part_start = (blockIdx.x - part_starts[row]) * PART;
    if (part_start >= context) {
        return; // padding
    }
    uint32_t read_from = oldest(context, window);
    // The positions of the part that are read, counted from the part's first.
    uint32_t first = read_from > part_start ? read_from - part_start : 0;
    uint32_t end = context - part_start < PART ? context - part_start : PART;
    if (first >= end) {
        return;
    }
    uint32_t per_kv_head = heads / kv_heads;
    uint32_t chunks = (per_kv_head + HEADS - 1) / HEADS;
    uint32_t kv_head = blockIdx.y / chunks;
    uint32_t chunk_start = blockIdx.y % chunks * HEADS;
    uint32_t count = per_kv_head - chunk_start < HEADS ? per_kv_head - chunk_start : HEADS;
    uint32_t first_head = kv_head * per_kv_head + chunk_start;

    const float4 *row_queries = q + ((uint64_t)row * heads + first_head) * dim / 4;
    for (uint32_t i = thread; i < count * dim / 4; i += THREADS) {
        queries[i] = row_queries[i];
    }
    const uint32_t *table = tables + (uint64_t)row * table_len;
    for (uint32_t i = first + thread; i < end; i += THREADS) {
        uint32_t position = part_start + i;
        slots[i] = table[position / block_size] * block_size + position % block_size;
    }

    // Scores. A row of the tile has a unit more than a key, so that threads which read one unit of
    // consecutive keys use different banks.
    Unit *tile = (Unit *)tile_memory;
    uint32_t units = dim / Element::PER_UNIT;
    uint32_t tile_keys = TILE_SIZE * sizeof(uint4) / sizeof(Unit) / (units + 1);
    tile_keys = tile_keys < 64 ? tile_keys : 64;
    for (uint32_t start = first; start < end; start += tile_keys) {
        uint32_t length = end - start < tile_keys ? end - start : tile_keys;
        __syncthreads();
        for (uint32_t i = thread; i < length * units; i += THREADS) {
            uint32_t key = i / units, unit = i % units;
            uint64_t head = (uint64_t)slots[start + key] * kv_heads + kv_head;
            tile[key * (units + 1) + unit] = ((const Unit *)keys)[head * units + unit];
        }
        __syncthreads();
        for (uint32_t i = thread; i < length * count; i += THREADS) {
            uint32_t key = i % length, head = i / length;
            const float4 *query = queries + head * dim / 4;
            float sum = 0;
            for (uint32_t unit = 0; unit < units; unit++) {
                float elements[Element::PER_UNIT];
                Element::unpack(tile[key * (units + 1) + unit], elements);
#pragma unroll
                for (int k = 0; k < Element::PER_UNIT; k += 4) {
                    float4 four = query[(unit * Element::PER_UNIT + k) / 4];
                    sum += elements[k] * four.x + elements[k + 1] * four.y;
                    sum += elements[k + 2] * four.z + elements[k + 3] * four.w;
                }
            }
            sum *= scale;
            if (Element::HAS_SCALES) {
                sum *= key_scales[(uint64_t)slots[start + key] * kv_heads + kv_head];
            }
            scores[head * PART + start + key] = softcap > 0 ? softcap * tanhf(sum / softcap) : sum;
        }
    }
    __syncthreads();

    // The largest score of each head, the weights, and their sum.
    uint32_t head = thread / REDUCERS, reducer = thread % REDUCERS;
    if (head < count) {
        float largest = -INFINITY;
        for (uint32_t i = first + reducer; i < end; i += REDUCERS) {
            largest = fmaxf(largest, scores[head * PART + i]);
        }
        reduced[thread] = largest;
    }
    __syncthreads();
    float largest = -INFINITY;
    if (head < count) {
        for (uint32_t i = 0; i < REDUCERS; i++) {
            largest = fmaxf(largest, reduced[head * REDUCERS + i]);
        }
        float sum = 0;
        for (uint32_t i = first + reducer; i < end; i += REDUCERS) {
            float weight = expf(scores[head * PART + i] - largest);
            scores[head * PART + i] = weight;
            sum += weight;
        }
        reduced[THREADS + thread] = sum;
    }
    __syncthreads();
    float *part = partials + ((uint64_t)blockIdx.x * heads + first_head) * (dim + 2);
    if (head < count && reducer == 0) {
        float sum = 0;
        for (uint32_t i = 0; i < REDUCERS; i++) {
            sum += reduced[THREADS + head * REDUCERS + i];
        }
        part[head * (dim + 2) + dim] = largest;
        part[head * (dim + 2) + dim + 1] = sum;
    }

    // The weighted values. Each thread has two elements, and groups of threads take turns in the
    // positions.
    uint32_t pairs = dim / 2, groups = THREADS / pairs;
    uint32_t group = thread / pairs, pair = thread % pairs;
    float *weighted = (float *)tile_memory; // [groups, HEADS, dim]
    if (group < groups) {
        float sums[HEADS][2] = {};
#pragma unroll 4
        for (uint32_t i = first + group; i < end; i += groups) {
            uint64_t value = (uint64_t)slots[i] * kv_heads + kv_head;
            float elements[2];
            Element::unpack_pair(((const Pair *)values)[value * pairs + pair], elements);
            if (Element::HAS_SCALES) {
                elements[0] *= value_scales[value];
                elements[1] *= value_scales[value];
            }
#pragma unroll
            for (uint32_t h = 0; h < HEADS; h++) {
                if (h < count) {
                    float weight = scores[h * PART + i];
                    sums[h][0] += weight * elements[0];
                    sums[h][1] += weight * elements[1];
                }
            }
        }
#pragma unroll
        for (uint32_t h = 0; h < HEADS; h++) {
            if (h < count) {
                float *to = weighted + (group * HEADS + h) * dim + 2 * pair;
                to[0] = sums[h][0];
                to[1] = sums[h][1];
            }
        }
    }
    __syncthreads();
    for (uint32_t i = thread; i < count * dim; i += THREADS) {
        float sum = 0;
        for (uint32_t g = 0; g < groups; g++) {
            sum += weighted[g * HEADS * dim + i];
        }
        part[i / dim * (dim + 2) + i % dim] = sum;
    }
}

#define ATTEND_PARTS(name, Element)                                                                \
    extern "C" __global__ void name(                                                               \
        const float4 *q, const void *keys, const void *values, const float *key_scales,            \
        const float *value_scales, const uint32_t *tables, const uint32_t *contexts,               \
        const uint32_t *part_rows, const uint32_t *part_starts, float *partials, uint32_t heads,   \
        uint32_t kv_heads, uint32_t dim, uint32_t block_size, uint32_t table_len, uint32_t window, \
        float scale, float softcap                                                                 \
    ) {                                                                                            \
        attend_part<Element>(                                                                      \
            q, keys, values, key_scales, value_scales, tables, contexts, part_rows, part_starts,   \
            partials, heads, kv_heads, dim, block_size, table_len, window, scale, softcap          \
        );                                                                                         \
    }

ATTEND_PARTS(attend_parts_f32, F32)
ATTEND_PARTS(attend_parts_f16, F16)
ATTEND_PARTS(attend_parts_bf16, Bf16)
ATTEND_PARTS(attend_parts_int8, Int8)

// Merges the parts of each query. The grid is (heads, rows), with any number of threads.
extern "C" __global__ void merge_parts(
    const float *partials,       // [parts, heads, dim + 2]
    const uint32_t *contexts,    // [rows]
    const uint32_t *part_starts, // [rows + 1]
    const float *sinks,          // [heads]: scores of positions without values; may be null
    float *output,               // [rows, heads, dim]
    uint32_t dim,
    uint32_t window
) {
    uint32_t head = blockIdx.x, heads = gridDim.x, row = blockIdx.y;
    uint32_t first = part_starts[row] + oldest(contexts[row], window) / PART;
    uint32_t end = part_starts[row + 1];
    uint64_t stride = (uint64_t)heads * (dim + 2);
    const float *parts = partials + head * (dim + 2);
    float largest = sinks ? sinks[head] : -INFINITY;
    for (uint32_t part = first; part < end; part++) {
        largest = fmaxf(largest, parts[part * stride + dim]);
    }
    float sum = sinks ? expf(sinks[head] - largest) : 0;
    for (uint32_t part = first; part < end; part++) {
        sum += parts[part * stride + dim + 1] * expf(parts[part * stride + dim] - largest);
    }
    for (uint32_t i = threadIdx.x; i < dim; i += blockDim.x) {
        float value = 0;
        for (uint32_t part = first; part < end; part++) {
            value += parts[part * stride + i] * expf(parts[part * stride + dim] - largest);
        }
        output[((uint64_t)row * heads + head) * dim + i] = value / sum;
    }
}
