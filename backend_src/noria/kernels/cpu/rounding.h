// Rows of activations as the products read them, which round them as far as their weights are rounded:
//   float32  as they are
//   int8     int16, up to `activation_limit(K)` and one scale a row: as many as int16 holds and the sums of products stay
//            exact in 32 bits with, 29,127 of 576 inputs and 10,922 of 1,536
//   int4     int8, up to 127 and one scale for 32 inputs: 16 products with weights up to 15 are exact in 16 bits
// A row that holds NaN or inf, in int4 a group of it, gets a scale of NaN, which shows in all outputs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "linear.h"

namespace noria {

// A row for int8 weights; `numbers` goes on for whole vectors, the last of which ends in zeros.
struct alignas(32) Int16Row {
    float scale;
    alignas(32) int16_t numbers[16];
};

// 32 inputs of a row for int4 weights. sum: of what the numbers stand for.
struct Int8Group {
    int8_t numbers[kGroup];
    float scale;
    float sum;
};

inline int num_groups(int num_inputs) { return (num_inputs + kGroup - 1) / kGroup; }

// Of a row of that many inputs.
size_t row_bytes(WeightFormat format, int num_inputs);

// x [num_inputs] to `row`, which has `row_bytes`; not float32, whose rows are read where they are.
void round_row(WeightFormat format, const float *x, int num_inputs, char *row);

}  // namespace noria
