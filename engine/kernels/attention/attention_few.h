// Attention's products for the one to four rows of a decoding sequence, float32 arithmetic, AVX-512.
//
// With so few rows, packing keys and values costs more than multiplying them: here columns go from the transposition,
// and values from the cache, straight into the products. Each sum is the chain of attention_math.h, so bits are the same.
// Level avx2 takes values so; its registers are too few for keys that are transposed between products.
#pragma once

#include "attention/attention_math.h"
#include "attention/attention_stream.h"

namespace millrace {

#if defined(__AVX512F__)

// Words [kLanes] of two chunks side by side. (What holds sums is inlined by force: they must not pass through memory.)
struct TwoChunks {
  alignas(64) float words[kLanes][2 * kLanes];

  // Words at byte `offset` of one chunk's keys, `num_bytes` of them.
  [[gnu::always_inline]] void take(int64_t which, const Strided& keys, int64_t offset, int64_t num_bytes) {
    Vec columns[kLanes];
    transpose(keys, offset, num_bytes, columns);
    for (int64_t i = 0; i < kLanes; ++i) store(words[i] + which * kLanes, columns[i]);
  }
};

// Adds the products of words [begin, end), of `elements` in all, to the scores of kRows rows; `queries` [kRows, dim] at
// the first word. `beside` is called for each word.
template <typename Cache, int kRows, bool kWhole, typename Beside>
[[gnu::always_inline]] inline void add_words(const TwoChunks& chunks, const float* queries, int64_t dim, int64_t begin,
                                             int64_t end, int64_t elements, Vec total[kRows][2], const Beside& beside) {
  constexpr int kOut = 4 / Cache::kBytes;
#pragma GCC unroll 8
  for (int64_t i = begin; i < end; ++i) {
    beside(i);
    Vec out[2][kOut];
    UNROLLED for (int g = 0; g < 2; ++g)
      Cache::template expand<Float32Math>(load(chunks.words[i] + g * kLanes), out[g]);
    UNROLLED for (int j = 0; j < kOut; ++j) {
      if (!kWhole && i * kOut + j >= elements) return;
      UNROLLED for (int r = 0; r < kRows; ++r) {
        const Vec factor = set1(queries[r * dim + i * kOut + j]);
        UNROLLED for (int g = 0; g < 2; ++g) total[r][g] = Float32Math::step(total[r][g], factor, out[g][j]);
      }
    }
  }
}

// Two chunks of keys, those that are computed after them, and what to ask the memory for.
struct TwoOf {
  const char* keys[2];
  const char* soon[2];
  const char* ahead[2];
};

// Scores of kRows queries against two chunks of keys, rows `row_bytes` apart. Two go together, as one has too few sums
// to keep the units busy, and the next words are transposed between the products. Transposing goes across rows, so the
// lines of the chunks after these are called near in the order in which they lie.
template <typename Cache, int kRows>
inline void few_scores(const float* queries, const TwoOf& chunks, float* const scores[2], int64_t row_bytes, int64_t dim,
                       int64_t stride, bool single) {
  constexpr int64_t kElements = kLanes * 4 / Cache::kBytes, kHalf = kLanes / 2;
  const int64_t pieces = (dim + kElements - 1) / kElements;
  TwoChunks words[2];
  Vec total[kRows][2];
  for (int r = 0; r < kRows; ++r) total[r][0] = total[r][1] = zero();
  const auto take = [&](TwoChunks& to, int64_t piece, int64_t which) {
    if (piece >= pieces) return;
    const int64_t at = piece * kElements;
    to.take(which, Strided{chunks.keys[which], row_bytes}, at * Cache::kBytes, std::min(kElements, dim - at) * Cache::kBytes);
  };
  take(words[0], 0, 0);
  take(words[0], 0, 1);
  for (int64_t piece = 0; piece < pieces; ++piece) {
    const int64_t at = piece * kElements, count = dim - at;
    const TwoChunks& now = words[piece % 2];
    const auto add = [&](int64_t half) {
      // A piece of a chunk is a line of each row: two for each word.
      const char* near = chunks.soon[half] + piece * kChunk * 64;
      const char* far = chunks.ahead[half] + piece * kChunk * 64;
      const auto beside = [&](int64_t word) {
        const int64_t line = word % kHalf * 128;
        call_near(near + line);
        call_near(near + line + 64);
        if (half && single) return;
        call_far(far + line);
        call_far(far + line + 64);
      };
      const int64_t begin = half * kHalf;
      if (count >= kElements)
        add_words<Cache, kRows, true>(now, queries + at, dim, begin, begin + kHalf, count, total, beside);
      else
        add_words<Cache, kRows, false>(now, queries + at, dim, begin, begin + kHalf, count, total, beside);
    };
    take(words[(piece + 1) % 2], piece + 1, 0);
    add(0);
    take(words[(piece + 1) % 2], piece + 1, 1);
    add(1);
  }
  for (int r = 0; r < kRows; ++r) {
    for (int g = 0; g < 2; ++g) store(scores[g] + r * stride, total[r][g]);
  }
}

// Adds the values of `count` positions, weighted, to kRows sums of kVectors vectors; asks for as much at `ahead`. A line of bfloat16 becomes its
// even and its odd elements; sums stay in that order until `few_sums_in_order`.
template <typename Cache, int kRows, int kVectors>
inline void few_values(const float* weights, int64_t weights_stride, const Strided& values, int64_t count,
                       int64_t column, const char* ahead, float* sums, int64_t stride, bool fresh) {
  constexpr int kOut = 4 / Cache::kBytes, kLines = kVectors / kOut;
  // All loops over sums are unrolled: only then do these become registers.
  Vec total[kRows][kVectors];
  UNROLLED for (int r = 0; r < kRows; ++r)
    UNROLLED for (int j = 0; j < kVectors; ++j) total[r][j] = fresh ? zero() : load(sums + r * stride + j * kLanes);
  for (int64_t at = 0; at < count; ++at) {
    Vec factor[kRows];
    UNROLLED for (int r = 0; r < kRows; ++r) factor[r] = set1(weights[r * weights_stride + at]);
    const char* from = values[at] + column * Cache::kBytes;
    const char* const far = ahead + at * values.stride + column * Cache::kBytes;
    UNROLLED for (int line = 0; line < kLines; ++line) {
      Vec out[kOut];
      call_far(far + 64 * line);
      Cache::template expand<Float32Math>(load(reinterpret_cast<const float*>(from + 64 * line)), out);
      UNROLLED for (int j = 0; j < kOut; ++j)
        UNROLLED for (int r = 0; r < kRows; ++r)
          total[r][line * kOut + j] = Float32Math::step(total[r][line * kOut + j], factor[r], out[j]);
    }
  }
  UNROLLED for (int r = 0; r < kRows; ++r)
    UNROLLED for (int j = 0; j < kVectors; ++j) store(sums + r * stride + j * kLanes, total[r][j]);
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

// Values of any width that is a multiple of a line's elements.
template <typename Cache, int kRows>
inline void few_products(const float* weights, int64_t weights_stride, const Strided& values, int64_t count,
                         int64_t width, const char* ahead, float* sums, bool fresh) {
  constexpr int kWide = kRows <= 2 ? 8 : 4, kLine = 4 / Cache::kBytes;
  int64_t column = 0;
  for (; column + kWide * kLanes <= width; column += kWide * kLanes) {
    few_values<Cache, kRows, kWide>(weights, weights_stride, values, count, column, ahead, sums + column, width, fresh);
  }
  for (; column < width; column += kLine * kLanes) {
    few_values<Cache, kRows, kLine>(weights, weights_stride, values, count, column, ahead, sums + column, width, fresh);
  }
}

#elif defined(__AVX2__)

// Adds the values of `count` positions, weighted, to kVectors vectors of kRows sums, `stride` apart.
template <typename Cache, int kRows, int kVectors>
inline void few_values(const float* weights, int64_t weights_stride, const char* const* values, int64_t count,
                       int64_t column, Ahead* later, float* sums, int64_t stride, bool fresh) {
  Vec total[kRows][kVectors];
  UNROLLED for (int r = 0; r < kRows; ++r)
    UNROLLED for (int j = 0; j < kVectors; ++j) total[r][j] = fresh ? zero() : load(sums + r * stride + j * kLanes);
  for (int64_t at = 0; at < count; ++at) {
    if (later) later->call(1);
    const char* from = values[at] + column * Cache::kBytes;
    UNROLLED for (int j = 0; j < kVectors; ++j) {
      const Vec value = Cache::values(from + j * kLanes * Cache::kBytes);
      UNROLLED for (int r = 0; r < kRows; ++r)
        total[r][j] = Float32Math::step(total[r][j], set1(weights[r * weights_stride + at]), value);
    }
  }
  UNROLLED for (int r = 0; r < kRows; ++r)
    UNROLLED for (int j = 0; j < kVectors; ++j) store(sums + r * stride + j * kLanes, total[r][j]);
}

// Values of whole vectors; `later` is called for beside the first of them.
template <typename Cache, int kRows>
inline void few_products(const float* weights, int64_t weights_stride, const char* const* values, int64_t count,
                         int64_t width, Ahead& later, float* sums, bool fresh) {
  constexpr int kWide = kRows == 1 ? 8 : kRows <= 3 ? 4 : 2;
  Ahead* beside = &later;
  int64_t column = 0;
  for (; column + kWide * kLanes <= width; column += kWide * kLanes, beside = nullptr)
    few_values<Cache, kRows, kWide>(weights, weights_stride, values, count, column, beside, sums + column, width, fresh);
  for (; column < width; column += kLanes, beside = nullptr)
    few_values<Cache, kRows, 1>(weights, weights_stride, values, count, column, beside, sums + column, width, fresh);
}

#endif

}  // namespace millrace
