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

inline F8 load_float16(const uint16_t *x) { return _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i *>(x))); }

// Adds the products of four inputs with 16 outputs. GCC would otherwise compute those of all rows before it adds them, and
// run out of registers.
inline void add_products(__m256i &low_sum, __m256i &high_sum, __m256i low, __m256i high, const char *inputs) {
    const __m256i a = broadcast_word(inputs);
    low_sum = _mm256_add_epi16(low_sum, _mm256_maddubs_epi16(low, a));
    high_sum = _mm256_add_epi16(high_sum, _mm256_maddubs_epi16(high, a));
    asm volatile("" : "+x"(low_sum), "+x"(high_sum));
}

// Adds to the sums of 8 outputs what a group's exact sums of products stand for.
inline void add_group(__m256i products, F8 scale, F8 minimum, F8 row_scale, F8 row_sum, float *out) {
    const F8 whole = _mm256_cvtepi32_ps(_mm256_madd_epi16(products, _mm256_set1_epi16(1)));
    const F8 shifted = _mm256_fmadd_ps(minimum, row_sum, _mm256_load_ps(out));
    _mm256_store_ps(out, _mm256_fmadd_ps(_mm256_mul_ps(whole, row_scale), scale, shifted));
}

// Weights are up to 15 and activations up to 127, so that sums of 8 pairs stay below 2^15.
template <int MR>
ON_ITS_OWN void product(const Int4Group *w, const char *rows, size_t row_bytes, int num_inputs, Fetch ahead, float *out) {
    memset(out, 0, MR * kPanel * sizeof(float));
    const __m256i low_half = _mm256_set1_epi8(15);
    const char *next = ahead.start();
    const ptrdiff_t step = ahead.step(64);
    for (const Int4Group *end = w + num_groups(num_inputs); w < end; ++w, rows += sizeof(Int8Group)) {
        __m256i low_sum[MR], high_sum[MR];
        EACH_ROW low_sum[m] = high_sum[m] = _mm256_setzero_si256();
        const uint8_t *bytes = w->numbers;
        const char *numbers = rows;
        // unrolled, this loop makes GCC load all rows' numbers first, and keep them on the stack
        _Pragma("GCC unroll 1") for (int i = 0; i < 4; ++i, bytes += 64, numbers += 4, next += step) {
            fetch(next);
            const __m256i low = _mm256_load_si256(reinterpret_cast<const __m256i *>(bytes));
            const __m256i high = _mm256_load_si256(reinterpret_cast<const __m256i *>(bytes + 32));
            const __m256i low_first = _mm256_and_si256(low, low_half), high_first = _mm256_and_si256(high, low_half);
            EACH_ROW add_products(low_sum[m], high_sum[m], low_first, high_first, numbers + m * row_bytes);
            const __m256i low_second = _mm256_and_si256(_mm256_srli_epi16(low, 4), low_half);
            const __m256i high_second = _mm256_and_si256(_mm256_srli_epi16(high, 4), low_half);
            EACH_ROW add_products(low_sum[m], high_sum[m], low_second, high_second, numbers + 16 + m * row_bytes);
        }
        // numbers are four lines of 64 bytes, scales and minima the fifth
        fetch(next);
        next += step;
        const F8 low_scale = load_float16(w->scale), high_scale = load_float16(w->scale + 8);
        const F8 low_minimum = load_float16(w->minimum), high_minimum = load_float16(w->minimum + 8);
        EACH_ROW {
            const auto *group = reinterpret_cast<const Int8Group *>(rows + m * row_bytes);
            const F8 scale = _mm256_broadcast_ss(&group->scale), row_sum = _mm256_broadcast_ss(&group->sum);
            add_group(low_sum[m], low_scale, low_minimum, scale, row_sum, out + m * kPanel);
            add_group(high_sum[m], high_scale, high_minimum, scale, row_sum, out + m * kPanel + 8);
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

template <class Weight, int MR>
void tile_rows(const Linear &linear, const Rows &x, int panel, const Weight *weights, int row, Fetch ahead, float *y,
               size_t y_stride, bool is_added) {
    alignas(32) float sums[MR * kPanel];
    product<MR>(weights, x.numbers + row * x.row_bytes, x.row_bytes, linear.num_inputs, ahead, sums);
    const int first_output = panel * kPanel, count = std::min(kPanel, linear.num_outputs - first_output);
    for (int m = 0; m < MR; ++m)
        store(sums + m * kPanel, linear, first_output, count, y + (row + m) * y_stride + first_output, is_added);
}

// panel_size: in Weight
template <class Weight>
void multiply_as(const Linear &linear, const Rows &x, size_t panel_size, int first_panel, int last_panel, int first_row,
                 int last_row, float *y, size_t y_stride, bool is_added) {
    const int num_tiles = (last_row - first_row + kTileRows - 1) / kTileRows;
    for (int panel = first_panel; panel < last_panel; ++panel)
        for_each_tile(first_row, last_row, [&](int row, auto num_rows) {
            const Weight *weights = static_cast<const Weight *>(linear.weight) + panel * panel_size;
            const Fetch ahead(weights + panel_size, panel_size * sizeof(Weight), (row - first_row) / kTileRows, num_tiles);
            tile_rows<Weight, num_rows>(linear, x, panel, weights, row, ahead, y, y_stride, is_added);
        });
}

}  // namespace

void multiply(const Linear &linear, const Rows &x, int first_panel, int last_panel, int first_row, int last_row, float *y,
              size_t y_stride, bool is_added) {
    const size_t num_inputs = linear.num_inputs;
    const auto as = [&](auto *weight, size_t panel_size) {
        multiply_as<std::remove_pointer_t<decltype(weight)>>(linear, x, panel_size, first_panel, last_panel, first_row,
                                                             last_row, y, y_stride, is_added);
    };
    switch (linear.format) {
    case WeightFormat::kFloat32: as(static_cast<float *>(nullptr), num_inputs * kPanel); break;
    case WeightFormat::kInt8: as(static_cast<int8_t *>(nullptr), (num_inputs + 1) / 2 * 2 * kPanel); break;
    case WeightFormat::kInt4: as(static_cast<Int4Group *>(nullptr), num_groups(linear.num_inputs));
    }
}

}  // namespace noria
