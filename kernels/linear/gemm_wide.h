// Rows in 16 bits against 8-bit weights, exactly in int32.
//
// Where weights are quantized and rows are not, rows are rounded to 16 bits by blocks of inputs, each with a scale
// of its own: 2^-16 of the block's largest magnitude, where bfloat16 would lose 2^-9 of every input. The
// instructions for bytes take such a row as two, q = 256 high + low, and need no expansion of the weights.
#pragma once

#include "linear/gemm_tiles.h"

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

// A block's scales and minimums for the panel's columns, or null, and what stored weights are too large by.
struct BlockScales {
  const float* scales;
  const float* minimums;
  int32_t middle;
};

// The scales of what is multiplied shortly.
inline void fetch_scales(const BlockScales& by, int64_t width) {
  constexpr int64_t kBlocksAhead = 8;
  for (int64_t v = 0; v < width; v += 16) {
    __builtin_prefetch(by.scales + kBlocksAhead * width + v, 0, kFirstCache);
    if (by.minimums) __builtin_prefetch(by.minimums + kBlocksAhead * width + v, 0, kFirstCache);
  }
}

using WideRow = ByteKind::Row;

// Rows at a block's first input.
struct WideRows {
  const WideRow* data;
  int64_t stride, low;  // in elements; the lower halves lie `low` after the upper ones
  const float* scales;  // of the block, per_row apart
  const int32_t* sums;
  int64_t per_row;

  WideRows from(int64_t row) const {
    return {data + row * stride, stride, low, scales + row * per_row, sums + row * per_row, per_row};
  }
};

// Exact sums with stored weights to those with the weights themselves, in place: less `middle` times the row's sum.
inline void settle_row(int32_t* totals, int32_t row_sum, int32_t middle, int64_t width) {
  const uint32_t less = static_cast<uint32_t>(row_sum) * static_cast<uint32_t>(middle - ByteKind::kFlip);
  float* floats = reinterpret_cast<float*>(totals);
  for (int64_t column = 0; column < width; column += kLanes)
    store(floats + column, to_floats(ByteKind::resume(totals + column), static_cast<int32_t>(less)));
}

// Adds a block's exact sums [num_rows, kPanel], which are lost, to totals.
[[maybe_unused]] inline void add_scaled(const WideRows& rows, int64_t num_rows, int32_t* sums, const BlockScales& by,
                                        int64_t width, float* totals, bool first) {
  for (int64_t m = 0; m < num_rows; ++m, sums += kPanel, totals += kPanel) {
    const int32_t row_sum = rows.sums[m * rows.per_row];
    const float scale = rows.scales[m * rows.per_row];
    settle_row(sums, row_sum, by.middle, width);
    const Vec row_scale = set1(scale), scaled_sum = set1(scale * static_cast<float>(row_sum));
    for (int64_t v = 0; v < width; v += kLanes) {
      const Vec factor = by.scales ? mul(row_scale, load(by.scales + v)) : row_scale;
      Vec value = fma(load(reinterpret_cast<const float*>(sums) + v), factor, first ? zero() : load(totals + v));
      if (by.minimums) value = fma(scaled_sum, load(by.minimums + v), value);
      store(totals + v, value);
    }
  }
}

#if defined(MILLRACE_BYTE_DOTS)
// A row is all upper halves, then all lower ones.
inline void store_wide(WideRow* row, int64_t padded, const int32_t* levels, int64_t count) {
  for (int64_t i = 0; i < count; ++i) row[i] = static_cast<int8_t>((levels[i] + 128) >> 8);
  // The rest is the lowest byte, with its sign.
  for (int64_t i = 0; i < count; ++i) row[padded + i] = static_cast<int8_t>(levels[i]);
}

// MR rows and NV vectors of columns, `groups` fours of inputs: adds the block's scaled products to totals. `line` is
// the bytes from one four of inputs to the next, or with kLevels to the one after the next: two share their bytes.
// In each step kLines lines from `next` on are asked for, further by `ahead` bytes.
template <int MR, int NV, int kLines, int kCache, bool kLevels>
inline void wide_tile(const WideRows& rows, const uint8_t* panel, int64_t line, int64_t groups,
                      const BlockScales& by, float* totals, bool first, const char* next, int64_t ahead) {
  constexpr int kFours = kLevels ? 2 : 1, kFlip = kLevels ? 0 : ByteKind::kFlip;
  Ints high[MR][NV], low[MR][NV];
  UNROLLED for (int m = 0; m < MR; ++m) {
    const uint32_t less = static_cast<uint32_t>(rows.sums[m * rows.per_row]) * static_cast<uint32_t>(by.middle - kFlip);
    UNROLLED for (int v = 0; v < NV; ++v) {
      high[m][v] = ByteKind::none();
      low[m][v] = set1_int(static_cast<int32_t>(0u - less));
    }
  }
  const WideRow* row = rows.data;
  for (int64_t g = 0; g < groups; g += kFours) {
    ByteKind::Bytes columns[kFours][NV];
    UNROLLED for (int v = 0; v < kLines; ++v) __builtin_prefetch(next + 64 * v, 0, kCache);
    next += ahead;
    UNROLLED for (int v = 0; v < NV; ++v) {
      const uint8_t* from = panel + 4 * kLanes * v;
      if constexpr (kLevels) {
        columns[0][v] = ByteKind::lower_levels(from);
        columns[1][v] = ByteKind::upper_levels(from);
      } else {
        columns[0][v] = ByteKind::column(from);
      }
    }
    UNROLLED for (int four = 0; four < kFours; ++four, row += 4) {
      UNROLLED for (int m = 0; m < MR; ++m) {
        const auto high_row = ByteKind::spread_row(row + m * rows.stride);
        UNROLLED for (int v = 0; v < NV; ++v) high[m][v] = ByteKind::step(high[m][v], high_row, columns[four][v]);
        const auto low_row = ByteKind::spread_row(row + rows.low + m * rows.stride);
        UNROLLED for (int v = 0; v < NV; ++v) low[m][v] = ByteKind::step(low[m][v], low_row, columns[four][v]);
      }
    }
    panel += line;
  }
  UNROLLED for (int m = 0; m < MR; ++m) {
    const float scale = rows.scales[m * rows.per_row];
    const Vec row_scale = set1(scale);
    UNROLLED for (int v = 0; v < NV; ++v) {
      const Ints sum = add(byte_up(high[m][v]), low[m][v]);
      const Vec factor = by.scales ? mul(row_scale, load(by.scales + v * kLanes)) : row_scale;
      float* total = totals + m * kPanel + v * kLanes;
      Vec value = fma(to_floats(sum), factor, first ? zero() : load(total));
      if (by.minimums) {
        const Vec scaled_sum = set1(scale * static_cast<float>(rows.sums[m * rows.per_row]));
        value = fma(scaled_sum, load(by.minimums + v * kLanes), value);
      }
      store(total, value);
    }
  }
}

// MR rows against a whole panel, in passes over some of its columns each. From `next` on, `bytes` are asked for.
template <int MR, int kCache, bool kLevels>
inline void wide_tile_rows(const WideRows& rows, const uint8_t* panel, int64_t width, int64_t groups,
                           const BlockScales& by, float* totals, bool first, const char* next, int64_t bytes) {
  // Both halves of a row have sums of their own.
  constexpr int kMost = kLanes == 16 ? (MR <= 3 ? 4 : 2) : MR == 1 ? 4 : MR <= 3 ? 2 : 1;
  const int64_t line = width * 4, steps = groups / (kLevels ? 2 : 1);
  const int64_t ahead = bytes * std::min<int64_t>(kMost * kLanes, width) / (width * steps);
  const auto part = [&](int64_t column) {
    return BlockScales{by.scales ? by.scales + column : nullptr, by.minimums ? by.minimums + column : nullptr,
                       by.middle};
  };
  int64_t column = 0;
  const auto pass = [&](auto vectors, auto lines) {
    wide_tile<MR, decltype(vectors)::value, decltype(lines)::value, kCache, kLevels>(
        rows, panel + column * 4, line, groups, part(column), totals + column, first, next, ahead);
  };
  constexpr std::integral_constant<int, 1> one;
  constexpr std::integral_constant<int, kMost> most;
  for (; column + kMost * kLanes <= width; column += kMost * kLanes, next += steps * ahead) {
    if (ahead <= 64)
      pass(most, one);
    else if (ahead <= 128)
      pass(most, std::integral_constant<int, 2>());
    else
      pass(most, std::integral_constant<int, 4>());
  }
  for (; column < width; column += kLanes) pass(one, one);
}

constexpr int64_t kRowsOfLevels = kFewRows;

// At most a tile's rows against 4-bit levels, two to a byte, which are read as a stream.
inline void few_levels(const WideRows& rows, int64_t num_rows, const uint8_t* panel, int64_t width, int64_t groups,
                       const BlockScales& by, float* totals, bool first, int32_t*, const char* next, int64_t bytes) {
  for_tiles(num_rows, [&](int64_t, auto height) {
    constexpr int MR = decltype(height)::value;
    wide_tile_rows<MR, kFirstCache, true>(rows, panel, width, groups, by, totals, first, next, bytes);
  });
}
#else
inline void store_wide(WideRow* row, int64_t, const int32_t* levels, int64_t count) {
  for (int64_t i = 0; i < count; ++i) row[i] = static_cast<WideRow>(levels[i]);
  ByteKind::arrange(row, (count + 3) / 4 * 4);
}

// Like `multiply_wide`, for weights of Kind.
template <class Kind>
inline void multiply_words(const WideRows& rows, int64_t num_rows, const uint8_t* panel, int64_t width, int64_t groups,
                           const BlockScales& by, float* totals, bool first, int32_t* sums, const char* next,
                           int64_t bytes) {
  const int64_t share = bytes / num_tiles(num_rows);
  for_tiles(num_rows, [&](int64_t row, auto height) {
    constexpr int MR = decltype(height)::value;
    const WideRows some = rows.from(row);
    tile_rows<Kind, MR, 2>(some.data, some.stride, panel, width, groups, sums, true, next, share / groups);
    add_scaled(some, MR, sums, by, width, totals + row * kPanel, first);
    next += share;
  });
}

// One row against a whole panel of 4-bit levels, groups of which are a block each. Blocks are so short that calls for
// each of them, and sums that go through memory, would take longer than the products. Bit for bit as `multiply_words`.
inline void one_row_of_levels(const WideRows& row, const uint8_t* panel, const Blocks& blocks, const BlockScales& by,
                              float* totals, const Fetch& fetch) {
  constexpr int NV = kPanel / kLanes;
  constexpr int64_t kLine = 4 * kPanel;
  const int64_t steps = blocks.group / LevelKind::kGroup, bytes = blocks.count * steps * kLine;
  const char* itself = reinterpret_cast<const char*>(panel);
  const WideRow* x = row.data;
  BlockScales here = by;
  fetch_results(fetch, 0, 1);
  UNROLLED for (int v = 0; v < NV; ++v) store(totals + v * kLanes, zero());
  for (int64_t block = 0; block < blocks.count; ++block) {
    const int64_t at = block * steps * kLine + kAhead;
    const char* next = at < bytes ? itself + at : fetch.next ? fetch.next + (at - bytes) : itself;
    fetch_scales(here, kPanel);
    Ints sums[NV];
    UNROLLED for (int v = 0; v < NV; ++v) sums[v] = LevelKind::none();
    for (int64_t step = 0; step < steps; ++step, panel += kLine, next += kLine, x += LevelKind::kGroup) {
      UNROLLED for (int line = 0; line < kLine / 64; ++line) __builtin_prefetch(next + 64 * line, 0, kFirstCache);
      UNROLLED for (int v = 0; v < NV; ++v) {
        UNROLLED for (int part = 0; part < LevelKind::kParts; ++part)
          sums[v] = LevelKind::step(sums[v], LevelKind::spread_row(x, part),
                                    LevelKind::column(panel + 4 * kLanes * v, part));
      }
    }
    const int32_t row_sum = row.sums[block];
    const Ints less = set1_int(static_cast<int32_t>(static_cast<uint32_t>(row_sum) * static_cast<uint32_t>(by.middle)));
    const Vec row_scale = set1(row.scales[block]), scaled_sum = mul(row_scale, set1(static_cast<float>(row_sum)));
    UNROLLED for (int v = 0; v < NV; ++v) {
      float* total = totals + v * kLanes;
      const Vec factor = mul(row_scale, load(here.scales + v * kLanes));
      Vec value = fma(to_floats(sub(sums[v], less)), factor, load(total));
      if (here.minimums) value = fma(scaled_sum, load(here.minimums + v * kLanes), value);
      store(total, value);
    }
    here.scales += kPanel;
    if (here.minimums) here.minimums += kPanel;
  }
}

// Any number of rows against 4-bit levels.
constexpr int64_t kRowsOfLevels = INT64_MAX;
inline void few_levels(const WideRows& rows, int64_t num_rows, const uint8_t* panel, int64_t width, int64_t groups,
                       const BlockScales& by, float* totals, bool first, int32_t* sums, const char* next,
                       int64_t bytes) {
  multiply_words<LevelKind>(rows, num_rows, panel, width, groups / 2, by, totals, first, sums, next, bytes);
}
#endif

#if defined(TILE_LOAD)
// Whether rows go by tiles of half a depth, or a quarter: groups of 32 inputs, or of 16, with a scale each. Few rows do
// not fill tiles, so that vectors are as fast; sums are exact, so that both ways give the same bits.
inline bool fills_short_tiles(int64_t num_rows, int64_t group) { return num_rows > 8 && (group == 32 || group == 16); }

// Tiles as deep as one such group, until the end of the scope; tiles 0 to 3 hold sums, 4 and 5 rows, 6 and 7 columns.
class ShortTiles {
 public:
  explicit ShortTiles(int64_t groups) {
    TileShape shapes[8];
    shapes[4].row_bytes = shapes[5].row_bytes = 4 * groups;
    shapes[6].rows = shapes[7].rows = groups;
    TileShapes::set(shapes);
  }
  ~ShortTiles() {
    const TileShape whole[8];
    TileShapes::set(whole);
  }
  ShortTiles(const ShortTiles&) = delete;
  ShortTiles& operator=(const ShortTiles&) = delete;
};

// What sums of some rows are corrected and scaled by: from memory, because broadcasts from registers take the units that
// add and multiply.
struct RowFactors {
  int32_t less[kTile];
  float scale[kTile], scaled_sum[kTile];

  RowFactors(const WideRows& rows, int64_t num_rows, int32_t middle) {
    for (int64_t m = 0; m < num_rows; ++m) {
      const int32_t sum = rows.sums[m * rows.per_row];
      less[m] = static_cast<int32_t>(static_cast<uint32_t>(sum) * static_cast<uint32_t>(middle - ByteKind::kFlip));
      scale[m] = rows.scales[m * rows.per_row];
      scaled_sum[m] = scale[m] * static_cast<float>(sum);
    }
  }
};

// Exact sums of upper and lower halves of up to 16 rows, [kTile, 32] each and the lower ones behind: adds them, scaled,
// to 16 columns of totals, in the order of wide_tile's operations.
template <bool kMinimums>
inline void add_short_sums(const RowFactors& rows, int64_t num_rows, const int32_t* sums, const float* scales,
                           const float* minimums, float* totals, bool first) {
  constexpr int64_t kStride = 2 * kTile, kLower = kTile * kStride;
  const Vec scale = load(scales);
  Vec least = zero();
  if constexpr (kMinimums) least = load(minimums);
  for (int64_t m = 0; m < num_rows; ++m, sums += kStride, totals += kPanel) {
    const Ints low = sub(load_ints(sums + kLower), set1_int(rows.less[m]));
    const Vec value = to_floats(add(byte_up(load_ints(sums)), low));
    Vec total = fma(value, mul(set1(rows.scale[m]), scale), first ? zero() : load(totals));
    if constexpr (kMinimums) total = fma(set1(rows.scaled_sum[m]), least, total);
    store(totals, total);
  }
}

// Like `multiply_wide`, for a group with a scale of its own that fills ShortTiles of its depth.
inline void multiply_short(const WideRows& rows, int64_t num_rows, const uint8_t* panel, int64_t width,
                           const BlockScales& by, float* totals, bool first, int32_t* sums, const char* next,
                           int64_t bytes) {
  constexpr int64_t kStride = 2 * kTile;
  const int64_t line = width * 4;
  int32_t* lower = sums + kTile * kStride;
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(next + at, 0, kSecondCache);
  for (int64_t row = 0; row < num_rows; row += kTile) {
    const WideRows some = rows.from(row);
    const int64_t height = std::min(kTile, num_rows - row);
    const RowFactors factors(some, height, by.middle);
    TILE_LOAD(4, some.data, some.stride);
    TILE_LOAD(5, some.data + some.low, some.stride);
    for (int64_t column = 0; column < width; column += 2 * kTile) {
      const bool two = column + kTile < width;
      const uint8_t* weights = panel + column * 4;
      TILE_LOAD(6, weights, line);
      TILE_ZERO(0);
      TILE_ZERO(2);
      TILE_DOT_BYTES(0, 4, 6);
      TILE_DOT_BYTES(2, 5, 6);
      if (two) {
        TILE_LOAD(7, weights + 64, line);
        TILE_ZERO(1);
        TILE_ZERO(3);
        TILE_DOT_BYTES(1, 4, 7);
        TILE_DOT_BYTES(3, 5, 7);
        TILE_STORE(1, sums + kTile, kStride * 4);
        TILE_STORE(3, lower + kTile, kStride * 4);
      }
      TILE_STORE(0, sums, kStride * 4);
      TILE_STORE(2, lower, kStride * 4);
      for (int64_t at = column; at < std::min(column + kStride, width); at += kTile) {
        float* to = totals + row * kPanel + at;
        if (by.minimums)
          add_short_sums<true>(factors, height, sums + at - column, by.scales + at, by.minimums + at, to, first);
        else
          add_short_sums<false>(factors, height, sums + at - column, by.scales + at, nullptr, to, first);
      }
    }
  }
}
#endif

// One block of inputs of num_rows rows: adds its scaled products to totals [num_rows, kPanel]. `sums` has room for a
// tile. `bytes` from `next` on are asked for meanwhile.
inline void multiply_wide(const WideRows& rows, int64_t num_rows, const uint8_t* panel, int64_t width,
                          int64_t groups, const BlockScales& by, float* totals, bool first,
                          [[maybe_unused]] int32_t* sums, const char* next, int64_t bytes) {
#if defined(TILE_LOAD)
  if (groups % kTile == 0) {
    const Fetch fetch{};
    for (int64_t row = 0; row < num_rows; row += kTileRows) {
      const int64_t height = std::min<int64_t>(kTileRows, num_rows - row);
      const WideRows some = rows.from(row);
      multiply_by_tiles<ByteKind>(some.data, some.stride, height, panel, width, groups, sums, kPanel, true, fetch);
      for (int64_t i = 0; i < height * kPanel; i += kLanes)
        ByteKind::save(sums + i, byte_up(ByteKind::resume(sums + i)));
      multiply_by_tiles<ByteKind>(some.data + some.low, some.stride, height, panel, width, groups, sums, kPanel, false,
                                  fetch);
      add_scaled(some, height, sums, by, width, totals + row * kPanel, first);
    }
    return;
  }
#endif
#if defined(MILLRACE_BYTE_DOTS)
  const int64_t share = bytes / num_tiles(num_rows);
  for_tiles(num_rows, [&](int64_t row, auto height) {
    constexpr int MR = decltype(height)::value;
    const WideRows some = rows.from(row);
    float* to = totals + row * kPanel;
    if (share == bytes)
      wide_tile_rows<MR, kFirstCache, false>(some, panel, width, groups, by, to, first, next, share);
    else
      wide_tile_rows<MR, kSecondCache, false>(some, panel, width, groups, by, to, first, next, share);
    next += share;
  });
#else
  multiply_words<ByteKind>(rows, num_rows, panel, width, groups, by, totals, first, sums, next, bytes);
#endif
}

}  // namespace millrace
