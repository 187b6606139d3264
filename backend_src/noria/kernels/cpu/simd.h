// Eight floats at a time: what several kernels need of AVX2 and FMA.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <immintrin.h>
#include <type_traits>

namespace noria {

using F8 = __m256;

// A tile is MR rows whose sums stay in registers. GCC keeps them there only if the loops over rows are unrolled before
// anything else looks at them, and only in a function of its own.
#define EACH_ROW _Pragma("GCC unroll 16") for (int m = 0; m < MR; ++m)
#define ON_ITS_OWN __attribute__((noinline))

// tile(MR) with the std::integral_constant of num_rows, which is at least 1 and at most kMost.
template <int kMost, class Tile> void with_rows(int num_rows, Tile tile) {
    if constexpr (kMost > 1) {
        if (num_rows < kMost) return with_rows<kMost - 1>(num_rows, tile);
    }
    tile(std::integral_constant<int, kMost>());
}

// tile(row, MR) for tiles of up to kMost rows that cover [first, last).
template <int kMost, class Tile> void for_each_tile(int first, int last, Tile tile) {
    for (int row = first; row < last; row += kMost)
        with_rows<kMost>(std::min(kMost, last - row), [&](auto num_rows) { tile(row, num_rows); });
}

inline float sum(F8 x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

inline float maximum(F8 x) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

inline F8 absolute(F8 x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }

struct Range {
    float largest;
    bool is_finite;
};

// Of the sizes of x [count].
inline Range range(const float *x, int count) {
    F8 largest = _mm256_setzero_ps(), check = _mm256_setzero_ps();
    float top = 0, rest_check = 0;
    int k = 0;
    for (; k + 8 <= count; k += 8) {
        const F8 value = _mm256_loadu_ps(x + k);
        largest = _mm256_max_ps(largest, absolute(value));
        // 0 for a finite number, NaN for any other
        check = _mm256_fmadd_ps(value, _mm256_setzero_ps(), check);
    }
    for (; k < count; ++k) {
        top = std::max(top, std::fabs(x[k]));
        rest_check += x[k] * 0.0f;
    }
    return {std::max(top, maximum(largest)), sum(check) == 0 && rest_check == 0};
}

// x = n ln 2 + r with |r| <= ln 2 / 2, by Cody and Waite: n, and e^r by the Taylor polynomial of degree 7, whose remainder is
// 6e-9.
struct Reduced {
    F8 n, power;
};

inline Reduced reduce(F8 x) {
    const F8 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    F8 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
    F8 p = _mm256_set1_ps(1.0f / 5040);
    for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(c));
    return {n, p};
}

// 2^n, -127 < n < 128
inline F8 power_of_2(__m256i n) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23)); }

// 0 where x is so small that e^x is no normal number
inline F8 without_tiny(F8 x, F8 y) { return _mm256_andnot_ps(_mm256_cmp_ps(x, _mm256_set1_ps(-87.0f), _CMP_LT_OQ), y); }

// e^x within 2 ulp; 0 below -87, inf above 88, NaN for NaN.
inline F8 exponential(F8 x) {
    const auto [n, p] = reduce(x);
    // two factors, since 2^128 itself is no float
    const __m256i whole = _mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps(n, _mm256_set1_ps(-127)), _mm256_set1_ps(128)));
    const __m256i first = _mm256_srai_epi32(whole, 1);
    F8 y = _mm256_mul_ps(_mm256_mul_ps(p, power_of_2(first)), power_of_2(_mm256_sub_epi32(whole, first)));
    y = without_tiny(x, y);
    y = _mm256_blendv_ps(y, _mm256_set1_ps(INFINITY), _mm256_cmp_ps(x, _mm256_set1_ps(88.7f), _CMP_GT_OQ));
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

// The same numbers for x up to 0, in half the instructions.
inline F8 exponential_up_to_0(F8 x) {
    const auto [n, p] = reduce(x);
    return without_tiny(x, _mm256_mul_ps(p, power_of_2(_mm256_cvtps_epi32(n))));
}

}  // namespace noria
