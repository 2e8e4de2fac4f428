// One panel of a packed weight against rows, in every format.
#pragma once

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "linear/gemm_coded.h"
#include "linear/gemm_float12.h"
#include "linear/gemm_float12_avx2.h"
#include "linear/gemm_micro.h"
#include "linear/gemm_narrow.h"
#include "linear/gemm_rows.h"
#include "linear/gemm_tiles.h"
#include "linear/gemm_wide.h"
#include "native/past_caches.h"

namespace millrace {

// Rows that share one pass over a panel; their totals stay in the nearest cache.
constexpr int64_t kRowBlock = 96;
// The same where a block of inputs has sums of its own.
constexpr int64_t kWideRowBlock = kTileRows == 32 ? 64 : 48;
// Blocks of rows are cut between whole tiles.
constexpr int64_t kHeightStep = kTileRows == 32 ? 32 : 12;
// Inputs of a panel that are multiplied before the next ones: their weights stay in the second cache.
constexpr int64_t kInputBlock = 4096;
// Inputs whose weights stay in the nearest cache while several tiles use them.
constexpr int64_t kNearInputs = 64;
// Inputs of a block that several tiles multiply, one after another, while its weights stay in the nearest cache; 0
// where the second cache is fast enough, and for tile instructions.
template <class Kind>
constexpr int64_t kNearBlock =
    (std::is_same_v<Kind, HalfKind> && kLanes == 16) || kTileRows == 32 ? 0 : 256 / sizeof(typename Kind::Weight);
// Inputs of a block that one tile multiplies, half of the columns after the other.
constexpr int64_t kTileInputs = 256;
// How far ahead of its expansion a weight is asked for, in bytes.
constexpr int64_t kFarAhead = 16384;

struct alignas(64) Scratch {
  float totals[kRowBlock * kPanel];
  float expanded[kNearInputs * kPanel];
  int32_t sums[kTileRows * kPanel];  // of a block
  uint8_t levels[kBlockInputs * kPanel];
  float scales[kBlockInputs / kLeastGroup * kPanel];
  float minimums[kBlockInputs / kLeastGroup * kPanel];
#if defined(__AVX512FP16__)
  uint16_t halves[kChunk * kPanel];
#elif defined(__AVX2__) && !defined(__AVX512F__)
  uint16_t halves[kNearBlock<HalfKind> * kPanel];
#endif
};

// With internal linkage: an inline variable would be one for all levels that a process has loaded.
static thread_local Scratch scratch;

// The height of blocks that cut num_rows rows into as few as `most` rows each allow, all about equal: a low one reads
// as much as a high one.
inline int64_t even_height(int64_t num_rows, int64_t most) {
  const int64_t blocks = (num_rows + most - 1) / most, height = (num_rows + blocks - 1) / blocks;
  return std::min(most, (height + kHeightStep - 1) / kHeightStep * kHeightStep);
}

inline int64_t padded_outputs(const PackedWeight& weight) { return (weight.outputs + kLane - 1) / kLane * kLane; }

// --- results ---

// Where a product's rows go.
struct Results {
  float* out;
  int64_t stride;  // in floats
  bool accumulate;
  bool past_caches;  // where they are nothing but sums
};

// One row's totals to `count` places of the result: scale, bias, sum.
inline void finish_row(const float* totals, float scale, const float* scales, const float* bias, float* out,
                       int64_t count, bool accumulate) {
  alignas(64) float values[kPanel];
  const int64_t padded = (count + kLane - 1) / kLane * kLane;
  const Vec factor = set1(scale);
  for (int64_t column = 0; column < padded; column += kLanes) {
    Vec value = load(totals + column);
    if (scales) value = mul(value, mul(factor, load(scales + column)));
    if (bias) value = add(value, load(bias + column));
    if (column + kLanes <= count) {
      if (accumulate) value = add(value, load(out + column));
      store(out + column, value);
    } else {
      store(values, value);
      for (int64_t i = column; i < count; ++i) out[i] = accumulate ? out[i] + values[i - column] : values[i - column];
    }
  }
}

// --- a panel against a block of rows ---

// Prefetched while inputs [begin, begin + count) of a panel are multiplied, `line` bytes each: those that
// come kFarAhead later in what the thread reads, be it in the panel that it takes next.
inline const char* far_ahead(const Fetch& fetch, const char* panel, int64_t begin, int64_t line,
                             int64_t distance = kFarAhead) {
  if (fetch.next == nullptr) return nullptr;
  const int64_t at = begin * line + distance;
  return at < fetch.bytes ? panel + at : fetch.next + (at - fetch.bytes);
}

template <class Kind>
inline void plain_panel(const typename Kind::Row* rows, int64_t stride, int64_t num_rows,
                        const typename Kind::Weight* panel, int64_t width, int64_t inputs,
                        typename Kind::Total* totals, const Fetch& fetch) {
  const auto elements = [&](int64_t count) { return count * width * Kind::kStored / Kind::kGroup; };
  const int64_t line = elements(1) * static_cast<int64_t>(sizeof(typename Kind::Weight));
  // One tile of whole lines reads a weight once; several tiles, or passes over the columns, find a block of inputs in
  // the nearest cache.
  const bool near = kNearBlock<Kind> != 0 && num_rows > (kLanes == 16 ? kFewRows : 1);
  const int64_t block = near ? kNearBlock<Kind> : kInputBlock;
  for (int64_t begin = 0; begin < inputs; begin += block) {
    const int64_t count = std::min(block, inputs - begin);
    const bool last = begin + count == inputs;
    Fetch some = fetch;
    if (near || !last) {
      const auto* weights = reinterpret_cast<const char*>(panel);
      some.next = near ? far_ahead(fetch, weights, begin, line) : weights + (begin + count) * line;
      some.bytes = count * line;
      some.is_stream = some.is_stream && !near;
    }
    if (!last) some.out = nullptr;
    multiply_rows<Kind>(rows + begin, stride, num_rows, panel + elements(begin), width, count / Kind::kGroup, totals,
                        begin == 0, some);
  }
}

#if defined(__AVX512F__) && !defined(__AVX512BF16__) && !defined(__AVX512FP16__)
// Most rows of one tile that leaves no expanded weights: twelve took half again as long as two tiles.
constexpr int64_t kMostInOneTile = 8;

// Seven or eight rows in one tile, two vectors of columns at a time. By blocks of inputs, whose weights the second
// half of the columns finds in the second cache.
inline void one_tile_panel(const float* rows, int64_t stride, int64_t num_rows, const uint16_t* panel, int64_t width,
                           int64_t inputs, float* totals, const Fetch& fetch) {
  const int64_t line = width * static_cast<int64_t>(sizeof(uint16_t));
  const auto with = [&](auto height) {
    constexpr int MR = decltype(height)::value;
    for (int64_t begin = 0; begin < inputs; begin += kTileInputs) {
      const int64_t count = std::min(kTileInputs, inputs - begin);
      const char* next = far_ahead(fetch, reinterpret_cast<const char*>(panel), begin, line, kTileInputs * line);
      if (begin + count == inputs) fetch_results(fetch, 0, num_rows);
      const int64_t ahead = next ? 2 * kLanes * 4 : 0;
      if (next == nullptr) next = reinterpret_cast<const char*>(panel);
      int64_t column = 0;
      for (; column + 2 * kLanes <= width; column += 2 * kLanes, next += ahead * count / 2)
        tile<HalfKind, MR, 2, 2>(rows + begin, stride, panel + begin * width + column * 2, width, count / 2,
                                 totals + column, begin == 0, next, ahead);
      for (; column < width; column += kLanes)
        tile<HalfKind, MR, 1, 1>(rows + begin, stride, panel + begin * width + column * 2, width, count / 2,
                                 totals + column, begin == 0, next, ahead / 2);
    }
  };
  if (num_rows == 7) return with(std::integral_constant<int, 7>());
  with(std::integral_constant<int, 8>());
}

// The same sums as plain_panel<HalfKind> bit for bit: rows are floats in both. By blocks of inputs, whose weights
// the first tile expands for the others.
inline void expanded_panel(const float* rows, int64_t stride, int64_t num_rows, const uint16_t* panel,
                           int64_t width, int64_t inputs, float* totals, const Fetch& fetch) {
  const int64_t line = width * static_cast<int64_t>(sizeof(uint16_t));
  const int64_t tiles = num_tiles(num_rows);
  for (int64_t begin = 0; begin < inputs; begin += kNearInputs) {
    const int64_t count = std::min(kNearInputs, inputs - begin);
    // At an even pace.
    const char* next = far_ahead(fetch, reinterpret_cast<const char*>(panel), begin, line);
    const int64_t step = next ? line / tiles : 0;
    if (next == nullptr) next = reinterpret_cast<const char*>(panel);
    for_tiles(num_rows, [&](int64_t row, auto height) {
      constexpr int MR = decltype(height)::value;
      if (begin + count == inputs) fetch_results(fetch, row, MR);
      const float* some = rows + begin + row * stride;
      float* sums = totals + row * kPanel;
      if (row == 0)
        tile_rows<KeepingKind, MR, 2>(some, stride, panel + begin * width, width, count / 2, sums, begin == 0, next,
                                      2 * step, scratch.expanded);
      else
        tile_rows<FloatKind, MR, 1>(some, stride, scratch.expanded, width, count, sums, begin == 0, next, step);
      next += step * count;
    });
  }
}
#endif

#if defined(__AVX2__) && !defined(__AVX512F__)
// One tile expands weights as it multiplies them; several find them as bfloat16, by blocks of inputs.
inline void float12_panel(const float* rows, int64_t stride, int64_t num_rows, const uint32_t* panel, int64_t width,
                          int64_t inputs, float* totals, const Fetch& fetch) {
  if (num_rows <= kFewRows) {
    plain_panel<Float12Kind>(rows, stride, num_rows, panel, width, inputs, totals, fetch);
    return;
  }
  const int64_t line = width * 3 / 2;
  for (int64_t begin = 0; begin < inputs; begin += kNearBlock<HalfKind>) {
    const int64_t count = std::min(kNearBlock<HalfKind>, inputs - begin);
    expand_float12(panel + begin * line / 4, count, width, scratch.halves);
    Fetch some = fetch;
    some.next = far_ahead(fetch, reinterpret_cast<const char*>(panel), begin, line);
    some.bytes = count * line;
    some.is_stream = false;
    if (begin + count < inputs) some.out = nullptr;
    multiply_rows<HalfKind>(rows + begin, stride, num_rows, scratch.halves, width, count / 2, totals, begin == 0, some);
  }
}
#endif

#if defined(__AVX512FP16__)
// Chunk by chunk: the weights of one stay in the nearest cache while several tiles use them. kBits of a weight, 16
// or 12.
template <int kBits>
inline void fp16_panel(const uint32_t* rows, int64_t stride, int64_t num_rows, const uint16_t* panel, int64_t width,
                       int64_t inputs, float* totals, const Fetch& fetch) {
  const int64_t line = width * kBits / 8;
  const int64_t tiles = (num_rows + kFp16TileRows - 1) / kFp16TileRows;
  const bool stream = tiles == 1;
  for (int64_t begin = 0; begin < inputs; begin += kChunk) {
    // At an even pace, by each tile its part.
    const char* next =
        far_ahead(fetch, reinterpret_cast<const char*>(panel), begin, line, stream ? kAhead : kFarAhead);
    const int64_t step = next ? line / tiles : 0;
    const uint16_t* weights = panel + begin * width * kBits / 16;
    [[maybe_unused]] const char* nothing = reinterpret_cast<const char*>(weights);
    for_tiles<kFp16TileRows>(num_rows, [&](int64_t row, auto height) {
      constexpr int MR = decltype(height)::value;
      if (begin + kChunk == inputs) fetch_results(fetch, row, MR);
      const uint32_t* some = rows + begin + row * stride;
      float* sums = totals + row * kPanel;
      if constexpr (kBits == 12) {
        if (row == 0) {
          // A line for each one that is read, for a single tile; its share of them for one of several.
          const int64_t ahead = step * kSharing / 2;
          if (stream)
            float12_tile_rows<MR, false, 3>(some, stride, weights, width, sums, begin == 0, next ? next : nothing,
                                            ahead, scratch.halves);
          else
            float12_tile_rows<MR, true, 1>(some, stride, weights, width, sums, begin == 0, next ? next : nothing,
                                           ahead, scratch.halves);
          weights = scratch.halves;
          next += step * kChunk;
          return;
        }
      }
      if (next == nullptr)
        fp16_tile_rows<MR, 0>(some, stride, weights, width, sums, begin == 0, next, step);
      else if (stream)
        fp16_tile_rows<MR, 2>(some, stride, weights, width, sums, begin == 0, next, step);
      else
        fp16_tile_rows<MR, 1>(some, stride, weights, width, sums, begin == 0, next, step);
      next += step * kChunk;
    });
  }
}
#endif

// Levels of two lots of four inputs in a byte, the first in the lower half, as bytes of their own.
inline void expand_levels(const uint8_t* panel, int64_t width, int64_t inputs, uint8_t* to) {
  const int64_t line = width * 4;
  for (int64_t input = 0; input < inputs; input += 8, panel += line, to += 2 * line)
    for (int64_t at = 0; at < line; ++at) {
      to[at] = panel[at] & 15;
      to[line + at] = panel[at] >> 4;
    }
}

// Each block's exact sums are scaled before they are added up.
inline void wide_panel(const Rows& rows, int64_t first_row, int64_t num_rows, const PackedWeight& weight,
                       int64_t column, int64_t width, float* totals, const Fetch& fetch) {
  const Blocks blocks = blocks_of(weight);
  const bool four = weight.format == kInt4Grouped;
  const int64_t density = four ? 2 : 1, num_groups = weight.group_size ? weight.inputs / weight.group_size : 0;
  const auto* panel = static_cast<const uint8_t*>(weight.data) + column * weight.padded_inputs / density;
  WideRows some{static_cast<const WideRow*>(rows.data) + first_row * rows.stride, rows.stride, weight.padded_inputs,
                rows.scales + first_row * blocks.count, rows.sums + first_row * blocks.count, blocks.count};
  const float* scales = weight.group_size ? weight.scales + column * num_groups : nullptr;
  const float* minimums = weight.minimums ? weight.minimums + column * num_groups : nullptr;
#if !defined(MILLRACE_BYTE_DOTS)
  if (four && num_rows == 1 && width == kPanel && blocks.per_group == 1) {
    one_row_of_levels(some, panel, blocks, {scales, minimums, 8}, totals, fetch);
    return;
  }
#endif
#if defined(TILE_LOAD)
  const bool short_tiles = scales && fills_short_tiles(num_rows, blocks.group);
  std::optional<ShortTiles> tiles;
  if (short_tiles) tiles.emplace(blocks.group / 4);
#endif
  for (int64_t block = 0; block < blocks.count; ++block) {
    const int64_t begin = blocks.begin(block), count = blocks.end(block) - begin, group = blocks.group_of(block);
    const uint8_t* weights = panel + begin * width / density;
    const char* here = reinterpret_cast<const char*>(weights);
    const BlockScales by{scales ? scales + group * width : nullptr, minimums ? minimums + group * width : nullptr,
                         four ? 8 : 128};
    if (by.scales) fetch_scales(by, width);
    if (block + 1 == blocks.count) fetch_results(fetch, 0, num_rows);
    const int64_t bytes = count * width / density;
    // Prefetched so far ahead in the stream: at least a block, because some rows pass it several times.
    const char* next = here + std::max(num_rows <= kFewRows ? kAhead : kFarAhead, bytes);
    if (four && num_rows <= kRowsOfLevels) {
      few_levels(some, num_rows, weights, width, count / 4, by, totals, block == 0, scratch.sums, next,
                 fetch.next ? bytes : 0);
    } else {
      if (four) {
        expand_levels(weights, width, count, scratch.levels);
        weights = scratch.levels;
      }
#if defined(TILE_LOAD)
      if (short_tiles)
        multiply_short(some, num_rows, weights, width, by, totals, block == 0, scratch.sums, next,
                       fetch.next ? bytes : 0);
      else
#endif
      multiply_wide(some, num_rows, weights, width, count / 4, by, totals, block == 0, scratch.sums, next,
                    fetch.next ? bytes : 0);
    }
    some.data += count;
    ++some.scales;
    ++some.sums;
  }
}

// A block of inputs after the other: its codes become bytes, and its groups' factors scales, in the nearest cache.
inline void coded_panel(const Rows& rows, int64_t first_row, int64_t num_rows, const PackedWeight& weight,
                        int64_t column, int64_t width, float* totals, const Fetch& fetch) {
  const Blocks blocks = blocks_of(weight);
  const int64_t bits = weight.format - kCoded, group = weight.group_size;
  const auto* panel = static_cast<const uint8_t*>(weight.data) + column * weight.padded_inputs * bits / 8;
  WideRows some{static_cast<const WideRow*>(rows.data) + first_row * rows.stride, rows.stride, weight.padded_inputs,
                rows.scales + first_row * blocks.count, rows.sums + first_row * blocks.count, blocks.count};
  const int32_t middle = weight.codebook ? 128 : static_cast<int32_t>(weight.code_zero);
#if defined(TILE_LOAD)
  const bool short_tiles = fills_short_tiles(num_rows, group);
  std::optional<ShortTiles> tiles;
  if (short_tiles) tiles.emplace(group / 4);
#endif
  for (int64_t begin = 0; begin < weight.inputs; begin += kBlockInputs) {
    const int64_t whole = std::min(kBlockInputs, weight.padded_inputs - begin);
    const int64_t count = std::min(kBlockInputs, weight.inputs - begin), size = std::min(group, kBlockInputs);
    const uint8_t* codes = panel + begin * width * bits / 8;
    expand_codes(codes, bits, width, whole, static_cast<const uint8_t*>(weight.codebook), scratch.levels);
    expand_scales(weight, column, width, begin / group, (count + group - 1) / group, scratch.scales, scratch.minimums);
    if (begin + count == weight.inputs) fetch_results(fetch, 0, num_rows);
    for (int64_t at = 0; at < count; at += size) {
      const int64_t inputs = std::min(size, count - at), bytes = inputs * width * bits / 8;
      const BlockScales by{scratch.scales + at / size * width,
                           weight.minimums ? scratch.minimums + at / size * width : nullptr, middle};
      const char* here = reinterpret_cast<const char*>(codes) + at * width * bits / 8;
#if defined(TILE_LOAD)
      if (short_tiles)
        multiply_short(some, num_rows, scratch.levels + at * width, width, by, totals, begin + at == 0, scratch.sums,
                       here + std::max(kFarAhead, bytes), fetch.next ? bytes : 0);
      else
#endif
      multiply_wide(some, num_rows, scratch.levels + at * width, width, inputs / 4, by, totals, begin + at == 0,
                    scratch.sums, here + std::max(num_rows <= kFewRows ? kAhead : kFarAhead, bytes),
                    fetch.next ? bytes : 0);
      some.data += inputs;
      ++some.scales;
      ++some.sums;
    }
  }
}

// Weights that become floats in the nearest cache, some inputs after the other.
inline void narrow_panel(const float* rows, int64_t stride, int64_t num_rows, const PackedWeight& weight,
                         int64_t column, int64_t width, float* totals, const Fetch& fetch) {
  const int64_t bits = weight.format == kFloat8 ? 8 : 4, line = width * bits / 8;
  const auto* panel = static_cast<const uint8_t*>(weight.data) + column * weight.padded_inputs * bits / 8;
  const float* scales = weight.scales + column * (weight.inputs / weight.group_size);
  for (int64_t begin = 0; begin < weight.inputs; begin += kNearInputs) {
    const int64_t count = std::min(kNearInputs, weight.inputs - begin);
    expand_narrow(weight, panel + begin * line, begin, count, width, scales, scratch.expanded);
    Fetch some = fetch;
    some.next = far_ahead(fetch, reinterpret_cast<const char*>(panel), begin, line);
    some.bytes = count * line;
    some.is_stream = false;
    if (begin + count < weight.inputs) some.out = nullptr;
    multiply_rows<FloatKind>(rows + begin, stride, num_rows, scratch.expanded, width, count, totals, begin == 0, some);
  }
}

#if defined(TILE_LOAD)
// A product's part: where its inputs begin in a row and in a panel, in elements.
struct TilePart {
  int64_t row, panel;
};

// Rows, and inputs of a panel, whose products are added up in one go: rows, weights and totals of so many fill the
// nearest cache, and each is read from it twice.
constexpr int64_t kTileBlock = 64, kTileBlockInputs = 128;

// Rows of bfloat16 against a panel, by whole tiles of 32 rows; of pairs of bfloat16 the products of both first halves,
// and of either with the other's second half. What comes next is asked for at an even pace over all of it. Where a
// product is nothing but sums, they go past the caches, or tiles write them where they belong: a copy takes as long as
// the memory takes for the results once more.
inline void tile_panel(const PackedWeight& weight, const Results& results, const Rows& rows, int64_t column, int64_t begin,
                       int64_t end, const char* following) {
  const int64_t width = std::min(kPanel, padded_outputs(weight) - column), count = std::min(width, weight.outputs - column);
  const bool pairs = weight.format == kHalfPairs;
  const auto* panel = static_cast<const uint16_t*>(weight.data) + column * weight.padded_inputs * (pairs ? 2 : 1);
  const TilePart parts[] = {{0, 0}, {0, weight.padded_inputs * width}, {weight.padded_inputs, 0}};
  const int64_t num_parts = pairs ? 3 : 1;
  const float* bias = weight.bias ? weight.bias + column : nullptr;
  const bool sums_alone = count == width && !bias && !results.accumulate, past = results.past_caches && sums_alone;
  const int64_t height = past ? kTileBlock : 2 * kTile;
  // Parts of a block are added up one after the other, so that blocks of pairs may not depend on where results go.
  const int64_t block_inputs = past && !pairs ? kTileBlockInputs : kInputBlock;
  const int64_t num_blocks = (end - begin + height - 1) / height;
  const int64_t steps = (weight.padded_inputs + block_inputs - 1) / block_inputs * num_parts * num_blocks;
  const int64_t panel_bytes = packed_bytes(weight.format, width, weight.padded_inputs);
  for (int64_t first = begin, step = 0; first < end; first += height) {
    const int64_t num_rows = std::min(height, end - first);
    float* out = results.out + first * results.stride + column;
    const bool direct = sums_alone && !past && num_rows == height;
    float* totals = direct ? out : scratch.totals;
    const int64_t stride = direct ? results.stride : kPanel;
    const auto* from = static_cast<const HalfKind::Row*>(rows.data) + first * rows.stride;
    for (int64_t input = 0; input < weight.padded_inputs; input += block_inputs) {
      const int64_t inputs = std::min(block_inputs, weight.padded_inputs - input);
      for (int64_t part = 0; part < num_parts; ++part, ++step) {
        const Fetch fetch{following + panel_bytes * step / steps, panel_bytes / steps, false,
                          direct || past ? nullptr : out, results.stride, count};
        multiply_by_tiles<HalfKind>(from + parts[part].row + input, rows.stride, num_rows,
                                    panel + parts[part].panel + input * width, width, inputs / HalfKind::kGroup, totals,
                                    stride, input == 0 && part == 0, fetch);
      }
    }
    if (direct) continue;
    for (int64_t row = 0; row < num_rows; ++row, totals += kPanel, out += results.stride) {
      if (past)
        for (int64_t i = 0; i < count; i += kLanes) store_past_caches(out + i, load(totals + i));
      else
        finish_row(totals, 1.0f, nullptr, bias, out, count, results.accumulate);
    }
  }
}
#endif

// Rows [begin, end) against the panel that starts at output `column`. `next` is the output at which the panel
// starts that the thread computes next.
inline void panel_product(const PackedWeight& weight, const Results& results, const Rows& rows, int64_t column,
                          int64_t begin, int64_t end, int64_t next) {
  const int64_t width = std::min(kPanel, padded_outputs(weight) - column);
  const int64_t offset = column * weight.padded_inputs, count = std::min(width, weight.outputs - column);
  const bool whole = weight.format == kInt8 || has_row_scales(weight);
  const float* scales = whole ? weight.scales + column : nullptr;
  const float* bias = weight.bias ? weight.bias + column : nullptr;
  const char* following =
      static_cast<const char*>(weight.data) + packed_bytes(weight.format, next, weight.padded_inputs);
  const int64_t panel_bytes = packed_bytes(weight.format, width, weight.padded_inputs);
#if defined(TILE_LOAD)
  if (weight.format == kHalfPairs ||
      (weight.format == kBfloat16 && end - begin > kTile && weight.padded_inputs % (2 * kTile) == 0))
    return tile_panel(weight, results, rows, column, begin, end, following);
#endif
  float* totals = scratch.totals;
  const int64_t height = even_height(end - begin, is_wide(weight) ? kWideRowBlock : kRowBlock);
  for (int64_t first = begin; first < end; first += height) {
    const int64_t num_rows = std::min(height, end - first);
    float* out = results.out + first * results.stride + column;
    // The panel is a stream for its first rows only.
    const bool stream = first == begin;
    const Fetch fetch{stream ? following : nullptr, panel_bytes, stream, out, results.stride, count};
    switch (weight.format) {
      case kFloat32:
        plain_panel<FloatKind>(static_cast<const float*>(rows.data) + first * rows.stride, rows.stride, num_rows,
                               static_cast<const float*>(weight.data) + offset, width, weight.inputs, totals, fetch);
        break;
      case kBfloat16: {
        const auto* halves = static_cast<const uint16_t*>(weight.data) + offset;
        const auto* from = static_cast<const HalfKind::Row*>(rows.data) + first * rows.stride;
#if defined(__AVX512FP16__)
        fp16_panel<16>(from, rows.stride, num_rows, halves, width, weight.padded_inputs, totals, fetch);
        break;
#else
#if defined(__AVX512F__) && !defined(__AVX512BF16__)
        if (num_rows > kFewRows && num_rows <= kMostInOneTile) {
          one_tile_panel(from, rows.stride, num_rows, halves, width, weight.padded_inputs, totals, fetch);
          break;
        }
        if (num_rows > kFewRows) {
          expanded_panel(from, rows.stride, num_rows, halves, width, weight.padded_inputs, totals, fetch);
          break;
        }
#endif
        plain_panel<HalfKind>(from, rows.stride, num_rows, halves, width, weight.padded_inputs, totals, fetch);
        break;
#endif
      }
#if defined(__AVX2__) && !defined(__AVX512F__)
      case kFloat12:
        float12_panel(static_cast<const float*>(rows.data) + first * rows.stride, rows.stride, num_rows,
                      static_cast<const uint32_t*>(weight.data) + offset * 3 / 8, width, weight.padded_inputs, totals,
                      fetch);
        break;
#endif
#if defined(__AVX512FP16__)
      case kFloat12:
        fp16_panel<12>(static_cast<const uint32_t*>(rows.data) + first * rows.stride, rows.stride, num_rows,
                       static_cast<const uint16_t*>(weight.data) + offset * kShared / kSharing, width,
                       weight.padded_inputs, totals, fetch);
        break;
#endif
      case kInt8Dynamic: {
        auto* sums = reinterpret_cast<int32_t*>(totals);
        plain_panel<ByteKind>(static_cast<const ByteKind::Row*>(rows.data) + first * rows.stride, rows.stride,
                              num_rows, static_cast<const uint8_t*>(weight.data) + offset, width, weight.padded_inputs, sums,
                              fetch);
        for (int64_t row = 0; row < num_rows; ++row)
          settle_row(sums + row * kPanel, rows.sums[first + row], 128, width);
        break;
      }
      case kFloat8:
      case kFloatCodes:
        narrow_panel(static_cast<const float*>(rows.data) + first * rows.stride, rows.stride, num_rows, weight, column,
                     width, totals, fetch);
        break;
      case kCoded + 2:
      case kCoded + 3:
      case kCoded + 4:
      case kCoded + 5:
      case kCoded + 6: coded_panel(rows, first, num_rows, weight, column, width, totals, fetch); break;
      default: wide_panel(rows, first, num_rows, weight, column, width, totals, fetch);
    }
    for (int64_t row = 0; row < num_rows; ++row)
      finish_row(totals + row * kPanel, has_row_scales(weight) ? rows.scales[first + row] : 1.0f, scales,
                 bias, out + row * results.stride, count, results.accumulate);
  }
}

}  // namespace millrace
