// Per-layer embeddings: what layers read of a token, from its row of the second table and a projection.
#pragma once

#include "native/op.h"

namespace millrace {

// rows[t, l] = (norm(projected[t, l] * projection_scale) * weight + rows[t, l]) * sum_scale, with
// norm(v) = v / sqrt(mean(v^2) + eps). Shape letters: T tokens, L layers, P elements that each reads.
struct PerLayerArgs {
  const Step* step;
  const float* projected;  // [T, L, P]
  const float* weight;     // [P]
  float* rows;             // [T, L, P], also the result
  int64_t num_layers;      // L
  int64_t width;           // P
  float eps;
  float projection_scale;
  float sum_scale;
};

}  // namespace millrace
