#include "attention.h"

#include <algorithm>
#include <cstring>

#include "simd.h"

namespace noria {
namespace {

constexpr int kChunk = 128;

#define EACH_VECTOR _Pragma("GCC unroll 4") for (int v = 0; v < NV; ++v)

struct Float32 {
    using Number = float;
    template <class V> static typename V::Floats load(const float *x) { return V::load(x); }
};

struct BFloat16 {
    using Number = uint16_t;
    template <class V> static typename V::Floats load(const uint16_t *x) { return V::load_bfloat16(x); }
};

struct Int8 {
    using Number = int8_t;
    template <class V> static typename V::Floats load(const int8_t *x) { return V::load_int8(x); }
};

template <class Format> constexpr bool kHasScales = sizeof(typename Format::Number) == 1;

uint16_t to_bfloat16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return 0x7fc0;
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Positions [begin, end) of a sequence that the queries of a tile see, and where they lie.
struct Chunk {
    int start, begin, end;
    // the part that all queries of the tile see
    int all_begin, all_end;
};

// Where a block's numbers are read, and how many bytes from there those lie that are fetched meanwhile: a block's numbers of
// one head are too short a run for the processor to see coming. One fetch comes with each read, since the processor drops most
// of them when many come at once. Values are fetched while the scores of their positions are computed, and while values are
// summed up, the next chunk's keys, or else the next task's first.
template <class Number> struct Source {
    const Number *numbers;
    ptrdiff_t ahead;

    void fetch(ptrdiff_t offset) const { _mm_prefetch(reinterpret_cast<const char *>(numbers + offset) + ahead, _MM_HINT_T1); }
};

// The blocks of a sequence, for one key-value head.
struct HeadBlocks {
    const KVShape &shape;
    const int32_t *table;
    int kv_head;
    int shift; // 2^shift is the block size; -1 where it is no power of 2, and positions must be divided by it

    struct Place {
        int block, offset;
    };
    Place place(int position) const {
        if (shift < 0) return {position / shape.block_size, position % shape.block_size};
        return {position >> shift, position & (shape.block_size - 1)};
    }
    const char *at(const char *cache, int position) const {
        const char *block = cache + table[place(position).block] * shape.block_bytes();
        return block + kv_head * shape.head_numbers() * shape.element_size();
    }
    const float *scales(const char *cache, int position) const {
        const auto [index, offset] = place(position);
        const char *block = cache + table[index] * shape.block_bytes();
        return reinterpret_cast<const float *>(block + shape.scales_offset()) + kv_head * shape.block_size + offset;
    }
};

// Positions [begin, end) that a task reads first.
struct Beginning {
    HeadBlocks blocks;
    int begin, end;
};

// What a tile needs while it goes over the chunks; rows are the queries of all heads of the group.
struct Work {
    const KVShape &shape;
    HeadBlocks blocks;
    const char *keys, *values;
    int num_rows;
    float *q;        // [rows][head_dim], scaled
    float *out;      // [rows][head_dim]
    float *weights;  // [rows][kChunk]: scores, then what values are weighted by
    float *largest;  // [rows]
    float *total;    // [rows]
    int end;         // of all that the tile sees
    const Beginning *next; // of the task after this one, or null

    // The keys of a block, beside its values.
    template <class Number> Source<Number> key_source(int position) const {
        const auto *numbers = reinterpret_cast<const Number *>(blocks.at(keys, position)) + blocks.place(position).offset;
        return {numbers, values - keys};
    }
    // Values from a position of the chunk on, beside the keys that come after those of the chunk.
    template <class Number> Source<Number> value_source(int position, int chunk_start) const {
        const char *block = blocks.at(values, position);
        const char *later = block;
        if (position + kChunk < end) {
            later = blocks.at(keys, position + kChunk);
        } else if (next && next->begin + position - chunk_start < next->end) {
            later = next->blocks.at(keys, next->begin + position - chunk_start);
        }
        return {reinterpret_cast<const Number *>(block) + blocks.place(position).offset * shape.head_dim, later - block};
    }
};

// Rows of a tile, and vectors whose sums MR rows can keep in registers, beside the factors: of 16, or of 32 with AVX-512.
constexpr int kTileRows = 6;
template <class V, int MR> constexpr int kVectors = V::kCount == 16 || MR <= 3 ? 4 : 2;

// add(m, v, factor of row m, vector v) for each row and each vector that all rows share: a row's factor stays while two
// vectors wait for it, or else a vector while the rows' factors do. GCC would keep all of both, and run out of registers.
template <class V, int MR, int NV, class Factor, class Vector, class Add>
inline __attribute__((always_inline)) void for_each_product(Factor factor, Vector vector, Add add) {
    if constexpr (NV == 2) {
        const auto first = vector(0), second = vector(1);
        EACH_ROW {
            const auto a = factor(m);
            add(m, 0, a, first);
            add(m, 1, a, second);
        }
    } else {
        typename V::Floats a[MR];
        EACH_ROW a[m] = factor(m);
        EACH_VECTOR {
            const auto x = vector(v);
            EACH_ROW add(m, v, a[m], x);
        }
    }
}

// Scores of MR rows for NP parts, each NB vectors of positions that lie side by side. keys[part]: the first component of its
// first position.
template <class Format, class V, int MR, int NP, int NB>
ON_ITS_OWN void score(const Source<typename Format::Number> *keys, int key_stride, const float *q, int head_dim,
                      float *scores) {
    constexpr int NV = NP * NB;
    Source<typename Format::Number> part[NP];
    for (int i = 0; i < NP; ++i) part[i] = keys[i];
    typename V::Floats sums[MR][NV];
    EACH_ROW EACH_VECTOR sums[m][v] = V::all(0);
    for (ptrdiff_t d = 0, offset = 0; d < head_dim; ++d, offset += key_stride) {
        _Pragma("GCC unroll 4") for (int i = 0; i < NP; ++i) part[i].fetch(offset);
        for_each_product<V, MR, NV>(
            [&](int m) { return V::all(q[m * head_dim + d]); },
            [&](int v) { return Format::template load<V>(part[v / NB].numbers + offset + V::kCount * (v % NB)); },
            [&](int m, int v, auto a, auto k) { sums[m][v] = V::multiply_add(a, k, sums[m][v]); });
    }
    EACH_ROW EACH_VECTOR V::store(scores + m * kChunk + V::kCount * v, sums[m][v]);
}

template <class Format, class V, int NB> void score_chunk(const Work &work, const Chunk &chunk) {
    using Number = typename Format::Number;
    constexpr int size = V::kCount * NB;
    const int head_dim = work.shape.head_dim, block_size = work.shape.block_size;
    for (int position = chunk.begin / size * size; position < chunk.end;) {
        Source<Number> parts[4];
        const int num_parts = std::min((chunk.end - position + size - 1) / size, 4 / NB);
        for (int i = 0, p = position; i < num_parts; ++i, p += size) parts[i] = work.key_source<Number>(p);
        for_each_tile<kTileRows>(0, work.num_rows, [&](int row, auto num_rows) {
            const float *q = work.q + row * head_dim;
            float *scores = work.weights + row * kChunk + position - chunk.start;
            int i = 0;
            const auto score_parts = [&](auto count) {
                constexpr int NP = count;
                if constexpr (NP * NB <= kVectors<V, num_rows>) {
                    for (; i + NP <= num_parts; i += NP)
                        score<Format, V, num_rows, NP, NB>(parts + i, block_size, q, head_dim, scores + i * size);
                }
            };
            score_parts(std::integral_constant<int, 4>());
            score_parts(std::integral_constant<int, 2>());
            score_parts(std::integral_constant<int, 1>());
        });
        position += num_parts * size;
    }
}

// The weight of a position that a query does not see. One that it sees may be 0 too, where NaN and inf must still show: else
// it would depend on the tile, and so on how a prompt was cut, whether they do.
constexpr float kUnseen = -0.0f;

template <class V> typename V::Mask is_unseen(typename V::Floats weight) { return V::has_bits(weight, V::all(kUnseen)); }

// Int8: multiplies what belongs to the chunk's positions by their scales. kAreWeights: kUnseen stays beside a scale of NaN.
template <bool kAreWeights> void apply_scales(const Work &work, const char *cache, const Chunk &chunk) {
    // a block may be of eight positions, and so may a run of scales
    using V = Lanes8;
    for (int position = chunk.begin / V::kCount * V::kCount; position < chunk.end; position += V::kCount) {
        const auto scales = V::load(work.blocks.scales(cache, position));
        for (int row = 0; row < work.num_rows; ++row) {
            float *numbers = work.weights + row * kChunk + position - chunk.start;
            const auto number = V::load(numbers);
            auto product = V::multiply(number, scales);
            if (kAreWeights) product = V::choose(is_unseen<V>(number), number, product);
            V::store(numbers, product);
        }
    }
}

bool has_nan(const float *x, int count) {
    return std::any_of(x, x + count, [](float value) { return value != value; });
}

// One step of the online softmax of a row that sees positions [begin, end): scores become weights, what was summed up
// before is brought to the new maximum.
void weigh(const Work &work, int row, const Chunk &chunk, int begin, int end) {
    using V = Widest;
    constexpr int count = V::kCount;
    float *weights = work.weights + row * kChunk;
    const int first = chunk.begin / count * count - chunk.start, last = (chunk.end + count - 1) / count * count - chunk.start;
    const auto hide = [&](float value) {
        // with a sliding window a later query of the tile may see nothing of this chunk
        std::fill(weights + first, weights + std::max(first, std::min(last, begin - chunk.start)), value);
        std::fill(weights + std::min(last, std::max(first, end - chunk.start)), weights + last, value);
    };
    hide(-INFINITY);
    auto top = V::all(work.largest[row]);
    for (int i = first; i < last; i += count) top = V::larger(top, V::load(weights + i));
    const float largest = maximum(top);
    // a maximum may pass over NaN, which shows in the sum of the weights; where no other score is there is none
    if (largest == -INFINITY && !has_nan(weights + first, last - first)) {
        std::fill(weights + first, weights + last, 0.0f);
        hide(kUnseen);
        return;
    }
    F8 total = _mm256_setzero_ps();
    for (int i = first; i < last; i += count) {
        const auto weight = exponential_up_to_0<V>(V::subtract(V::load(weights + i), V::all(largest)));
        V::store(weights + i, weight);
        total = V::add_to(total, weight);
    }
    hide(kUnseen);
    if (largest != work.largest[row]) {
        const float factor = _mm256_cvtss_f32(exponential<Lanes8>(_mm256_set1_ps(work.largest[row] - largest)));
        work.total[row] *= factor;
        float *out = work.out + row * work.shape.head_dim;
        for (int d = 0; d < work.shape.head_dim; d += 8)
            _mm256_storeu_ps(out + d, _mm256_mul_ps(_mm256_loadu_ps(out + d), _mm256_set1_ps(factor)));
        work.largest[row] = largest;
    }
    work.total[row] += sum(total);
}

// `count` values of a chunk, from its position `first` on, that lie one after the other in memory. is_masked: not all queries
// see them, and what one does not see must not reach it, as 0 times NaN would.
template <class Number> struct Run {
    Source<Number> values;
    int first, count;
    bool is_masked;
};

// Adds weighted values to NV vectors of components of MR rows.
template <class Format, class V, int MR, int NV>
ON_ITS_OWN void add_runs(const Run<typename Format::Number> *runs, int num_runs, int component, int head_dim,
                         const float *weights, float *out) {
    constexpr int numbers_per_line = 64 / sizeof(typename Format::Number);
    typename V::Floats sums[MR][NV];
    EACH_ROW EACH_VECTOR sums[m][v] = V::load(out + m * head_dim + V::kCount * v);
    for (const auto *run = runs; run < runs + num_runs; ++run) {
        auto value = run->values;
        value.numbers += component;
        const auto add = [&](auto is_masked) {
            const float *weight_of = weights + run->first;
            for (int index = 0; index < run->count; ++index, ++weight_of, value.numbers += head_dim) {
                for (int number = 0; number < V::kCount * NV; number += numbers_per_line) value.fetch(number);
                for_each_product<V, MR, NV>(
                    [&](int m) { return V::all(weight_of[m * kChunk]); },
                    [&](int v) { return Format::template load<V>(value.numbers + V::kCount * v); },
                    [&](int m, int v, auto weight, auto x) {
                        const auto seen = is_masked ? V::zero_where(is_unseen<V>(weight), x) : x;
                        sums[m][v] = V::multiply_add(weight, seen, sums[m][v]);
                    });
            }
        };
        run->is_masked ? add(std::true_type()) : add(std::false_type());
    }
    EACH_ROW EACH_VECTOR V::store(out + m * head_dim + V::kCount * v, sums[m][v]);
}

template <class Format> void add_chunk(const Work &work, const Chunk &chunk) {
    using Number = typename Format::Number;
    const int head_dim = work.shape.head_dim, block_size = work.shape.block_size;
    // one for each block, and one more where the part that all see begins and where it ends
    Run<Number> runs[kChunk / 8 + 2];
    int num_runs = 0;
    for (int position = chunk.begin; position < chunk.end;) {
        const int offset = work.blocks.place(position).offset;
        int end = std::min(chunk.end, position + block_size - offset);
        const bool is_seen_by_all = position >= chunk.all_begin && position < chunk.all_end;
        if (position < chunk.all_begin) end = std::min(end, chunk.all_begin);
        if (is_seen_by_all) end = std::min(end, chunk.all_end);
        const auto source = work.value_source<Number>(position, chunk.start);
        runs[num_runs++] = {source, position - chunk.start, end - position, !is_seen_by_all};
        position = end;
    }
    for_each_tile<kTileRows>(0, work.num_rows, [&](int row, auto num_rows) {
        float *out = work.out + row * head_dim;
        const float *weights = work.weights + row * kChunk;
        int component = 0;
        const auto add_components = [&](auto lanes, auto num_vectors) {
            using V = decltype(lanes);
            constexpr int size = V::kCount * num_vectors;
            for (; component + size <= head_dim; component += size)
                add_runs<Format, V, num_rows, num_vectors>(runs, num_runs, component, head_dim, weights, out + component);
        };
        add_components(Widest(), std::integral_constant<int, kVectors<Widest, num_rows>>());
        if (Widest::kCount > 8) add_components(Widest(), std::integral_constant<int, 1>());
        add_components(Lanes8(), std::integral_constant<int, 1>());
    });
}

// What of [0, position] a query at `position` sees.
struct Span {
    int begin, end;
};

Span visible(const AttentionShape &shape, const AttentionRow &row, int position) {
    const int end = std::min(position + 1, row.context_len);
    const int begin = shape.sliding_window ? std::max(0, position - shape.sliding_window + 1) : 0;
    return {std::min(begin, end), end};
}

Beginning beginning(const AttentionShape &shape, const AttentionTask &task) {
    const int size = shape.kv.block_size, shift = size & (size - 1) ? -1 : __builtin_ctz(size);
    const int position = task.row.first_position + task.tile.first_query;
    return {{shape.kv, task.row.block_table, task.kv_head, shift},
            visible(shape, task.row, position).begin / kChunk * kChunk,
            visible(shape, task.row, position + task.tile.num_queries - 1).end};
}

template <class Format>
void attend_as(const AttentionShape &shape, const AttentionRow &row, const QueryTile &tile, const Work &work) {
    const int position = row.first_position + tile.first_query;
    const int begin = visible(shape, row, position).begin;
    const int all_begin = visible(shape, row, position + tile.num_queries - 1).begin;
    const int all_end = visible(shape, row, position).end;
    for (int start = begin / kChunk * kChunk; start < work.end; start += kChunk) {
        const Chunk chunk{start, std::max(begin, start), std::min(work.end, start + kChunk), all_begin, all_end};
        shape.kv.block_size % 16 == 0 ? score_chunk<Format, Widest, 16 / Widest::kCount>(work, chunk)
                                      : score_chunk<Format, Lanes8, 1>(work, chunk);
        if (kHasScales<Format>) apply_scales<false>(work, work.keys, chunk);
        for (int index = 0; index < work.num_rows; ++index) {
            const Span span = visible(shape, row, position + index / shape.group());
            weigh(work, index, chunk, span.begin, span.end);
        }
        if (kHasScales<Format>) apply_scales<true>(work, work.values, chunk);
        add_chunk<Format>(work, chunk);
    }
}

template <class Number> void spread(const float *key, const float *value, const KVShape &shape, char *keys, char *values,
                                    int offset, Number (*convert)(float)) {
    auto *k = reinterpret_cast<Number *>(keys) + offset;
    auto *v = reinterpret_cast<Number *>(values) + offset * shape.head_dim;
    for (int d = 0; d < shape.head_dim; ++d) {
        k[d * shape.block_size] = convert(key[d]);
        v[d] = convert(value[d]);
    }
}

// The scale of x [count], of which `rounded` gets the whole numbers; NaN where x has one.
float round_head(const float *x, int count, int8_t *rounded, int stride) {
    const auto [top, is_finite] = range(x, count);
    if (!is_finite) return NAN;
    const float inverse = 127 / top;
    const bool is_zero = !std::isfinite(inverse);
    for (int d = 0; d < count; ++d) rounded[d * stride] = is_zero ? 0 : static_cast<int8_t>(std::lrintf(x[d] * inverse));
    return is_zero ? 0 : top / 127;
}

}  // namespace

size_t AttentionShape::scratch_size() const {
    const size_t num_rows = static_cast<size_t>(tile_queries()) * group();
    return num_rows * (2 * kv.head_dim + kChunk + 2);
}

void write_kv(const KVShape &shape, char *keys, char *values, int64_t slot, const float *key, const float *value) {
    const int64_t block = slot / shape.block_size;
    const int offset = static_cast<int>(slot % shape.block_size);
    char *key_block = keys + block * shape.block_bytes(), *value_block = values + block * shape.block_bytes();
    auto *key_scales = reinterpret_cast<float *>(key_block + shape.scales_offset()) + offset;
    auto *value_scales = reinterpret_cast<float *>(value_block + shape.scales_offset()) + offset;
    for (int head = 0; head < shape.num_kv_heads; ++head, key += shape.head_dim, value += shape.head_dim) {
        char *k = key_block + head * shape.head_numbers() * shape.element_size();
        char *v = value_block + head * shape.head_numbers() * shape.element_size();
        switch (shape.format) {
        case KVFormat::kFloat32: spread<float>(key, value, shape, k, v, offset, [](float x) { return x; }); break;
        case KVFormat::kBFloat16: spread<uint16_t>(key, value, shape, k, v, offset, to_bfloat16); break;
        case KVFormat::kInt8:
            key_scales[head * shape.block_size] =
                round_head(key, shape.head_dim, reinterpret_cast<int8_t *>(k) + offset, shape.block_size);
            value_scales[head * shape.block_size] =
                round_head(value, shape.head_dim, reinterpret_cast<int8_t *>(v) + offset * shape.head_dim, 1);
        }
    }
}

void attend(const AttentionShape &shape, const AttentionTask &task, const AttentionTask *next, const char *keys,
            const char *values, const float *q, size_t q_stride, float *out, size_t out_stride, float *scratch) {
    const auto &[row, tile, kv_head] = task;
    const int head_dim = shape.kv.head_dim, group = shape.group(), num_rows = tile.num_queries * group;
    float *scaled = scratch, *sums = scaled + num_rows * head_dim, *weights = sums + num_rows * head_dim;
    float *largest = weights + num_rows * kChunk, *total = largest + num_rows;
    const float scale = 1 / std::sqrt(static_cast<float>(head_dim));
    for (int index = 0; index < num_rows; ++index) {
        const float *query = q + (tile.first_query + index / group) * q_stride + (kv_head * group + index % group) * head_dim;
        for (int d = 0; d < head_dim; ++d) scaled[index * head_dim + d] = query[d] * scale;
        largest[index] = -INFINITY;
        total[index] = 0;
    }
    memset(sums, 0, num_rows * head_dim * sizeof(float));
    const Beginning own = beginning(shape, task);
    const Beginning after = next ? beginning(shape, *next) : own;
    const Work work{shape.kv, own.blocks, keys,    values, num_rows, scaled,
                    sums,     weights,    largest, total,  own.end,  next ? &after : nullptr};
    switch (shape.kv.format) {
    case KVFormat::kFloat32: attend_as<Float32>(shape, task.row, task.tile, work); break;
    case KVFormat::kBFloat16: attend_as<BFloat16>(shape, task.row, task.tile, work); break;
    case KVFormat::kInt8: attend_as<Int8>(shape, task.row, task.tile, work);
    }
    for (int index = 0; index < num_rows; ++index) {
        float *target = out + (tile.first_query + index / group) * out_stride + (kv_head * group + index % group) * head_dim;
        const float inverse = total[index] == 0 ? 0 : 1 / total[index];
        for (int d = 0; d < head_dim; ++d) target[d] = sums[index * head_dim + d] * inverse;
    }
}

}  // namespace noria
