// Threads that run a list of ops one after another. The caller takes part.
//
// An op is called once for each of its parts, as many as the pool has threads; whichever thread is free takes the
// next part. So a thread that the system holds up (another process has its CPU, or it still wakes) delays nobody
// unless it is in the middle of a part: the others do its share.
#pragma once

#include <cstdint>

namespace millrace {

// `thread` is the number of the part, below num_threads.
using OpFunction = void (*)(const void* args, int thread, int num_threads);

struct Op {
  OpFunction run;
  const void* args;
};

// For use inside an op: hands out 0, 1, 2, ... to its parts, each number once; for work of uneven cost. Starts anew
// with every op. One thread may run all parts, one after another, so they must not wait for each other.
int64_t op_take();

}  // namespace millrace

extern "C" {
// A pool of num_threads threads (the caller included). pin: bind thread i > 0 to the i-th CPU that the process
// may use.
void* millrace_pool_create(int64_t num_threads, int64_t pin);
void millrace_pool_destroy(void* pool);
// Runs ops one after another; returns when the last is done. Calls from several threads take turns. Where
// `nanoseconds` [num_ops] is given, each op's time is added to it.
void millrace_pool_run(void* pool, const millrace::Op* ops, int64_t num_ops, int64_t* nanoseconds);
// Wakes sleeping threads ahead of a run that follows shortly.
void millrace_pool_wake(void* pool);
}
