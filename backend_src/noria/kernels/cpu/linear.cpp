#include "linear.h"

#include <algorithm>
#include <cstring>

#include "rounding.h"
#include "simd.h"

namespace noria {
namespace {

// The weights that are fetched while others are multiplied: of the next panel, a share by each tile of rows that passes over
// this one. Without it the processor waits for memory first and computes afterwards; and it drops most fetches when many
// come at once.
class Fetch {
public:
    // tile of num_tiles passes over the panel of that many bytes that `next` follows
    Fetch(const void *next, size_t panel_bytes, int tile, int num_tiles)
        : next_(static_cast<const char *>(next) + panel_bytes * tile / num_tiles), num_tiles_(num_tiles) {}

    // Bytes that this tile fetches for so many that it reads, rounded down.
    ptrdiff_t step(int num_bytes) const { return num_bytes / num_tiles_; }
    const char *start() const { return next_; }

private:
    const char *next_;
    int num_tiles_;
};

inline void fetch(const char *weights) { _mm_prefetch(weights, _MM_HINT_T0); }

// The products of a tile: MR rows, row_bytes apart, with a panel of 16 outputs; `out` [MR][16].

template <int MR>
ON_ITS_OWN void product(const float *w, const char *rows, size_t row_bytes, int num_inputs, Fetch ahead, float *out) {
    F8 low_sum[MR], high_sum[MR];
    EACH_ROW low_sum[m] = high_sum[m] = _mm256_setzero_ps();
    const char *next = ahead.start();
    const ptrdiff_t step = ahead.step(kPanel * sizeof(float));
    for (int k = 0; k < num_inputs; ++k, rows += sizeof(float), next += step) {
        const F8 low = _mm256_load_ps(w), high = _mm256_load_ps(w + 8);
        fetch(next);
        w += kPanel;
        EACH_ROW {
            const F8 a = _mm256_broadcast_ss(reinterpret_cast<const float *>(rows + m * row_bytes));
            low_sum[m] = _mm256_fmadd_ps(a, low, low_sum[m]);
            high_sum[m] = _mm256_fmadd_ps(a, high, high_sum[m]);
        }
    }
    EACH_ROW {
        _mm256_store_ps(out + m * kPanel, low_sum[m]);
        _mm256_store_ps(out + m * kPanel + 8, high_sum[m]);
    }
}

// The four bytes at `numbers`, eight times.
__m256i broadcast_word(const void *numbers) {
    int32_t word;
    memcpy(&word, numbers, sizeof word);
    return _mm256_set1_epi32(word);
}

template <int MR>
ON_ITS_OWN void product(const int8_t *w, const char *rows, size_t row_bytes, int num_inputs, Fetch ahead, float *out) {
    __m256i low_sum[MR], high_sum[MR];
    EACH_ROW low_sum[m] = high_sum[m] = _mm256_setzero_si256();
    const char *numbers = rows + offsetof(Int16Row, numbers);
    const char *next = ahead.start();
    const ptrdiff_t step = ahead.step(2 * kPanel);
    _Pragma("GCC unroll 2") for (int k = 0; k < num_inputs; k += 2, numbers += 2 * sizeof(int16_t), next += step) {
        fetch(next);
        const __m256i low = _mm256_cvtepi8_epi16(_mm_load_si128(reinterpret_cast<const __m128i *>(w)));
        const __m256i high = _mm256_cvtepi8_epi16(_mm_load_si128(reinterpret_cast<const __m128i *>(w + 16)));
        w += 2 * kPanel;
        EACH_ROW {
            const __m256i a = broadcast_word(numbers + m * row_bytes);
            low_sum[m] = _mm256_add_epi32(low_sum[m], _mm256_madd_epi16(a, low));
            high_sum[m] = _mm256_add_epi32(high_sum[m], _mm256_madd_epi16(a, high));
        }
    }
    EACH_ROW {
        const F8 scale = _mm256_broadcast_ss(&reinterpret_cast<const Int16Row *>(rows + m * row_bytes)->scale);
        _mm256_store_ps(out + m * kPanel, _mm256_mul_ps(_mm256_cvtepi32_ps(low_sum[m]), scale));
        _mm256_store_ps(out + m * kPanel + 8, _mm256_mul_ps(_mm256_cvtepi32_ps(high_sum[m]), scale));
    }
}

// 32 inputs of a panel's outputs, as Int4Group has them, with a byte for each number: [8][16][4], the inputs in the order of
// `first_input`. What it takes to make one is saved by each further tile of rows.
struct alignas(64) UnpackedGroup {
    __m256i numbers[8][2];
    F8 scale[2], minimum[2];
};

// Weights of four inputs with the first and the last eight outputs of a panel.
struct Inputs {
    __m256i low, high;
};

// Of the group's inputs, the first of the four that stand at `index` of eight.
constexpr int first_input(int index) { return index % 2 * 16 + index / 2 * 4; }

inline Inputs inputs(const Int4Group &group, int index) {
    const auto *bytes = reinterpret_cast<const __m256i *>(group.numbers) + index / 2 * 2;
    const auto half = [&](__m256i x) { return _mm256_and_si256(index % 2 ? _mm256_srli_epi16(x, 4) : x, _mm256_set1_epi8(15)); };
    return {half(_mm256_load_si256(bytes)), half(_mm256_load_si256(bytes + 1))};
}
inline Inputs inputs(const UnpackedGroup &group, int index) { return {group.numbers[index][0], group.numbers[index][1]}; }

inline F8 load_float16(const uint16_t *x) { return _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i *>(x))); }
inline F8 scale(const Int4Group &group, int half) { return load_float16(group.scale + 8 * half); }
inline F8 scale(const UnpackedGroup &group, int half) { return group.scale[half]; }
inline F8 minimum(const Int4Group &group, int half) { return load_float16(group.minimum + 8 * half); }
inline F8 minimum(const UnpackedGroup &group, int half) { return group.minimum[half]; }

void unpack(const Int4Group *packed, int count, UnpackedGroup *unpacked) {
    for (const Int4Group *end = packed + count; packed < end; ++packed, ++unpacked) {
        _Pragma("GCC unroll 8") for (int index = 0; index < 8; ++index) {
            const auto [low, high] = inputs(*packed, index);
            unpacked->numbers[index][0] = low;
            unpacked->numbers[index][1] = high;
        }
        for (int half = 0; half < 2; ++half) {
            unpacked->scale[half] = scale(*packed, half);
            unpacked->minimum[half] = minimum(*packed, half);
        }
    }
}

// Products of four inputs with 16 outputs, in pairs. As one piece of assembly, since GCC would otherwise compute those of all
// rows before it adds them, and run out of registers.
inline void products(__m256i &low_sum, __m256i &high_sum, const Inputs &weights, const int8_t (&row)[4]) {
    __m256i a;
    asm volatile("vpbroadcastd %[row], %[a]\n\t"
                 "vpmaddubsw %[a], %[low], %[low_sum]\n\t"
                 "vpmaddubsw %[a], %[high], %[high_sum]"
                 : [low_sum] "=&x"(low_sum), [high_sum] "=&x"(high_sum), [a] "=&x"(a)
                 : [low] "x"(weights.low), [high] "x"(weights.high), [row] "m"(row));
}
inline void add_products(__m256i &low_sum, __m256i &high_sum, const Inputs &weights, const int8_t (&row)[4]) {
    __m256i a, product;
    asm volatile("vpbroadcastd %[row], %[a]\n\t"
                 "vpmaddubsw %[a], %[low], %[product]\n\t"
                 "vpmaddubsw %[a], %[high], %[a]\n\t"
                 "vpaddw %[product], %[low_sum], %[low_sum]\n\t"
                 "vpaddw %[a], %[high_sum], %[high_sum]"
                 : [low_sum] "+x"(low_sum), [high_sum] "+x"(high_sum), [a] "=&x"(a), [product] "=&x"(product)
                 : [low] "x"(weights.low), [high] "x"(weights.high), [row] "m"(row));
}

// Adds to the sums of 8 outputs what a group's exact sums of products stand for.
inline void add_group(__m256i products, F8 scale, F8 minimum, F8 row_scale, F8 row_sum, float *out) {
    const F8 whole = _mm256_cvtepi32_ps(_mm256_madd_epi16(products, _mm256_set1_epi16(1)));
    const F8 shifted = _mm256_fmadd_ps(minimum, row_sum, _mm256_load_ps(out));
    _mm256_store_ps(out, _mm256_fmadd_ps(_mm256_mul_ps(whole, row_scale), scale, shifted));
}

// Weights are up to 15 and activations up to 127, so that sums of 8 pairs stay below 2^15. Group: of either kind.
template <int MR, class Group>
ON_ITS_OWN void product(const Group *w, const char *rows, size_t row_bytes, int num_inputs, Fetch ahead, float *out) {
    memset(out, 0, MR * kPanel * sizeof(float));
    const char *next = ahead.start();
    const ptrdiff_t step = ahead.step(64);
    for (const Group *end = w + num_groups(num_inputs); w < end; ++w, rows += sizeof(Int8Group)) {
        const auto row = [&](int m) -> const Int8Group & { return *reinterpret_cast<const Int8Group *>(rows + m * row_bytes); };
        __m256i low_sum[MR], high_sum[MR];
        _Pragma("GCC unroll 8") for (int index = 0; index < 8; ++index) {
            // packed numbers are four lines of 64 bytes, scales and minima the fifth
            if (index % 2 == 0) fetch(next), next += step;
            const Inputs weights = inputs(*w, index);
            EACH_ROW {
                const auto &numbers = reinterpret_cast<const int8_t(&)[4]>(row(m).numbers[first_input(index)]);
                index == 0 ? products(low_sum[m], high_sum[m], weights, numbers)
                           : add_products(low_sum[m], high_sum[m], weights, numbers);
            }
        }
        fetch(next), next += step;
        const F8 low_scale = scale(*w, 0), high_scale = scale(*w, 1);
        const F8 low_minimum = minimum(*w, 0), high_minimum = minimum(*w, 1);
        EACH_ROW {
            const F8 row_scale = _mm256_broadcast_ss(&row(m).scale), row_sum = _mm256_broadcast_ss(&row(m).sum);
            add_group(low_sum[m], low_scale, low_minimum, row_scale, row_sum, out + m * kPanel);
            add_group(high_sum[m], high_scale, high_minimum, row_scale, row_sum, out + m * kPanel + 8);
        }
        // nor may it keep `out` in registers, of which the sums of the next group need all
        asm volatile("" : : : "memory");
    }
}

// The sums of `count` outputs of a row, with their scales and bias, to y.
void store(const float *sums, const Linear &linear, int first_output, int count, float *y, bool is_added) {
    const float *scale = linear.scale + first_output, *bias = linear.bias + first_output;
    int i = 0;
    for (; i + 8 <= count; i += 8) {
        F8 value = _mm256_load_ps(sums + i);
        if (linear.scale) value = _mm256_mul_ps(value, _mm256_loadu_ps(scale + i));
        if (linear.bias) value = _mm256_add_ps(value, _mm256_loadu_ps(bias + i));
        _mm256_storeu_ps(y + i, is_added ? _mm256_add_ps(_mm256_loadu_ps(y + i), value) : value);
    }
    for (; i < count; ++i) {
        float value = sums[i];
        if (linear.scale) value *= scale[i];
        if (linear.bias) value += bias[i];
        y[i] = is_added ? y[i] + value : value;
    }
}

// Asks for the cache line that [x, x + 16) is in for writing. The sums of a tile are stored in every group: behind a store
// that waits for its line those soon find no room.
inline void claim(float *x) { asm volatile("prefetchw %0" : : "m"(*x)); }

// A product's rows and where its outputs go, of one panel.
struct Target {
    const Linear &linear;
    const Rows &x;
    int panel, first_row, last_row;
    float *y;
    size_t y_stride;
    bool is_added;
};

// `weights`: of the panel, packed or not; next_panel: the packed ones that are multiplied next, panel_bytes of them.
template <class Weight>
void multiply_panel(const Target &target, const Weight *weights, const void *next_panel, size_t panel_bytes) {
    const Linear &linear = target.linear;
    const Rows &x = target.x;
    const int first_output = target.panel * kPanel, count = std::min(kPanel, linear.num_outputs - first_output);
    const int num_tiles = (target.last_row - target.first_row + kTileRows - 1) / kTileRows;
    for_each_tile<kTileRows>(target.first_row, target.last_row, [&](int row, auto num_rows) {
        alignas(32) float sums[num_rows * kPanel];
        float *y = target.y + row * target.y_stride + first_output;
        for (int m = 0; m < num_rows; ++m) claim(y + m * target.y_stride);
        const Fetch ahead(next_panel, panel_bytes, (row - target.first_row) / kTileRows, num_tiles);
        product<num_rows>(weights, x.numbers + row * x.row_bytes, x.row_bytes, linear.num_inputs, ahead, sums);
        for (int m = 0; m < num_rows; ++m)
            store(sums + m * kPanel, linear, first_output, count, y + m * target.y_stride, target.is_added);
    });
}

// Tiles of rows that it takes for unpacking to cost less than it saves.
constexpr int kUnpackTiles = 3;

}  // namespace

size_t scratch_bytes(const Linear &linear) {
    return linear.format == WeightFormat::kInt4 ? num_groups(linear.num_inputs) * sizeof(UnpackedGroup) : 0;
}

void multiply(const Linear &linear, const Rows &x, int first_panel, int last_panel, int first_row, int last_row, float *y,
              size_t y_stride, bool is_added, void *scratch) {
    const size_t num_inputs = linear.num_inputs;
    const auto for_each_panel = [&](auto *weights, size_t panel_size) {
        weights += first_panel * panel_size;
        for (int panel = first_panel; panel < last_panel; ++panel, weights += panel_size) {
            const Target target{linear, x, panel, first_row, last_row, y, y_stride, is_added};
            const size_t panel_bytes = panel_size * sizeof *weights;
            if constexpr (std::is_same_v<decltype(weights), const Int4Group *>) {
                if (last_row - first_row > (kUnpackTiles - 1) * kTileRows) {
                    auto *unpacked = static_cast<UnpackedGroup *>(scratch);
                    unpack(weights, static_cast<int>(panel_size), unpacked);
                    multiply_panel(target, unpacked, weights + panel_size, panel_bytes);
                    continue;
                }
            }
            multiply_panel(target, weights, weights + panel_size, panel_bytes);
        }
    };
    switch (linear.format) {
    case WeightFormat::kFloat32: for_each_panel(static_cast<const float *>(linear.weight), num_inputs * kPanel); break;
    case WeightFormat::kInt8:
        for_each_panel(static_cast<const int8_t *>(linear.weight), (num_inputs + 1) / 2 * 2 * kPanel);
        break;
    case WeightFormat::kInt4: for_each_panel(static_cast<const Int4Group *>(linear.weight), num_groups(linear.num_inputs));
    }
}

}  // namespace noria
