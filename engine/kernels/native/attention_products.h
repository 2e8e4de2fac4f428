// The two products of attention over one part: scores of queries against keys, and weights against values. Both
// classes have the same functions; `Worker` in attention.cc calls them.
//
// Shape letters: R query rows, D key dim, E value dim (rounded up to whole vectors in scratch).
#pragma once

#include <cstdlib>
#include <vector>

#include "attention.h"
#include "attention_few.h"
#include "attention_int8.h"
#include "attention_math.h"

namespace millrace {

// Positions whose keys or values are packed at once: a panel stays in the first cache for all rows.
constexpr int64_t kPanel = 64;

class Buffer {
 public:
  ~Buffer() { std::free(data_); }
  float* get(int64_t floats) {
    if (floats > size_) {
      std::free(data_);
      size_ = floats + floats / 4;
      data_ = static_cast<float*>(std::aligned_alloc(64, (sizeof(float) * size_ + 63) / 64 * 64));
    }
    return data_;
  }

 private:
  float* data_ = nullptr;
  int64_t size_ = 0;
};

struct ProductScratch {
  Buffer queries, scores, packed, weighted, levels, sums;
#if defined(__AVX512VNNI__)
  std::vector<QueryLevels> query_levels;
  std::vector<float> factors;
#endif
};

struct ProductSizes {
  int64_t key_dim, value_dim;
  int64_t wide;  // value_dim up to whole vectors
};

template <typename Math, typename Cache>
class FloatProducts {
 public:
  using CacheType = Cache;

  FloatProducts(const ProductSizes& sizes, ProductScratch& scratch)
      : sizes_(sizes), scratch_(scratch), words_((sizes.key_dim + Math::kPerWord - 1) / Math::kPerWord) {}

  void begin(int64_t rows) {
    rows_ = rows;
    few_values_ = kDirect && rows <= kFewRows && sizes_.value_dim % 64 == 0;
    queries_ = scratch_.queries.get(rows * words_);
    scores_ = scratch_.scores.get(rows * kPartTokens);
    weighted_ = scratch_.weighted.get(rows * sizes_.wide);
    packed_ = scratch_.packed.get(kPanel * std::max(words_, sizes_.wide));
  }

  float* scores(int64_t row) { return scores_ + row * kPartTokens; }
  const float* weighted(int64_t row) const { return weighted_ + row * sizes_.wide; }

  void take_query(int64_t row, const float* q, float scale) {
    float* to = queries_ + row * words_;
    to[words_ - 1] = 0.0f;
    for (int64_t d = 0; d < sizes_.key_dim; d += kLanes) {
      const Mask m = first(sizes_.key_dim - d);
      Math::store_row(to, d, m, mul(load(q + d, m), set1(scale)));
    }
  }

  // Scores of all rows against `vectors` times kLanes positions of a part, from place `at` on.
  void score(int64_t at, const char* const* keys, int64_t vectors, Ahead& later) {
    float* scores = scores_ + at;
#if defined(__AVX512F__)
    if constexpr (kDirect) {
      const auto with = [&](auto few) { few(queries_, keys, vectors, later, sizes_.key_dim, scores, kPartTokens); };
      switch (rows_) {
        case 1: return with(few_scores<Cache, 1>);
        case 2: return with(few_scores<Cache, 2>);
        case 3: return with(few_scores<Cache, 3>);
        case 4: return with(few_scores<Cache, 4>);
      }
    }
#endif
    for (int64_t v = 0; v < vectors; ++v) {
      pack_keys<Math, Cache>(keys + v * kLanes, later, sizes_.key_dim, packed_ + v * kLanes, kPanel);
    }
    product<Math>(rows_, vectors, queries_, words_, packed_, kPanel, words_, scores, kPartTokens, true);
  }

  // A vector of a row's weights takes the place of the scores.
  void set_weights(int64_t row, int64_t at, Vec weights) { Math::store_row(scores(row), at, first(kLanes), weights); }
  void weights_are_set(int64_t, int64_t, int64_t) {}

  // Adds the weighted values of up to kPanel positions to every row's sums, or begins them.
  void add_values(int64_t at, const char* const* values, int64_t count, Ahead& later, bool fresh) {
    const float* weights = scores_ + at / Math::kPerWord;
    const int64_t wide = sizes_.wide;
#if defined(__AVX512F__)
    if constexpr (kDirect) {
      const auto with = [&](auto few) { few(weights, kPartTokens, values, count, wide, later, weighted_, fresh); };
      switch (few_values_ ? rows_ : 0) {
        case 1: return with(few_products<Cache, 1>);
        case 2: return with(few_products<Cache, 2>);
        case 3: return with(few_products<Cache, 3>);
        case 4: return with(few_products<Cache, 4>);
      }
    }
#endif
    pack_values<Math, Cache>(values, later, count, sizes_.value_dim, packed_, wide);
    product<Math>(rows_, wide / kLanes, weights, kPartTokens, packed_, wide,
                  (count + Math::kPerWord - 1) / Math::kPerWord, weighted_, wide, fresh);
  }

  // After a part's last values.
  void finish() {
#if defined(__AVX512F__)
    if constexpr (kDirect) {
      for (int64_t row = 0; few_values_ && row < rows_; ++row) {
        few_sums_in_order<Cache>(weighted_ + row * sizes_.wide, sizes_.wide);
      }
    }
#endif
  }

 private:
#if defined(__AVX512F__)
  // Whether few rows are multiplied without packing.
  static constexpr bool kDirect = Math::kPerWord == 1 && Cache::kBytes >= 2;
#else
  static constexpr bool kDirect = false;
#endif

  const ProductSizes sizes_;
  ProductScratch& scratch_;
  const int64_t words_;
  int64_t rows_ = 0;
  bool few_values_ = false;
  float *queries_ = nullptr, *scores_ = nullptr, *packed_ = nullptr, *weighted_ = nullptr;
};

#if defined(__AVX512VNNI__)

class IntegerProducts {
 public:
  using CacheType = Int8Cache;

  IntegerProducts(const ProductSizes& sizes, ProductScratch& scratch)
      : sizes_(sizes),
        scratch_(scratch),
        query_stride_(2 * whole_lines(sizes.key_dim) / 4),
        width_(whole_lines(sizes.value_dim)) {}

  void begin(int64_t rows) {
    rows_ = rows;
    queries_ = integers(scratch_.queries, rows * query_stride_);
    levels_ = integers(scratch_.levels, rows * kLevelStride);
    sums_ = integers(scratch_.sums, rows * width_);
    packed_ = integers(scratch_.packed, kPanel * std::max(query_stride_, width_));
    scores_ = scratch_.scores.get(rows * kPartTokens);
    weighted_ = scratch_.weighted.get(rows * sizes_.wide);
    scratch_.query_levels.resize(rows);
    scratch_.factors.resize(rows);
  }

  float* scores(int64_t row) { return scores_ + row * kPartTokens; }
  const float* weighted(int64_t row) const { return weighted_ + row * sizes_.wide; }

  void take_query(int64_t row, const float* q, float scale) {
    int8_t* to = reinterpret_cast<int8_t*>(queries_ + row * query_stride_);
    scratch_.query_levels[row] = query_levels(q, sizes_.key_dim, scale, to, to + 2 * query_stride_);
  }

  void score(int64_t at, const char* const* keys, int64_t vectors, Ahead& later) {
    const QueryLevels* levels = scratch_.query_levels.data();
    if (rows_ <= kFewRows) {
      const auto with = [&](auto few, int64_t row, int64_t v) {
        few(queries_ + row * query_stride_, query_stride_, levels + row, keys + v * kLanes, sizes_.key_dim,
            scores_ + row * kPartTokens + at + v * kLanes, kPartTokens);
      };
      for (int64_t v = 0; v < vectors; ++v) {
        later.call(kLanes);
        for (int64_t row = 0; row + 2 <= rows_; row += 2) with(few_integer_scores<2>, row, v);
        if (rows_ % 2) with(few_integer_scores<1>, rows_ - 1, v);
      }
      return;
    }
    for (int64_t v = 0; v < vectors; ++v) {
      pack_keys<IntegerMath, Int8Cache>(keys + v * kLanes, later, sizes_.key_dim,
                                        reinterpret_cast<float*>(packed_ + v * kLanes), kPanel);
    }
    const auto with = [&](auto tile, int64_t row, int64_t v) {
      tile(queries_ + row * query_stride_, query_stride_, levels + row, packed_ + v * kLanes, kPanel,
           (sizes_.key_dim + 3) / 4, scores_ + row * kPartTokens + at + v * kLanes, kPartTokens);
    };
    if (vectors == 4) {
      for (int64_t row = 0; row < rows_; row += 3) {
        switch (rows_ - row) {
          case 1: with(integer_scores<1, 4>, row, 0); break;
          case 2: with(integer_scores<2, 4>, row, 0); break;
          default: with(integer_scores<3, 4>, row, 0);
        }
      }
      return;
    }
    for (int64_t row = 0; row < rows_; ++row) {
      for (int64_t v = 0; v < vectors; ++v) with(integer_scores<1, 1>, row, v);
    }
  }

  void set_weights(int64_t row, int64_t at, Vec weights) { store(scores(row) + at, weights); }

  // The weights of places [from, end) are set, those up to whole vectors as zeros.
  void weights_are_set(int64_t row, int64_t from, int64_t end) {
    uint8_t* to = reinterpret_cast<uint8_t*>(levels_ + row * kLevelStride) + from;
    const int64_t count = (end - from + kLanes - 1) / kLanes * kLanes;
    scratch_.factors[row] = weight_levels(scores(row) + from, count, to, to + kPartTokens);
  }

  void add_values(int64_t at, const char* const* values, int64_t count, Ahead& later, bool fresh) {
    const int64_t words = (count + 3) / 4, dim = sizes_.value_dim;
    const int32_t* weights = levels_ + at / 4;
    if (rows_ <= kFewRows) {
      const auto with = [&](auto few, int64_t row) {
        few(weights + row * kLevelStride, kLevelStride, values, words, dim, later, sums_ + row * width_, width_, fresh);
      };
      for (int64_t row = 0; row + 2 <= rows_; row += 2) with(few_integer_values<2>, row);
      if (rows_ % 2) with(few_integer_values<1>, rows_ - 1);
      return;
    }
    pack_value_words(values, later, words, dim, packed_, width_);
    const auto with = [&](auto tile, int64_t row, int64_t column) {
      tile(weights + row * kLevelStride, kLevelStride, packed_ + column, width_, words, sums_ + row * width_ + column,
           width_, fresh);
    };
    for (int64_t column = 0; column < width_; column += 64) {
      for (int64_t row = 0; row < rows_; row += 3) {
        switch (rows_ - row) {
          case 1: with(integer_values<1>, row, column); break;
          case 2: with(integer_values<2>, row, column); break;
          default: with(integer_values<3>, row, column);
        }
      }
    }
  }

  void finish() {
    for (int64_t row = 0; row < rows_; ++row) {
      values_in_order(sums_ + row * width_, scratch_.factors[row], sizes_.value_dim, weighted_ + row * sizes_.wide);
    }
  }

 private:
  // Words of one row's weights: the high bytes of all places, then the low ones.
  static constexpr int64_t kLevelStride = 2 * kPartTokens / 4;

  static int32_t* integers(Buffer& buffer, int64_t count) { return reinterpret_cast<int32_t*>(buffer.get(count)); }

  const ProductSizes sizes_;
  ProductScratch& scratch_;
  const int64_t query_stride_, width_;  // words
  int64_t rows_ = 0;
  int32_t *queries_ = nullptr, *levels_ = nullptr, *sums_ = nullptr, *packed_ = nullptr;
  float *scores_ = nullptr, *weighted_ = nullptr;
};

#endif

}  // namespace millrace
