// Attention by AMX tiles: bfloat16 for units of any number of rows, int8 and kivi4 for those of many.
//
// Queries and weights are rounded to bfloat16. A score is one chain of tile instructions over the key's elements, 32 at a
// time; a weighted value is one over the places of its part, 32 at a time from place 0 on: zeros add nothing, so it does
// not matter which of them are left out, nor which operand is the first. Many rows: keys and values are packed once for
// all of them. Few rows: keys are a tile's rows as they lie in the cache, and the scores come out transposed.
#pragma once

#include <algorithm>
#include <cstring>

#include "attention/attention_products.h"
#include "native/tiles.h"

#if defined(TILE_LOAD)

namespace millrace {

// Elements of a key, or places, that one tile instruction takes.
constexpr int64_t kTileDepth = 32;
// Bytes of a row's weights, which lie where its scores were.
constexpr int64_t kScoreBytes = kPartTokens * static_cast<int64_t>(sizeof(float));

// Pairs of neighbouring places for 32 columns of values, as two tiles' rows; both may be absent. Columns come four by
// four, the tiles' in turn (columns_in_order puts them right), as that takes one instruction each.
inline void pack_pair(const char* low, const char* high, __mmask32 mask, char* first, char* second) {
  const __m512i a = low ? _mm512_maskz_loadu_epi16(mask, low) : _mm512_setzero_si512();
  const __m512i b = high ? _mm512_maskz_loadu_epi16(mask, high) : _mm512_setzero_si512();
  _mm512_store_si512(first, _mm512_unpacklo_epi16(a, b));
  _mm512_store_si512(second, _mm512_unpackhi_epi16(a, b));
}

inline void columns_in_order(float* sums, int64_t count) {
  const __m512i lower = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), upper = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  for (int64_t i = 0; i < count; i += 2 * kTile) {
    const __m512d a = _mm512_loadu_pd(sums + i), b = _mm512_loadu_pd(sums + i + kTile);
    _mm512_storeu_pd(sums + i, _mm512_permutex2var_pd(a, lower, b));
    _mm512_storeu_pd(sums + i + kTile, _mm512_permutex2var_pd(a, upper, b));
  }
}

// Whole tiles: rows `rows` and kTile further, columns `columns` and kTileBytes further; sums 2 x 2. kLower: whether the
// second rows are there.
template <bool kLower>
inline void tile_sums(const char* rows, int64_t row_bytes, const char* columns, int64_t column_bytes, int64_t second,
                      int64_t step_bytes, int64_t steps, float* sums, int64_t sum_bytes) {
  float* lower = sums + kTile * sum_bytes / static_cast<int64_t>(sizeof(float));
  TILE_ZERO(0);
  TILE_ZERO(1);
  if (kLower) TILE_ZERO(2);
  if (kLower) TILE_ZERO(3);
  for (int64_t step = 0; step < steps; ++step, rows += 64, columns += step_bytes) {
    TILE_LOAD(6, columns, column_bytes);
    TILE_LOAD(4, rows, row_bytes);
    TILE_DOT_HALVES(0, 4, 6);
    TILE_LOAD(7, columns + second, column_bytes);
    TILE_DOT_HALVES(1, 4, 7);
    if (kLower) {
      TILE_LOAD(5, rows + kTile * row_bytes, row_bytes);
      TILE_DOT_HALVES(2, 5, 6);
      TILE_DOT_HALVES(3, 5, 7);
    }
  }
  TILE_STORE(0, sums, sum_bytes);
  TILE_STORE(1, sums + kTile, sum_bytes);
  if (kLower) TILE_STORE(2, lower, sum_bytes);
  if (kLower) TILE_STORE(3, lower + kTile, sum_bytes);
}

// Calls body(first row, whether there are more than kTile) for the tiles of rows from that of `row` on.
template <typename Body>
inline void tiles_of_rows(int64_t row, int64_t rows, const Body& body) {
  for (int64_t tile = row / (2 * kTile) * 2 * kTile; tile < rows; tile += 2 * kTile) {
    if (rows - tile > kTile)
      body(tile, std::true_type());
    else
      body(tile, std::false_type());
  }
}

class TileProducts {
 public:
  static constexpr int64_t kChunksOfValues = 2;
  // Of many rows, those that are scored, weighed and summed in one go: their scores stay in the nearest cache.
  static constexpr int64_t kRowsAtOnce = 2 * kTile;
  using CacheType = Bfloat16Cache;

  TileProducts(const ProductSizes& sizes, ProductScratch& scratch)
      : sizes_(sizes),
        scratch_(scratch),
        steps_((sizes.key_dim + kTileDepth - 1) / kTileDepth),
        wide_((sizes.value_dim + 2 * kTile - 1) / (2 * kTile) * 2 * kTile) {}

  // The weight of a score, within 2^-13 of itself, as it is rounded to bfloat16. Of -inf it is 0: nothing is left of it
  // when whole powers of two are taken away.
  static Vec weight_of(Vec score, Vec base) {
    const Vec y = fma(score, set1(kLog2OfE), mul(base, set1(-kLog2OfE)));
    const Vec r = _mm512_reduce_ps(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    Vec p = set1(0.05500893f);
    p = fma(p, r, set1(0.24221096f));
    p = fma(p, r, set1(0.69328293f));
    p = fma(p, r, set1(1.0f));
    return scale_by_power(p, sub(y, r));
  }

  // `few`: rows of each head, where these are streamed; else 0.
  void begin(int64_t rows, int64_t few) {
    rows_ = rows;
    few_ = few;
    const int64_t padded = (rows + 2 * kTile - 1) / (2 * kTile) * 2 * kTile, words = steps_ * kTile;
    queries_ = scratch_.queries.get(padded * words);
    scores_ = scratch_.scores.get((few ? padded : kRowsAtOnce) * kPartTokens);
    weighted_ = scratch_.weighted.get(padded * wide_);
    keys_ = scratch_.packed.get(few ? 0 : kPartTokens * words);
    values_ = scratch_.values.get(few ? kTile * wide_ : kPartTokens / 2 * wide_);
    if (few) {
      // 0, 1: scores of two chunks; 2, 3: keys or values; 4: queries; 5, 6: weighted values; 7: weights.
      const TileShape whole, transposed = {kTile, 4 * few}, flat = {few, 64};
      TileShapes::set({transposed, transposed, whole, whole, transposed, flat, flat, flat});
    } else {
      scratch_.ends.assign(padded, 0);
      ends_ = scratch_.ends.data();
      TileShapes::set({{}, {}, {}, {}, {}, {}, {}, {}});
    }
  }

  float* scores(int64_t row) { return scores_ + (few_ ? row : row % kRowsAtOnce) * kPartTokens; }
  const float* weighted(int64_t row) const { return weighted_ + row * wide_; }

  void take_query(int64_t row, const float* q, float scale) {
    const int64_t words = steps_ * kTile;
    alignas(64) uint32_t pairs[kTile];
    for (int64_t step = 0; step < words; step += kTile) {
      for (int64_t half = 0; half < 2; ++half) {
        const int64_t d = 2 * step + half * kLanes;
        const Mask m = first(std::max<int64_t>(0, sizes_.key_dim - d));
        put(reinterpret_cast<uint16_t*>(pairs) + half * kLanes, mul(load(q + d, m), set1(scale)));
      }
      uint32_t* to = reinterpret_cast<uint32_t*>(queries_);
      if (!few_) {
        std::memcpy(to + row * words + step, pairs, sizeof(pairs));
        continue;
      }
      // The words of a head's rows side by side.
      to += (row / few_ * words + step) * few_ + row % few_;
      for (int64_t i = 0; i < kTile; ++i) to[i * few_] = pairs[i];
    }
  }

  // --- many rows ---

  // Packs up to kPanel keys, from place `at` on.
  void take_keys(int64_t at, const char* const* keys, int64_t vectors, Ahead& later) {
    const int64_t words = steps_ * kTile, used = (sizes_.key_dim + 1) / 2;
    float* panel = keys_ + at * words;
    for (int64_t v = 0; v < vectors; ++v)
      pack_keys<Bfloat16Math, Bfloat16Cache>(keys + v * kLanes, later, sizes_.key_dim, panel + v * kLanes, kPanel);
    std::memset(panel + used * kPanel, 0, (words - used) * kPanel * sizeof(float));
  }

  // Scores of kRowsAtOnce rows against the packed keys of places [begin, end). What is packed beyond the last place, up to
  // whole tiles, is computed, too, and not looked at.
  void score_rows(int64_t row, int64_t begin, int64_t end) {
    const int64_t words = steps_ * kTile;
    tiles_of_rows(row, std::min(rows_, row + kRowsAtOnce), [&](int64_t tile, auto both) {
      for (int64_t at = begin; at < end; at += 2 * kTile) {
        const float* columns = keys_ + at / kPanel * kPanel * words + at % kPanel;
        tile_sums<decltype(both)::value>(reinterpret_cast<const char*>(queries_ + tile * words), 4 * words,
                                         reinterpret_cast<const char*>(columns), 4 * kPanel, 64, kTile * 4 * kPanel, steps_,
                                         scores(tile) + at, kScoreBytes);
      }
    });
  }

  void set_weights(int64_t row, int64_t at, Vec weights) {
    put(reinterpret_cast<uint16_t*>(scores(row)) + at, weights);
  }

  // The weights of places [from, end) are set, up to whole vectors; those that share an instruction with them are not.
  void weights_are_set(int64_t row, int64_t from, int64_t end) {
    if (from % kTileDepth) set_weights(row, from - kTile, zero());
    const int64_t set = (end + kTile - 1) / kTile * kTile;
    if (set % kTileDepth) set_weights(row, set, zero());
    if (!few_) ends_[row] = end;
  }

  // Packs the values of up to kPanel places.
  void take_values(int64_t at, const char* const* values, int64_t count, Ahead& later, bool fresh) {
    if (fresh) begin_ = at;
    for (int64_t place = 0; place < count; place += 2) later.call(2);
    for (int64_t place = 0; place < (count + kTileDepth - 1) / kTileDepth * kTileDepth; place += 2)
      pack_places(place < count ? values[place] : nullptr, place + 1 < count ? values[place + 1] : nullptr,
                  panel_of(at + place), (at + place) % kTileDepth / 2);
  }

  // Sums of the packed values of kRowsAtOnce rows.
  void add_rows(int64_t row) {
    const int64_t end = std::min(rows_, row + kRowsAtOnce), last = end_of(row, kRowsAtOnce);
    // What rows do not see of the places that others of them see.
    for (int64_t each = row; each < end; ++each)
      for (int64_t at = std::max(begin_, (ends_[each] + kTileDepth - 1) / kTileDepth * kTileDepth); at < last; at += kTile)
        set_weights(each, at, zero());
    tiles_of_rows(row, end, [&](int64_t tile, auto both) {
      for (int64_t column = 0; column < wide_; column += 2 * kTile)
        tile_sums<decltype(both)::value>(
            reinterpret_cast<const char*>(scores(tile)) + 2 * begin_, kScoreBytes, panel_of(begin_) + column * 64, 64,
            kTileBytes, wide_ * 64, std::max<int64_t>(0, last - begin_ + kTileDepth - 1) / kTileDepth,
            weighted_ + tile * wide_ + column, 4 * wide_);
    });
    columns_in_order(weighted_ + row * wide_, (end - row) * wide_);
  }

  // --- few rows, as they lie in the cache ---

  bool streams() const { return sizes_.key_dim % kTileDepth == 0 && sizes_.value_dim % kTileDepth == 0; }

  void score_chunks(const Chunk now[2], const Chunk[2], int64_t rows, Stream& stream) {
    const bool single = now[0].at == now[1].at;
    const char* far[2] = {stream.ahead(now[0].rows.base), nullptr};
    if (!single) far[1] = stream.ahead(now[1].rows.base);
    const int64_t words = steps_ * kTile, stride = now[0].rows.stride;
    const char* queries = reinterpret_cast<const char*>(queries_ + now[0].row * words);
    alignas(64) float sums[2][kTile * kTile];
    TILE_ZERO(0);
    TILE_ZERO(1);
    for (int64_t step = 0; step < steps_; ++step, queries += kTile * 4 * few_) {
      TILE_LOAD(4, queries, 4 * few_);
      TILE_LOAD(2, now[0].rows.base + 64 * step, stride);
      TILE_DOT_HALVES(0, 2, 4);
      call_rows(far[0] + 64 * step, stride);
      if (single) continue;
      TILE_LOAD(3, now[1].rows.base + 64 * step, stride);
      TILE_DOT_HALVES(1, 3, 4);
      call_rows(far[1] + 64 * step, stride);
    }
    TILE_STORE(0, sums[0], 4 * few_);
    TILE_STORE(1, sums[1], 4 * few_);
    const __m512i places = _mm512_mullo_epi32(
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_epi32(static_cast<int>(few_)));
    for (int which = 0; which < (single ? 1 : 2); ++which)
      for (int64_t row = 0; row < rows; ++row)
        store(scores(now[which].row + row) + now[which].at, _mm512_i32gather_ps(places, sums[which] + row, 4));
  }

  void add_chunks(const Chunk* chunks, int64_t begin, int64_t end, int64_t, Stream& stream, bool fresh) {
    const int64_t from = chunks->at / kTileDepth * kTileDepth, row = chunks->row;
    const int64_t stride = chunks->rows.stride;
    for (int64_t half = 0; half < 2; ++half) {
      // The chunk of these places, where there is one.
      const int64_t at = from + half * kTile;
      const bool is_there = at >= chunks->at && at < end;
      const Strided values = is_there ? chunks[at > chunks->at].rows : Strided{nullptr, 0};
      const char* far = is_there ? stream.ahead(values.base) : nullptr;
      for (int64_t place = 0; place < kTile; place += 2) {
        const auto value = [&](int64_t i) {
          return is_there && at + i >= begin && at + i < end ? values[i] : nullptr;
        };
        pack_places(value(place), value(place + 1), reinterpret_cast<char*>(values_), (half * kTile + place) / 2);
        if (is_there)
          for (int64_t byte = 0; byte < 2 * stride; byte += 64) call_far(far + place * stride + byte);
      }
    }
    float* sums = weighted_ + row * wide_;
    const char* packed = reinterpret_cast<const char*>(values_);
    TILE_LOAD(7, reinterpret_cast<const char*>(scores(row)) + 2 * from, kScoreBytes);
    for (int64_t column = 0; column < wide_; column += 2 * kTile, packed += 2 * kTileBytes) {
      if (fresh) {
        TILE_ZERO(5);
        TILE_ZERO(6);
      } else {
        TILE_LOAD(5, sums + column, 4 * wide_);
        TILE_LOAD(6, sums + column + kTile, 4 * wide_);
      }
      TILE_LOAD(2, packed, 64);
      TILE_DOT_HALVES(5, 7, 2);
      TILE_LOAD(3, packed + kTileBytes, 64);
      TILE_DOT_HALVES(6, 7, 3);
      TILE_STORE(5, sums + column, 4 * wide_);
      TILE_STORE(6, sums + column + kTile, 4 * wide_);
    }
  }

  void finish_chunks() { columns_in_order(weighted_, rows_ * wide_); }

 private:
  // As bfloat16.
  static void put(uint16_t* to, Vec values) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(values));
  }

  // The last place that `count` rows see, at whole instructions.
  int64_t end_of(int64_t row, int64_t count) const {
    const int64_t most = *std::max_element(ends_ + row, ends_ + std::min(rows_, row + count));
    return (most + kTileDepth - 1) / kTileDepth * kTileDepth;
  }

  // Tiles of packed values from a place on: [columns / 16] of [pairs of places][16].
  char* panel_of(int64_t at) const { return reinterpret_cast<char*>(values_) + at / kTileDepth * wide_ * 64; }

  // Row `pair` of a panel's tiles.
  void pack_places(const char* low, const char* high, char* panel, int64_t pair) const {
    char* to = panel + pair * 64;
    for (int64_t column = 0; column < wide_; column += 2 * kTile, to += 2 * kTileBytes) {
      const int64_t left = sizes_.value_dim - column;
      const __mmask32 mask = left >= 2 * kTile ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
      pack_pair(low ? low + 2 * column : nullptr, high ? high + 2 * column : nullptr, mask, to, to + kTileBytes);
    }
  }

  static void call_rows(const char* from, int64_t stride) {
    for (int64_t i = 0; i < kTile; ++i) call_far(from + i * stride);
  }

  const ProductSizes sizes_;
  ProductScratch& scratch_;
  const int64_t steps_, wide_;
  int64_t rows_ = 0, few_ = 0, begin_ = 0;
  int64_t* ends_ = nullptr;  // of what each row sees of the part
  float *queries_ = nullptr, *scores_ = nullptr, *keys_ = nullptr, *values_ = nullptr, *weighted_ = nullptr;
};

// --- int8 and kivi4 ---

// Whole tiles of the high and the low bytes of levels, `low` bytes further; sums, exact, of 2 x 2 tiles to `out`. kLower:
// whether the second rows are there. kUnsigned: whether the levels, else the columns, are the bytes without signs.
template <bool kLower, bool kUnsigned>
inline void tile_levels(const char* rows, int64_t row_bytes, int64_t low, const char* columns, int64_t column_bytes,
                        int64_t steps, int32_t (*out)[2 * kTile]) {
  alignas(64) int32_t high_sums[2 * kTile][2 * kTile];
  constexpr int64_t kStride = sizeof(out[0]);
  const auto multiply = [&](const char* from, int32_t(*to)[2 * kTile]) {
    const char* some = columns;
    TILE_ZERO(0);
    TILE_ZERO(1);
    if (kLower) TILE_ZERO(2);
    if (kLower) TILE_ZERO(3);
    for (int64_t step = 0; step < steps; ++step, from += 64, some += kTile * column_bytes) {
      TILE_LOAD(6, some, column_bytes);
      TILE_LOAD(7, some + 64, column_bytes);
      TILE_LOAD(4, from, row_bytes);
      if (kUnsigned) {
        TILE_DOT_LEVELS(0, 4, 6);
        TILE_DOT_LEVELS(1, 4, 7);
      } else {
        TILE_DOT_BYTES(0, 4, 6);
        TILE_DOT_BYTES(1, 4, 7);
      }
      if (!kLower) continue;
      TILE_LOAD(5, from + kTile * row_bytes, row_bytes);
      if (kUnsigned) {
        TILE_DOT_LEVELS(2, 5, 6);
        TILE_DOT_LEVELS(3, 5, 7);
      } else {
        TILE_DOT_BYTES(2, 5, 6);
        TILE_DOT_BYTES(3, 5, 7);
      }
    }
    TILE_STORE(0, to[0], kStride);
    TILE_STORE(1, to[0] + kTile, kStride);
    if (kLower) TILE_STORE(2, to[kTile], kStride);
    if (kLower) TILE_STORE(3, to[kTile] + kTile, kStride);
  };
  multiply(rows, high_sums);
  multiply(rows + low, out);
  for (int64_t row = 0; row < (kLower ? 2 * kTile : kTile); ++row)
    for (int64_t at = 0; at < 2 * kTile; at += kTile)
      store_ints(out[row] + at, both(load_ints(high_sums[row] + at), load_ints(out[row] + at)));
}

// Many rows by tiles, few as IntegerProducts has them: sums are exact, so bits are the same.
template <typename Cache>
class IntegerTiles : public IntegerProducts<Cache> {
  using Base = IntegerProducts<Cache>;
  using Base::integers, Base::kLevelStride, Base::levels_, Base::packed_, Base::queries_, Base::query_stride_, Base::rows_,
      Base::scratch_, Base::sizes_, Base::sums_, Base::width_;

  // Places that one tile instruction takes.
  static constexpr int64_t kDepth = 64;

 public:
  using Base::scores;

  IntegerTiles(const ProductSizes& sizes, ProductScratch& scratch) : Base(sizes, scratch) {}

  void begin(int64_t rows, int64_t few) {
    const int64_t padded = (rows + 2 * kTile - 1) / (2 * kTile) * 2 * kTile;
    Base::begin(padded, few);
    rows_ = rows;
    few_ = few;
    if (few) return;
    values_ = integers(scratch_.values, kPartTokens / 4 * width_);
    scratch_.ends.assign(padded, 0);
    ends_ = scratch_.ends.data();
  }

  void score(int64_t begin, int64_t at, const char* const* keys, int64_t vectors, Ahead& later) {
    const QueryLevels* levels = scratch_.query_levels.data();
    for (int64_t v = 0; v < vectors; ++v)
      pack_keys<IntegerMath, Cache>(keys + v * kLanes, later, sizes_.key_dim,
                                        reinterpret_cast<float*>(packed_ + v * kLanes), kPanel);
    for (int64_t v = 0; v < vectors; v += 2)
      tiles_of_rows(begin, rows_, [&](int64_t tile, auto both_tiles) {
        alignas(64) int32_t sums[2 * kTile][2 * kTile];
        tile_levels<decltype(both_tiles)::value, false>(
            reinterpret_cast<const char*>(queries_ + tile * query_stride_), 4 * query_stride_, 2 * query_stride_,
            reinterpret_cast<const char*>(packed_ + v * kLanes), 4 * kPanel, query_stride_ / 2 / kTile, sums);
        const int64_t end = std::min<int64_t>(rows_, tile + 2 * kTile);
        for (int64_t row = tile; row < end; ++row)
          for (int64_t half = 0; half < std::min<int64_t>(2, vectors - v); ++half)
            store(scores(row) + at + (v + half) * kLanes,
                  scores_of(load_ints(sums[row - tile] + half * kLanes), levels[row]));
      });
  }

  void weights_are_set(int64_t row, int64_t from, int64_t end) {
    Base::weights_are_set(row, from, end);
    if (few_) return;
    // What the row does not see of the places that others of its tile see.
    uint8_t* levels = reinterpret_cast<uint8_t*>(levels_ + row * kLevelStride);
    const int64_t set = (end + kLanes - 1) / kLanes * kLanes;
    for (int64_t at = set; at < kPartTokens; at += kLanes) {
      _mm_store_si128(reinterpret_cast<__m128i*>(levels + at), _mm_setzero_si128());
      _mm_store_si128(reinterpret_cast<__m128i*>(levels + kPartTokens + at), _mm_setzero_si128());
    }
    ends_[row] = end;
  }

  // Packs the values of up to kPanel places; `finish` multiplies.
  void add_values(int64_t, int64_t at, const char* const* values, int64_t count, Ahead& later, bool fresh) {
    if (fresh) begin_ = at;
    pack_value_words<Cache>(values, later, (count + 3) / 4, sizes_.value_dim, values_ + at / 4 * width_, width_);
  }

  void finish() {
    for (int64_t column = 0; column < width_; column += 2 * kTile)
      tiles_of_rows(0, rows_, [&](int64_t tile, auto both_tiles) {
        const int64_t end = std::min<int64_t>(rows_, tile + 2 * kTile);
        const int64_t last = *std::max_element(ends_ + tile, ends_ + end);
        alignas(64) int32_t sums[2 * kTile][2 * kTile];
        tile_levels<decltype(both_tiles)::value, true>(
            reinterpret_cast<const char*>(levels_ + tile * kLevelStride) + begin_, 4 * kLevelStride, kPartTokens,
            reinterpret_cast<const char*>(values_ + begin_ / 4 * width_ + column), 4 * width_,
            std::max<int64_t>(0, last - begin_ + kDepth - 1) / kDepth, sums);
        for (int64_t row = tile; row < end; ++row)
          std::memcpy(sums_ + row * width_ + column, sums[row - tile], sizeof(sums[0]));
      });
    Base::finish();
  }

 private:
  int64_t few_ = 0, begin_ = 0;
  int64_t* ends_ = nullptr;  // of what each row sees of the part
  int32_t* values_ = nullptr;
};

}  // namespace millrace

#endif
