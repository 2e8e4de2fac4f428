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
