// Fetching of weights into the cache.
#pragma once

#include <cstddef>
#include <immintrin.h>

namespace noria {

// The weights that are fetched while others are multiplied: of the next panel, a share by each tile of rows that passes over
// this one. Without it the processor waits for memory first and computes afterwards; and it drops most fetches when many
// come at once.
class Fetch {
public:
    // tile of num_tiles passes over the panel of that many bytes that `next` follows
    Fetch(const void *next, size_t panel_bytes, int tile, int num_tiles)
        : next_(static_cast<const char *>(next) + panel_bytes * tile / num_tiles), num_tiles_(num_tiles) {}

    // Bytes that this tile fetches for so many that it reads, rounded down.
    ptrdiff_t step(int num_bytes) const { return num_bytes / num_tiles_; }
    const char *start() const { return next_; }

private:
    const char *next_;
    int num_tiles_;
};

// For tiles of MR rows. Into the second cache, from which more can be on its way at a time, unless one row alone leaves no time
// to wait for it.
template <int MR> inline void fetch(const char *weights) { _mm_prefetch(weights, MR == 1 ? _MM_HINT_T0 : _MM_HINT_T1); }

}  // namespace noria
