// One forward pass of a decoder of the Llama family, as one call: the C interface of this library.
//
// kernels/cpu_library.py describes the structures to Python and must say the same. Every stage is shared out among the
// team by rows, panels of outputs or heads; no result depends on who computed it.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "attention.h"
#include "largest.h"
#include "linear.h"
#include "rounding.h"
#include "simd.h"
#include "team.h"

using namespace noria;

extern "C" {

struct NoriaLayer {
    const float *attention_norm;
    const float *mlp_norm;
    // [num_heads + num_kv_heads][head_dim], or null
    const float *qk_norm;
    Linear qkv, attention_output, gate_up, down;
};

struct NoriaModel {
    int32_t num_layers, hidden_size, intermediate_size, vocab_size;
    AttentionShape attention;
    float rms_norm_eps;
    const NoriaLayer *layers;
    const float *embedding;
    const float *final_norm;
    Linear head;
};

// cos, sin [position][head_dim / 2], of all positions. cache: [num_layers][2][num_blocks] blocks, keys before values.
// logits [num_logits][vocab_size]: of the tokens logit_indices. peaks, peak_ids [num_logits]: as noria_largest says of them.
struct NoriaStep {
    int32_t num_tokens, num_rows, num_logits;
    const int64_t *token_ids;
    const int64_t *positions;
    const int64_t *slot_mapping;
    const int64_t *logit_indices;
    const float *cos;
    const float *sin;
    const AttentionRow *rows;
    char *cache;
    int64_t num_blocks;
    float *logits;
    float *peaks;
    int64_t *peak_ids;
    // seconds spent in each of NoriaStage, or null
    double *stage_seconds;
};

enum NoriaStage { kStageLinear, kStageHead, kStageAttention, kStagePointwise };

}  // extern "C"

namespace {

// Grows and never shrinks, so that a server stops asking the system for memory once it has seen its largest step.
template <class T> class Buffer {
public:
    ~Buffer() { free(data_); }
    T *reserve(size_t count) {
        if (count > capacity_) {
            free(data_);
            // aligned_alloc wants a multiple of the alignment
            data_ = static_cast<T *>(aligned_alloc(64, (count * sizeof(T) + 63) / 64 * 64));
            capacity_ = data_ ? count : 0;
        }
        return data_;
    }

private:
    T *data_ = nullptr;
    size_t capacity_ = 0;
};

bool is_rounded(const Linear &linear) { return linear.format != WeightFormat::kFloat32; }

double now_s() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

}  // namespace

struct NoriaContext {
    explicit NoriaContext(int num_threads) : team(num_threads) {}
    Team team;
    Buffer<float> x, normed, qkv, attention, gate_up, scratch;
    Buffer<char> rounded, unpacked;
    Buffer<Peak> peaks;
    std::vector<QueryTile> tiles;
};

namespace {

class Pass {
public:
    Pass(NoriaContext &context, const NoriaModel &model, const NoriaStep &step)
        : team_(context.team), model_(model), step_(step), tiles_(context.tiles) {
        const size_t tokens = step.num_tokens, rows = std::max(step.num_tokens, step.num_logits);
        const auto &shape = model.attention;
        attention_width_ = static_cast<size_t>(shape.num_heads) * shape.kv.head_dim;
        qkv_width_ = attention_width_ + 2 * static_cast<size_t>(shape.kv.num_kv_heads) * shape.kv.head_dim;
        widest_ = std::max({static_cast<size_t>(model.hidden_size), attention_width_, static_cast<size_t>(model.intermediate_size)});
        x_ = context.x.reserve(rows * model.hidden_size);
        normed_ = context.normed.reserve(std::max<size_t>(rows, team_.size()) * widest_);
        qkv_ = context.qkv.reserve(tokens * qkv_width_);
        attended_ = context.attention.reserve(tokens * attention_width_);
        gate_up_ = context.gate_up.reserve(tokens * 2 * model.intermediate_size);
        scratch_ = context.scratch.reserve(team_.size() * shape.scratch_size());
        // rows of the layers' and of the head's format never wait beside each other; float32 ones are read where they are
        const auto bytes = [&](const Linear &linear) {
            return is_rounded(linear) ? row_bytes(linear.format, static_cast<int>(widest_)) : 0;
        };
        rounded_ = context.rounded.reserve(rows * std::max<size_t>({bytes(model.layers[0].qkv), bytes(model.head), 1}));
        unpacked_size_ = most_scratch(model);
        unpacked_ = context.unpacked.reserve(std::max<size_t>(team_.size() * unpacked_size_, 1));
        head_parts_ = in_parts(num_panels(model.head.num_outputs));
        peaks_ = context.peaks.reserve(std::max<size_t>(step.num_logits * head_parts_.count, 1));
        tiles_.clear();
        const int size = shape.tile_queries();
        for (int row = 0; row < step.num_rows; ++row)
            for (int first = 0; first < step.rows[row].num_queries; first += size)
                tiles_.push_back({row, first, std::min(size, step.rows[row].num_queries - first)});
    }

    bool has_memory() const {
        return x_ && normed_ && qkv_ && attended_ && gate_up_ && scratch_ && rounded_ && unpacked_ && peaks_;
    }

    void run() {
        team_.run([](void *self, int thread) { static_cast<Pass *>(self)->forward(thread); }, this);
    }

private:
    // bytes that the largest of the products needs of each thread
    static size_t most_scratch(const NoriaModel &model) {
        const NoriaLayer &layer = model.layers[0];
        return std::max({scratch_bytes(model.head), scratch_bytes(layer.qkv), scratch_bytes(layer.attention_output),
                         scratch_bytes(layer.gate_up), scratch_bytes(layer.down)});
    }

    void forward(int thread) {
        const auto &shape = model_.attention;
        const size_t hidden = model_.hidden_size, plane = step_.num_blocks * shape.kv.block_bytes();
        start(thread);
        for_each_row(thread, step_.num_tokens, [&](int t) {
            memcpy(x_ + t * hidden, model_.embedding + step_.token_ids[t] * hidden, hidden * sizeof(float));
        });
        for (int index = 0; index < model_.num_layers; ++index) {
            const NoriaLayer &layer = model_.layers[index];
            char *keys = step_.cache + 2 * index * plane, *values = keys + plane;
            Rows rows = normalise(thread, nullptr, step_.num_tokens, layer.attention_norm, layer.qkv);
            finish(thread, kStagePointwise);
            product(thread, layer.qkv, rows, step_.num_tokens, qkv_, qkv_width_, false);
            finish(thread, kStageLinear);
            for_each_row(thread, step_.num_tokens, [&](int t) { rotate_and_write(layer, t, keys, values); });
            finish(thread, kStagePointwise);
            const int num_tasks = static_cast<int>(tiles_.size()) * shape.kv.num_kv_heads;
            const auto task_at = [&](int index) {
                const QueryTile &tile = tiles_[index / shape.kv.num_kv_heads];
                return AttentionTask{step_.rows[tile.row], tile, index % shape.kv.num_kv_heads};
            };
            team_.for_each(thread, num_tasks, [&](int index) {
                const AttentionTask task = task_at(index), next = task_at(std::min(index + 1, num_tasks - 1));
                attend(shape, task, index + 1 < num_tasks ? &next : nullptr, keys, values,
                       qkv_ + task.row.query_start * qkv_width_, qkv_width_, attended_ + task.row.query_start * attention_width_,
                       attention_width_, scratch_ + thread * shape.scratch_size());
            });
            finish(thread, kStageAttention);
            rows = present(thread, attended_, step_.num_tokens, layer.attention_output);
            finish(thread, kStagePointwise);
            product(thread, layer.attention_output, rows, step_.num_tokens, x_, hidden, true);
            finish(thread, kStageLinear);
            rows = normalise(thread, nullptr, step_.num_tokens, layer.mlp_norm, layer.gate_up);
            finish(thread, kStagePointwise);
            product(thread, layer.gate_up, rows, step_.num_tokens, gate_up_, 2 * model_.intermediate_size, false);
            finish(thread, kStageLinear);
            rows = gate(thread, step_.num_tokens, layer.down);
            finish(thread, kStagePointwise);
            product(thread, layer.down, rows, step_.num_tokens, x_, hidden, true);
            finish(thread, kStageLinear);
        }
        const Rows rows = normalise(thread, step_.logit_indices, step_.num_logits, model_.final_norm, model_.head);
        finish(thread, kStagePointwise);
        const size_t vocab = model_.vocab_size;
        product(thread, model_.head, rows, step_.num_logits, step_.logits, vocab, false, [&](int part, int first, int last) {
            // while the logits are in this core's cache
            const int begin = part * head_parts_.size * kPanel, size = std::min<int>(vocab - begin, head_parts_.size * kPanel);
            for (int row = first; row < last; ++row)
                peaks_[row * head_parts_.count + part] = largest(step_.logits + row * vocab + begin, size, begin);
        });
        for_each_row(thread, step_.num_logits, [&](int row) {
            Peak peak = peaks_[row * head_parts_.count];
            for (int part = 1; part < head_parts_.count; ++part) peak.take(peaks_[row * head_parts_.count + part]);
            step_.peaks[row] = peak.value;
            step_.peak_ids[row] = peak.id;
        });
        finish(thread, kStageHead);
    }

    void start(int thread) {
        if (thread == 0 && step_.stage_seconds) stage_start_s_ = now_s();
    }

    void finish(int thread, NoriaStage stage) {
        if (thread != 0 || !step_.stage_seconds) return;
        const double now = now_s();
        step_.stage_seconds[stage] += now - stage_start_s_;
        stage_start_s_ = now;
    }

    // task(row) for each of so many rows, several at a time where there are many
    template <class Task> void for_each_row(int thread, int count, Task task) {
        const int size = std::max(1, count / (8 * team_.size()));
        team_.for_each(thread, (count + size - 1) / size, [&](int part) {
            for (int row = part * size; row < std::min(count, (part + 1) * size); ++row) task(row);
        });
    }

    // `values` [rows][num_inputs], of which each row has been through `round`, as the input of a product.
    Rows as_input(const float *values, const Linear &linear) const {
        return {is_rounded(linear) ? rounded_ : reinterpret_cast<const char *>(values), row_bytes(linear.format, linear.num_inputs)};
    }

    // Where a row of inputs is written before it is rounded: in memory that stays in the cache, or, if it is not, in its place.
    float *input_row(int thread, int row, const Linear &linear) const {
        return is_rounded(linear) ? normed_ + thread * widest_ : normed_ + row * static_cast<size_t>(linear.num_inputs);
    }

    // x [num_inputs] as row `row` of the product's input.
    void round(const float *x, int row, const Linear &linear) {
        if (is_rounded(linear))
            round_row(linear.format, x, linear.num_inputs, rounded_ + row * row_bytes(linear.format, linear.num_inputs));
    }

    Rows present(int thread, const float *values, int count, const Linear &linear) {
        const size_t width = linear.num_inputs;
        if (is_rounded(linear)) for_each_row(thread, count, [&](int row) { round(values + row * width, row, linear); });
        return as_input(values, linear);
    }

    // RMS norms of the rows of x_ at `indices`, or of the first `count`, for `linear`.
    Rows normalise(int thread, const int64_t *indices, int count, const float *weight, const Linear &linear) {
        const size_t width = model_.hidden_size;
        for_each_row(thread, count, [&](int row) {
            float *y = input_row(thread, row, linear);
            rms_norm(x_ + (indices ? indices[row] : row) * width, weight, width, y);
            round(y, row, linear);
        });
        return as_input(normed_, linear);
    }

    void rms_norm(const float *x, const float *weight, size_t width, float *y) const {
        F8 squares = _mm256_setzero_ps();
        float rest = 0;
        size_t i = 0;
        for (; i + 8 <= width; i += 8) {
            const F8 value = _mm256_loadu_ps(x + i);
            squares = _mm256_fmadd_ps(value, value, squares);
        }
        for (; i < width; ++i) rest += x[i] * x[i];
        const float factor = 1 / std::sqrt((sum(squares) + rest) / width + model_.rms_norm_eps);
        for (i = 0; i < width; ++i) y[i] = x[i] * factor * weight[i];
    }

    void rotate_and_write(const NoriaLayer &layer, int token, char *keys, char *values) {
        const auto &shape = model_.attention;
        const int head_dim = shape.kv.head_dim, half = head_dim / 2, num_turned = shape.num_heads + shape.kv.num_kv_heads;
        const float *cos = step_.cos + step_.positions[token] * half, *sin = step_.sin + step_.positions[token] * half;
        float *heads = qkv_ + token * qkv_width_;
        for (int head = 0; head < num_turned; ++head) {
            float *x = heads + head * head_dim;
            if (layer.qk_norm) rms_norm(x, layer.qk_norm + head * head_dim, head_dim, x);
            for (int i = 0; i < half; ++i) {
                const float first = x[i], second = x[half + i];
                x[i] = first * cos[i] - second * sin[i];
                x[half + i] = second * cos[i] + first * sin[i];
            }
        }
        write_kv(shape.kv, keys, values, step_.slot_mapping[token], heads + attention_width_, heads + num_turned * head_dim);
    }

    // silu(gate) * up of each token, for `linear`.
    Rows gate(int thread, int count, const Linear &linear) {
        const size_t width = model_.intermediate_size;
        for_each_row(thread, count, [&](int token) {
            float *y = input_row(thread, token, linear);
            swiglu(gate_up_ + token * 2 * width, width, y);
            round(y, token, linear);
        });
        return as_input(normed_, linear);
    }

    static void swiglu(const float *gate, size_t width, float *y) {
        const float *up = gate + width;
        const int first = for_each_vector(width, [&](int i, auto lanes) {
            using V = decltype(lanes);
            const auto g = V::load(gate + i);
            const auto silu = V::divide(g, V::add(V::all(1), exponential<V>(V::subtract(V::all(0), g))));
            V::store(y + i, V::multiply(silu, V::load(up + i)));
        });
        for (size_t i = first; i < width; ++i) y[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
    }

    // `count` tasks of up to `size` panels
    struct Parts {
        int size, count;
    };

    Parts in_parts(int panels) const {
        const int size = std::max(1, panels / (kTasksPerThread * team_.size()));
        return {size, (panels + size - 1) / size};
    }

    // then(part, first row, last row): after so many panels' outputs of these rows
    template <class Then = void (*)(int, int, int)>
    void product(int thread, const Linear &linear, const Rows &x, int count, float *y, size_t y_stride, bool is_added,
                 Then then = [](int, int, int) {}) {
        // rows whose inputs stay in the cache next to the processor while the panels pass by
        const int row_block = std::max(1, kRowBlockBytes / static_cast<int>(x.row_bytes) / kMostTileRows) * kMostTileRows;
        const int num_row_blocks = (count + row_block - 1) / row_block, panels = num_panels(linear.num_outputs);
        const auto [size, num_parts] = in_parts(panels);
        team_.for_each(thread, num_parts * num_row_blocks, [&, size = size, num_parts = num_parts](int task) {
            const int part = task % num_parts, first_row = task / num_parts * row_block;
            const int last_row = std::min(count, first_row + row_block);
            multiply(linear, x, part * size, std::min(panels, (part + 1) * size), first_row, last_row, y, y_stride, is_added,
                     unpacked_ + thread * unpacked_size_);
            then(part, first_row, last_row);
        });
    }

    static constexpr int kRowBlockBytes = 128 * 1024;
    static constexpr int kTasksPerThread = 6;

    Team &team_;
    const NoriaModel &model_;
    const NoriaStep &step_;
    std::vector<QueryTile> &tiles_;
    size_t attention_width_, qkv_width_, widest_, unpacked_size_;
    float *x_, *normed_, *qkv_, *attended_, *gate_up_, *scratch_;
    char *rounded_, *unpacked_;
    Parts head_parts_;
    Peak *peaks_;
    double stage_start_s_ = 0;
};

}  // namespace

extern "C" {

// What the library was compiled for.
const char *noria_instruction_set() { return kInstructionSet; }

// Whether this processor has what the library was compiled for; pyproject.toml says for what.
int noria_cpu_is_supported() {
#ifdef __AVX512F__
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
#else
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#endif
}

NoriaContext *noria_context_create(int num_threads) {
    auto *context = new NoriaContext(num_threads);
    if (context->team.is_complete()) return context;
    delete context;
    return nullptr;
}

void noria_context_destroy(NoriaContext *context) { delete context; }

// 0, or 1 where there is no memory.
int noria_forward(NoriaContext *context, const NoriaModel *model, const NoriaStep *step) {
    Pass pass(*context, *model, *step);
    if (!pass.has_memory()) return 1;
    pass.run();
    return 0;
}

// y [rows][num_outputs] of x [rows][num_inputs], by one thread: for tests and for the peak that a profile compares with.
void noria_linear(const Linear *linear, const float *x, int32_t rows, float *y) {
    const size_t size = row_bytes(linear->format, linear->num_inputs);
    const auto *numbers = reinterpret_cast<const char *>(x);
    Buffer<char> rounded, unpacked;
    if (is_rounded(*linear)) {
        char *target = rounded.reserve(rows * size);
        for (int row = 0; row < rows; ++row)
            round_row(linear->format, x + static_cast<size_t>(row) * linear->num_inputs, linear->num_inputs, target + row * size);
        numbers = target;
    }
    multiply(*linear, {numbers, size}, 0, num_panels(linear->num_outputs), 0, rows, y, linear->num_outputs, false,
             unpacked.reserve(scratch_bytes(*linear)));
}

}  // extern "C"
