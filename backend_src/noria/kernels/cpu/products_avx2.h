// The products of a tile with AVX2 and FMA: product<MR>(w, rows, row_bytes, num_inputs, ahead, out) of MR rows,
// row_bytes apart, with a panel of 16 outputs; out [MR][16].
#pragma once

#include <cstring>

#include "fetch.h"
#include "linear.h"
#include "rounding.h"
#include "simd.h"

namespace noria {
namespace {

// These leave registers for the other factors and, in int8, the products on their way; with 6 GCC spills there (46 against 73
// GMAC/s on one core of a Zen 3).
template <class Weight> constexpr int kTileRows = 4;

template <int MR>
ON_ITS_OWN void product(const float *w, const char *rows, size_t row_bytes, int num_inputs, Fetch ahead, float *out) {
    F8 low_sum[MR], high_sum[MR];
    EACH_ROW low_sum[m] = high_sum[m] = _mm256_setzero_ps();
    const char *next = ahead.start();
    const ptrdiff_t step = ahead.step(kPanel * sizeof(float));
    for (int k = 0; k < num_inputs; ++k, rows += sizeof(float), next += step) {
        const F8 low = _mm256_load_ps(w), high = _mm256_load_ps(w + 8);
        fetch<MR>(next);
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
        fetch<MR>(next);
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

// Tiles of rows that it takes for unpacking to cost less than it saves.
constexpr int kUnpackTiles = 3;

inline size_t unpacked_bytes(int num_inputs) { return num_groups(num_inputs) * sizeof(UnpackedGroup); }

// then(weights): a panel's, as they are or unpacked to scratch, whichever is faster for so many rows.
template <class Then> void with_unpacked(const Int4Group *weights, int num_inputs, int num_rows, void *scratch, Then then) {
    if (num_rows <= (kUnpackTiles - 1) * kTileRows<Int4Group>) return then(weights);
    auto *unpacked = static_cast<UnpackedGroup *>(scratch);
    unpack(weights, num_groups(num_inputs), unpacked);
    then(static_cast<const UnpackedGroup *>(unpacked));
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
            if (index % 2 == 0) fetch<MR>(next), next += step;
            const Inputs weights = inputs(*w, index);
            EACH_ROW {
                const auto &numbers = reinterpret_cast<const int8_t(&)[4]>(row(m).numbers[first_input(index)]);
                index == 0 ? products(low_sum[m], high_sum[m], weights, numbers)
                           : add_products(low_sum[m], high_sum[m], weights, numbers);
            }
        }
        fetch<MR>(next), next += step;
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

}  // namespace
}  // namespace noria
