// Inner kernels: a few rows against one panel, accumulators in registers.
//
// Each adds products over `groups` input groups to totals [rows, kPanel]. Columns are handled in pieces of
// NV vectors, rows in pieces of MR; neither changes the order of any output's additions.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "linear/gemm.h"
#include "native/simd.h"

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

// What is asked for while rows are multiplied: the weights that come next, and the lines that results go to.
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

// --- element types ---
//
// A kind multiplies a group of inputs in kParts parts, one after another: so few registers hold weights that none of
// the sums has to leave its own. kStored elements are a group of one output's weights.

// Sums of all kinds but exact ones.
struct FloatSums {
  using Total = float;
  using Sum = Vec;
  static Sum none() { return zero(); }
  static Sum resume(const Total* from) { return load(from); }
  static void save(Total* to, Sum value) { store(to, value); }
};

// float32 rows and weights.
struct FloatKind : FloatSums {
  using Weight = float;
  using Row = float;
  static constexpr int kGroup = 1, kStored = 1, kParts = 1;
  static Vec spread_row(const Row* row, int) { return set1(*row); }
  static Vec column(const Weight* from, int) { return load(from); }
  static Sum step(Sum sum, Vec row, Vec column) { return fma(row, column, sum); }
};

#if defined(__AVX512FP16__)
// bfloat16 weights as float16, and rows of which each value lies there twice (gemm_fp16.h).
struct HalfKind {
  using Weight = uint16_t;
  using Row = uint32_t;
};
// Whether the products of bfloat16 weights have a scale for each row and each output.
constexpr bool kScaledHalves = true;
#elif defined(__AVX512BF16__)
constexpr bool kScaledHalves = false;
// bfloat16 rows and weights, by pairs.
struct HalfKind : FloatSums {
  using Weight = uint16_t;
  using Row = uint16_t;
  static constexpr int kGroup = 2, kStored = 2, kParts = 1;
  static __m512i spread_row(const Row* row, int) {
    int32_t pair;
    std::memcpy(&pair, row, sizeof(pair));
    return _mm512_set1_epi32(pair);
  }
  static __m512i column(const Weight* from, int) { return _mm512_loadu_si512(from); }
  static Sum step(Sum sum, __m512i row, __m512i column) {
    // As text: compilers move the sums of the intrinsic from register to register in every step.
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(row), "v"(column));
    return sum;
  }
};
#else
constexpr bool kScaledHalves = false;
// bfloat16 weights by pairs; rows stay float32, as there is no instruction to gain from rounding them.
struct HalfKind : FloatSums {
  using Weight = uint16_t;
  using Row = float;
  static constexpr int kGroup = 2, kStored = 2, kParts = 2;
  static Vec spread_row(const Row* row, int part) { return set1(row[part]); }
  static Vec column(const Weight* from, int part) {
    const Vec pairs = load(reinterpret_cast<const float*>(from));
    return part ? upper_half(pairs) : lower_half(pairs);
  }
  static Sum step(Sum sum, Vec row, Vec column) { return fma(row, column, sum); }
};
#endif

// The same, leaving the expanded weights where more rows find them.
struct KeepingKind : HalfKind {};

// 8-bit weights (stored without sign, as w + 128 or as the level of a 4-bit one) and int8 rows, by fours, exact. With
// AVX2 rows have 16 bits, too, and lie as `arrange` says: the bytes of a weight fall into even and odd ones.
// Sums are those of the stored weights; what that adds is a multiple of the row's own sum.
struct ByteKind {
  using Weight = uint8_t;
  using Total = int32_t;
  static constexpr int kGroup = 4, kStored = 4;
#if defined(__AVX512VNNI__)
  using Row = int8_t;
  using Sum = __m512i;
  static constexpr int kParts = 1;
  static void arrange(Row*, int64_t) {}
  static Sum none() { return _mm512_setzero_si512(); }
  static Sum resume(const Total* from) { return _mm512_loadu_si512(from); }
  static void save(Total* to, Sum value) { _mm512_storeu_si512(to, value); }
  static __m512i spread_row(const Row* row, int = 0) {
    int32_t four;
    std::memcpy(&four, row, sizeof(four));
    return _mm512_set1_epi32(four);
  }
  static __m512i column(const Weight* from, int = 0) { return _mm512_loadu_si512(from); }
  static Sum step(Sum sum, __m512i row, __m512i column) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(column), "v"(row));
    return sum;
  }
#else
  using Row = int16_t;
  using Sum = __m256i;
  static constexpr int kParts = 2;
  // Four inputs become 0, 2, 1, 3; `count` is a multiple of four.
  static void arrange(Row* row, int64_t count) {
    for (Row* four = row; four < row + count; four += 4) {
      const __m128i inputs = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(four));
      _mm_storel_epi64(reinterpret_cast<__m128i*>(four), _mm_shufflelo_epi16(inputs, 0xD8));
    }
  }
  static Sum none() { return _mm256_setzero_si256(); }
  static Sum resume(const Total* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
  static void save(Total* to, Sum value) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), value); }
  static __m256i spread_row(const Row* row, int part) {
    int32_t pair;
    std::memcpy(&pair, row + 2 * part, sizeof(pair));
    return _mm256_set1_epi32(pair);
  }
  static __m256i column(const Weight* from, int part) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return part ? _mm256_srli_epi16(bytes, 8) : _mm256_and_si256(bytes, _mm256_set1_epi16(0xFF));
  }
  static Sum step(Sum sum, __m256i row, __m256i column) {
    // As text: compilers add products up before they add them to a sum, for which registers are too few.
    const __m256i products = _mm256_madd_epi16(row, column);
    asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(products));
    return sum;
  }
#endif
};

#if !defined(__AVX512F__)
// 4-bit levels, two fours of inputs in the same bytes.
struct LevelKind : ByteKind {
  static constexpr int kGroup = 8, kParts = 4;
  static __m256i column(const Weight* from, int part) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    if (part == 3) return _mm256_srli_epi16(bytes, 12);
    const __m256i down = part == 0 ? bytes : _mm256_srli_epi16(bytes, part == 1 ? 8 : 4);
    return _mm256_and_si256(down, _mm256_set1_epi16(15));
  }
};
#endif

// Exact sums less a number, as floats.
inline Vec to_floats(ByteKind::Sum sums, int32_t less) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(_mm512_sub_epi32(sums, _mm512_set1_epi32(less)));
#else
  return _mm256_cvtepi32_ps(_mm256_sub_epi32(sums, _mm256_set1_epi32(less)));
#endif
}

// --- one tile ---

// MR rows and NV vectors of columns. `stride` is the panel's width in outputs. In each step kLines lines from
// `next` on are asked for, further by `ahead` bytes with every group of inputs. Where Kind expands weights,
// they are left at `kept` [inputs, stride].
template <class Kind, int MR, int NV, int kLines, _mm_hint kHint = _MM_HINT_T1>
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
    UNROLLED for (int v = 0; v < kLines; ++v) _mm_prefetch(next + 64 * v, kHint);
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

// MR rows against a whole panel of `width` columns; each pass over some of them asks for its share of what comes next.
template <class Kind, int MR, int kLines>
inline void tile_rows(const typename Kind::Row* rows, int64_t row_stride, const typename Kind::Weight* panel,
                      int64_t width, int64_t groups, typename Kind::Total* totals, bool first, const char* next,
                      int64_t ahead, float* kept = nullptr) {
  constexpr int kMost = most_vectors<MR>(), kLeast = kLane / kLanes;
  constexpr int kShare = std::min<int>(kLines, (kMost * kLanes + 15) / 16);
  constexpr _mm_hint kHint = kLines == 4 ? _MM_HINT_T0 : _MM_HINT_T1;
  const int64_t share = ahead * kMost * kLanes / kPanel;
  int64_t column = 0;
  for (; column + kMost * kLanes <= width; column += kMost * kLanes, next += share * groups)
    tile<Kind, MR, kMost, kShare, kHint>(rows, row_stride, panel + column * Kind::kStored, width, groups,
                                         totals + column, first, next, share, kept + column);
  for (; column < width; column += kLane)
    tile<Kind, MR, kLeast, 1>(rows, row_stride, panel + column * Kind::kStored, width, groups, totals + column,
                              first, next, share, kept + column);
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
    else if (step <= 64)
      tile_rows<Kind, MR, 1>(some, row_stride, panel, width, groups, sums, first, next, step);
    else
      tile_rows<Kind, MR, 2>(some, row_stride, panel, width, groups, sums, first, next, step);
    next += step * groups;
  });
}

}  // namespace millrace
