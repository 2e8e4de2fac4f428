// What the queries of a prompt pay to each of its keys, summed while attention computes it (Step::votes).
//
// A weight is known when its row has seen the last part, so the weights of a tile's rows are kept, part by part, beside
// the part's maxima. Then they are added up in whole numbers of 1 / kVote: such sums are exact, so they are the same
// bits in whatever tiles, steps and order the rows came.
#pragma once

#include "attention/attention_plan.h"
#include "attention/attention_products.h"

namespace millrace {

// What a weight of 1 counts.
constexpr float kVote = 134217728.0f;
// Rows whose votes are summed in 32 bits: none is more than kVote and what was rounded.
constexpr int64_t kRowsOfVotes = 8;

// Rows of a tile that vote. Its buffers are a thread's.
class Ballot {
 public:
  // Opens it for the rows of a tile of `group` rows a token, over parts [first_part, num_parts).
  void open(const Votes* votes, const Tile& tile, int64_t group, int64_t first_part) {
    const auto token = [&](int64_t position) {
      return std::min(std::max<int64_t>(0, position - tile.position), tile.num_tokens);
    };
    begin_ = votes ? token(votes->first) * group : 0;
    end_ = votes ? std::max(begin_, token(votes->end) * group) : 0;
    first_part_ = part_ = first_part;
    const int64_t rows = (end_ - begin_) * (tile.num_parts - first_part);
    if (!rows) return;
    kept_ = weights_.get(rows * kPartTokens);
    maxima_.resize(rows);
    factors_.resize(end_ - begin_);
  }

  // Nobody votes until it is opened again.
  void close() { begin_ = end_ = 0; }

  bool is_open() const { return begin_ < end_; }
  int64_t begin() const { return begin_; }
  int64_t end() const { return end_; }

  // Where a row's weights of the present part go; null where it does not vote.
  float* weights(int64_t row) { return row < begin_ || row >= end_ ? nullptr : part(part_) + (row - begin_) * kPartTokens; }

  // Ends a part in which the tile's rows had these maxima.
  void end_part(const float* maxima) {
    if (!is_open()) return;
    std::copy(maxima + begin_, maxima + end_, maxima_.data() + (part_ - first_part_) * (end_ - begin_));
    ++part_;
  }

  // Adds to `sums` of the first `size` positions what the rows kept, each weight times what `factor` says of its row
  // and the row's maximum in the part.
  template <typename Factor>
  void count(int64_t* sums, int64_t size, const Factor& factor) {
    for (int64_t p = first_part_; p < part_ && p * kPartTokens < size; ++p) {
      const float* maxima = maxima_.data() + (p - first_part_) * (end_ - begin_);
      for (int64_t row = begin_; row < end_; ++row) factors_[row - begin_] = kVote * factor(row, maxima[row - begin_]);
      alignas(64) int64_t totals[kPartTokens] = {};
      for (int64_t row = 0; row < end_ - begin_; row += kRowsOfVotes) {
        const int64_t rows = std::min(kRowsOfVotes, end_ - begin_ - row);
        add_rows(part(p) + row * kPartTokens, factors_.data() + row, rows, totals);
      }
      int64_t* to = sums + p * kPartTokens;
      for (int64_t i = 0; i < std::min(kPartTokens, size - p * kPartTokens); ++i)
        if (totals[i]) __atomic_fetch_add(to + i, totals[i], __ATOMIC_RELAXED);
    }
  }

 private:
  float* part(int64_t part) { return kept_ + (part - first_part_) * (end_ - begin_) * kPartTokens; }

  static void add_rows(const float* weights, const float* factors, int64_t rows, int64_t* totals) {
    alignas(64) int32_t lanes[kLanes];
    for (int64_t at = 0; at < kPartTokens; at += kLanes) {
      Ints sum = set1_int(0);
      for (int64_t row = 0; row < rows; ++row)
        sum = add(sum, to_ints(mul(load(weights + row * kPartTokens + at), set1(factors[row]))));
      store_ints(lanes, sum);
      for (int64_t i = 0; i < kLanes; ++i) totals[at + i] += lanes[i];
    }
  }

  Buffer weights_;
  std::vector<float> maxima_, factors_;
  float* kept_ = nullptr;  // [parts, rows, kPartTokens]
  int64_t begin_ = 0, end_ = 0, first_part_ = 0, part_ = 0;
};

}  // namespace millrace
