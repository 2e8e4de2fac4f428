#include "native/pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <mutex>
#include <thread>
#include <vector>

#include "native/processor.h"

namespace millrace {
namespace {

// A thread that waits for the others' parts spins so long before it sleeps, in microseconds. Longer would take the
// core from whoever holds the slower thread up.
constexpr uint64_t kSpinUs = 40;
// Without work a thread spins this long: waking takes about a tenth of a millisecond, and the host's part of a
// short step fits in.
constexpr uint64_t kIdleSpinUs = 160;

int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Which part of which op is next, in one word that is only changed as a whole: the number of the run in the upper
// half, then the op, then the part. A claim is a compare-and-swap from one part to the next, so it cannot succeed
// upon an op that is over or a run that is past.
constexpr uint64_t kPartBits = 16, kOpBits = 16;
constexpr uint64_t kPartMask = (uint64_t{1} << kPartBits) - 1;
// The part that says that the run is over.
constexpr uint64_t kOver = kPartMask;
// Runs of more ops are cut.
constexpr int64_t kMostOps = int64_t{1} << kOpBits;

uint64_t ticket_of(uint32_t run, int64_t op, uint64_t part) {
  return uint64_t{run} << (kPartBits + kOpBits) | static_cast<uint64_t>(op) << kPartBits | part;
}
int64_t op_of(uint64_t ticket) { return static_cast<int64_t>(ticket >> kPartBits & ((1u << kOpBits) - 1)); }
uint64_t part_of(uint64_t ticket) { return ticket & kPartMask; }
uint32_t run_of(uint64_t ticket) { return static_cast<uint32_t>(ticket >> (kPartBits + kOpBits)); }

class Pool;
thread_local Pool* running = nullptr;

class Pool {
 public:
  Pool(int num_threads, bool pin) : num_threads_(num_threads) {
    std::vector<int> cpus;
    cpu_set_t allowed;
    if (pin && sched_getaffinity(0, sizeof(allowed), &allowed) == 0)
      for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
        if (CPU_ISSET(cpu, &allowed)) cpus.push_back(cpu);
    for (int thread = 1; thread < num_threads; ++thread) {
      threads_.emplace_back([this] { work(); });
      if (thread < static_cast<int>(cpus.size())) {
        cpu_set_t own;
        CPU_ZERO(&own);
        CPU_SET(cpus[thread], &own);
        pthread_setaffinity_np(threads_.back().native_handle(), sizeof(own), &own);
      }
    }
  }

  void run(const Op* ops, int64_t num_ops, int64_t* nanoseconds) {
    std::lock_guard<std::mutex> turn(turn_);
    // The same in every thread, whatever its creator had.
    const uint64_t control = float_control();
    set_float_control(kPlainFloats);
    running = this;
    for (int64_t begin = 0; begin < num_ops; begin += kMostOps)
      run_some(ops + begin, num_ops - begin < kMostOps ? num_ops - begin : kMostOps,
               nanoseconds ? nanoseconds + begin : nullptr);
    running = nullptr;
    set_float_control(control);
  }

  // Lets sleepers spin for a while.
  void wake() { ring(); }

  int64_t take() { return counter_.fetch_add(1, std::memory_order_relaxed); }

 private:
  void run_some(const Op* ops, int64_t num_ops, int64_t* nanoseconds) {
    ops_ = ops;
    num_ops_ = num_ops;
    nanoseconds_ = nanoseconds;
    started_ = nanoseconds ? now() : 0;
    if (num_threads_ == 1) {
      for (int64_t op = 0; op < num_ops; ++op) {
        ops[op].run(ops[op].args, 0, 1);
        finish(op);
      }
      return;
    }
    publish(ticket_of(run_of(ticket_.load(std::memory_order_relaxed)) + 1, 0, 0));
    for (;;) {
      const uint64_t ticket = take_parts();
      if (part_of(ticket) == kOver) return;
      wait_beyond(ticket, kSpinUs);
    }
  }

  void work() {
    set_float_control(kPlainFloats);
    running = this;
    for (;;) {
      const uint64_t ticket = take_parts();
      wait_beyond(ticket, part_of(ticket) == kOver ? kIdleSpinUs : kSpinUs);
    }
  }

  // Runs parts until none is left to take; returns the ticket that said so.
  uint64_t take_parts() {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    for (;;) {
      const uint64_t part = part_of(ticket);
      if (part >= static_cast<uint64_t>(num_threads_)) return ticket;
      if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
      // The run cannot end before this part is done, so what belongs to it may be read.
      const int64_t op = op_of(ticket);
      ops_[op].run(ops_[op].args, static_cast<int>(part), num_threads_);
      if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads_) {
        finish(op);
        const uint32_t run = run_of(ticket);
        publish(op + 1 == num_ops_ ? ticket_of(run, op, kOver) : ticket_of(run, op + 1, 0));
      }
      ticket = ticket_.load(std::memory_order_acquire);
    }
  }

  // By the thread that did an op's last part, before the next op is published.
  void finish(int64_t op) {
    done_.store(0, std::memory_order_relaxed);
    counter_.store(0, std::memory_order_relaxed);
    if (nanoseconds_) {
      const int64_t end = now();
      nanoseconds_[op] += end - started_;
      started_ = end;
    }
  }

  void publish(uint64_t ticket) {
    ticket_.store(ticket, std::memory_order_seq_cst);
    store_before_load();
    ring();
  }

  // Wakes whoever sleeps or is about to: the bell has changed, so a sleep that was decided on before does not begin.
  void ring() {
    if (!sleeps_.load(std::memory_order_seq_cst) || !sleeps_.exchange(false)) return;
    bell_.fetch_add(1, std::memory_order_seq_cst);
    syscall(SYS_futex, &bell_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }

  void wait_beyond(uint64_t ticket, uint64_t spin_us) {
    const uint64_t start = ticks(), most = ticks_of(spin_us);
    do {
      if (ticket_.load(std::memory_order_acquire) != ticket) return;
      relax();
    } while (ticks() - start < most);
    // In this order: whoever publishes or wakes after the ticket was looked at finds `sleeps_`, and changes the bell.
    const uint32_t heard = bell_.load(std::memory_order_seq_cst);
    sleeps_.store(true, std::memory_order_seq_cst);
    store_before_load();
    if (ticket_.load(std::memory_order_seq_cst) == ticket)
      syscall(SYS_futex, &bell_, FUTEX_WAIT_PRIVATE, heard, nullptr, nullptr, 0);
  }

  const int num_threads_;
  const Op* ops_ = nullptr;
  int64_t num_ops_ = 0;
  int64_t* nanoseconds_ = nullptr;
  int64_t started_ = 0;
  std::mutex turn_;
  alignas(64) std::atomic<uint64_t> ticket_{ticket_of(0, 0, kOver)};
  alignas(64) std::atomic<int> done_{0};
  alignas(64) std::atomic<int64_t> counter_{0};
  // Somebody sleeps, or will as soon as it has seen that nothing was published. Only `ring` takes it back.
  alignas(64) std::atomic<bool> sleeps_{false};
  std::atomic<uint32_t> bell_{0};
  std::vector<std::thread> threads_;
};

}  // namespace

int64_t op_take() { return running->take(); }

}  // namespace millrace

using millrace::Op;
using millrace::Pool;

extern "C" {

// A pool of num_threads threads (the caller included), for as long as the process lives. pin: bind thread i > 0 to the
// i-th CPU that the process may use.
void* millrace_pool_create(int64_t num_threads, int64_t pin) {
  return new Pool(static_cast<int>(num_threads), pin != 0);
}

// Runs ops one after another; returns when the last is done. Calls from several threads take turns. Where
// `nanoseconds` [num_ops] is given, each op's time is added to it.
void millrace_pool_run(void* pool, const Op* ops, int64_t num_ops, int64_t* nanoseconds) {
  static_cast<Pool*>(pool)->run(ops, num_ops, nanoseconds);
}

// Wakes sleeping threads ahead of a run that follows shortly.
void millrace_pool_wake(void* pool) { static_cast<Pool*>(pool)->wake(); }
}
