// What low-rank adapters add to a product, for rows of several adapters at once: (x A^T) B^T, scaled in B.
#pragma once

#include "native/op.h"

namespace millrace {

// Slots hold an adapter each; a step's rows name theirs. Rows lie in Step's blocks: of one slot, kAdapterRows at
// most. A linear layer may be several of the checkpoint (q, k and v): each is a part with an A of its own, over all
// inputs, and a B over its outputs. Two ops with the same args, one after the other:
//   adapter_shrink: inner[t, p * width + r] = sum over k of x[t, k] * down[slot, k, p * width + r]
//   adapter_expand: out[t, n] += sum over r of inner[t, p * width + r] * up[slot, r, n], for n in part p
// Sums run upwards over k and r, whatever the rows, so that a row's bits do not depend on others.
struct AdapterArgs {
  const Step* step;
  const float* x;         // [T, x_stride]
  float* out;             // [T, out_stride]
  float* inner;           // [T, num_parts * width]
  const float* down;      // [slots, inputs, num_parts * width] in float32, or bits of bfloat16
  const float* up;        // [slots, width, outputs], the same
  const int64_t* ranks;   // [slots, num_parts] 0 where an adapter leaves a part alone
  const int64_t* starts;  // [num_parts + 1] first output of each part, and the end
  int64_t x_stride;
  int64_t out_stride;
  int64_t inputs;
  int64_t outputs;
  int64_t num_parts;
  int64_t width;  // a multiple of 16
  int64_t bfloat16;
};

}  // namespace millrace
