// Rows of the embedding table for the step's tokens.
#pragma once

#include "op.h"

namespace millrace {

struct EmbeddingArgs {
  const Step* step;
  const void* table;  // [V, width] float32 or bfloat16
  float* out;         // [T, width]
  int64_t width;
  int64_t bfloat16;  // whether the table is
  float scale;       // every element is multiplied by it
};

}  // namespace millrace
