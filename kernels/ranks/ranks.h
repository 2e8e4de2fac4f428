// What the ranks of one model do together, over memory that they share (native.py says how it is divided): a step that the
// first rank hands to the others, sums of what each rank of a stage has of a product, hidden states from one stage of the
// pipeline to the next, and logits side by side.
//
// Shape letters: T tokens, S sequences, C block columns, R rows whose logits are wanted, A rows of adapters, B blocks of these, P
// snapshots of states, E width, V vocabulary, N ranks, G ranks whose parts are added up.
#pragma once

#include "native/op.h"

namespace millrace {

// Words of 32 bits that several processes look at, each on a cache line of its own: the number of the step that was handed
// over last; how many sleep until some word changes; whether all is over; then by rank the round that a rank has come to, and
// the step that it is through with; then by stage the micro-batch that it has sent last. Numbers wrap around.
constexpr int64_t kWordStride = 16, kMostRanks = 16;
constexpr int64_t kStepWord = 0, kSleepersWord = 1, kOverWord = 2, kFirstRankWord = 3;
constexpr int64_t kFirstDoneWord = kFirstRankWord + kMostRanks, kFirstSentWord = kFirstDoneWord + kMostRanks;
constexpr int64_t kNumWords = kFirstSentWord + kMostRanks;

// Of the first rank, before it computes: the step's numbers and arrays for the others, who then begin. It waits until these
// are through with the step before, so that nobody reads any more what belongs to that.
struct RankStepArgs {
  const Step* step;
  uint32_t* words;
  // What kind of step it is, T, S, C, R, messages that are to be read before it, B, and P; P is -1 where sequences have no states.
  int64_t* numbers;
  // [T] token_ids, positions, slots, each with room for most_tokens; [S + 1] query_starts, [S] context_lens and [S]
  // recent_rows for most_sequences; [S, C] block_tables.
  int64_t* arrays;
  int64_t* rows;  // [R] logit_rows
  int64_t* adapter_rows;    // [A], with room for most_tokens
  int64_t* adapter_blocks;  // [B, 3], the same
  int64_t* states;          // [S] state_slots and [S + 1] snapshot_starts with room for most_sequences, [P] snapshot_rows with room for
                            // 2 most_tokens, [P] snapshot_slots
  const int64_t* messages;  // sent so far
  int64_t kind;  // 0 is a forward, 1 are logits of some of its rows
  int64_t most_tokens, most_sequences;
  int64_t num_ranks;  // N
};

// Of each rank behind the first, when it is through with a forward.
struct RankDoneArgs {
  uint32_t* words;
  int64_t rank;
};

// The rows of a step that are one of its micro-batches, as a step of their own: rows are divided evenly, also those of one
// sequence, whose earlier rows are then its history.
struct RankMicroBatchArgs {
  const Step* step;
  Step* micro_batch;
  int64_t* query_starts;  // [S + 1], [S]: room for the micro-batch's
  int64_t* context_lens;
  int64_t* adapter_rows;  // [A], [B, 3]: the same
  int64_t* adapter_blocks;
  int64_t* snapshot_starts;  // [S + 1], [P]: the same
  int64_t* snapshot_rows;
  int64_t index, count;  // of the micro-batches
};

// Hidden states of a micro-batch between two stages. To send is to write them to the stage's room and to say so; to receive is to
// wait for that and to read them, or only to wait.
struct RankRowsArgs {
  const Step* step;  // the whole one
  uint32_t* words;
  int64_t* num_threads_through;  // of the sending op
  float* room;                   // [T, E] of the sending stage
  float* rows;                   // of the micro-batch; null: nothing is read
  int64_t width;                 // E
  int64_t stage;                 // the sending one
  int64_t index, count;          // of the micro-batches
};

// out (+)= the parts of a layer, added up from the first rank's to the last one's: every rank of the stage gets the same bits.
// It begins when all of them have come here; of no width, it is that alone.
struct RankSumArgs {
  const Step* step;
  uint32_t* words;
  int64_t* round;      // [2] rounds of this rank that are over, and threads that are through with the present one
  const float* parts;  // [G, T, E], a rank's part_stride floats behind the one before
  float* out;          // [T, E]
  int64_t part_stride;
  int64_t width;  // E
  int64_t rank;
  int64_t first_rank, num_ranks;  // of the stage
  int64_t num_parts;              // G; ranks behind them have the same ones once more, or others
  int64_t accumulate;
};

// Logits of all ranks side by side: rank r has the columns from V * r / N on.
struct RankLogitsArgs {
  const Step* step;
  uint32_t* words;
  const float* parts;  // of the ranks behind the first: [N - 1, R, columns of the rank], dense rows
  float* out;          // [R, V], of which the first rank has its own; null in the others, which do not wait
  int64_t part_stride;
  int64_t width;  // V
  int64_t rank, num_ranks;
};

}  // namespace millrace
