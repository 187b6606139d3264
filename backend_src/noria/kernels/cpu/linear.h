// Products with weights that are packed once: y[m, n] = sum_k x[m, k] W[n, k] + b[n].
//
// Packed weights are panels of 16 outputs, so that one read of a panel serves all rows:
//   float32  [ceil(N / 16)][K][16]
//   int8     [ceil(N / 16)][ceil(K / 64)] of Int8Groups: W[n, k] ~ scale w, |w| <= 127, the scale of the 32 inputs of a group
//            and one output. A block of GGUF's Q8_0 that has a 127 is kept exactly.
//   int4     [ceil(N / 16)][ceil(K / 32)] of Int4Group: W[n, k] ~ scale w + minimum, 0 <= w <= 15, both of the 32 inputs
//            of a group and one output. A block of GGUF's Q4_1 that uses its first and its last step is kept exactly.
// The rows of x are rounded too where weights are; see rounding.h. A row's result depends on nothing but the row.
#pragma once

#include <cstddef>
#include <cstdint>

namespace noria {

constexpr int kPanel = 16;
// inputs that share a scale
constexpr int kGroup = 32;
// Rows that a block of them should be a multiple of: a tile of any of the products.
constexpr int kMostTileRows = 16;

enum class WeightFormat : int32_t { kFloat32 = 0, kInt8 = 1, kInt4 = 2 };

// bias: null for none.
struct Linear {
    const void *weight;
    const float *bias;
    int32_t num_inputs;
    int32_t num_outputs;
    WeightFormat format;
};

// 32 inputs of a panel's outputs. A byte of numbers [4][16][4] is inputs 4 i + j in its low half and 16 + 4 i + j in its
// high one. scale and minimum are float16, which hold GGUF's as they are.
struct alignas(64) Int4Group {
    static constexpr int kCount = 1;
    uint8_t numbers[kGroup * kPanel / 2];
    uint16_t scale[kPanel];
    uint16_t minimum[kPanel];
};
static_assert(sizeof(Int4Group) == 320, "kernels/cpu_library.py counts on it");

// Two groups of 32 inputs of a panel's outputs: together they fill whole lines. Of a group, numbers [8][16][4] are those of
// inputs 4 i + j, plus kOffset: without a sign, as vpdpbusd wants them. scale is float16, which holds GGUF's as it is.
struct alignas(64) Int8Groups {
    static constexpr int kCount = 2, kOffset = 128;
    uint8_t numbers[kCount][kGroup * kPanel];
    uint16_t scale[kCount][kPanel];
};
static_assert(sizeof(Int8Groups) == 1088, "kernels/cpu_library.py counts on it");

// The rows that a Linear reads, as `round_row` makes them of its format: row_bytes apart.
struct Rows {
    const char *numbers;
    size_t row_bytes;
};

inline int num_panels(int num_outputs) { return (num_outputs + kPanel - 1) / kPanel; }

// Int8Groups or Int4Group of a panel. What of the last goes beyond the inputs is zeros.
template <class Groups> int num_packed(int num_inputs) {
    constexpr int size = Groups::kCount * kGroup;
    return (num_inputs + size - 1) / size;
}

// Groups of 32 inputs of a panel, and of a row.
template <class Groups> int num_groups(int num_inputs) { return num_packed<Groups>(num_inputs) * Groups::kCount; }

// What `multiply` needs of memory beside its arguments, aligned to 64 bytes.
size_t scratch_bytes(const Linear &linear);

// Outputs of panels [first_panel, last_panel) and rows [first_row, last_row) of y [rows][y_stride].
// is_added: onto what y holds. scratch: `scratch_bytes`, of this thread alone.
void multiply(const Linear &linear, const Rows &x, int first_panel, int last_panel, int first_row, int last_row, float *y,
              size_t y_stride, bool is_added, void *scratch);

}  // namespace noria
