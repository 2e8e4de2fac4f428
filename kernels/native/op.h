// The form of every operation.
//
// An op is `extern "C" void name(const NameArgs& args, int thread, int num_threads)`, called once for each part
// `thread` of num_threads, by several threads at once or by one alone (pool.h). Its args are plain data, made once when a program is built; what changes
// from step to step is reached through `args.step`. `MILLRACE_OP(name, NameArgs)` after the definition exports
// the size of the args, which the Python side compares with its ctypes mirror.
//
// A row's result must not depend on the other rows, nor on how the work was divided.
#pragma once

#include <cstddef>
#include <cstdint>

#include "native/pool.h"
#include "native/step.h"

#define MILLRACE_OP(name, Args) \
  extern "C" int64_t name##_args_size() { return static_cast<int64_t>(sizeof(Args)); }

namespace millrace {

struct Range {
  int64_t begin, end;
};

// The part of [0, count) that a thread takes under a static split.
inline Range share(int64_t count, int thread, int num_threads) {
  return {count * thread / num_threads, count * (thread + 1) / num_threads};
}

}  // namespace millrace
