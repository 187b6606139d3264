// Weights of linear layers, float32 [num_outputs][num_inputs], to the panels of linear.h. Outputs beyond the last are zero.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <immintrin.h>

#include "linear.h"
#include "rounding.h"

using namespace noria;

namespace {

struct Extremes {
    float lowest, highest;
    bool is_finite;
};

Extremes extremes(const float *x, int count) {
    Extremes found{x[0], x[0], true};
    for (int k = 0; k < count; ++k) {
        found.lowest = std::min(found.lowest, x[k]);
        found.highest = std::max(found.highest, x[k]);
        found.is_finite = found.is_finite && std::isfinite(x[k]);
    }
    return found;
}

uint16_t to_float16(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
uint16_t to_float16_upwards(float x) { return _cvtss_sh(x, _MM_FROUND_TO_POS_INF); }
float from_float16(uint16_t x) { return _cvtsh_ss(x); }

// x [count], count <= 32, as the numbers of output n of its panel. minimum is NaN where one of them is not finite, which no
// rounding must hide.
void pack_group(const float *x, int count, int n, int, Int4Group &group) {
    const Extremes found = extremes(x, count);
    group.minimum[n] = to_float16(found.is_finite ? found.lowest : NAN);
    group.scale[n] = to_float16(found.is_finite ? (found.highest - found.lowest) / 15 : 0);
    const float minimum = from_float16(group.minimum[n]), scale = from_float16(group.scale[n]);
    if (!(scale > 0) || !std::isfinite(minimum) || !std::isfinite(scale)) return;
    for (int k = 0; k < count; ++k) {
        const int number = std::clamp(static_cast<int>(std::lrintf((x[k] - minimum) / scale)), 0, 15);
        group.numbers[(k % 16 / 4 * kPanel + n) * 4 + k % 4] |= k < 16 ? number : number << 4;
    }
}

// The same for a group of `index`; here it is the scale that is NaN. It is rounded upwards, so that also one of few digits, below
// float16's normal numbers, reaches the largest weight.
void pack_group(const float *x, int count, int n, int index, Int8Groups &groups) {
    const Extremes found = extremes(x, count);
    groups.scale[index][n] = to_float16_upwards(found.is_finite ? std::max(-found.lowest, found.highest) / 127 : NAN);
    const float scale = from_float16(groups.scale[index][n]);
    const bool is_zero = !(scale > 0) || !std::isfinite(scale);
    for (int k = 0; k < count; ++k) {
        const int number = is_zero ? 0 : std::clamp(static_cast<int>(std::lrintf(x[k] / scale)), -127, 127);
        groups.numbers[index][(k / 4 * kPanel + n) * 4 + k % 4] = number + Int8Groups::kOffset;
    }
}

// weight [num_outputs][num_inputs] to [num_panels][as many as hold the inputs of one].
template <class Groups> void pack_groups(const float *weight, int num_outputs, int num_inputs, Groups *packed) {
    const size_t size = num_packed<Groups>(num_inputs);
    memset(static_cast<void *>(packed), 0, sizeof(Groups) * num_panels(num_outputs) * size);
    for (int n = 0; n < num_outputs; ++n) {
        for (int g = 0; g * kGroup < num_inputs; ++g) {
            pack_group(weight + static_cast<size_t>(n) * num_inputs + g * kGroup, std::min(kGroup, num_inputs - g * kGroup),
                       n % kPanel, g % Groups::kCount, packed[n / kPanel * size + g / Groups::kCount]);
        }
    }
}

}  // namespace

extern "C" {

void noria_pack_float32(const float *weight, int32_t num_outputs, int32_t num_inputs, float *packed) {
    for (int n = 0; n < num_panels(num_outputs) * kPanel; ++n)
        for (int k = 0; k < num_inputs; ++k)
            packed[(static_cast<size_t>(n / kPanel) * num_inputs + k) * kPanel + n % kPanel] =
                n < num_outputs ? weight[static_cast<size_t>(n) * num_inputs + k] : 0;
}

// A group whose largest weight's 127th is beyond float16 becomes inf or NaN. The scale is at least float16's smallest number, 6e-8.
void noria_pack_int8(const float *weight, int32_t num_outputs, int32_t num_inputs, Int8Groups *packed) {
    pack_groups(weight, num_outputs, num_inputs, packed);
}

// A group whose lowest weight, or a fifteenth of whose range, is beyond float16 becomes inf or NaN. One whose range is below
// 4.5e-7, for which float16 has no step, becomes its minimum.
void noria_pack_int4(const float *weight, int32_t num_outputs, int32_t num_inputs, Int4Group *packed) {
    pack_groups(weight, num_outputs, num_inputs, packed);
}

}  // extern "C"
