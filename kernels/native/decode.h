// What a decode step needs besides the model and its draw, where it follows another one of the same sequences: the
// inputs that follow from the step before, and the place of the tokens that were drawn. With these two ops a whole
// step is one program (engine/runner/executors/native.py).
#pragma once

#include "native/op.h"
#include "sampling/sampling.h"

namespace millrace {

// Shape letters: S sequences, C block columns of the step, N slots of the runner's table, L token and B block columns.
struct DecodeArgs {
  // Inputs of the step before, moved on by one position.
  int64_t* token_ids;     // [S]
  int64_t* positions;     // [S]
  int64_t* slots;         // [S] where keys and values go
  int64_t* context_lens;  // [S]
  int64_t* block_tables;  // [S, C] has the columns of the next position
  // The same of layers with a window, where others have none; else null.
  int64_t* window_slots;         // [S]
  int64_t* window_tables;        // [S, C]
  const int64_t* window_blocks;  // of each block, where those layers keep it
  int64_t* outputs;       // [S] tokens of the output before the draw
  // Blocks in front of those that a sequence leaves one of wherever it begins another; -1 where it looks at the same
  // ones as long as steps follow. Null where nobody leaves any, as in models whose layers have windows.
  const int64_t* sinks;  // [S]
  int64_t* recent_rows;   // [S] as in Step
  // The runner's table of sequences (engine/runner/sequence_table.py).
  const int64_t* rows;   // [S] each sequence's slot, all different
  int64_t* tokens;       // [N, L] has room for the token that is drawn
  const int64_t* blocks; // [N, B]
  int64_t* num_tokens;   // [N]
  // Draws whose keys follow; null where nobody needs noise.
  SampleRow* draws;         // [S]
  const uint64_t* streams;  // [S] noise of a sequence, before its output position is mixed in
  // Outcome of the draw.
  const int64_t* drawn;    // [S]
  const uint8_t* finite;   // [S]
  const uint8_t* allowed;  // [S]
  int64_t* appended;       // [1] whether the tokens were: all of them, or none where one draw failed
  int64_t num_sequences;
  int64_t columns;        // C
  int64_t token_columns;  // L
  int64_t block_columns;  // B
  int64_t block_size;
};

}  // namespace millrace
