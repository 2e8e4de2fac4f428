// Threads that run a list of ops in lockstep. The caller is thread 0.
#pragma once

#include <cstdint>

namespace millrace {

using OpFunction = void (*)(const void* args, int thread, int num_threads);

struct Op {
  OpFunction run;
  const void* args;
};

// --- for use inside an op ---

// Waits until every thread of the pool has come here. All threads must call it equally often.
void op_barrier();

// Hands out 0, 1, 2, ... to the threads of the running op, each number once; for work of uneven cost, or
// where other processes may hold up a thread. Starts anew with every op.
int64_t op_take();

// Starts op_take anew inside an op. Waits for all threads.
void op_restart();

}  // namespace millrace

extern "C" {
// A pool of num_threads threads (the caller included). pin: bind thread i > 0 to the i-th CPU that the process
// may use.
void* millrace_pool_create(int64_t num_threads, int64_t pin);
void millrace_pool_destroy(void* pool);
// Runs ops one after another; returns when the last is done. Calls from several threads take turns. Where
// `nanoseconds` [num_ops] is given, each op's time, its barrier included, is added to it.
void millrace_pool_run(void* pool, const millrace::Op* ops, int64_t num_ops, int64_t* nanoseconds);
// Wakes sleeping threads ahead of a run that follows shortly.
void millrace_pool_wake(void* pool);
}
