#include "largest.h"

#include "simd.h"

namespace noria {
namespace {

constexpr int kBlock = 512;

// Of x [count], NaN if one is.
float maximum_of(const float *x, int count) {
    F8 top = _mm256_set1_ps(-INFINITY), nan = _mm256_setzero_ps();
    float rest = -INFINITY;
    int i = 0;
    for (; i + 8 <= count; i += 8) {
        const F8 value = _mm256_loadu_ps(x + i);
        top = _mm256_max_ps(top, value);
        nan = _mm256_or_ps(nan, _mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    }
    for (; i < count; ++i) {
        if (x[i] != x[i]) return NAN;
        rest = std::max(rest, x[i]);
    }
    return _mm256_movemask_ps(nan) ? NAN : std::max(rest, maximum(top));
}

}  // namespace

Peak largest(const float *x, int count, int first_id) {
    Peak peak{-INFINITY, 0};
    for (int begin = 0; begin < count; begin += kBlock)
        peak.take({maximum_of(x + begin, std::min(kBlock, count - begin)), begin});
    if (peak.value == peak.value) peak.id = static_cast<int>(std::find(x + peak.id, x + count, peak.value) - x);
    peak.id += first_id;
    return peak;
}

}  // namespace noria

extern "C" {

// peaks, ids [rows]: of scores [rows][count].
void noria_largest(const float *scores, int32_t rows, int32_t count, float *peaks, int64_t *ids) {
    for (int row = 0; row < rows; ++row) {
        const auto [value, id] = noria::largest(scores + static_cast<size_t>(row) * count, count, 0);
        peaks[row] = value;
        ids[row] = id;
    }
}

}  // extern "C"
