#include "linear.h"

#include <algorithm>
#include <cstring>

#include "simd.h"

namespace noria {
namespace {

// Tiles are of 16 outputs.
// `ahead`: bytes between the weights that are read and those that are fetched, of the next panel while the first rows pass
// over this one; 0 for further rows. Without it the processor waits for memory first and computes afterwards.

template <int MR> ON_ITS_OWN void product(const float *w, const float *x, size_t stride, int num_inputs, size_t ahead, float *out) {
    F8 low_sum[MR], high_sum[MR];
    EACH_ROW low_sum[m] = high_sum[m] = _mm256_setzero_ps();
    for (int k = 0; k < num_inputs; ++k) {
        const F8 low = _mm256_load_ps(w), high = _mm256_load_ps(w + 8);
        _mm_prefetch(reinterpret_cast<const char *>(w) + ahead, _MM_HINT_T0);
        w += kPanel;
        EACH_ROW {
            const F8 a = _mm256_broadcast_ss(x + m * stride + k);
            low_sum[m] = _mm256_fmadd_ps(a, low, low_sum[m]);
            high_sum[m] = _mm256_fmadd_ps(a, high, high_sum[m]);
        }
    }
    EACH_ROW {
        _mm256_store_ps(out + m * kPanel, low_sum[m]);
        _mm256_store_ps(out + m * kPanel + 8, high_sum[m]);
    }
}

template <int MR>
ON_ITS_OWN void product(const int8_t *w, const int16_t *x, size_t stride, int num_inputs, size_t ahead, float *out) {
    __m256i low_sum[MR], high_sum[MR];
    EACH_ROW low_sum[m] = high_sum[m] = _mm256_setzero_si256();
    _Pragma("GCC unroll 2") for (int k = 0; k < num_inputs; k += 2) {
        _mm_prefetch(reinterpret_cast<const char *>(w) + ahead, _MM_HINT_T0);
        const __m256i low = _mm256_cvtepi8_epi16(_mm_load_si128(reinterpret_cast<const __m128i *>(w)));
        const __m256i high = _mm256_cvtepi8_epi16(_mm_load_si128(reinterpret_cast<const __m128i *>(w + 16)));
        w += 2 * kPanel;
        EACH_ROW {
            int32_t pair;
            memcpy(&pair, x + m * stride + k, sizeof pair);
            const __m256i a = _mm256_set1_epi32(pair);
            low_sum[m] = _mm256_add_epi32(low_sum[m], _mm256_madd_epi16(a, low));
            high_sum[m] = _mm256_add_epi32(high_sum[m], _mm256_madd_epi16(a, high));
        }
    }
    EACH_ROW {
        _mm256_store_ps(out + m * kPanel, _mm256_cvtepi32_ps(low_sum[m]));
        _mm256_store_ps(out + m * kPanel + 8, _mm256_cvtepi32_ps(high_sum[m]));
    }
}

// The sums of `count` outputs of a row, with their scales and bias, to y.
void store(const float *sums, const Linear &linear, float row_scale, int first_output, int count, float *y, bool is_added) {
    const float *scale = linear.scale + first_output, *bias = linear.bias + first_output;
    for (int i = 0; i < count; ++i) {
        float value = sums[i];
        if (linear.scale) value = value * row_scale * scale[i];
        if (linear.bias) value += bias[i];
        y[i] = is_added ? y[i] + value : value;
    }
}

template <int MR>
void tile_rows(const Linear &linear, const Rows &x, int panel, int row, bool is_first, float *y, size_t y_stride,
               bool is_added) {
    alignas(32) float sums[MR * kPanel];
    const size_t num_inputs = linear.num_inputs, stride = x.stride;
    if (linear.scale) {
        const size_t size = (num_inputs + 1) / 2 * 2 * kPanel;
        const auto *w = static_cast<const int8_t *>(linear.weight) + panel * size;
        product<MR>(w, x.rounded + row * stride, stride, linear.num_inputs, is_first ? size : 0, sums);
    } else {
        const size_t size = num_inputs * kPanel;
        const auto *w = static_cast<const float *>(linear.weight) + panel * size;
        product<MR>(w, x.values + row * stride, stride, linear.num_inputs, is_first ? size * sizeof(float) : 0, sums);
    }
    const int first_output = panel * kPanel, count = std::min(kPanel, linear.num_outputs - first_output);
    for (int m = 0; m < MR; ++m)
        store(sums + m * kPanel, linear, linear.scale ? x.scale[row + m] : 1, first_output, count,
              y + (row + m) * y_stride + first_output, is_added);
}

}  // namespace

int activation_limit(int num_inputs) {
    // num_inputs * limit * 127 < 2^31
    return std::min<int64_t>(INT16_MAX, (int64_t{1} << 31) / (int64_t{128} * num_inputs));
}

float round_row(const float *x, int num_inputs, int16_t *y) {
    F8 largest = _mm256_setzero_ps(), check = _mm256_setzero_ps();
    float top = 0, rest_check = 0;
    int k = 0;
    for (; k + 8 <= num_inputs; k += 8) {
        const F8 value = _mm256_loadu_ps(x + k);
        largest = _mm256_max_ps(largest, absolute(value));
        // 0 for a finite number, NaN for any other
        check = _mm256_fmadd_ps(value, _mm256_setzero_ps(), check);
    }
    for (; k < num_inputs; ++k) {
        top = std::max(top, std::fabs(x[k]));
        rest_check += x[k] * 0.0f;
    }
    top = std::max(top, maximum(largest));
    const bool is_finite = sum(check) == 0 && rest_check == 0;
    const int stride = rounded_stride(num_inputs);
    const float limit = activation_limit(num_inputs);
    const float inverse = limit / top;
    // a row of zeros, and one so small that its maximum has no inverse, are zeros
    if (!is_finite || !std::isfinite(inverse)) {
        memset(y, 0, stride * sizeof(int16_t));
        return is_finite ? 0.0f : NAN;
    }
    const F8 factor = _mm256_set1_ps(inverse);
    for (k = 0; k + 8 <= num_inputs; k += 8) {
        const __m256i whole = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + k), factor));
        const __m128i packed = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i *>(y + k), packed);
    }
    for (; k < num_inputs; ++k) y[k] = static_cast<int16_t>(std::lrintf(x[k] * inverse));
    for (; k < stride; ++k) y[k] = 0;
    return top / limit;
}

void multiply(const Linear &linear, const Rows &x, int first_panel, int last_panel, int first_row, int last_row, float *y,
              size_t y_stride, bool is_added) {
    for (int panel = first_panel; panel < last_panel; ++panel)
        for_each_tile(first_row, last_row, [&](int row, auto num_rows) {
            tile_rows<num_rows>(linear, x, panel, row, row == first_row, y, y_stride, is_added);
        });
}

}  // namespace noria
