// Attention over a paged cache.
//
// The history is cut into parts of kPartTokens positions, counted from position 0. Within a part a query row has
// one maximum, one sum and one weighted sum of values, whose arithmetic depends on nothing but the row and the
// part; parts are then merged first to last. So a row's result is the same bits alone or in a batch, in a prefill
// tile or as a decode row, and whether a part was read for one sequence or for all that share its blocks.
//
// `attention_plan` cuts one step into work (once per step: all layers with the same heads share a plan);
// `attention` does it (once per layer).
#pragma once

#include "paged_cache/kv_cache.h"
#include "native/op.h"

namespace millrace {

constexpr int64_t kPartTokens = 256;

struct AttentionPlan;  // owned by attention_plan_create

struct AttentionPlanArgs {
  const Step* step;
  AttentionPlan* plan;
  int64_t ahead;  // the most of any layer
};

// Shape letters: T tokens, H query heads, D key dim, E value dim.
struct AttentionArgs {
  const Step* step;
  AttentionPlan* plan;
  const float* q;  // rows of H * D floats, q_stride floats apart
  const float* k;  // kivi4: the step's own keys, rows of K * D floats, k_stride floats apart (paged_cache/key_groups.h)
  float* out;      // rows of H * E floats, out_stride floats apart
  const float* sinks;  // [H] scores that attend to nothing, or null
  KvCache cache;
  int64_t num_heads;  // H
  int64_t q_stride, k_stride;
  int64_t out_stride;
  int64_t window;  // positions looked back on, the query's own included; 0 is all
  int64_t chunk;   // positions that form a chunk: none before the query's own is looked at; 0: there are none
  float scale;
  float soft_cap;  // 0 is none
  int64_t ahead;   // positions behind the query's own that it sees as well, as far as the step computes them
  int64_t vote_row;  // of the sums of Step::votes that the first kv head adds to
};

}  // namespace millrace
