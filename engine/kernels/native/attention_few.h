// Attention's products for the one to four rows of a decoding sequence, float32 arithmetic, AVX-512.
//
// With so few rows, packing keys and values costs more than multiplying them: here columns go from the transposition,
// and values from the cache, straight into the products. Each sum is the chain of attention_math.h, so bits are the same.
#pragma once

#include "attention_math.h"

namespace millrace {

constexpr int64_t kFewRows = 4;

#if defined(__AVX512F__)

// Scores of kRows queries [kRows, dim] against 16 positions for each of `vectors` groups of them.
template <typename Cache, int kRows>
inline void few_scores(const float* queries, const char* const* keys, int64_t vectors, Ahead& ahead, int64_t dim,
                       float* scores, int64_t stride) {
  constexpr int64_t kElements = kLanes * 4 / Cache::kBytes, kOut = 4 / Cache::kBytes;
  const int64_t calls = calls_beside(dim, kElements);
  for (int64_t at = 0; at < dim; at += kElements) {
    const int64_t count = std::min(kElements, dim - at);
    for (int64_t v = 0; v < vectors; ++v) {
      Vec columns[kLanes], total[kRows];
      ahead.call(calls);
      transpose(keys + v * kLanes, at * Cache::kBytes, count * Cache::kBytes, columns);
      for (int r = 0; r < kRows; ++r) total[r] = at ? load(scores + r * stride + v * kLanes) : zero();
      const auto step = [&](int64_t i, int64_t elements) {
        Vec out[kOut];
        Cache::template expand<Float32Math>(columns[i], out);
        for (int64_t j = 0; j < kOut && j < elements; ++j) {
          for (int r = 0; r < kRows; ++r) {
            total[r] = Float32Math::step(total[r], set1(queries[r * dim + at + i * kOut + j]), out[j]);
          }
        }
      };
      if (count == kElements) {
#pragma GCC unroll 16
        for (int64_t i = 0; i < kLanes; ++i) step(i, kOut);
      } else {
        for (int64_t i = 0; i * kOut < count; ++i) step(i, count - i * kOut);
      }
      for (int r = 0; r < kRows; ++r) store(scores + r * stride + v * kLanes, total[r]);
    }
  }
}

// Adds the values of `count` positions, weighted, to kRows sums of kVectors vectors. A line of bfloat16 becomes its
// even and its odd elements; sums stay in that order until `few_sums_in_order`.
template <typename Cache, int kRows, int kVectors>
inline void few_values(const float* weights, int64_t weights_stride, const char* const* values, int64_t count,
                       int64_t column, Ahead& ahead, float* sums, int64_t stride, bool fresh) {
  constexpr int kOut = 4 / Cache::kBytes, kLines = kVectors / kOut;
  Vec total[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int j = 0; j < kVectors; ++j) total[r][j] = fresh ? zero() : load(sums + r * stride + j * kLanes);
  }
  for (int64_t at = 0; at < count; ++at) {
    Vec factor[kRows];
    for (int r = 0; r < kRows; ++r) factor[r] = set1(weights[r * weights_stride + at]);
    const char* from = values[at] + column * Cache::kBytes;
    ahead.call(1);
#pragma GCC unroll 8
    for (int line = 0; line < kLines; ++line) {
      Vec out[kOut];
      Cache::template expand<Float32Math>(load(reinterpret_cast<const float*>(from + 64 * line)), out);
      for (int j = 0; j < kOut; ++j) {
        for (int r = 0; r < kRows; ++r) {
          Vec& sum = total[r][line * kOut + j];
          sum = Float32Math::step(sum, factor[r], out[j]);
        }
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int j = 0; j < kVectors; ++j) store(sums + r * stride + j * kLanes, total[r][j]);
  }
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
