// From logits to tokens, and reports about them. Each row is independent of the others.
#pragma once

#include "native/op.h"

namespace millrace {

// Options of one row of logits. The order of application is that of engine/sampling/table.py.
struct SampleRow {
  int64_t key;            // stream of the row's noise (engine/sampling/noise.row_keys)
  int64_t top_k;          // 0 keeps all
  const int32_t* counts;  // [V] occurrences in the output, or null: no penalties
  const uint8_t* seen;    // [V] whether a token is in prompt or output
  const float* bias;      // [V] or null
  const int32_t* mask;    // bit i % 32 of word i / 32: whether the grammar allows token i; or null
  int64_t first_stop, num_stops;    // in stop_ids: tokens that may not come yet
  int64_t first_draft, num_drafts;  // in draft_tokens: drafts before this row, which count as output
  float temperature;  // 0 takes the most likely token
  float top_p;
  float min_p;
  float repetition_penalty;
  float presence_penalty;
  float frequency_penalty;
};

// Shape letters: R rows, V vocabulary.
struct SampleArgs {
  const float* logits;  // [R, V]
  float* processed;     // [R, V] logits after penalties, biases and masks; null when no row has any
  const SampleRow* rows;
  const int64_t* stop_ids;
  const int64_t* draft_tokens;
  int64_t* tokens;   // [R]
  uint8_t* finite;   // [R] whether the row's logits were
  uint8_t* allowed;  // [R] whether any token was
  int64_t num_rows;
  int64_t vocab_size;
};

// Log-probabilities of given tokens, and the most likely alternatives, best first (equal ones by id). Fewer than
// num_best are reported as id -1 where too few are above minus infinity.
struct LogprobArgs {
  const float* logits;      // [R, V]
  const int64_t* tokens;    // [R]
  const uint8_t* excluded;  // [R, V] tokens that are no alternatives, or null
  float* chosen;            // [R]
  int64_t* best_ids;        // [R, num_best]
  float* best;              // [R, num_best]
  int64_t num_best;
  int64_t num_rows;
  int64_t vocab_size;
};

}  // namespace millrace
