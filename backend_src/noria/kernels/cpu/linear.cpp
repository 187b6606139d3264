#include "linear.h"

#include <algorithm>
#include <cstring>

#include "fetch.h"
#include "rounding.h"
#include "simd.h"
#ifdef __AVX512F__
#include "products_avx512.h"
#else
#include "products_avx2.h"
#endif

namespace noria {
namespace {

// The sums of `count` outputs of a row, with their bias, to y.
inline void store(const float *sums, const Linear &linear, int first_output, int count, float *y, bool is_added) {
    const float *bias = linear.bias ? linear.bias + first_output : nullptr;
    const int first = for_each_vector(count, [&](int i, auto lanes) {
        using V = decltype(lanes);
        auto value = V::load(sums + i);
        if (bias) value = V::add(value, V::load(bias + i));
        V::store(y + i, is_added ? V::add(V::load(y + i), value) : value);
    });
    for (int i = first; i < count; ++i) {
        const float value = bias ? sums[i] + bias[i] : sums[i];
        y[i] = is_added ? y[i] + value : value;
    }
}

// Asks for the cache line that [x, x + 16) is in for writing. The sums of a tile are stored in every group: behind a store
// that waits for its line those soon find no room.
inline void claim(float *x) { asm volatile("prefetchw %0" : : "m"(*x)); }

// A product's rows and where its outputs go, of one panel.
struct Target {
    const Linear &linear;
    const Rows &x;
    int panel, first_row, last_row;
    float *y;
    size_t y_stride;
    bool is_added;
};

// `weights`: of the panel, packed or not; next_panel: the packed ones that are multiplied next, panel_bytes of them.
template <class Weight>
void multiply_panel(const Target &target, const Weight *weights, const void *next_panel, size_t panel_bytes) {
    const Linear &linear = target.linear;
    const Rows &x = target.x;
    const int first_output = target.panel * kPanel, count = std::min(kPanel, linear.num_outputs - first_output);
    constexpr int tile_rows = kTileRows<Weight>;
    const int num_tiles = (target.last_row - target.first_row + tile_rows - 1) / tile_rows;
    for_each_tile<tile_rows>(target.first_row, target.last_row, [&](int row, auto num_rows) {
        alignas(64) float sums[num_rows * kPanel];
        float *y = target.y + row * target.y_stride + first_output;
        for (int m = 0; m < num_rows; ++m) claim(y + m * target.y_stride);
        const Fetch ahead(next_panel, panel_bytes, (row - target.first_row) / tile_rows, num_tiles);
        product<num_rows>(weights, x.numbers + row * x.row_bytes, x.row_bytes, linear.num_inputs, ahead, sums);
        for (int m = 0; m < num_rows; ++m)
            store(sums + m * kPanel, linear, first_output, count, y + m * target.y_stride, target.is_added);
    });
}

}  // namespace

size_t scratch_bytes(const Linear &linear) {
    return linear.format == WeightFormat::kInt4 ? unpacked_bytes(linear.num_inputs) : 0;
}

void multiply(const Linear &linear, const Rows &x, int first_panel, int last_panel, int first_row, int last_row, float *y,
              size_t y_stride, bool is_added, void *scratch) {
    const size_t num_inputs = linear.num_inputs;
    const auto for_each_panel = [&](auto *weights, size_t panel_size) {
        weights += first_panel * panel_size;
        for (int panel = first_panel; panel < last_panel; ++panel, weights += panel_size) {
            const Target target{linear, x, panel, first_row, last_row, y, y_stride, is_added};
            const size_t panel_bytes = panel_size * sizeof *weights;
            const auto multiply_with = [&](const auto *same) {
                multiply_panel(target, same, weights + panel_size, panel_bytes);
            };
            if constexpr (std::is_same_v<decltype(weights), const Int4Group *>) {
                with_unpacked(weights, linear.num_inputs, last_row - first_row, scratch, multiply_with);
            } else {
                multiply_with(weights);
            }
        }
    };
    switch (linear.format) {
    case WeightFormat::kFloat32: for_each_panel(static_cast<const float *>(linear.weight), num_inputs * kPanel); break;
    case WeightFormat::kInt8: for_each_panel(static_cast<const Int8Groups *>(linear.weight), num_packed<Int8Groups>(num_inputs)); break;
    case WeightFormat::kInt4: for_each_panel(static_cast<const Int4Group *>(linear.weight), num_packed<Int4Group>(num_inputs));
    }
}

}  // namespace noria
