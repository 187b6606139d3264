#include "attention.h"

#include <algorithm>
#include <cstring>

#include "simd.h"

namespace noria {
namespace {

constexpr int kChunk = 128;
// Positions between the keys or values that are read and those that are fetched meanwhile, or a block, where that is more: a
// block's numbers of one head are too short a run for the processor to see coming. One fetch comes with each read, since
// the processor drops most of them when many come at once.
constexpr int kAhead = 32;

#define EACH_VECTOR _Pragma("GCC unroll 4") for (int v = 0; v < NV; ++v)

struct Float32 {
    using Number = float;
    static F8 load(const float *x) { return _mm256_loadu_ps(x); }
};

struct BFloat16 {
    using Number = uint16_t;
    static F8 load(const uint16_t *x) {
        const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(x)));
        return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
    }
};

struct Int8 {
    using Number = int8_t;
    static F8 load(const int8_t *x) {
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(x))));
    }
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

// Where a block's numbers are read, and how many bytes further those lie that are fetched.
template <class Number> struct Source {
    const Number *numbers;
    ptrdiff_t ahead;

    void fetch(ptrdiff_t offset) const { _mm_prefetch(reinterpret_cast<const char *>(numbers + offset) + ahead, _MM_HINT_T0); }
};

// What a tile needs while it goes over the chunks; rows are the queries of all heads of the group.
struct Work {
    const KVShape &shape;
    const int32_t *block_table;
    int kv_head, num_rows;
    float *q;        // [rows][head_dim], scaled
    float *out;      // [rows][head_dim]
    float *weights;  // [rows][kChunk]: scores, then what values are weighted by
    float *largest;  // [rows]
    float *total;    // [rows]
    int end;         // of all that the tile sees
    int block_shift; // 2^block_shift is the block size; -1 where it is no power of 2, and positions must be divided by it

    struct Place {
        int block, offset;
    };
    Place place(int position) const {
        if (block_shift < 0) return {position / shape.block_size, position % shape.block_size};
        return {position >> block_shift, position & (shape.block_size - 1)};
    }
    const char *head(const char *cache, int position) const {
        return cache + block_table[place(position).block] * shape.block_bytes() +
               kv_head * shape.head_numbers() * shape.element_size();
    }
    // The number at `index` of the block that holds `position`.
    template <class Number> Source<Number> source(const char *cache, int position, int index) const {
        const char *block = head(cache, position);
        const int later = position + std::max(kAhead, shape.block_size);
        const ptrdiff_t ahead = later < end ? head(cache, later) - block : 0;
        return {reinterpret_cast<const Number *>(block) + index, ahead};
    }
    const float *scales(const char *cache, int position) const {
        const auto [index, offset] = place(position);
        const char *block = cache + block_table[index] * shape.block_bytes();
        return reinterpret_cast<const float *>(block + shape.scales_offset()) + kv_head * shape.block_size + offset;
    }
};

// Rows of a tile, and vectors whose sums MR rows can keep in registers, beside the factors.
constexpr int kTileRows = 6;
template <int MR> constexpr int kVectors = MR <= 3 ? 4 : 2;

// add(m, v, factor of row m, vector v) for each row and each vector that all rows share: a row's factor stays while two
// vectors wait for it, or else a vector while the rows' factors do. GCC would keep all of both, and run out of registers.
template <int MR, int NV, class Factor, class Vector, class Add>
inline __attribute__((always_inline)) void for_each_product(Factor factor, Vector vector, Add add) {
    if constexpr (NV == 2) {
        const F8 first = vector(0), second = vector(1);
        EACH_ROW {
            const F8 a = factor(m);
            add(m, 0, a, first);
            add(m, 1, a, second);
        }
    } else {
        F8 a[MR];
        EACH_ROW a[m] = factor(m);
        EACH_VECTOR {
            const F8 x = vector(v);
            EACH_ROW add(m, v, a[m], x);
        }
    }
}

// Scores of MR rows for 8 NV positions. keys[0]: the first component of the first 16 (8 where NV is 1); keys[1], where NV
// is 4: of the next 16.
template <class Format, int MR, int NV>
ON_ITS_OWN void score(const Source<typename Format::Number> *keys, int key_stride, const float *q, int head_dim,
                      float *scores) {
    const auto first = keys[0], second = keys[NV / 4];
    F8 sums[MR][NV];
    EACH_ROW EACH_VECTOR sums[m][v] = _mm256_setzero_ps();
    for (ptrdiff_t d = 0, offset = 0; d < head_dim; ++d, offset += key_stride) {
        first.fetch(offset);
        if (NV == 4) second.fetch(offset);
        for_each_product<MR, NV>(
            [&](int m) { return _mm256_broadcast_ss(q + m * head_dim + d); },
            [&](int v) { return Format::load(v < 2 ? first.numbers + offset + 8 * v : second.numbers + offset + 8 * (v - 2)); },
            [&](int m, int v, F8 a, F8 k) { sums[m][v] = _mm256_fmadd_ps(a, k, sums[m][v]); });
    }
    EACH_ROW EACH_VECTOR _mm256_storeu_ps(scores + m * kChunk + 8 * v, sums[m][v]);
}

// NV: vectors that lie side by side in a block: 2, or 1 where blocks are not of whole 16 positions.
template <class Format, int NV> void score_chunk(const Work &work, const char *keys, const Chunk &chunk) {
    using Number = typename Format::Number;
    constexpr int part = 8 * NV;
    const int head_dim = work.shape.head_dim, block_size = work.shape.block_size;
    for (int position = chunk.begin / part * part; position < chunk.end;) {
        const int num_parts = NV == 2 && position + part < chunk.end ? 2 : 1;
        Source<Number> parts[2];
        for (int i = 0, p = position; i < num_parts; ++i, p += part) parts[i] = work.source<Number>(keys, p, work.place(p).offset);
        for_each_tile<kTileRows>(0, work.num_rows, [&](int row, auto num_rows) {
            const float *q = work.q + row * head_dim;
            float *scores = work.weights + row * kChunk + position - chunk.start;
            if constexpr (2 * NV == kVectors<num_rows>) {
                if (num_parts == 2) return score<Format, num_rows, 4>(parts, block_size, q, head_dim, scores);
            }
            for (int i = 0; i < num_parts; ++i)
                score<Format, num_rows, NV>(parts + i, block_size, q, head_dim, scores + i * part);
        });
        position += num_parts * part;
    }
}

// The weight of a position that a query does not see. One that it sees may be 0 too, where NaN and inf must still show: else
// it would depend on the tile, and so on how a prompt was cut, whether they do.
constexpr float kUnseen = -0.0f;

inline F8 is_unseen(F8 weight) {
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_castps_si256(weight), _mm256_castps_si256(_mm256_set1_ps(kUnseen))));
}

// Int8: multiplies what belongs to the chunk's positions by their scales. kAreWeights: kUnseen stays beside a scale of NaN.
template <bool kAreWeights> void apply_scales(const Work &work, const char *cache, const Chunk &chunk) {
    for (int position = chunk.begin / 8 * 8; position < chunk.end; position += 8) {
        const F8 scales = _mm256_loadu_ps(work.scales(cache, position));
        for (int row = 0; row < work.num_rows; ++row) {
            float *numbers = work.weights + row * kChunk + position - chunk.start;
            const F8 number = _mm256_loadu_ps(numbers);
            F8 product = _mm256_mul_ps(number, scales);
            if (kAreWeights) product = _mm256_blendv_ps(product, number, is_unseen(number));
            _mm256_storeu_ps(numbers, product);
        }
    }
}

bool has_nan(const float *x, int count) {
    return std::any_of(x, x + count, [](float value) { return value != value; });
}

// One step of the online softmax of a row that sees positions [begin, end): scores become weights, what was summed up
// before is brought to the new maximum.
void weigh(const Work &work, int row, const Chunk &chunk, int begin, int end) {
    float *weights = work.weights + row * kChunk;
    const int first = chunk.begin / 8 * 8 - chunk.start, last = (chunk.end + 7) / 8 * 8 - chunk.start;
    const auto hide = [&](float value) {
        // with a sliding window a later query of the tile may see nothing of this chunk
        std::fill(weights + first, weights + std::max(first, std::min(last, begin - chunk.start)), value);
        std::fill(weights + std::min(last, std::max(first, end - chunk.start)), weights + last, value);
    };
    hide(-INFINITY);
    F8 top = _mm256_set1_ps(work.largest[row]);
    for (int i = first; i < last; i += 8) top = _mm256_max_ps(top, _mm256_loadu_ps(weights + i));
    const float largest = maximum(top);
    // a maximum may pass over NaN, which shows in the sum of the weights; where no other score is there is none
    if (largest == -INFINITY && !has_nan(weights + first, last - first)) {
        std::fill(weights + first, weights + last, 0.0f);
        hide(kUnseen);
        return;
    }
    F8 total = _mm256_setzero_ps();
    for (int i = first; i < last; i += 8) {
        const F8 weight = exponential_up_to_0(_mm256_sub_ps(_mm256_loadu_ps(weights + i), _mm256_set1_ps(largest)));
        _mm256_storeu_ps(weights + i, weight);
        total = _mm256_add_ps(total, weight);
    }
    hide(kUnseen);
    if (largest != work.largest[row]) {
        const float factor = _mm256_cvtss_f32(exponential(_mm256_set1_ps(work.largest[row] - largest)));
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

// Adds weighted values to 8 NV components of MR rows.
template <class Format, int MR, int NV>
ON_ITS_OWN void add_runs(const Run<typename Format::Number> *runs, int num_runs, int component, int head_dim,
                         const float *weights, float *out) {
    F8 sums[MR][NV];
    EACH_ROW EACH_VECTOR sums[m][v] = _mm256_loadu_ps(out + m * head_dim + 8 * v);
    for (const auto *run = runs; run < runs + num_runs; ++run) {
        auto value = run->values;
        value.numbers += component;
        const auto add = [&](auto is_masked) {
            const float *weight_of = weights + run->first;
            for (int index = 0; index < run->count; ++index, ++weight_of, value.numbers += head_dim) {
                for (size_t byte = 0; byte < 8 * NV * sizeof(typename Format::Number); byte += 64)
                    value.fetch(byte / sizeof(typename Format::Number));
                for_each_product<MR, NV>(
                    [&](int m) { return _mm256_broadcast_ss(weight_of + m * kChunk); },
                    [&](int v) { return Format::load(value.numbers + 8 * v); },
                    [&](int m, int v, F8 weight, F8 x) {
                        const F8 seen = is_masked ? _mm256_andnot_ps(is_unseen(weight), x) : x;
                        sums[m][v] = _mm256_fmadd_ps(weight, seen, sums[m][v]);
                    });
            }
        };
        run->is_masked ? add(std::true_type()) : add(std::false_type());
    }
    EACH_ROW EACH_VECTOR _mm256_storeu_ps(out + m * head_dim + 8 * v, sums[m][v]);
}

template <class Format> void add_chunk(const Work &work, const char *values, const Chunk &chunk) {
    using Number = typename Format::Number;
    const int head_dim = work.shape.head_dim, block_size = work.shape.block_size;
    // one for each block, and one more where the part that all see begins and where it ends
    Run<Number> runs[kChunk / 8 + 2];
    int num_runs = 0;
    for (int position = chunk.begin; position < chunk.end;) {
        const int offset = work.place(position).offset;
        int end = std::min(chunk.end, position + block_size - offset);
        const bool is_seen_by_all = position >= chunk.all_begin && position < chunk.all_end;
        if (position < chunk.all_begin) end = std::min(end, chunk.all_begin);
        if (is_seen_by_all) end = std::min(end, chunk.all_end);
        const auto source = work.source<Number>(values, position, offset * head_dim);
        runs[num_runs++] = {source, position - chunk.start, end - position, !is_seen_by_all};
        position = end;
    }
    for_each_tile<kTileRows>(0, work.num_rows, [&](int row, auto num_rows) {
        constexpr int kWide = kVectors<num_rows>;
        float *out = work.out + row * head_dim;
        const float *weights = work.weights + row * kChunk;
        int component = 0;
        for (; component + 8 * kWide <= head_dim; component += 8 * kWide)
            add_runs<Format, num_rows, kWide>(runs, num_runs, component, head_dim, weights, out + component);
        for (; component < head_dim; component += 8)
            add_runs<Format, num_rows, 1>(runs, num_runs, component, head_dim, weights, out + component);
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

template <class Format>
void attend_as(const AttentionShape &shape, const AttentionRow &row, const QueryTile &tile, const Work &work,
               const char *keys, const char *values) {
    const int position = row.first_position + tile.first_query;
    const int begin = visible(shape, row, position).begin;
    const int all_begin = visible(shape, row, position + tile.num_queries - 1).begin;
    const int all_end = visible(shape, row, position).end;
    for (int start = begin / kChunk * kChunk; start < work.end; start += kChunk) {
        const Chunk chunk{start, std::max(begin, start), std::min(work.end, start + kChunk), all_begin, all_end};
        shape.kv.block_size % 16 == 0 ? score_chunk<Format, 2>(work, keys, chunk)
                                      : score_chunk<Format, 1>(work, keys, chunk);
        if (kHasScales<Format>) apply_scales<false>(work, keys, chunk);
        for (int index = 0; index < work.num_rows; ++index) {
            const Span span = visible(shape, row, position + index / shape.group());
            weigh(work, index, chunk, span.begin, span.end);
        }
        if (kHasScales<Format>) apply_scales<true>(work, values, chunk);
        add_chunk<Format>(work, values, chunk);
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

void attend(const AttentionShape &shape, const AttentionRow &row, const QueryTile &tile, int kv_head, const char *keys,
            const char *values, const float *q, size_t q_stride, float *out, size_t out_stride, float *scratch) {
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
    const int end = visible(shape, row, row.first_position + tile.first_query + tile.num_queries - 1).end;
    const int size = shape.kv.block_size, block_shift = size & (size - 1) ? -1 : __builtin_ctz(size);
    const Work work{shape.kv, row.block_table, kv_head, num_rows, scaled, sums, weights, largest, total, end, block_shift};
    switch (shape.kv.format) {
    case KVFormat::kFloat32: attend_as<Float32>(shape, row, tile, work, keys, values); break;
    case KVFormat::kBFloat16: attend_as<BFloat16>(shape, row, tile, work, keys, values); break;
    case KVFormat::kInt8: attend_as<Int8>(shape, row, tile, work, keys, values);
    }
    for (int index = 0; index < num_rows; ++index) {
        float *target = out + (tile.first_query + index / group) * out_stride + (kv_head * group + index % group) * head_dim;
        const float inverse = total[index] == 0 ? 0 : 1 / total[index];
        for (int d = 0; d < head_dim; ++d) target[d] = sums[index * head_dim + d] * inverse;
    }
}

}  // namespace noria
