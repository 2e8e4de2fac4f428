// Rows in 16 bits against 8-bit weights, exactly in int32.
//
// Where weights are quantized and rows are not, rows are rounded to 16 bits by blocks of inputs, each with a scale
// of its own: 2^-16 of the block's largest magnitude, where bfloat16 would lose 2^-9 of every input. The
// instructions for bytes take such a row as two, q = 256 high + low, and need no expansion of the weights.
#pragma once

#include "gemm_tiles.h"

namespace millrace {

// Inputs of a block: sums of 512 products would still fit.
constexpr int64_t kBlockInputs = 256;
// The largest level whose upper half is an int8, as the lower half has a sign, too.
constexpr int32_t kMostWide = 127 * 256 + 127;

// How a weight's inputs fall into blocks: groups with a scale of their own are cut, never joined.
struct Blocks {
  int64_t group, per_group, count;

  int64_t group_of(int64_t block) const { return block / per_group; }
  int64_t begin(int64_t block) const { return group_of(block) * group + block % per_group * kBlockInputs; }
  int64_t end(int64_t block) const {
    return std::min(begin(block) + kBlockInputs, (group_of(block) + 1) * group);
  }
};

inline Blocks blocks_of(const PackedWeight& weight) {
  const int64_t group = weight.group_size ? weight.group_size : weight.padded_inputs;
  const int64_t per_group = (group + kBlockInputs - 1) / kBlockInputs;
  return {group, per_group, (weight.group_size ? weight.inputs / group : 1) * per_group};
}

#if defined(__AVX512VNNI__)
// A row is all upper halves, then all lower ones.
using WideRow = int8_t;
constexpr int64_t kWideElements = 2;
inline void store_wide(WideRow* row, int64_t padded, int64_t input, int32_t level) {
  const int32_t high = (level + 128) >> 8;
  row[input] = static_cast<int8_t>(high);
  row[padded + input] = static_cast<int8_t>(level - 256 * high);
}

// Adds MR rows times a panel to sums.
template <int MR, int NV, int kLines>
inline void add_bytes(const WideRow* rows, int64_t row_stride, const uint8_t* panel, int64_t line, int64_t groups,
                      __m512i (&sums)[MR][NV], const char* next, int64_t ahead) {
  for (int64_t g = 0; g < groups; ++g) {
    __m512i columns[NV];
#pragma GCC unroll 8
    for (int v = 0; v < kLines; ++v) _mm_prefetch(next + 64 * v, _MM_HINT_T1);
    next += ahead;
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) columns[v] = ByteKind::column(panel + 64 * v);
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m) {
      const __m512i row = ByteKind::spread_row(rows + m * row_stride + 4 * g);
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) sums[m][v] = ByteKind::step(sums[m][v], row, columns[v]);
    }
    panel += line;
  }
}

// MR rows and NV vectors of columns: sums over `groups` fours of inputs.
template <int MR, int NV, int kLines>
inline void wide_tile(const WideRow* rows, int64_t row_stride, int64_t low, const uint8_t* panel, int64_t stride,
                      int64_t groups, int32_t* totals, const char* next, int64_t ahead) {
  const int64_t line = stride * ByteKind::kGroup;
  __m512i sums[MR][NV];
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) sums[m][v] = ByteKind::none();
  if constexpr (MR <= 3) {
    // Few rows: both halves at once, as the sums fit the registers and chains are short.
    __m512i lower[MR][NV];
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) lower[m][v] = ByteKind::none();
    for (int64_t g = 0; g < groups; ++g) {
      __m512i columns[NV];
#pragma GCC unroll 8
      for (int v = 0; v < 2 * kLines; ++v) _mm_prefetch(next + 64 * v, _MM_HINT_T0);
      next += 2 * ahead;
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) columns[v] = ByteKind::column(panel + g * line + 64 * v);
#pragma GCC unroll 8
      for (int m = 0; m < MR; ++m) {
        const __m512i high_row = ByteKind::spread_row(rows + m * row_stride + 4 * g);
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) sums[m][v] = ByteKind::step(sums[m][v], high_row, columns[v]);
        const __m512i low_row = ByteKind::spread_row(rows + low + m * row_stride + 4 * g);
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) lower[m][v] = ByteKind::step(lower[m][v], low_row, columns[v]);
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v)
        sums[m][v] = _mm512_add_epi32(_mm512_slli_epi32(sums[m][v], 8), lower[m][v]);
  } else {
    add_bytes<MR, NV, kLines>(rows, row_stride, panel, line, groups, sums, next, ahead);
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) sums[m][v] = _mm512_slli_epi32(sums[m][v], 8);
    add_bytes<MR, NV, kLines>(rows + low, row_stride, panel, line, groups, sums, next + groups * ahead, ahead);
  }
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) ByteKind::save(totals + m * kPanel + v * kLanes, sums[m][v]);
}
#else
// Four inputs lie as 0, 2, 1, 3, as the bytes of a weight fall into even and odd ones.
using WideRow = int16_t;
constexpr int64_t kWideElements = 1;
inline void store_wide(WideRow* row, int64_t, int64_t input, int32_t level) {
  const int64_t place = input & 3;
  row[(input & ~int64_t{3}) + (place == 1 ? 2 : place == 2 ? 1 : place)] = static_cast<int16_t>(level);
}

struct WordKind : ByteKind {
  using Row = int16_t;
  static Spread spread_row(const Row* row) {
    int32_t pairs[2];
    std::memcpy(pairs, row, sizeof(pairs));
    return {_mm256_set1_epi32(pairs[0]), _mm256_set1_epi32(pairs[1])};
  }
};

template <int MR, int NV, int kLines>
inline void wide_tile(const WideRow* rows, int64_t row_stride, int64_t, const uint8_t* panel, int64_t stride,
                      int64_t groups, int32_t* totals, const char* next, int64_t ahead) {
  tile<WordKind, MR, NV, 2 * kLines>(rows, row_stride, panel, stride, groups, totals, true, next, 2 * ahead);
}
#endif

template <int MR, int kLines>
inline void wide_tile_rows(const WideRow* rows, int64_t row_stride, int64_t low, const uint8_t* panel,
                           int64_t width, int64_t groups, int32_t* totals, const char* next, int64_t ahead) {
  constexpr int kMost = most_vectors<MR>(), kLeast = kLane / kLanes;
  int64_t column = 0;
  for (; column + kMost * kLanes <= width; column += kMost * kLanes)
    wide_tile<MR, kMost, kLines>(rows, row_stride, low, panel + column * 4, width, groups, totals + column, next,
                                 ahead);
  for (; column < width; column += kLane)
    wide_tile<MR, kLeast, 1>(rows, row_stride, low, panel + column * 4, width, groups, totals + column, next,
                             ahead);
}

// One block of inputs of num_rows rows, at most a tile's: totals [num_rows, kPanel] = sums with stored weights.
// `next`: what to ask for meanwhile, `ahead` bytes (at most 128) for every four inputs and half of a row.
inline void multiply_wide(const WideRow* rows, int64_t row_stride, int64_t low, int64_t num_rows,
                          const uint8_t* panel, int64_t width, int64_t groups, int32_t* totals, const char* next,
                          int64_t ahead) {
#if defined(TILE_LOAD)
  if (groups % kTile == 0) {
    const Fetch fetch{};
    multiply_by_tiles<ByteKind>(rows, row_stride, num_rows, panel, width, groups, totals, true, fetch);
    for (int64_t i = 0; i < num_rows * kPanel; i += kLanes)
      ByteKind::save(totals + i, _mm512_slli_epi32(ByteKind::resume(totals + i), 8));
    multiply_by_tiles<ByteKind>(rows + low, row_stride, num_rows, panel, width, groups, totals, false, fetch);
    return;
  }
#endif
  for_tiles(num_rows, [&](int64_t row, auto height) {
    constexpr int MR = decltype(height)::value;
    const WideRow* some = rows + row * row_stride;
    int32_t* sums = totals + row * kPanel;
    if (ahead <= 64)
      wide_tile_rows<MR, 1>(some, row_stride, low, panel, width, groups, sums, next, ahead);
    else
      wide_tile_rows<MR, 2>(some, row_stride, low, panel, width, groups, sums, next, ahead);
    next += 2 * ahead * groups;
  });
}

}  // namespace millrace
