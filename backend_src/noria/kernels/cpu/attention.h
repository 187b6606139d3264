// Causal grouped-query attention over a paged cache that is read in place, and the writes into that cache.
//
//   out[t, h] = sum_j softmax_j(q[t, h] . k[j, h'] / sqrt(head_dim)) v[j, h'],    h' = h / group
//
// A block of one layer, keys and values apart, is for each key-value head
//   keys    [head_dim][block_size]    so that one vector is the same component of eight positions
//   values  [block_size][head_dim]
// in float32, bfloat16, or int8 with a scale for each head and position, which then follow the numbers of all heads:
//   scales  [num_kv_heads][block_size] float32
// Keys are taken in chunks whose borders are fixed positions, so that a query's result does not depend on the queries
// computed beside it, nor on how its prompt was cut.
#pragma once

#include <cstddef>
#include <cstdint>

namespace noria {

enum class KVFormat : int32_t { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2 };

struct KVShape {
    KVFormat format;
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t block_size;

    size_t element_size() const {
        return format == KVFormat::kFloat32 ? sizeof(float) : format == KVFormat::kBFloat16 ? sizeof(uint16_t) : 1;
    }
    size_t head_numbers() const { return static_cast<size_t>(block_size) * head_dim; }
    size_t scales_offset() const { return num_kv_heads * head_numbers() * element_size(); }
    // bytes of a block's keys, or values, of one layer
    size_t block_bytes() const {
        return scales_offset() + (format == KVFormat::kInt8 ? num_kv_heads * block_size * sizeof(float) : 0);
    }
};

// One sequence's queries: tokens [query_start, query_start + num_queries) of the batch, the first at first_position.
// Positions [0, context_len) may be read; block_table holds their blocks.
struct AttentionRow {
    int32_t query_start;
    int32_t num_queries;
    int32_t first_position;
    int32_t context_len;
    const int32_t *block_table;
};

// Queries that one task computes for one key-value head: [first_query, first_query + num_queries) of a row.
struct QueryTile {
    int32_t row;
    int32_t first_query;
    int32_t num_queries;
};

struct AttentionShape {
    KVShape kv;
    int32_t num_heads;
    // positions that a query sees, its own included; 0 is all
    int32_t sliding_window;

    int group() const { return num_heads / kv.num_kv_heads; }
    // so many queries of all heads of a group fill the tiles well and stay in the cache next to the processor
    int tile_queries() const { return group() >= 24 ? 1 : 24 / group(); }
    // floats that `attend` needs
    size_t scratch_size() const;
};

// slot: block * block_size + offset. key, value [num_kv_heads][head_dim].
void write_kv(const KVShape &shape, char *keys, char *values, int64_t slot, const float *key, const float *value);

// What one thread computes at a time.
struct AttentionTask {
    const AttentionRow &row;
    const QueryTile &tile;
    int kv_head;
};

// q and out: of the row's first token; strides in floats. Queries that see no position get zeros. next: the task that this
// thread most likely has next, whose first keys are fetched; null for none.
void attend(const AttentionShape &shape, const AttentionTask &task, const AttentionTask *next, const char *keys,
            const char *values, const float *q, size_t q_stride, float *out, size_t out_stride, float *scratch);

}  // namespace noria
