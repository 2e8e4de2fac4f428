// How one step's attention is cut into units of work.
//
// A tile is a run of query tokens of one sequence; with the G query heads of a kv head it has tokens * G query
// rows. Tiles of few rows (decode, verification) are split over the history: a unit is one part for one tile, or
// for all the tiles whose sequences hold that part in the same blocks. Tiles of many rows (prefill) are one unit
// each. Every unit is done for every kv head; those of few rows take some heads together.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "attention/attention.h"

namespace millrace {

// Most query rows of a unit, unless one token has more.
#if defined(__AMX_TILE__)
constexpr int64_t kMaxRows = 256;
#else
constexpr int64_t kMaxRows = 128;
#endif
// The same where a sequence has so many such units that threads still find enough: keys and values are packed for each.
constexpr int64_t kMostRows = kMaxRows == 256 ? 512 : kMaxRows, kManyUnits = 32;
// Tiles of so few rows are split over the history.
constexpr int64_t kSplitRows = 16;
// Units of so few rows are multiplied without packing, several heads at once.
constexpr int64_t kFewRows = 4;
constexpr int64_t kWholeTile = -1;
// Weights of voting rows that a thread keeps (attention_votes.h): longer histories have tiles of fewer rows.
constexpr int64_t kKeptWeights = 1 << 20;

struct Tile {
  int64_t sequence;
  int64_t token;         // first token, on the step's token axis
  int64_t num_tokens;
  int64_t position;      // of the first token
  int64_t length;        // of the sequence, this step included
  int64_t num_parts;     // of the history up to the last token
  int64_t partial_row;   // split tiles: first of K * num_parts * rows rows of partial results
  int64_t done_counter;  // split tiles: first of K counters
};

struct Unit {
  int64_t first_member;  // index in AttentionPlan::members
  int64_t num_members;
  int64_t part;  // or kWholeTile
};

struct AttentionPlan {
  int64_t num_heads, num_kv_heads, value_dim, block_size, share;
  // Whether keys and values of bfloat16 are multiplied in pairs, or values in float16, where the level can.
  bool pairs;
  std::vector<Tile> tiles;
  std::vector<int64_t> members;  // indices of tiles
  // Whole tiles, then parts for many rows, then parts for at most kFewRows rows: short ones last.
  std::vector<Unit> units;
  int64_t num_many = 0;  // units before those for few rows
  // Partial results: a row is its maximum, its sum, and from kPartialValues on its weighted values.
  std::vector<float> partials;
  int64_t partial_stride;
  std::unique_ptr<std::atomic<int32_t>[]> done;
  int64_t num_done = 0;

  int64_t group() const { return num_heads / num_kv_heads; }
};

constexpr int64_t kPartialValues = 16;

}  // namespace millrace
