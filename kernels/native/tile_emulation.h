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
// Each source has its own, and so its own of these functions: inline ones would be another's.
static thread_local EmulatedTile emulated[8];

static void load_tile(int tile, const void* from, int64_t stride) {
  EmulatedTile& to = emulated[tile];
  std::memset(to.bytes, 0, sizeof(to.bytes));
  for (int64_t row = 0; row < to.rows; ++row)
    std::memcpy(to.bytes[row], static_cast<const char*>(from) + row * stride, to.row_bytes);
}

static void store_tile(int tile, void* to, int64_t stride) {
  const EmulatedTile& from = emulated[tile];
  for (int64_t row = 0; row < from.rows; ++row)
    std::memcpy(static_cast<char*>(to) + row * stride, from.bytes[row], from.row_bytes);
}

// Of a row all 16 columns at once, which compilers turn into vectors; each sum has its additions in the same order.

static void dot_halves(int sum, int rows, int columns) {
  float weights[32][16];
  for (int k = 0; k < 16; ++k)
    for (int n = 0; n < 16; ++n)
      for (int i = 0; i < 2; ++i) {
        uint16_t half;
        std::memcpy(&half, &emulated[columns].bytes[k][4 * n + 2 * i], 2);
        weights[2 * k + i][n] = from_bfloat16(half);
      }
  for (int m = 0; m < 16; ++m) {
    float totals[16];
    std::memcpy(totals, emulated[sum].bytes[m], sizeof(totals));
    for (int k = 0; k < 32; ++k) {
      uint16_t half;
      std::memcpy(&half, &emulated[rows].bytes[m][2 * k], 2);
      const float left = from_bfloat16(half);
      for (int n = 0; n < 16; ++n) totals[n] += left * weights[k][n];
    }
    std::memcpy(emulated[sum].bytes[m], totals, sizeof(totals));
  }
}

// Row and Column are the types of the operands' bytes.
template <typename Row, typename Column>
static void dot_bytes(int sum, int rows, int columns) {
  int32_t weights[64][16];
  for (int k = 0; k < 16; ++k)
    for (int n = 0; n < 16; ++n)
      for (int i = 0; i < 4; ++i)
        weights[4 * k + i][n] = static_cast<Column>(emulated[columns].bytes[k][4 * n + i]);
  for (int m = 0; m < 16; ++m) {
    int32_t totals[16];
    std::memcpy(totals, emulated[sum].bytes[m], sizeof(totals));
    for (int k = 0; k < 64; ++k) {
      const int32_t left = static_cast<Row>(emulated[rows].bytes[m][k]);
      for (int n = 0; n < 16; ++n) totals[n] += left * weights[k][n];
    }
    std::memcpy(emulated[sum].bytes[m], totals, sizeof(totals));
  }
}

}  // namespace millrace

#define TILE_LOAD(tile, from, stride) load_tile(tile, from, stride)
#define TILE_STORE(tile, to, stride) store_tile(tile, to, stride)
#define TILE_ZERO(tile) std::memset(emulated[tile].bytes, 0, sizeof(emulated[tile].bytes))
#define TILE_DOT_HALVES(sum, rows, columns) dot_halves(sum, rows, columns)
#define TILE_DOT_BYTES(sum, rows, columns) dot_bytes<int8_t, uint8_t>(sum, rows, columns)
#define TILE_DOT_LEVELS(sum, rows, columns) dot_bytes<uint8_t, int8_t>(sum, rows, columns)
