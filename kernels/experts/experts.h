// Sparse feed-forward layers: which experts a token passes, their products over packed weights, and the sum.
//
// A layer's ops, in this order: gemm of the router, route, expert_plan, expert_rows + expert_gemm (gate and up),
// activation, expert_rows + expert_gemm (down), expert_sum. Between plan and sum, rows lie expert by expert: a
// *place* is one choice of one token, place p of the plan being choice places[p] % A of token places[p] / A.
//
// A token's result is the sum over its own choices in its own order, so it does not depend on the other tokens.
//
// Who holds some of the experts, others being elsewhere, has places of its own alone, until the last product puts what they
// gave where the places of all experts have it: rows of every holder lie there, and are added up as if one had them all. Whom
// an expert is held by changes where its rows lie, and no sum.
//
// Shape letters: T tokens, X experts, A active experts, P = T A places, K inputs, N outputs.
#pragma once

#include "linear/gemm.h"

namespace millrace {

enum Scoring : int64_t { kSoftmax = 0, kSoftmaxOfBest = 1, kSigmoid = 2, kSparseMixer = 3 };
enum GroupScore : int64_t { kBest = 0, kTwoBest = 1 };

// The A best experts of each token, best first; of equal ones the first.
struct RouteArgs {
  const int64_t* num_rows;  // T
  const float* logits;      // [T, X]
  const float* correction;  // [X], takes part in the choice alone, or null
  int64_t* ids;             // [T, A]
  float* shares;            // [T, A]
  int64_t num_experts;      // X
  int64_t num_active;       // A
  int64_t scoring;          // Scoring
  int64_t normalized;       // shares are scaled to sum to one
  int64_t num_groups;       // experts form so many groups of neighbours, of which the best are eligible; or 0
  int64_t num_active_groups;
  int64_t group_score;  // GroupScore
  float scaling;
  float tolerance;  // of kSparseMixer
  const float* expert_scales;  // [X], what the shares of the chosen are multiplied by in the end, or null
};

// Sorts choices by their experts' positions; those of one expert stay in the order of tokens. Places are the held experts'.
struct ExpertPlanArgs {
  const int64_t* num_rows;  // T
  const int64_t* ids;       // [T, A]
  int64_t* num_places;      // P
  int64_t* starts;          // [X + 1] first place of each position, and the end, among those of all experts
  int64_t* places;          // [P] index into the choices [T, A]
  int64_t* ranks;           // [T, A] its inverse, among the places of all experts
  int64_t num_experts;
  int64_t num_active;
  int64_t first_held;  // the first position whose expert is held here,
  int64_t num_held;    // and how many are; 0: all
  const int64_t* positions;  // [X] where each expert stands among all; null: by their numbers
  int64_t* counts;           // [X] rows that each expert got so far, which are added to; or null
};

// out[p] = x[row of p] times the weight of p's expert, for every place p.
struct ExpertGemmArgs {
  const int64_t* starts;  // [X + 1] from the first held expert on; places are counted from its first
  const int64_t* places;  // [P]; rows of x are places[p] / num_active, or p itself where this is null
  const float* x;         // rows x_stride apart
  float* out;             // [P, N], rows out_stride apart
  void* workspace;        // millrace_expert_workspace bytes
  const PackedWeight* weights;  // [X], all of one shape
  int64_t num_experts;          // that are held
  int64_t num_active;
  int64_t x_stride;
  int64_t out_stride;
  int64_t among_all;  // rows of out are the places of all experts
};

// out[t] (+)= sum over a of shares[t, a] * rows[ranks[t, a]], where each row is the sum of its parts
struct ExpertSumArgs {
  const int64_t* num_rows;  // T
  const float* shares;      // [T, A]; null where all are one
  const int64_t* ranks;     // [T, A]
  const float* rows;        // [P, width], rows rows_stride apart
  float* out;               // [T, width], rows out_stride apart
  int64_t num_active;
  int64_t width;
  int64_t rows_stride;
  int64_t out_stride;
  int64_t accumulate;  // add to what `out` holds
  int64_t num_parts;    // of each row, part_stride floats apart; 0 is one
  int64_t part_stride;
};

}  // namespace millrace
