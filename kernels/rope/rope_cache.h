// From projections to queries that can attend and to keys and values in the cache: bias-free per-head or whole
// norms of q and k, rotation by position, a factor by position, conversion to the cache's type, write.
#pragma once

#include "paged_cache/kv_cache.h"
#include "native/op.h"

namespace millrace {

enum QkNorm : int64_t { kNormNone = 0, kNormHead = 1, kNormFull = 2 };
// What values are: what lies behind the keys, that normed without weights, or the keys as they are before norm and
// rotation, normed so.
enum ValueKind : int64_t { kValuesPlain = 0, kValuesNormed = 1, kValuesOfKeys = 2 };

// Shape letters: T tokens, H query heads, K kv heads, D head dim, R rotated dimensions, L positions.
// Queries are normed and rotated in place. With `interleaved`, pairs (2i, 2i + 1) come out as (i, i + R/2), in
// which order weights of norms are then where norms come last.
struct RopeCacheArgs {
  const Step* step;
  float* qkv;           // [T, qkv_stride]: q heads, k heads, v heads; the q part is also the result
  const float* q_norm;  // [D] (head; [H, D] with norm_stride), [H D] (full) or null
  const float* k_norm;  // [D] (head; [K, D] with norm_stride), [K D] (full) or null
  const float* cos;     // [L, R / 2]
  const float* sin;     // [L, R / 2]
  KvCache cache;
  int64_t num_heads;  // H; K and D are the cache's
  int64_t rotary_dim;  // R, even, 0 (no rotation) to D
  int64_t interleaved;
  int64_t norm;  // QkNorm
  float eps;
  int64_t norm_stride;    // from one head's weights to the next one's; 0 where all share them
  int64_t norm_centered;  // the mean is taken away first, as in layer norms
  int64_t norm_last;      // after the rotation instead of before it (head only)
  const float* q_scales;  // [L], what a position's queries are multiplied by in the end, or null
  int64_t qkv_stride;     // H D, and K D for keys and K E for values where they are there, or more
  int64_t stores;         // whether keys and values are written; else there are none
  int64_t value_kind;     // ValueKind; but for plain ones values have the keys' size
  float value_scale;      // what plain values are multiplied by; 0 leaves them
};

// Latent attention (DeepSeek-V2): one vector per token, the normed latent and the rotated key part.
// Shape letters: C latent rank, R rotated dimensions, N other dimensions of a query head.
struct LatentCacheArgs {
  const Step* step;
  const float* down;         // [T, C + R]: latent, key part before rotation
  const float* latent_norm;  // [C]
  float* q;                  // [T, H, N + R] before rotation; with q_scales the first N are multiplied in place
  float* queries;            // [T, H, C + R]: this op writes the last R elements, rotated
  const float* cos;          // [L, R / 2]
  const float* sin;          // [L, R / 2]
  KvCache cache;             // key_dim C + R, one head, no values of its own
  int64_t num_heads;         // H
  int64_t nope_dim;          // N
  int64_t rotary_dim;        // R
  int64_t interleaved;
  float eps;
  const float* q_scales;     // [L], what a position's queries are multiplied by, or null
};

// Small products per head, in float32, for the absorbed projections of latent attention:
// out[t, h, :M] = x[t, h, :I] . weight[h], rows of heads `stride` floats apart.
struct HeadProductArgs {
  const Step* step;
  const float* x;       // [T, H, x_stride], the first I of each head count
  const float* weight;  // [H, I, M]
  float* out;           // [T, H, out_stride], the first M of each head are written
  int64_t num_heads;    // H
  int64_t inputs;       // I
  int64_t outputs;      // M
  int64_t x_stride;
  int64_t out_stride;
};

}  // namespace millrace
