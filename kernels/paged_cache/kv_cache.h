// One layer's keys and values in blocks, as kernels/paged_cache allocates them.
#pragma once

#include <cstdint>

namespace millrace {

enum KvType : int64_t {
  kKvFloat32 = 0,
  kKvBfloat16 = 1,
  kKvInt8 = 2,
  kKvFloat8 = 3,
  // Four bits: values by token, rotated; keys by channel, in groups of a block, of which the newest is whole
  // (key_groups.h).
  kKvKivi4 = 4,
};

// Places of a block of kKvKivi4.
constexpr int64_t kKeyGroup = 64;

// Shape letters: N blocks, K kv heads, P places of a block, D key dim, E value dim, R sequences. A slot that was never
// written may hold anything.
struct KvCache {
  void* keys;          // [N, K, P, D]; kivi4: two elements to a byte, D a multiple of 16, E of 8
  void* values;        // [N, K, P, E]; null: the first shared_value_dim elements of a key are its value
  float* scales;       // int8, float8: [N, K, P, 2] of the key, of the value; kivi4: [N, K, P] of the value; else null
  uint16_t* channels;  // kivi4: bfloat16 [N, K, 2, D], middle and half a step of each channel; else null
  uint16_t* recent;    // kivi4: bfloat16 [2 R, K, P, D], keys of the newest two blocks of each sequence; else null
  int64_t type;        // KvType
  int64_t num_heads;   // K
  int64_t block_size;  // P, a power of two up to 256
  int64_t key_dim;     // D
  int64_t value_dim;   // E, or 0 when the value is part of the key
  int64_t shared_value_dim;
};

}  // namespace millrace
