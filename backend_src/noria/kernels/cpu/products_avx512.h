// The products of a tile with AVX-512 and its VNNI: product<MR>(w, rows, row_bytes, num_inputs, ahead, out) of MR rows,
// row_bytes apart, with a panel of 16 outputs; out [MR][16].
#pragma once

#include <algorithm>
#include <cstring>

#include "fetch.h"
#include "linear.h"
#include "rounding.h"
#include "simd.h"

namespace noria {
namespace {

template <class Weight> constexpr int kTileRows = 8;

inline size_t unpacked_bytes(int) { return 0; }

// then(weights): unpacking costs nothing here, beside the products.
template <class Then> void with_unpacked(const Int4Group *weights, int, int, void *, Then then) { then(weights); }

#define EACH_SUM _Pragma("GCC unroll 4") for (int s = 0; s < NS; ++s)

// The four bytes at `numbers`, in each lane. GCC makes them part of the instruction that uses them once.
inline __m512i all_words(const void *numbers) {
    int32_t word;
    memcpy(&word, numbers, sizeof word);
    return _mm512_set1_epi32(word);
}

template <int MR>
ON_ITS_OWN void product(const float *w, const char *rows, size_t row_bytes, int num_inputs, Fetch ahead, float *out) {
    __m512 sums[MR];
    EACH_ROW sums[m] = _mm512_setzero_ps();
    const char *next = ahead.start();
    const ptrdiff_t step = ahead.step(kPanel * sizeof(float));
    for (int k = 0; k < num_inputs; ++k, rows += sizeof(float), next += step, w += kPanel) {
        fetch<MR>(next);
        const __m512 weights = _mm512_load_ps(w);
        EACH_ROW {
            const __m512 a = _mm512_set1_ps(*reinterpret_cast<const float *>(rows + m * row_bytes));
            sums[m] = _mm512_fmadd_ps(a, weights, sums[m]);
        }
    }
    EACH_ROW _mm512_store_ps(out + m * kPanel, sums[m]);
}

// Sums of whole numbers that a few rows keep apart, each of every so many: one addition takes four cycles, in which others can
// begin. They are exact, so that their order does not matter.
template <int MR> constexpr int kNumSums = MR == 1 ? 4 : MR <= 3 ? 2 : 1;

inline __m512 from_float16(const uint16_t *x) {
    return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i *>(x)));
}

template <int MR>
ON_ITS_OWN void product(const Int8Groups *w, const char *rows, size_t row_bytes, int num_inputs, Fetch ahead, float *out) {
    constexpr int NS = kNumSums<MR>;
    __m512 sums[MR];
    EACH_ROW sums[m] = _mm512_setzero_ps();
    const char *next = ahead.start();
    const ptrdiff_t step = ahead.step(64);
    for (const Int8Groups *end = w + num_packed<Int8Groups>(num_inputs); w < end; ++w) {
        for (int g = 0; g < Int8Groups::kCount; ++g, rows += sizeof(Int8RowGroup)) {
            const auto row = [&](int m) -> auto & { return *reinterpret_cast<const Int8RowGroup *>(rows + m * row_bytes); };
            __m512i whole[NS][MR];
            EACH_SUM EACH_ROW whole[s][m] = s == 0 ? all_words(&row(m).offset) : _mm512_setzero_si512();
            _Pragma("GCC unroll 8") for (int i = 0; i < 8; ++i) {
                fetch<MR>(next), next += step;
                const __m512i line = _mm512_load_si512(w->numbers[g] + 64 * i);
                EACH_ROW whole[i % NS][m] = _mm512_dpbusd_epi32(whole[i % NS][m], line, all_words(row(m).numbers + 4 * i));
            }
            const __m512 scale = from_float16(w->scale[g]);
            EACH_ROW {
                __m512i sum = whole[0][m];
                for (int s = 1; s < NS; ++s) sum = _mm512_add_epi32(sum, whole[s][m]);
                const __m512 product = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(row(m).scale));
                sums[m] = _mm512_fmadd_ps(product, scale, sums[m]);
            }
        }
        fetch<MR>(next), next += step;
    }
    EACH_ROW _mm512_store_ps(out + m * kPanel, sums[m]);
}

template <int MR>
ON_ITS_OWN void product(const Int4Group *w, const char *rows, size_t row_bytes, int num_inputs, Fetch ahead, float *out) {
    constexpr int NS = std::min(2, kNumSums<MR>);
    __m512 sums[MR];
    EACH_ROW sums[m] = _mm512_setzero_ps();
    const char *next = ahead.start();
    const ptrdiff_t step = ahead.step(64);
    for (const Int4Group *end = w + num_packed<Int4Group>(num_inputs); w < end; ++w, rows += sizeof(Int4RowGroup)) {
        const auto row = [&](int m) -> auto & { return *reinterpret_cast<const Int4RowGroup *>(rows + m * row_bytes); };
        __m512i whole[NS][MR];
        EACH_SUM EACH_ROW whole[s][m] = _mm512_setzero_si512();
        // numbers are four lines of 64 bytes, scales and minima the fifth
        _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i) {
            fetch<MR>(next), next += step;
            const __m512i line = _mm512_load_si512(w->numbers + 64 * i), half = _mm512_set1_epi8(15);
            const __m512i low = _mm512_and_si512(line, half), high = _mm512_and_si512(_mm512_srli_epi16(line, 4), half);
            EACH_ROW whole[0][m] = _mm512_dpbusd_epi32(whole[0][m], low, all_words(row(m).numbers + 4 * i));
            EACH_ROW whole[NS - 1][m] = _mm512_dpbusd_epi32(whole[NS - 1][m], high, all_words(row(m).numbers + 16 + 4 * i));
        }
        fetch<MR>(next), next += step;
        const __m512 scale = from_float16(w->scale), minimum = from_float16(w->minimum);
        EACH_ROW {
            const __m512 shifted = _mm512_fmadd_ps(minimum, _mm512_set1_ps(row(m).sum), sums[m]);
            const __m512i sum = NS == 1 ? whole[0][m] : _mm512_add_epi32(whole[0][m], whole[NS - 1][m]);
            const __m512 product = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(row(m).scale));
            sums[m] = _mm512_fmadd_ps(product, scale, shifted);
        }
    }
    EACH_ROW _mm512_store_ps(out + m * kPanel, sums[m]);
}

}  // namespace
}  // namespace noria
