// The products of attention_products.h over bfloat16 keys and values in float16 (attention_fp16.h).
#pragma once

#include "attention_fp16.h"
#include "attention_products.h"

#if defined(__AVX512FP16__)

namespace millrace {

class HalfProducts {
 public:
  static constexpr int64_t kChunksOfValues = 1;
  using CacheType = Bfloat16Cache;

  HalfProducts(const ProductSizes& sizes, ProductScratch& scratch)
      : sizes_(sizes),
        scratch_(scratch),
        query_stride_((sizes.key_dim + kHalves - 1) / kHalves * kLanes),
        width_((sizes.value_dim + kHalves - 1) / kHalves * kHalves) {}

  void begin(int64_t rows) {
    rows_ = rows;
    queries_ = integers(scratch_.queries, rows * query_stride_);
    packed_ = integers(scratch_.packed, kPanel * std::max(query_stride_, width_ / 2));
    halves_ = reinterpret_cast<uint16_t*>(scratch_.sums.get(rows * width_ / 2));
    scores_ = scratch_.scores.get(rows * kPartTokens);
    weights_ = integers(scratch_.levels, rows * kPartTokens);
    weighted_ = scratch_.weighted.get(rows * width_);
    scratch_.factors.resize(rows);
    scratch_.plain_queries.resize(rows);
    scratch_.plain_values.clear();
  }

  float* scores(int64_t row) { return scores_ + row * kPartTokens; }
  const float* weighted(int64_t row) const { return weighted_ + row * width_; }

  void take_query(int64_t row, const float* q, float scale) {
    scratch_.plain_queries[row] = {q, scale};
    auto* to = reinterpret_cast<uint16_t*>(queries_ + row * query_stride_);
    scratch_.factors[row] = half_query(q, sizes_.key_dim, scale, to);
  }

  void score(int64_t at, const char* const* keys, int64_t vectors, Ahead& later) {
    uint64_t unfit = 0;
    for (int64_t v = 0; v < vectors; ++v) {
      const Mask some = pack_half_keys(keys + v * kLanes, later, sizes_.key_dim, packed_ + v * kLanes, kPanel);
      unfit |= static_cast<uint64_t>(some) << (v * kLanes);
    }
    const int64_t words = (sizes_.key_dim + 1) / 2;
    for_tiles(rows_, vectors, [&](int64_t row, int64_t v, auto height, auto width) {
      half_scores<height(), width()>(queries_ + row * query_stride_, query_stride_, &scratch_.factors[row],
                                     packed_ + v * kLanes, kPanel, words, scores(row) + at + v * kLanes, kPartTokens);
    });
    for (; unfit; unfit &= unfit - 1) {
      const int64_t place = __builtin_ctzll(unfit);
      score_plainly(0, rows_, at + place, keys[place]);
    }
  }

  void set_weights(int64_t row, int64_t at, Vec weights) {
    store(scores(row) + at, weights);
    store_half_weights(weights_ + row * kPartTokens + at, weights);
  }
  void weights_are_set(int64_t, int64_t, int64_t) {}

  void add_values(int64_t at, const char* const* values, int64_t count, Ahead& later, bool fresh) {
    auto* packed = reinterpret_cast<uint16_t*>(packed_);
    uint64_t unfit = pack_half_values(values, later, count, sizes_.value_dim, packed, width_);
    for_tiles(rows_, width_ / kHalves, [&](int64_t row, int64_t v, auto height, auto width) {
      half_values<height(), width()>(weights(row) + at, kPartTokens, packed_ + v * kLanes, width_ / 2, count,
                                     width_ - v * kHalves, weighted_ + row * width_ + v * kHalves, width_, fresh);
    });
    for (; unfit; unfit &= unfit - 1) {
      const int64_t place = __builtin_ctzll(unfit);
      add_value_plainly(0, rows_, at + place, values[place]);
    }
  }

  void finish() {}

  bool streams() const { return sizes_.value_dim % kHalves == 0; }

  void score_chunks(const Chunk now[2], const Chunk soon[2], int64_t rows, Stream& stream) {
    const bool single = now[0].at == now[1].at;
    const int64_t first = now[0].row;
    float* const to[2] = {scores(first) + now[0].at, scores(first) + now[1].at};
    TwoOf chunks = {{now[0].rows.base, now[1].rows.base}, {soon[0].rows.base, soon[1].rows.base}, {}};
    chunks.ahead[0] = stream.ahead(now[0].rows.base);
    if (!single) chunks.ahead[1] = stream.ahead(now[1].rows.base);
    Mask unfit[2];
    const auto with = [&](auto few) {
      few(queries_ + first * query_stride_, query_stride_, &scratch_.factors[first], chunks, to, now[0].rows.stride,
          sizes_.key_dim, kPartTokens, single, unfit);
    };
    switch (rows) {
      case 1: with(few_half_scores<1>); break;
      case 2: with(few_half_scores<2>); break;
      case 3: with(few_half_scores<3>); break;
      case 4: with(few_half_scores<4>); break;
    }
    for (int64_t which = 0; which < 2; ++which) {
      for (uint32_t left = unfit[which]; left; left &= left - 1) {
        const int64_t place = __builtin_ctz(left);
        score_plainly(first, rows, now[which].at + place, now[which].rows[place]);
      }
    }
  }

  void add_chunks(const Chunk* chunk, int64_t begin, int64_t end, int64_t rows, Stream& stream, bool fresh) {
    const int64_t place = chunk->at % kPanel;
    if (fresh) first_panel_ = chunk->at / kPanel;
    const Strided values = {chunk->rows[begin - chunk->at], chunk->rows.stride};
    const char* ahead = stream.ahead(values.base);
    const bool begins = fresh || place == 0;
    if (values_fit(values, end - begin, width_)) {
      go_on(chunk->row, rows, values, begin, end - begin, ahead, begins);
    } else {
      go_on_singly(chunk->row, rows, values, begin, end, begins);
    }
    panel_ = chunk->at / kPanel;
    open_ = place + kChunk < kPanel;
    if (!open_) close(chunk->row, rows);
  }

  // Closes the chains of all heads that the last chunk left open.
  void finish_chunks() {
    if (open_) close(0, rows_);
  }

 private:
  static int32_t* integers(Buffer& buffer, int64_t count) { return reinterpret_cast<int32_t*>(buffer.get(count)); }

  // Calls body(row, vector, height and width as constants) for tiles.
  template <typename Body>
  static void for_tiles(int64_t rows, int64_t vectors, const Body& body) {
    for (int64_t v = 0; v < vectors;) {
      const int64_t width = vectors - v >= 4 ? 4 : 1;
      for (int64_t row = 0; row < rows; row += kRowsAtOnce) {
        const int64_t height = std::min<int64_t>(kRowsAtOnce, rows - row);
        const auto with = [&](auto constant) {
          if (width == 4)
            body(row, v, constant, std::integral_constant<int, 4>());
          else
            body(row, v, constant, std::integral_constant<int, 1>());
        };
        switch (height) {
          case 1: with(std::integral_constant<int, 1>()); break;
          case 2: with(std::integral_constant<int, 2>()); break;
          case 3: with(std::integral_constant<int, 3>()); break;
          case 4: with(std::integral_constant<int, 4>()); break;
          case 5: with(std::integral_constant<int, 5>()); break;
          default: with(std::integral_constant<int, 6>());
        }
      }
      v += width;
    }
  }

  const int32_t* weights(int64_t row) const { return weights_ + row * kPartTokens; }

  void score_plainly(int64_t first, int64_t rows, int64_t at, const char* key) {
    for (int64_t row = first; row < first + rows; ++row) {
      const PlainQuery& query = scratch_.plain_queries[row];
      scores(row)[at] = plain_score(query.values, query.factor, key, sizes_.key_dim);
    }
  }

  void add_value_plainly(int64_t first, int64_t rows, int64_t at, const char* value) {
    for (int64_t row = first; row < first + rows; ++row) {
      add_plainly(scores(row)[at], value, sizes_.value_dim, weighted_ + row * width_);
    }
  }

  void go_on(int64_t first, int64_t rows, const Strided& values, int64_t at, int64_t count, const char* ahead,
             bool begins) {
    const auto with = [&](auto few) {
      few(weights(first) + at, kPartTokens, values, count, width_, ahead, halves_ + first * width_, begins);
    };
    switch (rows) {
      case 1: return with(few_half_products<1>);
      case 2: return with(few_half_products<2>);
      case 3: return with(few_half_products<3>);
      case 4: return with(few_half_products<4>);
    }
  }

  // Values of places [begin, end) of which some do not fit: those are left for when the chain is closed.
  void go_on_singly(int64_t first, int64_t rows, const Strided& values, int64_t begin, int64_t end, bool begins) {
    if (begins) std::memset(halves_ + first * width_, 0, 2 * rows * width_);
    for (int64_t at = begin; at < end; ++at) {
      const Strided value = {values[at - begin], values.stride};
      if (values_fit(value, 1, width_)) {
        go_on(first, rows, value, at, 1, value.base, false);
      } else {
        scratch_.plain_values.push_back({first, rows, at, value.base});
      }
    }
  }

  // Takes the chains of some rows into their sums.
  void close(int64_t first, int64_t rows) {
    for (int64_t row = first; row < first + rows; ++row) {
      promote_values(reinterpret_cast<const __m256i*>(halves_ + row * width_), width_, panel_ == first_panel_,
                     weighted_ + row * width_);
    }
    std::vector<PlainValue>& left = scratch_.plain_values;
    if (left.empty()) return;
    for (const PlainValue& value : left) {
      if (value.row < first || value.row >= first + rows) continue;
      add_value_plainly(value.row, value.rows, value.at, value.base);
    }
    left.erase(std::remove_if(left.begin(), left.end(),
                              [&](const PlainValue& value) { return value.row >= first && value.row < first + rows; }),
               left.end());
  }

  const ProductSizes sizes_;
  ProductScratch& scratch_;
  const int64_t query_stride_;  // words
  const int64_t width_;         // value_dim up to whole vectors of halves
  int64_t rows_ = 0, panel_ = 0, first_panel_ = 0;
  bool open_ = false;
  int32_t *queries_ = nullptr, *packed_ = nullptr, *weights_ = nullptr;
  uint16_t* halves_ = nullptr;
  float *scores_ = nullptr, *weighted_ = nullptr;
};

}  // namespace millrace

#endif
