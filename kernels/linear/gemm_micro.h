// Inner kernels: a few rows against one panel, accumulators in registers.
//
// Each adds products over `groups` input groups to totals [rows, kPanel]. Columns are handled in pieces of
// NV vectors, rows in pieces of MR; neither changes the order of any output's additions.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "linear/gemm.h"
#include "linear/gemm_kinds.h"

namespace millrace {

#if defined(__AMX_TILE__) || defined(MILLRACE_EMULATE_TILES)
constexpr int kTileRows = 32;
#else
constexpr int kTileRows = 6;
#endif
// Rows of one tile, which read a weight as it is.
constexpr int64_t kFewRows = 6;
// How far ahead of its use a weight that is streamed once is asked for, in bytes.
constexpr int64_t kAhead = 4096;

// Memory to prefetch while rows are multiplied: the weights that come next, and the lines that results go to.
struct Fetch {
  const char* next;  // null where nothing comes next
  int64_t bytes;
  bool is_stream;  // the panel itself comes from far
  float* out;  // the first row's place, or null
  int64_t out_stride;
  int64_t out_count;  // floats of each row
};

// The bits of the largest magnitude: magnitudes order like their bits, and whatever is not finite lies above all that
// is.
inline uint32_t largest_of(const float* from, int64_t count) {
  uint32_t most = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, from + i, sizeof(bits));
    bits &= 0x7FFFFFFF;
    most = bits > most ? bits : most;
  }
  return most;
}

// --- one tile ---

// MR rows and NV vectors of columns. `stride` is the panel's width in outputs. In each step kLines lines from
// `next` on are asked for, further by `ahead` bytes with every group of inputs. Where Kind expands weights,
// they are left at `kept` [inputs, stride].
template <class Kind, int MR, int NV, int kLines, int kCache = kSecondCache>
inline void tile(const typename Kind::Row* rows, int64_t row_stride, const typename Kind::Weight* panel,
                 int64_t stride, int64_t groups, typename Kind::Total* totals, bool first, const char* next,
                 int64_t ahead, [[maybe_unused]] float* kept = nullptr) {
  // Unrolled before all else: only then do the sums become registers.
  typename Kind::Sum sums[MR][NV];
  UNROLLED for (int m = 0; m < MR; ++m)
    UNROLLED for (int v = 0; v < NV; ++v)
      sums[m][v] = first ? Kind::none() : Kind::resume(totals + m * kPanel + v * kLanes);
  constexpr int64_t kStep = Kind::kStored * kLanes;
  const int64_t line = stride * Kind::kStored;
  for (int64_t g = 0; g < groups; ++g) {
    UNROLLED for (int v = 0; v < kLines; ++v) __builtin_prefetch(next + 64 * v, 0, kCache);
    next += ahead;
    // A single row has no use for a part of all columns: their other parts would be read once more.
    constexpr int kSplit = MR == 1 ? NV : 1;
    UNROLLED for (int at = 0; at < kSplit; ++at) {
      UNROLLED for (int part = 0; part < Kind::kParts; ++part) {
        decltype(Kind::column(panel, part)) columns[NV / kSplit];
        UNROLLED for (int v = 0; v < NV / kSplit; ++v) columns[v] = Kind::column(panel + (at + v) * kStep, part);
        if constexpr (std::is_same_v<Kind, KeepingKind>)
          UNROLLED for (int v = 0; v < NV / kSplit; ++v) store(kept + part * stride + (at + v) * kLanes, columns[v]);
        UNROLLED for (int m = 0; m < MR; ++m) {
          const auto row = Kind::spread_row(rows + m * row_stride + g * Kind::kGroup, part);
          UNROLLED for (int v = 0; v < NV / kSplit; ++v)
            sums[m][at + v] = Kind::step(sums[m][at + v], row, columns[v]);
        }
      }
    }
    if constexpr (std::is_same_v<Kind, KeepingKind>) kept += Kind::kParts * stride;
    panel += line;
  }
  UNROLLED for (int m = 0; m < MR; ++m)
    UNROLLED for (int v = 0; v < NV; ++v) Kind::save(totals + m * kPanel + v * kLanes, sums[m][v]);
}

// Vectors of columns that MR rows take together: as many sums as fit the registers beside a row and its columns, and
// with floats not so few that they wait for each other.
template <int MR>
constexpr int most_vectors() {
  if (kLanes == 16) return 4;
  if (MR <= 2) return 8 / MR;
  return MR == 3 ? 3 : 2;
}

// Lines of 64 bytes that a group of inputs takes for 16 outputs.
template <class Kind>
constexpr int kLinesOf = Kind::kStored * sizeof(typename Kind::Weight) / 4;

// MR rows against a whole panel of `width` columns; each pass over some of them asks for its share of what comes next.
template <class Kind, int MR, int kLines>
inline void tile_rows(const typename Kind::Row* rows, int64_t row_stride, const typename Kind::Weight* panel,
                      int64_t width, int64_t groups, typename Kind::Total* totals, bool first, const char* next,
                      int64_t ahead, float* kept = nullptr) {
  constexpr int kMost = most_vectors<MR>(), kLeast = kLane / kLanes;
  constexpr int kShare = std::min<int>(kLines, (kMost * kLanes + 15) / 16) * kLinesOf<Kind>;
  constexpr int kCache = kLines == 4 ? kFirstCache : kSecondCache;
  const int64_t share = ahead * kMost * kLanes / kPanel;
  int64_t column = 0;
  for (; column + kMost * kLanes <= width; column += kMost * kLanes, next += share * groups)
    tile<Kind, MR, kMost, kShare, kCache>(rows, row_stride, panel + column * Kind::kStored, width, groups,
                                         totals + column, first, next, share, kept + column);
  for (; column < width; column += kLane)
    tile<Kind, MR, kLeast, kLinesOf<Kind>>(rows, row_stride, panel + column * Kind::kStored, width, groups,
                                           totals + column, first, next, share, kept + column);
}

// Tiles that cover so many rows.
inline int64_t num_tiles(int64_t num_rows) { return (num_rows + kFewRows - 1) / kFewRows; }

// Calls body(row, std::integral_constant height) for tiles of about equal height that cover num_rows rows: low ones
// have too few sums to keep the units busy. Up to kTail rows are left to a tile of their own, beside a whole one.
template <int kMost = kFewRows, int kTail = 0, class Body>
inline void for_tiles(int64_t num_rows, const Body& body) {
  for (int64_t row = 0, tiles = (num_rows + kMost - 1) / kMost; row < num_rows; --tiles) {
    const int64_t left = num_rows - row, even = (left + tiles - 1) / tiles;
    const int64_t height = kTail && tiles == 2 && left <= kMost + kTail ? kMost : even;
    with_constant<kMost>(height, [&](auto constant) { body(row, constant); });
    row += height;
  }
}

// The lines that rows [row, row + height) will be written to; they are far apart, so nobody else foresees them.
inline void fetch_results(const Fetch& fetch, int64_t row, int64_t height) {
  if (fetch.out == nullptr) return;
  for (int64_t m = row; m < row + height; ++m)
    for (int64_t column = 0; column < fetch.out_count; column += 16)
      __builtin_prefetch(fetch.out + m * fetch.out_stride + column, 1);
}

// Any number of rows.
template <class Kind>
inline void multiply(const typename Kind::Row* rows, int64_t row_stride, int64_t num_rows,
                     const typename Kind::Weight* panel, int64_t width, int64_t groups,
                     typename Kind::Total* totals, bool first, const Fetch& fetch) {
  const int64_t tiles = num_tiles(num_rows);
  const char* itself = reinterpret_cast<const char*>(panel);
  const int64_t line = width * Kind::kStored * static_cast<int64_t>(sizeof(typename Kind::Weight));
  // One tile reads the panel as a stream; of several, each asks for a part of what comes next, at an even pace:
  // requests that the memory cannot take hold up the loads behind them.
  const bool stream = fetch.next != nullptr && tiles == 1 && fetch.is_stream;
  const int64_t step = fetch.next == nullptr ? 0 : fetch.bytes / (groups * tiles);
  const char* next = fetch.next == nullptr ? itself : fetch.next;
  // One or two rows take all vectors of columns together.
  constexpr int kTail = kLanes == 8 && std::is_same_v<typename Kind::Total, float> ? 2 : 0;
  for_tiles<kFewRows, kTail>(num_rows, [&](int64_t row, auto height) {
    constexpr int MR = decltype(height)::value;
    fetch_results(fetch, row, MR);
    const auto* some = rows + row * row_stride;
    auto* sums = totals + row * kPanel;
    if (stream)
      tile_rows<Kind, MR, 4>(some, row_stride, panel, width, groups, sums, first, itself + kAhead, line);
    else if (step <= 64 * kLinesOf<Kind>)
      tile_rows<Kind, MR, 1>(some, row_stride, panel, width, groups, sums, first, next, step);
    else
      tile_rows<Kind, MR, 2>(some, row_stride, panel, width, groups, sums, first, next, step);
    next += step * groups;
  });
}

}  // namespace millrace
