// The most likely token of each row of logits.
#pragma once

#include "op.h"

namespace millrace {

struct GreedyArgs {
  const Step* step;     // gives the number of rows R
  const float* logits;  // [R, width]
  int64_t* tokens;      // [R] the first of the largest; undefined in rows that are not finite
  uint8_t* finite;      // [R] whether all logits of the row are finite
  int64_t width;
};

}  // namespace millrace
