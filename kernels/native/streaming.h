// Reads memory as fast as it comes, for measuring what products can at best reach.
#pragma once

#include "native/op.h"

namespace millrace {

struct StreamArgs {
  const void* data;
  int64_t bytes;
  int64_t sum;  // of all 64-bit words, so that nothing can be left out
};

}  // namespace millrace
