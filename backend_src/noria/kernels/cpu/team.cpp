#include "team.h"

#include <climits>
#include <cstdlib>
#include <cstring>
#include <immintrin.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace noria {
namespace {

// about 30 us on a Zen 3; a stage of a decode step takes 5 to 500
constexpr int kSpins = 1000;

void sleep_while(std::atomic<uint32_t> &word, uint32_t value) {
    syscall(SYS_futex, reinterpret_cast<uint32_t *>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake_all(std::atomic<uint32_t> &word) {
    syscall(SYS_futex, reinterpret_cast<uint32_t *>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

// Until word is no longer `value`.
void wait_for_change(std::atomic<uint32_t> &word, uint32_t value, std::atomic<int> &num_asleep) {
    for (int spin = 0; spin < kSpins; ++spin) {
        if (word.load(std::memory_order_acquire) != value) return;
        _mm_pause();
    }
    num_asleep.fetch_add(1);
    while (word.load() == value) sleep_while(word, value);
    num_asleep.fetch_sub(1);
}

void change(std::atomic<uint32_t> &word, std::atomic<int> &num_asleep) {
    word.fetch_add(1);
    if (num_asleep.load() > 0) wake_all(word);
}

}  // namespace

Team::Team(int num_threads)
    : size_(num_threads), workers_(static_cast<Worker *>(calloc(num_threads, sizeof(Worker)))),
      shares_(static_cast<Share *>(aligned_alloc(alignof(Share), num_threads * sizeof(Share)))) {
    if (!workers_ || !shares_) return;
    memset(static_cast<void *>(shares_), 0, num_threads * sizeof(Share));
    is_bound_ = size_ > 1 && sched_getaffinity(0, sizeof cores_, &cores_) == 0 && CPU_COUNT(&cores_) == size_;
    for (int index = 1; index < size_; ++index) {
        workers_[index] = {this, index, {}};
        if (pthread_create(&workers_[index].thread, nullptr, start, &workers_[index]) != 0) break;
        ++num_started_;
    }
}

Team::~Team() {
    is_closed_ = true;
    change(epoch_, num_asleep_);
    for (int index = 1; index <= num_started_; ++index) pthread_join(workers_[index].thread, nullptr);
    free(workers_);
    free(shares_);
}

void Team::run(void (*body)(void *, int), void *argument) {
    body_ = body;
    argument_ = argument;
    cpu_set_t own;
    const bool is_restored = is_bound_ && sched_getaffinity(0, sizeof own, &own) == 0;
    if (is_restored) bind(0);
    change(epoch_, num_asleep_);
    body(argument, 0);
    barrier();
    // what the caller starts later must not inherit the core
    if (is_restored) sched_setaffinity(0, sizeof own, &own);
}

void Team::bind(int index) const {
    if (!is_bound_) return;
    for (int core = 0, rank = 0; core < CPU_SETSIZE; ++core) {
        if (!CPU_ISSET(core, &cores_) || rank++ != index) continue;
        cpu_set_t only;
        CPU_ZERO(&only);
        CPU_SET(core, &only);
        // refused inside some containers, where the threads then run wherever the system puts them
        sched_setaffinity(0, sizeof only, &only);
        return;
    }
}

void Team::barrier() {
    const uint32_t generation = generation_.load(std::memory_order_acquire);
    if (num_arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
        num_arrived_.store(0, std::memory_order_relaxed);
        for (int index = 0; index < size_; ++index) shares_[index].num_claimed.store(0, std::memory_order_relaxed);
        change(generation_, num_asleep_);
    } else {
        wait_for_change(generation_, generation, num_asleep_);
    }
}

void Team::work(int index) {
    bind(index);
    for (uint32_t epoch = 0;; ++epoch) {
        wait_for_change(epoch_, epoch, num_asleep_);
        if (is_closed_) return;
        body_(argument_, index);
        barrier();
    }
}

void *Team::start(void *worker) {
    auto *self = static_cast<Worker *>(worker);
    self->team->work(self->index);
    return nullptr;
}

}  // namespace noria
