// Rows of the embedding table for the step's tokens.
#pragma once

#include "native/op.h"

namespace millrace {

struct EmbeddingArgs {
  const Step* step;
  const void* table;  // [V, width]
  float* out;         // [T, width]
  int64_t width;
  int64_t type;  // of the table: 0 float32, 1 bfloat16, 2 float16
  float scale;       // every element is multiplied by it
};

}  // namespace millrace
