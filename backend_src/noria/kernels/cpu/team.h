// A team of threads that runs one function together: each has a share of a stage's tasks, which it claims one by one, and then
// takes from the others' shares; a barrier ends the stage. In its share a thread goes from one task to the next, whose
// memory it may have fetched already.
//
// A thread that waits spins for a few microseconds and then sleeps, so that a neighbour who needs the core gets it. A team
// as large as the machine keeps each thread on a core of its own while it runs: a system that wakes two of them on one
// core leaves them there for milliseconds, and each then waits for the other at every barrier.
#pragma once

#include <atomic>
#include <cstdint>
#include <pthread.h>
#include <sched.h>

namespace noria {

class Team {
public:
    explicit Team(int num_threads);
    ~Team();
    Team(const Team &) = delete;
    Team &operator=(const Team &) = delete;

    // false where the system gave fewer threads than asked for, or no memory
    bool is_complete() const { return num_started_ == size_ - 1 && shares_; }
    int size() const { return size_; }

    // Every thread of the team, the caller among them, calls body(argument, thread index). Returns when all have.
    void run(void (*body)(void *, int), void *argument);

    // Inside run, by all threads in the same order: task(i) for each i in [0, count), then all wait for each other.
    template <class Task> void for_each(int thread, int count, Task task) {
        for (int owner = thread, i = 0; i < size_; ++i, owner = owner + 1 < size_ ? owner + 1 : 0) {
            const int64_t begin = int64_t{count} * owner / size_, size = int64_t{count} * (owner + 1) / size_ - begin;
            std::atomic<int> &claimed = shares_[owner].num_claimed;
            while (claimed.load(std::memory_order_relaxed) < size) {
                const int index = claimed.fetch_add(1, std::memory_order_relaxed);
                if (index < size) task(static_cast<int>(begin) + index);
            }
        }
        barrier();
    }

private:
    struct Worker {
        Team *team;
        int index;
        pthread_t thread;
    };

    struct alignas(64) Share {
        std::atomic<int> num_claimed;
    };

    // Binds the calling thread to the core of that index, where the team is bound.
    void bind(int index) const;
    void barrier();
    void work(int index);
    static void *start(void *worker);

    const int size_;
    // the cores of this process, if there is one for each thread; else none
    cpu_set_t cores_;
    bool is_bound_;
    int num_started_ = 0;
    Worker *workers_;
    Share *shares_;
    void (*body_)(void *, int) = nullptr;
    void *argument_ = nullptr;
    bool is_closed_ = false;
    alignas(64) std::atomic<uint32_t> epoch_{0};
    alignas(64) std::atomic<uint32_t> generation_{0};
    alignas(64) std::atomic<int> num_arrived_{0};
    alignas(64) std::atomic<int> num_asleep_{0};
};

}  // namespace noria
