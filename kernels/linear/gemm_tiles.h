// Chooses between vector tiles and AMX tiles, and the latter.
//
// All rows of a product take the same path, as the tile instructions add in an order of their own. What may not
// fill a tile's depth (small groups of inputs) is left to the vectors, whatever the number of rows.
#pragma once

#include "linear/gemm_micro.h"
#include "native/tiles.h"

namespace millrace {

#if defined(TILE_LOAD)

#define TILE_BEGIN(tile, to) \
  if (first)                 \
    TILE_ZERO(tile);         \
  else                       \
    TILE_LOAD(tile, to, stride * 4);

#define TILE_DOT(sum, rows, columns)         \
  if constexpr (Kind::kGroup == 2) {         \
    TILE_DOT_HALVES(sum, rows, columns);     \
  } else {                                   \
    TILE_DOT_BYTES(sum, rows, columns);      \
  }

// 32 rows and 32 columns; totals lie `stride` apart.
template <class Kind>
inline void tiles_2x2(const char* rows, int64_t row_bytes, const char* panel, int64_t line, int64_t steps,
                      typename Kind::Total* totals, int64_t stride, bool first, const char* next, int64_t next_step) {
  auto* lower = totals + kTile * stride;
  TILE_BEGIN(0, totals);
  TILE_BEGIN(1, totals + kTile);
  TILE_BEGIN(2, lower);
  TILE_BEGIN(3, lower + kTile);
  for (int64_t step = 0; step < steps; ++step) {
    TILE_LOAD(6, panel, line);
    TILE_LOAD(4, rows, row_bytes);
    TILE_DOT(0, 4, 6);
    TILE_LOAD(7, panel + 64, line);
    TILE_DOT(1, 4, 7);
    TILE_LOAD(5, rows + kTile * row_bytes, row_bytes);
    TILE_DOT(2, 5, 6);
    TILE_DOT(3, 5, 7);
    for (int64_t at = 0; at < next_step; at += 64) _mm_prefetch(next + at, _MM_HINT_T1);
    next += next_step;
    panel += kTile * line;
    rows += 64;
  }
  TILE_STORE(0, totals, stride * 4);
  TILE_STORE(1, totals + kTile, stride * 4);
  TILE_STORE(2, lower, stride * 4);
  TILE_STORE(3, lower + kTile, stride * 4);
}

// 16 rows and 16 columns.
template <class Kind>
inline void tiles_1x1(const char* rows, int64_t row_bytes, const char* panel, int64_t line, int64_t steps,
                      typename Kind::Total* totals, int64_t stride, bool first) {
  TILE_BEGIN(0, totals);
  for (int64_t step = 0; step < steps; ++step) {
    TILE_LOAD(6, panel, line);
    TILE_LOAD(4, rows, row_bytes);
    TILE_DOT(0, 4, 6);
    panel += kTile * line;
    rows += 64;
  }
  TILE_STORE(0, totals, stride * 4);
}

// 16 rows and 64 columns: one pass over a panel that is streamed.
template <class Kind>
inline void tiles_1x4(const char* rows, int64_t row_bytes, const char* panel, int64_t line, int64_t steps,
                      typename Kind::Total* totals, int64_t stride, bool first) {
  TILE_BEGIN(0, totals);
  TILE_BEGIN(1, totals + kTile);
  TILE_BEGIN(2, totals + 2 * kTile);
  TILE_BEGIN(3, totals + 3 * kTile);
  for (int64_t step = 0; step < steps; ++step) {
    for (int64_t at = 0; at < kTile * line; at += 64) _mm_prefetch(panel + kAhead + at, _MM_HINT_T0);
    TILE_LOAD(4, rows, row_bytes);
    TILE_LOAD(6, panel, line);
    TILE_DOT(0, 4, 6);
    TILE_LOAD(7, panel + 64, line);
    TILE_DOT(1, 4, 7);
    TILE_LOAD(6, panel + 128, line);
    TILE_DOT(2, 4, 6);
    TILE_LOAD(7, panel + 192, line);
    TILE_DOT(3, 4, 7);
    panel += kTile * line;
    rows += 64;
  }
  TILE_STORE(0, totals, stride * 4);
  TILE_STORE(1, totals + kTile, stride * 4);
  TILE_STORE(2, totals + 2 * kTile, stride * 4);
  TILE_STORE(3, totals + 3 * kTile, stride * 4);
}

// Rows are there up to the next multiple of kTileRows; what they hold beyond num_rows is computed and ignored, and so
// are the totals, which lie `stride` apart.
template <class Kind>
inline void multiply_by_tiles(const typename Kind::Row* rows, int64_t row_stride, int64_t num_rows,
                              const typename Kind::Weight* panel, int64_t width, int64_t groups,
                              typename Kind::Total* totals, int64_t stride, bool first, const Fetch& fetch) {
  const int64_t row_bytes = row_stride * static_cast<int64_t>(sizeof(typename Kind::Row));
  // A tile's row is one group of inputs of 16 columns: 64 bytes.
  const int64_t line = width * 4, steps = groups / kTile;
  const char* from = reinterpret_cast<const char*>(rows);
  const char* weights = reinterpret_cast<const char*>(panel);
  const int64_t pairs = (num_rows + 31) / 32 * 2;
  const char* next = fetch.next;
  const int64_t next_step = next == nullptr ? 0 : (fetch.bytes / steps / pairs + 63) / 64 * 64;
  for (int64_t row = 0; row < num_rows; row += kTile) {
    const bool two = num_rows - row > kTile;
    fetch_results(fetch, row, std::min<int64_t>(num_rows - row, two ? 2 * kTile : kTile));
    auto* sums = totals + row * stride;
    const char* some = from + row * row_bytes;
    int64_t column = 0;
    if (two) {
      for (; column + 32 <= width; column += 32) {
        tiles_2x2<Kind>(some, row_bytes, weights + column * 4, line, steps, sums + column, stride, first,
                        next == nullptr ? weights : next, next_step);
        if (next != nullptr) next += next_step * steps;
      }
    } else if (width == kPanel) {
      tiles_1x4<Kind>(some, row_bytes, weights, line, steps, sums, stride, first);
      column = width;
    }
    for (; column < width; column += kTile) {
      tiles_1x1<Kind>(some, row_bytes, weights + column * 4, line, steps, sums + column, stride, first);
      if (two)
        tiles_1x1<Kind>(some + kTile * row_bytes, row_bytes, weights + column * 4, line, steps,
                        sums + kTile * stride + column, stride, first);
    }
    if (two) row += kTile;
  }
}

#undef TILE_BEGIN
#undef TILE_DOT

#endif

template <class Kind>
inline void multiply_rows(const typename Kind::Row* rows, int64_t row_stride, int64_t num_rows,
                          const typename Kind::Weight* panel, int64_t width, int64_t groups,
                          typename Kind::Total* totals, bool first, const Fetch& fetch) {
#if defined(TILE_LOAD)
  if constexpr (Kind::kGroup > 1) {
    if (groups % kTile == 0) {
      multiply_by_tiles<Kind>(rows, row_stride, num_rows, panel, width, groups, totals, kPanel, first, fetch);
      return;
    }
  }
#endif
  multiply<Kind>(rows, row_stride, num_rows, panel, width, groups, totals, first, fetch);
}

}  // namespace millrace
