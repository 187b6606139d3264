// The largest of a row of scores, for greedy sampling.
#pragma once

namespace noria {

// value: NaN if one of the scores is. id: of the first that is as large; of none where value is NaN.
struct Peak {
    float value;
    int id;

    // Of these scores and of others with higher ids.
    void take(const Peak &later) {
        if (value == value && (later.value > value || later.value != later.value)) *this = later;
    }
};

// Of x [count], count > 0, whose first has the id first_id.
Peak largest(const float *x, int count, int first_id);

}  // namespace noria
