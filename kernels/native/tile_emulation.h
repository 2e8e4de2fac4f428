// The tile instructions in plain C++, for testing what surrounds them on processors without AMX.
#pragma once

#include <cstdint>
#include <cstring>

#include "native/simd.h"

namespace millrace {

struct EmulatedTile {
  uint8_t bytes[16][64];
  int64_t rows = 16, row_bytes = 64;
};
static thread_local EmulatedTile emulated[8];

inline void load_tile(int tile, const void* from, int64_t stride) {
  EmulatedTile& to = emulated[tile];
  std::memset(to.bytes, 0, sizeof(to.bytes));
  for (int64_t row = 0; row < to.rows; ++row)
    std::memcpy(to.bytes[row], static_cast<const char*>(from) + row * stride, to.row_bytes);
}

inline void store_tile(int tile, void* to, int64_t stride) {
  const EmulatedTile& from = emulated[tile];
  for (int64_t row = 0; row < from.rows; ++row)
    std::memcpy(static_cast<char*>(to) + row * stride, from.bytes[row], from.row_bytes);
}

inline void dot_halves(int sum, int rows, int columns) {
  for (int m = 0; m < 16; ++m)
    for (int n = 0; n < 16; ++n) {
      float total;
      std::memcpy(&total, &emulated[sum].bytes[m][4 * n], 4);
      for (int k = 0; k < 16; ++k)
        for (int i = 0; i < 2; ++i) {
          uint16_t left, right;
          std::memcpy(&left, &emulated[rows].bytes[m][4 * k + 2 * i], 2);
          std::memcpy(&right, &emulated[columns].bytes[k][4 * n + 2 * i], 2);
          total += from_bfloat16(left) * from_bfloat16(right);
        }
      std::memcpy(&emulated[sum].bytes[m][4 * n], &total, 4);
    }
}

// Row and Column are the types of the operands' bytes.
template <typename Row, typename Column>
inline void dot_bytes(int sum, int rows, int columns) {
  for (int m = 0; m < 16; ++m)
    for (int n = 0; n < 16; ++n) {
      int32_t total;
      std::memcpy(&total, &emulated[sum].bytes[m][4 * n], 4);
      for (int k = 0; k < 16; ++k)
        for (int i = 0; i < 4; ++i)
          total += static_cast<int32_t>(static_cast<Row>(emulated[rows].bytes[m][4 * k + i])) *
                   static_cast<Column>(emulated[columns].bytes[k][4 * n + i]);
      std::memcpy(&emulated[sum].bytes[m][4 * n], &total, 4);
    }
}

}  // namespace millrace

#define TILE_LOAD(tile, from, stride) load_tile(tile, from, stride)
#define TILE_STORE(tile, to, stride) store_tile(tile, to, stride)
#define TILE_ZERO(tile) std::memset(emulated[tile].bytes, 0, sizeof(emulated[tile].bytes))
#define TILE_DOT_HALVES(sum, rows, columns) dot_halves(sum, rows, columns)
#define TILE_DOT_BYTES(sum, rows, columns) dot_bytes<int8_t, uint8_t>(sum, rows, columns)
#define TILE_DOT_LEVELS(sum, rows, columns) dot_bytes<uint8_t, int8_t>(sum, rows, columns)
