#include "rounding.h"

#include <algorithm>
#include <cstring>

#include "simd.h"

namespace noria {
namespace {

// `whole`: 32 numbers.
void write(const __m256i (&whole)[4], int8_t *numbers) {
    // packing works within halves of 128 bits, and leaves words of four numbers in the order 0 2 4 6 1 3 5 7
    const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(whole[0], whole[1]), _mm256_packs_epi32(whole[2], whole[3]));
    const __m256i ordered = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(numbers), ordered);
}

// The same in the order of Int8RowGroup of AVX2.
[[maybe_unused]] void write(const __m256i (&whole)[4], int16_t *numbers) {
    for (int i = 0; i < 4; ++i) {
        const __m256i ordered = _mm256_shuffle_epi32(whole[i], _MM_SHUFFLE(3, 1, 2, 0));
        const __m128i packed = _mm_packs_epi32(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i *>(numbers + 8 * i), packed);
    }
}

// x [32]
template <class Group> void round_group(const float *x, Group &group) {
    const auto [top, is_finite] = range(x, kGroup);
    const float inverse = 127 / top;
    // a group of zeros, and one so small that its maximum has no inverse, are zeros
    if (!is_finite || !std::isfinite(inverse)) {
        group = {};
        group.scale = group.sum = is_finite ? 0.0f : NAN;
        return;
    }
    __m256i whole[4], total = _mm256_setzero_si256();
    for (int i = 0; i < 4; ++i) {
        whole[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), _mm256_set1_ps(inverse)));
        total = _mm256_add_epi32(total, whole[i]);
    }
    write(whole, group.numbers);
    // of whole numbers below 2^24, so exact
    const float sum_of_numbers = sum(_mm256_cvtepi32_ps(total));
    group.scale = top / 127;
    group.sum = group.scale * sum_of_numbers;
    group.offset = -Int8Groups::kOffset * static_cast<int32_t>(sum_of_numbers);
}

// x [num_inputs], with zeros behind it, to as many groups.
template <class Group> void round_groups(const float *x, int num_inputs, int num_groups, char *row) {
    auto *group = reinterpret_cast<Group *>(row);
    for (const Group *end = group + num_groups; group < end; ++group, x += kGroup, num_inputs -= kGroup) {
        if (num_inputs >= kGroup) {
            round_group(x, *group);
        } else {
            float rest[kGroup] = {};
            std::copy(x, x + std::max(0, num_inputs), rest);
            round_group(rest, *group);
        }
    }
}

}  // namespace

size_t row_bytes(WeightFormat format, int num_inputs) {
    switch (format) {
    case WeightFormat::kInt8: return num_groups<Int8Groups>(num_inputs) * sizeof(Int8RowGroup);
    case WeightFormat::kInt4: return num_groups<Int4Group>(num_inputs) * sizeof(Int4RowGroup);
    default: return num_inputs * sizeof(float);
    }
}

void round_row(WeightFormat format, const float *x, int num_inputs, char *row) {
    switch (format) {
    case WeightFormat::kInt8: round_groups<Int8RowGroup>(x, num_inputs, num_groups<Int8Groups>(num_inputs), row); break;
    case WeightFormat::kInt4: round_groups<Int4RowGroup>(x, num_inputs, num_groups<Int4Group>(num_inputs), row); break;
    case WeightFormat::kFloat32: break;
    }
}

}  // namespace noria
