// Values that change from step to step. One Step lives as long as its program; ops hold a pointer to it.
//
// Shape letters: T tokens of all sequences on one axis (no padding), S sequences, C block columns, R rows
// whose logits are wanted, A rows of adapters, B blocks of these, P snapshots of states, M copies, F positions
// that are voted for.
#pragma once

#include <cstdint>

namespace millrace {

// Which queries of a sequence vote for the first F positions, by what they attend to.
struct Votes {
  int64_t* sums;  // rows of F, one for each layer and kv head (AttentionArgs::vote_row); null: none does
  int64_t first;  // positions [first, end) vote
  int64_t end;
  int64_t size;   // F
};

struct Step {
  int64_t num_tokens;           // T
  int64_t num_sequences;        // S
  int64_t num_logit_rows;       // R
  int64_t max_blocks;           // C, also the row stride of block_tables
  const int64_t* token_ids;     // [T]
  const int64_t* positions;     // [T] inside each sequence
  const int64_t* slots;         // [T] block * block_size + place, where keys and values go
  const int64_t* query_starts;  // [S + 1] first token of each sequence on the token axis, and the end
  const int64_t* context_lens;  // [S] tokens of history, those of this step included
  const int64_t* block_tables;  // [S, C] block ids; entries past a sequence's end are 0
  const int64_t* logit_rows;    // [R] index on the token axis
  int64_t num_adapter_blocks;   // B
  const int64_t* adapter_rows;    // [A] index on the token axis, those of one adapter together
  const int64_t* adapter_blocks;  // [B, 3] first place in adapter_rows, number of rows, slot of the adapter
  const int64_t* state_slots;     // [S] where each sequence's state lies (recurrent/recurrent.h)
  const int64_t* snapshot_starts;  // [S + 1] first snapshot of each sequence, and the end
  const int64_t* snapshot_rows;   // [P] index on the token axis of the last token that is in it, ascending
  const int64_t* snapshot_slots;  // [P] where it goes
  int64_t num_slot_copies;        // M
  const int64_t* slot_copies;     // [M, 2] slots whose keys and values are read and written, behind the step's own
  const Votes* votes;             // [S], or null where nobody votes
  // Where each sequence's newest keys lie whole [S] (KvCache::recent), or null: twice the number of its pair of blocks, plus
  // one where odd blocks of its table come first.
  const int64_t* recent_rows;
  // [M, 2] the same of slot_copies: places in KvCache::recent that are written, from others (those complemented) or from rows
  // on the token axis.
  const int64_t* recent_copies;
};

}  // namespace millrace
