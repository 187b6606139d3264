#include "rounding.h"

#include <algorithm>
#include <cstring>

#include "simd.h"

namespace noria {
namespace {

// The largest whole number of a row of that many inputs.
int activation_limit(int num_inputs) {
    // num_inputs * limit * 127 < 2^31
    return std::min<int64_t>(INT16_MAX, (int64_t{1} << 31) / (int64_t{128} * num_inputs));
}

void round_to_int16(const float *x, int num_inputs, Int16Row &row) {
    const auto [top, is_finite] = range(x, num_inputs);
    const int stride = (num_inputs + 15) / 16 * 16;
    const float limit = activation_limit(num_inputs);
    const float inverse = limit / top;
    // a row of zeros, and one so small that its maximum has no inverse, are zeros
    if (!is_finite || !std::isfinite(inverse)) {
        memset(row.numbers, 0, stride * sizeof(int16_t));
        row.scale = is_finite ? 0.0f : NAN;
        return;
    }
    const F8 factor = _mm256_set1_ps(inverse);
    int k = 0;
    for (; k + 8 <= num_inputs; k += 8) {
        const __m256i whole = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + k), factor));
        const __m128i packed = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i *>(row.numbers + k), packed);
    }
    for (; k < num_inputs; ++k) row.numbers[k] = static_cast<int16_t>(std::lrintf(x[k] * inverse));
    for (; k < stride; ++k) row.numbers[k] = 0;
    row.scale = top / limit;
}

// x [32]
void round_to_int8(const float *x, Int8Group &group) {
    const auto [top, is_finite] = range(x, kGroup);
    const float inverse = 127 / top;
    if (!is_finite || !std::isfinite(inverse)) {
        memset(group.numbers, 0, kGroup);
        group.scale = group.sum = is_finite ? 0.0f : NAN;
        return;
    }
    __m256i whole[4], total = _mm256_setzero_si256();
    for (int i = 0; i < 4; ++i) {
        whole[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), _mm256_set1_ps(inverse)));
        total = _mm256_add_epi32(total, whole[i]);
    }
    // packing works within halves of 128 bits, and leaves words of four numbers in the order 0 2 4 6 1 3 5 7
    const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(whole[0], whole[1]), _mm256_packs_epi32(whole[2], whole[3]));
    const __m256i ordered = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(group.numbers), ordered);
    group.scale = top / 127;
    group.sum = group.scale * sum(_mm256_cvtepi32_ps(total));
}

void round_to_int8(const float *x, int num_inputs, Int8Group *groups) {
    int k = 0;
    for (; k + kGroup <= num_inputs; k += kGroup) round_to_int8(x + k, *groups++);
    if (k == num_inputs) return;
    float rest[kGroup] = {};
    std::copy(x + k, x + num_inputs, rest);
    round_to_int8(rest, *groups);
}

}  // namespace

size_t row_bytes(WeightFormat format, int num_inputs) {
    switch (format) {
    case WeightFormat::kInt8: return offsetof(Int16Row, numbers) + (num_inputs + 15) / 16 * sizeof(Int16Row::numbers);
    case WeightFormat::kInt4: return num_groups(num_inputs) * sizeof(Int8Group);
    default: return num_inputs * sizeof(float);
    }
}

void round_row(WeightFormat format, const float *x, int num_inputs, char *row) {
    switch (format) {
    case WeightFormat::kInt8: round_to_int16(x, num_inputs, *reinterpret_cast<Int16Row *>(row)); break;
    case WeightFormat::kInt4: round_to_int8(x, num_inputs, reinterpret_cast<Int8Group *>(row)); break;
    case WeightFormat::kFloat32: break;
    }
}

}  // namespace noria
