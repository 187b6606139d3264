// Products with weights that are packed once: y[m, n] = sum_k x[m, k] W[n, k] + b[n].
//
// Packed weights are panels of 16 outputs, so that one read of a panel serves all rows:
//   float32  [ceil(N / 16)][K][16]
//   int8     [ceil(N / 16)][ceil(K / 2)][16][2], with one scale an output: W[n, k] ~ scale[n] w[n, k], |w| <= 127
// With int8 weights the rows of x are rounded too, to whole numbers of at most `activation_limit(K)` and one scale a row:
// as many as int16 holds and the sums of products stay exact in 32 bits with, 29,127 of 576 inputs and 10,922 of 1,536.
// A row's result depends on nothing but the row.
#pragma once

#include <cstddef>
#include <cstdint>

namespace noria {

constexpr int kPanel = 16;

// bias and scale may be null: no bias, float32 weights.
struct Linear {
    const void *weight;
    const float *scale;
    const float *bias;
    int32_t num_inputs;
    int32_t num_outputs;
};

// The rows that a Linear reads: float32 [rows][num_inputs], or int16 [rows][stride] and a scale each.
struct Rows {
    const float *values;
    const int16_t *rounded;
    const float *scale;
    int32_t stride;
};

inline int num_panels(int num_outputs) { return (num_outputs + kPanel - 1) / kPanel; }
// of int16 rows, in elements: whole vectors, whose tail is zero
inline int rounded_stride(int num_inputs) { return (num_inputs + 15) / 16 * 16; }
int activation_limit(int num_inputs);

// x [num_inputs] to y [rounded_stride], returns the scale; NaN where x holds NaN or inf.
float round_row(const float *x, int num_inputs, int16_t *y);

// Outputs of panels [first_panel, last_panel) and rows [first_row, last_row) of y [rows][y_stride].
// is_added: onto what y holds.
void multiply(const Linear &linear, const Rows &x, int first_panel, int last_panel, int first_row, int last_row, float *y,
              size_t y_stride, bool is_added);

}  // namespace noria
