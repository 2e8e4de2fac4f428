// Attention's products for the one to four rows of a decoding sequence, float32 arithmetic, AVX-512.
//
// With so few rows, packing keys and values costs more than multiplying them: here columns go from the transposition,
// and values from the cache, straight into the products. Each sum is the chain of attention_math.h, so bits are the same.
#pragma once

#include "attention_math.h"

namespace millrace {

constexpr int64_t kFewRows = 4;

#if defined(__AVX512F__)

// Words [kLanes] of two groups of kLanes positions side by side. (What holds sums is inlined by force: they must not
// pass through memory.)
struct TwoGroups {
  alignas(64) float words[kLanes][2 * kLanes];

  // Words at byte `offset` of one group's keys, `num_bytes` of them.
  [[gnu::always_inline]] void take(int64_t group, const char* const* keys, int64_t offset, int64_t num_bytes) {
    Vec columns[kLanes];
    transpose(keys, offset, num_bytes, columns);
    for (int64_t i = 0; i < kLanes; ++i) store(words[i] + group * kLanes, columns[i]);
  }
};

// Adds the products of words [begin, end), of `elements` in all, to the scores of kRows rows; `queries` [kRows, dim] at
// the first word.
template <typename Cache, int kRows, bool kWhole>
[[gnu::always_inline]] inline void add_words(const TwoGroups& groups, const float* queries, int64_t dim, int64_t begin,
                                             int64_t end, int64_t elements, Vec total[kRows][2]) {
  constexpr int kOut = 4 / Cache::kBytes;
#pragma GCC unroll 8
  for (int64_t i = begin; i < end; ++i) {
    Vec out[2][kOut];
#pragma GCC unroll 2
    for (int g = 0; g < 2; ++g) Cache::template expand<Float32Math>(load(groups.words[i] + g * kLanes), out[g]);
#pragma GCC unroll 2
    for (int j = 0; j < kOut; ++j) {
      if (!kWhole && i * kOut + j >= elements) return;
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const Vec factor = set1(queries[r * dim + i * kOut + j]);
#pragma GCC unroll 2
        for (int g = 0; g < 2; ++g) total[r][g] = Float32Math::step(total[r][g], factor, out[g][j]);
      }
    }
  }
}

// Scores of kRows queries [kRows, dim] against 16 positions for each of `vectors` groups of them. Two groups go
// together, as one has too few sums to keep the units busy, and the next words are transposed between the products.
template <typename Cache, int kRows>
inline void few_scores(const float* queries, const char* const* keys, int64_t vectors, Ahead& ahead, int64_t dim,
                       float* scores, int64_t stride) {
  constexpr int64_t kElements = kLanes * 4 / Cache::kBytes, kHalf = kLanes / 2;
  const int64_t calls = calls_beside(dim, kElements);
  TwoGroups pieces[2];
  for (int64_t v = 0; v < vectors; v += 2) {
    // An odd group goes twice.
    const int64_t places[2] = {v, std::min(v + 1, vectors - 1)};
    Vec total[kRows][2];
    for (int r = 0; r < kRows; ++r) total[r][0] = total[r][1] = zero();
    const auto take = [&](TwoGroups& to, int64_t at, int64_t group) {
      if (at >= dim) return;
      if (group == 0 || v + 1 < vectors) ahead.call(calls);
      to.take(group, keys + places[group] * kLanes, at * Cache::kBytes, std::min(kElements, dim - at) * Cache::kBytes);
    };
    take(pieces[0], 0, 0);
    take(pieces[0], 0, 1);
    for (int64_t at = 0, turn = 0; at < dim; at += kElements, turn ^= 1) {
      const int64_t count = dim - at;
      const auto add = [&](int64_t begin) {
        if (count >= kElements)
          add_words<Cache, kRows, true>(pieces[turn], queries + at, dim, begin, begin + kHalf, count, total);
        else
          add_words<Cache, kRows, false>(pieces[turn], queries + at, dim, begin, begin + kHalf, count, total);
      };
      take(pieces[turn ^ 1], at + kElements, 0);
      add(0);
      take(pieces[turn ^ 1], at + kElements, 1);
      add(kHalf);
    }
    for (int r = 0; r < kRows; ++r) {
      for (int g = 0; g < 2; ++g) store(scores + r * stride + places[g] * kLanes, total[r][g]);
    }
  }
}

// Adds the values of `count` positions, weighted, to kRows sums of kVectors vectors. A line of bfloat16 becomes its
// even and its odd elements; sums stay in that order until `few_sums_in_order`.
template <typename Cache, int kRows, int kVectors>
inline void few_values(const float* weights, int64_t weights_stride, const char* const* values, int64_t count,
                       int64_t column, Ahead& ahead, float* sums, int64_t stride, bool fresh) {
  constexpr int kOut = 4 / Cache::kBytes, kLines = kVectors / kOut;
  // All loops over sums are unrolled: only then do these become registers.
  Vec total[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) total[r][j] = fresh ? zero() : load(sums + r * stride + j * kLanes);
  for (int64_t at = 0; at < count; ++at) {
    Vec factor[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) factor[r] = set1(weights[r * weights_stride + at]);
    const char* from = values[at] + column * Cache::kBytes;
    ahead.call(1);
#pragma GCC unroll 8
    for (int line = 0; line < kLines; ++line) {
      Vec out[kOut];
      Cache::template expand<Float32Math>(load(reinterpret_cast<const float*>(from + 64 * line)), out);
#pragma GCC unroll 8
      for (int j = 0; j < kOut; ++j)
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r)
          total[r][line * kOut + j] = Float32Math::step(total[r][line * kOut + j], factor[r], out[j]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) store(sums + r * stride + j * kLanes, total[r][j]);
}

// Puts the sums of a row into the order of the elements; width is a multiple of a line's elements.
template <typename Cache>
inline void few_sums_in_order(float* sums, int64_t width) {
  if constexpr (Cache::kBytes == 2) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    for (int64_t i = 0; i < width; i += 2 * kLanes) {
      const Vec even = load(sums + i), odd = load(sums + i + kLanes);
      store(sums + i, _mm512_permutex2var_ps(even, low, odd));
      store(sums + i + kLanes, _mm512_permutex2var_ps(even, high, odd));
    }
  }
}

// Values of any width that is a multiple of 64 elements.
template <typename Cache, int kRows>
inline void few_products(const float* weights, int64_t weights_stride, const char* const* values, int64_t count,
                         int64_t width, Ahead& ahead, float* sums, bool fresh) {
  constexpr int kWide = kRows <= 2 ? 8 : 4;
  int64_t column = 0;
  for (; column + kWide * kLanes <= width; column += kWide * kLanes) {
    few_values<Cache, kRows, kWide>(weights, weights_stride, values, count, column, ahead, sums + column, width, fresh);
  }
  for (; column < width; column += 4 * kLanes) {
    few_values<Cache, kRows, 4>(weights, weights_stride, values, count, column, ahead, sums + column, width, fresh);
  }
}

#endif

}  // namespace millrace
