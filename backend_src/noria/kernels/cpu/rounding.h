// Rows of activations as the products read them: with float32 weights as they are, with others rounded to int8, up to 127 and
// one scale for 32 inputs. Sums of products are exact in 32 bits then, and of 16 with weights up to 15 in 16 bits.
// A row that holds NaN or inf, in any group, gets a scale of NaN there, which shows in all outputs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "linear.h"

namespace noria {

// 32 inputs of a row. sum: of what the numbers stand for. offset: what takes Int8Groups::kOffset out of the numbers' products.
template <class Number> struct RowGroup {
    Number numbers[kGroup];
    float scale;
    float sum;
    int32_t offset;
};

using Int4RowGroup = RowGroup<int8_t>;
#ifdef __AVX512F__
using Int8RowGroup = RowGroup<int8_t>;
#else
// AVX2 multiplies int8 only where the sum of two products fits 16 bits: numbers are int16, of each four in the order 0 2 1 3
using Int8RowGroup = RowGroup<int16_t>;
#endif

// Of a row of that many inputs.
size_t row_bytes(WeightFormat format, int num_inputs);

// x [num_inputs] to `row`, which has `row_bytes`; not float32, whose rows are read where they are.
void round_row(WeightFormat format, const float *x, int num_inputs, char *row);

}  // namespace noria
