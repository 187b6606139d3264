// Vectors of eight floats (AVX2, FMA) and of sixteen (AVX-512), and what several kernels need of them.
//
// The library is built twice, for either. Both compute the same numbers, bit for bit: where the order of additions matters,
// that of eight lanes is kept.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <immintrin.h>
#include <type_traits>

namespace noria {

using F8 = __m256;

struct Lanes8 {
    static constexpr int kCount = 8;
    using Floats = __m256;
    using Ints = __m256i;
    using Mask = __m256;

    static Floats all(float x) { return _mm256_set1_ps(x); }
    static Floats load(const float *x) { return _mm256_loadu_ps(x); }
    static void store(float *to, Floats x) { _mm256_storeu_ps(to, x); }
    static Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
    static Floats subtract(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
    static Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
    static Floats divide(Floats a, Floats b) { return _mm256_div_ps(a, b); }
    // a b + c, and c - a b
    static Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
    static Floats multiply_subtract_from(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(a, b, c); }
    // b where one of them is NaN
    static Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
    static Floats smaller(Floats a, Floats b) { return _mm256_min_ps(a, b); }
    static Floats round(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static Ints to_ints(Floats x) { return _mm256_cvtps_epi32(x); }
    static Ints halve(Ints x) { return _mm256_srai_epi32(x, 1); }
    static Ints subtract(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
    // 2^n, -127 < n < 128
    static Floats power_of_2(Ints n) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
    }
    // of numbers that are not NaN
    static Mask is_less(Floats a, Floats b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
    static Mask is_nan(Floats x) { return _mm256_cmp_ps(x, x, _CMP_UNORD_Q); }
    static Mask has_bits(Floats x, Floats y) {
        return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_castps_si256(x), _mm256_castps_si256(y)));
    }
    static Floats choose(Mask mask, Floats yes, Floats no) { return _mm256_blendv_ps(no, yes, mask); }
    static Floats zero_where(Mask mask, Floats x) { return _mm256_andnot_ps(mask, x); }
    // sums + x
    static F8 add_to(F8 sums, Floats x) { return _mm256_add_ps(sums, x); }
    static Floats load_bfloat16(const uint16_t *x) {
        const Ints wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(x)));
        return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
    }
    static Floats load_int8(const int8_t *x) {
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(x))));
    }
};

#ifdef __AVX512F__
struct Lanes16 {
    static constexpr int kCount = 16;
    using Floats = __m512;
    using Ints = __m512i;
    using Mask = __mmask16;

    static Floats all(float x) { return _mm512_set1_ps(x); }
    static Floats load(const float *x) { return _mm512_loadu_ps(x); }
    static void store(float *to, Floats x) { _mm512_storeu_ps(to, x); }
    static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
    static Floats subtract(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
    static Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
    static Floats divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }
    static Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
    static Floats multiply_subtract_from(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
    static Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
    static Floats smaller(Floats a, Floats b) { return _mm512_min_ps(a, b); }
    static Floats round(Floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static Ints to_ints(Floats x) { return _mm512_cvtps_epi32(x); }
    static Ints halve(Ints x) { return _mm512_srai_epi32(x, 1); }
    static Ints subtract(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
    static Floats power_of_2(Ints n) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
    }
    static Mask is_less(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
    static Mask is_nan(Floats x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
    static Mask has_bits(Floats x, Floats y) {
        return _mm512_cmpeq_epi32_mask(_mm512_castps_si512(x), _mm512_castps_si512(y));
    }
    static Floats choose(Mask mask, Floats yes, Floats no) { return _mm512_mask_mov_ps(no, mask, yes); }
    static Floats zero_where(Mask mask, Floats x) { return _mm512_maskz_mov_ps(_knot_mask16(mask), x); }
    static F8 add_to(F8 sums, Floats x) {
        return _mm256_add_ps(_mm256_add_ps(sums, _mm512_castps512_ps256(x)), _mm512_extractf32x8_ps(x, 1));
    }
    static Floats load_bfloat16(const uint16_t *x) {
        const Ints wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(x)));
        return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
    }
    static Floats load_int8(const int8_t *x) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(x))));
    }
};
using Widest = Lanes16;
constexpr const char *kInstructionSet = "AVX-512";
#else
using Widest = Lanes8;
constexpr const char *kInstructionSet = "AVX2";
#endif

// step(i, lanes) for vectors that cover [0, count), the widest first, as far as whole ones go; returns where that is.
template <class Step> int for_each_vector(int count, Step step) {
    int i = 0;
    for (; i + Widest::kCount <= count; i += Widest::kCount) step(i, Widest());
    if (Widest::kCount > Lanes8::kCount && i + Lanes8::kCount <= count) {
        step(i, Lanes8());
        i += Lanes8::kCount;
    }
    return i;
}

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
#ifdef __AVX512F__
inline float maximum(__m512 x) { return maximum(_mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1))); }
#endif

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
template <class V> struct Reduced {
    typename V::Floats n, power;
};

template <class V> inline Reduced<V> reduce(typename V::Floats x) {
    const auto n = V::round(V::multiply(x, V::all(1.44269504f)));
    auto r = V::multiply_subtract_from(n, V::all(0.693359375f), x);
    r = V::multiply_subtract_from(n, V::all(-2.12194440e-4f), r);
    auto p = V::all(1.0f / 5040);
    for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = V::multiply_add(p, r, V::all(c));
    return {n, p};
}

// 0 where x is so small that e^x is no normal number
template <class V> inline typename V::Floats without_tiny(typename V::Floats x, typename V::Floats y) {
    return V::zero_where(V::is_less(x, V::all(-87.0f)), y);
}

// e^x within 2 ulp; 0 below -87, inf above 88, NaN for NaN.
template <class V> inline typename V::Floats exponential(typename V::Floats x) {
    const auto [n, p] = reduce<V>(x);
    // two factors, since 2^128 itself is no float
    const auto whole = V::to_ints(V::smaller(V::larger(n, V::all(-127)), V::all(128)));
    const auto first = V::halve(whole);
    auto y = V::multiply(V::multiply(p, V::power_of_2(first)), V::power_of_2(V::subtract(whole, first)));
    y = without_tiny<V>(x, y);
    y = V::choose(V::is_less(V::all(88.7f), x), V::all(INFINITY), y);
    return V::choose(V::is_nan(x), x, y);
}

// The same numbers for x up to 0, in half the instructions.
template <class V> inline typename V::Floats exponential_up_to_0(typename V::Floats x) {
    const auto [n, p] = reduce<V>(x);
    return without_tiny<V>(x, V::multiply(p, V::power_of_2(V::to_ints(n))));
}

}  // namespace noria
