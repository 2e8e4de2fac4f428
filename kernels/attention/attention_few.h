// Attention's products for the one to four rows of a decoding sequence, float32 arithmetic.
//
// With so few rows, packing keys and values costs more than multiplying them: here columns go from the transposition,
// and values from the cache, straight into the products. Each sum is the chain of attention_math.h, so bits are the same.
#pragma once

#include "attention/attention_math.h"
#include "attention/attention_stream.h"

namespace millrace {

// Vectors of a chunk's positions.
constexpr int kOfChunk = kChunk / kLanes;
// Chunks whose scores are computed together, as one has too few sums to keep the units busy.
template <int kRows>
constexpr int kScoredTogether = kLanes == 16 || kRows <= 2 ? 2 : 1;

// Words [kLanes] of some chunks side by side. (What holds sums is inlined by force: they must not pass through memory.)
template <int kChunks>
struct Words {
  alignas(64) float words[kLanes][kChunks * kChunk];

  // Words at byte `offset` of one chunk's keys, `num_bytes` of them.
  [[gnu::always_inline]] void take(int64_t which, const Strided& keys, int64_t offset, int64_t num_bytes) {
    for (int v = 0; v < kOfChunk; ++v) {
      Vec columns[kLanes];
      transpose(Strided{keys[v * kLanes], keys.stride}, offset, num_bytes, columns);
      for (int64_t i = 0; i < kLanes; ++i) store(words[i] + which * kChunk + v * kLanes, columns[i]);
    }
  }
};

// Adds the products of words [begin, end), of `elements` in all, to the scores of kRows rows; `queries` [kRows, dim] at
// the first word. `beside` is called for each word.
template <typename Cache, int kRows, int kChunks, bool kWhole, typename Beside>
[[gnu::always_inline]] inline void add_words(const Words<kChunks>& chunks, const float* queries, int64_t dim,
                                             int64_t begin, int64_t end, int64_t elements,
                                             Vec total[kRows][kChunks * kOfChunk], const Beside& beside) {
  constexpr int kOut = Cache::kPerWord;
#pragma GCC unroll 8
  for (int64_t i = begin; i < end; ++i) {
    beside(i);
    UNROLLED for (int j = 0; j < kOut; ++j) {
      if (!kWhole && i * kOut + j >= elements) return;
      Vec factor[kRows];
      UNROLLED for (int r = 0; r < kRows; ++r) factor[r] = set1(queries[r * dim + i * kOut + j]);
      UNROLLED for (int g = 0; g < kChunks * kOfChunk; ++g) {
        const Vec column = Cache::element(load(chunks.words[i] + g * kLanes), j);
        UNROLLED for (int r = 0; r < kRows; ++r) total[r][g] = Float32Math::step(total[r][g], factor[r], column);
      }
    }
  }
}

// Chunks of keys, those that are computed after them, and what to ask the memory for.
template <int kChunks>
struct KeysOf {
  const char* keys[kChunks];
  const char* soon[kChunks];
  const char* ahead[kChunks];
};

// Scores of kRows queries against some chunks of keys, rows `row_bytes` apart; `single`: the second is the first. The
// next words are transposed between the products. Transposing goes across rows, so the lines of the chunks after these
// are called near in the order in which they lie.
template <typename Cache, int kRows, int kChunks>
inline void few_scores(const float* queries, const KeysOf<kChunks>& chunks, float* const scores[kChunks],
                       int64_t row_bytes, int64_t dim, int64_t stride, bool single) {
  constexpr int64_t kPieceBytes = kLanes * 4, kElements = kLanes * Cache::kPerWord, kHalf = kLanes / 2;
  const int64_t pieces = (dim + kElements - 1) / kElements;
  Words<kChunks> words[2];
  Vec total[kRows][kChunks * kOfChunk];
  UNROLLED for (int r = 0; r < kRows; ++r)
    UNROLLED for (int g = 0; g < kChunks * kOfChunk; ++g) total[r][g] = zero();
  const auto take = [&](Words<kChunks>& to, int64_t piece, int64_t which) {
    if (piece >= pieces || which >= kChunks) return;
    const int64_t at = piece * kElements;
    to.take(which, Strided{chunks.keys[which], row_bytes}, bytes_of<Cache>(at),
            bytes_of<Cache>(std::min(kElements, dim - at)));
  };
  for (int64_t which = 0; which < kChunks; ++which) take(words[0], 0, which);
  for (int64_t piece = 0; piece < pieces; ++piece) {
    const int64_t at = piece * kElements, count = dim - at;
    const Words<kChunks>& now = words[piece % 2];
    const auto add = [&](int64_t half) {
      const bool asks = half < kChunks;
      // A piece of a chunk is kPieceBytes of each row: two lines for each word of a half.
      const char* near = asks ? chunks.soon[half] + piece * kChunk * kPieceBytes : nullptr;
      const char* far = asks ? chunks.ahead[half] + piece * kChunk * kPieceBytes : nullptr;
      const auto beside = [&](int64_t word) {
        if (!asks) return;
        const int64_t line = word % kHalf * 128;
        call_near(near + line);
        call_near(near + line + 64);
        if (half && single) return;
        call_far(far + line);
        call_far(far + line + 64);
      };
      const int64_t begin = half * kHalf;
      if (count >= kElements)
        add_words<Cache, kRows, kChunks, true>(now, queries + at, dim, begin, begin + kHalf, count, total, beside);
      else
        add_words<Cache, kRows, kChunks, false>(now, queries + at, dim, begin, begin + kHalf, count, total, beside);
    };
    take(words[(piece + 1) % 2], piece + 1, 0);
    add(0);
    take(words[(piece + 1) % 2], piece + 1, 1);
    add(1);
  }
  UNROLLED for (int r = 0; r < kRows; ++r)
    UNROLLED for (int g = 0; g < kChunks * kOfChunk; ++g)
      store(scores[g / kOfChunk] + r * stride + g % kOfChunk * kLanes, total[r][g]);
}

// Vectors that are taken of a row's values at a time: of bfloat16 its even and its odd elements, which are expanded
// with half the work.
template <typename Cache>
constexpr int kTaken = Cache::kPerWord == 2 ? 2 : 1;

template <typename Cache>
[[gnu::always_inline]] inline void take_values(const char* from, Vec out[kTaken<Cache>]) {
  if constexpr (Cache::kPerWord == 2) {
    const Vec words = load(reinterpret_cast<const float*>(from));
    UNROLLED for (int j = 0; j < 2; ++j) out[j] = Cache::element(words, j);
  } else {
    out[0] = Cache::values(from);
  }
}

// Adds the values of `count` positions, weighted, to kRows sums of kVectors vectors; asks for as much at `ahead`. Sums
// stay in the order of `take_values` until `few_sums_in_order`.
template <typename Cache, int kRows, int kVectors>
inline void few_values(const float* weights, int64_t weights_stride, const Strided& values, int64_t count,
                       int64_t column, const char* ahead, float* sums, int64_t stride, bool fresh) {
  constexpr int kOut = kTaken<Cache>, kBytes = bytes_of<Cache>(kOut * kLanes);
  // All loops over sums are unrolled: only then do these become registers.
  Vec total[kRows][kVectors];
  UNROLLED for (int r = 0; r < kRows; ++r)
    UNROLLED for (int j = 0; j < kVectors; ++j) total[r][j] = fresh ? zero() : load(sums + r * stride + j * kLanes);
  for (int64_t at = 0; at < count; ++at) {
    Vec factor[kRows];
    UNROLLED for (int r = 0; r < kRows; ++r) factor[r] = set1(weights[r * weights_stride + at]);
    const char* from = values[at] + bytes_of<Cache>(column);
    const char* const far = ahead + at * values.stride + bytes_of<Cache>(column);
    UNROLLED for (int part = 0; part < kVectors / kOut; ++part) {
      Vec out[kOut];
      if (kBytes * part % 64 == 0) call_far(far + kBytes * part);
      take_values<Cache>(from + kBytes * part, out);
      UNROLLED for (int j = 0; j < kOut; ++j)
        UNROLLED for (int r = 0; r < kRows; ++r)
          total[r][part * kOut + j] = Float32Math::step(total[r][part * kOut + j], factor[r], out[j]);
    }
  }
  UNROLLED for (int r = 0; r < kRows; ++r)
    UNROLLED for (int j = 0; j < kVectors; ++j) store(sums + r * stride + j * kLanes, total[r][j]);
}

// Puts the sums of a row into the order of the elements.
template <typename Cache>
inline void few_sums_in_order(float* sums, int64_t width) {
  if constexpr (kTaken<Cache> == 2) {
    for (int64_t i = 0; i < width; i += 2 * kLanes) {
      Vec ordered[2];
      zip(load(sums + i), load(sums + i + kLanes), ordered);
      store(sums + i, ordered[0]);
      store(sums + i + kLanes, ordered[1]);
    }
  }
}

// Values of any width that is a multiple of what is taken at a time.
template <typename Cache, int kRows>
inline void few_products(const float* weights, int64_t weights_stride, const Strided& values, int64_t count,
                         int64_t width, const char* ahead, float* sums, bool fresh) {
  constexpr int kWide = kLanes == 16 ? (kRows <= 2 ? 8 : 4) : kRows <= 2 ? 8 / kRows : 2;
  int64_t column = 0;
  for (; column + kWide * kLanes <= width; column += kWide * kLanes) {
    few_values<Cache, kRows, kWide>(weights, weights_stride, values, count, column, ahead, sums + column, width, fresh);
  }
  for (; column < width; column += kTaken<Cache> * kLanes) {
    few_values<Cache, kRows, kTaken<Cache>>(weights, weights_stride, values, count, column, ahead, sums + column, width,
                                            fresh);
  }
}

}  // namespace millrace
