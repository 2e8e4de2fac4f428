// Inner kernels: a few rows against one panel, accumulators in registers.
//
// Each adds products over `groups` input groups to totals [rows, kPanel]. Columns are handled in pieces of
// NV vectors, rows in pieces of MR; neither changes the order of any output's additions.
#pragma once

#include "gemm.h"
#include "vectors.h"

namespace millrace {

#if defined(__AMX_TILE__) || defined(MILLRACE_EMULATE_TILES)
constexpr int kTileRows = 32;
#else
constexpr int kTileRows = 6;
#endif
// How far ahead of its use a weight that is streamed once is asked for, in bytes.
constexpr int64_t kAhead = 4096;

// What is fetched into the second cache while a tile is computed: four lines from `next` on, further by `step`
// bytes with every group of inputs.
struct Prefetch {
  const char* next;
  int64_t step;
};

// --- element types ---

// float32 rows and weights.
struct FloatKind {
  using Weight = float;
  using Row = float;
  using Total = float;
  using Sum = Vector;
  static constexpr int kGroup = 1;
  static Sum none() { return zero(); }
  static Sum resume(const Total* from) { return load(from); }
  static void save(Total* to, Sum value) { store(to, value); }
  using Spread = Vector;
  static Spread spread_row(const Row* row) { return spread(*row); }
  using Column = Vector;
  static Column column(const Weight* from) { return load(from); }
  static Sum step(Sum sum, Spread row, Column column) { return fma(row, column, sum); }
};

#if defined(__AVX512BF16__)
// bfloat16 rows and weights, by pairs.
struct HalfKind {
  using Weight = uint16_t;
  using Row = uint16_t;
  using Total = float;
  using Sum = Vector;
  static constexpr int kGroup = 2;
  static Sum none() { return zero(); }
  static Sum resume(const Total* from) { return load(from); }
  static void save(Total* to, Sum value) { store(to, value); }
  using Spread = __m512i;
  static Spread spread_row(const Row* row) {
    int32_t pair;
    std::memcpy(&pair, row, sizeof(pair));
    return _mm512_set1_epi32(pair);
  }
  using Column = __m512i;
  static Column column(const Weight* from) { return _mm512_loadu_si512(from); }
  static Sum step(Sum sum, Spread row, Column column) {
    // As text: compilers move the sums of the intrinsic from register to register in every step.
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(row), "v"(column));
    return sum;
  }
};
#else
// bfloat16 weights by pairs; rows stay float32, as there is no instruction to gain from rounding them.
struct HalfKind {
  using Weight = uint16_t;
  using Row = float;
  using Total = float;
  using Sum = Vector;
  static constexpr int kGroup = 2;
  static Sum none() { return zero(); }
  static Sum resume(const Total* from) { return load(from); }
  static void save(Total* to, Sum value) { store(to, value); }
  struct Spread {
    Vector even, odd;
  };
  static Spread spread_row(const Row* row) { return {spread(row[0]), spread(row[1])}; }
  struct Column {
    Vector even, odd;
  };
  static Column column(const Weight* from) { return {lower_half(from), upper_half(from)}; }
  static Sum step(Sum sum, const Spread& row, const Column& column) {
    return fma(row.odd, column.odd, fma(row.even, column.even, sum));
  }
};
#endif

// int8 weights and rows (stored as q + 128), by fours, exact.
struct ByteKind {
  using Weight = int8_t;
  using Row = uint8_t;
  using Total = int32_t;
  static constexpr int kGroup = 4;
#if defined(__AVX512VNNI__)
  using Sum = __m512i;
  using Spread = __m512i;
  using Column = __m512i;
  static Sum none() { return _mm512_setzero_si512(); }
  static Sum resume(const Total* from) { return _mm512_loadu_si512(from); }
  static void save(Total* to, Sum value) { _mm512_storeu_si512(to, value); }
  static Spread spread_row(const Row* row) {
    int32_t four;
    std::memcpy(&four, row, sizeof(four));
    return _mm512_set1_epi32(four);
  }
  static Column column(const Weight* from) { return _mm512_loadu_si512(from); }
  static Sum step(Sum sum, Spread row, Column column) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(row), "v"(column));
    return sum;
  }
#else
  using Sum = __m256i;
  struct Spread {
    __m256i even, odd;
  };
  struct Column {
    __m256i even, odd;
  };
  static Sum none() { return _mm256_setzero_si256(); }
  static Sum resume(const Total* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
  static void save(Total* to, Sum value) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), value); }
  static Spread spread_row(const Row* row) {
    int32_t four;
    std::memcpy(&four, row, sizeof(four));
    const __m256i bytes = _mm256_set1_epi32(four);
    return {_mm256_and_si256(bytes, _mm256_set1_epi16(0xFF)), _mm256_srli_epi16(bytes, 8)};
  }
  static Column column(const Weight* from) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return {_mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8), _mm256_srai_epi16(bytes, 8)};
  }
  static Sum step(Sum sum, const Spread& row, const Column& column) {
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(row.even, column.even));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(row.odd, column.odd));
  }
#endif
};

// --- one tile ---

// MR rows and NV vectors of columns. `stride` is the panel's width in outputs.
template <class Kind, int MR, int NV>
inline void tile(const typename Kind::Row* rows, int64_t row_stride, const typename Kind::Weight* panel,
                 int64_t stride, int64_t groups, typename Kind::Total* totals, bool first, Prefetch prefetch) {
  typename Kind::Sum sums[MR][NV];
  for (int m = 0; m < MR; ++m)
    for (int v = 0; v < NV; ++v) sums[m][v] = first ? Kind::none() : Kind::resume(totals + m * kPanel + v * kWidth);
  constexpr int64_t kStep = Kind::kGroup * kWidth;
  const int64_t next = stride * Kind::kGroup;
  for (int64_t g = 0; g < groups; ++g) {
    typename Kind::Column columns[NV];
    for (int v = 0; v < 4; ++v) _mm_prefetch(prefetch.next + 64 * v, _MM_HINT_T0);
    prefetch.next += prefetch.step;
    for (int v = 0; v < NV; ++v) columns[v] = Kind::column(panel + v * kStep);
    for (int m = 0; m < MR; ++m) {
      const typename Kind::Spread row = Kind::spread_row(rows + m * row_stride + g * Kind::kGroup);
      for (int v = 0; v < NV; ++v) sums[m][v] = Kind::step(sums[m][v], row, columns[v]);
    }
    panel += next;
  }
  for (int m = 0; m < MR; ++m)
    for (int v = 0; v < NV; ++v) Kind::save(totals + m * kPanel + v * kWidth, sums[m][v]);
}

// MR rows against a whole panel of `width` columns.
template <class Kind, int MR>
inline void tile_rows(const typename Kind::Row* rows, int64_t row_stride, const typename Kind::Weight* panel,
                      int64_t width, int64_t groups, typename Kind::Total* totals, bool first,
                      Prefetch prefetch) {
  // As many sums as fit the registers beside a row and its columns.
  constexpr int kMost = kWidth == 16 ? 4 : MR == 1 ? 8 : 2;
  constexpr int64_t kColumns = kMost * kWidth;
  int64_t column = 0;
  for (; column + kColumns <= width; column += kColumns)
    tile<Kind, MR, kMost>(rows, row_stride, panel + column * Kind::kGroup, width, groups, totals + column, first,
                            prefetch);
  constexpr int kLeast = kLane / kWidth;
  for (; column < width; column += kLane)
    tile<Kind, MR, kLeast>(rows, row_stride, panel + column * Kind::kGroup, width, groups, totals + column, first,
                            prefetch);
}

// Any number of rows. `next` is what will be read after this panel; null where that is no stream.
template <class Kind>
inline void multiply(const typename Kind::Row* rows, int64_t row_stride, int64_t num_rows,
                     const typename Kind::Weight* panel, int64_t width, int64_t groups,
                     typename Kind::Total* totals, bool first, const char* next) {
  const int64_t line = width * Kind::kGroup * static_cast<int64_t>(sizeof(typename Kind::Weight));
  const int64_t tiles = (num_rows + 5) / 6;
  // One tile reads the panel as a stream; of several, each fetches a part of what comes next.
  const int64_t step = tiles == 1 ? line : (line / tiles + 63) / 64 * 64;
  Prefetch prefetch{tiles == 1 ? reinterpret_cast<const char*>(panel) + kAhead : next, step};
  if (next == nullptr) prefetch = {reinterpret_cast<const char*>(panel), 0};
  while (num_rows > 0) {
    // Seven to eleven rows go as two tiles of about equal height.
    const int64_t height = num_rows >= 12 || num_rows <= 6 ? (num_rows < 6 ? num_rows : 6) : (num_rows + 1) / 2;
    switch (height) {
      case 1: tile_rows<Kind, 1>(rows, row_stride, panel, width, groups, totals, first, prefetch); break;
      case 2: tile_rows<Kind, 2>(rows, row_stride, panel, width, groups, totals, first, prefetch); break;
      case 3: tile_rows<Kind, 3>(rows, row_stride, panel, width, groups, totals, first, prefetch); break;
      case 4: tile_rows<Kind, 4>(rows, row_stride, panel, width, groups, totals, first, prefetch); break;
      case 5: tile_rows<Kind, 5>(rows, row_stride, panel, width, groups, totals, first, prefetch); break;
      default: tile_rows<Kind, 6>(rows, row_stride, panel, width, groups, totals, first, prefetch); break;
    }
    rows += height * row_stride;
    totals += height * kPanel;
    if (tiles > 1) prefetch.next += prefetch.step * groups;
    num_rows -= height;
  }
}

}  // namespace millrace
