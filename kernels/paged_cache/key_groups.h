// Keys in four bits by channel (KIVI, arXiv 2402.02750): those of a block share, in each channel, a middle and a step.
//
// A block is rounded when its last place is computed. A query sees the keys of its own block whole, as bfloat16, and
// those of the blocks before it rounded; so what it sees does not depend on the steps by which its history was
// computed. The step's own keys lie in the rows of the projections, older ones of the same block in KvCache::recent,
// which has two blocks of each sequence: drafts may reach into a block that those which replace them come back from.
#pragma once

#include "native/op.h"
#include "paged_cache/kv_cache.h"

namespace millrace {

// `close_groups` rounds the blocks that the step fills, between rope_cache and attention; `keep_recent`, behind attention,
// keeps the keys of the step's newest two blocks whole. Where the step copies slots, `copy_recent` comes before both, and
// copies whole keys of the same positions.
// Shape letters: T tokens, K kv heads, D key dim.
struct KeyGroupsArgs {
  const Step* step;
  KvCache cache;
  const float* keys;    // [T, K D], rotated, numbers of bfloat16; rows are key_stride apart
  int64_t key_stride;
};

// Where whole keys of block `index` of a history lie, by Step::recent_rows: a row of KvCache::recent, [K, P, D].
inline int64_t recent_block(int64_t recent_row, int64_t index) { return recent_row ^ (index & 1); }

// Where these begin for one head: [kKeyGroup, D].
inline uint16_t* recent_of(const KvCache& cache, int64_t recent_row, int64_t index, int64_t head) {
  const int64_t row = recent_block(recent_row, index) * cache.num_heads + head;
  return cache.recent + row * kKeyGroup * cache.key_dim;
}

// Middles [D] of a block's channels for one head, and behind them halves of steps [D].
inline uint16_t* channels_of(const KvCache& cache, int64_t block, int64_t head) {
  return cache.channels + (block * cache.num_heads + head) * 2 * cache.key_dim;
}

}  // namespace millrace
