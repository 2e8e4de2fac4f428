// The two products of attention over one part: scores of queries against keys, and weights against values. Both
// classes have the same functions; `Worker` in attention.cc calls them. Rows of a unit are those of its heads, one head
// after another.
//
// Shape letters: R query rows, D key dim, E value dim (rounded up to whole vectors in scratch).
#pragma once

#include <cstdlib>
#include <vector>

#include "attention/attention.h"
#include "attention/attention_few.h"
#include "attention/attention_int8.h"
#include "attention/attention_math.h"
#include "attention/attention_plan.h"
#include "paged_cache/hadamard.h"

namespace millrace {

// Positions whose keys or values are packed at once: a panel stays in the first cache for all rows.
constexpr int64_t kPanel = 64;
// Keys or values of one head, kChunk positions.
struct Chunk {
  Strided rows;
  int64_t row;  // the first of the head's rows
  int64_t at;   // place in the part
};

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
  Buffer queries, scores, packed, values, weighted, levels, sums, plain;
  std::vector<float> biases;
#if defined(__AVX512VNNI__)
  std::vector<QueryLevels> query_levels;
  std::vector<float> factors;
#endif
  std::vector<int64_t> ends;
};

struct ProductSizes {
  int64_t key_dim, value_dim;
  int64_t wide;  // value_dim up to whole vectors
};

// Queries over keys by channel: as they are, and, of the block whose channels were taken last, their products with its
// middles.
class PlainQueries {
 public:
  void begin(ProductScratch& scratch, int64_t rows, int64_t dim) {
    dim_ = dim;
    queries_ = scratch.plain.get(rows * dim);
    scratch.biases.resize(rows);
    biases_ = scratch.biases.data();
  }

  const float* row(int64_t row) const { return queries_ + row * dim_; }

  void take(int64_t row, const float* q, float scale) {
    for (int64_t i = 0; i < dim_; i += kLanes) {
      const Mask m = first(dim_ - i);
      store(queries_ + row * dim_ + i, m, mul(load(q + i, m), set1(scale)));
    }
  }

  // Notes the product of a row with middles [dim], and calls use(i, mask, elements) with its elements times half a step.
  template <typename Use>
  void scaled(int64_t row, const uint16_t* channels, const Use& use) {
    Vec bias = zero();
    for (int64_t i = 0; i < dim_; i += kLanes) {
      const Mask m = first(dim_ - i);
      const Vec q = load(queries_ + row * dim_ + i, m);
      bias = fma(q, load_bf16(channels + i, m), bias);
      use(i, m, mul(q, load_bf16(channels + dim_ + i, m)));
    }
    biases_[row] = sum(bias);
  }

  // Adds the noted products to `vectors` vectors of a row's scores.
  void add_bias(int64_t row, float* scores, int64_t vectors) const {
    for (int64_t v = 0; v < vectors; ++v) store(scores + v * kLanes, add(load(scores + v * kLanes), set1(biases_[row])));
  }

 private:
  int64_t dim_ = 0;
  float *queries_ = nullptr, *biases_ = nullptr;
};

template <typename Math, typename Cache>
class FloatProducts {
 public:
  // Chunks of one head, all in a row, because its sums are loaded once and longer runs of memory are faster.
  static constexpr int64_t kChunksOfValues = 1;
  using CacheType = Cache;

  FloatProducts(const ProductSizes& sizes, ProductScratch& scratch)
      : sizes_(sizes), scratch_(scratch), words_((sizes.key_dim + Math::kPerWord - 1) / Math::kPerWord) {}

  // The weight of a score beside one that is no less.
  static Vec weight_of(Vec score, Vec base) { return exp_of_negative(sub(score, base)); }

  // `few`: rows of each head, where these are streamed; else 0.
  void begin(int64_t rows, int64_t) {
    rows_ = rows;
    queries_ = scratch_.queries.get(rows * words_);
    scores_ = scratch_.scores.get(rows * kPartTokens);
    weighted_ = scratch_.weighted.get(rows * sizes_.wide);
    packed_ = scratch_.packed.get(std::max(kPanel * words_, kPanel * (sizes_.wide + kGroup)));
    if (by_channel<Cache>) plain_.begin(scratch_, rows, sizes_.key_dim);
  }

  float* scores(int64_t row) { return scores_ + row * kPartTokens; }
  const float* weighted(int64_t row) const { return weighted_ + row * sizes_.wide; }

  void take_query(int64_t row, const float* q, float scale) {
    if (by_channel<Cache>) return plain_.take(row, q, scale);
    float* to = queries_ + row * words_;
    to[words_ - 1] = 0.0f;
    for (int64_t d = 0; d < sizes_.key_dim; d += kLanes) {
      const Mask m = first(sizes_.key_dim - d);
      Math::store_row(to, d, m, mul(load(q + d, m), set1(scale)));
    }
  }

  // Of keys by channel: queries of rows [begin, end) for a block; `scores` of that block lack the products with middles.
  void take_channels(int64_t begin, int64_t end, const uint16_t* channels) {
    for (int64_t row = begin; row < end; ++row) {
      float* to = queries_ + row * words_;
      plain_.scaled(row, channels, [&](int64_t i, Mask m, Vec q) { store(to + i, m, q); });
    }
  }
  const PlainQueries& plain() const { return plain_; }

  // Scores of the rows from `row` on against `vectors` times kLanes positions of a part, from place `at` on.
  void score(int64_t row, int64_t at, const char* const* keys, int64_t vectors, Ahead& later) {
    for (int64_t v = 0; v < vectors; ++v) {
      float* to = packed_ + v / kVectorsAtOnce * words_ * kGroup + v % kVectorsAtOnce * kLanes;
      pack_keys<Math, Cache>(keys + v * kLanes, later, sizes_.key_dim, to, kGroup);
    }
    product<Math>(rows_ - row, vectors, queries_ + row * words_, words_, packed_, words_, scores(row) + at,
                  kPartTokens, true);
  }

  // A vector of a row's weights takes the place of the scores.
  void set_weights(int64_t row, int64_t at, Vec weights) { Math::store_row(scores(row), at, first(kLanes), weights); }
  void weights_are_set(int64_t, int64_t, int64_t) {}

  // Adds the weighted values of up to kPanel positions to the sums of the rows from `row` on, or begins them.
  void add_values(int64_t row, int64_t at, const char* const* values, int64_t count, Ahead& later, bool fresh) {
    const float* weights = scores(row) + at / Math::kPerWord;
    const int64_t wide = sizes_.wide;
    pack_values<Math, Cache>(values, later, count, sizes_.value_dim, packed_);
    product<Math>(rows_ - row, wide / kLanes, weights, kPartTokens, packed_,
                  (count + Math::kPerWord - 1) / Math::kPerWord, weighted_ + row * wide, wide, fresh);
  }

  void finish() {}

  // Whether few rows are multiplied without packing, by the functions below.
  bool streams() const { return kDirect && bytes_of<Cache>(sizes_.value_dim) % kRowBytes == 0; }

  // Scores of the `rows` rows of a head against two of its chunks (or twice the same one); `soon` are the two after
  // them, of any head.
  void score_chunks(const Chunk now[2], const Chunk soon[2], int64_t rows, Stream& stream) {
    if constexpr (kDirect) {
      const bool single = now[0].at == now[1].at;
      const char* ahead[2] = {stream.ahead(now[0].rows.base), nullptr};
      if (!single) ahead[1] = stream.ahead(now[1].rows.base);
      with_constant<kFewRows>(rows, [&](auto count) {
        constexpr int kChunks = kScoredTogether<count>;
        for (int first = 0; first < (single ? 1 : 2); first += kChunks) {
          KeysOf<kChunks> chunks = {};
          float* to[kChunks];
          for (int i = 0; i < kChunks; ++i) {
            const Chunk& chunk = now[first + i];
            chunks.keys[i] = chunk.rows.base;
            chunks.soon[i] = soon[first + i].rows.base;
            chunks.ahead[i] = ahead[first + i];
            to[i] = scores(chunk.row) + chunk.at;
          }
          few_scores<Cache, count, kChunks>(queries_ + now[0].row * words_, chunks, to, now[0].rows.stride,
                                            sizes_.key_dim, kPartTokens, single);
        }
      });
    }
  }

  // Adds the weighted values of places [begin, end), which lie in the chunks of one head.
  void add_chunks(const Chunk* chunks, int64_t begin, int64_t end, int64_t rows, Stream& stream, bool fresh) {
    if constexpr (kDirect) {
      float* sums = weighted_ + chunks->row * sizes_.wide;
      for (int64_t at = begin; at < end; ++chunks, fresh = false) {
        const int64_t skip = at - chunks->at, count = std::min(kChunk - skip, end - at);
        const Strided values = {chunks->rows[skip], chunks->rows.stride};
        const float* weights = scores(chunks->row) + at;
        const char* ahead = stream.ahead(values.base);
        with_constant<kFewRows>(rows, [&](auto few) {
          few_products<Cache, few>(weights, kPartTokens, values, count, sizes_.wide, ahead, sums, fresh);
        });
        at += count;
      }
    }
  }

  // After the last chunks of all heads.
  void finish_chunks() {
    if constexpr (kDirect) {
      for (int64_t row = 0; row < rows_; ++row) few_sums_in_order<Cache>(weighted_ + row * sizes_.wide, sizes_.wide);
    }
  }

 protected:
  static constexpr bool kDirect = Math::kPerWord == 1;
  // Rows of values are whole lines, those of four bits at least halves: 64 elements.
  static constexpr int64_t kRowBytes = Cache::kPerWord == 8 ? 32 : 64;

  const ProductSizes sizes_;
  ProductScratch& scratch_;
  const int64_t words_;
  PlainQueries plain_;
  int64_t rows_ = 0;
  float *queries_ = nullptr, *scores_ = nullptr, *packed_ = nullptr, *weighted_ = nullptr;
};

#if defined(__AVX512VNNI__)

template <typename Cache>
class IntegerProducts {
 public:
  static constexpr int64_t kChunksOfValues = 2;
  using CacheType = Cache;

  IntegerProducts(const ProductSizes& sizes, ProductScratch& scratch)
      : sizes_(sizes),
        scratch_(scratch),
        query_stride_(2 * whole_lines(sizes.key_dim) / 4),
        width_(whole_lines(sizes.value_dim)) {}

  static Vec weight_of(Vec score, Vec base) { return exp_of_negative(sub(score, base)); }

  void begin(int64_t rows, int64_t) {
    rows_ = rows;
    queries_ = integers(scratch_.queries, rows * query_stride_);
    levels_ = integers(scratch_.levels, rows * kLevelStride);
    sums_ = integers(scratch_.sums, rows * width_);
    packed_ = integers(scratch_.packed, kPanel * std::max(query_stride_, width_));
    scores_ = scratch_.scores.get(rows * kPartTokens);
    weighted_ = scratch_.weighted.get(rows * sizes_.wide);
    scratch_.query_levels.resize(rows);
    scratch_.factors.resize(rows);
    if (by_channel<Cache>) plain_.begin(scratch_, rows, sizes_.key_dim);
  }

  float* scores(int64_t row) { return scores_ + row * kPartTokens; }
  const float* weighted(int64_t row) const { return weighted_ + row * sizes_.wide; }

  void take_query(int64_t row, const float* q, float scale) {
    if (by_channel<Cache>) return plain_.take(row, q, scale);
    take_levels(row, q, scale);
  }

  // As FloatProducts has it.
  void take_channels(int64_t begin, int64_t end, const uint16_t* channels) {
    alignas(64) float scaled[kMostTurned];
    for (int64_t row = begin; row < end; ++row) {
      plain_.scaled(row, channels, [&](int64_t i, Mask m, Vec q) { store(scaled + i, m, q); });
      take_levels(row, scaled, 1.0f);
    }
  }
  const PlainQueries& plain() const { return plain_; }

  void score(int64_t begin, int64_t at, const char* const* keys, int64_t vectors, Ahead& later) {
    const QueryLevels* levels = scratch_.query_levels.data();
    for (int64_t v = 0; v < vectors; ++v) {
      pack_keys<IntegerMath, Cache>(keys + v * kLanes, later, sizes_.key_dim,
                                        reinterpret_cast<float*>(packed_ + v * kLanes), kPanel);
    }
    const auto with = [&](auto tile, int64_t row, int64_t v) {
      tile(queries_ + row * query_stride_, query_stride_, levels + row, packed_ + v * kLanes, kPanel,
           (sizes_.key_dim + 3) / 4, scores_ + row * kPartTokens + at + v * kLanes, kPartTokens);
    };
    if (vectors == 4)
      for_rows(begin, [&](int64_t row, auto count) { with(integer_scores<count, 4>, row, 0); });
    else
      for (int64_t row = begin; row < rows_; ++row)
        for (int64_t v = 0; v < vectors; ++v) with(integer_scores<1, 1>, row, v);
  }

  void set_weights(int64_t row, int64_t at, Vec weights) { store(scores(row) + at, weights); }

  // The weights of places [from, end) are set, those up to whole vectors as zeros.
  void weights_are_set(int64_t row, int64_t from, int64_t end) {
    uint8_t* to = reinterpret_cast<uint8_t*>(levels_ + row * kLevelStride) + from;
    const int64_t count = (end - from + kLanes - 1) / kLanes * kLanes;
    scratch_.factors[row] = weight_levels(scores(row) + from, count, to, to + kPartTokens);
  }

  void add_values(int64_t begin, int64_t at, const char* const* values, int64_t count, Ahead& later, bool fresh) {
    const int64_t words = (count + 3) / 4, dim = sizes_.value_dim;
    const int32_t* weights = levels_ + at / 4;
    pack_value_words<Cache>(values, later, words, dim, packed_, width_);
    for (int64_t column = 0; column < width_; column += 64)
      for_rows(begin, [&](int64_t row, auto count) {
        integer_values<count>(weights + row * kLevelStride, kLevelStride, packed_ + column, width_, words,
                              sums_ + row * width_ + column, width_, fresh);
      });
  }

  bool streams() const { return true; }

  void score_chunks(const Chunk now[2], const Chunk[2], int64_t rows, Stream& stream) {
    const QueryLevels* levels = scratch_.query_levels.data();
    const int64_t count = now[0].at == now[1].at ? 1 : 2;
    for (int64_t which = 0; which < count; ++which) {
      const Chunk& chunk = now[which];
      const char* ahead = stream.ahead(chunk.rows.base);
      const auto with = [&](auto few, int64_t row) {
        few(queries_ + row * query_stride_, query_stride_, levels + row, chunk.rows, sizes_.key_dim, ahead,
            scores(row) + chunk.at, kPartTokens);
      };
      const int64_t end = chunk.row + rows;
      for (int64_t row = chunk.row; row + 2 <= end; row += 2) with(few_integer_scores<Cache, 2>, row);
      if (rows % 2) with(few_integer_scores<Cache, 1>, end - 1);
    }
  }

  // Levels of places outside [begin, end) are zero.
  void add_chunks(const Chunk* chunks, int64_t, int64_t end, int64_t rows, Stream& stream, bool fresh) {
    Strided values[kChunksOfValues];
    const char* ahead[kChunksOfValues];
    const int64_t at = chunks->at, count = (end - at + kChunk - 1) / kChunk;
    for (int64_t i = 0; i < count; ++i) {
      values[i] = chunks[i].rows;
      ahead[i] = stream.ahead(values[i].base);
    }
    const auto with = [&](auto few, int64_t row) {
      few(levels_ + row * kLevelStride + at / 4, kLevelStride, values, count, sizes_.value_dim, ahead,
          sums_ + row * width_, width_, fresh);
    };
    const int64_t last = chunks->row + rows;
    for (int64_t row = chunks->row; row + 2 <= last; row += 2) with(few_integer_values<Cache, 2>, row);
    if (rows % 2) with(few_integer_values<Cache, 1>, last - 1);
  }

  void finish_chunks() { finish(); }

  void finish() {
    for (int64_t row = 0; row < rows_; ++row) {
      values_in_order(sums_ + row * width_, scratch_.factors[row], sizes_.value_dim, weighted_ + row * sizes_.wide);
    }
  }

 protected:
  // Calls body(row, count as a constant) for up to three rows at a time.
  template <typename Body>
  void for_rows(int64_t begin, const Body& body) const {
    for (int64_t row = begin; row < rows_; row += 3)
      with_constant<3>(std::min<int64_t>(3, rows_ - row), [&](auto count) { body(row, count); });
  }

  // Words of one row's weights: the high bytes of all places, then the low ones.
  static constexpr int64_t kLevelStride = 2 * kPartTokens / 4;

  void take_levels(int64_t row, const float* q, float scale) {
    int8_t* to = reinterpret_cast<int8_t*>(queries_ + row * query_stride_);
    scratch_.query_levels[row] = query_levels(q, sizes_.key_dim, scale, to, to + 2 * query_stride_);
  }

  static int32_t* integers(Buffer& buffer, int64_t count) { return reinterpret_cast<int32_t*>(buffer.get(count)); }

  const ProductSizes sizes_;
  ProductScratch& scratch_;
  PlainQueries plain_;
  const int64_t query_stride_, width_;  // words
  int64_t rows_ = 0;
  int32_t *queries_ = nullptr, *levels_ = nullptr, *sums_ = nullptr, *packed_ = nullptr;
  float *scores_ = nullptr, *weighted_ = nullptr;
};

#endif

}  // namespace millrace
