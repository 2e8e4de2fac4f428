#include "pool.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace millrace {
namespace {

// A waiting thread spins so long before it sleeps, in cycles of the time-stamp counter: about the time that
// an op's slower thread may lag. Longer would take the core from whoever holds the slower thread up.
constexpr uint64_t kSpinCycles = 100'000;
// Between runs a thread spins this long: the host's part of a short step fits in.
constexpr uint64_t kIdleSpinCycles = 150'000;
// Rounding to nearest, no trap, denormals kept: the same in every thread, whatever its creator had.
constexpr unsigned kControl = 0x1F80;

void futex(std::atomic<uint32_t>* word, int operation, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// A number that threads wait upon to change.
class Signal {
 public:
  uint32_t value() const { return word_.load(std::memory_order_acquire); }

  void advance() {
    word_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst)) futex(&word_, FUTEX_WAKE, INT_MAX);
  }

  // Lets sleepers spin for a while.
  void nudge() {
    if (sleepers_.load(std::memory_order_seq_cst)) futex(&word_, FUTEX_WAKE, INT_MAX);
  }

  void wait_beyond(uint32_t seen, uint64_t spin_cycles) {
    for (;;) {
      const uint64_t start = __rdtsc();
      do {
        if (value() != seen) return;
        _mm_pause();
      } while (__rdtsc() - start < spin_cycles);
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      if (word_.load(std::memory_order_seq_cst) == seen) futex(&word_, FUTEX_WAIT, seen);
      sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    }
  }

 private:
  alignas(64) std::atomic<uint32_t> word_{0};
  alignas(64) std::atomic<uint32_t> sleepers_{0};
};

class Pool {
 public:
  Pool(int num_threads, bool pin) : num_threads_(num_threads) {
    std::vector<int> cpus;
    cpu_set_t allowed;
    if (pin && sched_getaffinity(0, sizeof(allowed), &allowed) == 0)
      for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
        if (CPU_ISSET(cpu, &allowed)) cpus.push_back(cpu);
    for (int thread = 1; thread < num_threads; ++thread) {
      threads_.emplace_back([this, thread] { work(thread); });
      if (thread < static_cast<int>(cpus.size())) {
        cpu_set_t own;
        CPU_ZERO(&own);
        CPU_SET(cpus[thread], &own);
        pthread_setaffinity_np(threads_.back().native_handle(), sizeof(own), &own);
      }
    }
  }

  ~Pool() {
    ops_ = nullptr;
    start_.advance();
    for (auto& thread : threads_) thread.join();
  }

  void run(const Op* ops, int64_t num_ops, int64_t* nanoseconds) {
    std::lock_guard<std::mutex> turn(turn_);
    const unsigned control = _mm_getcsr();
    _mm_setcsr(kControl);
    ops_ = ops;
    num_ops_ = num_ops;
    nanoseconds_ = nanoseconds;
    if (num_threads_ > 1) start_.advance();
    run_ops(0);
    _mm_setcsr(control);
  }

  void wake() {
    if (num_threads_ > 1) start_.nudge();
  }

  void barrier() {
    if (num_threads_ == 1) return;
    const uint32_t seen = passed_.value();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == num_threads_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      passed_.advance();
    } else {
      passed_.wait_beyond(seen, kSpinCycles);
    }
  }

  int64_t take() { return counters_[counter_].value.fetch_add(1, std::memory_order_relaxed); }

  // The next op's counter was zeroed one op ago, when nobody could be using it any more.
  void next_counter(int thread) {
    counter_ = (counter_ + 1) % 3;
    if (thread == 0) counters_[(counter_ + 1) % 3].value.store(0, std::memory_order_relaxed);
  }

 private:
  struct alignas(64) Counter {
    std::atomic<int64_t> value{0};
  };

  void run_ops(int thread);

  void work(int thread) {
    _mm_setcsr(kControl);
    uint32_t seen = 0;
    for (;;) {
      start_.wait_beyond(seen, kIdleSpinCycles);
      ++seen;
      if (ops_ == nullptr) return;
      run_ops(thread);
    }
  }

  const int num_threads_;
  const Op* ops_ = nullptr;
  int64_t num_ops_ = 0;
  int64_t* nanoseconds_ = nullptr;
  std::mutex turn_;
  Signal start_, passed_;
  alignas(64) std::atomic<int> arrived_{0};
  Counter counters_[3];
  // Every thread counts ops alike, so each knows the present counter without sharing.
  static thread_local int counter_;
  std::vector<std::thread> threads_;
};

thread_local int Pool::counter_ = 0;
thread_local Pool* running = nullptr;
thread_local int running_thread = 0;

void Pool::run_ops(int thread) {
  running = this;
  running_thread = thread;
  // A run begins at the same counter in all threads; all are zero then.
  counter_ = 0;
  const bool timed = thread == 0 && nanoseconds_ != nullptr;
  for (int64_t index = 0; index < num_ops_; ++index) {
    const int64_t start = timed ? now() : 0;
    ops_[index].run(ops_[index].args, thread, num_threads_);
    barrier();
    next_counter(thread);
    if (timed) nanoseconds_[index] += now() - start;
  }
  if (thread == 0)
    for (auto& counter : counters_) counter.value.store(0, std::memory_order_relaxed);
  running = nullptr;
}

}  // namespace

void op_barrier() { running->barrier(); }

int64_t op_take() { return running->take(); }

void op_restart() {
  running->barrier();
  running->next_counter(running_thread);
}

}  // namespace millrace

using millrace::Op;
using millrace::Pool;

void* millrace_pool_create(int64_t num_threads, int64_t pin) {
  return new Pool(static_cast<int>(num_threads), pin != 0);
}

void millrace_pool_destroy(void* pool) { delete static_cast<Pool*>(pool); }

void millrace_pool_run(void* pool, const Op* ops, int64_t num_ops, int64_t* nanoseconds) {
  static_cast<Pool*>(pool)->run(ops, num_ops, nanoseconds);
}

void millrace_pool_wake(void* pool) { static_cast<Pool*>(pool)->wake(); }
