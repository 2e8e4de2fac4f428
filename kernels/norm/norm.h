// Root-mean-square norms, layer norms, and the residual stream between them.
#pragma once

#include "native/op.h"

namespace millrace {

// One op for every placement of norms. Per row:
//   stream = x                                        (no change)
//          | x + change                               (no change_weight)
//          | x + norm(change) * change_weight         (Gemma's and OLMo 2's norms after a half layer)
//          , times gain, where one is given          (Gemma 4)
//   residual = stream                                 (when residual is given; may be x itself)
//   out      = norm(stream) * weight                  (when out is given)
// norm(v) = v / sqrt(mean(v^2) + eps), of v - mean(v) with `centered` (layer norms); a bias is added to what was
// multiplied by the weight. A family that stores weights as distances from one adds the one at load.
// The number of rows is step->num_tokens, or, with `rows`, step->num_logit_rows: row i of `out` (and of
// `residual`) is then made from row step->logit_rows[i] of x and change.
struct RmsNormArgs {
  const Step* step;
  const float* x;              // [T, width]
  const float* change;         // [T, width] or null
  const float* change_weight;  // [width] or null
  float* residual;             // [T, width] or null
  const float* weight;         // [width]; null when out is null
  float* out;                  // [T, width] or null
  int64_t width;
  int64_t logit_rows;  // whether only the step's logit rows are wanted
  float eps;
  int64_t centered;
  const float* bias;         // [width] or null
  const float* change_bias;  // [width] or null
  float gain;                // with change alone; 0 is none
};

}  // namespace millrace
