// What the ranks of one model do together, over memory that they share (native.py says how it is divided): a step that the
// first rank hands to the others, sums of what each has of a product, and logits side by side.
//
// Shape letters: T tokens, S sequences, C block columns, R rows whose logits are wanted, E width, V vocabulary, N ranks.
#pragma once

#include "native/op.h"

namespace millrace {

// Words of 32 bits that several processes look at, each on a cache line of its own: the number of the step that was handed
// over last; how many sleep until some word changes; whether all is over; and from there on, by rank, the round that a rank
// has come to. Numbers wrap around.
constexpr int64_t kWordStride = 16;
constexpr int64_t kStepWord = 0, kSleepersWord = 1, kOverWord = 2, kFirstRankWord = 3;

// Of the first rank, before it computes: the step's numbers and arrays for the others, who then begin.
struct RankStepArgs {
  const Step* step;
  uint32_t* words;
  // What kind of step it is, T, S, C, R, and messages that are to be read before it.
  int64_t* numbers;
  // [T] token_ids, positions, slots, each with room for most_tokens; [S + 1] query_starts and [S] context_lens for
  // most_sequences; [S, C] block_tables.
  int64_t* arrays;
  int64_t* rows;  // [R] logit_rows
  const int64_t* messages;  // sent so far
  int64_t kind;  // 0 is a forward, 1 are logits of some of its rows
  int64_t most_tokens, most_sequences;
};

// out (+)= the parts of a layer, added up from the first rank's to the last one's: every rank gets the same bits. It begins
// when all have come here; of no width, it is that alone.
struct RankSumArgs {
  const Step* step;
  uint32_t* words;
  int64_t* round;      // [2] rounds of this rank that are over, and threads that are through with the present one
  const float* parts;  // [N, T, E], a rank's part_stride floats behind the one before
  float* out;          // [T, E]
  int64_t part_stride;
  int64_t width;  // E
  int64_t rank, num_ranks;
  int64_t num_parts;  // of the first ranks; those behind them have the same ones once more
  int64_t accumulate;
};

// Logits of all ranks side by side: rank r has the columns from V * r / N on.
struct RankLogitsArgs {
  const Step* step;
  uint32_t* words;
  int64_t* round;      // as above
  const float* parts;  // of the ranks behind the first: [N - 1, R, columns of the rank], dense rows
  float* out;          // [R, V], of which the first rank has its own; null in the others, which do not wait
  int64_t part_stride;
  int64_t width;  // V
  int64_t rank, num_ranks;
};

}  // namespace millrace
