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

inline F8 load_float16(const uint16_t *x) { return _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i *>(x))); }

// The four bytes at `numbers`, eight times.
inline __m256i all_words(const void *numbers) {
    int32_t word;
    memcpy(&word, numbers, sizeof word);
    return _mm256_set1_epi32(word);
}

// Of four inputs with 8 outputs, the first and the third, and the second and the fourth, as 16 bits each.
struct Pairs {
    __m256i even, odd;
    explicit Pairs(const uint8_t *numbers) {
        const __m256i all = _mm256_load_si256(reinterpret_cast<const __m256i *>(numbers));
        even = _mm256_and_si256(all, _mm256_set1_epi16(255)), odd = _mm256_srli_epi16(all, 8);
    }
};

// Products of two inputs with 16 outputs, added up. As one piece of assembly, since GCC would otherwise compute those of all rows
// before it adds them, and run out of registers.
inline void add_products(__m256i &low_sum, __m256i &high_sum, __m256i low, __m256i high, const int16_t *row) {
    __m256i a, product;
    asm volatile("vpbroadcastd %[row], %[a]\n\t"
                 "vpmaddwd %[a], %[low], %[product]\n\t"
                 "vpmaddwd %[a], %[high], %[a]\n\t"
                 "vpaddd %[product], %[low_sum], %[low_sum]\n\t"
                 "vpaddd %[a], %[high_sum], %[high_sum]"
                 : [low_sum] "+x"(low_sum), [high_sum] "+x"(high_sum), [a] "=&x"(a), [product] "=&x"(product)
                 : [low] "x"(low), [high] "x"(high), [row] "m"(*reinterpret_cast<const int16_t(*)[2]>(row)));
}

template <int MR>
ON_ITS_OWN void product(const Int8Groups *w, const char *rows, size_t row_bytes, int num_inputs, Fetch ahead, float *out) {
    memset(out, 0, MR * kPanel * sizeof(float));
    const char *next = ahead.start();
    const ptrdiff_t step = ahead.step(64);
    for (const Int8Groups *end = w + num_packed<Int8Groups>(num_inputs); w < end; ++w) {
        for (int g = 0; g < Int8Groups::kCount; ++g, rows += sizeof(Int8RowGroup)) {
            const auto row = [&](int m) -> auto & { return *reinterpret_cast<const Int8RowGroup *>(rows + m * row_bytes); };
            __m256i low_sum[MR], high_sum[MR];
            EACH_ROW low_sum[m] = high_sum[m] = all_words(&row(m).offset);
            _Pragma("GCC unroll 8") for (int i = 0; i < 8; ++i) {
                fetch<MR>(next), next += step;
                const Pairs low(w->numbers[g] + 64 * i), high(w->numbers[g] + 64 * i + 32);
                EACH_ROW add_products(low_sum[m], high_sum[m], low.even, high.even, row(m).numbers + 4 * i);
                EACH_ROW add_products(low_sum[m], high_sum[m], low.odd, high.odd, row(m).numbers + 4 * i + 2);
            }
            const F8 low_scale = load_float16(w->scale[g]), high_scale = load_float16(w->scale[g] + 8);
            EACH_ROW {
                const F8 row_scale = _mm256_broadcast_ss(&row(m).scale);
                float *y = out + m * kPanel;
                const F8 low = _mm256_mul_ps(_mm256_cvtepi32_ps(low_sum[m]), row_scale);
                const F8 high = _mm256_mul_ps(_mm256_cvtepi32_ps(high_sum[m]), row_scale);
                _mm256_store_ps(y, _mm256_fmadd_ps(low, low_scale, _mm256_load_ps(y)));
                _mm256_store_ps(y + 8, _mm256_fmadd_ps(high, high_scale, _mm256_load_ps(y + 8)));
            }
            // nor may it keep `out` in registers, of which the sums of the next group need all
            asm volatile("" : : : "memory");
        }
        fetch<MR>(next), next += step;
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

inline size_t unpacked_bytes(int num_inputs) { return num_packed<Int4Group>(num_inputs) * sizeof(UnpackedGroup); }

// then(weights): a panel's, as they are or unpacked to scratch, whichever is faster for so many rows.
template <class Then> void with_unpacked(const Int4Group *weights, int num_inputs, int num_rows, void *scratch, Then then) {
    if (num_rows <= (kUnpackTiles - 1) * kTileRows<Int4Group>) return then(weights);
    auto *unpacked = static_cast<UnpackedGroup *>(scratch);
    unpack(weights, num_packed<Int4Group>(num_inputs), unpacked);
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
    for (const Group *end = w + num_packed<Int4Group>(num_inputs); w < end; ++w, rows += sizeof(Int4RowGroup)) {
        const auto row = [&](int m) -> const Int4RowGroup & { return *reinterpret_cast<const Int4RowGroup *>(rows + m * row_bytes); };
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
