// Rows of the embedding table for the step's tokens, and of a table of positions.
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
  const float* positions;  // [L, width], added by the token's position, or null
  int64_t num_rows;  // V; later ids take the first row. 0: there are no later ones
};

}  // namespace millrace
